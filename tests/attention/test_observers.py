"""Who sees the operators: eager calls without anybody to see them go past torch's dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import orchard
from orchard.attention.observers import is_observed
from orchard.attention.ops import Settings, backward_op

FORWARD, BACKWARD = "orchard::attention_forward", "orchard::attention_backward"


def operands(*, grad: bool = False) -> list[Tensor]:
    return [torch.randn(2, 4, 5, 8, requires_grad=grad) for _ in range(3)]


def train(tensors: list[Tensor]) -> None:
    torch.autograd.grad(orchard.attention(*tensors).sum(), tensors)


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(function.name())
        return function(*args, **kwargs or {})


class Called(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if isinstance(function, torch._ops.OpOverload):
            self.names.append(function.name())
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("kind", [Dispatched, Called])
def test_modes_see_the_forward(kind: type[Dispatched | Called], grad: bool) -> None:
    tensors = operands(grad=grad)
    with kind() as mode:
        orchard.attention(*tensors)
    assert mode.names.count(FORWARD) == 1


@pytest.mark.grad
def test_a_mode_sees_the_backward() -> None:
    with Dispatched() as mode:
        train(operands(grad=True))
    assert (mode.names.count(FORWARD), mode.names.count(BACKWARD)) == (1, 1)


@pytest.mark.grad
def test_a_profile_has_both_operators() -> None:
    with torch.profiler.profile() as profile:
        train(operands(grad=True))
    names = [event.name for event in profile.events()]
    assert (names.count(FORWARD), names.count(BACKWARD)) == (1, 1)


class Marked(Tensor):
    """A subclass that says what is called with it."""

    names: list[str]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if isinstance(function, torch._ops.OpOverload):
            cls.names.append(function.name())
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_sees_the_operator() -> None:
    Marked.names = []
    query, key, value = operands()
    out = orchard.attention(query, key.as_subclass(Marked), value)
    assert type(out) is Marked
    assert Marked.names == [FORWARD]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_has_the_operator() -> None:
    trace = torch.jit.trace(lambda *each: orchard.attention(*each), operands(), check_trace=False)
    assert str(trace.graph).count(FORWARD) == 1


def test_a_symbolic_trace_has_the_operator() -> None:
    traced = make_fx(lambda *each: orchard.attention(*each))(*operands())
    names = [str(node.target) for node in traced.graph.nodes]
    assert names.count("orchard.attention_forward.default") == 1


def test_a_negated_view_is_resolved() -> None:
    """Its memory has the opposite of its values; torch sees to that on the way to a kernel."""
    query, key, value = operands()
    out = orchard.attention(torch._neg_view(query), key, torch._neg_view(value))
    assert torch.equal(out, orchard.attention(-query, key, -value))


@contextmanager
def profiled_by_another_thread() -> Iterator[None]:
    """A profile of the whole process need not have been started by the thread that calls."""
    started, enough = threading.Event(), threading.Event()

    def profile() -> None:
        try:
            with torch.profiler.profile():
                started.set()
                enough.wait()
        finally:
            started.set()

    thread = threading.Thread(target=profile)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        enough.set()
        thread.join()


@pytest.mark.parametrize(
    "context", [Dispatched, Called, torch.profiler.profile, profiled_by_another_thread]
)
def test_a_context_is_noticed_while_it_lasts(context: Any) -> None:
    tensors = operands()
    around: AbstractContextManager[Any] = context()
    with around:
        assert is_observed(tensors)
    assert not is_observed(tensors)


TENSORS = {
    "subclass": (lambda x: x.as_subclass(Marked), True),
    "negated": (torch._neg_view, True),
    "zeros without memory": (lambda x: torch._efficientzerotensor(x.shape), True),
    "functional": (torch._to_functional_tensor, True),
    "meta": (lambda x: x.to("meta"), True),
    "sparse": (lambda x: x.to_sparse(), True),
    "parameter": (torch.nn.Parameter, False),
    "leaf": (lambda x: x.requires_grad_(), False),
    "view": (lambda x: x.mT[1:], False),
    "result": (lambda x: x.requires_grad_() * 2, False),
    "none": (lambda x: None, False),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_more_than_memory_are_noticed(name: str) -> None:
    make, observed = TENSORS[name]
    plain = torch.randn(2, 3)
    assert is_observed([plain, make(torch.randn(2, 3))]) is observed


def test_ordinary_calls_are_not_observed() -> None:
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            assert not is_observed([torch.randn(2, 3)])
    with torch.autocast("cpu"):
        assert not is_observed([torch.randn(2, 3)])


def test_what_a_transform_wraps_is_noticed() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(is_observed([torch.empty(0)]) and is_observed([x]))
        return x

    torch.vmap(look)(torch.randn(2, 3))
    torch.func.grad(lambda x: look(x).sum())(torch.randn(3))
    assert seen == [True, True]


def test_without_anybody_to_see_it_no_operator_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eager calls, forward and backward, with gradients and without."""
    from orchard.attention import ops

    def refuse(*_: Any) -> Any:
        raise AssertionError("an operator was called")

    monkeypatch.setattr(ops, "_forward_op", refuse)
    monkeypatch.setattr(ops, "_backward_op", refuse)
    train(operands(grad=True))
    with torch.inference_mode():
        orchard.attention(*operands())


@pytest.mark.grad
@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_gradients_of_results_on_a_graph_are_on_none(backend: str) -> None:
    """As below the operator: where grad mode is on, only what the caller wraps it in records."""
    query, key, value = operands()
    settings = Settings(None, 0.0, 0.0, -1, -1, False, backend)
    out, lse = orchard.attention(query, key, value, return_lse=True)
    on_graph = out.requires_grad_(), lse.requires_grad_()
    given = (torch.ones_like(out), None, query, key, value, None, None)
    grads = backward_op(*given, *on_graph, *settings, False)
    assert not any(grad.requires_grad for grad in grads)
