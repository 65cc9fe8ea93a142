"""What is measured on a tensor, and what hybrid makes of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from orchard.errors import ArgumentValueError
from orchard.quantization import QuantizationConfig, analyse, explain, quantize
from orchard.quantization.analysis import COARSE_TO_FINE, choose, finest
from orchard.quantization.formats import Format

ALIKE = torch.ones(1, 2, 64, 16) * torch.tensor([1.0, -1.0]).repeat(8)


def mixed_rows() -> Tensor:
    """Rows whose sizes span five powers of ten, side by side."""
    sizes = 10.0 ** torch.arange(64).remainder(5)
    return ALIKE * sizes[:, None]


def test_measured_by_hand() -> None:
    """Every number of a tensor small enough to work out."""
    values = torch.tensor([[0.0, 1e-7, 1.0, -3.0]])[None, None]
    found = analyse(values)
    mean = (1.0 - 3.0 + 1e-7) / 4
    assert found.dynamic_range == 4.0
    assert found.tensor_size == 4
    assert found.memory_footprint == 16
    assert found.sparsity_ratio == 0.5
    assert found.mean_abs_value == pytest.approx(1.0, rel=1e-6)
    assert found.variance == pytest.approx(10.0 / 4 - mean**2, rel=1e-6)
    assert found.scales_needed == {"tensor": 1, "block": 1, "row": 1}
    assert found.peak_ratios["row"] == pytest.approx(3.0 / math.sqrt(10.0 / 4), rel=1e-6)
    step = 3.0 / 127
    assert found.quantization_error_estimate == pytest.approx(step**2 / 12, rel=1e-5)


@pytest.mark.parametrize("power", [-149, -110, -60, 60, 110, 117])
def test_any_magnitude(power: int) -> None:
    """A tensor times a power of 2 has the same ratios, and moments that are multiplied so."""
    drawn = torch.randint(-7, 8, (1, 2, 64, 16), generator=torch.Generator().manual_seed(0))
    values = drawn.float() * (2.0 ** (torch.arange(64) % 7))[:, None]
    by = 2.0**power
    known, found = analyse(values), analyse(values.double().mul(by).float())
    assert found.peak_ratios == known.peak_ratios
    assert found.has_outliers == known.has_outliers
    assert found.dynamic_range == known.dynamic_range * by
    assert found.mean_abs_value == known.mean_abs_value * by
    assert found.variance == pytest.approx(known.variance * by**2, rel=1e-6)
    expected = known.quantization_error_estimate * by**2
    assert found.quantization_error_estimate == pytest.approx(expected, rel=1e-6)
    assert choose(known, "int8", "balanced").granularity == "row"
    assert choose(found, "int8", "balanced").granularity == "row"


def test_outliers() -> None:
    """More than one magnitude in a hundred beyond Q3 + 1.5 * (Q3 - Q1)."""
    even = torch.linspace(0.0, 1.0, 1000).view(1, 1, 10, 100)
    assert not analyse(even).has_outliers
    few, many = even.clone(), even.clone()
    few.view(-1)[:10] = 9.0
    many.view(-1)[:11] = 9.0
    assert not analyse(few).has_outliers
    assert analyse(many).has_outliers


def test_expected_error_orders_as_the_real_one() -> None:
    """What is expected to be better is better, over precisions and granularities."""
    tensor = torch.randn(2, 4, 128, 64) * torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None, None]
    metrics, expected, real = analyse(tensor), {}, {}
    for precision in ("int8", "int4"):
        for granularity in COARSE_TO_FINE:
            stored = quantize(tensor, precision, granularity)
            real[precision, granularity] = stored.error(tensor).relative_l2
            expected[precision, granularity] = metrics.expected_error(granularity, precision)
    assert sorted(expected, key=expected.__getitem__) == sorted(real, key=real.__getitem__)


def test_strategies_differ() -> None:
    """On the same tensor each strategy draws its own line between error and number of scales."""
    tensor = torch.randn(1, 4, 256, 64, generator=torch.Generator().manual_seed(0))
    tensor *= torch.tensor([1.0, 1.0, 1.0, 3.0])[:, None, None]
    metrics = analyse(tensor, Format(block_size=64))
    errors = {g: metrics.expected_error(g, "int8") for g in COARSE_TO_FINE}
    assert errors["block"] < 2 * errors["row"] < errors["tensor"] < 4 * errors["row"]
    chosen = {
        strategy: choose(metrics, "int8", strategy).granularity
        for strategy in ("performance_first", "balanced", "accuracy_first")
    }
    assert chosen == {
        "performance_first": "tensor",
        "balanced": "block",
        "accuracy_first": "row",
    }


def test_equal_errors_take_the_coarsest() -> None:
    """Where finer scales gain nothing there are none."""
    for strategy in ("performance_first", "balanced", "accuracy_first"):
        assert choose(analyse(ALIKE), "int8", strategy).granularity == "tensor"


def test_reasoning_is_readable() -> None:
    """The choice, the expected errors and the rule stand in the plan."""
    stored = quantize(mixed_rows(), granularity="hybrid", strategy="balanced")
    assert stored.format.granularity == "row"
    assert stored.reasoning.startswith("row: expected error tensor ")
    assert stored.reasoning.endswith("balanced takes the coarsest within 2 times row's")
    plan = explain(mixed_rows(), ALIKE, ALIKE, config=QuantizationConfig(granularity="hybrid"))
    assert [operand.stored.format.granularity for operand in plan.call[:3]] == [
        *("row", "tensor", "tensor")
    ]
    words = " ".join(str(plan).split())
    assert "row's" in words
    assert "tensor: expected error" in " ".join(plan.call.key.stored.reasoning.split())


def test_one_choice_is_the_finest() -> None:
    """Together, the operands take the finest granularity that one of them needs."""
    config = QuantizationConfig(granularity="hybrid", hybrid_per_operand=False)
    plan = explain(ALIKE, mixed_rows(), ALIKE, config=config)
    assert {operand.stored.format.granularity for operand in plan.call[:3]} == {"row"}
    assert plan.call.query.stored.reasoning.startswith("row for every operand; alone tensor")
    assert finest(["tensor", "row", "block"]) == "row"


def test_analysis_is_of_the_smoothed_key() -> None:
    """Rows that look alike beside a large mean are told apart once it is taken out."""
    pairs = 10.0 ** torch.arange(32).remainder(5).repeat_interleave(2)
    signs = torch.tensor([1.0, -1.0]).repeat(32)  # the mean of the rest is 0
    key = ALIKE * (pairs * signs)[:, None] + 1e5
    chosen = [
        explain(ALIKE, key, ALIKE, config=QuantizationConfig(granularity="hybrid", smooth_key=s))
        for s in (True, False)
    ]
    assert [plan.call.key.stored.format.granularity for plan in chosen] == ["row", "tensor"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_is_refused(bad: float) -> None:
    tensor = torch.randn(1, 1, 4, 8)
    tensor[0, 0, 2, 3] = bad
    with pytest.raises(ArgumentValueError, match="NaN or Inf"):
        analyse(tensor)


def test_unknown_granularity() -> None:
    """Hybrid is no granularity to expect an error of."""
    with pytest.raises(ArgumentValueError, match="granularity is 'hybrid'"):
        analyse(ALIKE).expected_error("hybrid", "int8")
