"""Requests that wait to be run: their order, their groups and their deadlines.

A `Pending` is guarded by the queue that owns it; a `Request` is a future, and any thread's.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from concurrent.futures._base import (
    CANCELLED,
    CANCELLED_AND_NOTIFIED,
    FINISHED,
    RUNNING,
)
from contextlib import suppress
from operator import attrgetter
from threading import Condition, current_thread, main_thread
from time import monotonic
from typing import Any

from orchard.dispatch.settings import logger
from orchard.serving.express import Sleepers, Ticket
from orchard.serving.tickets import Outcome, Place
from orchard.text import one_line

AGEING = 0.1  # seconds: one step of priority is worth as much as having waited so much longer
HIGHEST_PRIORITY = 100  # and -100 the lowest: nobody is overtaken by who came 20 s later
_STALE_DEADLINES = 64
_STALLED = 0.002  # seconds without one of a wave passing, after which the rest is woken at once


class Wave(Sleepers):
    """Threads that wait for results, woken one after the other, or so many abreast.

    Woken all at once they fight for the interpreter, and with the worker for what it needs to run
    the next batch, while most of them only come back with another request.
    """

    __slots__ = ()

    def run(self, seconds: float, abreast: int) -> bool:
        """Wake them all, so many at once, and wait until one passes who finds nobody left to wake,
        at the longest so many seconds, or until none has passed for a while; whether one has.
        """
        end = monotonic() + seconds
        for _ in range(min(abreast, len(self))):
            self.pass_on()
        is_over, left = False, self.left
        while left and not is_over and monotonic() < end:
            is_over = self.wait(_STALLED)
            before, left = left, self.left
            if left == before:
                break
        self.end()
        return is_over


class Request(Ticket, Future[Any]):
    """A request, and the future that its submitter holds.

    The queue takes no lock of a future while it holds its own.
    """

    # Without the base's `__init__`: its attributes are the ticket's, or made by `__getattr__`.

    def __getattr__(self, name: str) -> Any:
        """Make what the base's methods guard and notify with, as one of them asks for it."""
        if name == "_condition":
            return self._made(name, Condition())
        if name in ("_waiters", "_done_callbacks"):
            return self._made(name, [])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def rank(self) -> tuple[float, int]:
        """The smaller, the sooner. Time passes for all alike, so ageing never reorders two."""
        return self.arrival - AGEING * self.priority, self.number

    @property
    def is_held(self) -> bool:
        """Whether this thread is inside of the future's lock: it came from there, interrupted."""
        condition = self._peek("_condition")
        return condition is not None and condition._is_owned()

    def announce(self, wave: Wave | None = None) -> None:
        """Fill the future, unless its holder has done so; a wave wakes who waits for it later."""
        if self.announce_plainly(wave):
            return
        outcome, self.outcome = self.outcome, None
        if wave is not None:
            wave.end()  # who waits for a result does not wait for a callback
        if outcome is None:
            self._end_cancelling()
        else:
            self._fill(outcome)

    def _fill(self, outcome: Outcome) -> None:
        """As the base does it: under the lock, inside of which others look at the state twice."""
        with self._condition:
            if self._state == RUNNING:
                self._result, self._exception = outcome
                self._state = FINISHED
                for waiter in self._waiters:
                    (waiter.add_result if outcome.error is None else waiter.add_exception)(self)
                self._condition.notify_all()
        self._invoke_callbacks()

    def orphan(self, error: BaseException) -> None:
        """Fill it in a forked child, where no thread will; its locks may be anyone's."""
        self._begin_again()
        if self._state == CANCELLED:  # by a thread that is not here
            super().set_running_or_notify_cancel()
        if self.done():
            self.open()
        else:
            self.set_exception(error)
        if self.place is not Place.SETTLED:
            self.settle(None)

    def done(self) -> bool:
        return self._state in (CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED)

    def running(self) -> bool:
        return self._state == RUNNING

    def cancelled(self) -> bool:
        return self._state in (CANCELLED, CANCELLED_AND_NOTIFIED)

    def _slow_result(self, timeout: float | None) -> Any:
        try:
            return Future.result(self, timeout)
        finally:
            del self  # the exception's traceback refers to this frame

    def _invoke_callbacks(self) -> None:
        """The last step, once it is filled or cancelled. No callback is called a second time."""
        self.open()
        callbacks = self._peek("_done_callbacks")
        while callbacks:
            with suppress(IndexError):  # another thread has called the last
                _call(callbacks.pop(0), self)

    def set_running_or_notify_cancel(self) -> bool:
        """Of executors; as everywhere, who asks first decides whether it runs."""
        if self._claim(RUNNING):
            return super().set_running_or_notify_cancel()
        self._end_cancelling()
        return False

    def cancel(self) -> bool:
        """As of every future; one that is cancelled leaves its queue."""
        if self._state in (RUNNING, FINISHED) or not self._claim(CANCELLED):
            return False
        cancelled = self._end_cancelling()
        if cancelled:
            self._owner.cancelled(self)
        return cancelled

    def _end_cancelling(self) -> bool:
        """Do what is left to do for a cancelled future; False where it is none."""
        cancelled = self._claimed == CANCELLED and super().cancel()
        if cancelled:
            with self._condition:
                if self._state == CANCELLED:
                    super().set_running_or_notify_cancel()
        self._invoke_callbacks()  # those before which an interruption came
        return cancelled

    @property
    def is_announced(self) -> bool:
        """Whether it is filled, or cancelled, to the end."""
        told = self._is_open and not self._peek("_done_callbacks")
        return told and self._state in (CANCELLED_AND_NOTIFIED, FINISHED)


def _call(callback: Callable[[Future[Any]], object], future: Future[Any]) -> None:
    """What a callback raises disturbs nobody; Ctrl-C is none of its own."""
    try:
        callback(future)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
            raise
        logger.error("a callback of a future raised %s", one_line(error))


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
        self.count = 0  # of requests

    def __bool__(self) -> bool:
        return self.count > 0

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
        self.count += 1
        return group.rows

    def remove(self, request: Request) -> None:
        group = self._groups[request.parcel.group]
        line = group.lines[request.priority]
        del line[request.number]
        group.rows -= request.parcel.rows
        self.count -= 1
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
        if len(batch) == sum(map(len, best[1].lines.values())):
            del self._groups[batch[0].parcel.group]
            self.count -= len(batch)
        else:
            for request in batch:
                self.remove(request)
        return batch

    @property
    def largest(self) -> int:
        """The rows of the group that has most."""
        return max((group.rows for group in self._groups.values()), default=0)

    def missing(self, limit: int) -> int:
        """How many rows more may fill a batch of `limit`; one where nothing waits."""
        return max(1, limit - self.largest) if self._groups else 1

    def only_kind(self) -> tuple[Hashable, int] | None:
        """The group and the priority that all have, if they do."""
        if len(self._groups) == 1:
            ((kind, group),) = self._groups.items()
            if len(group.lines) == 1:
                return kind, next(iter(group.lines))
        return None

    def oldest(self) -> float | None:
        """When the request that has waited longest came."""
        heads = (head for group in self._groups.values() for head in group.heads())
        return min((head.arrival for head in heads), default=None)


_rank = attrgetter("rank")
