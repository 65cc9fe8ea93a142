"""The configuration of a quantised call; docs/quantization.md says what every field does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from orchard.quantization.formats import (
    PASS_THROUGH,
    STRATEGIES,
    Format,
    Granularity,
    Precision,
    Strategy,
    check_choice,
    check_flag,
    check_precision,
    check_size,
)

Operand = Literal["query", "key", "value"]
OPERANDS: tuple[Operand, ...] = ("query", "key", "value")


@dataclass(frozen=True)
class QuantizationConfig:
    """How query, key and value are stored, and what the output is."""

    query_precision: Precision = "int8"
    key_precision: Precision = "int8"
    value_precision: Precision = "int8"
    granularity: Granularity = "block"
    query_block_size: int = 16
    key_block_size: int = 16
    value_block_size: int = 16
    head_block_size: int = 1
    adaptive_blocks: bool = False
    symmetric: bool = True
    smooth_key: bool = True
    hybrid_strategy: Strategy = "balanced"
    hybrid_per_operand: bool = True
    output_precision: Literal["fp32", "fp16", "bf16"] | None = None  # None: the query's own

    def __post_init__(self) -> None:
        for operand in OPERANDS:
            for part, check in (("precision", check_precision), ("block_size", check_size)):
                check(f"{operand}_{part}", getattr(self, f"{operand}_{part}"))
        check_choice("hybrid_strategy", self.hybrid_strategy, STRATEGIES)
        check_flag("smooth_key", self.smooth_key)
        check_flag("hybrid_per_operand", self.hybrid_per_operand)
        if self.output_precision is not None:
            check_choice("output_precision", self.output_precision, tuple(PASS_THROUGH))
        _ = self.formats  # which checks the fields that have the same name there

    @cached_property
    def formats(self) -> dict[str, Format]:
        """What this configuration asks for each operand."""
        return {operand: self._format(operand) for operand in OPERANDS}

    def _format(self, operand: Operand) -> Format:
        precision: Precision = getattr(self, f"{operand}_precision")
        return Format(
            precision=precision,
            granularity=self.granularity,
            block_size=getattr(self, f"{operand}_block_size"),
            head_block_size=self.head_block_size,
            symmetric=self.symmetric,
            smooth=self.smooth_key and operand == "key" and precision not in PASS_THROUGH,
            adaptive_blocks=self.adaptive_blocks,
            strategy=self.hybrid_strategy,
        )
