"""The native kernels on operands in few bits, held to the definition at the dequantised values."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import orchard
from orchard.attention.dropout import draw_seed
from orchard.attention.problem import Tensors, Upstream
from orchard.attention.strides import axis_order
from orchard.backends.cpu import native, quantized
from orchard.backends.cpu.native import TensorArgs
from orchard.backends.cpu.quantized import OperandArgs, QuantizeArgs, QuantizedArgs
from orchard.dispatch import planner
from orchard.errors import ArgumentValueError, NativeError
from orchard.quantization import (
    KVCache,
    QuantizationConfig,
    cpu,
    explain,
    kernel_calls,
    quantize,
    quantized_attention,
)
from orchard.quantization import formats as formats_module
from orchard.quantization.formats import Format, encode
from orchard.testing import budget
from orchard.testing.budget import Results
from orchard.testing.poison import poisoned

Sizes = tuple[int, int, int, int, int, int, int]  # B, Hq, Hkv, Sq, Sk, D, Dv

SIZES: dict[str, Sizes] = {
    "one row": (1, 2, 2, 1, 70, 128, 128),
    "one row, no whole vector": (1, 2, 2, 1, 90, 41, 37),
    "grouped rows, split keys": (2, 4, 2, 2, 1100, 64, 64),
    "rows in a panel, split keys": (1, 6, 2, 7, 1041, 40, 24),
    "ragged": (1, 1, 1, 33, 130, 80, 96),
    "few keys": (1, 2, 2, 33, 8, 128, 64),
    "one element": (2, 2, 2, 7, 30, 1, 3),
    "wide": (1, 1, 1, 70, 150, 256, 256),
}
CONFIGS = {
    "int8": QuantizationConfig(),
    "int8 asymmetric": QuantizationConfig(symmetric=False),
    "int8 in blocks of heads": QuantizationConfig(head_block_size=2, smooth_key=False),
    "int4": QuantizationConfig("int4", "int4", "int4"),
    "int4 asymmetric by tensor": QuantizationConfig(
        "int4", "int4", "int4", symmetric=False, granularity="tensor"
    ),
    "plain query": QuantizationConfig("fp32", "int8", "int4", granularity="row"),
    "plain query, asymmetric": QuantizationConfig("bf16", "int4", "int8", symmetric=False),
    "plain key": QuantizationConfig("int8", "bf16", "int8"),
    "plain value": QuantizationConfig("int4", "int8", "fp16", smooth_key=False),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bottom right": {"causal": "bottom_right"},
    "window": {"window": (9, 40)},
    "softcap": {"softcap": 3.0},
    "negative scale": {"scale": -0.2},
    "scale of 0": {"scale": 0.0},
    "dropout": {"dropout_p": 0.25},
}
SEED = 5


def operands(sizes: Sizes, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Normal values, the keys far from 0."""
    batch, heads, kv_heads, rows, keys, dim, value_dim = sizes
    source = Generator().manual_seed(3)
    query = torch.randn(batch, heads, rows, dim, generator=source)
    key = torch.randn(batch, kv_heads, keys, dim, generator=source) + 2.0
    value = torch.randn(batch, kv_heads, keys, value_dim, generator=source)
    return [tensor.to(dtype) for tensor in (query, key, value)]


def mask_for(sizes: Sizes, kind: str) -> Tensor:
    batch, heads, _, rows, keys, *_ = sizes
    drawn = torch.randn(batch, heads, rows, keys, generator=Generator().manual_seed(8))
    return drawn > -1.0 if kind == "bool" else drawn


def check(
    given: list[Any], config: QuantizationConfig, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Out within the budget of `dtype` and lse within that of fp32, served by the engine."""
    plan = explain(*given, config=config, **options)
    assert plan.engine.name == "cpu", plan
    exact = [operand.stored.dequantize(torch.float32) for operand in plan.call[:3]]
    generator = Generator().manual_seed(SEED)
    with poisoned():
        out, lse = quantized_attention(
            *given, config=config, return_lse=True, generator=generator, **options
        )
    settled = kernel_calls.settings_of(plan.call).options(*exact[:2])
    seed = draw_seed(torch.device("cpu"), Generator().manual_seed(SEED))
    tensors = Tensors(*exact, options.get("mask"), seed if settled.threshold else None)
    assert out.dtype == dtype
    standard = budget.standard(tensors, settled)
    yardstick = budget.define(tensors, settled, dtype)._replace(lse=standard.yardstick.lse)
    held_to = standard._replace(yardstick=yardstick, dtype=dtype)
    for comparison in budget.compare(Results(out, lse), held_to):
        assert comparison.ok, comparison


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_formats_and_sizes(isa: str, sizes: Sizes, config: QuantizationConfig) -> None:
    """Every format with every path through the kernels."""
    check(operands(sizes), config, torch.float32, {})


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", ["grouped rows, split keys", "ragged"])
@pytest.mark.parametrize("config", ["int8", "int4 asymmetric by tensor", "plain query"])
def test_options(isa: str, name: str, sizes: str, config: str) -> None:
    """What shapes a score and a probability."""
    check(operands(SIZES[sizes]), CONFIGS[config], torch.float32, OPTIONS[name])


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("small", [0, 1], ids=["small query", "small key"])
def test_scales_far_apart(isa: str, small: int, config: QuantizationConfig, rows: int) -> None:
    """Products of 1e-37 and 1e37 are of ordinary size; nothing overflows on the way to them."""
    given = operands((1, 2, 2, rows, 70, 32, 16))
    given[small], given[1 - small] = given[small] * 1e-37, given[1 - small] * 1e37
    check(given, config, torch.float32, {})


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_large_scales_that_do_not_meet(isa: str, rows: int) -> None:
    """Large levels that only zeros are multiplied with add nothing, not 0 * Inf."""
    given = operands((1, 2, 2, rows, 70, 32, 16))
    given[0][..., 0], given[1][..., 0] = 1e37, 0.0
    given[0][..., 1], given[1][..., 1] = 0.0, 1e37
    given[0][..., 2:], given[1][..., 2:] = 0.0, 0.0
    check(given, QuantizationConfig(smooth_key=False), torch.float32, {})


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("query", ["fp32", "int8"])
@pytest.mark.parametrize("key", ["int8", "int4"])
def test_zero_points_far_from_the_values(isa: str, key: Any, query: Any, rows: int) -> None:
    """Keys near 0 beside one large value keep their digits, though their levels are large."""
    given = operands((1, 2, 2, rows, 40, 512, 16))
    given[0] = given[0] + 2.0
    given[1] = given[1] * 1e-3
    given[1][..., 0] = 50.0
    config = QuantizationConfig(query, key, "fp32", symmetric=False, smooth_key=False)
    check(given, config, torch.float32, {})


def one_key_above(gap: float) -> list[Tensor]:
    """Every row's first key is so far above the others, and the values have a mean."""
    source = Generator().manual_seed(4)
    query, key, value = (torch.randn(1, 2, 96, 64, generator=source) for _ in range(3))
    query[..., 0], key[..., 0, 0] = 8.0, gap
    return [tensor.bfloat16() for tensor in (query, 0.3 * key, 0.3 * value + 1.0)]


@pytest.mark.parametrize("gap", [10.0, 20.0, 22.0, 30.0])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_one_key_above_all_others(isa: str, gap: float, dropout_p: float) -> None:
    """What many small probabilities add up to counts beside a large one, kept or dropped."""
    check(one_key_above(gap), QuantizationConfig(), torch.bfloat16, {"dropout_p": dropout_p})


@pytest.mark.parametrize("gap", [10.0, 20.0, 22.0, 30.0])
def test_gradients_with_one_key_above_all_others(gap: float) -> None:
    given = [tensor.requires_grad_() for tensor in one_key_above(gap)]
    call = explain(*given).call
    exact = [operand.stored.dequantize(torch.float64).requires_grad_() for operand in call[:3]]
    grad = torch.randn(1, 2, 96, 64, generator=Generator().manual_seed(6)).bfloat16()
    found = torch.autograd.grad(quantized_attention(*given), given, grad)
    expected = torch.autograd.grad(orchard.attention(*exact), exact, grad.double())
    for ours, truth in zip(found, expected, strict=True):
        assert torch.cosine_similarity(ours.double().flatten(), truth.flatten(), 0) >= 0.999


def test_an_operand_that_passes_through_and_is_changed_before_backward() -> None:
    """Autograd notices: its values would be wrong."""
    query, key, value = (tensor.requires_grad_() for tensor in operands((1, 2, 2, 8, 8, 16, 16)))
    given = query.clone()
    config = QuantizationConfig(query_precision="fp32")
    assert explain(given, key, value, config=config).engine.name == "cpu"
    out = quantized_attention(given, key, value, config=config)
    with torch.no_grad():
        given.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("query_precision", ["int8", "bf16"])
def test_a_source_that_is_changed_before_backward(query_precision: Any) -> None:
    """The gradient is that of what was stored elsewhere, whatever the source holds now."""
    leaves = [tensor.requires_grad_() for tensor in operands((1, 2, 2, 8, 8, 16, 16))]
    config = QuantizationConfig(query_precision=query_precision)
    assert explain(*leaves, config=config).engine.name == "cpu"
    expected = torch.autograd.grad(quantized_attention(*leaves, config=config).sum(), leaves)
    given = [leaf.clone() for leaf in leaves]
    out = quantized_attention(*given, config=config)
    with torch.no_grad():
        for tensor in given:
            tensor.zero_()
    found = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.equal(ours, truth) for ours, truth in zip(found, expected, strict=True))


def test_a_smoothed_key_that_passes_through() -> None:
    """The kernels leave it to attention at its values."""
    query, key, value = operands((1, 2, 2, 8, 8, 16, 16), torch.bfloat16)
    stored = quantize(key, "bf16", smooth=True)
    plan = explain(query, stored, value)
    name, reasons = plan.rejected[0]
    assert (name, [reason.code for reason in reasons]) == ("cpu", ["smoothing"])
    exact = [operand.stored.dequantize(torch.float32) for operand in plan.call[:3]]
    expected = orchard.attention(*exact).bfloat16()
    assert torch.equal(quantized_attention(query, stored, value), expected)


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("sizes", ["grouped rows, split keys", "ragged"])
def test_masks(isa: str, sizes: str, kind: str) -> None:
    options = {"mask": mask_for(SIZES[sizes], kind)}
    check(operands(SIZES[sizes]), CONFIGS["int8"], torch.float32, options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", ["one row", "rows in a panel, split keys", "ragged", "wide"])
@pytest.mark.parametrize("config", ["int8", "int8 asymmetric", "int4", "plain key", "plain value"])
def test_halves(isa: str, dtype: torch.dtype, sizes: str, config: str) -> None:
    """Where the output is bf16 the second product may be; fp16 has the digits of fp32's."""
    check(operands(SIZES[sizes], dtype), CONFIGS[config], dtype, {})


@pytest.mark.parametrize("name", [*OPTIONS, "bool", "additive"])
@pytest.mark.parametrize("sizes", ["rows in a panel, split keys", "ragged"])
@pytest.mark.usefixtures("best_isa")
def test_options_of_bf16(name: str, sizes: str) -> None:
    """Probabilities as levels, the way they are shaped, hidden and dropped."""
    options = OPTIONS.get(name) or {"mask": mask_for(SIZES[sizes], name)}
    check(operands(SIZES[sizes], torch.bfloat16), CONFIGS["int8"], torch.bfloat16, options)


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "one large row": lambda value: value.index_fill(2, torch.tensor([37]), 400.0),
    "one large channel": lambda value: value.index_fill(3, torch.tensor([5]), 40.0),
    "growing": lambda value: value * torch.logspace(-12, 12, value.shape[2])[:, None],
    "denormal": lambda value: value * 2.0**-130,
    "huge": lambda value: value * 2.0**120,
    "zero": torch.zeros_like,
}


@pytest.mark.parametrize("granularity", ["row", "block", "tensor"])
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.usefixtures("best_isa")
def test_values_far_apart(kind: str, granularity: Any) -> None:
    """Levels of probabilities are those of the values' scales too, which may differ by anything."""
    query, key, value = operands((1, 2, 2, 70, 300, 32, 32))
    given = [tensor.bfloat16() for tensor in (query, key, VALUES[kind](value))]
    config = QuantizationConfig(granularity=granularity)
    faint = torch.zeros(1, 1, 1, 300).index_fill(3, torch.tensor([37]), -9.0)
    for options in ({}, {"causal": True}, {"scale": 3.0}, {"mask": faint}):
        check(given, config, torch.bfloat16, options)


@pytest.mark.parametrize("number", [0.0, -0.5])
@pytest.mark.usefixtures("best_isa")
def test_scales_that_nobody_makes(number: float) -> None:
    """A file may have any: the values are what the definition makes of them."""
    query, key, value = operands(SIZES["ragged"], torch.bfloat16)
    stored = orchard.quantize(value)
    stored.scales[..., 1] = number
    check([query, key, stored], CONFIGS["int8"], torch.bfloat16, {})


@pytest.mark.parametrize("sizes", ["one row", "ragged"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_precision_is_that_of_the_products(isa: str, dtype: torch.dtype, sizes: str) -> None:
    """An fp32 output of halves is within the budget of fp32, not a half that was widened."""
    config = replace(CONFIGS["int8"], output_precision="fp32")
    check(operands(SIZES[sizes], dtype), config, torch.float32, {})


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.usefixtures("best_isa")
def test_output_lies_as_the_query(layout: Any) -> None:
    """In the memory order of a permuted query, whichever dtype it has and whatever is asked."""
    query, key, value = operands(SIZES["ragged"], torch.bfloat16)
    expected = quantized_attention(query, key, value)
    permuted = [t.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2) for t in (query, key, value)]
    given = [t.transpose(1, 2) if layout == "bshd" else t for t in permuted]
    out = quantized_attention(*given, layout=layout)
    assert axis_order(out.shape, out.stride()) == axis_order(given[0].shape, given[0].stride())
    assert torch.equal(out.transpose(1, 2) if layout == "bshd" else out, expected)


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_cache(isa: str, rows: int, precision: Any) -> None:
    """Keys and values in a cache's buffers, which have room behind every head."""
    config = QuantizationConfig("fp32", precision, precision)
    query, key, value = operands((2, 4, 2, rows, 105, 128, 128))
    cache = KVCache(config)
    cache.append(key[:, :, :65], value[:, :, :65])
    cache.append(key[:, :, 65:], value[:, :, 65:])
    assert cache.key.data.stride(1) > cache.key.data.shape[2] * cache.key.data.stride(2)
    check([query, cache.key, cache.value], config, torch.float32, {"causal": "bottom_right"})


@pytest.mark.parametrize("sizes", ["one row", "grouped rows, split keys", "wide"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.usefixtures("torch_threads", "best_isa")
def test_threads_and_batch_change_no_bit(sizes: str, precision: Any) -> None:
    """Quantisation too: its groups are of one batch entry."""
    config = QuantizationConfig(precision, precision, precision, smooth_key=False)
    batch, *rest = SIZES[sizes]
    given = operands((batch + 2, *rest), torch.bfloat16)
    torch.set_num_threads(1)
    alone = quantized_attention(*given, config=config)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert torch.equal(quantized_attention(*given, config=config), alone)
        entry = quantized_attention(*(tensor[1:2] for tensor in given), config=config)
        assert torch.equal(entry, alone[1:2])


def linear(source: Generator, outputs: tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    return [torch.randn(output.shape, generator=source) for output in outputs]


@pytest.mark.grad
@pytest.mark.parametrize("config", ["int8", "int4 asymmetric by tensor", "plain value"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients(isa: str, config: str, layout: Any) -> None:
    """Those of attention at the dequantised values, of the mask too, with the dropout's bits."""
    sizes = SIZES["ragged"]
    bias = mask_for(sizes, "additive").requires_grad_()
    leaves = [tensor.requires_grad_() for tensor in operands(sizes)]
    options: dict[str, Any] = {"mask": bias, "dropout_p": 0.2, "causal": "bottom_right"}
    order = [leaf.transpose(1, 2) if layout == "bshd" else leaf for leaf in leaves]
    out, lse = quantized_attention(
        *order,
        config=CONFIGS[config],
        return_lse=True,
        layout=layout,
        generator=Generator().manual_seed(SEED),
        **options,
    )
    out = out.transpose(1, 2) if layout == "bshd" else out
    upstream = Upstream(*linear(Generator().manual_seed(1), (out, lse)))
    grads = torch.autograd.grad([out, lse], [*leaves, bias], list(upstream))
    call = explain(*(leaf.detach() for leaf in leaves), config=CONFIGS[config], **options).call
    exact = [operand.stored.dequantize(torch.float32) for operand in call[:3]]
    seed = draw_seed(torch.device("cpu"), Generator().manual_seed(SEED))
    tensors = Tensors(*exact, bias.detach(), seed)
    found = Results(out.detach(), lse.detach(), *grads)
    settled = kernel_calls.settings_of(call).options(*exact[:2])
    for comparison in budget.judge(found, tensors, settled, upstream, mask_grad=True):
        assert comparison.ok, comparison


@pytest.mark.grad
@pytest.mark.usefixtures("best_isa")
def test_second_gradients() -> None:
    """Of linear functionals they depend on the values alone: attention's, to the bit."""
    given, config = operands(SIZES["ragged"]), CONFIGS["int8"]
    exact = [o.stored.dequantize(torch.float32) for o in explain(*given, config=config).call[:3]]

    def second(function: Callable[..., Tensor], tensors: list[Tensor], **more: Any) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        source, out = Generator().manual_seed(2), function(*leaves, **more)
        first = torch.autograd.grad(out, leaves, linear(source, (out,)), create_graph=True)
        return list(torch.autograd.grad(first, leaves, linear(source, first)))

    found = second(quantized_attention, given, config=config)
    for one, other in zip(found, second(orchard.attention, exact), strict=True):
        assert torch.equal(one, other)


FORMS = {
    "int8 blocks": Format("int8", "block", 16),
    "int8 rows, asymmetric": Format("int8", "row", symmetric=False),
    "int4 ragged blocks of heads": Format("int4", "block", 5, 2),
    "int4 blocks, asymmetric": Format("int4", "block", 16, symmetric=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", [(2, 3, 37, 40), (1, 2, 21, 7), (1, 4, 5, 1), (2, 2, 0, 8)])
def test_quantisation_is_exact(
    isa: str,
    shape: tuple[int, ...],
    form: Format,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bytes, scales and zero points of the definition: normal, tiny, large, zero, one-sided."""
    drawn = torch.randn(shape, generator=Generator().manual_seed(6))
    largest = 1e30 if dtype != torch.float16 else 1e3
    for factor, shift in ((1.0, 0.0), (1e-40, 0.0), (largest, 0.0), (0.0, 0.0), (1.0, 5.0)):
        tensor = (drawn * factor + shift).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
        for mean in (None, tensor.float().sum(2, keepdim=True)):
            found = encode(tensor, form, "tensor", mean)
            with monkeypatch.context() as patch:
                patch.setattr(formats_module, "_encode_native", lambda *_: None)
                expected = encode(tensor, form, "tensor", mean)
            assert found.parts.keys() == expected.parts.keys()
            for name, part in expected.parts.items():
                assert torch.equal(found.parts[name], part), (name, factor, shift)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, -(2.0**126.5)])
def test_what_cannot_be_stored_is_refused(isa: str, bad: float) -> None:
    tensor = torch.ones(2, 2, 20, 24)
    tensor[1, 0, 19, 23] = bad
    library = native.loaded()
    refused = quantized.quantize(library, tensor, None, (1, 1, 16), int4=False, symmetric=True)
    assert refused is None
    with pytest.raises(ArgumentValueError, match=r"^key holds "):
        encode(tensor, FORMS["int8 blocks"], "key")


class TestReasons:
    """What the engine leaves to the next, and says so."""

    @pytest.mark.parametrize(
        ("config", "options", "code"),
        [
            (QuantizationConfig(key_precision="fp8"), {}, "precision"),
            (QuantizationConfig(), {"backend": "reference"}, "order"),
        ],
    )
    def test_calls(self, config: QuantizationConfig, options: dict[str, Any], code: str) -> None:
        plan = explain(*operands(SIZES["ragged"]), config=config, **options)
        assert plan.engine.name == "dequantise"
        assert [reason.code for reason in dict(plan.rejected)["cpu"]] == [code]

    def test_disabled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A backend that is switched off neither quantises nor attends."""
        monkeypatch.setenv("ORCHARD_DISABLE", "cpu")
        planner.reset()
        try:
            plan = explain(*operands(SIZES["ragged"]))
            assert quantized.usable_library() is None
        finally:
            monkeypatch.undo()
            planner.reset()
        assert plan.engine.name == "dequantise"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(1, 3, 5000, 64), (2, 2, 17, 128), (3, 1, 256, 192)])
    def test_mean_without_the_library(
        self, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A smoothed key has the same bits, whoever adds up its rows, and whatever its strides."""
        tensor = torch.randn(shape, generator=Generator().manual_seed(8)).to(dtype) + 3.0
        turned = tensor.mT.contiguous().mT
        native_mean, of_strides = (formats_module.mean_over_sequence(t) for t in (tensor, turned))
        monkeypatch.setattr(quantized, "usable_library", lambda: None)
        assert torch.equal(native_mean, formats_module.mean_over_sequence(tensor))
        assert torch.equal(native_mean, of_strides)

    def test_levels_with_a_stride(self) -> None:
        call = explain(*operands(SIZES["ragged"])).call
        stored = call.key.stored
        object.__setattr__(stored, "data", stored.data.mT.contiguous().mT)
        assert [reason.code for reason in cpu.reasons(call)] == ["layout"]


# What the library refuses


def filled() -> tuple[QuantizedArgs, list[Tensor]]:
    """A struct that is right, and what it points to."""
    made: list[Tensor] = []

    def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> TensorArgs:
        made.append(torch.zeros(shape, dtype=dtype))
        return quantized._tensor(made[-1])

    args = QuantizedArgs(struct_size=ctypes.sizeof(QuantizedArgs), abi_version=1)
    for name, rows in (("query", 3), ("key", 20), ("value", 20)):
        operand = OperandArgs(dim=9)
        operand.data = tensor((1, 2, rows, 9), torch.int8)
        operand.scales = tensor((1, 2, -(-rows // 16), 1), torch.float32)
        operand.zeros = tensor((1, 2, -(-rows // 16), 1), torch.int8)
        operand.group[:] = (1, 1, 16)
        setattr(args, name, operand)
    args.key.mean = tensor((1, 2, 1, 9), torch.float32)
    args.out, args.lse = tensor((1, 2, 3, 9), torch.float32), tensor((1, 2, 3, 1), torch.float32)
    args.scale = 0.3
    return args, made


def change(path: str, value: Any) -> Callable[[Any], None]:
    def apply(args: Any) -> None:
        *outer, last = path.split(".")
        for name in outer:
            args = args[int(name)] if name.isdigit() else getattr(args, name)
        if last.isdigit():
            args[int(last)] = value
        else:
            setattr(args, last, value)

    return apply


WRONG = {
    "struct size": ("struct_size", 8, native.WRONG_ABI, "struct_size is 8"),
    "version": ("abi_version", 9, native.WRONG_ABI, "abi_version is 9"),
    "operand's type": ("query.data.dtype", 4, 1, "query is bool; it must be"),
    "unknown type": ("value.data.dtype", 7, 1, "dtype is 7, which no type has"),
    "rows of other length": ("key.dim", 10, 1, "key.dim is 10 and its rows are of 9 elements"),
    "int4 rows": ("value.data.dtype", 6, 1, "value.dim is 9 and its rows are of 9 bytes"),
    "last stride": ("key.data.strides.3", 2, 1, "the last must be 1"),
    "group": ("value.group.1", 0, 1, r"value.group\[1\] is 0; it must be at least 1"),
    "scales of other size": ("key.group.2", 5, 1, "key.scales has sizes .* one for each group"),
    "scales' type": ("query.scales.dtype", 5, 1, "query.scales is int8; it must be float32"),
    "zeros' type": ("key.zeros.dtype", 0, 1, "key.zeros"),
    "no scales": ("key.scales", TensorArgs(), 1, "key.scales has sizes"),
    "mean's size": ("key.mean.sizes.3", 8, 1, "key.mean has sizes"),
    "output's type": ("out.dtype", 5, 1, "out is int8; it must be"),
    "output's size": ("out.sizes.3", 8, 1, "out has sizes"),
    "flag": ("bf16_accuracy", 2, 1, "bf16_accuracy is 2"),
    "null": ("key.data.data", None, 1, "key has sizes .* and data NULL"),
    "plain with scales": ("query.data.dtype", 0, 1, "query is float32 and has scales"),
    "threads": ("threads", -1, 1, "threads is -1"),
    "heads": ("key.data.sizes.1", 3, 1, "key"),
}


class TestStructs:
    """Every field is checked, and named in what is said."""

    @pytest.mark.usefixtures("best_isa")
    def test_right(self) -> None:
        args, _held = filled()
        assert native.loaded().quantized_forward(ctypes.addressof(args)) == native.OK

    @pytest.mark.parametrize("name", WRONG)
    @pytest.mark.usefixtures("best_isa")
    def test_wrong(self, name: str) -> None:
        path, value, status, message = WRONG[name]
        args, _held = filled()
        change(path, value)(args)
        library = native.loaded()
        assert library.quantized_forward(ctypes.addressof(args)) == status
        with pytest.raises((ArgumentValueError, NativeError), match=message):
            library.fail(status)

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            ("source.dtype", 5, "source is int8; it must be"),
            ("result.data.dtype", 0, "result is float32; it must be int8 or int4"),
            ("result.data.sizes.2", 5, "result has sizes"),
            ("result.scales.strides.2", 0, "no two elements may share memory"),
            ("result.group.0", -3, r"result.group\[0\] is -3"),
            ("result.mean", quantized._tensor(torch.ones(1, 1, 1, 8)), "result.mean is given"),
            ("mean", quantized._tensor(torch.ones(1, 1, 1, 7)), "mean has sizes"),
            ("reserved", 1, "reserved is 1"),
            ("threads", -2, "threads is -2"),
        ],
    )
    @pytest.mark.usefixtures("best_isa")
    def test_wrong_quantisation(self, path: str, value: Any, message: str) -> None:
        source, data, scales = torch.ones(1, 1, 4, 8), torch.zeros(1, 1, 4, 8).char(), torch.ones(4)
        args = QuantizeArgs(struct_size=ctypes.sizeof(QuantizeArgs), abi_version=1)
        args.source = quantized._tensor(source)
        args.result.data, args.result.dim = quantized._tensor(data), 8
        args.result.scales = quantized._tensor(scales.view(1, 1, 4, 1))
        args.result.group[:] = (1, 1, 1)
        library = native.loaded()
        assert library.quantize(ctypes.addressof(args)) == native.OK
        assert torch.equal(data, torch.full_like(data, 127))
        change(path, value)(args)
        assert library.quantize(ctypes.addressof(args)) == native.INVALID_ARGUMENT
        with pytest.raises(ArgumentValueError, match=message):
            library.fail(native.INVALID_ARGUMENT)


@pytest.mark.layout
def test_guard_pages(
    isa: str, run_program: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Every part of every operand and every output against a page without access."""
    done = run_program("quantized_guard_pages", ORCHARD_CPU_ISA=isa)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
    assert done.stdout.count("guarded at its") == 2 * 42


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [40, 64])
def test_what_torch_takes_for_granted_does_not_matter(dtype: torch.dtype, dim: int) -> None:
    """A default dtype that is set, as where a model is loaded, changes no bit."""
    source = torch.randn(1, 2, 10, dim)
    expected = quantize(source, "int8", smooth=True)
    torch.set_default_dtype(dtype)
    try:
        found = quantize(source, "int8", smooth=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found.data, expected.data)
    assert torch.equal(found.scales, expected.scales)
