"""Replicas on Ray Serve, each with a BatchQueue inside."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.serving.ray import Replica, deployment

PROGRAM = Path(__file__).parent / "programs/ray_replicas.py"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[serve]")
# Ray Serve's own models are written for an older pydantic.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@needs_ray
@pytest.mark.slow
@pytest.mark.integration
def test_a_replica_that_is_killed_loses_nothing() -> None:
    """Both hold requests when one dies: each of its requests is answered by the other."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["right"] == 60
    assert found["by_killed"] == 0
    assert found["by_living"] > 0
    assert found["errors"] == ["ValueError", "DeadlineExceeded"]
    assert found["limit"] == 8
    assert "a replica died with a request, which is sent again" in done.stderr


def test_a_replica_batches() -> None:
    """Concurrent requests of one replica are answered by one call, each with its rows."""
    calls: list[int] = []

    def make_model() -> torch.nn.Module:
        model = torch.nn.Identity().eval()
        model.register_forward_hook(lambda _module, _args, out: calls.append(len(out)))
        return model

    replica = Replica(make_model, {"max_batch": 6, "max_delay": 60.0})

    async def ask() -> list[torch.Tensor]:
        return await asyncio.gather(*(replica(torch.full((2, 1), float(n))) for n in range(3)))

    answers = asyncio.run(ask())
    assert [answer.tolist() for answer in answers] == [[[n], [n]] for n in (0.0, 1.0, 2.0)]
    assert calls == [6]
    assert replica.stats().completed == 3


@needs_ray
@quiet
def test_options_of_ray_and_of_the_queue() -> None:
    """A replica takes two batches' worth at once, unless told otherwise."""
    plain = deployment(torch.nn.Identity)._bound_deployment
    assert plain.max_ongoing_requests == 64
    sized = deployment(torch.nn.Identity, queue={"max_batch": 5}, num_replicas=3)._bound_deployment
    assert sized.max_ongoing_requests == 10
    assert sized.num_replicas == 3
    told = deployment(torch.nn.Identity, max_ongoing_requests=7)._bound_deployment
    assert told.max_ongoing_requests == 7


@needs_ray
@quiet
@pytest.mark.errors
def test_bad_arguments() -> None:
    with pytest.raises(ArgumentTypeError, match="make_model is a int; it must be callable"):
        deployment(3)
    with pytest.raises(ArgumentValueError, match="queue has pool, size; it may have max_batch,"):
        deployment(torch.nn.Identity, queue={"pool": None, "max_batch": 3, "size": 1})


def test_without_the_package() -> None:
    """The module imports without Ray, is not taken for it, and says what to install."""
    program = (
        "import sys\n"
        "import orchard.serving.ray\n"
        "assert 'ray' not in sys.modules\n"
        "sys.modules['ray'] = None\n"
        "try:\n"
        "    orchard.serving.ray.deployment(int)\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip().endswith("pip install 'orchard-attention[ray]'"), done.stderr
