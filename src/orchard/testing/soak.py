"""A BatchQueue at full load for a long time: nothing lost, nothing wrong, no memory kept."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchard.attention.api import attention
from orchard.serving.batch_queue import BatchQueue
from orchard.testing.memory import resident_bytes

CLIENTS = 16  # that have several requests under way
UNDER_WAY = 8  # of each
WAITING = 16  # clients that ask again when they have their answer
SETTLING = 60.0  # seconds before memory is looked at, or a quarter of a shorter soak
GROWTH_LIMIT = 1e6  # bytes
_LOST = 60.0  # seconds after which a request counts as lost
_LOOK = 0.5  # seconds between looks at the memory; less in a short soak
_WIDTH = 64


class Sample(NamedTuple):
    seconds: float
    resident: int


@dataclass(frozen=True)
class SoakReport:
    seconds: float
    requests: int
    lost: int  # no outcome, or an exception
    wrong: int
    samples: tuple[Sample, ...]
    settled: float  # seconds

    @property
    def growth(self) -> float | None:
        """Bytes between the medians at the end of the settling and at the end; None if unknown."""
        if not self.samples:
            return None
        width, last = self.settled / 6, self.samples[-1].seconds
        before = [s.resident for s in self.samples if 0 <= self.settled - s.seconds <= width]
        after = [s.resident for s in self.samples if last - s.seconds <= width]
        return median(after) - median(before or [self.samples[0].resident])

    @property
    def ok(self) -> bool:
        grown = self.growth is not None and self.growth >= GROWTH_LIMIT
        return not self.lost and not self.wrong and not grown

    def data(self) -> dict[str, Any]:
        step = max(1, len(self.samples) // 100)
        return {
            "seconds": self.seconds,
            "requests": self.requests,
            "lost": self.lost,
            "wrong": self.wrong,
            "growth_bytes": self.growth,
            "growth_limit": GROWTH_LIMIT,
            "settled": self.settled,
            "resident": [sample._asdict() for sample in self.samples[::step]],
            "ok": self.ok,
        }

    def __str__(self) -> str:
        grown = "unknown" if self.growth is None else f"{self.growth / 1e6:+.2f} MB"
        return (
            f"soak of {self.seconds:.0f} s: {self.requests} requests, {self.lost} lost, "
            f"{self.wrong} wrong; memory {grown} after the first {self.settled:.0f} s "
            f"(must: under {GROWTH_LIMIT / 1e6:g} MB): {'ok' if self.ok else 'FAILED'}"
        )


class Counts(NamedTuple):
    requests: int
    lost: int
    wrong: int


class _Client:
    """A thread that asks. One that does not come back has lost what it waits for."""

    def __init__(self, ask: Callable[[int], Counts], first: int) -> None:
        self._found = Counts(0, 1, 0)
        self._thread = threading.Thread(target=self._run, args=(ask, first), daemon=True)
        self._thread.start()

    def _run(self, ask: Callable[[int], Counts], first: int) -> None:
        self._found = ask(first)

    def counts(self, end: float) -> Counts:
        self._thread.join(max(0.0, end - time.monotonic()))
        return self._found


class _Model:
    """Sums of small integers, which are exact in any order, and attention over them."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(0)
        size = (_WIDTH, _WIDTH)
        self._weights = [torch.randint(-2, 3, size, generator=source).float() for _ in range(2)]

    def __call__(self, x: Tensor) -> Tensor:
        for weight in self._weights:
            x = torch.relu(x @ weight)
        packed = (x / 1024).unflatten(-1, (1, 4, 16))
        return attention(packed, packed, packed).flatten(1)


def soak(seconds: float, step: Callable[[str], None]) -> SoakReport:
    """Ask for so many seconds, and compare every answer, bit for bit, with that of a lone call.

    `step` is called after each look at the memory.
    """
    source = torch.Generator().manual_seed(1)
    model = _Model()
    questions = [
        torch.randint(-4, 5, (1 + n % 3, _WIDTH), generator=source).float() for n in range(60)
    ]
    expected = [model(x) for x in questions]
    end = time.monotonic() + seconds
    with BatchQueue(model, max_batch=32) as queue:

        def is_wrong(question: int, answer: Tensor) -> bool:
            return not torch.equal(answer, expected[question])

        def ask(first: int) -> Counts:
            asked: deque[tuple[int, Future[Tensor]]] = deque()
            number, lost, wrong = 0, 0, 0
            while asked or time.monotonic() < end:
                while len(asked) < UNDER_WAY and time.monotonic() < end:
                    question = (first + number) % len(questions)
                    asked.append((question, queue.submit(questions[question])))
                    number += 1
                if not asked:
                    break
                question, future = asked.popleft()
                try:
                    error = future.exception(_LOST)
                except TimeoutError as late:
                    error = late
                if error is not None:
                    lost += 1
                else:
                    wrong += is_wrong(question, future.result())
            return Counts(number, lost, wrong)

        def ask_and_wait(first: int) -> Counts:
            number, lost, wrong = 0, 0, 0
            while time.monotonic() < end:
                question = (first + number) % len(questions)
                number += 1
                try:
                    answer = queue.submit(questions[question]).result()
                except Exception:  # of any kind: counted, and one fails the soak
                    lost += 1
                else:
                    wrong += is_wrong(question, answer)
            return Counts(number, lost, wrong)

        clients = [_Client(ask, 7 * n) for n in range(CLIENTS)]
        clients += [_Client(ask_and_wait, 11 * n) for n in range(WAITING)]
        samples = _watch(seconds, step)
        counts = [client.counts(end + _LOST) for client in clients]
    requests, lost, wrong = (sum(each) for each in zip(*counts, strict=True))
    return SoakReport(seconds, requests, lost, wrong, tuple(samples), min(SETTLING, seconds / 4))


def looks(seconds: float) -> int:
    """How often the memory is looked at."""
    return max(40, round(seconds / _LOOK))


def _watch(seconds: float, step: Callable[[str], None]) -> list[Sample]:
    """The memory of this process until the time is over."""
    samples: list[Sample] = []
    start, never, count = time.monotonic(), threading.Event(), looks(seconds)
    for number in range(count):
        never.wait(max(0.0, start + (number + 1) * seconds / count - time.monotonic()))
        now, resident = time.monotonic() - start, resident_bytes()
        if resident is not None:
            samples.append(Sample(now, resident))
        step(f"{now:.0f} s")
    return samples
