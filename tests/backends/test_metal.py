"""The Metal kernels, executed by the emulator, and the Python around them on a fake runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from programs.problems import ASSORTED, differences, exercise
from torch import Tensor

import orchard
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
from orchard.backends.metal import MetalBackend, capability
from orchard.backends.metal.launch import plan_backward, plan_forward
from orchard.backends.metal.runtime import TorchRuntime
from orchard.backends.metal.source import KERNELS, MetalCompileError, Specialisation, source
from orchard.backends.metal_emulated import EmulatedRuntime, MetalEmulatedBackend
from orchard.backends.reference import ReferenceBackend
from orchard.cli.minigpt import MiniGPT, Shape, losses
from orchard.dispatch import planner as plans
from orchard.dispatch import settings
from orchard.dispatch.backend import Backend
from orchard.dispatch.journal import Journal
from orchard.dispatch.planner import Planner
from orchard.testing.budget import GRADIENT_FACTOR, Results, judge
from orchard.testing.conformance import CASES, Case, check
from orchard.testing.metal import SCHEDULES, Emulator, toolchain
from orchard.testing.metal_counters import Exercise, Workbench

try:
    toolchain.find()
    _without_compiler = ""
except toolchain.NoCompilerError as error:
    _without_compiler = str(error)

emulated = pytest.mark.skipif(bool(_without_compiler), reason=_without_compiler)
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


def solve(case: Case, first: Backend, second: Backend) -> Results:
    """A forward by one backend and a backward by another."""
    problem = exercise(case)
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
    assert exercise(case).complaints(solve(case, backend, peer)) == []
    assert exercise(case).complaints(solve(case, peer, backend)) == []


@emulated
@pytest.mark.parametrize("case", ASSORTED, ids=lambda case: case.name)
def test_schedules_make_no_difference(case: Case, backend: Backend, emulator: Emulator) -> None:
    """Whichever thread runs first, the bits are the same."""
    found = []
    for schedule in SCHEDULES:
        emulator.schedule = schedule
        found.append(solve(case, backend, backend))
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


@emulated
@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_lowest_number_as_a_mask(rows: int, dtype: torch.dtype, backend: Backend) -> None:
    """A row whose mask is the lowest number everywhere attends to all keys alike."""
    query, key, value = (torch.randn(1, 1, n, 16).to(dtype) for n in (rows, 50, 50))
    mask = torch.zeros(1, 1, rows, 50)
    mask[..., 25:] = torch.finfo(torch.float32).min
    mask[:, :, 1] = torch.finfo(torch.float32).min
    tensors = Tensors(query, key, value, mask)
    found = forward(backend, tensors, Options(0.25))
    verdicts = judge(Results(*found), tensors, Options(0.25))
    assert [str(verdict) for verdict in verdicts if not verdict.ok] == []


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


def test_a_decode_is_many_runs() -> None:
    """Runs cover the keys, none is empty, and there are enough for a large GPU."""
    for batch, keys in ((1, 1), (1, 63), (1, 65), (1, 5000), (4, 5000), (1, 100_000), (999, 9)):
        query, key = torch.empty(batch, 8, 1, 64), torch.empty(batch, 2, 1, 64)
        key = key.expand(batch, 2, keys, 64)
        plan = plan_forward(describe(Tensors(query, key, key), Options(1.0)))
        run_keys = plan.integers[9]
        assert (plan.runs - 1) * run_keys < keys <= plan.runs * run_keys
        assert run_keys >= min(keys, 32)


# Their work


@emulated
@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "permuted"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_no_needless_work(dim: int, causal: bool, permuted: bool) -> None:
    """At most what torch's own kernel does, and 7/2 of it in the backward."""
    bench = Workbench(Emulator())
    problem = Exercise(dim, causal, permuted, heads=1)
    saved, ours = bench.forward(problem)
    out, theirs = bench.torch_forward(problem)
    torch.testing.assert_close(saved.out, out, rtol=1e-4, atol=1e-5)
    for name in ("multiplies", "device_read", "device_written", "threadgroup_barriers"):
        assert getattr(ours, name) <= 1.02 * getattr(theirs, name), name
    full = 2 * (512 // 8) ** 2 * (dim // 8)
    assert ours.multiplies <= (0.6 if causal else 1.0) * full

    parts = bench.backward(problem)
    assert sum(part.multiplies for part in parts.values()) <= 3.5 * ours.multiplies
    operand = 512 * dim * 4
    rows = 512 * 4  # of lse, or of delta
    assert parts["attention_rows"].device_read == 2 * operand + rows
    assert parts["attention_rows"].device_written == 2 * rows
    assert parts["attention_grad_query"].device_written == operand
    assert parts["attention_grad_key_value"].device_written == 2 * operand
    # Tiles of two operands pass by, as in the forward; rows of another one are held.
    passing = ours.device_read - operand
    held = operand + 4 * 2 * rows  # four lanes share a row and its two numbers
    assert parts["attention_grad_query"].device_read <= operand + passing + held
    visits = passing // (2 * operand)
    extra = 2 * rows * (visits + 1)
    assert parts["attention_grad_key_value"].device_read <= 2 * operand + passing + extra


# The source


def test_source_is_ascii_and_whole() -> None:
    """Every header is in place, and what Metal cannot take is not there."""
    assert sorted(path.name for path in KERNELS.iterdir()) == [
        "backward.metal",
        "common.h",
        "decode.metal",
        "forward.metal",
    ]
    for file in ("forward.metal", "backward.metal", "decode.metal"):
        text = source(file, Specialisation(torch.float16, 64, 64, decode_rows=4))
        assert text.isascii()
        assert '#include "' not in text
        assert text.index("#include <metal_stdlib>") == 0
        for refused in ("if constexpr", "function_constant", "[=]", "[&]", "atomic"):
            assert refused not in text


def test_tiles_fit() -> None:
    """Threadgroup memory is 32 KB, whatever the head."""
    for dtype in (torch.float32, torch.float16):
        blocks = []
        for dim in range(257):
            made = Specialisation(dtype, dim, 256 - dim, dropout=True)
            widths = (8 * max(1, -(-d // 8)) + 16 // dtype.itemsize for d in (dim, 256 - dim))
            used = made.block * (sum(widths) * dtype.itemsize + 16) + 2048
            assert used <= 32768
            blocks.append(Specialisation(dtype, dim, dim).block)
        assert blocks == sorted(blocks, reverse=True)
        assert blocks[64] == 32
        assert blocks[128] == (16 if dtype == torch.float32 else 32)


# The Python around them, on a fake runtime


class FakeKernel:
    def __init__(self, runtime: FakeRuntime, name: str) -> None:
        self.runtime, self.name = runtime, name

    def __call__(self, *args: Any, threads: Any, group_size: Any) -> None:
        assert self.runtime.held or self.runtime.free, "launched without the lock"
        self.runtime.calls.append((self.name, args, threads, group_size))


class FakeLibrary:
    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> FakeKernel:
        self._runtime.looked_up.append(name)
        return FakeKernel(self._runtime, name)


class FakeRuntime:
    """In the place of torch.mps: records what it is asked to do, and does nothing."""

    def __init__(self, error: str = "", *, free: bool = False) -> None:
        self.error, self.free, self.held = error, free, 0
        self.sources: list[str] = []
        self.calls: list[tuple[str, tuple[Any, ...], Any, Any]] = []
        self.looked_up: list[str] = []
        self._mutex = threading.RLock()

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.free else self._hold()

    @contextmanager
    def _hold(self) -> Iterator[None]:
        with self._mutex:
            self.held += 1
            try:
                yield
            finally:
                self.held -= 1

    def compile(self, text: str) -> FakeLibrary:
        assert self.held or self.free
        self.sources.append(text)
        if self.error:
            raise SyntaxError(self.error)
        return FakeLibrary(self)


class FakeMetal(MetalBackend):
    """The metal backend on CPU tensors, which its fake runtime does not touch."""

    capabilities = (capability("cpu"),)

    def unavailable(self, *_: Any) -> None:
        return None


def operands(rows: int = 40, keys: int = 50, **kind: Any) -> Tensors:
    query = torch.randn(2, 4, rows, 24, **kind)
    key, value = torch.randn(2, 2, keys, 24, **kind), torch.randn(2, 2, keys, 12, **kind)
    return Tensors(query, key, value)


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
    assert runtime.held == 0


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


def test_bad_operands_are_refused() -> None:
    """What only a caller of the operator can get wrong is an argument error, not a crash."""
    backend, tensors = FakeMetal(FakeRuntime()), operands()
    problem = describe(tensors, Options(1.0, threshold=5))
    with pytest.raises(orchard.OrchardError, match="must be query's"):
        backend.forward(problem, KERNEL, tensors._replace(key=tensors.key.half()))
    with pytest.raises(orchard.OrchardError, match="two int32 words"):
        backend.forward(problem, KERNEL, tensors._replace(seed=torch.zeros(2)))
    away = tensors._replace(value=tensors.value.to("meta"))
    with pytest.raises(orchard.OrchardError, match="an operand is on meta"):
        backend.forward(problem, KERNEL, away)


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
