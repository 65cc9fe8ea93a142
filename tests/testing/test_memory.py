from __future__ import annotations

import os

import pytest
import torch

from orchard.testing.memory import peak_memory, why_no_peak

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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_peak() -> None:
    before = torch.empty(30 * MEGABYTE, dtype=torch.uint8, device="cuda")
    peak = peak_memory(
        lambda: (before, torch.empty(10 * MEGABYTE, dtype=torch.uint8, device="cuda")), "cuda"
    )
    assert peak is not None
    assert 10 * MEGABYTE <= peak < 13 * MEGABYTE
