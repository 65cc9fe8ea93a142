"""StreamPool where processes end, fork and spawn: each program runs in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from orchard.testing.serving_programs import (
    CUDA_PROGRAMS,
    POOL_EXITS,
    POOL_FORKS,
    SPAWN_PRINTS,
    pool_program,
    spawn_program,
)

REPEATS = 2  # of each program here; a stress run asks for more
DEADLINE = 120.0  # seconds for one process


def outcomes(code: str, times: int) -> list[tuple[int, str, str]]:
    """Status, output and errors of that many fresh processes, two of them at a time."""

    def run(_: int) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    with ThreadPoolExecutor(2) as pairs:
        return list(pairs.map(run, range(times)))


@pytest.mark.stress
@pytest.mark.parametrize("name", POOL_EXITS)
def test_exit_is_clean_and_silent(name: str) -> None:
    """Status 0 and not a word of ours, every time."""
    body, printed = POOL_EXITS[name]
    assert outcomes(pool_program(body), REPEATS) == [(0, printed, "")] * REPEATS


@pytest.mark.stress
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("name", POOL_FORKS)
def test_forks(name: str) -> None:
    """The child's pool works, in a block begun before too; the parent goes on.

    And a fork waits for a thread that runs and that Python does not know.
    """
    body, printed = POOL_FORKS[name]
    assert outcomes(pool_program(body), 1) == [(0, printed, "")]


@pytest.mark.stress
def test_spawned_processes_compute(tmp_path: Path) -> None:
    """Each with a pool of its own, bit for bit what this process finds."""
    script = tmp_path / "spawn.py"
    script.write_text(spawn_program())
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, SPAWN_PRINTS, "")


@pytest.mark.cuda
@pytest.mark.stress
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", CUDA_PROGRAMS)
def test_cuda_processes(name: str) -> None:
    """A forked child is told to spawn, and a busy device does not disturb the end."""
    body, printed = CUDA_PROGRAMS[name]
    assert outcomes(pool_program(body), REPEATS) == [(0, printed, "")] * REPEATS


def test_every_program_could_fail() -> None:
    """The runner sees a signal, an error and a word on standard error."""
    found = outcomes("import os, sys; sys.stderr.write('x'); os.kill(os.getpid(), 6)", 1)
    assert found == [(-6, "", "")] or found == [(-6, "", "x")]
    assert outcomes("print(1); raise SystemExit(3)", 1) == [(3, "1\n", "")]
