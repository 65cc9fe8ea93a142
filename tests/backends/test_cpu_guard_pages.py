"""Pages without access around every operand and output of the CPU kernels."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable

import pytest
from programs.guard_pages import cases

from orchard.testing.guard_pages import SIDES

pytestmark = [pytest.mark.layout, pytest.mark.grad, pytest.mark.slow]


def test_nothing_outside_is_touched(
    isa: str, run_program: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Forward and backward, each view, type and mask: no crash, and the bits of free memory."""
    done = run_program("guard_pages", ORCHARD_NUM_THREADS="2", PYTHONFAULTHANDLER="1")
    last = (done.stdout.splitlines() or ["no case at all"])[-1]
    assert done.returncode >= 0, f"{signal.Signals(-done.returncode).name} in: {last}"
    assert done.stderr == ""
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == len(SIDES) * len(list(cases()))
