from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from orchard.testing import memory
from orchard.testing.memory import peak_memory, resident_growth, why_no_peak

MEGABYTE = 10**6


def allocate(megabytes: int) -> torch.Tensor:
    return torch.empty(megabytes * MEGABYTE, dtype=torch.uint8)


def test_peak_is_the_largest_sum_at_one_time() -> None:
    """10 MB, then 20 more after 10 are gone: 20 at once and not 30."""

    def step() -> None:
        allocate(10)
        held = [allocate(5), allocate(15)]
        held.clear()
        allocate(1)

    peak = peak_memory(step, "cpu")
    assert peak is not None
    assert 20 * MEGABYTE <= peak < 21 * MEGABYTE


def test_what_was_there_before_does_not_count() -> None:
    before = allocate(30)
    peak = peak_memory(lambda: (before, allocate(10)), "cpu")
    assert peak is not None
    assert 10 * MEGABYTE <= peak < 11 * MEGABYTE


def test_backward_counts() -> None:
    """Gradients are allocated by the same account."""
    weight = torch.ones(1000, 2500, requires_grad=True)
    peak = peak_memory(lambda: weight.sum().backward(), "cpu")
    assert peak is not None
    assert 10 * MEGABYTE <= peak < 25 * MEGABYTE


def test_a_step_that_allocates_nothing() -> None:
    assert peak_memory(lambda: None, torch.device("cpu")) == 0


def test_where_it_cannot_be_measured() -> None:
    """None with a reason, and the step is not run."""
    assert peak_memory(lambda: 1 / 0, "mps") is None
    assert "mps" in (why_no_peak("mps") or "")
    assert why_no_peak("cpu") is None


def test_an_error_in_the_step_comes_through(capfd: pytest.CaptureFixture[str]) -> None:
    """It is raised, the environment is as it was, and the profiler says nothing on the way."""
    environment = dict(os.environ)
    with pytest.raises(ZeroDivisionError):
        peak_memory(lambda: 1 / 0, "cpu")
    assert dict(os.environ) == environment
    assert peak_memory(lambda: allocate(1), "cpu") is not None
    assert capfd.readouterr().err == ""


def test_resident_growth_sees_what_torch_does_not_allocate() -> None:
    """80 MB of Python's, given back before the step ends."""
    growth = resident_growth(lambda: bytearray(b"x" * (40 * MEGABYTE)))
    if growth is None:
        pytest.skip("nobody says how large a process is here")
    assert 79 * MEGABYTE <= growth < 90 * MEGABYTE


def test_resident_growth_begins_anew() -> None:
    """A larger peak from before, and what is still held of it, do not count."""
    held = bytearray(b"x" * (40 * MEGABYTE))
    growth = resident_growth(lambda: bytearray(b"x" * (10 * MEGABYTE)))
    if not (memory.PROCESS / "clear_refs").exists():
        pytest.skip("the peak cannot be set back here")
    assert len(held) == 40 * MEGABYTE
    assert growth is not None
    assert 19 * MEGABYTE <= growth < 30 * MEGABYTE


def test_resident_growth_where_a_peak_cannot_be_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies above the largest size so far is still seen."""
    pytest.importorskip("resource")
    assert memory._largest_so_far() > 10 * MEGABYTE
    monkeypatch.setattr(memory, "PROCESS", tmp_path)
    sizes = iter([30, 45])
    monkeypatch.setattr(memory, "_largest_so_far", lambda: next(sizes))
    calls: list[int] = []
    assert resident_growth(lambda: calls.append(1)) == 15
    assert calls == [1]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_peak() -> None:
    before = torch.empty(30 * MEGABYTE, dtype=torch.uint8, device="cuda")
    peak = peak_memory(
        lambda: (before, torch.empty(10 * MEGABYTE, dtype=torch.uint8, device="cuda")), "cuda"
    )
    assert peak is not None
    assert 10 * MEGABYTE <= peak < 13 * MEGABYTE
