"""The examples run, from a fresh process, and do what they say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, warnings: str = "error") -> str:
    done = subprocess.run(
        [sys.executable, "-W", warnings, str(EXAMPLES / name)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_packed_projection_learns() -> None:
    """The loss falls, and every call is accounted for."""
    printed = run("packed_projection.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0] / 4
    assert printed.endswith("{'forward': {'cpu': 41}, 'backward': {'cpu': 41}}\n")


def test_own_backend_is_planned() -> None:
    """A new backend is chosen where it serves, and gives its reasons where not."""
    served, refused = run("own_backend.py").split("\n\nforward on ")
    assert "served by two-by-two (example)" in served
    assert "served by cpu (native)" in refused
    assert "no window masking" in refused
    assert "no softcap" in refused


def test_threads_in_lanes() -> None:
    """Answers from lanes are those of one thread alone."""
    assert run("serve_threads.py").splitlines()[-2:] == [
        "64 of 64 answers are those of one thread alone",
        "64 of 64 submitted, 0 lanes in use",
    ]


def test_queue_of_requests() -> None:
    """Every request is answered, in fewer batches than requests."""
    assert "200 answers" in run("serve_queue.py")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[serve]")
def test_serve_ray_answers() -> None:
    """Two replicas; Ray's own warnings are its own."""
    assert run("serve_ray.py", warnings="ignore").splitlines()[-1].startswith("64 answers")


def test_every_example_is_tested() -> None:
    """No example is left out above."""
    tested = Path(__file__).read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.name}"' in tested
