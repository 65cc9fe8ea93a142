"""Calls like one that was served before: served again by the same kernel, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import orchard
from orchard.attention import problem, repeats
from orchard.attention.problem import Problem, Saved, Tensors
from orchard.attention.repeats import kind_of
from orchard.backends.reference import ReferenceBackend
from orchard.dispatch import planner as plans
from orchard.dispatch.backend import Capability, Reason
from orchard.dispatch.planner import Planner

pytestmark = pytest.mark.dispatch

Use = Callable[..., Planner]


class Counting(ReferenceBackend):
    """The reference; knows which of its calls were prepared for."""

    name = "counting"
    summary = "for tests"
    failing: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__()
        self.served = self.repeated = 0

    @property
    def planned(self) -> int:
        return self.served - self.repeated

    def probe(self, capability: Capability, device: torch.device) -> Reason | None:
        return None

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        self.served += 1
        if self.failing == "forward":
            raise RuntimeError("device lost")
        out, lse = super().forward(problem, kernel, tensors)
        return Saved(out.contiguous(), lse.mT.contiguous().mT)  # in an order of its own

    def prepare(self, problem: Problem, kernel: str) -> Callable[[Tensors], Saved]:
        if self.failing == "prepare":
            raise RuntimeError("device lost")
        prepared = super().prepare(problem, kernel)

        def forward(tensors: Tensors) -> Saved:
            self.repeated += 1
            return prepared(tensors)

        return forward


@pytest.fixture
def counting(use_backends: Use) -> Counting:
    found = use_backends(Counting, ReferenceBackend).backends["counting"]
    assert isinstance(found, Counting)
    return found


def operands(rows: int = 5, **kind: Any) -> list[Tensor]:
    return [torch.randn(2, 4, rows, 8, **kind) for _ in range(3)]


MASK = torch.randn(2, 1, 5, 5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "bottom_right", "return_lse": True},
        {"window": (2, 1), "scale": 1.0},
        {"softcap": 2.0, "backend": "counting"},
        {"mask": MASK},
        {"mask": MASK > 0},
        {"layout": "bshd", "return_lse": True, "causal": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_repeated_call(options: dict[str, Any], counting: Counting) -> None:
    """The same bits as a call that was planned, of the tensors that it is given, and counted."""
    for tensors in (operands(), operands(), operands()):
        found = orchard.attention(*tensors, **options)
        expected = orchard.attention(*tensors, **{**options, "backend": "reference"})
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    assert (counting.planned, counting.repeated) == (1, 2)
    assert orchard.stats()["calls"]["forward"] == {"counting": 3, "reference": 3}


@pytest.mark.parametrize(
    "other",
    [
        lambda q, k, v: ((q, k[:, :, :3], v[:, :, :3]), {}),
        lambda q, k, v: ((q, k, v[..., :4]), {}),
        lambda q, k, v: ((q.mT.contiguous().mT, k, v), {}),
        lambda q, k, v: ((q.double(), k.double(), v.double()), {}),
        lambda q, k, v: ((torch.cat([q.flatten()] * 2)[1:321].view(q.shape), k, v), {}),
        lambda q, k, v: ((q, k, v), {"causal": True}),
        lambda q, k, v: ((q, k, v), {"window": (1, 1)}),
        lambda q, k, v: ((q, k, v), {"scale": 0.5}),
        lambda q, k, v: ((q, k, v), {"softcap": 0.5}),
        lambda q, k, v: ((q, k, v), {"return_lse": True}),
        lambda q, k, v: ((q, k, v), {"mask": MASK}),
        lambda q, k, v: ((q, k, v), {"backend": "counting"}),
        lambda q, k, v: ((q, k, v), {"layout": "bshd"}),
    ],
)
def test_another_kind_of_call_is_planned(other: Callable[..., Any], counting: Counting) -> None:
    tensors = operands()
    orchard.attention(*tensors)
    changed, options = other(*tensors)
    orchard.attention(*changed, **options)
    assert (counting.planned, counting.repeated) == (2, 0)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 2, 1), (1, 0, 3, 2)], ids=str)
def test_a_repeated_call_lies_in_memory_as_the_first(
    order: tuple[int, ...], counting: Counting
) -> None:
    """As the query does, whatever the kernel has made."""
    query = torch.randn([(2, 4, 5, 8)[axis] for axis in order])
    query = query.permute([order.index(axis) for axis in range(4)])
    _, key, value = operands()
    found = [orchard.attention(query, key, value, return_lse=True) for _ in range(2)]
    assert (counting.planned, counting.repeated) == (1, 1)
    for out, lse in found:
        assert out.stride() == query.stride()
        assert lse.is_contiguous()
        assert torch.equal(out, found[0][0])


@pytest.mark.parametrize("flag", ["_get_deterministic_algorithms", "allows_tf32"])
def test_a_flag_that_another_thread_changes_meanwhile(
    flag: str, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is remembered of a call that posed another problem than it looked like."""
    tensors = operands()
    monkeypatch.setattr(repeats, flag, lambda *_: True)
    orchard.attention(*tensors)
    orchard.attention(*tensors)
    assert (counting.planned, counting.repeated) == (2, 0)


def test_deterministic_algorithms_make_another_kind(counting: Counting) -> None:
    tensors = operands()
    orchard.attention(*tensors)
    torch.use_deterministic_algorithms(True)
    try:
        orchard.attention(*tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (counting.planned, counting.repeated) == (2, 0)


def test_allowing_tf32_makes_another_kind(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = operands()
    orchard.attention(*tensors)
    for module in (problem, repeats):
        monkeypatch.setattr(module, "allows_tf32", lambda query: True)
    orchard.attention(*tensors)
    assert (counting.planned, counting.repeated) == (2, 0)
    orchard.attention(*tensors)
    assert (counting.planned, counting.repeated) == (2, 1)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({}, {"dropout_p": False}),
        ({"window": (1, 1)}, {"window": (1, True)}),
        ({}, {"layout": ["bhsd"]}),
        ({}, {"backend": ["auto"]}),
        ({}, {"window": 5}),
        ({}, {"causal": []}),
        ({}, {"mask": MASK.to_sparse()}),
        ({}, {"mask": 5}),
    ],
)
def test_a_wrong_argument_is_found_though_an_equal_one_was_right(
    right: dict[str, Any], wrong: dict[str, Any], counting: Counting
) -> None:
    tensors = operands()
    orchard.attention(*tensors, **right)
    (name,) = wrong
    with pytest.raises((TypeError, ValueError), match=f"^{name} is "):
        orchard.attention(*tensors, **wrong)


def test_more_than_a_plain_eager_call(counting: Counting) -> None:
    """Gradients, autocast, tangents and dropout are part of a call, and of no kind."""
    q, k, v = operands()
    plain = (q, k, v, None, False, None, None, None, 0.0, "bhsd", False, "auto")
    assert kind_of(*plain) is not None
    learnt = (q.requires_grad_(), *plain[1:])
    assert kind_of(*learnt) is None
    with torch.no_grad():
        assert kind_of(*learnt) is not None
    with torch.autocast("cpu"):
        assert kind_of(k, *plain[1:]) is None
    with torch.autograd.forward_ad.dual_level():
        assert kind_of(k, *plain[1:]) is None
    assert kind_of(k, *plain[1:8], 0.1, *plain[9:]) is None
    assert kind_of(torch.nn.Parameter(k, requires_grad=False), *plain[1:]) is None


@pytest.mark.grad
def test_a_gradient_after_repeated_calls(counting: Counting) -> None:
    tensors = operands()
    for _ in range(3):
        orchard.attention(*tensors)
    learnt = [tensor.requires_grad_() for tensor in tensors]
    out = orchard.attention(*learnt)
    grads = torch.autograd.grad(out.sum(), learnt)
    expected = orchard.attention(*learnt, backend="reference")
    assert all(map(torch.equal, grads, torch.autograd.grad(expected.sum(), learnt)))


@pytest.mark.parametrize("when", ["prepare", "forward"])
def test_a_kernel_that_fails_when_repeated_is_set_aside(when: str, counting: Counting) -> None:
    tensors = operands()
    for _ in range(1 if when == "prepare" else 2):
        orchard.attention(*tensors)
    counting.failing = when
    expected = orchard.attention(*tensors, backend="reference")
    with pytest.warns(orchard.FallbackWarning, match="device lost"):
        assert torch.equal(orchard.attention(*tensors), expected)
    assert torch.equal(orchard.attention(*tensors), expected)
    assert counting.planned == 1
    assert orchard.explain(*tensors).backend == "reference"
    assert [failure["times"] for failure in orchard.stats()["failures"]] == [1]


def test_a_kernel_that_was_asked_for_and_fails_when_repeated_raises(counting: Counting) -> None:
    tensors = operands()
    for _ in range(2):
        orchard.attention(*tensors, backend="counting")
    counting.failing = "forward"
    with pytest.raises(RuntimeError, match="device lost"):
        orchard.attention(*tensors, backend="counting")


def test_a_new_planner_remembers_nothing(counting: Counting) -> None:
    tensors = operands()
    orchard.attention(*tensors)
    plans.reset()
    orchard.attention(*tensors)
    assert (counting.planned, counting.repeated) == (1, 0)


def test_what_is_set_aside_meanwhile_is_not_remembered(counting: Counting) -> None:
    """Another thread clears the plans between this call's plan and what it leaves."""
    tensors, planner = operands(), plans.planner()
    plan = planner.plan
    seen: list[Any] = []

    def set_aside(problem: Problem, requested: str = "auto") -> Any:
        seen.append(plan(problem, requested))
        planner._plans.clear()
        return seen[-1]

    planner.plan = set_aside
    orchard.attention(*tensors)
    assert seen
    assert planner._repeated == {}
