"""The cuda backend on an NVIDIA GPU."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from programs.problems import ASSORTED, differences, settings
from torch import Tensor

import orchard
from orchard.attention import reference
from orchard.attention.dropout import draw_seed
from orchard.attention.ops import Settings
from orchard.attention.problem import Band, Options, Saved, Tensors, Upstream, describe
from orchard.backends.cuda import CudaBackend, choice
from orchard.dispatch import planner as plans
from orchard.testing.budget import Results, judge
from orchard.testing.conformance import CASES, Case, build, check

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton"),
]

NAME = "cuda"
HALVES = (torch.float16, torch.bfloat16)
SERVED = tuple(case for case in CASES if case.dtype != torch.float64)


@pytest.fixture(scope="module")
def compiled() -> CudaBackend:
    """One for the module, so that a kernel is compiled once."""
    return CudaBackend()


@pytest.fixture
def backend(compiled: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaBackend]:
    """cuda among the backends."""
    plans.reset()
    monkeypatch.setitem(plans.planner().backends, NAME, compiled)
    yield compiled
    plans.reset()


@contextmanager
def only(backend: CudaBackend, *kernels: str) -> Iterator[None]:
    """While this lasts the backend has these kernels and no others."""
    backend.capabilities = tuple(c for c in CudaBackend.capabilities if c.kernel in kernels)
    try:
        yield
    finally:
        del backend.capabilities


def passes(case: Case) -> None:
    outcome = check(case, "cuda", NAME)
    assert outcome.complaints == []
    assert (outcome.status, outcome.served) == ("passed", f"{NAME} / {NAME}")


# Values


@pytest.mark.grad
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_conformance(case: Case, backend: CudaBackend) -> None:
    """Every case, by whichever kernel the backend prefers for it."""
    passes(case)


@pytest.mark.grad
@pytest.mark.parametrize("case", SERVED[::3], ids=lambda case: case.name)
def test_conformance_of_tiles(case: Case, backend: CudaBackend) -> None:
    """The kernels that serve everything, where others would have come first."""
    with only(backend, "tiled"):
        passes(case)


LARGE = Case("", "shape", batch=2, heads=4, kv_heads=2, rows=515, keys=700)


@pytest.mark.grad
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "bottom_right", "rows": 800},
        {"window": (200, 90), "softcap": 5.0},
        {"mask": "additive", "mask_axes": "bqk", "mask_grad": True},
        {"mask": "bool", "causal": True, "lse_grad": True},
        {"dropout_p": 0.2},
        {"views": ("last_outermost",) * 3, "grad_view": "last_outermost"},
    ],
    ids=str,
)
def test_many_blocks(
    options: dict[str, Any], dim: int, dtype: torch.dtype, backend: CudaBackend
) -> None:
    """Problems of several blocks each way, whose lengths end inside one."""
    with only(backend, "tiled"):
        passes(replace(LARGE, name="", dim=dim, value_dim=dim, dtype=dtype, **options))


@pytest.mark.layout
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("view", ["last_strided", "every_axis_strided"])
def test_packed(view: str, dtype: torch.dtype, backend: CudaBackend) -> None:
    """Operands without runs of elements, copied: q, k, v and grad_out."""
    case = replace(LARGE, name="", dtype=dtype, views=(view, view, view), grad_view=view)
    query = build(case, torch.device("cuda")).operands[0].tensor
    plan = orchard.explain(query, query, query, backend=NAME)
    assert plan.kernel == "packed"
    passes(case)


DECODE = Case("", "shape", batch=3, heads=8, kv_heads=2, rows=1, keys=3001, dim=128, value_dim=128)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keys": 9000},  # more parts than are joined at once
        {"keys": 3072},  # whole blocks
        {"keys": 3072, "mask": "bool", "mask_axes": "bk"},
        {"rows": 4, "causal": "bottom_right"},
        {"rows": 3, "window": (50, 20), "value_dim": 40},
        {"mask": "additive", "mask_axes": "hk", "dropout_p": 0.3},
        {"mask": "bool", "mask_axes": "bk", "softcap": 3.0},
        {"kv_heads": 8, "dim": 256, "value_dim": 256},
        {"heads": 2, "rows": 16, "keys": 7, "causal": "bottom_right"},
    ],
    ids=str,
)
def test_decode(options: dict[str, Any], dtype: torch.dtype, backend: CudaBackend) -> None:
    """Few rows against many keys, split and joined."""
    decodes(replace(DECODE, name="", dtype=dtype, **options))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("keys", [24_064, 24_001])
def test_decode_in_wide_blocks(keys: int, dtype: torch.dtype, backend: CudaBackend) -> None:
    """If there are such: keys enough for all multiprocessors, in whole blocks and not."""
    decodes(replace(DECODE, name="", dtype=dtype, keys=keys))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("mask", ["additive", None])
def test_decode_of_the_most_rows(
    mask: str | None, dtype: torch.dtype, backend: CudaBackend
) -> None:
    """They and a mask of their own take the most memory, of as many keys as have wide blocks."""
    decodes(replace(DECODE, name="", dtype=dtype, rows=16, keys=24_064, mask=mask))


def decodes(case: Case) -> None:
    query, key, value = (o.tensor for o in build(case, torch.device("cuda")).operands)
    assert orchard.explain(query, key, value, backend=NAME).kernel == "decode"
    passes(case)


@pytest.mark.mask
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -1e9, -1e4, 200.0])
def test_large_masks_keep_their_gradients(
    hidden: float, dtype: torch.dtype, backend: CudaBackend
) -> None:
    """lse has no digits left for such a row: its probabilities come from somewhere else."""
    source = torch.Generator().manual_seed(0)
    shapes = ((1, 2, 90, 24), (1, 1, 150, 24), (1, 1, 150, 24), (1, 2, 90, 24))
    query, key, value, grad_out = (
        torch.randn(shape, generator=source).to("cuda", dtype) for shape in shapes
    )
    mask = torch.zeros(1, 1, 90, 150, device="cuda")
    mask[..., 2, :] = mask[..., 70, :] = hidden
    tensors, upstream = Tensors(query, key, value, mask), Upstream(grad_out, None)
    options = Options(24**-0.5)
    results = solve(backend, tensors, options, upstream)
    found = judge(on_cpu(results), *on_cpu_too(tensors, upstream, options))
    assert [str(comparison) for comparison in found if not comparison.ok] == []


def solve(
    backend: CudaBackend,
    tensors: Tensors,
    options: Options,
    upstream: Upstream,
    saved: Saved | None = None,
) -> Results:
    """The tiled kernels' forward, or a given one, and their backward."""
    if saved is None:
        ahead = describe(tensors, options, lse=True, grad=True)
        saved = backend.forward(ahead, "tiled", tensors)
    back = describe(
        tensors,
        options,
        stage="backward",
        grad_out=upstream.out,
        lse=upstream.lse is not None,
        grad=True,
    )
    grads = backend.backward(back, "tiled", tensors, saved, upstream)
    return Results(*saved, *grads[:3])


def on_cpu(results: Results) -> Results:
    return Results(*(None if result is None else result.cpu() for result in results))


def on_cpu_too(tensors: Tensors, upstream: Upstream, options: Options) -> tuple[Any, Any, Any]:
    moved = Tensors(*(None if t is None else t.cpu() for t in tensors))
    lse = None if upstream.lse is None else upstream.lse.cpu()
    return moved, options, Upstream(upstream.out.cpu(), lse)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=source).to("cuda", dtype)


@pytest.mark.dropout
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_interchange(dtype: torch.dtype, backend: CudaBackend) -> None:
    """A backward after the reference's forward, and the reference's after ours: one function."""
    options = Options(0.3, 0.0, Band(-90, 44), 9000)
    seed = draw_seed(torch.device("cuda"), torch.Generator("cuda").manual_seed(3))
    kv = drawn(2, 1, 240, 40, dtype=dtype), drawn(2, 1, 240, 24, dtype=dtype)
    tensors = Tensors(drawn(2, 2, 133, 40, dtype=dtype), *kv, None, seed)
    upstream = Upstream(drawn(2, 2, 133, 24, dtype=dtype), drawn(2, 2, 133))
    saved = reference.forward(tensors, options)
    after = solve(backend, tensors, options, upstream, saved)
    before = solve(backend, tensors, options, upstream)
    grads = reference.backward(tensors, options, upstream)
    mixed = Results(before.out, before.lse, *grads[:3])
    for results in (after, before, mixed):
        found = judge(on_cpu(results), *on_cpu_too(tensors, upstream, options))
        assert [str(comparison) for comparison in found if not comparison.ok] == []


@pytest.mark.dropout
@pytest.mark.parametrize("kernel", ["tiled", "decode"])
def test_dropout_bits(kernel: str, backend: CudaBackend) -> None:
    """With equal scores and values of one an output counts the bits that were kept."""
    rows, keys, threshold = (300, 1000, 30000) if kernel == "tiled" else (2, 5000, 30000)
    seed = draw_seed(torch.device("cuda"), torch.Generator("cuda").manual_seed(9))
    query, key = (
        torch.zeros(2, 4, rows, 16, device="cuda"),
        torch.zeros(2, 2, keys, 16, device="cuda"),
    )
    value = torch.ones(2, 2, keys, 16, device="cuda")
    tensors = Tensors(query, key, value, None, seed)
    options = Options(1.0, threshold=threshold)
    out, _ = backend.forward(describe(tensors, options), kernel, tensors)
    expected = reference.softmax_rows(tensors, options).factor
    assert isinstance(expected, Tensor)
    counted = (out[..., 0].double() * keys * (65536 - threshold) / 65536).round()
    assert torch.equal(counted, (expected > 0).sum(-1).double())


def test_nothing_flows_through_empty_rows(backend: CudaBackend) -> None:
    """What is not finite in a row that sees nothing, or in what it would see, stays there."""
    query, key, value, grad_out = (drawn(1, 1, 200, 16 * n)[..., :16] for n in range(1, 5))
    mask = torch.ones(1, 1, 200, 200, dtype=torch.bool, device="cuda")
    mask[..., 3, :] = False
    mask[..., 0] = False
    grad_out[..., 3, :], key[..., 0, :] = torch.nan, torch.inf
    tensors = Tensors(query, key, value, mask)
    results = solve(backend, tensors, Options(0.25), Upstream(grad_out, None))
    assert results.out.isfinite().all()
    assert not results.out[0, 0, 3].any()
    assert results.lse is not None
    assert results.lse.isneginf().nonzero().tolist() == [[0, 0, 3]]
    assert results.grad_value is not None
    assert results.grad_value.isfinite().all()


@pytest.mark.stress
def test_offsets_beyond_32_bits(backend: CudaBackend) -> None:
    """Rows, heads and batch entries more than 2^32 bytes apart."""
    far = 2**31 + 64
    try:
        memory = torch.zeros(5 * far, dtype=torch.bfloat16, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("this takes 21 GB")
    near = drawn(2, 2, 2, 64, dtype=torch.bfloat16)
    spread = memory.as_strided((2, 1, 2, 64), (2 * far, far, far, 1))
    spread.copy_(near[:, :1])
    tensors = Tensors(near, spread, spread)
    packed = Tensors(near, near[:, :1], near[:, :1])
    grad_out = Upstream(torch.ones_like(near), None)
    for one, other in zip(
        solve(backend, tensors, Options(0.1), grad_out),
        solve(backend, packed, Options(0.1), grad_out),
        strict=True,
    ):
        assert (one is None and other is None) or torch.equal(one, other)


# How it is launched


def exercise(case: Case) -> tuple[Tensors, Settings, Upstream]:
    inputs = build(case, torch.device("cuda"))
    query, key, value = (operand.tensor for operand in inputs.operands)
    mask = inputs.mask.tensor if inputs.mask else None
    seed = (
        draw_seed(query.device, torch.Generator("cuda").manual_seed(5)) if case.dropout_p else None
    )
    upstream = Upstream(inputs.grad_out.tensor, inputs.grad_lse if case.lse_grad else None)
    return Tensors(query, key, value, mask, seed), settings(case, NAME), upstream


def answers(backend: CudaBackend, case: Case) -> Results:
    tensors, how, upstream = exercise(case)
    return solve(backend, tensors, how.options(tensors.query, tensors.key), upstream)


@pytest.mark.parametrize("case", ASSORTED, ids=lambda case: case.name)
def test_same_bits_again(case: Case, backend: CudaBackend) -> None:
    """Forward and backward, 20 times."""
    larger = replace(case, rows=8 * case.rows, keys=max(case.keys, 700), batch=4)
    first = answers(backend, larger)
    for _ in range(20):
        assert differences(answers(backend, larger), first) == []


@pytest.mark.stress
def test_threads_and_streams(compiled: CudaBackend) -> None:
    """Eight threads on a stream each: the bits of a single thread. The first calls compile."""
    fresh, start = CudaBackend(), threading.Barrier(8)
    alone = [answers(compiled, case) for case in ASSORTED]
    torch.cuda.synchronize()

    def work(index: int) -> list[str]:
        stream = torch.cuda.Stream()
        start.wait()
        found = []
        with torch.cuda.stream(stream):
            for turn in range(5 * len(ASSORTED)):
                which = (index + turn) % len(ASSORTED)
                results = answers(fresh, ASSORTED[which])
                stream.synchronize()
                found += differences(results, alone[which])
        return found

    with ThreadPoolExecutor(8) as pool:
        assert [found for found in pool.map(work, range(8)) if found] == []


@pytest.mark.dropout
def test_a_graph_replays_with_a_new_seed(backend: CudaBackend) -> None:
    """Captured once, forward and backward; the seed is read when the graph runs."""
    case = replace(ASSORTED[0], dropout_p=0.4, rows=200, keys=300)
    tensors, how, upstream = exercise(case)
    options = how.options(tensors.query, tensors.key)
    assert tensors.seed is not None
    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        solve(backend, tensors, options, upstream)
    warm_up.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = solve(backend, tensors, options, upstream)
    for seed in ([1, 2], [-3, 99]):
        tensors.seed.copy_(torch.tensor(seed, dtype=torch.int32))
        graph.replay()
        assert differences(captured, solve(backend, tensors, options, upstream)) == []


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_gpu(backend: CudaBackend) -> None:
    """No call, not even of a new problem, synchronises the host with the device."""
    for case in ASSORTED:
        answers(backend, case)
    inputs = [exercise(replace(case, rows=case.rows + 1)) for case in ASSORTED]
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for tensors, how, upstream in inputs:
            solve(backend, tensors, how.options(tensors.query, tensors.key), upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory(backend: CudaBackend) -> None:
    """Beyond results there are at most three numbers for each row."""
    rows = 4096
    query = drawn(1, 8, rows, 64, dtype=torch.bfloat16)
    grad_out = drawn(1, 8, rows, 64, dtype=torch.bfloat16)
    tensors, upstream = Tensors(query, query, query), Upstream(grad_out, None)
    options = Options(0.125, band=Band(None, 0))
    solve(backend, tensors, options, upstream)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    solve(backend, tensors, options, upstream)
    used = torch.cuda.max_memory_allocated() - before
    results = 4 * query.numel() * 2 + 8 * rows * 4
    assert used <= results + 3 * 8 * rows * 4 + 2**16


def test_another_device(backend: CudaBackend) -> None:
    """Tensors of a GPU that is not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    query = torch.randn(1, 2, 100, 64, device="cuda:1")
    there = orchard.attention(query, query, query, causal=True, backend=NAME)
    here = orchard.attention(*(query.to("cuda:0"),) * 3, causal=True, backend=NAME)
    assert torch.equal(there.cpu(), here.cpu())


@pytest.mark.compile
@pytest.mark.slow
def test_torch_compile(backend: CudaBackend) -> None:
    """One graph, forward and backward, the same bits as without it."""

    def step(query: Tensor) -> Tensor:
        return orchard.attention(query, query, query, causal=True, window=(70, 0), backend=NAME)

    query = drawn(2, 4, 200, 64).requires_grad_()
    out = step(query)
    (grad,) = torch.autograd.grad(out.square().sum(), query)
    compiled_out = torch.compile(step, fullgraph=True)(query)
    (compiled_grad,) = torch.autograd.grad(compiled_out.square().sum(), query)
    assert torch.equal(compiled_out, out)
    assert torch.equal(compiled_grad, grad)


def test_tables_name_kernels_that_exist() -> None:
    names = [capability.kernel for capability in CudaBackend.capabilities]
    assert names == [kernel.capability.kernel for kernel in choice.KERNELS]
    assert names[-1] == "tiled", "what serves everything comes last"
