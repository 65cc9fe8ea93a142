"""Client threads and the oracle that judges their answers."""

from __future__ import annotations

import gc
import math
import threading

import pytest
import torch

from orchard.testing.clients import Answered, Oracle, drive, percentile


def test_clients_ask_at_once_and_in_turn() -> None:
    """All clients ask at the same time, each begins elsewhere, and every answer is kept."""
    questions = [torch.tensor(float(n)) for n in range(5)]
    inside = threading.Barrier(3)
    of_thread = threading.local()

    def call(x: torch.Tensor) -> torch.Tensor:
        if not hasattr(of_thread, "asked"):  # the first question of each waits for the others
            of_thread.asked = True
            inside.wait(60)
        return x * 2

    found = drive(call, questions, 3, 0.01)
    assert {each.question for each in found.answered} >= {0, 1, 2}
    assert all(each.answer == 2 * each.question for each in found.answered)
    assert all(0 < each.seconds <= found.seconds for each in found.answered)
    assert found.throughput == len(found.answered) / found.seconds


def test_the_collector_rests_during_a_pass_and_goes_on_after_it() -> None:
    seen: list[bool] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.append(gc.isenabled())
        return x

    assert gc.isenabled()
    drive(call, [torch.zeros(1)], 2, 0.01)
    assert gc.isenabled()
    assert not any(seen)


def test_an_error_of_a_call_is_raised() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        drive(call, [torch.zeros(1)], 2, 0.01)


def test_percentiles() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 3.0
    assert percentile([1.0], 0.99) == 1.0


def test_near_is_twice_the_error_of_lone_calls_and_a_step() -> None:
    """Of all of them together: a lucky lone answer asks no more of the others."""
    exact = torch.tensor([1.0, 3.0], dtype=torch.float64)
    oracle = Oracle.near([exact, -exact], [torch.tensor([1.0, 3.5]), torch.tensor([-1.0, -3.0])])
    budget = 2 * 0.5 + 3 * torch.finfo(torch.float32).eps
    answers = [-exact + budget, -exact - 1.0001 * budget, -exact, exact * torch.nan, -exact[:1]]
    answered = [Answered(1, answer, 0.1) for answer in answers]
    assert oracle.judge(answered).wrong == 3
    assert oracle.judge(answered[:1]) == (0, pytest.approx(budget), budget)
    assert oracle.judge(answered[4:]) == (1, math.inf, budget)


def test_identical_means_every_bit() -> None:
    answer = torch.tensor([1.0, 3.0])
    oracle = Oracle.identical([torch.zeros(2), answer])
    answered = [Answered(1, answer.clone(), 0.1), Answered(1, answer.nextafter(answer + 1), 0.1)]
    assert oracle.judge(answered).wrong == 1
    assert oracle.judge([Answered(0, answer, 0.1)]) == (1, 3.0, 0.0)
