"""Every field of QuantizationConfig takes effect, and in the documented way."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.quantization import (
    QuantizationConfig,
    QuantizedPlan,
    QuantizedTensor,
    explain,
    quantized_attention,
)
from orchard.quantization.config import OPERANDS

pytestmark = pytest.mark.dtype


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Heads of different sizes, keys far from 0, so that every field has something to change."""
    source = torch.Generator().manual_seed(5)
    sizes = torch.tensor([1.0, 1.0, 1.0, 3.0])[:, None, None]
    query, key, value = (torch.randn(2, 4, 150, 32, generator=source) for _ in range(3))
    return query, key * sizes + 4.0, value * sizes


@dataclass
class Seen:
    """What a configuration leads to."""

    plan: QuantizedPlan
    out: Tensor

    def stored(self, operand: str) -> QuantizedTensor:
        found: QuantizedTensor = getattr(self.plan.call, operand).stored
        return found

    def granularities(self) -> list[str]:
        return [self.stored(operand).format.granularity for operand in OPERANDS]


def see(config: QuantizationConfig) -> Seen:
    given = operands()
    return Seen(explain(*given, config=config), quantized_attention(*given, config=config))


def precision_of(operand: str) -> Callable[[Seen, Seen], None]:
    def check(before: Seen, after: Seen) -> None:
        """Half a byte for each element of that operand, and the others as they were."""
        elements = before.stored(operand).data.numel()
        assert after.stored(operand).data.numel() == elements // 2
        others_unchanged(operand, before, after)

    return check


def block_of(operand: str) -> Callable[[Seen, Seen], None]:
    def check(before: Seen, after: Seen) -> None:
        """A scale for 10 rows instead of 16: 15 for a head instead of 10."""
        assert before.stored(operand).parts["scales"].shape == (2, 4, 10)
        assert after.stored(operand).parts["scales"].shape == (2, 4, 15)
        others_unchanged(operand, before, after)

    return check


def others_unchanged(operand: str, before: Seen, after: Seen) -> None:
    for other in OPERANDS:
        if other != operand:
            assert torch.equal(before.stored(other).data, after.stored(other).data)
    assert not torch.equal(before.out, after.out)


def check_granularity(before: Seen, after: Seen) -> None:
    """A scale for each row."""
    assert before.granularities() == ["block"] * 3
    assert after.granularities() == ["row"] * 3
    assert after.stored("key").parts["scales"].shape == (2, 4, 150)
    assert after.stored("key").nbytes > before.stored("key").nbytes
    assert not torch.equal(before.out, after.out)


def check_head_block_size(before: Seen, after: Seen) -> None:
    """Two heads share a scale: half as many."""
    for operand in OPERANDS:
        assert before.stored(operand).parts["scales"].shape == (2, 4, 10)
        assert after.stored(operand).parts["scales"].shape == (2, 2, 10)
    assert not torch.equal(before.out, after.out)


def check_adaptive_blocks(before: Seen, after: Seen) -> None:
    """150 rows have blocks of 64 instead of 128."""
    assert before.stored("key").group == (1, 1, 128)
    assert after.stored("key").group == (1, 1, 64)
    assert after.stored("query").group == before.stored("query").group == (1, 1, 16)
    assert not torch.equal(before.out, after.out)


def check_symmetric(before: Seen, after: Seen) -> None:
    """Zero points appear, a byte for each scale, and values on one side of 0 gain a bit."""
    for operand in OPERANDS:
        assert before.stored(operand).zero_points is None
        zero_points = after.stored(operand).zero_points
        assert zero_points is not None
        assert after.stored(operand).nbytes - before.stored(operand).nbytes == zero_points.numel()
    errors = [seen.stored("key").error(operands()[1]).relative_l2 for seen in (before, after)]
    assert errors[1] < errors[0]
    assert not torch.equal(before.out, after.out)


def check_smooth_key(before: Seen, after: Seen) -> None:
    """Without it the key's mean stays in its levels, and they are coarser."""
    assert before.stored("key").mean is not None
    assert after.stored("key").mean is None
    errors = [seen.stored("key").error(operands()[1]).relative_l2 for seen in (before, after)]
    assert errors[0] < errors[1]
    others_unchanged("key", before, after)


def check_strategy(before: Seen, after: Seen) -> None:
    """Accuracy first takes a scale for each row where balanced took blocks."""
    assert before.stored("value").format.granularity == "block"
    assert after.stored("value").format.granularity == "row"
    assert "accuracy_first" in after.stored("value").reasoning
    assert not torch.equal(before.out, after.out)


def check_per_operand(before: Seen, after: Seen) -> None:
    """Together the operands take the finest choice of any of them."""
    assert before.granularities() == ["tensor", "block", "block"]
    assert after.granularities() == ["block"] * 3
    assert not torch.equal(before.out, after.out)


def check_output_precision(before: Seen, after: Seen) -> None:
    """The same result, in that dtype."""
    assert before.out.dtype == torch.float32
    assert torch.equal(after.out, before.out.to(torch.bfloat16))


HYBRID = {"granularity": "hybrid", "key_block_size": 16}
FIELDS: dict[str, tuple[dict[str, Any], Any, Callable[[Seen, Seen], None]]] = {
    "query_precision": ({}, "int4", precision_of("query")),
    "key_precision": ({}, "int4", precision_of("key")),
    "value_precision": ({}, "int4", precision_of("value")),
    "granularity": ({}, "row", check_granularity),
    "query_block_size": ({}, 10, block_of("query")),
    "key_block_size": ({}, 10, block_of("key")),
    "value_block_size": ({}, 10, block_of("value")),
    "head_block_size": ({}, 2, check_head_block_size),
    "adaptive_blocks": ({"key_block_size": 128}, True, check_adaptive_blocks),
    "symmetric": ({"smooth_key": False}, False, check_symmetric),
    "smooth_key": ({}, False, check_smooth_key),
    "hybrid_strategy": (HYBRID, "accuracy_first", check_strategy),
    "hybrid_per_operand": (HYBRID, False, check_per_operand),
    "output_precision": ({}, "bf16", check_output_precision),
}


@pytest.mark.parametrize("name", FIELDS)
def test_field_takes_effect(name: str) -> None:
    """Changing this field alone changes the plan, the bytes or the bits as documented."""
    given, other, check = FIELDS[name]
    base = QuantizationConfig(**given)
    changes: dict[str, Any] = {name: other}
    assert getattr(base, name) != other
    check(see(base), see(replace(base, **changes)))


def test_every_field_is_tested() -> None:
    """A new field comes with a test."""
    assert list(FIELDS) == [field.name for field in fields(QuantizationConfig)]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("operand", OPERANDS)
def test_any_precision_for_any_operand(operand: str, precision: str) -> None:
    """Precisions mix freely, and each is stored as it says."""
    dtypes = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "int8": torch.int8,
        "int4": torch.uint8,
        "fp8": torch.float8_e4m3fn,
    }
    chosen: dict[str, Any] = {f"{operand}_precision": precision}
    seen = see(QuantizationConfig(**chosen))
    assert seen.stored(operand).data.dtype == dtypes[precision]
    for other in OPERANDS:
        if other != operand:
            assert seen.stored(other).data.dtype == torch.int8


@pytest.mark.errors
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("query_precision", "int2"),
        ("key_precision", "INT8"),
        ("value_precision", None),
        ("granularity", "tensor_wise"),
        ("query_block_size", 0),
        ("key_block_size", -3),
        ("value_block_size", 1.5),
        ("head_block_size", True),
        ("adaptive_blocks", 1),
        ("symmetric", "no"),
        ("smooth_key", 0),
        ("hybrid_strategy", "best"),
        ("hybrid_per_operand", None),
        ("output_precision", "int8"),
    ],
)
def test_wrong_values(name: str, wrong: Any) -> None:
    """Whatever a field does not allow is an error when the configuration is made."""
    with pytest.raises(
        (ValueError, TypeError), match=re.escape(f"{name} is {wrong!r}; it must be")
    ):
        QuantizationConfig(**{name: wrong})
