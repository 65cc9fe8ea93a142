"""Quantised attention is attention at the dequantised values, with every option and gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.autograd import forward_ad

import orchard
from orchard.attention.dropout import draw_seed
from orchard.attention.ops import Settings
from orchard.attention.problem import Tensors, Upstream
from orchard.dispatch.backend import Reason
from orchard.dispatch.planner import Plan
from orchard.errors import ArgumentTypeError, ArgumentValueError, NotServedError
from orchard.quantization import (
    QuantizationConfig,
    QuantizedPlan,
    engines,
    explain,
    quantize,
    quantized_attention,
)
from orchard.quantization.formats import deviation
from orchard.testing import quantization_accuracy
from orchard.testing.budget import Results, judge
from orchard.testing.inputs import BY_NAME, guarded
from orchard.testing.poison import poisoned

PASSING = QuantizationConfig("fp32", "fp32", "fp32")
CONFIGS = {
    "int8": QuantizationConfig(),
    "int4 asymmetric": QuantizationConfig("int4", "int4", "int4", symmetric=False),
    "fp8 by tensor": QuantizationConfig("fp8", "fp8", "fp8", granularity="tensor"),
    "mixed": QuantizationConfig("bf16", "int8", "int4", granularity="row", smooth_key=False),
}
DEQUANTISED = CONFIGS["fp8 by tensor"]  # no kernel reads fp8, so attention is called
SEED = 4


def operands(dtype: torch.dtype = torch.float32, value_dim: int = 20) -> list[Tensor]:
    """Two query heads for each key head, sizes that no block divides, and keys far from 0."""
    source = Generator().manual_seed(9)
    shapes = (2, 4, 21, 24), (2, 2, 35, 24), (2, 2, 35, value_dim)
    query, key, value = (torch.randn(shape, generator=source) for shape in shapes)
    return [t.to(dtype) for t in (query, key + 2.0, value)]


def values(given: list[Tensor], config: QuantizationConfig) -> list[Tensor]:
    """What the operands stand for once they are stored."""
    call = explain(*given, config=config).call
    return [operand.stored.dequantize(torch.float32) for operand in call[:3]]


def mask(kind: str) -> Tensor:
    drawn = torch.randn(2, 1, 21, 35, generator=Generator().manual_seed(8))
    return drawn > -1.0 if kind == "bool" else drawn


OPTIONS: dict[str, tuple[dict[str, Any], Settings]] = {
    "plain": ({}, Settings(None, 0.0, 0.0, -1, -1, False, "auto")),
    "scale": ({"scale": 0.3}, Settings(0.3, 0.0, 0.0, -1, -1, False, "auto")),
    "causal": ({"causal": True}, Settings(None, 0.0, 0.0, -1, 0, False, "auto")),
    "bottom right": (
        {"causal": "bottom_right"},
        Settings(None, 0.0, 0.0, -1, 0, True, "auto"),
    ),
    "window": ({"window": (5, 3)}, Settings(None, 0.0, 0.0, 5, 3, False, "auto")),
    "softcap": ({"softcap": 2.0}, Settings(None, 2.0, 0.0, -1, -1, False, "auto")),
    "bool mask": ({"mask": mask("bool")}, Settings(None, 0.0, 0.0, -1, -1, False, "auto")),
    "additive mask": (
        {"mask": mask("additive")},
        Settings(None, 0.0, 0.0, -1, -1, False, "auto"),
    ),
    "dropout": ({"dropout_p": 0.25}, Settings(None, 0.0, 0.25, -1, -1, False, "auto")),
}


@pytest.mark.grad
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", OPTIONS)
def test_is_attention_at_the_dequantised_values(name: str, config: QuantizationConfig) -> None:
    """Output, lse and gradients are within the budget of attention at those values."""
    options, settings = OPTIONS[name]
    given = operands()
    exact = values(given, config)
    leaves = [t.clone().requires_grad_() for t in given]
    with poisoned():
        out, lse = quantized_attention(
            *leaves,
            config=config,
            return_lse=True,
            generator=Generator().manual_seed(SEED),
            **options,
        )
    source = Generator().manual_seed(1)
    upstream = Upstream(
        torch.randn(out.shape, generator=source), torch.randn(lse.shape, generator=source)
    )
    grads = torch.autograd.grad([out, lse], leaves, [upstream.out, upstream.lse])
    seed = draw_seed(torch.device("cpu"), Generator().manual_seed(SEED))
    tensors = Tensors(*exact, options.get("mask"), seed if settings.dropout_p else None)
    results = Results(out.detach(), lse.detach(), *grads)
    problem_options = settings.options(tensors.query, tensors.key)
    for comparison in judge(results, tensors, problem_options, upstream):
        assert comparison.ok, comparison


@pytest.mark.grad
def test_mask_gradient_and_second_gradients() -> None:
    """They are those of attention at the dequantised values, to the bit."""
    given, bias = operands(), mask("additive")
    exact = values(given, DEQUANTISED)

    def second(function: Any, tensors: list[Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (*tensors, bias)]
        out = function(*leaves[:3], mask=leaves[3])
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]

    quantised = partial(quantized_attention, config=DEQUANTISED)
    found, expected = second(quantised, given), second(orchard.attention, exact)
    assert len(found) == 8
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.grad
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_have_the_operands_dtype(dtype: torch.dtype) -> None:
    """A half-precision operand gets the fp32 gradient, rounded once."""
    given = operands(dtype)
    exact = [t.requires_grad_() for t in values(given, DEQUANTISED)]
    leaves = [t.clone().requires_grad_() for t in given]
    upstream = torch.randn(2, 4, 21, 20).to(dtype)
    out = quantized_attention(*leaves, config=DEQUANTISED)
    found = torch.autograd.grad(out, leaves, upstream)
    expected = torch.autograd.grad(orchard.attention(*exact), exact, upstream.float())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other.to(dtype))


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_and_ranks(layout: Any, rank: int) -> None:
    """Fewer axes and the other layout give the same numbers, shaped as they were asked for."""
    given = [t[(0,) * (4 - rank)] for t in operands()]
    config = QuantizationConfig(smooth_key=False)
    expected, lse = quantized_attention(*given, config=config, causal=True, return_lse=True)
    if layout == "bshd" and rank > 2:
        given = [t.transpose(-3, -2) for t in given]
        expected = expected.transpose(-3, -2)
    out, same = quantized_attention(
        *given, config=config, causal=True, return_lse=True, layout=layout
    )
    assert torch.equal(out, expected)
    assert torch.equal(same, lse)


@pytest.mark.layout
@pytest.mark.dtype
@pytest.mark.parametrize("view", ["contiguous", "bshd", "qkv_slice", "last_strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtype_and_memory_order(dtype: torch.dtype, view: str) -> None:
    """dtype in is dtype out, axes lie as the query's, and nothing around is read or written."""
    source = Generator().manual_seed(2)
    guards = [
        guarded((2, 3, 19, 16), BY_NAME[view], dtype=dtype, generator=source) for _ in range(3)
    ]
    given = [guard.tensor for guard in guards]
    with poisoned():
        out = quantized_attention(*given, causal=True)
    assert out.dtype == dtype
    assert torch.equal(out, quantized_attention(*(t.contiguous() for t in given), causal=True))
    expected = orchard.attention(*given, causal=True)
    assert out.stride() == expected.stride()
    assert all(guard.intact() for guard in guards)


@pytest.mark.dtype
class TestChecksOfTheBf16Log:
    """The five checks that an earlier system's log shows failing."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8", "int4", "fp8"])
    def test_dtype_mapping(self, precision: Any, dtype: torch.dtype) -> None:
        """Whatever the operands are stored in, the output has the input's dtype."""
        config = QuantizationConfig(precision, precision, precision)
        assert quantized_attention(*operands(dtype), config=config).dtype == dtype

    def test_contiguous_and_not(self) -> None:
        """bf16 in memory orders [B, H, S, D] and [B, S, H, D] gives the same finite numbers."""
        given = operands(torch.bfloat16)
        permuted = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given]
        out, same = quantized_attention(*given), quantized_attention(*permuted)
        assert not permuted[0].is_contiguous()
        assert torch.isfinite(out).all()
        assert torch.equal(out, same)

    @pytest.mark.parametrize("number", [0.5, 1.0, -2.0, 3.140625, 65280.0])
    @pytest.mark.parametrize("precision", ["bf16", "int8", "int4", "fp8"])
    def test_known_values(self, precision: Any, number: float) -> None:
        """Values that bf16 represents come back exactly when every key has the same one."""
        query, key, value = operands(torch.bfloat16)
        config = QuantizationConfig(precision, precision, precision)
        out = quantized_attention(query, key, torch.full_like(value, number), config=config)
        assert torch.equal(out, torch.full_like(out, number))

    @pytest.mark.parametrize("precision", ["bf16", "int8"])
    def test_minimal_call(self, precision: Any) -> None:
        """1x1x1x2: one key has all the weight, so the output is the value."""
        value = torch.tensor([127.0, -64.0], dtype=torch.bfloat16).view(1, 1, 1, 2) / 64
        query = torch.tensor([1.0, 2.0], dtype=torch.bfloat16).view(1, 1, 1, 2)
        config = QuantizationConfig(precision, precision, precision)
        assert torch.equal(quantized_attention(query, query, value, config=config), value)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_round_trips(self, dtype: torch.dtype) -> None:
        """What a precision represents survives being stored and read back, to the bit."""
        levels = torch.arange(-127, 128).view(1, 1, 5, 51).to(dtype) / 64
        levels[..., 0] = 127 / 64  # every row has the scale 1 / 64
        assert torch.equal(quantize(levels, "int8", "row").dequantize(), levels)
        small = torch.arange(-7, 8).view(1, 1, 3, 5).to(dtype) / 4
        small[..., 0] = 7 / 4
        assert torch.equal(quantize(small, "int4", "row").dequantize(), small)
        name: Any = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        drawn = torch.randn(2, 3, 5, 7).to(dtype)
        assert torch.equal(quantize(drawn, name).dequantize(), drawn)


@pytest.mark.dtype
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", quantization_accuracy.INPUTS)
def test_int8_in_smoothed_blocks_is_near(name: str, dtype: torch.dtype) -> None:
    """Against fp64 at the operands: cosine 0.9995 of the output, 0.999 of every gradient."""
    given = [t.to(dtype) for t in quantization_accuracy.inputs(name)]
    leaves = [t.clone().requires_grad_() for t in given]
    wide = [t.double().requires_grad_() for t in given]
    out, exact = quantized_attention(*leaves), orchard.attention(*wide)
    assert deviation(out, exact).cosine >= 0.9995
    upstream = torch.randn(out.shape, dtype=torch.float64)
    found = torch.autograd.grad(out, leaves, upstream.to(dtype))
    expected = torch.autograd.grad(exact, wide, upstream)
    for one, other in zip(found, expected, strict=True):
        assert deviation(one, other).cosine >= 0.999


def test_accuracy_table() -> None:
    """Finer scales are better, more bits are better, and smoothing helps offset channels."""
    lines = quantization_accuracy.lines()
    error = {line[:4]: line.measured.out.relative_l2 for line in lines}
    for name in quantization_accuracy.INPUTS:
        by_granularity = [error[name, "int8", g, False] for g in ("tensor", "block", "row")]
        assert by_granularity == sorted(by_granularity, reverse=True)
        assert error[name, "int8", "block", True] < error[name, "int4", "block", True]
        found = next(line for line in lines if line[:4] == (name, "int8", "block", True)).measured
        assert found.out.cosine >= 0.9995
        assert found.gradients.cosine >= 0.999
    offset = "offset channels"
    for precision in ("int8", "fp8", "int4"):
        assert error[offset, precision, "block", True] < error[offset, precision, "block", False]
    table = quantization_accuracy.table().splitlines()
    assert len(table) == len(lines) + 2
    assert table[0].startswith("| input | precision |")


def test_quantised_operands_are_taken_as_they_are() -> None:
    """Key and value that were quantised before give the bits of quantising them in the call."""
    query, key, value = operands(torch.bfloat16)
    config = QuantizationConfig()
    stored = quantize(key, smooth=True), quantize(value)
    expected = quantized_attention(query, key, value, config=config)
    assert torch.equal(quantized_attention(query, *stored, config=config), expected)
    other = QuantizationConfig(key_precision="int4", value_precision="fp8")
    assert torch.equal(quantized_attention(query, *stored, config=other), expected)
    all_stored = quantized_attention(quantize(query), *stored)
    assert all_stored.dtype == torch.bfloat16
    assert torch.equal(all_stored, expected)
    leaf = query.clone().requires_grad_()
    (grad,) = torch.autograd.grad(quantized_attention(leaf, *stored).sum(), leaf)
    assert torch.isfinite(grad).all()
    assert grad.abs().sum() > 0


def test_pass_through_is_attention() -> None:
    """With nothing quantised it is orchard.attention, to the bit."""
    given = operands()
    assert torch.equal(quantized_attention(*given, config=PASSING), orchard.attention(*given))


def test_autocast_does_not_apply() -> None:
    """The precisions are the configuration's, under autocast too."""
    given = operands()
    with torch.autocast("cpu", torch.bfloat16):
        out = quantized_attention(*given)
        plan = explain(*given, config=DEQUANTISED)
    assert out.dtype == torch.float32
    assert torch.equal(out, quantized_attention(*given))
    assert plan.attention is not None
    assert plan.attention.problem.dtype == torch.float32


def test_no_graph_without_gradients() -> None:
    """Under no_grad nothing is kept for a backward."""
    leaves = [t.requires_grad_() for t in operands()]
    with torch.no_grad():
        assert not quantized_attention(*leaves).requires_grad


class TestPlan:
    """Who serves a quantised call, and why."""

    def test_explain_is_readable(self) -> None:
        """It names the engine, what follows it, each operand's format and its bytes."""
        config = QuantizationConfig("fp16", value_precision="fp8")
        plan = explain(*operands(torch.bfloat16), causal=True, config=config)
        text = str(plan)
        assert text.startswith("quantised attention: dequantise, then cpu (dequantises")
        lines = text.splitlines()
        query, key = (next(line for line in lines if line.startswith(n)) for n in ("query", "key"))
        assert "fp16" in query
        assert "none" in query
        assert "(100%)" in query
        assert "int8, symmetric, mean" in key
        assert plan.attention is not None
        assert str(plan.attention) in text
        assert plan.attention.problem.band_kind == "causal"

    def test_the_first_engine_without_reasons_serves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An engine before the last serves the calls it has nothing against, and only those."""
        seen = []

        def reasons(call: engines.QuantizedCall) -> tuple[Reason, ...]:
            if call.key.stored.format.precision != "int8":
                return (Reason("precision", "takes int8 keys"),)
            return ()

        def serve(call: engines.QuantizedCall) -> engines.Served:
            seen.append(call)
            return engines.Served(torch.full((2, 4, 21, 20), 7.0), None)

        mine = engines.Engine("sevens", "seven", "answers 7", reasons, serve, lambda call: None)
        monkeypatch.setattr(engines, "ENGINES", (mine, *engines.ENGINES))
        given = operands(torch.bfloat16)
        out = quantized_attention(*given, softcap=2.0)
        assert torch.equal(out, torch.full((2, 4, 21, 20), 7.0, dtype=torch.bfloat16))
        assert seen[0].options == {"softcap": 2.0}
        assert str(explain(*given)).startswith("quantised attention: sevens (answers 7)")
        other = QuantizationConfig(key_precision="int4")
        assert "sevens: takes int8 keys" in str(explain(*given, config=other))
        assert quantized_attention(*given, config=other).unique().numel() > 1
        assert len(seen) == 1

    def test_the_backend_is_passed_on(self) -> None:
        """A backend that is insisted on serves the attention inside, or says why not."""
        given = operands()
        orchard.stats(reset=True)
        quantized_attention(*given, backend="reference")
        assert orchard.stats()["calls"]["forward"] == {"reference": 1}
        with pytest.raises(NotServedError, match="does not run on cpu"):
            quantized_attention(*given, backend="metal")


@pytest.mark.errors
class TestErrors:
    @pytest.mark.parametrize("operand", [0, 1, 2])
    def test_not_finite(self, operand: int) -> None:
        """The operand that holds NaN is named."""
        given = operands()
        given[operand][0, 0, 3, 5] = torch.nan
        name = ("query", "key", "value")[operand]
        with pytest.raises(ArgumentValueError, match=f"{name} holds NaN or Inf"):
            quantized_attention(*given)

    def test_wrong_arguments(self) -> None:
        """Types, layouts and unknown options are refused."""
        query, key, value = operands()
        wrong: Any = {"precision": "int8"}
        with pytest.raises(ArgumentTypeError, match=r"config is .*QuantizationConfig"):
            quantized_attention(query, key, value, config=wrong)
        with pytest.raises(ArgumentTypeError, match=r"value is .* it must be a torch\.Tensor"):
            quantized_attention(query, key, wrong)
        with pytest.raises(ArgumentValueError, match="key was quantised with layout 'bshd'"):
            quantized_attention(query, quantize(key, layout="bshd"), value)
        with pytest.raises(ArgumentValueError, match="softcap is -1"):
            quantized_attention(query, key, value, softcap=-1.0)
        with pytest.raises(ArgumentValueError, match="key has head dimension"):
            quantized_attention(query, key[..., 1:], value)
        with pytest.raises(TypeError, match="sofcap"):
            quantized_attention(query, key, value, sofcap=1.0)


class TestExplain:
    """`orchard.explain` covers quantised calls too."""

    def test_config(self) -> None:
        """With a config it is the plan of the quantised call, and that call's engine serves."""
        given, config = operands(torch.bfloat16), QuantizationConfig(key_precision="int4")
        plan = orchard.explain(*given, config=config, causal=True, return_lse=True)
        assert isinstance(plan, QuantizedPlan)
        assert plan.call.key.stored.format.precision == "int4"
        assert plan.call.options == {"causal": True}
        assert plan.call.return_lse
        assert str(plan) == str(explain(*given, config=config, causal=True))

    @pytest.mark.parametrize("place", range(3))
    def test_stored_operand(self, place: int) -> None:
        """One operand that is quantised already is enough, whichever it is."""
        given: list[Any] = list(operands(torch.float32))
        given[place] = quantize(given[place])
        plan = orchard.explain(*given)
        assert isinstance(plan, QuantizedPlan)
        assert plan.call[place].stored is given[place]

    def test_attention(self) -> None:
        """Without either it is the plan of attention, and what attention refuses is refused."""
        query, key, value = operands(torch.float32)
        assert isinstance(orchard.explain(query, key, value, backend="reference"), Plan)
        with pytest.raises(TypeError, match="key is None"):
            orchard.explain(query, None, value)

    def test_wrong_config(self) -> None:
        with pytest.raises(TypeError, match="config is 'int8'; it must be a QuantizationConfig"):
            orchard.explain(*operands(torch.float32), config="int8")


def negated(tensor: Tensor) -> Tensor:
    """The same values, whose sign torch turns when they are read."""
    lazy = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert lazy.is_neg()
    assert torch.equal(lazy, tensor)
    return lazy


@pytest.mark.layout
@pytest.mark.parametrize("config", [QuantizationConfig(), PASSING], ids=["int8", "fp32"])
@pytest.mark.parametrize("place", ["query", "key", "value", "mask"])
def test_a_sign_that_is_turned_lazily(place: str, config: QuantizationConfig) -> None:
    given = dict(zip(("query", "key", "value"), operands(), strict=True))
    given["mask"] = mask("additive")
    expected = quantized_attention(**given, config=config)
    given[place] = negated(given[place])
    assert torch.equal(quantized_attention(**given, config=config), expected)


@pytest.mark.dtype
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 9])
def test_the_largest_fp16_stays_finite(rows: int, precision: Any) -> None:
    """Its level of an asymmetric value may stand for half a step more."""
    value = torch.full((1, 1, 7, 8), 65504.0, dtype=torch.float16)
    value[..., 0] = -100.0
    query, key = (torch.randn(1, 1, n, 8).half() for n in (rows, 7))
    config = QuantizationConfig(value_precision=precision, symmetric=False)
    out = quantized_attention(query, key, value, config=config)
    assert out.dtype == torch.float16
    assert bool(out.isfinite().all())
    assert float(out[..., 1:].amin()) > 60000.0


@pytest.mark.errors
def test_derivatives_that_rounding_has_not_are_refused() -> None:
    query, key, value = operands()
    with pytest.raises(NotServedError, match=r"torch\.func"):
        torch.func.grad(lambda x: quantized_attention(x, key, value).sum())(query)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(NotServedError, match="forward-mode"):
            quantized_attention(dual, key, value)
        quantized_attention(query, key, value)
