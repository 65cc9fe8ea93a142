"""The exponential of the CPU kernels over its whole range."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from orchard.backends.cpu import native

pytestmark = pytest.mark.dtype

BOUND = 1.5e-7  # relative
LOWEST, HIGHEST = -126.0, 127.4  # where it holds
SOURCE = Path(__file__).parents[2] / "native" / "src" / "kernels" / "exp2.h"


def exp2(x: Tensor) -> Tensor:
    """By the kernels, into memory that begins as NaN."""
    y = torch.full_like(x, torch.nan)
    native.loaded().exp2(x.data_ptr(), y.data_ptr(), x.numel())
    return y


def test_bound_is_the_stated_one() -> None:
    """What is tested here is what the source promises."""
    stated = re.search(
        r"relative error below (\S+) .* for x in \[(\S+), (\S+)\]", SOURCE.read_text()
    )
    assert stated is not None
    assert tuple(map(float, stated.groups())) == (BOUND, LOWEST, HIGHEST)


def test_error_over_the_whole_range(isa: str) -> None:
    """Four million places, those around every whole and half number among them."""
    dense = torch.linspace(-150.0, 128.0, 4_000_000, dtype=torch.float64).float()
    edges = torch.arange(-300, 260) / 2.0
    step = torch.full_like(edges, torch.inf)
    near = [edges]
    for _ in range(4):
        near = [torch.nextafter(near[0], -step), *near, torch.nextafter(near[-1], step)]
    tiny = torch.tensor(2.0).pow(torch.arange(-149.0, 0.0))  # 1 + x ln 2, down to subnormal x
    x = torch.cat([dense, *near, tiny, -tiny])
    y, exact = exp2(x).double(), torch.exp2(x.double())

    held = (x >= LOWEST) & (x <= HIGHEST)
    error = ((y - exact).abs() / exact)[held]
    assert float(error.max()) < BOUND, f"at {x[held][error.argmax()].item()!r}"
    above = x > HIGHEST  # right as before, or infinite already
    assert bool(((y == torch.inf) | ((y - exact).abs() < BOUND * exact))[above].all())
    below = x < LOWEST  # the subnormal, or nothing
    least = 2.0**-149
    assert bool(((y == 0) | ((y - exact).abs() <= least))[below].all())
    assert bool((y[x < -150] == 0).all())


def test_special_values(isa: str) -> None:
    cases = [
        (0.0, 1.0),
        (-0.0, 1.0),
        (-1.0, 0.5),
        (-torch.inf, 0.0),
        (torch.inf, torch.inf),
        (-3.0e38, 0.0),
        (-1.0e4, 0.0),
        (3.0e38, torch.inf),
        (128.0, torch.inf),
    ]
    x, expected = torch.tensor(cases).unbind(1)
    assert torch.equal(exp2(x.contiguous()), expected)
    assert bool(exp2(torch.tensor([torch.nan])).isnan().all())


def test_whole_numbers_are_exact(isa: str) -> None:
    whole = torch.arange(LOWEST, 128.0)
    assert torch.equal(exp2(whole).double(), torch.exp2(whole.double()))


def test_any_length(isa: str) -> None:
    """Every element is written and none beyond, whatever the width of a vector; nor is it moved."""
    x = torch.linspace(-20, 20, 80)
    whole = exp2(x)
    for count in range(80):
        y = torch.full_like(x, torch.nan)
        native.loaded().exp2(x.data_ptr(), y.data_ptr(), count)
        assert torch.equal(y[:count], whole[:count])
        assert bool(y[count:].isnan().all())
