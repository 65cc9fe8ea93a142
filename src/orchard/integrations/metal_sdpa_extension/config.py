"""The configuration objects of `metal_sdpa_extension`, and their meaning in Orchard's terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, TypeVar, overload

from orchard.attention.api import check_number
from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.quantization import QuantizationConfig as Settings
from orchard.quantization.config import OPERANDS
from orchard.quantization.formats import Granularity, Precision, Strategy, check_flag


class QuantizationPrecision(IntEnum):
    FP16 = 0
    BF16 = 1
    FP32 = 2
    INT8 = 3
    INT4 = 4


class QuantizationGranularity(IntEnum):
    TENSOR_WISE = 0
    ROW_WISE = 1
    BLOCK_WISE = 2
    HYBRID = 3


class HybridStrategy(IntEnum):
    PERFORMANCE_FIRST = 0
    ACCURACY_FIRST = 1
    BALANCED = 2


class OutputPrecision(IntEnum):
    FP32 = 0
    FP16 = 1
    BF16 = 2


PRECISIONS: dict[QuantizationPrecision, Precision] = {
    QuantizationPrecision.FP16: "fp16",
    QuantizationPrecision.BF16: "bf16",
    QuantizationPrecision.FP32: "fp32",
    QuantizationPrecision.INT8: "int8",
    QuantizationPrecision.INT4: "int4",
}
GRANULARITIES: dict[QuantizationGranularity, Granularity] = {
    QuantizationGranularity.TENSOR_WISE: "tensor",
    QuantizationGranularity.ROW_WISE: "row",
    QuantizationGranularity.BLOCK_WISE: "block",
    QuantizationGranularity.HYBRID: "hybrid",
}
STRATEGIES: dict[HybridStrategy, Strategy] = {
    HybridStrategy.PERFORMANCE_FIRST: "performance_first",
    HybridStrategy.ACCURACY_FIRST: "accuracy_first",
    HybridStrategy.BALANCED: "balanced",
}
_OUTPUTS: dict[OutputPrecision, Literal["fp32", "fp16", "bf16"]] = {
    OutputPrecision.FP32: "fp32",
    OutputPrecision.FP16: "fp16",
    OutputPrecision.BF16: "bf16",
}
_BY_WORD = {word: granularity for granularity, word in GRANULARITIES.items()}
_LONG_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_E = TypeVar("_E", bound=IntEnum)


def member(kind: type[_E], name: str, given: object) -> _E:
    """`given` as a member of the enum; whatever is not one is refused."""
    if (type(given) is int or isinstance(given, kind)) and given in list(kind):
        return kind(given)
    allowed = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
    raise ArgumentValueError(f"{name} is {given!r}; it must be one of {allowed}")


def _named(name: str, given: object, names: dict[str, _E]) -> _E:
    if isinstance(given, str) and given in names:
        return names[given]
    allowed = ", ".join(repr(known) for known in names)
    raise ArgumentValueError(f"{name} is {given!r}; it must be one of {allowed}")


@dataclass(slots=True, init=False)
class BlockSizeConfig:
    """Rows of a block for each operand, and heads of a block."""

    query_block_size: int
    key_block_size: int
    value_block_size: int
    head_block_size: int

    @overload
    def __init__(self) -> None: ...

    @overload
    def __init__(self, q_blk: int, k_blk: int, v_blk: int, h_blk: int = 1) -> None: ...

    def __init__(self, *sizes: int, **named: int) -> None:
        """Without arguments 128, 64, 64 and 1; else q_blk, k_blk, v_blk and, if not 1, h_blk."""
        if not sizes and not named:
            sizes = (128, 64, 64)
        self._set(*sizes, **named)

    def _set(self, q_blk: int, k_blk: int, v_blk: int, h_blk: int = 1) -> None:
        self.query_block_size = q_blk
        self.key_block_size = k_blk
        self.value_block_size = v_blk
        self.head_block_size = h_blk


@dataclass(slots=True)
class HybridGranularityConfig:
    """What hybrid selection chose, and why."""

    query_granularity: QuantizationGranularity = QuantizationGranularity.TENSOR_WISE
    key_granularity: QuantizationGranularity = QuantizationGranularity.TENSOR_WISE
    value_granularity: QuantizationGranularity = QuantizationGranularity.TENSOR_WISE
    query_blocks: BlockSizeConfig = field(default_factory=BlockSizeConfig)
    key_blocks: BlockSizeConfig = field(default_factory=BlockSizeConfig)
    value_blocks: BlockSizeConfig = field(default_factory=BlockSizeConfig)
    selection_reasoning: str = ""


@dataclass(slots=True)
class QuantizationConfig:
    """The settings of a quantised call."""

    precision: str = "int8"  # of every operand, where mixed precision is not enabled
    query_precision: QuantizationPrecision = QuantizationPrecision.FP16
    key_precision: QuantizationPrecision = QuantizationPrecision.INT8
    value_precision: QuantizationPrecision = QuantizationPrecision.INT8
    granularity: QuantizationGranularity = QuantizationGranularity.TENSOR_WISE
    block_sizes: BlockSizeConfig = field(default_factory=BlockSizeConfig)
    output_precision: OutputPrecision = OutputPrecision.FP32
    is_causal: bool = False
    scale: float | None = None
    enable_mixed_precision: bool = True  # False: `precision` for query, key and value
    force_symmetric_quantization: bool = False
    hybrid_strategy: HybridStrategy = HybridStrategy.BALANCED
    enable_per_tensor_granularity: bool = False  # hybrid chooses for each operand by itself
    enable_adaptive_block_sizes: bool = True  # block_sizes are then the largest

    @staticmethod
    def string_to_quantization_precision(precision_str: str) -> QuantizationPrecision:
        names: dict[str, QuantizationPrecision] = {w: m for m, w in PRECISIONS.items()}
        names |= {long: names[short] for long, short in _LONG_NAMES.items()}
        return _named("precision_str", precision_str, names)

    @staticmethod
    def string_to_precision(precision_str: str) -> OutputPrecision:
        names: dict[str, OutputPrecision] = {w: m for m, w in _OUTPUTS.items()}
        names |= {long: names[short] for long, short in _LONG_NAMES.items()}
        return _named("precision_str", precision_str, names)

    @staticmethod
    def string_to_granularity(granularity_str: str) -> QuantizationGranularity:
        names: dict[str, QuantizationGranularity] = {
            member.name.lower(): member for member in QuantizationGranularity
        }
        return _named("granularity_str", granularity_str, names | _BY_WORD)

    @staticmethod
    def precision_to_string(precision: OutputPrecision) -> str:
        return _OUTPUTS[member(OutputPrecision, "precision", precision)]

    @staticmethod
    def quantization_precision_to_string(precision: QuantizationPrecision) -> str:
        return PRECISIONS[member(QuantizationPrecision, "precision", precision)]

    @staticmethod
    def granularity_to_string(granularity: QuantizationGranularity) -> str:
        return member(QuantizationGranularity, "granularity", granularity).name.lower()

    def validate_config(self) -> None:
        """Raise for whatever is not allowed, in any field."""
        self.settings()

    def get_recommended_output_precision(self) -> OutputPrecision:
        """fp16 where an operand is an integer, else the query's."""
        words = {getattr(self.settings(), f"{operand}_precision") for operand in OPERANDS}
        if words & {"int8", "int4"}:
            return OutputPrecision.FP16
        return self.string_to_precision(self.settings().query_precision)

    def settings(self) -> Settings:
        """The same in Orchard's own terms."""
        blocks = self.block_sizes
        if not isinstance(blocks, BlockSizeConfig):
            raise ArgumentTypeError(f"block_sizes is {blocks!r}; it must be a BlockSizeConfig")
        check_flag("is_causal", self.is_causal)
        if self.scale is not None:
            check_number("scale", self.scale)
        check_flag("enable_mixed_precision", self.enable_mixed_precision)
        legacy = self.string_to_quantization_precision(self.precision)
        mixed = (self.query_precision, self.key_precision, self.value_precision)
        query, key, value = (
            PRECISIONS[member(QuantizationPrecision, f"{operand}_precision", precision)]
            for operand, precision in zip(
                OPERANDS, mixed if self.enable_mixed_precision else (legacy,) * 3, strict=True
            )
        )
        granularity = member(QuantizationGranularity, "granularity", self.granularity)
        strategy = member(HybridStrategy, "hybrid_strategy", self.hybrid_strategy)
        output = member(OutputPrecision, "output_precision", self.output_precision)
        return Settings(
            query_precision=query,
            key_precision=key,
            value_precision=value,
            granularity=GRANULARITIES[granularity],
            query_block_size=blocks.query_block_size,
            key_block_size=blocks.key_block_size,
            value_block_size=blocks.value_block_size,
            head_block_size=blocks.head_block_size,
            adaptive_blocks=self.enable_adaptive_block_sizes,
            symmetric=self.force_symmetric_quantization,
            smooth_key=False,
            hybrid_strategy=STRATEGIES[strategy],
            hybrid_per_operand=self.enable_per_tensor_granularity,
            output_precision=_OUTPUTS[output],
        )
