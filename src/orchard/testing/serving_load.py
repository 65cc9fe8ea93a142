"""Queues under load: a clock that is set by hand, clients that ask again and again, and queues
closed at a random moment.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchard.errors import DeadlineExceeded, QueueClosed, QueueFull
from orchard.serving.batch_queue import BatchQueue
from orchard.serving.queue_core import Clock

_CLIENTS = 4
_REQUESTS = 40  # of each client
_LOST = 60.0  # seconds after which an unresolved future counts as lost


class ManualClock(Clock):
    """Time that passes only when told; those who wait for a moment are woken when it comes."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()
        self._conditions: list[threading.Condition] = []

    def now(self) -> float:
        with self._lock:
            return self._now

    def wait_until(self, condition: threading.Condition, moment: float | None) -> None:
        with self._lock:
            if moment is not None and moment <= self._now:
                return
            if condition not in self._conditions:
                self._conditions.append(condition)
        condition.wait()

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds
            conditions = list(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()


def triple_and_one(x: Tensor) -> Tensor:
    return x * 3 + 1


def closed_loop(queue: BatchQueue, threads: int, rounds: int) -> None:
    """Each thread asks again as soon as it has its answer, which must be `triple_and_one`'s."""
    wrong: list[str] = []
    done = [0] * threads

    def client(n: int) -> None:
        for turn in range(rounds):
            x = torch.tensor([[float(n), float(turn)]])
            got = queue.submit(x).result()
            if not torch.equal(got, triple_and_one(x)):
                wrong.append(f"{x} gave {got}")
            done[n] += 1

    clients = [threading.Thread(target=client, args=(n,), daemon=True) for n in range(threads)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(_LOST)
    assert wrong == []
    assert done == [rounds] * threads


@dataclass
class LoadReport:
    """What became of the requests; every one of them is in here."""

    results: int = 0
    closed: int = 0
    expired: int = 0
    full: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0  # at submit: the queue was closed or full

    @property
    def submitted(self) -> int:
        outcomes = self.results + self.closed + self.expired + self.full
        return outcomes + self.cancelled + self.failed


class RefusedError(ValueError):
    """What the function raises for requests that ask for it."""


class Asked(NamedTuple):
    x: Tensor
    deadline: float | None
    future: Future[Any]


def answer(x: Tensor) -> Tensor:
    """A function of each row alone; rows that hold a negative number are refused."""
    if (x < 0).any():
        raise RefusedError("a negative number")
    return x * 3 + 1


@dataclass
class _Client:
    """A thread's requests, each with what it asked."""

    queue: BatchQueue
    rng: random.Random
    asked: list[Asked]
    refused: int = 0

    def run(self, begin: threading.Barrier, moment: threading.Semaphore) -> None:
        begin.wait()
        for n in range(_REQUESTS):
            rows = self.rng.randint(1, 3)
            x = torch.full((rows, 2), float(-1 if self.rng.random() < 0.05 else n))
            deadline = self.rng.choice([None, None, None, 0.0, 60.0])
            try:
                future = self.queue.submit(x, deadline=deadline, priority=self.rng.randint(-2, 2))
            except (QueueClosed, QueueFull):
                self.refused += 1
            else:
                self.asked.append(Asked(x, deadline, future))
                if self.rng.random() < 0.1:
                    future.cancel()
                elif self.rng.random() < 0.3:
                    with suppress(Exception):  # what it says is looked at later
                        future.result()
            finally:
                moment.release()


def close_under_load(repeats: int, seed: int = 0) -> LoadReport:
    """Close `repeats` queues at a random moment under load.

    Raises AssertionError if a future stays unresolved, has a wrong value or an outcome that its
    request cannot have, or if the queue's own account differs.
    """
    report = LoadReport()
    for repeat in range(repeats):
        _close_once(random.Random(f"{seed}-{repeat}"), report)
    return report


def _close_once(rng: random.Random, report: LoadReport) -> None:
    queue = BatchQueue(
        answer,
        max_batch=rng.choice([1, 4, 32]),
        max_delay=rng.choice([0.0, 0.0005]),
        max_pending=rng.choice([2, 8, 1024]),
        on_full=rng.choice(["wait", "raise", "drop-oldest"]),
        workers=rng.randint(1, 3),
    )
    begin = threading.Barrier(_CLIENTS + 1)
    moment = threading.Semaphore(0)
    clients = [_Client(queue, random.Random(rng.random()), []) for _ in range(_CLIENTS)]
    threads = [
        threading.Thread(target=client.run, args=(begin, moment), daemon=True) for client in clients
    ]
    for thread in threads:
        thread.start()
    begin.wait()
    for _ in range(rng.randint(0, _CLIENTS * _REQUESTS)):
        moment.acquire()
    queue.close(drain=rng.random() < 0.5)
    for thread in threads:
        thread.join(_LOST)
        assert not thread.is_alive(), "a client still waits after its queue was closed"
    mine = LoadReport(refused=sum(client.refused for client in clients))
    for client in clients:
        for asked in client.asked:
            _account(asked, mine)
    stats = queue.stats()
    counted = {
        "results": stats.completed,
        "closed": stats.closed,
        "expired": stats.expired,
        "full": stats.dropped,
        "cancelled": stats.cancelled,
        "failed": stats.failed,
        "refused": mine.refused,
    }
    assert vars(mine) == counted, f"the queue counted {counted}, its clients {vars(mine)}"
    for name, count in counted.items():
        setattr(report, name, getattr(report, name) + count)


def _account(asked: Asked, report: LoadReport) -> None:
    x, deadline, future = asked
    if future.cancelled():
        report.cancelled += 1
        return
    try:
        error = future.exception(_LOST)
    except TimeoutError:
        raise AssertionError(f"a future is still {future} after its queue was closed") from None
    match error:
        case None:
            value = future.result()
            assert torch.equal(value, answer(x)), f"{value} for {x}"
            report.results += 1
        case QueueClosed():
            report.closed += 1
        case DeadlineExceeded() if deadline is not None:
            report.expired += 1
        case QueueFull():
            report.full += 1
        case RefusedError():
            assert (x < 0).any(), f"{error!r} for {x}, which did nothing wrong"
            report.failed += 1
        case _:
            raise AssertionError(f"{error!r} for {x}") from error
