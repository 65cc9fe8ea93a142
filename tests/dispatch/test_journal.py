"""The journal: exact counters from any thread, and sentences to act on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import orchard
from orchard.attention.problem import Options, Tensors, describe
from orchard.dispatch import planner as plans
from orchard.dispatch.backend import Reason
from orchard.dispatch.journal import Journal, advise

pytestmark = [pytest.mark.dispatch]

THREADS = 8
EMPTY = {
    "calls": {},
    "kernels": {},
    "fallbacks": [],
    "failures": [],
    "torch_sdpa": {"served": 0, "delegated": {}},
}


def plan_of(softcap: float = 0.0, rows: int = 8) -> plans.Plan:
    operand = torch.zeros(1, 2, rows, 16)
    problem = describe(Tensors(operand, operand, operand), Options(0.25, softcap))
    return plans.planner().plan(problem)


def in_threads(work: Callable[[int], None]) -> None:
    """Run work(0), work(1), ... at once, one thread each."""
    start = threading.Barrier(THREADS)

    def body(number: int) -> None:
        start.wait()
        work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(body, range(THREADS)))


@pytest.fixture
def _eager_switching() -> Iterator[None]:
    """Threads that change places as often as the interpreter allows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_eager_switching")
def test_counters_are_exact_under_threads() -> None:
    """Eight threads that count at once lose nothing."""
    log = Journal()
    plain, capped = plan_of(), plan_of(softcap=2.0)
    reason = Reason("rank", "too many axes")

    def work(number: int) -> None:
        for _ in range(500):
            log.served(plain)
            log.served(capped)
            log.failed("toy", "forward", f"error {number % 2}")
            log.intercepted()
            log.delegated(reason)

    in_threads(work)
    stats = log.stats()
    total = THREADS * 500
    assert stats["calls"] == {"forward": {"aten": total, "reference": total}}
    assert stats["kernels"] == {"aten/cpu-flash": total, "reference/chunked": total}
    assert [(f["backend"], f["code"], f["calls"]) for f in stats["fallbacks"]] == [
        ("aten", "softcap", total)
    ]
    assert sorted((f["error"], f["times"]) for f in stats["failures"]) == [
        ("error 0", total // 2),
        ("error 1", total // 2),
    ]
    assert stats["torch_sdpa"] == {"served": total, "delegated": {"too many axes": total}}


@pytest.mark.stress
@pytest.mark.usefixtures("_eager_switching")
def test_calls_from_threads_are_all_counted() -> None:
    """Forwards and backwards of eight threads are each counted once."""

    def work(number: int) -> None:
        operand = torch.randn(1, 2, 8 + number, 16, requires_grad=True)
        for _ in range(10):
            orchard.attention(operand, operand, operand).sum().backward()
            orchard.attention(operand.detach(), operand.detach(), operand.detach(), softcap=2.0)

    in_threads(work)
    total = THREADS * 10
    assert orchard.stats()["calls"] == {
        "forward": {"aten": total, "reference": total},
        "backward": {"aten": total},
    }


def test_stats_of_nothing() -> None:
    """A process that has done nothing has empty counters and no advice."""
    assert orchard.stats() == EMPTY
    assert orchard.advice() == []


def test_reset() -> None:
    """`reset=True` returns what was counted and begins anew; without it nothing is lost."""
    operand = torch.randn(1, 2, 8, 16)
    orchard.attention(operand, operand, operand)
    first = orchard.stats()
    assert first["calls"] == {"forward": {"aten": 1}}
    assert orchard.stats() == first
    assert orchard.stats(reset=True) == first
    assert orchard.stats() == EMPTY


def test_stats_are_a_copy() -> None:
    """Changing what stats() returned changes no counter."""
    operand = torch.randn(1, 2, 8, 16)
    orchard.attention(operand, operand, operand, softcap=1.0)
    taken = orchard.stats()
    taken["calls"]["forward"]["reference"] = 99
    taken["fallbacks"].clear()
    taken["torch_sdpa"]["delegated"]["x"] = 1
    again = orchard.stats()
    assert again["calls"] == {"forward": {"reference": 1}}
    assert len(again["fallbacks"]) == 1
    assert again["torch_sdpa"]["delegated"] == {}


def test_number_of_counters_is_bounded() -> None:
    """Many shapes with the same fate share one counter."""
    log = Journal()
    for rows in range(1, 41):
        log.served(plan_of(softcap=2.0, rows=rows))
    stats = log.stats()
    assert stats["kernels"] == {"reference/chunked": 40}
    assert [fallback["calls"] for fallback in stats["fallbacks"]] == [40]
    assert len(log._served) == 1


def test_fallback_entry() -> None:
    """A call that passes a better backend by is counted under each reason, with its fix."""
    operand = torch.randn(1, 2, 8, 16)
    for _ in range(3):
        orchard.attention(operand, operand, operand, softcap=1.0, dropout_p=0.5)
    assert orchard.stats()["fallbacks"] == [
        {
            "stage": "forward",
            "backend": "aten",
            "code": "softcap",
            "calls": 3,
            "reason": "no softcap",
            "fix": "drop softcap",
        },
        {
            "stage": "forward",
            "backend": "aten",
            "code": "dropout",
            "calls": 3,
            "reason": "cannot draw Orchard's dropout bits",
            "fix": "set dropout_p=0",
        },
    ]


def test_insisting_is_no_fallback() -> None:
    """A backend that was asked for by name was not fallen back to."""
    operand = torch.randn(1, 2, 8, 16)
    orchard.attention(operand, operand, operand, softcap=1.0, backend="reference")
    stats = orchard.stats()
    assert stats["calls"] == {"forward": {"reference": 1}}
    assert stats["fallbacks"] == []
    assert orchard.advice() == []


def test_advice_of_a_fallback() -> None:
    """Advice says how many calls passed whom by, why, and what to change."""
    operand = torch.randn(1, 2, 8, 16)
    orchard.attention(operand, operand, operand, softcap=1.0)
    assert orchard.advice() == [
        "1 call (forward) passed aten by: no softcap. To change that: drop softcap."
    ]
    orchard.attention(operand, operand, operand, softcap=1.0)
    assert orchard.advice() == [
        "2 calls (forward) passed aten by: no softcap. To change that: drop softcap."
    ]


def test_advice_without_a_fix() -> None:
    """A reason that nothing changes is stated without a remedy."""
    operand = torch.randn(1, 2, 8, 16)
    orchard.attention(operand, operand, operand[..., :8])
    assert orchard.advice() == [
        "1 call (forward) passed aten by: value has head dimension 8, query has 16."
    ]


def test_advice_of_a_failure_and_a_delegation() -> None:
    """Failures come first and say how to stop at them; torch's own calls are named as such."""
    log = Journal()
    log.delegated(Reason("rank", "the operands have 5 axes"))
    log.failed("toy", "backward", "RuntimeError: device lost")
    assert advise(log.stats()) == [
        "toy failed in a backward and was set aside: RuntimeError: device lost. "
        "ORCHARD_ON_ERROR=raise stops there instead of falling back.",
        "1 call of torch's attention stayed with torch: the operands have 5 axes.",
    ]


def test_advice_begins_with_the_most_frequent_fallback() -> None:
    """Fall-backs are ordered by how many calls they concern."""
    operand = torch.randn(1, 2, 8, 16)
    orchard.attention(operand, operand, operand, softcap=1.0)
    for _ in range(2):
        orchard.attention(operand, operand, operand, window=(2, 2))
    first, second = orchard.advice()
    assert first.startswith("2 calls (forward) passed aten by: no window masking")
    assert second.startswith("1 call (forward) passed aten by: no softcap")


def test_advice_begins_with_the_most_frequent_delegation() -> None:
    """Calls that stayed with torch are ordered by how many they are."""
    log = Journal()
    log.delegated(Reason("rank", "rare"))
    for _ in range(3):
        log.delegated(Reason("shape", "frequent"))
    first, second = advise(log.stats())
    assert first == "3 calls of torch's attention stayed with torch: frequent."
    assert second == "1 call of torch's attention stayed with torch: rare."
