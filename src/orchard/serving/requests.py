"""Requests that wait to be run: their order, their groups and their deadlines.

Nothing here locks: the queue that owns a `Pending` guards it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from enum import Enum
from operator import attrgetter
from threading import Event
from typing import TYPE_CHECKING, Any

from orchard.serving.batching import Parcel

if TYPE_CHECKING:
    from orchard.serving.batch_runner import BatchRunner, Outcome

AGEING = 0.1  # seconds: one step of priority is worth as much as having waited so much longer
HIGHEST_PRIORITY = 100  # and -100 the lowest: nobody is overtaken by who came 20 s later
_STALE_DEADLINES = 64


class Place(Enum):
    """Where a request is; it only ever moves on."""

    WAITING = "held back by a full queue"
    PENDING = "accepted, not yet run"
    RUNNING = "in a worker's batch"
    SETTLED = "its outcome is decided"


class Request(Future[Any]):
    """A request, and the future that its submitter holds."""

    def __init__(
        self,
        parcel: Parcel,
        runner: BatchRunner,
        priority: int,
        on_cancel: Callable[[Request], None],
    ) -> None:
        super().__init__()
        self.number = 0  # in order of arrival; 0 before that
        self.parcel = parcel
        self.runner = runner
        self.priority = priority
        self.arrival = 0.0  # a moment of the queue's clock, as is the deadline
        self.deadline: float | None = None
        self.place = Place.WAITING
        self.outcome: Outcome | None = None  # once it is decided, until the future has it
        self.admission: Event | None = None  # of a submitter that blocks: it waits no more
        self._on_cancel = on_cancel

    @property
    def rank(self) -> tuple[float, int]:
        """The smaller, the sooner. Time passes for all alike, so ageing never reorders two."""
        return self.arrival - AGEING * self.priority, self.number

    def let_go(self) -> None:
        """Wake the submitter that is held back, if there is one."""
        if self.admission is not None:
            self.admission.set()

    def settle(self, outcome: Outcome | None) -> None:
        """Decide its outcome; None where it was cancelled.

        Who keeps the future keeps neither the tensors nor the model.
        """
        self.outcome = outcome
        self.place = Place.SETTLED
        del self.parcel, self.runner

    def announce(self) -> None:
        """Fill the future, unless its holder has done so."""
        outcome, self.outcome = self.outcome, None
        with suppress(InvalidStateError):
            if outcome is None or self.done():
                return
            if outcome.error is None:
                self.set_result(outcome.value)
            else:
                self.set_exception(outcome.error)

    def cancel(self) -> bool:
        """As of every future; one that is cancelled leaves its queue."""
        cancelled = super().cancel()
        if cancelled:
            self._on_cancel(self)
        return cancelled


class _Group:
    """Requests that may share a batch: a first-in-first-out line for each priority."""

    def __init__(self) -> None:
        self.rows = 0
        self.lines: dict[int, OrderedDict[int, Request]] = {}

    def __iter__(self) -> Iterator[Request]:
        """In order of rank."""
        lines = [line.values() for line in self.lines.values()]
        return iter(lines[0]) if len(lines) == 1 else heapq.merge(*lines, key=_rank)

    def heads(self) -> list[Request]:
        return [next(iter(line.values())) for line in self.lines.values()]


class Deadlines:
    """The requests that have one, soonest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # with numbers of requests that are gone
        self._live: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        if request.deadline is None:
            return
        if len(self._heap) > 2 * len(self._live) + _STALE_DEADLINES:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)
        self._live[request.number] = request
        heapq.heappush(self._heap, (request.deadline, request.number))

    def discard(self, request: Request) -> None:
        self._live.pop(request.number, None)

    def next(self) -> float | None:
        """The soonest deadline."""
        while self._heap and self._heap[0][1] not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float) -> list[Request]:
        """Remove and return the requests whose deadline is not after `now`."""
        found = []
        while (moment := self.next()) is not None and moment <= now:
            found.append(self._live.pop(heapq.heappop(self._heap)[1]))
        return found


class Pending:
    """The accepted requests. Arrival and number rise from each that is added to the next."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for group in self._groups.values():
            yield from group

    def add(self, request: Request) -> int:
        """Take a request in; the rows its group has now."""
        parcel = request.parcel
        group = self._groups.get(parcel.group)
        if group is None:
            group = self._groups[parcel.group] = _Group()
        line = group.lines.get(request.priority)
        if line is None:
            line = group.lines[request.priority] = OrderedDict()
        line[request.number] = request
        group.rows += parcel.rows
        self._count += 1
        return group.rows

    def remove(self, request: Request) -> None:
        group = self._groups[request.parcel.group]
        line = group.lines[request.priority]
        del line[request.number]
        group.rows -= request.parcel.rows
        self._count -= 1
        if not line:
            del group.lines[request.priority]
        if not group.lines:
            del self._groups[request.parcel.group]

    def least(self) -> Request | None:
        """The oldest request of the lowest priority."""
        heads = (head for group in self._groups.values() for head in group.heads())
        return min(heads, key=lambda head: (head.priority, head.number), default=None)

    def take(self, limit: int, now: float, max_delay: float, flushed: int) -> list[Request]:
        """Remove and return the next batch: the best ready group, in order, up to `limit` rows.

        A group is ready when it fills a batch, when one of its requests has waited `max_delay`,
        or when one has a number up to `flushed`.
        """
        best: tuple[tuple[float, int], _Group] | None = None
        for group in self._groups.values():
            heads = group.heads()
            ready = group.rows >= limit or any(
                head.arrival + max_delay <= now or head.number <= flushed for head in heads
            )
            if ready:
                rank = min(head.rank for head in heads)
                if best is None or rank < best[0]:
                    best = rank, group
        if best is None:
            return []
        batch: list[Request] = []
        rows = 0
        for request in best[1]:
            rows += request.parcel.rows
            if batch and rows > limit:
                break
            batch.append(request)
        for request in batch:
            self.remove(request)
        return batch

    def oldest(self) -> float | None:
        """When the request that has waited longest came."""
        heads = (head for group in self._groups.values() for head in group.heads())
        return min((head.arrival for head in heads), default=None)


_rank = attrgetter("rank")
