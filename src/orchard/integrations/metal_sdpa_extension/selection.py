"""Analysis of tensors and the choices made from it, under the names of `metal_sdpa_extension`."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.integrations.metal_sdpa_extension.config import (
    GRANULARITIES,
    PRECISIONS,
    STRATEGIES,
    BlockSizeConfig,
    HybridGranularityConfig,
    HybridStrategy,
    QuantizationConfig,
    QuantizationGranularity,
    QuantizationPrecision,
    member,
)
from orchard.quantization import TensorAnalysisMetrics, analyse, explain
from orchard.quantization.analysis import choose
from orchard.quantization.config import OPERANDS
from orchard.quantization.formats import Format, Granularity, Precision
from orchard.quantization.operands import four_axes

LARGEST_BLOCK = 256
SCALE_BYTES = 4
BITS = {"int8": 8, "int4": 4, "fp16": 16, "bf16": 16, "fp32": 32}
_BY_WORD = {word: granularity for granularity, word in GRANULARITIES.items()}


def analyze_tensor_characteristics(
    tensor: Tensor, precision: QuantizationPrecision
) -> TensorAnalysisMetrics:
    """What the values of a [B, H, S, D] tensor (or of fewer axes) are like."""
    return analyse(four_axes("tensor", tensor), Format(precision=_precision(precision)))


def select_optimal_granularity(
    metrics: TensorAnalysisMetrics,
    precision: QuantizationPrecision,
    strategy: HybridStrategy = HybridStrategy.BALANCED,
) -> QuantizationGranularity:
    """The coarsest granularity whose expected error the strategy allows."""
    aim = STRATEGIES[member(HybridStrategy, "strategy", strategy)]
    return _BY_WORD[choose(_measured(metrics), _precision(precision), aim).granularity]


def select_hybrid_granularities(
    query: Tensor, key: Tensor, value: Tensor, config: QuantizationConfig
) -> HybridGranularityConfig:
    """What a call with this configuration would choose, were its granularity HYBRID."""
    settings = replace(config.settings(), granularity="hybrid")
    call = explain(query, key, value, config=settings).call
    found = HybridGranularityConfig()
    reasons = []
    for name, (stored, _) in zip(OPERANDS, call[:3], strict=True):
        if stored.scales is None:
            reasons.append(f"{name}: {stored.format.precision} has no scales")
            continue
        setattr(found, f"{name}_granularity", _BY_WORD[stored.format.granularity])
        setattr(found, f"{name}_blocks", _blocks(settings.formats[name], stored.data.shape[2]))
        reasons.append(f"{name}: {stored.reasoning}")
    found.selection_reasoning = "\n".join(reasons)
    return found


def select_optimal_block_sizes(tensor: Tensor, precision: QuantizationPrecision) -> BlockSizeConfig:
    """The block sizes that adaptive blocks have for the length of this tensor."""
    form = Format(precision=_precision(precision), block_size=LARGEST_BLOCK, adaptive_blocks=True)
    return _blocks(form, four_axes("tensor", tensor).shape[2])


def estimate_quantization_overhead(
    granularity: QuantizationGranularity,
    tensor: Tensor | TensorAnalysisMetrics,
    precision: QuantizationPrecision,
) -> float:
    """Bytes with scales over bytes without; of a tensor, or of what was measured on one."""
    if isinstance(tensor, Tensor):
        tensor = analyze_tensor_characteristics(tensor, precision)
    metrics, bits = _measured(tensor), BITS[_precision(precision)]
    chosen = _settled(granularity, metrics, precision)
    if bits >= 16 or not metrics.tensor_size:
        return 1.0
    return 1.0 + SCALE_BYTES * metrics.scales_needed[chosen] * 8 / (bits * metrics.tensor_size)


def estimate_accuracy_loss(
    granularity: QuantizationGranularity,
    metrics: TensorAnalysisMetrics,
    precision: QuantizationPrecision,
) -> float:
    """The expected relative error (L2) of the stored values."""
    chosen = _settled(granularity, _measured(metrics), precision)
    return metrics.expected_error(chosen, _precision(precision))


def _precision(given: QuantizationPrecision) -> Precision:
    return PRECISIONS[member(QuantizationPrecision, "precision", given)]


def _settled(
    given: QuantizationGranularity, metrics: TensorAnalysisMetrics, precision: QuantizationPrecision
) -> Granularity:
    """The granularity by its word; hybrid is what the balanced strategy makes of it."""
    word = GRANULARITIES[member(QuantizationGranularity, "granularity", given)]
    if word == "hybrid":
        return choose(metrics, _precision(precision), "balanced").granularity
    return word


def _measured(metrics: TensorAnalysisMetrics) -> TensorAnalysisMetrics:
    if not isinstance(metrics, TensorAnalysisMetrics):
        raise ArgumentTypeError(f"metrics is {metrics!r}; it must be a TensorAnalysisMetrics")
    if not metrics.peak_ratios:
        raise ArgumentValueError(
            "metrics is empty; it must come from analyze_tensor_characteristics"
        )
    return metrics


def _blocks(form: Format, length: int) -> BlockSizeConfig:
    rows = form.rows_in_block(length)
    return BlockSizeConfig(rows, rows, rows, form.head_block_size)
