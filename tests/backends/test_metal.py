"""The Metal kernels, executed by the emulator, and the Python around them on a fake runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from metal_fakes import FakeMetal, FakeRuntime, operands
from programs.problems import ASSORTED, PLAIN, Exercise, differences, exercise
from test_metal_mutants import MUTANTS
from torch import Tensor

import orchard
from orchard.attention.ops import Settings
from orchard.attention.problem import (
    Band,
    Options,
    Problem,
    Saved,
    Tensors,
    Upstream,
    describe,
)
from orchard.attention.reference import attend
from orchard.backends.aten import AtenBackend
from orchard.backends.metal import MetalBackend
from orchard.backends.metal.emulated import EmulatedRuntime, MetalEmulatedBackend
from orchard.backends.metal.launch import plan_backward, plan_forward
from orchard.backends.metal.runtime import TorchRuntime
from orchard.backends.metal.source import (
    INTEGERS,
    KERNELS,
    MetalCompileError,
    Specialisation,
    source,
)
from orchard.backends.reference import ReferenceBackend
from orchard.cli.minigpt import MiniGPT, Shape, losses
from orchard.dispatch import planner as plans
from orchard.dispatch import settings
from orchard.dispatch.backend import Backend
from orchard.dispatch.journal import Journal
from orchard.dispatch.planner import Planner
from orchard.testing import metal_counters
from orchard.testing.budget import GRADIENT_FACTOR, Results, judge
from orchard.testing.conformance import CASES, Case, check
from orchard.testing.metal import SCHEDULES, Emulator
from orchard.testing.metal.lint import specialisations, stored_specialisations

emulated = pytest.mark.usefixtures("metal_compiler")
pytestmark = pytest.mark.metal

KERNEL = "simdgroup"
NAME = MetalEmulatedBackend.name


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    """One for the module, so that a kernel is compiled once; "view" bounds are the strictest."""
    return Emulator(bounds="view")


@pytest.fixture
def backend(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """metal-emulated among the backends."""
    plans.reset()
    made = MetalEmulatedBackend(EmulatedRuntime(emulator))
    monkeypatch.setitem(plans.planner().backends, NAME, made)
    yield made
    emulator.schedule = "in-order"
    plans.reset()


# The kernels


SERVED = tuple(case for case in CASES if case.dtype != torch.float64)
SAMPLE = SERVED[::9]


def parameters() -> list[Any]:
    return [
        pytest.param(case, marks=[] if case in SAMPLE else [pytest.mark.slow], id=case.name)
        for case in SERVED
    ]


@emulated
@pytest.mark.parametrize("case", parameters())
def test_conformance(case: Case, backend: Backend) -> None:
    """Values and gradients within budget, guards intact, no access out of bounds, no race."""
    outcome = check(case, "cpu", NAME)
    assert outcome.complaints == []
    assert outcome.status == "passed"
    assert outcome.served == f"{NAME} / {NAME}"
    assert len(outcome.comparisons) >= 5


def solve(problem: Exercise, first: Backend, second: Backend) -> Results:
    """A forward by one backend and a backward by another."""
    tensors, upstream = problem.tensors, problem.upstream
    options = problem.settings.options(tensors.query, tensors.key)
    more: dict[str, Any] = {"grad": True, "mask_grad": problem.mask_grad}
    ahead = describe(tensors, options, lse=True, **more)
    back = describe(
        tensors,
        options,
        stage="backward",
        grad_out=upstream.out,
        lse=upstream.lse is not None,
        **more,
    )
    kernels = first.select(ahead)[0], second.select(back)[0]
    assert kernels[0] is not None
    assert kernels[1] is not None
    saved = first.forward(ahead, kernels[0].kernel, tensors)
    grads = second.backward(back, kernels[1].kernel, tensors, saved, upstream)
    return Results(*saved, *grads)


@emulated
@pytest.mark.parametrize("other", ["reference", "cpu"])
@pytest.mark.parametrize("case", ASSORTED, ids=lambda case: case.name)
def test_interchange(case: Case, other: str, backend: Backend, best_isa: None) -> None:
    """Any backward after any forward, dropout among it, both ways."""
    peer = plans.planner().backends[other]
    problem = exercise(case)
    assert problem.complaints(solve(problem, backend, peer)) == []
    assert problem.complaints(solve(problem, peer, backend)) == []


@emulated
@pytest.mark.parametrize("case", ASSORTED, ids=lambda case: case.name)
def test_schedules_make_no_difference(case: Case, backend: Backend, emulator: Emulator) -> None:
    """Whichever thread runs first, the bits are the same."""
    found = []
    for schedule in SCHEDULES:
        emulator.schedule = schedule
        found.append(solve(exercise(case), backend, backend))
    assert exercise(case).complaints(found[0]) == []
    assert [differences(found[0], other) for other in found[1:]] == [[], []]


SIZES = (1, 7, 8, 31, 32, 33, 65)


@emulated
@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
@pytest.mark.parametrize("rows", SIZES)
def test_odd_sizes(rows: int, causal: Any, backend: Backend) -> None:
    """Rows and keys around the edges of fragments and tiles, head dimensions too."""
    for keys, dim, value_dim in ((1, 3, 8), (9, 12, 5), (33, 8, 20), (70, 16, 16)):
        case = Case(
            f"{rows} rows, {keys} keys, {dim}, {value_dim}, {causal}",
            "shape",
            heads=2,
            kv_heads=1,
            rows=rows,
            keys=keys,
            dim=dim,
            value_dim=value_dim,
            causal=causal,
        )
        assert check(case, "cpu", NAME).complaints == []


def forward(backend: Backend, tensors: Tensors, options: Options) -> Saved:
    return backend.forward(describe(tensors, options, lse=True, grad=True), KERNEL, tensors)


@emulated
@pytest.mark.parametrize("rows", [4, 40])
def test_nothing_passes_through_an_empty_row(rows: int, backend: Backend) -> None:
    """Neither out of it nor back through it, whatever arrives there: not even NaN."""
    query, key, value = (torch.randn(1, 2, n, 16) for n in (rows, 24, 24))
    mask = torch.ones(1, 1, rows, 24, dtype=torch.bool)
    mask[:, :, 1::3] = False
    tensors = Tensors(query, key, value, mask)
    options = Options(0.25)
    saved = forward(backend, tensors, options)
    assert not saved.out[:, :, 1::3].any()
    assert torch.isneginf(saved.lse[:, :, 1::3]).all()

    grad_out = torch.randn(1, 2, rows, 16)
    grad_lse = torch.randn(1, 2, rows)
    grad_out[:, :, 1::3], grad_lse[:, :, 1::3] = torch.nan, torch.inf
    upstream = Upstream(grad_out, grad_lse)
    problem = describe(tensors, options, stage="backward", grad_out=grad_out, lse=True, grad=True)
    grads = backend.backward(problem, KERNEL, tensors, saved, upstream)
    assert not grads.query[:, :, 1::3].any()
    assert all(torch.isfinite(grad).all() for grad in grads[:3])
    clean = Upstream(grad_out.nan_to_num(0.0), grad_lse.nan_to_num(0.0, 0.0, 0.0))
    again = backend.backward(problem, KERNEL, tensors, saved, clean)
    assert all(map(torch.equal, grads[:3], again[:3]))


@emulated
@pytest.mark.parametrize("rows", [3, 40])
def test_not_a_number_shows(rows: int, backend: Backend) -> None:
    """NaN and infinity reach what the definition says they reach, and nothing else."""
    query, key, value = (torch.randn(1, 1, n, 16) for n in (rows, 40, 40))
    query[0, 0, 1, 3] = torch.nan
    query[0, 0, 2] *= torch.inf
    tensors = Tensors(query, key, value)
    options = Options(0.25, band=Band(None, 5))
    actual, expected = forward(backend, tensors, options), attend(tensors, options)
    assert torch.equal(actual.out.isnan(), expected.out.isnan())
    assert torch.equal(actual.lse.isnan(), expected.lse.isnan())


def large(
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    mask: Tensor | None = None,
    chosen: Settings = PLAIN,
) -> Exercise:
    """Query, key, value and grad_out of these shapes, under options that make scores large."""
    source = torch.Generator().manual_seed(0)
    query, key, value, grad_out = (
        torch.randn(shape, generator=source).to(dtype) for shape in shapes
    )
    return Exercise(Tensors(query, key, value, mask), chosen, Upstream(grad_out, None))


LOWEST = torch.finfo(torch.float32).min


@emulated
@pytest.mark.parametrize("first", [NAME, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(6, 1500), (40, 50)])
@pytest.mark.parametrize(("hidden", "heads"), [(LOWEST, 2), (-1e9, 2), (-1e4, 1), (200.0, 2)])
def test_large_masks_keep_their_gradients(
    hidden: float,
    heads: int,
    rows: int,
    keys: int,
    dtype: torch.dtype,
    first: str,
    backend: Backend,
) -> None:
    """lse has no digits left for such a row: its probabilities come from somewhere else."""
    mask = torch.zeros(1, 1, rows, keys)
    mask[:, :, 2::3] = hidden
    mask[:, :, 1, keys // 2 :] = hidden
    shapes = ((1, 2, rows, 24), (1, heads, keys, 24), (1, heads, keys, 24), (1, 2, rows, 24))
    problem = large(shapes, dtype, mask)
    ahead = plans.planner().backends[first]
    assert problem.complaints(solve(problem, ahead, backend)) == []


@emulated
@pytest.mark.parametrize("first", [NAME, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize(
    ("scale", "causal"), [(-50.0, False), (1e4, False), (1e4, True), (1e8, True)]
)
def test_large_scores_keep_their_gradients(
    scale: float, rows: int, causal: bool, dtype: torch.dtype, first: str, backend: Backend
) -> None:
    """The last bits of such a score decide, so every kernel has to see the same one."""
    shapes = ((1, 4, rows, 40), (1, 2, 90, 40), (1, 2, 90, 24), (1, 4, rows, 24))
    chosen = PLAIN._replace(scale=scale, right=0 if causal else -1)
    problem = large(shapes, dtype, chosen=chosen)
    ahead = plans.planner().backends[first]
    assert problem.complaints(solve(problem, ahead, backend)) == []


@emulated
def test_only_coarse_rows_are_gone_through_again(backend: Backend, emulator: Emulator) -> None:
    """By the one simdgroup that holds such a row; where none does, by none."""
    shapes = ((1, 1, 70, 16), (1, 1, 64, 16), (1, 1, 64, 16), (1, 1, 70, 16))
    for hidden, multiplies in ((100.0, 0), (-200.0, (64 // 8) * (16 // 8))):
        mask = torch.zeros(1, 1, 70, 1)
        mask[:, :, 41] = hidden
        problem = large(shapes, torch.float32, mask)
        emulator.counters.clear()
        assert problem.complaints(solve(problem, backend, backend)) == []
        assert emulator.counters["attention_coarse_rows"].multiplies == multiplies


@emulated
def test_a_decode_is_split(backend: Backend, emulator: Emulator) -> None:
    """Few rows and many keys: several simdgroups share the keys, and no matrix is multiplied."""
    query, key, value = torch.randn(1, 4, 2, 64), *torch.randn(2, 1, 2, 1100, 64).unbind()
    tensors, options = Tensors(query, key, value), Options(0.125, band=Band(None, 1098))
    emulator.counters.clear()
    found = forward(backend, tensors, options)
    assert all(verdict.ok for verdict in judge(Results(*found), tensors, options))
    assert set(emulator.counters) == {"attention_runs", "attention_join"}
    counted = emulator.counters["attention_runs"]
    assert counted.multiplies == 0
    assert counted.threadgroups * 4 >= 2 * 16
    # Each key and value is read once for both rows of both query heads that share it.
    assert counted.device_read <= 1.1 * (key.nbytes + value.nbytes)


MOST_KEYS = 2**31 - 1025


def one_row(batch: int, keys: int) -> Tensors:
    """For a decode, whose keys take no memory."""
    key = torch.empty(batch, 2, 1, 64).expand(batch, 2, keys, 64)
    return Tensors(torch.empty(batch, 8, 1, 64), key, key)


@pytest.mark.parametrize(
    ("batch", "keys"),
    [(1, 1), (1, 63), (1, 65), (1, 5000), (4, 5000), (1, 100_000), (999, 9), (1, MOST_KEYS)],
)
def test_a_decode_is_many_runs(batch: int, keys: int) -> None:
    """Runs cover the keys, none is empty or short, and all end below 2^31."""
    plan = plan_forward(describe(one_row(batch, keys), Options(1.0)))
    run_keys = plan.integers[INTEGERS.index("RUN_KEYS")]
    assert (plan.runs - 1) * run_keys < keys <= plan.runs * run_keys < 2**31
    assert run_keys >= min(keys, 32)


# Their work


@emulated
@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "permuted"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_no_needless_work(dim: int, causal: bool, permuted: bool) -> None:
    """At most what torch's own kernel does, and 7/2 of it in the backward."""
    bench = metal_counters.Workbench(Emulator())
    problem = metal_counters.Exercise(dim, causal, permuted, heads=1)
    counted = metal_counters.count(bench, problem)
    ours, theirs, parts = counted.ours, counted.torch, counted.backward
    assert counted.complaints == ()
    for name in ("multiplies", "device_read", "device_written", "threadgroup_barriers"):
        assert getattr(ours, name) <= 1.02 * getattr(theirs, name), name
    full = 2 * (512 // 8) ** 2 * (dim // 8)
    assert ours.multiplies <= (0.6 if causal else 1.0) * full

    assert sum(part.multiplies for part in parts.values()) <= 3.5 * ours.multiplies
    operand = 512 * dim * 4
    rows = 512 * 4  # of lse, or of one of the numbers that a row has
    assert parts["attention_rows"].device_read == 2 * operand + rows
    assert parts["attention_rows"].device_written == 3 * rows
    assert parts["attention_grad_query"].device_written == operand
    assert parts["attention_grad_key_value"].device_written == 2 * operand
    # No row is coarse: each of four simdgroups looks at them, and that is all.
    assert parts["attention_coarse_rows"].device_read == 4 * rows
    idle = ("multiplies", "device_written", "threadgroup_barriers")
    assert not any(getattr(parts["attention_coarse_rows"], name) for name in idle)
    # Tiles of two operands pass by, as in the forward; rows of another one are held.
    passing = ours.device_read - operand
    held = operand + 4 * 3 * rows  # four lanes share a row and its three numbers
    assert parts["attention_grad_query"].device_read <= operand + passing + held
    visits = passing // (2 * operand)
    extra = 3 * rows * (visits + 1)
    assert parts["attention_grad_key_value"].device_read <= 2 * operand + passing + extra


# The source


def test_source_is_ascii_and_whole() -> None:
    """Every header is in place, and what Metal cannot take is not there."""
    assert sorted(path.name for path in KERNELS.iterdir()) == [
        "backward.metal",
        "common.h",
        "decode.metal",
        "forward.metal",
        "operands.h",
    ]
    for file in ("forward.metal", "backward.metal", "decode.metal"):
        text = source(file, Specialisation(torch.float16, 64, 64, decode_rows=4))
        assert text.isascii()
        assert '#include "' not in text
        assert text.index("#include <metal_stdlib>") == 0
        for refused in ("if constexpr", "function_constant", "[=]", "[&]", "atomic"):
            assert refused not in text


def test_tiles_are_as_long_as_fits() -> None:
    """In 32 KB of threadgroup memory, which the lint counts in the source itself."""
    for dtype in (torch.float32, torch.float16):
        blocks = [Specialisation(dtype, dim, dim).block for dim in range(257)]
        assert blocks == sorted(blocks, reverse=True)
        assert blocks[64] == 32
        assert blocks[128] == (16 if dtype == torch.float32 else 32)


@pytest.mark.docs
def test_the_docs_count_right() -> None:
    """docs/metal.md says how much is tried: mutants, conformance cases, kinds of source."""
    text = " ".join((Path(__file__).parents[2] / "docs/metal.md").read_text().split())
    assert f"{len(MUTANTS)} of {len(MUTANTS)} mutants of our kernels" in text
    unserved = len(CASES) - len(SERVED)
    assert f"{len(SERVED)} of {len(CASES)} conformance cases pass" in text
    assert f"the other {unserved} are fp64" in text
    assert f"all {sum(1 for _ in specialisations())} kinds of source" in text
    assert f"over {sum(1 for _ in stored_specialisations())} with operands in few bits" in text


# The Python around them, on a fake runtime


def every_call(backend: Backend) -> Iterator[tuple[str, Problem]]:
    """Forward, backward and decode, with and without everything."""
    seed = torch.zeros(2, dtype=torch.int32)
    plain = Options(0.2)
    all_of_it = Options(0.2, 3.0, Band(-5, 9), 6000)
    for rows, options, masked in ((40, plain, False), (40, all_of_it, True), (2, all_of_it, True)):
        tensors = operands(rows)
        if masked:
            mask = torch.zeros(2, 1, rows, 50)
            tensors = tensors._replace(mask=mask, seed=seed)
        ahead = describe(tensors, options, grad=True, mask_grad=masked)
        saved = backend.forward(ahead, KERNEL, tensors)
        yield "forward", ahead
        grad_out = torch.ones(()).expand(saved.out.shape)
        grad_lse = torch.ones(()).expand(saved.lse.shape)
        back = describe(
            tensors,
            options,
            stage="backward",
            grad_out=grad_out,
            lse=True,
            grad=True,
            mask_grad=masked,
        )
        backend.backward(back, KERNEL, tensors, saved, Upstream(grad_out, grad_lse))
        yield "backward", back


def test_arguments_are_what_torch_takes() -> None:
    """At most 31 of them, each a tensor or a list of one type, within 4 KB; whole groups."""
    runtime = FakeRuntime()
    assert len(list(every_call(FakeMetal(runtime)))) == 6
    names = {name for name, *_ in runtime.calls}
    assert names == {
        "attention_forward",
        "attention_runs",
        "attention_join",
        "attention_rows",
        "attention_coarse_rows",
        "attention_grad_query",
        "attention_grad_key_value",
        "attention_grad_mask",
    }
    for _, args, threads, group_size in runtime.calls:
        assert len(args) <= 31
        assert group_size == (128, 1, 1)
        assert len(threads) == 3
        assert threads[0] % 128 == 0
        assert min(threads) > 0
        for arg in args:
            if isinstance(arg, list):
                assert len({type(value) for value in arg}) == 1
                assert type(arg[0]) in (int, float)
                assert 8 * len(arg) <= 4096
                assert len(arg) != 3
            else:
                assert isinstance(arg, Tensor)
                assert arg.numel(), "an empty tensor has no memory to bind"


def test_packing() -> None:
    """Strides, sizes and numbers stand where the kernels look for them."""
    runtime = FakeRuntime()
    backend = FakeMetal(runtime)
    tensors = operands()._replace(mask=torch.zeros(1, 4, 1, 50))
    problem = describe(tensors, Options(0.2, 3.0, Band(None, 7), 100), grad=True)
    backend.forward(problem, KERNEL, tensors)
    (call,) = runtime.calls
    name, (query, key, value, out, lse, mask, seed, integers, floats), threads, _ = call
    assert name == "attention_forward"
    assert [query, key, value, mask] == [*tensors[:4]]
    assert seed is query, "stands for what is not there"
    assert (out.shape, lse.shape) == ((2, 4, 40, 12), (2, 4, 40))
    assert threads == (2 * 128, 4, 2)
    text = runtime.sources[0]
    place = {
        name.split("=")[0].strip(): index
        for index, name in enumerate(text.split("enum Integers {")[1].split("}")[0].split(","))
    }
    assert integers[place["BATCH"]] == 2
    assert integers[place["GROUP"]] == 2
    assert (integers[place["ROWS"]], integers[place["KEYS"]]) == (40, 50)
    assert integers[place["LOW"]] <= -(2**30)
    assert integers[place["HIGH"]] == 7
    start = int(text.split("MASK_STRIDES = ")[1].split(",")[0])
    assert integers[start : start + 4] == [0, 50, 0, 1]
    start = int(text.split("VALUE_STRIDES = ")[1].split(",")[0])
    assert integers[start : start + 4] == [2 * 50 * 12, 50 * 12, 12, 1]
    assert floats == pytest.approx([0.2, 3.0, 3.0, 65536 / 65436, 0.2])


def test_nothing_is_launched_for_nothing() -> None:
    """A grid of size zero is not a launch, and the results are there all the same."""
    runtime = FakeRuntime()
    backend = FakeMetal(runtime)
    tensors = operands(keys=0)
    problem = describe(tensors, Options(1.0), grad=True)
    saved = backend.forward(problem, KERNEL, tensors)
    assert not saved.out.any()
    assert torch.isneginf(saved.lse).all()
    grad_out = torch.ones_like(saved.out)
    problem = describe(tensors, Options(1.0), stage="backward", grad_out=grad_out, grad=True)
    grads = backend.backward(problem, KERNEL, tensors, saved, Upstream(grad_out, None))
    assert not grads.query.any()
    assert runtime.calls == runtime.sources == []


def test_a_kernel_is_compiled_once() -> None:
    """One compile per specialisation and one look-up per kernel, whatever the sizes."""
    runtime = FakeRuntime()
    backend = FakeMetal(runtime)
    for _ in range(2):
        for rows, keys in ((40, 50), (50, 60), (90, 7)):
            tensors = operands(rows, keys)
            backend.forward(describe(tensors, Options(0.5)), KERNEL, tensors)
    assert (len(runtime.sources), len(runtime.calls)) == (1, 6)
    assert runtime.looked_up == ["attention_forward"]
    tensors = operands(dtype=torch.float16)
    backend.forward(describe(tensors, Options(0.5)), KERNEL, tensors)
    assert len(runtime.sources) == 2
    assert "#define TYPE half" in runtime.sources[1]


WORDS = "program_source:12:3: error: use of undeclared identifier 'simdgrup'\n  simdgrup x;"


def test_a_compile_error_is_set_aside() -> None:
    """Under "auto" the next backend serves, and the reason has the compiler's words."""
    runtime = FakeRuntime(WORDS)
    journal = Journal()
    planner = Planner((FakeMetal(runtime), ReferenceBackend()), settings.Settings(), journal)
    tensors = operands()
    problem = describe(tensors, Options(0.5))

    def serve(server: Backend, kernel: str) -> Saved:
        return server.forward(problem, kernel, tensors)

    with pytest.warns(orchard.FallbackWarning, match="undeclared identifier 'simdgrup'"):
        planner.run(problem, "auto", serve)
    plan = planner.plan(problem)
    assert plan.backend == "reference"
    (reason,) = plan.why_not("metal")
    assert reason.code == "failed"
    assert "error: use of undeclared identifier 'simdgrup'" in reason.sentence
    planner.run(problem, "auto", serve)
    with pytest.raises(MetalCompileError, match="undeclared identifier"):
        planner.backends["metal"].forward(problem, KERNEL, tensors)
    assert len(runtime.sources) == 1, "what does not compile is not compiled again"


def on_mps(problem: Problem) -> Problem:
    return problem._replace(device=torch.device("mps"))


class Present(MetalBackend):
    """metal where its probe has passed."""

    def unavailable(self, *_: Any) -> None:
        return None


def test_the_planner_on_mps() -> None:
    """metal serves what it is for; what is beyond it has reasons and goes elsewhere."""
    backends = (Present(FakeRuntime()), AtenBackend(), ReferenceBackend())
    for peer in backends[1:]:
        peer.unavailable = lambda *_: None
    planner = Planner(backends, settings.Settings(), Journal())
    for stage in ("forward", "backward"):
        problem = describe(operands(), Options(1.0, 2.0, Band(-3, 4), 9), grad=True)
        problem = on_mps(problem._replace(stage=stage))
        assert planner.plan(problem).backend == "metal"
    plan = planner.plan(on_mps(describe(operands(dtype=torch.float64), Options(1.0))))
    assert plan.backend == "reference"
    assert [reason.code for reason in plan.why_not("metal")] == ["dtype"]
    wide = Tensors(*(torch.empty(1, 1, 9, 257) for _ in range(3)))
    plan = planner.plan(on_mps(describe(wide, Options(1.0))))
    assert [reason.code for reason in plan.why_not("metal")] == ["head_dim"]
    twice = on_mps(describe(operands(), Options(1.0)))._replace(stage="double_backward")
    assert [reason.code for reason in planner.plan(twice).why_not("metal")] == ["stage"]
    masked = operands()._replace(mask=torch.zeros(1, 1, 1, 1, dtype=torch.float64))
    plan = planner.plan(on_mps(describe(masked, Options(1.0))))
    assert [reason.code for reason in plan.why_not("metal")] == ["mask_dtype"]
    for softcap, codes in ((1e-39, ["softcap"]), (2.3e38, []), (2.5e38, ["softcap"])):
        plan = planner.plan(on_mps(describe(operands(), Options(1.0, softcap))))
        assert [reason.code for reason in plan.why_not("metal")] == codes
    for keys, codes in ((MOST_KEYS, []), (MOST_KEYS + 1, ["size"])):
        problem = on_mps(describe(one_row(1, keys), Options(1.0)))
        assert [reason.code for reason in planner.plan(problem).why_not("metal")] == codes


def test_torch_serves_on_mps_too() -> None:
    """What torch's own forward computes exactly goes to metal first, and to torch when asked."""
    metal, aten = Present(FakeRuntime()), AtenBackend()
    aten.unavailable = lambda *_: None
    planner = Planner((metal, aten), settings.Settings(), Journal())
    tensors = Tensors(*(torch.empty(1, 2, 40, 64) for _ in range(3)))
    problem = on_mps(describe(tensors, Options(0.125)))
    plan = planner.plan(problem)
    assert plan.backend == "metal"
    assert [reason.code for reason in plan.why_not("aten")] == ["order"]
    assert planner.plan(problem, "aten").backend == "aten"
    trained = on_mps(describe(tensors, Options(0.125), grad=True))
    assert planner.plan(trained).backend == "metal"
    assert planner.plan(trained, "aten").backend is None


def test_without_a_mac_there_is_a_reason() -> None:
    """Where torch has no MPS the probe fails, and says so, without an exception."""
    if torch.backends.mps.is_available():
        pytest.skip("this is a Mac")
    backend = MetalBackend()
    chosen, (reason,) = backend.select(on_mps(describe(operands(), Options(1.0))))
    assert chosen is None
    assert reason.code == "unavailable"


@pytest.mark.parametrize(("version", "locked"), [("2.13.0", True), ("2.15.0+git", False)])
def test_the_lock(version: str, locked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below torch 2.15 all backends of the process share one lock; later none is needed."""
    monkeypatch.setattr(torch, "__version__", version)
    one, other = TorchRuntime(), TorchRuntime()
    assert (one.lock is other.lock) == locked
    assert isinstance(one.lock, nullcontext) != locked


def test_threads_launch_one_after_another() -> None:
    """Every launch and every compile happens under the lock, in each of many threads."""
    runtime = FakeRuntime()
    backend = FakeMetal(runtime)

    def work(rows: int) -> None:
        tensors = operands(rows)
        backend.forward(describe(tensors, Options(0.5)), KERNEL, tensors)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [*range(20, 52)] * 4))
    assert len(runtime.calls) == 128
    assert len(runtime.sources) == 1
    assert runtime.holder is None


def test_plans_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of a problem are built for its first call only."""
    made: list[str] = []

    def count(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            made.append(name)
            return make(*args)

        return counted

    module = import_module("orchard.backends.metal")
    for name, make in (("plan_forward", plan_forward), ("plan_backward", plan_backward)):
        monkeypatch.setattr(module, name, count(name, make))
    backend = FakeMetal(FakeRuntime())
    for _ in range(3):
        list(every_call(backend))
    assert made == ["plan_forward", "plan_backward"] * 3


def gradients(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Of a training step of the demo's GPT, dropout on."""
    monkeypatch.setenv("ORCHARD_BACKEND", backend)
    plans.reset()
    shape = Shape(11, context=40, width=32, heads=2, batch=2)
    torch.manual_seed(0)
    model = MiniGPT(shape)
    batch = torch.randint(11, (shape.batch, shape.context + 1))
    model.to(dtype)
    with orchard.enabled():
        found = torch.autograd.grad(losses(model, batch).mean(), list(model.parameters()))
    assert orchard.stats(reset=True)["calls"] == {"forward": {backend: 2}, "backward": {backend: 2}}
    return [grad.double() for grad in found]


@emulated
def test_a_training_step(
    fresh_planner: None, best_isa: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of the demo's GPT are as near to those in fp64, and to cpu's, as budgets ask."""
    exact = gradients("reference", torch.float64, monkeypatch)
    yardstick = gradients("reference", torch.float32, monkeypatch)
    native = gradients("cpu", torch.float32, monkeypatch)
    found = gradients(NAME, torch.float32, monkeypatch)
    for mine, theirs, low, high in zip(found, native, yardstick, exact, strict=True):
        step = torch.finfo(torch.float32).eps * high.abs().max()
        allowed = GRADIENT_FACTOR * (low - high).abs().max() + step
        assert (mine - high).abs().max() <= allowed
        assert (mine - theirs).abs().max() <= allowed
