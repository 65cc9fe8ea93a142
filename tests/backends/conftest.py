from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from orchard.backends.cpu import native
from orchard.backends.cuda import configs
from orchard.dispatch import planner

HERE = Path(__file__).parent
PATIENCE = 240  # seconds: a program that takes longer hangs


def _instruction_sets() -> list[object]:
    """Those of the CPU kernels that this machine runs, the best first."""
    try:
        return list(native.loaded().isa_available)
    except native.UnavailableError as error:
        return [pytest.param("", marks=pytest.mark.skip(reason=str(error)))]


@pytest.fixture(params=_instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """One instruction set after another, for the CPU kernels of this process and of programs."""
    name: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHARD_CPU_ISA", name)
        planner.reset()
        native.use_isa(name)
        yield name
        assert native.loaded().isa == name, "the test changed the instruction set"
    planner.reset()
    native.use_isa(None)


@pytest.fixture(autouse=True)
def user_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where a table of the user's would be: what somebody tuned here is not what is tested."""
    path = tmp_path / "user" / "cuda-tuning.json"
    monkeypatch.setattr(configs, "user_table", lambda: path)
    configs.of_the_user.cache_clear()
    yield path
    configs.of_the_user.cache_clear()


@pytest.fixture
def best_isa() -> None:
    """For a test that the instruction set does not matter to."""
    try:
        native.use_isa(None)
    except native.UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """For a test that changes how many threads torch uses: as many as before, afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_program() -> Run:
    """Run a module of programs/ in a process of its own, with these environment variables.

    Torch's own threads are left out: they do not survive a fork, and take the cores.
    """

    def run(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", f"programs.{program}", *arguments],
            cwd=HERE,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    return run
