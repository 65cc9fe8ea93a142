"""The way of a call through the metal backend: from the user to torch.mps, and to the memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from metal_fakes import Call, FakeLibrary, FakeMetal, FakeRuntime, operands
from programs.problems import ASSORTED, exercise
from test_metal import solve
from test_metal_mutants import Mutant, MutatingRuntime, places
from torch import Tensor

import orchard
from orchard.attention.problem import Options, Saved, Tensors, Upstream, describe
from orchard.backends.metal.emulated import EmulatedRuntime, MetalEmulatedBackend
from orchard.backends.metal.launch import plan_forward
from orchard.backends.metal.runtime import TorchRuntime
from orchard.backends.metal.source import MetalCompileError, source, stride_index
from orchard.dispatch import planner as plans
from orchard.testing.budget import Results, judge
from orchard.testing.conformance import Case
from orchard.testing.metal import EmulationError, Emulator
from orchard.testing.metal.launch_lint import check_launch
from orchard.testing.metal.lint import signatures
from orchard.testing.metal.sparse import far_apart

emulated = pytest.mark.usefixtures("metal_compiler")
pytestmark = pytest.mark.metal

KERNEL = "simdgroup"


# From the user to torch.mps


@pytest.fixture
def runtime(fresh_planner: None, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """That of the metal backend, which is among the planner's and takes CPU tensors."""
    made = FakeRuntime()
    monkeypatch.setitem(plans.planner().backends, "metal", FakeMetal(made))
    return made


def strides_of(name: str, call: Call) -> list[int]:
    """Of a tensor, as they stand in the integers that a kernel gets."""
    integers = next(arg for arg in call.args if isinstance(arg, list) and isinstance(arg[0], int))
    start = stride_index(name)
    found: list[int] = integers[start : start + 4]
    return found


def takes(call: Call, tensor: Tensor) -> bool:
    """Whether the tensor's memory is an argument of the call."""
    given = [arg.data_ptr() for arg in call.args if isinstance(arg, Tensor)]
    return tensor.data_ptr() in given


def test_a_call_and_its_backward(runtime: FakeRuntime) -> None:
    """Operands reach the kernels as they lie, and what the kernels are to fill comes back."""
    query = torch.randn(2, 40, 4, 24, requires_grad=True)
    key = torch.randn(2, 50, 2, 24, requires_grad=True)
    value = torch.randn(2, 50, 2, 12, requires_grad=True)
    mask = torch.zeros(40, 50, requires_grad=True)
    arguments: dict[str, Any] = {"mask": mask, "causal": True, "dropout_p": 0.1, "layout": "bshd"}
    assert orchard.explain(query, key, value, **arguments, backend="metal").backend == "metal"
    out, lse = orchard.attention(query, key, value, **arguments, return_lse=True, backend="metal")
    (forward,) = runtime.calls
    assert forward.name == "attention_forward"
    assert forward.threads == (2 * 128, 4, 2)
    for tensor in (query, key, value, mask, out, lse):
        assert takes(forward, tensor)
    seeds = [arg for arg in forward.args if isinstance(arg, Tensor) and arg.dtype == torch.int32]
    assert [seed.numel() for seed in seeds] == [2]
    assert strides_of("QUERY", forward) == [40 * 4 * 24, 24, 4 * 24, 1]
    assert strides_of("VALUE", forward) == [50 * 2 * 12, 12, 2 * 12, 1]
    assert strides_of("MASK", forward) == [0, 0, 50, 1]

    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    leaves = (query, key, value, mask)
    grads = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]
    backward = {call.name: call for call in runtime.calls[1:]}
    assert takes(backward["attention_rows"], grad_out)
    assert takes(backward["attention_rows"], grad_lse)
    assert takes(backward["attention_grad_query"], grads[0])
    assert takes(backward["attention_grad_key_value"], grads[1])
    assert takes(backward["attention_grad_key_value"], grads[2])
    assert all(takes(call, seeds[0]) for name, call in backward.items() if "grad" in name)
    assert orchard.stats()["calls"] == {"forward": {"metal": 1}, "backward": {"metal": 1}}

    known = {name: one for text in runtime.sources for name, one in signatures(text).items()}
    for call in runtime.calls:
        assert check_launch(*call[1:], known[call.name]) == [], call.name


def test_torch_is_given_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRuntime hands the text of a specialisation to torch.mps, and launches what it gets."""
    behind = FakeRuntime(free=True)
    monkeypatch.setattr(torch.mps, "compile_shader", behind.compile)
    backend, tensors = FakeMetal(TorchRuntime()), operands()
    problem = describe(tensors, Options(0.5))
    backend.forward(problem, KERNEL, tensors)
    assert behind.sources == [source("forward.metal", plan_forward(problem).specialisation)]
    assert [call.name for call in behind.calls] == ["attention_forward"]


WORDS = """program_source:12:3: error: use of undeclared identifier 'simdgrup'
  simdgrup x;
  ^
program_source:14:1: warning: unused variable
program_source:20:9: error: no member named 'y'"""


def test_the_words_of_the_compiler() -> None:
    """Each error with its place, the first of them within what a reason has room for."""
    tensors = operands()
    with pytest.raises(MetalCompileError) as caught:
        FakeMetal(FakeRuntime(WORDS)).forward(describe(tensors, Options(0.5)), KERNEL, tensors)
    assert str(caught.value) == (
        "forward.metal: program_source:12:3: error: use of undeclared identifier 'simdgrup';"
        " program_source:20:9: error: no member named 'y'"
    )


# Threads


class MeetingRuntime(FakeRuntime):
    """Needs no lock. A compilation goes on when another begins, or none does for a second."""

    def __init__(self) -> None:
        super().__init__(free=True)
        self._another = threading.Event()

    def compile(self, text: str) -> FakeLibrary:
        if self.sources:
            self._another.set()
        library = super().compile(text)
        self._another.wait(1.0)
        return library


def test_threads_compile_a_kernel_once() -> None:
    """Also where no lock is held around calls: all wait for the first, and share its kernel."""
    runtime = MeetingRuntime()
    backend, tensors = FakeMetal(runtime), operands()
    problem = describe(tensors, Options(0.5))
    together = threading.Barrier(8)

    def work(_: int) -> None:
        together.wait()
        backend.forward(problem, KERNEL, tensors)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(runtime.sources) == 1
    assert runtime.looked_up == ["attention_forward"]
    assert len(runtime.calls) == 8


# Undefined behaviour


@pytest.fixture(scope="module")
def flat() -> MetalEmulatedBackend:
    """With the compiler's own checks: overflow, shifts, conversions, local arrays."""
    return MetalEmulatedBackend(EmulatedRuntime(Emulator(mode="flat", bounds="view")))


@emulated
@pytest.mark.parametrize("case", ASSORTED, ids=lambda case: case.name)
def test_nothing_is_undefined(case: Case, flat: MetalEmulatedBackend) -> None:
    problem = exercise(case)
    assert problem.complaints(solve(problem, flat, flat)) == []


# Offsets of 64 bits


FAR = 2**31 + 8  # so that an axis of three goes beyond 2**32
AXES = ("batch", "heads", "rows", "columns")


@dataclass(frozen=True)
class Distant:
    """A problem whose operands have one axis, of size three, with a stride of FAR."""

    axis: int
    decode: bool = False

    def __str__(self) -> str:
        return f"{AXES[self.axis]} of {'a decode' if self.decode else 'tiles'}"

    def far(self, tensor: Tensor) -> Tensor:
        return far_apart(tensor, self.axis, FAR) if self.axis < tensor.dim() else tensor

    @property
    def operands(self) -> Tensors:
        """As few as take the way through tiles, or through a decode."""
        source = torch.Generator().manual_seed(4)
        size = {name: 3 if self.axis == number else 1 for number, name in enumerate(AXES)}
        by_rows = self.axis == AXES.index("rows")
        rows, heads = (3 if by_rows or self.decode else 9), size["heads"]
        group = 3 if by_rows and not self.decode else 1
        dim = 3 if self.axis == AXES.index("columns") else 8
        batch = size["batch"]
        shapes = (
            (batch, group * heads, rows, dim),
            (batch, heads, 3, dim),
            (batch, heads, 3, dim),
            (batch, group * heads, rows, 3),
        )
        return Tensors(*(torch.randn(shape, generator=source).half() for shape in shapes))

    def wrong(self, backend: MetalEmulatedBackend) -> Iterator[str]:
        """What a backend gets wrong, forward and then backward."""
        near, options = self.operands, Options(0.4)
        tensors = Tensors(*(None if t is None else self.far(t) for t in near))
        ahead = describe(tensors, options, lse=True, grad=True, mask_grad=True)
        saved = backend.forward(ahead, KERNEL, tensors)
        yield from _complaints(judge(Results(*saved), near, options))
        if self.decode:
            return
        upstream = Upstream(torch.ones_like(saved.out), torch.ones_like(saved.lse))
        grad_out, grad_lse = map(self.far, upstream)
        back = describe(
            tensors,
            options,
            stage="backward",
            grad_out=grad_out,
            lse=True,
            grad=True,
            mask_grad=True,
        )
        given = Saved(*map(self.far, saved))
        grads = backend.backward(back, KERNEL, tensors, given, Upstream(grad_out, grad_lse))
        results = Results(*saved, *grads)
        yield from _complaints(judge(results, near, options, upstream, mask_grad=True))


def _complaints(verdicts: list[Any]) -> Iterator[str]:
    return (str(verdict) for verdict in verdicts if not verdict.ok)


@pytest.fixture(scope="module")
def unchanged() -> MetalEmulatedBackend:
    return MetalEmulatedBackend(MutatingRuntime(None))


@emulated
@pytest.mark.layout
@pytest.mark.parametrize("decode", [False, True], ids=["tiles", "decode"])
@pytest.mark.parametrize("axis", range(4), ids=AXES)
def test_operands_further_apart_than_32_bits(
    axis: int, decode: bool, unchanged: MetalEmulatedBackend
) -> None:
    """Beyond 2**31 and 2**32 elements, by each axis, of every tensor that a caller gives."""
    assert list(Distant(axis, decode).wrong(unchanged)) == []


def narrowed(file: str, stride: str, only: int = 0) -> Mutant:
    """A stride cut to 32 bits, at one of the places where it stands."""
    (mutant,) = places(file, stride, f"int({stride})", only)
    return mutant


NARROWED = (
    (Distant(1), *places("operands.h", "long plane(", "int plane(")),
    (Distant(2), *places("operands.h", "int row, long stride", "int row, int stride", 0)),
    (Distant(3), *places("operands.h", "int column, long stride", "int column, int stride", 0)),
    (Distant(3), *places("common.h", "long stride, bool valid", "int stride, bool valid")),
    (Distant(2), narrowed("common.h", "p[MASK_STRIDES + 2]")),
    (Distant(2), narrowed("forward.metal", "p[QUERY_STRIDES + 2]")),
    (Distant(2, decode=True), narrowed("decode.metal", "p[KEY_STRIDES + 2]")),
    (Distant(3, decode=True), narrowed("decode.metal", "p[VALUE_STRIDES + 3]")),
    (Distant(2), narrowed("backward.metal", "p[OUT_STRIDES + 2]")),
    (Distant(2), narrowed("backward.metal", "p[LSE_STRIDES + 2]")),
    (Distant(2), narrowed("backward.metal", "p[GRAD_LSE_STRIDES + 2]")),
    (Distant(3), narrowed("backward.metal", "p[GRAD_OUT_STRIDES + 3]")),
    (Distant(2), narrowed("backward.metal", "own_key * p[KEY_STRIDES + 2]")),
)


@emulated
@pytest.mark.parametrize(("problem", "mutant"), NARROWED, ids=str)
def test_an_offset_of_32_bits_is_noticed(problem: Distant, mutant: Mutant) -> None:
    backend = MetalEmulatedBackend(MutatingRuntime(mutant))
    try:
        found = next(problem.wrong(backend), "")
    except EmulationError as error:
        found = str(error)
    print(f"{mutant}: {found or 'not caught'}")
    assert found
