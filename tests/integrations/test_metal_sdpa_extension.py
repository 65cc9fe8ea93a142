"""The drop-in for metal_sdpa_extension: its names and defaults, and every setting real."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import orchard
from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.integrations import metal_sdpa_extension as extension
from orchard.integrations.metal_sdpa_extension import (
    BlockSizeConfig,
    HybridGranularityConfig,
    HybridStrategy,
    OutputPrecision,
    QuantizationConfig,
    QuantizationGranularity,
    QuantizationPrecision,
    TensorAnalysisMetrics,
)
from orchard.integrations.metal_sdpa_extension.shim import main
from orchard.quantization import QuantizationConfig as Settings
from orchard.quantization import quantized_attention

pytestmark = pytest.mark.integration
unified = extension.quantized_scaled_dot_product_attention_unified


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """No mode, no counts and no registration before and after."""
    extension.reset_dispatch_stats()
    yield
    extension.clear_quantization_mode()
    extension.unregister_backend()


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Heads of different sizes and values on one side of 0, so that every field has work."""
    source = torch.Generator().manual_seed(5)
    sizes = torch.tensor([1.0, 1.0, 1.0, 3.0])[:, None, None]
    query, key, value = (torch.randn(2, 4, 150, 32, generator=source) for _ in range(3))
    return [t.to(dtype) for t in (query, key * sizes + 4.0, value * sizes)]


def settings_in(config: Any) -> dict[str, Any]:
    """The fields of a configuration object, by name."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


# Names, values and defaults


def test_enums() -> None:
    """Every member has its value."""
    assert {e.name: int(e) for e in QuantizationPrecision} == {
        "FP16": 0,
        "BF16": 1,
        "FP32": 2,
        "INT8": 3,
        "INT4": 4,
    }
    assert {e.name: int(e) for e in QuantizationGranularity} == {
        "TENSOR_WISE": 0,
        "ROW_WISE": 1,
        "BLOCK_WISE": 2,
        "HYBRID": 3,
    }
    assert {e.name: int(e) for e in HybridStrategy} == {
        "PERFORMANCE_FIRST": 0,
        "ACCURACY_FIRST": 1,
        "BALANCED": 2,
    }
    assert {e.name: int(e) for e in OutputPrecision} == {"FP32": 0, "FP16": 1, "BF16": 2}
    constants = ("NONE", "INT8", "INT4", "TENSOR_WISE", "BLOCK_WISE")
    assert [getattr(extension, f"QUANT_{name}") for name in constants] == [0, 3, 4, 0, 2]


def test_defaults() -> None:
    """Every field has its default."""
    assert settings_in(BlockSizeConfig()) == {
        "query_block_size": 128,
        "key_block_size": 64,
        "value_block_size": 64,
        "head_block_size": 1,
    }
    assert BlockSizeConfig(1, 2, 3) == BlockSizeConfig(q_blk=1, k_blk=2, v_blk=3, h_blk=1)
    assert settings_in(BlockSizeConfig(5, 6, v_blk=7, h_blk=8)) == {
        "query_block_size": 5,
        "key_block_size": 6,
        "value_block_size": 7,
        "head_block_size": 8,
    }
    assert settings_in(QuantizationConfig()) == {
        "precision": "int8",
        "query_precision": QuantizationPrecision.FP16,
        "key_precision": QuantizationPrecision.INT8,
        "value_precision": QuantizationPrecision.INT8,
        "granularity": QuantizationGranularity.TENSOR_WISE,
        "block_sizes": BlockSizeConfig(),
        "output_precision": OutputPrecision.FP32,
        "is_causal": False,
        "scale": None,
        "enable_mixed_precision": True,
        "force_symmetric_quantization": False,
        "hybrid_strategy": HybridStrategy.BALANCED,
        "enable_per_tensor_granularity": False,
        "enable_adaptive_block_sizes": True,
    }
    tensor_wise = QuantizationGranularity.TENSOR_WISE
    assert settings_in(HybridGranularityConfig()) == {
        **{f"{n}_granularity": tensor_wise for n in ("query", "key", "value")},
        **{f"{n}_blocks": BlockSizeConfig() for n in ("query", "key", "value")},
        "selection_reasoning": "",
    }
    blank = settings_in(TensorAnalysisMetrics())
    for name in (
        *("dynamic_range", "variance", "mean_abs_value", "tensor_size", "memory_footprint"),
        *("sparsity_ratio", "has_outliers", "quantization_error_estimate"),
    ):
        assert blank[name] == 0


@pytest.mark.errors
@pytest.mark.parametrize(
    "config",
    [BlockSizeConfig(), HybridGranularityConfig(), QuantizationConfig(), TensorAnalysisMetrics()],
    ids=lambda config: type(config).__name__,
)
def test_misspelt_fields_are_errors(config: Any) -> None:
    """Setting a field that there is not raises, instead of being without effect."""
    for field in fields(config):
        setattr(config, field.name, getattr(config, field.name))
        with pytest.raises(AttributeError, match=f"{field.name[:-1]}"):
            setattr(config, field.name[:-1], None)


@pytest.mark.errors
@pytest.mark.parametrize(
    ("sizes", "named"), [((64,), {}), ((), {"h_blk": 2}), ((1, 2, 3), {"z": 1}), ((1,) * 5, {})]
)
def test_block_sizes_are_none_or_all(sizes: tuple[int, ...], named: dict[str, int]) -> None:
    """One size says nothing about the others, and is refused."""
    make: Any = BlockSizeConfig
    with pytest.raises(TypeError, match="argument"):
        make(*sizes, **named)


def test_small_answers() -> None:
    """The version of the interface, Metal's presence, and names that are left out in words."""
    assert extension.get_version() == (1, 0, 0)
    assert extension.is_metal_available() == torch.backends.mps.is_available()
    with pytest.raises(AttributeError, match="has no MlaContext: it concerns Metal's own"):
        _ = extension.MlaContext
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = extension.nothing
    assert extension.__all__ == sorted(extension.__all__, key=_sorted_as_ruff)


def _sorted_as_ruff(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


# Every field


BLOCKS = {"granularity": QuantizationGranularity.BLOCK_WISE}
HYBRID = {"granularity": QuantizationGranularity.HYBRID}
FIELDS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    # name: (other fields, another value, what changes in Orchard's own configuration)
    "precision": (
        {"enable_mixed_precision": False},
        "int4",
        {f"{n}_precision": "int4" for n in ("query", "key", "value")},
    ),
    "query_precision": ({}, QuantizationPrecision.INT8, {"query_precision": "int8"}),
    "key_precision": ({}, QuantizationPrecision.INT4, {"key_precision": "int4"}),
    "value_precision": ({}, QuantizationPrecision.BF16, {"value_precision": "bf16"}),
    "granularity": ({}, QuantizationGranularity.ROW_WISE, {"granularity": "row"}),
    "block_sizes": (BLOCKS, BlockSizeConfig(128, 32, 64), {"key_block_size": 32}),
    "output_precision": ({}, OutputPrecision.BF16, {"output_precision": "bf16"}),
    "is_causal": ({}, True, {}),
    "scale": ({}, 0.5, {}),
    "enable_mixed_precision": ({}, False, {"query_precision": "int8"}),
    "force_symmetric_quantization": ({}, True, {"symmetric": True}),
    "hybrid_strategy": (
        HYBRID,
        HybridStrategy.ACCURACY_FIRST,
        {"hybrid_strategy": "accuracy_first"},
    ),
    "enable_per_tensor_granularity": (
        {**HYBRID, "query_precision": QuantizationPrecision.INT8},
        True,
        {"hybrid_per_operand": True},
    ),
    "enable_adaptive_block_sizes": (
        {**BLOCKS, "block_sizes": BlockSizeConfig(128, 128, 128)},
        False,
        {"adaptive_blocks": False},
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_field_takes_effect(name: str) -> None:
    """Changing this field alone changes the settings as documented, and the result."""
    others, other, changes = FIELDS[name]
    before, after = QuantizationConfig(**others), QuantizationConfig(**others, **{name: other})
    for field in fields(Settings):
        old, new = (getattr(c.settings(), field.name) for c in (before, after))
        assert new == changes.get(field.name, old)
        assert (old != new) == (field.name in changes)
    out, changed = unified(*operands(), before), unified(*operands(), after)
    assert out.dtype != changed.dtype or not torch.equal(out, changed)


def test_every_field_is_tested() -> None:
    """A new field comes with a test."""
    assert list(FIELDS) == [field.name for field in fields(QuantizationConfig)]


@pytest.mark.parametrize("field", [field.name for field in fields(BlockSizeConfig)])
def test_block_size_takes_effect(field: str) -> None:
    """Each size of a block changes the result."""
    base = QuantizationConfig(**BLOCKS, query_precision=QuantizationPrecision.INT8)
    other = QuantizationConfig(**BLOCKS, query_precision=QuantizationPrecision.INT8)
    setattr(other.block_sizes, field, 2 if field == "head_block_size" else 7)
    assert not torch.equal(unified(*operands(), base), unified(*operands(), other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_output_precision_is_honoured(dtype: torch.dtype) -> None:
    """The configuration's dtype where there is one, else the query's."""
    given = operands(dtype)
    assert unified(*given, QuantizationConfig()).dtype == torch.float32
    half = QuantizationConfig(output_precision=OutputPrecision.FP16)
    assert unified(*given, half).dtype == torch.float16
    assert extension.quantized_scaled_dot_product_attention(*given).dtype == dtype


def test_strings() -> None:
    """Names become members and back; long names are understood."""
    config = QuantizationConfig
    for precision in QuantizationPrecision:
        word = config.quantization_precision_to_string(precision)
        assert word == precision.name.lower()
        assert config.string_to_quantization_precision(word) == precision
    for output in OutputPrecision:
        assert config.string_to_precision(config.precision_to_string(output)) == output
    for granularity in QuantizationGranularity:
        word = config.granularity_to_string(granularity)
        assert word == granularity.name.lower()
        assert config.string_to_granularity(word) == granularity
    assert config.string_to_granularity("block") == QuantizationGranularity.BLOCK_WISE
    assert config.string_to_precision("bfloat16") == OutputPrecision.BF16
    assert config.string_to_quantization_precision("float32") == QuantizationPrecision.FP32


@pytest.mark.errors
def test_unknown_strings_and_values_are_errors() -> None:
    """Nothing falls back to a default in silence."""
    config = QuantizationConfig
    for convert in (
        config.string_to_quantization_precision,
        config.string_to_precision,
        config.string_to_granularity,
    ):
        with pytest.raises(ArgumentValueError, match="_str is 'int9'; it must be one of"):
            convert("int9")
    with pytest.raises(ArgumentValueError, match="precision_str is 'int9'"):
        extension.quantized_scaled_dot_product_attention(*operands(), precision="int9")
    wrong: dict[str, Any] = {
        "precision": "int9",
        "query_precision": "int8",
        "key_precision": 7,
        "value_precision": None,
        "granularity": 4,
        "output_precision": "fp32",
        "hybrid_strategy": -1,
        "is_causal": 1,
        "scale": "a",
        "enable_mixed_precision": None,
        "force_symmetric_quantization": 0,
        "enable_per_tensor_granularity": "yes",
        "enable_adaptive_block_sizes": 2,
        "block_sizes": (1, 2, 3),
    }
    for name, value in wrong.items():
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=r" is .* it must be"):
            QuantizationConfig(**{name: value}).validate_config()
    with pytest.raises(ArgumentValueError, match="key_block_size is 0"):
        QuantizationConfig(block_sizes=BlockSizeConfig(1, 0, 1)).validate_config()
    QuantizationConfig().validate_config()
    not_config: Any = "int8"
    with pytest.raises(ArgumentTypeError, match="config is 'int8'; it must be a Quantization"):
        unified(*operands(), not_config)


def test_recommended_output_precision() -> None:
    """fp16 where there are integers, else the query's."""
    assert QuantizationConfig().get_recommended_output_precision() == OutputPrecision.FP16
    plain = QuantizationConfig(
        query_precision=QuantizationPrecision.BF16,
        key_precision=QuantizationPrecision.FP16,
        value_precision=QuantizationPrecision.FP16,
    )
    assert plain.get_recommended_output_precision() == OutputPrecision.BF16


# Calls


def test_names_of_the_quantised_call() -> None:
    """The three calls that take a configuration are one."""
    config = QuantizationConfig(is_causal=True, scale=0.2)
    expected = quantized_attention(*operands(), config=config.settings(), causal=True, scale=0.2)
    for name in ("unified", "enhanced", "with_config"):
        call = getattr(extension, f"quantized_scaled_dot_product_attention_{name}")
        assert torch.equal(call(*operands(), config), expected)
    short = extension.quantized_scaled_dot_product_attention(*operands(), "int8", True, 0.2)
    config.enable_mixed_precision = False
    assert torch.equal(short, unified(*operands(), config))


@pytest.mark.grad
def test_autograd_forms() -> None:
    """They are attention and quantised attention; a scale of 0.0 is 1/sqrt(D)."""
    leaves = [t.requires_grad_() for t in operands()]
    mask = torch.rand(150, 150) > 0.2

    def gradients(out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    settings = Settings(
        *("int4",) * 3,
        query_block_size=64,
        key_block_size=64,
        value_block_size=64,
        smooth_key=False,
    )
    pairs = [
        (
            extension.metal_flash_attention_autograd(*leaves, True),
            orchard.attention(*leaves, causal=True),
        ),
        (
            extension.metal_flash_attention_autograd(*leaves, scale=0.1),
            orchard.attention(*leaves, scale=0.1),
        ),
        (
            extension.metal_quantized_flash_attention_autograd(
                *leaves, True, 0.1, extension.QUANT_INT4, extension.QUANT_BLOCK_WISE, mask
            ),
            quantized_attention(*leaves, config=settings, causal=True, scale=0.1, mask=mask),
        ),
    ]
    for found, expected in pairs:
        for one, other in zip(gradients(found), gradients(expected), strict=True):
            assert torch.equal(one, other)


def test_torch_call() -> None:
    """Without a mode it is torch's call with torch's meaning, also where torch has to answer."""
    query, key, value = operands()
    call = extension.metal_scaled_dot_product_attention
    expected = orchard.attention(query, key, value, causal=True)
    assert torch.equal(call(query, key, value, is_causal=True), expected)
    grouped = call(query, key[:, :2], value[:, :2], enable_gqa=True)
    assert torch.equal(grouped, orchard.attention(query, key[:, :2], value[:, :2]))
    broadcast = call(query, key[:1], value[:1])
    assert torch.equal(broadcast, F.scaled_dot_product_attention(query, key[:1], value[:1]))
    call(*(t.clone().requires_grad_() for t in (query, key, value)))
    assert extension.get_dispatch_stats() == {
        "total": 4,
        "quantized_autograd": 0,
        "fp32_autograd": 1,
        "fp32_direct": 2,
        "fp32_instream": 0,
        "rope_instream": 0,
        "rope_autograd": 0,
        "pytorch_fallback": 1,
        "mask_all_true_skipped": 0,
    }
    extension.reset_dispatch_stats()
    assert set(extension.get_dispatch_stats().values()) == {0}


@pytest.mark.parametrize("batch", [None, 1, 2])
def test_rope(batch: int | None) -> None:
    """Interleaved pairs turn as complex numbers do."""
    query, key, value = operands()
    angles = torch.randn(*([] if batch is None else [batch]), 150, 16)
    cos, sin = torch.cos(angles), torch.sin(angles)
    tables = [table.repeat_interleave(2, -1) for table in (cos, sin)]
    turns = torch.complex(cos, sin)
    turns = turns if batch is None else turns[:, None]

    def turned(x: Tensor, dtype: torch.dtype) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()).to(dtype)
        return torch.view_as_real(pairs * turns.to(dtype)).flatten(-2)

    found = extension.rope_scaled_dot_product_attention(query, key, value, *tables, is_causal=True)
    exact, narrow = (
        orchard.attention(*(turned(x, kind) for x in (query, key)), value.to(real), causal=True)
        for kind, real in ((torch.complex128, torch.float64), (torch.complex64, torch.float32))
    )
    limit = 2 * float((narrow - exact).abs().max()) + torch.finfo(torch.float32).eps
    assert float((found - exact).abs().max()) <= limit
    assert extension.get_dispatch_stats()["rope_instream"] == 1
    with pytest.raises(ArgumentValueError, match=r"rope_cos has shape \[149, 32\]"):
        extension.rope_scaled_dot_product_attention(
            query, key, value, torch.ones(149, 32), torch.ones(150, 32)
        )


@pytest.mark.parametrize("rank", [2, 3])
def test_rope_with_fewer_axes(rank: int) -> None:
    """Heads without a batch axis, or one head, are turned as the same ones with four axes."""
    given = [t[:1, : 4 if rank == 3 else 1] for t in operands()]
    cos, sin = torch.randn(2, 150, 32)
    expected = extension.rope_scaled_dot_product_attention(*given, cos, sin)
    for tables in ((cos, sin), (cos[None], sin[None])):
        few = [t[(0,) * (4 - rank)] for t in given]
        found = extension.rope_scaled_dot_product_attention(*few, *tables)
        assert torch.equal(found, expected[(0,) * (4 - rank)])
    with pytest.raises(ArgumentValueError, match=r"rope_cos has shape \[4, 150, 32\]; it must"):
        extension.rope_scaled_dot_product_attention(*few, cos.expand(4, -1, -1), sin)


def test_fp64_is_turned_in_fp64() -> None:
    """What rotates does not round fp64 to fp32."""
    given = [t.double() for t in operands()]
    cos, sin = torch.randn(2, 150, 32, dtype=torch.float64)
    pairs = torch.stack((-given[0][..., 1::2], given[0][..., 0::2]), -1).flatten(-2)
    query = given[0] * cos + pairs * sin
    pairs = torch.stack((-given[1][..., 1::2], given[1][..., 0::2]), -1).flatten(-2)
    expected = orchard.attention(query, given[1] * cos + pairs * sin, given[2])
    assert torch.equal(extension.rope_scaled_dot_product_attention(*given, cos, sin), expected)
    third = torch.full((8,), 1.0 / 3.0, dtype=torch.float64)
    extension.hadamard_rotate(third, 8)
    assert third[0] == (torch.full((8,), 1.0 / 3.0, dtype=torch.float64).sum() / 8.0**0.5)


@pytest.mark.errors
def test_wrong_rotations() -> None:
    """What cannot be rotated is refused by its name, not somewhere inside torch."""
    query, key, value = operands()
    table, wrong = torch.ones(150, 31), [1.0]
    odd: Any = (query[..., :31], key[..., :31], value, table)
    with pytest.raises(
        ArgumentValueError, match=r"shape \[2, 4, 150, 31\]; .* the last of them even"
    ):
        extension.rope_scaled_dot_product_attention(*odd, table)
    rope: Any = extension.rope_scaled_dot_product_attention
    with pytest.raises(ArgumentTypeError, match=r"rope_sin is \[1\.0\]; it must be a torch"):
        rope(query, key, value, torch.ones(150, 32), wrong)
    rotate: Any = extension.hadamard_rotate
    for thing in (wrong, torch.arange(8), torch.tensor(1.0)):
        with pytest.raises(ArgumentTypeError, match=r"tensor is .* it must be a floating tensor"):
            rotate(thing, 8)
    with pytest.raises(ArgumentValueError, match=r"block_size is 8\.0; it must be a power of 2"):
        rotate(torch.ones(8), 8.0)
    assert rotate(torch.ones(2, 0), 8).shape == (2, 0)


def test_hadamard() -> None:
    """In place on any strides, its own inverse, and the matrix's first rows are known."""
    tensor = torch.zeros(3, 32, 2).transpose(1, 2)
    tensor[0, 0, 0] = tensor[1, 0, 1] = 1.0
    before = tensor.clone()
    assert extension.hadamard_rotate(tensor, 16) is tensor
    assert torch.equal(tensor[0, 0], torch.tensor([0.25] * 16 + [0.0] * 16))
    assert torch.equal(tensor[1, 0, :4], torch.tensor([0.25, -0.25, 0.25, -0.25]))
    extension.hadamard_rotate(tensor, 16)
    assert torch.equal(tensor, before)
    for wrong in (4, 12, 2048):
        with pytest.raises(ArgumentValueError, match=f"block_size is {wrong}; it must be a power"):
            extension.hadamard_rotate(tensor, wrong)
    with pytest.raises(ArgumentValueError, match="last axis of 32; block_size 64 must divide it"):
        extension.hadamard_rotate(tensor, 64)


def test_indexer_scores() -> None:
    """relu of the scaled products."""
    q, k = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [-1.0, 0.0]])
    assert extension.sparse_indexer_scores(q, k, 0.5).tolist() == [[5.5, 0.0]]


# Quantisation mode


def mode_answer(precision: int, mode: int) -> Tensor:
    return extension.metal_quantized_flash_attention_autograd(
        *operands(), target_precision=precision, quant_mode=mode
    )


def test_mode() -> None:
    """It quantises the calls that follow, until it is cleared."""
    plain = extension.metal_scaled_dot_product_attention(*operands())
    for precision in (extension.QUANT_INT8, extension.QUANT_INT4):
        for mode in (extension.QUANT_TENSOR_WISE, extension.QUANT_BLOCK_WISE):
            extension.set_quantization_mode(precision, mode)
            found = extension.metal_scaled_dot_product_attention(*operands())
            assert torch.equal(found, mode_answer(precision, mode))
            assert not torch.equal(found, plain)
    extension.clear_quantization_mode()
    assert torch.equal(extension.metal_scaled_dot_product_attention(*operands()), plain)
    extension.set_quantization_mode(extension.QUANT_INT8, 0)
    extension.set_quantization_mode(extension.QUANT_NONE, 0)
    assert torch.equal(extension.metal_scaled_dot_product_attention(*operands()), plain)


def test_mode_reaches_torch() -> None:
    """Registered and in a mode, torch's own call is quantised in this thread, and only there."""
    extension.register_backend()
    plain = F.scaled_dot_product_attention(*operands())
    extension.set_quantization_mode(extension.QUANT_INT4, extension.QUANT_BLOCK_WISE)
    extension.reset_dispatch_stats()
    found = F.scaled_dot_product_attention(*operands())
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(F.scaled_dot_product_attention, *operands()).result()
    assert extension.get_dispatch_stats()["quantized_autograd"] == 1
    assert torch.equal(found, mode_answer(extension.QUANT_INT4, extension.QUANT_BLOCK_WISE))
    assert torch.equal(elsewhere, plain)
    extension.clear_quantization_mode()
    assert torch.equal(F.scaled_dot_product_attention(*operands()), plain)


def test_a_mode_leaves_fp64_alone() -> None:
    """fp64 has no quantised form: torch's call and ours are attention's, in any mode."""
    given = [t.double() for t in operands()]
    expected = orchard.attention(*given, causal=True)
    extension.register_backend()
    extension.set_quantization_mode(extension.QUANT_INT8, extension.QUANT_TENSOR_WISE)
    direct = extension.metal_scaled_dot_product_attention(*given, is_causal=True)
    assert torch.equal(direct, expected)
    routed = F.scaled_dot_product_attention(*given, is_causal=True)
    assert torch.equal(routed, expected)
    counted = extension.get_dispatch_stats()
    assert (counted["fp32_direct"], counted["quantized_autograd"]) == (1, 0)  # of this module


@pytest.mark.errors
def test_wrong_modes() -> None:
    """Unknown modes are errors, and heads that do not match are too."""
    wrong: Any
    for wrong in (1, 3.0, True, "int8"):
        with pytest.raises(ArgumentValueError, match=f"precision is {wrong!r}; .* QUANT_NONE"):
            extension.set_quantization_mode(wrong, 0)
    for wrong in (7, "junk", True):
        with pytest.raises(ArgumentValueError, match=f"block_mode is {wrong!r}; it must be one of"):
            extension.set_quantization_mode(extension.QUANT_NONE, wrong)
    with pytest.raises(ArgumentValueError, match=r"target_precision is 0; .* QUANT_INT8 \(3\)"):
        mode_answer(extension.QUANT_NONE, 0)
    with pytest.raises(ArgumentValueError, match="quant_mode is 9; it must be one of"):
        mode_answer(extension.QUANT_INT8, 9)
    with pytest.raises(ArgumentValueError, match="block_mode is HYBRID"):
        extension.set_quantization_mode(3, 3)
    extension.set_quantization_mode(3, 0)
    query, key, value = operands()
    with pytest.raises(ArgumentValueError, match="key has 2 heads; without enable_gqa"):
        extension.metal_scaled_dot_product_attention(query, key[:, :2], value[:, :2])


@pytest.mark.stress
def test_threads_do_not_see_each_others_mode() -> None:
    """With each thread in its own mode at the same time, each gets its own answers."""
    modes = [(3, 0), (4, 0), (3, 2), (4, 2), None]
    plain = extension.metal_scaled_dot_product_attention(*operands())
    expected = [plain if mode is None else mode_answer(*mode) for mode in modes]
    together = threading.Barrier(len(modes))

    def run(number: int) -> bool:
        mode = modes[number]
        right = True
        for _ in range(5):
            together.wait()
            if mode is None:
                extension.clear_quantization_mode()
            else:
                extension.set_quantization_mode(*mode)
            together.wait()  # every thread has set its own
            found = extension.metal_scaled_dot_product_attention(*operands())
            right = right and torch.equal(found, expected[number])
        return right

    with ThreadPoolExecutor(len(modes)) as pool:
        assert all(pool.map(run, range(len(modes))))
    assert torch.equal(extension.metal_scaled_dot_product_attention(*operands()), plain)


# Analysis and selection


def test_analysis_and_selection() -> None:
    """They say what a hybrid call does."""
    query, key, value = operands()
    int8 = QuantizationPrecision.INT8
    config = QuantizationConfig(
        query_precision=int8,
        granularity=QuantizationGranularity.HYBRID,
        enable_per_tensor_granularity=True,
        force_symmetric_quantization=True,
    )
    chosen = extension.select_hybrid_granularities(query, key, value, config)
    metrics = extension.analyze_tensor_characteristics(value, int8)
    assert metrics.tensor_size == value.numel()
    strategies = [extension.select_optimal_granularity(metrics, int8, s) for s in HybridStrategy]
    assert strategies[HybridStrategy.BALANCED] == extension.select_optimal_granularity(
        metrics, int8
    )
    assert strategies[HybridStrategy.ACCURACY_FIRST] == QuantizationGranularity.ROW_WISE
    assert chosen.query_granularity == QuantizationGranularity.TENSOR_WISE
    assert chosen.value_granularity == QuantizationGranularity.BLOCK_WISE
    assert chosen.value_blocks == BlockSizeConfig(64, 64, 64, 1)
    assert "value: block: expected error" in chosen.selection_reasoning
    halves = QuantizationConfig()
    chosen = extension.select_hybrid_granularities(query, key, value, halves)
    assert "query: fp16 has no scales" in chosen.selection_reasoning
    assert extension.select_optimal_block_sizes(value, int8) == BlockSizeConfig(64, 64, 64)
    int4 = QuantizationPrecision.INT4
    assert extension.select_optimal_block_sizes(value, int4) == BlockSizeConfig(32, 32, 32)


def test_estimates() -> None:
    """Overhead is counted in bytes; finer scales cost more and lose less."""
    value = operands()[2]
    int8 = QuantizationPrecision.INT8
    metrics = extension.analyze_tensor_characteristics(value, int8)
    coarse_to_fine = [
        QuantizationGranularity.TENSOR_WISE,
        QuantizationGranularity.BLOCK_WISE,
        QuantizationGranularity.ROW_WISE,
    ]
    overheads = [extension.estimate_quantization_overhead(g, value, int8) for g in coarse_to_fine]
    assert overheads == [1 + 4 * n / value.numel() for n in (1, 2 * 4 * 10, 2 * 4 * 150)]
    losses = [extension.estimate_accuracy_loss(g, metrics, int8) for g in coarse_to_fine]
    assert losses == sorted(losses, reverse=True)
    hybrid = QuantizationGranularity.HYBRID
    assert extension.estimate_accuracy_loss(hybrid, metrics, int8) in losses
    fp16 = QuantizationPrecision.FP16
    assert extension.estimate_quantization_overhead(hybrid, metrics, fp16) == 1.0
    with pytest.raises(ArgumentValueError, match="metrics is empty"):
        extension.select_optimal_granularity(TensorAnalysisMetrics(), int8)
    wrong: Any = 3.0
    with pytest.raises(ArgumentTypeError, match=r"metrics is 3\.0"):
        extension.estimate_accuracy_loss(hybrid, wrong, int8)


# Registration


def test_register_after_a_disable_of_somebody_else() -> None:
    """It registers again, and is undone as ever."""
    extension.register_backend()
    orchard.disable()
    extension.register_backend()
    F.scaled_dot_product_attention(*operands())
    assert orchard.stats()["torch_sdpa"]["served"] == 1
    extension.unregister_backend()
    F.scaled_dot_product_attention(*operands())
    assert orchard.stats()["torch_sdpa"]["served"] == 1


@pytest.mark.errors
@pytest.mark.parametrize("precision", [extension.QUANT_NONE, extension.QUANT_INT8])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_no_tensor(name: str, precision: int) -> None:
    extension.set_quantization_mode(precision, extension.QUANT_BLOCK_WISE)
    given = dict(zip(("query", "key", "value"), operands(), strict=True)) | {name: "x"}
    with pytest.raises(ArgumentTypeError, match=f"^{name} is 'x'; it must be a torch.Tensor"):
        extension.metal_scaled_dot_product_attention(**given)


@pytest.mark.errors
def test_axes_that_a_mode_does_not_take() -> None:
    extension.set_quantization_mode(extension.QUANT_INT8, extension.QUANT_BLOCK_WISE)
    query, key, value = operands()
    with pytest.raises(ArgumentValueError, match="have 4, 2 and 4 axes; they must all have 4"):
        extension.metal_scaled_dot_product_attention(query, key[0, 0], value)
    with pytest.raises(ArgumentValueError, match=r"query has shape .*; it must have 2 to 4 axes"):
        extension.metal_scaled_dot_product_attention(query[None], key[None], value[None])


@pytest.mark.parametrize("switch", [extension, extension.MetalSDPABackend], ids=["module", "class"])
def test_register_and_unregister(switch: Any) -> None:
    """Registered, torch's attention is served by Orchard; unregistered, by torch, exactly."""
    given = operands()
    operator = "aten::scaled_dot_product_attention"
    before = torch._C._dispatch_dump(operator)

    def count() -> int:
        return orchard.stats()["torch_sdpa"]["served"]

    switch.unregister_backend()  # nothing to undo
    switch.register_backend()
    switch.register_backend()  # once is enough
    F.scaled_dot_product_attention(*given)
    assert count() == 1
    switch.unregister_backend()
    F.scaled_dot_product_attention(*given)
    assert count() == 1
    assert torch._C._dispatch_dump(operator) == before


def test_registration_keeps_that_of_others() -> None:
    """Unregistering undoes one's own registration, not orchard.enable() of somebody else."""
    with orchard.enabled():
        extension.register_backend()
        extension.unregister_backend()
        F.scaled_dot_product_attention(*operands())
        assert orchard.stats()["torch_sdpa"]["served"] == 1


# The shim


@pytest.mark.cli
def test_shim_is_found_and_removed(tmp_path: Path) -> None:
    """Installed, `import metal_sdpa_extension` is this module; removed, nothing is left."""
    command = [sys.executable, "-m", "orchard.integrations.metal_sdpa_extension"]
    target = ["--target", str(tmp_path)]
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import metal_sdpa_extension\n"
        "from metal_sdpa_extension import QuantizationConfig, register_backend\n"
        "from orchard.integrations import metal_sdpa_extension as ours\n"
        "assert metal_sdpa_extension is ours\n"
    )

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, capture_output=True, text=True)

    done = run(*command, "--install-shim", *target)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(tmp_path / "metal_sdpa_extension") in done.stdout
    assert main(["--install-shim", *target]) == 0  # installing again replaces it
    found = run(sys.executable, "-W", "error", "-c", program)
    assert found.returncode == 0, found.stderr
    assert main(["--remove-shim", *target]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cli
def test_shim_leaves_others_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A package that is not ours is neither replaced nor removed."""
    foreign = tmp_path / "metal_sdpa_extension"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("answer = 42\n")
    for action in ("--install-shim", "--remove-shim"):
        with pytest.raises(SystemExit) as left:
            main([action, "--target", str(tmp_path)])
        assert left.value.code == 1
        assert "is another package" in capsys.readouterr().err
    assert (foreign / "__init__.py").read_text() == "answer = 42\n"
    with pytest.raises(SystemExit) as left:
        main(["--remove-shim", "--target", str(tmp_path / "nowhere")])
    assert left.value.code == 1
    assert "nothing to remove" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])


@pytest.mark.errors
@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("granularity", extension.HybridStrategy.BALANCED),
        ("query_precision", extension.OutputPrecision.FP32),
        ("key_precision", True),
    ],
)
def test_a_member_of_another_enum_is_refused(field: str, given: object) -> None:
    """Its number may be that of a member, but it means something else."""
    config = extension.QuantizationConfig()
    setattr(config, field, given)
    with pytest.raises(ArgumentValueError, match=f"{field} is"):
        config.settings()
