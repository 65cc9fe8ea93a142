"""What every request passes through, in Python.

native/python/express.cpp has the same in C++, which `express` takes where it was built. This is for
where it was not, and for interpreters without a global lock.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures._base import FINISHED, PENDING, RUNNING
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from weakref import ReferenceType, ref

import torch
from torch.utils._pytree import TreeSpec

if TYPE_CHECKING:
    from orchard.serving.batch_runner import BatchRunner
    from orchard.serving.requests import Request

T = TypeVar("T")
_HAS_GIL: bool = getattr(sys, "_is_gil_enabled", lambda: True)()


class Place(Enum):
    """Where a request is; it only ever moves on."""

    ARRIVED = "submitted, not yet looked at"
    WAITING = "held back by a full queue"
    PENDING = "accepted, not yet run"
    RUNNING = "in a worker's batch"
    SETTLED = "its outcome is decided"


class Outcome(NamedTuple):
    value: Any = None
    error: BaseException | None = None


class Owner(Protocol):
    """What a request needs of its queue."""

    def cancelled(self, request: Request) -> None:
        """Take it out of the queue."""


@dataclass(slots=True)
class Parcel:
    """One request's tree, taken apart."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    rows: int
    group: Hashable  # requests of equal groups may share a batch
    length: int = 0  # of dimension 1, where that is padded
    device: torch.device | None = None  # where it runs, if not on the CPU
    outside: Hashable = None  # where its submitter queues work on that device
    is_there: bool = False  # some of it lies on that device


class Sleepers:
    """Threads that wait for results, in a line: who has passed wakes the next.

    It keeps none that it has woken: where they were kept, waking took a third longer.
    """

    __slots__ = ("_asleep", "_members", "_over")

    def __init__(self) -> None:
        self._members: list[ReferenceType[Ticket]] = []
        self._asleep: deque[Ticket] = deque()
        self._over = Lock()
        self._over.acquire()

    def __len__(self) -> int:
        """How many there were."""
        return len(self._members)

    @property
    def left(self) -> int:
        """How many have not been woken."""
        return len(self._asleep)

    def add(self, ticket: Ticket) -> None:
        ticket.wave = self
        self._members.append(ref(ticket))
        self._asleep.append(ticket)

    def pass_on(self) -> None:
        """Wake the next; where this is interrupted, `end` makes up for it."""
        try:
            following = self._asleep.popleft()
        except IndexError:
            with suppress(RuntimeError):  # it is over already
                self._over.release()
        else:
            following.open()

    def wait(self, seconds: float) -> bool:
        """Wait until one passes who is followed by none, so many seconds; whether one has."""
        return self._over.acquire(timeout=seconds)

    def end(self) -> None:
        """Wake at once those who are left."""
        for member in self._members:
            ticket = member()
            if ticket is not None:
                ticket.open()
        self._asleep.clear()


class Ticket:
    """The half of a request that is asked for each time.

    Most futures are only ever asked for their result, by one thread, which passes a gate. What
    concurrent.futures keeps for everything else is made when something asks for it: where many
    threads submit, each line that one of them touches comes from another processor's cache.
    """

    _state = PENDING
    _result: Any = None
    _exception: BaseException | None = None
    _is_open = False
    _is_awaited = False  # a thread went to the gate; it may have been interrupted there
    _claimed: str | None = None  # the state that it was to have first: running, or cancelled
    number = 0  # in order of arrival; 0 before the queue has looked at it
    arrival = 0.0  # a moment of the queue's clock, as is the deadline
    deadline: float | None = None
    place = Place.ARRIVED
    outcome: Outcome | None = None  # once it is decided, until the future has it
    admission: Event | None = None  # of a submitter that blocks: it waits no more
    wave: Sleepers | None = None  # in which who waits for the result is woken

    def __init__(self, parcel: Parcel, runner: BatchRunner, priority: int, owner: Owner) -> None:
        self.parcel = parcel
        self.runner = runner
        self.priority = priority
        self._owner = owner
        self._gate = Lock()
        self._gate.acquire()

    def _made(self, name: str, value: T) -> T:
        """What the ticket has under that name: this value, unless there is one."""
        made: T = self.__dict__.setdefault(name, value)
        return made

    def _peek(self, name: str) -> Any:
        """What was made under that name, or None."""
        return self.__dict__.get(name)

    def _begin_again(self) -> None:
        """Shut the gate and forget what was made: in a forked child locks may be anyone's."""
        for name in ("_condition", "_waiters", "_done_callbacks"):
            self.__dict__.pop(name, None)
        self._gate = Lock()
        self._gate.acquire()
        self._is_open = False

    def _claim(self, state: str) -> bool:
        """Whether this is what was asked for first: to let it run, or to cancel it."""
        return self._made("_claimed", state) == state

    def begin(self) -> bool:
        """Let it run; False where it was cancelled, or filled by its holder."""
        if self._claim(RUNNING) and self._state in (PENDING, RUNNING):
            self._state = RUNNING
            return True
        return False

    def settle(self, outcome: Outcome | None) -> None:
        """Decide its outcome; None where it was cancelled.

        Who keeps the future keeps neither the tensors nor the model.
        """
        self.outcome = outcome
        self.place = Place.SETTLED
        del self.parcel, self.runner

    def announce_plainly(self, wave: Sleepers | None) -> bool:
        """Fill the future if nothing has asked for more than its result; a wave wakes who waits."""
        outcome = self.outcome
        mine = self.__dict__  # here: to make it may run the collector
        if outcome is None or not _HAS_GIL or "_condition" in mine or self._state != RUNNING:
            return False
        # Up to the state is no call: no other thread makes a condition meanwhile.
        self._result, self._exception = outcome
        self._state = FINISHED
        self.outcome = None
        if wave is not None and self._is_awaited:
            wave.add(self)
        else:
            self.open()
        return True

    def result(self, timeout: float | None = None) -> Any:
        if timeout is None and not self._is_open:
            self._is_awaited = True  # then the look at the state; who fills it goes the other way
            try:
                # No interruption comes between taking the lock and the block that gives it back.
                if self._state != FINISHED:
                    with self._gate:
                        pass
            except RuntimeError:  # the gate was opened once more, just here
                if self._state in (PENDING, RUNNING):  # or a signal handler has raised it
                    raise
            wave, self.wave = self.wave, None
            if wave is not None:
                wave.pass_on()
        if self._state == FINISHED and self._exception is None:
            return self._result
        try:
            return self._slow_result(timeout)
        finally:
            del self  # the exception's traceback refers to this frame

    def _slow_result(self, timeout: float | None) -> Any:
        raise NotImplementedError

    def open(self) -> None:
        """Let those who wait for the result pass."""
        if not self._is_open:
            with suppress(RuntimeError):  # it is open
                self._gate.release()
            self._is_open = True


class Desk:
    """The half of a queue that requests are left at, and taken from in a hurry. In Python nothing
    is quicker than the usual way.
    """

    def take_hurried(
        self, limit: int, now: float, max_delay: float
    ) -> tuple[tuple[Request, ...], list[Parcel], list[float]] | float | None:
        """Let run what may at once, up to `limit` rows, in order: the requests, their parcels, and
        how long they have waited; or, where that is too little, the moment when it may. None where
        not all that there is has just arrived, is of one kind and still wanted.
        """
        return None

    def arrivals_are(self, group: Hashable, priority: int, limit: int) -> bool:
        """Whether all that has arrived is of that kind and still wanted, and not many batches."""
        return False


class Entrance:
    """Where requests of the plainest kind come in: a tensor, no deadline, no priority."""

    def __init__(
        self,
        desk: Desk,
        runner: BatchRunner,
        kind: type[Ticket],
        learn: Callable[[Any], tuple[Any, ...] | None],
    ) -> None:
        pass

    def submit(self, x: object, mine: list[Request]) -> bool:
        """Whether it could be accepted at once. The request is among `mine` before it is, so that
        one whose submitter is interrupted can be withdrawn.
        """
        return False


def settle_each(batch: Sequence[Ticket], outcomes: Sequence[Outcome], settled: list[Any]) -> int:
    """Settle those that still run, with their outcomes; how many of them got a result."""
    completed = 0
    for ticket, outcome in zip(batch, outcomes, strict=True):
        if ticket.place is Place.RUNNING:  # else `close` gave up on it meanwhile
            ticket.settle(outcome)
            completed += outcome.error is None
            settled.append(ticket)
    return completed


def announce_each(settled: list[Request], wave: Sleepers | None) -> list[Request]:
    """Announce those of them that can be without any call of Python's; the others."""
    return settled


def forget_each(settled: Sequence[Ticket], unsettled: OrderedDict[int, Request]) -> None:
    for ticket in settled:
        unsettled.pop(ticket.number, None)
