"""Memory of the CPU kernels: how much they need, and what happens when it is not there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from orchard.testing.benchmark import Case
from orchard.testing.footprint import footprint

pytestmark = pytest.mark.stress

SEQUENCE = 4096
# 64 MB are allowed at a sequence of 16384, and what is kept for each row grows with the rows.
MOST_EXTRA = 64_000_000 * SEQUENCE // 16384


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extra_memory(dtype: torch.dtype, best_isa: None) -> None:
    """Forward and backward, beyond operands and results: far less than one head's scores."""
    case = Case(
        "long",
        dtype=dtype,
        batch=1,
        heads=8,
        kv_heads=8,
        rows=SEQUENCE,
        keys=SEQUENCE,
        dim=64,
        value_dim=64,
        backward=True,
    )
    measured = footprint(case, "cpu")
    assert measured.row.ours.status == "ok", measured.row.ours.note
    assert measured.row.served == {"forward": "cpu", "backward": "cpu"}
    assert measured.extra is not None
    assert measured.extra < MOST_EXTRA


@pytest.mark.skipif(sys.platform != "linux", reason="the program asks Linux what is in use")
def test_out_of_memory_is_an_exception(
    isa: str, run_program: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """With little address space to spare a call raises or is right, and the next one works."""
    done = run_program("memory_limit", ORCHARD_NUM_THREADS="4")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    complaints, *lines = done.stdout.splitlines()
    assert complaints == "[]"
    outcomes = [line.split(" ", 1)[1] for line in lines]
    assert outcomes[0].startswith("OutOfMemoryError: ")
    assert outcomes[-1] == "right"
    raised = [each for each in outcomes if each != "right"]
    assert [each for each in raised if not each.startswith(("OutOfMemoryError", "Memory"))] == []
