"""The Metal kernels on operands in few bits, executed by the emulator: never yet on a Mac."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from metal_fakes import FakeMetal, FakeRuntime
from test_metal_mutants import Mutant, MutatingRuntime, places
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from orchard.attention.dropout import draw_seed
from orchard.attention.problem import Options, Tensors, Upstream
from orchard.backends.metal.emulated import EmulatedRuntime, MetalEmulatedBackend
from orchard.backends.metal.quantized import StoredOperands
from orchard.backends.metal.source import MetalCompileError
from orchard.dispatch import planner as plans
from orchard.quantization import (
    KVCache,
    QuantizationConfig,
    QuantizedPlan,
    QuantizedTensor,
    explain,
    kernel_calls,
    quantize,
    quantized_attention,
)
from orchard.testing.budget import Results, judge
from orchard.testing.inputs import BY_NAME, GUARD, View
from orchard.testing.metal import SCHEDULES, EmulationError, Emulator
from orchard.testing.metal.launch_lint import check_launch
from orchard.testing.metal.lint import signatures
from orchard.testing.metal.sparse import far_apart
from orchard.testing.poison import poisoned

emulated = pytest.mark.usefixtures("metal_compiler")
pytestmark = pytest.mark.metal

NAME = MetalEmulatedBackend.name
SEED = 5


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    """One for the module; "view" bounds are the strictest."""
    return Emulator(bounds="view")


@pytest.fixture(scope="module")
def server(emulator: Emulator) -> MetalEmulatedBackend:
    """One for the module, so that it is probed once and a kernel is compiled once."""
    return MetalEmulatedBackend(EmulatedRuntime(emulator))


@pytest.fixture
def backend(
    server: MetalEmulatedBackend, fresh_planner: None, monkeypatch: pytest.MonkeyPatch
) -> MetalEmulatedBackend:
    """metal-emulated among the backends."""
    monkeypatch.setitem(plans.planner().backends, NAME, server)
    return server


# Values


class Kind(NamedTuple):
    """Head dimensions, formats and options; a specialisation of its own."""

    dim: int
    value_dim: int
    config: QuantizationConfig
    options: dict[str, Any]
    mask: str = ""


INT4 = QuantizationConfig("int4", "int4", "int4")
KINDS = {
    "int8 blocks, smoothed": Kind(24, 12, QuantizationConfig(), {}),
    "int8 asymmetric blocks of heads": Kind(
        21,
        11,
        QuantizationConfig(symmetric=False, head_block_size=2, key_block_size=7),
        {"causal": True},
        "bool",
    ),
    "int4 rows": Kind(20, 8, replace(INT4, granularity="row"), {"softcap": 3.0, "window": (9, 50)}),
    "int4 asymmetric by tensor": Kind(
        13,
        7,
        replace(INT4, symmetric=False, granularity="tensor"),
        {"dropout_p": 0.25},
        "additive",
    ),
    "bf16 query, int8 key, int4 value": Kind(
        16,
        20,
        QuantizationConfig("bf16", "int8", "int4", smooth_key=False),
        {"causal": "bottom_right"},
    ),
    "hybrid int4 query, fp16 key, asymmetric int8 value": Kind(
        12,
        4,
        QuantizationConfig("int4", "fp16", "int8", symmetric=False, granularity="hybrid"),
        {"scale": -0.3},
    ),
}
ROWS = {"tiles": (13, 45), "decode": (2, 90)}  # rows and keys; two query heads share a key head


def operands(rows: int, keys: int, dim: int, value_dim: int) -> list[Tensor]:
    """Normal values, the keys far from 0."""
    source = Generator().manual_seed(3)
    query = torch.randn(2, 4, rows, dim, generator=source)
    key = torch.randn(2, 2, keys, dim, generator=source) + 2.0
    value = torch.randn(2, 2, keys, value_dim, generator=source)
    return [query, key, value]


def mask_of(kind: str, rows: int, keys: int) -> Tensor | None:
    """Broadcast over the batch; the first row of a bool one sees nothing."""
    if not kind:
        return None
    drawn = torch.randn(4, rows, keys, generator=Generator().manual_seed(8))
    if kind == "additive":
        return drawn
    drawn[:, 0] = -9.0
    return drawn > -1.0


def call_of(name: str, path: str) -> tuple[list[Tensor], dict[str, Any]]:
    """The operands of a kind, and its configuration and options."""
    dim, value_dim, config, options, mask = KINDS[name]
    rows, keys = ROWS[path]
    more = {"config": config, "backend": NAME, "mask": mask_of(mask, rows, keys)}
    return operands(rows, keys, dim, value_dim), {**options, **more}


def exact_tensors(plan: QuantizedPlan) -> tuple[Tensors, Options]:
    """What the call computes by its definition: the dequantised values, and settled options."""
    settled = plan.call.plain.problem.options
    query, key, value = (operand.stored.dequantize(torch.float32) for operand in plan.call[:3])
    seed = draw_seed(torch.device("cpu"), Generator().manual_seed(SEED))
    mask = kernel_calls.mask_of(plan.call)
    return Tensors(query, key, value, mask, seed if settled.threshold else None), settled


def check(given: list[Any], **options: Any) -> None:
    """Served by the engine, and out and lse within the budget of fp32 at those values."""
    plan = explain(*given, **options)
    assert plan.engine.name == NAME, plan
    with poisoned():
        found = quantized_attention(
            *given, **options, return_lse=True, generator=Generator().manual_seed(SEED)
        )
    for comparison in judge(Results(*found), *exact_tensors(plan)):
        assert comparison.ok, comparison


@emulated
@pytest.mark.parametrize("path", ROWS)
@pytest.mark.parametrize("name", KINDS)
def test_formats_and_options(name: str, path: str, backend: MetalEmulatedBackend) -> None:
    """Every format, granularity and option by both ways; no access out of bounds, no race."""
    given, options = call_of(name, path)
    check(given, **options)


@emulated
@pytest.mark.parametrize("path", ROWS)
@pytest.mark.parametrize(("dim", "value_dim"), [(0, 8), (8, 0), (1, 3)])
def test_narrow_heads(dim: int, value_dim: int, path: str, backend: MetalEmulatedBackend) -> None:
    """Heads without an element, and those whose last byte holds one level."""
    check(operands(*ROWS[path], dim, value_dim), config=INT4, backend=NAME)


@emulated
@pytest.mark.parametrize("path", ROWS)
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_cache(precision: Any, path: str, backend: MetalEmulatedBackend) -> None:
    """Keys and values in a cache's buffers, which have room behind every head."""
    rows, keys = ROWS[path]
    query, key, value = operands(rows, keys, 20, 20)
    cache = KVCache(QuantizationConfig("fp32", precision, precision, symmetric=False))
    for some in (slice(keys // 2 + 5), slice(keys // 2 + 5, None)):
        cache.append(key[:, :, some], value[:, :, some])
    assert cache.key.data.stride(1) > cache.key.data.shape[2] * cache.key.data.stride(2)
    config = QuantizationConfig("fp32")
    check([query, cache.key, cache.value], config=config, causal="bottom_right", backend=NAME)


@emulated
@pytest.mark.dtype
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_output(layout: Any, backend: MetalEmulatedBackend) -> None:
    """It is fp32's, rounded once to the query's dtype, shaped and ordered as the query."""
    given, options = call_of("int8 blocks, smoothed", "tiles")
    halves = [tensor.bfloat16() for tensor in given]
    whole = replace(options.pop("config"), output_precision="fp32")
    expected = quantized_attention(*halves, config=whole, **options)
    assert expected.dtype == torch.float32
    if layout == "bshd":
        halves = [tensor.transpose(1, 2) for tensor in halves]
        expected = expected.transpose(1, 2)
    out = quantized_attention(*halves, layout=layout, **options)
    assert torch.equal(out, expected.bfloat16())
    assert out.stride() == torch.empty_like(halves[0][..., :12]).stride()


@emulated
@pytest.mark.parametrize("path", ROWS)
def test_schedules_make_no_difference(
    path: str,
    backend: MetalEmulatedBackend,
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever thread runs first, the bits are the same."""
    given, options = call_of("int8 blocks, smoothed", path)
    found = []
    for schedule in SCHEDULES:
        monkeypatch.setattr(emulator, "schedule", schedule)
        found.append(quantized_attention(*given, **options))
    assert all(torch.equal(found[0], other) for other in found[1:])


@emulated
@pytest.mark.parametrize("path", ROWS)
def test_nothing_is_undefined(path: str) -> None:
    """With the compiler's own checks: overflow, shifts, divisions, conversions, local arrays."""
    flat = MetalEmulatedBackend(EmulatedRuntime(Emulator(mode="flat", bounds="view")))
    stored, options = stored_operands(path), Options(0.2)
    saved = flat.forward_stored(stored, None, None, options)
    for comparison in judge(Results(*saved), values_of(stored), options):
        assert comparison.ok, comparison


@emulated
@pytest.mark.grad
def test_gradients(backend: MetalEmulatedBackend) -> None:
    """Those of attention at the dequantised values, with the dropout's bits, by the backend."""
    given, options = call_of("int4 asymmetric by tensor", "tiles")
    leaves = [tensor.requires_grad_() for tensor in given]
    out, lse = quantized_attention(
        *leaves, **options, return_lse=True, generator=Generator().manual_seed(SEED)
    )
    source = Generator().manual_seed(1)
    upstream = Upstream(*(torch.randn(t.shape, generator=source) for t in (out, lse)))
    grads = torch.autograd.grad([out, lse], leaves, list(upstream))
    plan = explain(*(leaf.detach() for leaf in leaves), **options)
    results = Results(out.detach(), lse.detach(), *grads)
    for comparison in judge(results, *exact_tensors(plan), upstream):
        assert comparison.ok, comparison


@emulated
def test_sizes_of_zero(backend: MetalEmulatedBackend) -> None:
    """No key: zeros and -inf, and nothing is launched."""
    query, key, value = operands(5, 0, 8, 8)
    out, lse = quantized_attention(query, key, value, return_lse=True, backend=NAME)
    assert not out.any()
    assert torch.isneginf(lse).all()
    assert quantized_attention(query[:, :, :0], key, value, backend=NAME).shape == (2, 4, 0, 8)


# Memory


def parts_of(stored: QuantizedTensor, lay: Callable[[Tensor], Tensor]) -> QuantizedTensor:
    """The same with each of its parts laid out in another way."""
    parts: dict[str, Any] = {name: lay(part) for name, part in stored.parts.items()}
    return replace(stored, **parts)


def laid_out(part: Tensor, view: View) -> Tensor:
    """A part between guards, in memory as the view says."""
    whole = part.unsqueeze(-1) if part.ndim == 3 else part
    strides = view.strides(whole.shape)
    span = 1 + sum((size - 1) * step for size, step in zip(whole.shape, strides, strict=True))
    start = GUARD + view.offset
    guard = torch.nan if part.is_floating_point() else 85
    buffer = torch.full((start + span + GUARD,), guard, dtype=part.dtype)
    found = buffer.as_strided(whole.shape, strides, start).copy_(whole)
    return found.squeeze(-1) if part.ndim == 3 else found


def stored_operands(path: str) -> StoredOperands:
    """Levels of each kind, with scales, zero points and a mean among them."""
    rows, keys = ROWS[path]
    query, key, value = operands(rows, keys, 20, 12)
    return StoredOperands(
        quantize(query, "int8", "row", symmetric=False),
        quantize(key, "int4", "block", 7, symmetric=False, head_block_size=2, smooth=True),
        quantize(value, "int8", "block", 5),
    )


def values_of(stored: StoredOperands) -> Tensors:
    return Tensors(*(operand.dequantize(torch.float32) for operand in stored))


@emulated
@pytest.mark.layout
@pytest.mark.parametrize("path", ROWS)
@pytest.mark.parametrize("view", ["bshd", "odd_offset", "every_axis_strided"])
def test_strides_of_every_part(view: str, path: str, backend: MetalEmulatedBackend) -> None:
    """Levels, scales, zero points and mean are read where they lie, and what is beside is not."""
    whole = stored_operands(path)
    given = StoredOperands(*(parts_of(o, lambda p: laid_out(p, BY_NAME[view])) for o in whole))
    options = Options(0.2)
    expected = backend.forward_stored(whole, None, None, options)
    found = backend.forward_stored(given, None, None, options)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


@emulated
@pytest.mark.layout
@pytest.mark.parametrize("path", ROWS)
def test_parts_further_apart_than_32_bits(path: str, backend: MetalEmulatedBackend) -> None:
    """Heads of levels, scales and zero points lie beyond 2**32 elements."""
    whole = stored_operands(path)
    distance = 2**32 + 8
    given = StoredOperands(*(parts_of(o, lambda p: far_apart(p, 0, distance)) for o in whole))
    expected = backend.forward_stored(whole, None, None, Options(0.2))
    found = backend.forward_stored(given, None, None, Options(0.2))
    assert torch.equal(found.out, expected.out)


class Allocations(TorchDispatchMode):
    """The operators that ran, with the shapes of what they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append((func.overloadpacket.__name__, tuple(result.shape)))
        return result


@pytest.mark.parametrize("path", ROWS)
def test_no_copy_is_made(path: str) -> None:
    """The kernel gets the very parts of the operands, and all else it gets is output."""
    runtime, given = FakeRuntime(), stored_operands(path)
    with Allocations() as allocations:
        saved = FakeMetal(runtime).forward_stored(given, None, None, Options(0.2))
    call = runtime.calls[0]
    bound = {arg.data_ptr(): arg.nbytes for arg in call.args if isinstance(arg, Tensor)}
    parts = {p.data_ptr(): p.nbytes for stored in given for p in stored.parts.values()}
    assert len(parts) == 9
    assert parts.items() <= bound.items()
    rows, _ = ROWS[path]
    made = [(2, 4, rows, 12), (2, 4, rows)]
    if path == "decode":  # the sums of the runs, their highest scores and their totals
        made += [(2, 4, rows, 2, 12), (2, 4, rows, 2), (2, 4, rows, 2)]
    assert allocations.seen == [("empty_strided", shape) for shape in made]
    written = bound.keys() - parts.keys()
    outputs = {saved.out.data_ptr(), saved.lse.data_ptr()}
    assert written == outputs if path == "tiles" else len(written) == 3
    known = signatures(runtime.sources[0])
    for one in runtime.calls:
        assert check_launch(*one[1:], known[one.name]) == [], one.name


@emulated
@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4)])
def test_what_is_read(
    precision: Any, bits: int, backend: MetalEmulatedBackend, emulator: Emulator
) -> None:
    """Each threadgroup of 32 rows reads each level once, and a scale with every four of them."""
    query, key, value = operands(64, 64, 32, 32)
    stored = StoredOperands(*(quantize(tensor, precision) for tensor in (query, key, value)))
    emulator.counters.clear()
    backend.forward_stored(stored, None, None, Options(0.2))
    rows, levels = 2 * 4 * 64, 2 * 64 * 32
    of_queries = rows * (32 * bits // 8 + 4 * 4)  # four lanes share a row and its scale
    of_keys_and_values = 2 * 4 * 2 * levels * (bits + 8) // 8
    read = emulator.counters["attention_forward"].device_read
    assert read == of_queries + of_keys_and_values


# Who serves


class TestReasons:
    """What the engines leave to the next, and say so."""

    @pytest.mark.parametrize(
        ("config", "code"), [({"key_precision": "fp8"}, "precision"), ({}, "on_request")]
    )
    def test_calls(self, config: Any, code: str, backend: MetalEmulatedBackend) -> None:
        given, options = call_of("int8 blocks, smoothed", "tiles")
        if code == "on_request":
            del options["backend"]
        plan = explain(*given, **{**options, "config": QuantizationConfig(**config)})
        codes = [reason.code for reason in kernel_calls.reasons(plan.call, NAME)]
        assert codes == [code]
        assert plan.engine.name != NAME

    @emulated
    def test_a_smoothed_value(self, backend: MetalEmulatedBackend) -> None:
        query, key, value = operands(13, 45, 24, 12)
        plan = explain(query, key, quantize(value, smooth=True), backend=NAME)
        assert plan.engine.name == "dequantise"
        assert [reason.code for reason in dict(plan.rejected)[NAME]] == ["smoothing"]

    @emulated
    def test_a_wide_head(self, backend: MetalEmulatedBackend) -> None:
        """No backend of that name serves it: the engine's reason is the backend's."""
        plan = explain(*operands(3, 4, 257, 8), backend=NAME)
        assert plan.engine.name == "dequantise"
        assert [reason.code for reason in dict(plan.rejected)[NAME]] == ["head_dim"]

    @emulated
    def test_wrong_values(self) -> None:
        """The probe of the kernels on levels notices what that of the others does not."""
        (mutant,) = places("operands.h", "(bits ^ 8) - 8", "bits")
        broken = MetalEmulatedBackend(MutatingRuntime(mutant))
        assert broken.unavailable(broken.capabilities[0], torch.device("cpu")) is None
        (reason,) = broken.stored_reasons(stored_operands("tiles"), None, Options(0.2))
        assert reason == ("unavailable", "its probe computed wrong values", "")

    def test_a_source_that_does_not_compile(
        self, fresh_planner: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its words are the reason, and the engine that dequantises is next."""
        runtime = FakeRuntime("program_source:9:1: error: unknown type name 'uchr'")
        monkeypatch.setitem(plans.planner().backends, "metal", FakeMetal(runtime))
        plan = explain(*operands(13, 45, 24, 12), backend="metal")
        assert plan.engine.name == "dequantise"
        (reason,) = dict(plan.rejected)["metal"]
        assert reason.code == "failed"
        assert "unknown type name 'uchr'" in reason.sentence

    def test_metal(self, fresh_planner: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """On an Apple GPU the engine is `metal`, and what is launched is the same."""
        runtime = FakeRuntime()
        monkeypatch.setitem(plans.planner().backends, "metal", FakeMetal(runtime))
        given = operands(13, 45, 24, 12)
        plan = explain(*given, backend="metal")
        assert str(plan).startswith("quantised attention: metal (reads int8 and int4 where they")
        quantized_attention(*given, backend="metal")
        assert [call.name for call in runtime.calls] == ["attention_forward"]
        assert "#define KEY_TYPE char" in runtime.sources[0]


# Mistakes in the kernels


def shape(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=Generator().manual_seed(sum(sizes)))


def problems() -> Iterator[StoredOperands]:
    """Loads of four, loads of one, and a decode whose last run is not whole."""
    query, key, value = shape(2, 4, 10, 12), shape(2, 2, 37, 12) + 2.0, shape(2, 2, 37, 8)
    blocks: dict[str, Any] = {"block_size": 5, "head_block_size": 2, "symmetric": False}
    yield StoredOperands(
        quantize(query, "int8", symmetric=False),
        quantize(key, "int4", **blocks, smooth=True),
        quantize(value, "int8", "tensor"),
    )
    query, key, value = (tensor[..., : tensor.shape[3] - 1] for tensor in (query, key, value))
    yield StoredOperands(
        quantize(query, "int4"), quantize(key, "int8", **blocks), quantize(value, "int4", "tensor")
    )
    yield StoredOperands(
        quantize(query[:, :, :1], "fp32"),
        quantize(key, "int8", **blocks, smooth=True),
        quantize(value, "int4", "row", symmetric=False),
    )


def caught_by(mutant: Mutant | None) -> str:
    """What noticed the mutant; empty if nothing did."""
    backend, options = MetalEmulatedBackend(MutatingRuntime(mutant)), Options(0.3)
    for stored in problems():
        try:
            saved = backend.forward_stored(stored, None, None, options)
        except (EmulationError, MetalCompileError) as error:
            return type(error).__name__
        for verdict in judge(Results(*saved), values_of(stored), options):
            if not verdict.ok:
                return f"wrong {verdict.name}"
    return ""


MUTANTS = (
    *places("operands.h", "row / head.group_rows * head.scale", "row * head.scale"),
    *places("operands.h", "row / head.group_rows * head.zero", "row * head.zero"),
    *places("operands.h", "batch / int(sizes[0])", "batch"),
    *places("operands.h", "head / int(sizes[1])", "head"),
    *places("operands.h", "data + plane(strides, batch, head)", "data"),
    *places("operands.h", "column % 2 == 0", "column % 2 == 1"),
    *places("operands.h", "(bits ^ 8) - 8", "bits"),
    *places("operands.h", "row[(column + i) / 2]", "row[column / 2]"),
    *places("operands.h", "column / 2 * stride", "column * stride"),
    *places("operands.h", " - row.zero", ""),
    *places("operands.h", " * row.scale", ""),
    *places("operands.h", "const device char* zeros;", "const device uchar* zeros;"),
    *places("forward.metal", "min(row, rows - 1)", "row"),
    *places("forward.metal", "common = row_sum(common);", ""),
    *places("decode.metal", "float product = common[r];", "float product = 0.0f;"),
)


@pytest.mark.docs
def test_the_docs_count_right() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs/metal.md").read_text().split())
    assert f"{len(MUTANTS)} of {len(MUTANTS)} in how operands in few bits" in text


@emulated
@pytest.mark.slow
def test_the_kernels_as_they_are() -> None:
    """Nothing is found where nothing was changed."""
    assert caught_by(None) == ""


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants(mutant: Mutant, record_property: Callable[[str, object], None]) -> None:
    """Every one is caught; the list is printed at the end of the run."""
    how = caught_by(mutant)
    record_property("mutant", f"{mutant}: {how or 'not caught'}")
    assert how
