"""What a tensor's values say about how to store it, and the choice that hybrid makes from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from orchard.errors import ArgumentValueError
from orchard.quantization.formats import (
    LARGEST_LEVEL,
    PASS_THROUGH,
    Format,
    Granularity,
    Precision,
    Strategy,
    check_choice,
    largest_in_groups,
    row_peaks,
    spread_over_rows,
)

COARSE_TO_FINE: tuple[Granularity, ...] = ("tensor", "block", "row")
# How much more error than the finest granularity's a coarser one may have, to be preferred.
ALLOWANCE: dict[Strategy, float] = {
    "performance_first": 4.0,
    "balanced": 2.0,
    "accuracy_first": 1.0,
}
NEARLY_ZERO = 1e-6
OUTLIER_SHARE = 0.01
FP8_ERROR = 0.0265  # relative, of three mantissa bits on a logarithmically even magnitude


@dataclass(slots=True)
class TensorAnalysisMetrics:
    """What was measured on a tensor."""

    dynamic_range: float = 0.0  # largest value - smallest value
    variance: float = 0.0
    mean_abs_value: float = 0.0
    tensor_size: int = 0  # elements
    memory_footprint: int = 0  # bytes
    sparsity_ratio: float = 0.0  # share of values below 1e-6
    has_outliers: bool = False  # over 1 % of magnitudes beyond Q3 + 1.5 * (Q3 - Q1)
    quantization_error_estimate: float = 0.0  # mean square, symmetric, one scale for the tensor
    # For each granularity: root mean square of what a group's largest magnitude is, over the
    # values' own. An integer's expected relative error is this / (largest level * sqrt(12)).
    peak_ratios: Mapping[Granularity, float] = field(default_factory=dict)
    scales_needed: Mapping[Granularity, int] = field(default_factory=dict)

    def expected_error(self, granularity: Granularity, precision: Precision) -> float:
        """Expected relative error (L2) of storing the tensor so."""
        check_choice("granularity", granularity, COARSE_TO_FINE)
        if precision in PASS_THROUGH:
            return float(torch.finfo(PASS_THROUGH[precision]).eps) / math.sqrt(12.0)
        if precision == "fp8":
            return FP8_ERROR
        return self.peak_ratios[granularity] / (LARGEST_LEVEL[precision] * math.sqrt(12.0))


def analyse(tensor: Tensor, form: Format | None = None) -> TensorAnalysisMetrics:
    """Measure a [B, H, S, D] tensor; `form` says which precision and blocks are in question."""
    form = form or Format()
    values = tensor.detach().float()
    count = values.numel()
    if not count:
        return TensorAnalysisMetrics(
            peak_ratios=dict.fromkeys(COARSE_TO_FINE, 0.0),
            scales_needed=dict.fromkeys(COARSE_TO_FINE, 0),
        )
    low, high = (float(extreme) for extreme in torch.aminmax(values))
    if not math.isfinite(high - low):
        raise ArgumentValueError("the tensor holds NaN or Inf; it must be finite")
    unit = _unit(max(high, -low))
    values = values * (1.0 / unit)  # whose squares neither overflow nor vanish
    magnitudes = values.abs().flatten()
    size = float(magnitudes.square().mean().sqrt())
    peaks, ratios, scales = row_peaks(values), {}, {}
    for granularity in COARSE_TO_FINE:
        group = Format(
            granularity=granularity,
            precision=form.precision,
            block_size=form.block_size,
            head_block_size=form.head_block_size,
            adaptive_blocks=form.adaptive_blocks,
        ).group(values.shape)
        in_groups = largest_in_groups(peaks, group)
        of_rows = spread_over_rows(in_groups, group, peaks.shape)
        ratios[granularity] = float(of_rows.square().mean().sqrt()) / size if size else 0.0
        scales[granularity] = in_groups.numel()
    metrics = TensorAnalysisMetrics(
        dynamic_range=high - low,
        variance=float(values.var(correction=0)) * unit**2,
        mean_abs_value=float(magnitudes.mean()) * unit,
        tensor_size=count,
        memory_footprint=count * tensor.element_size(),
        sparsity_ratio=float((magnitudes < NEARLY_ZERO / unit).float().mean()),
        has_outliers=_has_outliers(magnitudes),
        peak_ratios=ratios,
        scales_needed=scales,
    )
    relative = metrics.expected_error("tensor", form.precision)
    metrics.quantization_error_estimate = (relative * size * unit) ** 2
    return metrics


def _unit(peak: float) -> float:
    """The power of 2 just above `peak`, as far as it and its reciprocal are normal in fp32."""
    return 2.0 ** min(max(math.frexp(peak)[1], -126), 126)


def _has_outliers(magnitudes: Tensor) -> bool:
    count = magnitudes.numel()
    first, third = (
        float(magnitudes.kthvalue(max(1, math.ceil(share * count))).values)
        for share in (0.25, 0.75)
    )
    beyond = float((magnitudes > third + 1.5 * (third - first)).float().mean())
    return beyond > OUTLIER_SHARE


class Choice(NamedTuple):
    """A granularity and the reasoning that led to it."""

    granularity: Granularity
    reasoning: str


def choose(metrics: TensorAnalysisMetrics, precision: Precision, strategy: Strategy) -> Choice:
    """The coarsest granularity whose expected error is within the strategy's allowance."""
    errors = {g: metrics.expected_error(g, precision) for g in COARSE_TO_FINE}
    allowance = ALLOWANCE[strategy]
    limit = allowance * errors["row"]
    chosen = next(g for g in COARSE_TO_FINE if errors[g] <= limit or g == "row")
    listed = ", ".join(f"{name} {error:.2%}" for name, error in errors.items())
    within = "no more than" if allowance == 1.0 else f"within {allowance:g} times"
    reasoning = f"{chosen}: expected error {listed}; {strategy} takes the coarsest {within} row's"
    return Choice(chosen, reasoning)


def finest(granularities: list[Granularity]) -> Granularity:
    """The finest of these, for operands that share one choice."""
    return max(granularities, key=COARSE_TO_FINE.index)
