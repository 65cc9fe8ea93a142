"""Threads that ask one question after the other, timed, and what their answers should be."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from orchard.testing.budget import OUTPUT_FACTOR

Call = Callable[[Tensor], Tensor]


class Answered(NamedTuple):
    question: int
    answer: Tensor
    seconds: float


@dataclass(frozen=True)
class Pass:
    """What clients got between a common start and the last answer."""

    seconds: float
    answered: tuple[Answered, ...]

    @property
    def throughput(self) -> float:
        return len(self.answered) / self.seconds


@contextmanager
def _without_collector() -> Iterator[None]:
    """As timeit does it. Here it would look at the answers, which are kept to be judged."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collector()
def drive(call: Call, questions: Sequence[Tensor], clients: int, seconds: float) -> Pass:
    """`clients` threads, each of which asks again as soon as it has its answer."""
    started = 0.0

    def start() -> None:
        nonlocal started
        started = time.perf_counter()

    together = threading.Barrier(clients, start)

    def ask(first: int) -> list[Answered]:
        question = first
        answered: list[Answered] = []
        together.wait()
        while (before := time.perf_counter()) < started + seconds or not answered:
            answer = call(questions[question])
            answered.append(Answered(question, answer, time.perf_counter() - before))
            question = (question + clients) % len(questions)
        return answered

    with ThreadPoolExecutor(clients) as threads:
        futures = [threads.submit(ask, client % len(questions)) for client in range(clients)]
        lists = [future.result() for future in futures]
        took = time.perf_counter() - started
    return Pass(took, tuple(answered for each in lists for answered in each))


def percentile(seconds: Sequence[float], share: float) -> float:
    ordered = sorted(seconds)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class Judgement(NamedTuple):
    wrong: int
    error: float  # the largest
    budget: float  # what it may be


@dataclass(frozen=True)
class Oracle:
    """The answer to each question, and how far another may be from it."""

    answers: tuple[Tensor, ...]
    budgets: tuple[float, ...]

    @classmethod
    def identical(cls, answers: Sequence[Tensor]) -> Oracle:
        """For a function that owes the same bits in any company."""
        return cls(tuple(answers), (0.0,) * len(answers))

    @classmethod
    def near(cls, exact: Sequence[Tensor], alone: Sequence[Tensor]) -> Oracle:
        """By the error budget: torch adds up in another order in another company.

        exact: in fp64; alone: what lone calls gave in their own dtype. The largest error and the
        largest number are those of all of them, as of one tensor.
        """
        error = max(_distance(one, truth) for one, truth in zip(alone, exact, strict=True))
        largest = max(float(truth.abs().max()) for truth in exact)
        budget = OUTPUT_FACTOR * error + torch.finfo(alone[0].dtype).eps * largest
        return cls(tuple(exact), (budget,) * len(exact))

    def judge(self, answered: Sequence[Answered]) -> Judgement:
        groups: dict[int, list[Tensor]] = defaultdict(list)
        for each in answered:
            groups[each.question].append(each.answer)
        wrong, error = 0, 0.0
        for question, answers in groups.items():
            distances = self._distances(question, answers)
            wrong += sum(not each <= self.budgets[question] for each in distances)
            error = max([error, *distances], key=lambda each: math.inf if each != each else each)
        return Judgement(wrong, error, max(self.budgets))

    def _distances(self, question: int, answers: list[Tensor]) -> list[float]:
        """Of each answer; one of another shape is infinitely far."""
        expected = self.answers[question]
        fitting = [answer for answer in answers if answer.shape == expected.shape]
        strangers = [math.inf] * (len(answers) - len(fitting))
        if not fitting:
            return strangers
        difference = torch.stack(fitting).to(expected) - expected
        near: list[float] = difference.abs().flatten(1).amax(1).tolist()
        return near + strangers


def _distance(one: Tensor, exact: Tensor) -> float:
    return float((one.to(exact) - exact).abs().max())
