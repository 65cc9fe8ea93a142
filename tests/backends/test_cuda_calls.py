"""What a call owes whichever CUDA kernel serves it: values, bits, guards, graphs, threads, streams.

compute-sanitizer is run on `test_values`, so that its problems are few and of several blocks.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import pytest
import torch
from programs.problems import Exercise, differences, settings
from torch import Tensor

import orchard
from orchard.attention import memory, reference
from orchard.attention.dropout import draw_seed
from orchard.attention.problem import Options, Problem, Tensors, Upstream, describe
from orchard.dispatch import planner as plans
from orchard.testing.budget import Results, judge
from orchard.testing.conformance import Case, build, check

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton"),
]

T = TypeVar("T")
NAME, DEVICE = "cuda", torch.device("cuda")
BF16 = torch.bfloat16
STRIDED = ("last_strided",) * 3
SQUARE = Case("", "shape", BF16, batch=2, heads=4, kv_heads=2, rows=515, keys=515, dim=64)
MASKED = replace(SQUARE, rows=520, keys=520, mask="additive", mask_axes="bqk")
LONG = replace(SQUARE, heads=8, rows=1, keys=3001)
SINGLE = replace(SQUARE, dtype=torch.float32)

# Problems of several blocks, by the kernel that serves their forward.
CASES = {
    "decode": replace(LONG, value_dim=64),
    "decode, fp32": replace(LONG, dtype=torch.float32, dim=40, value_dim=24),
    "hopper_fp32": replace(SINGLE, value_dim=64, causal=True),
    "hopper_fp32, D 128, mask": replace(
        SINGLE, dim=128, value_dim=128, mask="bool", mask_axes="bqk"
    ),
    "hopper_fp32, odd rows, window": replace(SINGLE, dim=33, value_dim=71, window=(200, 90)),
    "hopper": replace(SQUARE, value_dim=64),
    "hopper, D 128, causal": replace(SQUARE, dim=128, value_dim=128, causal=True),
    "hopper, many short rows, causal": replace(
        SQUARE, value_dim=64, batch=8, heads=40, kv_heads=40, rows=333, keys=333, causal=True
    ),
    "hopper, many short rows of groups, D 128": replace(
        SQUARE, dim=128, value_dim=128, batch=8, heads=40, kv_heads=20, rows=333, keys=333
    ),
    "hopper, shared, D 128": replace(
        SQUARE, dim=128, value_dim=96, kv_heads=4, rows=2000, keys=600
    ),
    "hopper, shared, one head, D 128": replace(
        SQUARE, dim=128, value_dim=128, batch=1, heads=1, kv_heads=1
    ),
    "hopper, shared, groups": replace(SQUARE, value_dim=64, rows=2000, keys=2000),
    "hopper, fp16, window": replace(SQUARE, dtype=torch.float16, value_dim=64, window=(200, 90)),
    "hopper, mask": replace(MASKED, value_dim=64, mask_grad=True),
    "hopper, D 128, mask, causal": replace(
        MASKED, dim=128, value_dim=128, mask_axes="hqk", mask_grad=True, causal=True
    ),
    "hopper, mask of keys, softcap": replace(MASKED, value_dim=64, mask_axes="bk", softcap=5.0),
    "packed": replace(SQUARE, value_dim=64, views=STRIDED),
    "tiled": replace(SINGLE, dim=136, value_dim=64, causal=True),
    "tiled, transposed": replace(SQUARE, value_dim=64, views=("last_outermost",) * 3),
    "tiled, mask": replace(SQUARE, value_dim=64, mask="additive", mask_axes="bqk", mask_grad=True),
}
ALL = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def _fresh_plans() -> Iterator[None]:
    plans.reset()
    yield
    plans.reset()


@pytest.fixture
def reproducible() -> Iterator[None]:
    """torch asks for deterministic algorithms: a backward owes the same bits too."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def case_of(name: str, **more: Any) -> Case:
    """The case, where this GPU has its kernel."""
    if name.startswith("hopper") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return replace(CASES[name], name=name, **more)


def exercise(case: Case) -> Exercise:
    """Its operands on the GPU, and the kernel that it is named after planned for it."""
    inputs = build(case, DEVICE)
    query, key, value = (operand.tensor for operand in inputs.operands)
    mask = inputs.mask.tensor if inputs.mask else None
    seed = None
    if case.dropout_p:
        seed = draw_seed(DEVICE, torch.Generator(DEVICE).manual_seed(5))
    tensors = Tensors(query, key, value, mask, seed)
    how = settings(case, NAME)
    plan = plans.planner().plan(describe(tensors, how.options(query, key), lse=True), NAME)
    assert plan.kernel == case.name.partition(",")[0], plan
    return Exercise(tensors, how, Upstream(inputs.grad_out.tensor, None), case.mask_grad)


# Values


@ALL
@pytest.mark.grad
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_values(name: str, dropout_p: float) -> None:
    """Within budget of fp64, outputs poisoned before, operands and what is around them intact."""
    case = case_of(name, dropout_p=dropout_p)
    exercise(case)
    outcome = check(case, DEVICE, NAME)
    assert outcome.complaints == []
    assert (outcome.status, outcome.served) == ("passed", f"{NAME} / {NAME}")


@pytest.mark.grad
@pytest.mark.mask
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dim", [64, 128])
def test_added_masks_of_any_size(dim: int, aligned: bool, deterministic: bool) -> None:
    """Rows whose lse is as large as a mask can make it, steep rows, empty ones, plain ones."""
    case = case_of("hopper, mask", dim=dim, value_dim=dim, rows=200, keys=328)
    inputs = build(case, DEVICE)
    query, key, value = (operand.tensor for operand in inputs.operands)
    noise = torch.randn(2, 1, 200, 336, device=DEVICE).to(BF16)
    mask = noise[..., :328] if aligned else noise[..., 1:329]
    lowest = torch.finfo(BF16).min
    for row, number in enumerate((lowest, -torch.inf, 1e4, -1e4, lowest, 300.0)):
        mask[:, :, 30 + 20 * row : 40 + 20 * row] = number
    mask[:, :, 150:160, ::2] = lowest
    # Rows whose highest score rises from tile to tile, by anything from a little to 2^40.
    mask[:, :, 160:200] *= 2.0 ** torch.arange(40, device=DEVICE)[:, None]
    tensors = Tensors(query, key, value, mask, None)
    options = Options(dim**-0.5)
    backend = plans.planner().backends[NAME]
    saved = backend.forward(planned(tensors, options, "hopper", lse=True), "hopper", tensors)
    upstream = Upstream(inputs.grad_out.tensor, None)
    problem = planned(
        tensors, options, "hopper", stage="backward", grad_out=upstream.out, mask_grad=True
    )._replace(deterministic=deterministic)
    grads = backend.backward(problem, "hopper", tensors, saved, upstream)
    found = Results(*(each.cpu() for each in (*saved, *grads)))
    here = Tensors(*(each.cpu() for each in tensors[:4]), None)
    judged = judge(found, here, options, Upstream(upstream.out.cpu(), None), mask_grad=True)
    assert [str(each) for each in judged if not each.ok] == []


class GuardedMemory:
    """Allocates outputs in the middle of memory that nobody may touch."""

    margin = 4096  # elements

    def __init__(self) -> None:
        self.margins: list[tuple[Tensor, Tensor]] = []

    def allocate(
        self, shape: Any, strides: Any, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        end = self.margin + 1 + reach
        buffer = torch.full((end + self.margin,), 77, dtype=dtype, device=device)
        self.margins += [(buffer[: self.margin], buffer[end:])]
        return buffer.as_strided(shape, strides, self.margin)

    def intact(self) -> bool:
        return all(bool((part == 77).all()) for pair in self.margins for part in pair)


@ALL
@pytest.mark.layout
def test_nothing_is_written_beside_the_outputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = exercise(case_of(name, dropout_p=0.2))
    expected = problem.solve()
    around = GuardedMemory()
    monkeypatch.setattr(memory, "allocate", around.allocate)
    found = problem.solve()
    assert len(around.margins) >= 5  # out, lse and three gradients
    assert around.intact()
    assert problem.complaints(found) == []
    # Programs add to dQ in any order, and where they share keys to dK and dV.
    varying = {"grad_query", "grad_key", "grad_value"} if "shared" in name else {"grad_query"}
    assert set(differences(found, expected)) <= varying


@pytest.mark.stress
@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("hopper", {}),
        ("hopper", {"mask": "additive"}),
        ("hopper", {"dropout_p": 0.2}),
        ("hopper_fp32", {"mask": "bool", "dropout_p": 0.2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128])
def test_many_tiles_at_once_give_the_same_bits(
    name: str, dim: int, terms: dict[str, Any], reproducible: None
) -> None:
    """Every multiprocessor at work, many tiles each: a tile overwritten too early would show."""
    case = case_of(name, dim=dim, value_dim=dim, heads=32, kv_heads=32, **terms)
    case = replace(case, rows=2048, keys=2048, mask_axes="bqk")
    problem = exercise(case)
    expected = problem.solve()
    for _ in range(8):
        assert differences(problem.solve(), expected) == []


@pytest.mark.mask
def test_fp32_on_hopper_has_nan_where_infinity_is_seen() -> None:
    """In its row or column alone. A row that sees no key is zero, and a hidden key is nothing."""
    case_of("hopper_fp32")
    query, key, value = (torch.randn(2, 2, 200, 64, device=DEVICE) for _ in range(3))
    mask = torch.ones(1, 1, 200, 200, dtype=torch.bool, device=DEVICE)
    mask[:, :, 7] = False
    mask[..., 30] = False
    tensors, options = Tensors(query, key, value, mask), Options(0.125)
    backend, kernel = plans.planner().backends[NAME], "hopper_fp32"
    problem = planned(tensors, options, kernel)
    expected = backend.forward(problem, kernel, tensors).out
    query[:, :, 20, 5] = torch.inf
    key[:, :, 30, 5] = torch.inf
    value[:, :, 9, 3] = -torch.inf
    expected[..., 3] = torch.nan
    expected[:, :, 20] = torch.nan
    expected[:, :, 7] = 0.0
    found = backend.forward(problem, kernel, tensors).out
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.mask
@pytest.mark.parametrize("kernel", ["hopper", "tiled"])
@pytest.mark.parametrize("dim", [64, 128])
def test_nothing_flows_into_a_row_that_sees_no_key(kernel: str, dim: int) -> None:
    case_of(kernel)
    query, key, value = (torch.randn(2, 2, 200, dim, device=DEVICE, dtype=BF16) for _ in range(3))
    value[:, :, 9, 3] = torch.nan
    value[:, :, 150, 4] = torch.inf
    mask = torch.ones(1, 1, 200, 200, dtype=torch.bool, device=DEVICE)
    mask[:, :, 7] = False
    tensors = Tensors(query, key, value, mask)
    backend = plans.planner().backends[NAME]
    problem = describe(tensors, Options(0.125), lse=True)
    out = backend.forward(problem, kernel, tensors).out
    assert bool((out[:, :, 7] == 0.0).all())
    assert bool(out[..., 3].isnan().any())


@pytest.mark.stress
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_many_tiles_add_to_one_gradient(dim: int, causal: bool, reproducible: None) -> None:
    """dQ as many programs add to it, in any order: the deterministic one but for its rounding."""
    case = case_of("hopper", dim=dim, value_dim=dim, heads=32, kv_heads=32, causal=causal)
    problem = exercise(replace(case, rows=2048, keys=2048))
    ordered = problem.solve().grad_query
    assert ordered is not None
    step = torch.finfo(case.dtype).eps * ordered.abs().max()
    torch.use_deterministic_algorithms(False)
    first = problem.solve()
    for found in (first, *(problem.solve() for _ in range(8))):
        assert found.grad_query is not None
        assert (found.grad_query - ordered).abs().max() <= step
        assert differences(found._replace(grad_query=first.grad_query), first) == []


# Dropout


def kept(tensors: Tensors, options: Options) -> Tensor:
    """The definition's bits: whether each probability is kept."""
    factor = reference.softmax_rows(tensors, options).factor
    assert isinstance(factor, Tensor)
    return factor > 0


@pytest.mark.dropout
@pytest.mark.parametrize(
    ("kernel", "dim"),
    [*product(("decode", "hopper", "hopper_fp32", "packed"), (64, 128)), ("tiled", 136)],
)
def test_every_dropout_bit(kernel: str, dim: int) -> None:
    """Equal scores, and values that are one in a column of their own: an output is 0 or it is not.

    Of the backward, gradients that are one in a column of their own show the bits in grad_value.
    """
    case = case_of(kernel, rows=2 if kernel == "decode" else 300, keys=300, dim=dim, causal=False)
    backend = plans.planner().backends[NAME]
    seed = draw_seed(DEVICE, torch.Generator(DEVICE).manual_seed(9))
    shape = (2, 2, case.rows, dim), (2, 2, case.keys, dim)
    query, key = (spread(torch.zeros(each, dtype=case.dtype), case) for each in shape)
    options = Options(1.0, threshold=30000)
    expected = kept(Tensors(query, key, key, None, seed), options)
    found = torch.zeros_like(expected)
    for begin in range(0, case.keys, dim):
        value = spread(columns(key, begin), case)
        tensors = Tensors(query, key, value, None, seed)
        out, _ = backend.forward(planned(tensors, options, kernel), kernel, tensors)
        width = min(dim, case.keys - begin)
        found[..., begin : begin + width] = out[..., :width] != 0
    assert torch.equal(found, expected)
    if kernel == "decode":  # its problems are another kernel's in a backward
        return
    kernel = "tiled" if kernel == "hopper_fp32" else kernel
    tensors = Tensors(query, key, key, None, seed)
    saved = reference.forward(tensors, options)
    for begin in range(0, case.rows, dim):
        grad_out = spread(columns(query, begin), case)
        problem = planned(tensors, options, kernel, stage="backward", grad_out=grad_out)
        grads = backend.backward(problem, kernel, tensors, saved, Upstream(grad_out, None))
        width = min(dim, case.rows - begin)
        seen = grads.value.mT[:, :, :width] != 0
        assert torch.equal(seen, expected[:, :, begin : begin + width])


def columns(like: Tensor, begin: int) -> Tensor:
    """Zeros, but for a one in row begin + n and column n."""
    found = torch.zeros(like.shape, dtype=like.dtype)
    width = min(like.shape[3], like.shape[2] - begin)
    places = torch.arange(width)
    found[:, :, begin + places, places] = 1.0
    return found


def spread(tensor: Tensor, case: Case) -> Tensor:
    """On the GPU; every second element where the case has it so."""
    tensor = tensor.to(DEVICE)
    return (
        torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2]
        if case.views[0] == STRIDED[0]
        else tensor
    )


def planned(tensors: Tensors, options: Options, kernel: str, **more: Any) -> Problem:
    problem = describe(tensors, options, grad=True, **more)
    assert plans.planner().plan(problem, NAME).kernel == kernel
    return problem


# How it is launched


def captured(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of the call, which has run once beside, and what it leaves at each replay."""
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        call()
    aside.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@ALL
def test_a_graph_reads_the_seed_when_it_runs(name: str, reproducible: None) -> None:
    """Captured once, forward and backward, with dropout; the seed lies in device memory."""
    problem = exercise(case_of(name, dropout_p=0.3))
    assert problem.tensors.seed is not None
    graph, found = captured(problem.solve)
    results = []
    for seed in ([1, 2], [-3, 99]):
        problem.tensors.seed.copy_(torch.tensor(seed, dtype=torch.int32))
        graph.replay()
        assert differences(found, problem.solve()) == []
        results.append(found.out.clone())
    assert not torch.equal(*results)


@pytest.mark.parametrize("name", [name for name in CASES if "shared" in name])
def test_a_graph_clears_what_programs_add_to(name: str) -> None:
    """The sums of dQ, and of dK and dV, in the memory of the graph, which its last run has left."""
    problem = exercise(case_of(name))
    graph, found = captured(problem.solve)
    for _ in range(3):
        graph.replay()
        assert problem.complaints(found) == []


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 256, 128), (2, 8, 512, 64), (2, 16, 2048, 128)])
def test_backwards_in_a_row_wait_for_one_another(
    shape: tuple[int, ...], deterministic: bool, reproducible: None
) -> None:
    """Kernels begin before the one in front has ended; nobody reads what is not there yet."""
    torch.use_deterministic_algorithms(deterministic)
    query, key, value = (
        torch.randn(shape, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(3)
    )
    out = orchard.attention(query, key, value, backend=NAME)
    given = [torch.randn_like(out) * 4.0**n for n in range(6)]

    def backward(grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (query, key, value), grad, retain_graph=True)

    alone = []
    for grad in given:
        torch.cuda.synchronize()
        alone.append(backward(grad))
    torch.cuda.synchronize()
    for _ in range(4):
        for expected, found in zip(alone, [backward(grad) for grad in given], strict=True):
            for one, other in zip(expected, found, strict=True):
                if deterministic:
                    assert torch.equal(one, other)
                else:  # sums in another order, then rounded to bf16
                    torch.testing.assert_close(
                        one, other, rtol=2**-6, atol=float(one.abs().max()) * 2**-8
                    )


def test_a_captured_call_draws_its_seed_anew() -> None:
    """The public call in a graph: torch's generator goes on from one replay to the next."""
    query = torch.randn(2, 4, 300, 64, device=DEVICE, dtype=BF16)

    def call() -> Tensor:
        return orchard.attention(query, query, query, dropout_p=0.4, backend=NAME)

    graph, out = captured(call)
    found = []
    torch.cuda.manual_seed(4)
    for _ in range(2):
        graph.replay()
        found.append(out.clone())
    torch.cuda.manual_seed(4)
    assert torch.equal(found[0], call())
    assert torch.equal(found[1], call())
    assert not torch.equal(*found)


@pytest.mark.stress
def test_eight_threads_on_eight_streams(reproducible: None) -> None:
    """Every kernel at once, the first calls still to be planned: the bits of a single thread."""
    names = [name for name in CASES if not name.startswith("hopper") or _is_hopper()]
    problems = [exercise(case_of(name, dropout_p=0.2)) for name in names]
    alone = [problem.solve() for problem in problems]
    torch.cuda.synchronize()
    plans.reset()
    start = threading.Barrier(8)

    def work(index: int) -> list[str]:
        stream, found = torch.cuda.Stream(), []
        start.wait()
        with torch.cuda.stream(stream):
            for turn in range(3 * len(problems)):
                which = (index + turn) % len(problems)
                results = problems[which].solve()
                stream.synchronize()
                found += [f"{names[which]}: {what}" for what in differences(results, alone[which])]
        return found

    with ThreadPoolExecutor(8) as pool:
        assert [found for found in pool.map(work, range(8)) if found] == []


def _is_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


@ALL
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_gpu(name: str) -> None:
    """The public call, its seed drawn, of a problem that is new, forward and backward."""
    case = case_of(name, dropout_p=0.2)
    exercise(case).solve()  # the kernels are compiled and loaded
    inputs = build(replace(case, keys=case.keys + 8), DEVICE)
    leaves = [operand.tensor.requires_grad_() for operand in inputs.operands]
    mask = inputs.mask.tensor if inputs.mask else None
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        out = orchard.attention(
            *leaves,
            mask=mask,
            causal=case.causal,
            window=case.window,
            dropout_p=case.dropout_p,
            backend=NAME,
        )
        torch.autograd.grad(out, leaves, inputs.grad_out.tensor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()


@pytest.mark.compile
@pytest.mark.slow
@ALL
def test_torch_compile(name: str, reproducible: None) -> None:
    """One graph, forward and backward, the same bits as without it."""
    case = case_of(name)
    exercise(case)
    inputs = build(case, DEVICE)
    leaves = [operand.tensor.requires_grad_() for operand in inputs.operands]
    mask = inputs.mask.tensor if inputs.mask else None

    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return orchard.attention(
            query,
            key,
            value,
            mask=mask,
            causal=case.causal,
            window=case.window,
            backend=NAME,
        )

    def solved(attend: Callable[..., Tensor]) -> Results:
        out = attend(*leaves)
        grads = torch.autograd.grad(out, leaves, inputs.grad_out.tensor)
        return Results(out.detach(), None, *grads)

    torch.compiler.reset()
    assert differences(solved(torch.compile(step, fullgraph=True)), solved(step)) == []
