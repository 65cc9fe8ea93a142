"""Lanes of a device, leased to threads."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import ParamSpec, TypeVar, get_args

import torch

from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.serving import ending
from orchard.serving.lanes import Lane, checked_device, open_lanes
from orchard.serving.ledger import Lease, LeaseCounts, Ledger, OnExhausted
from orchard.serving.registry import Registry
from orchard.serving.workers import Carried, TaskCounts, Workers

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class PoolStats(TaskCounts, LeaseCounts):
    """What a pool counts: now (`in_use`, `active`), and since it was made (the others).

    in_use: lanes held by threads, the default lane apart; peak: the most at one time
    active: threads inside a `stream()` block, the main thread's included
    leases: given out; shared: of these, those of a lane that another thread held
    waits: leases that had to wait; exhausted: PoolExhausted raised
    submitted, completed, failed, cancelled: tasks
    """


class _Seat:
    """A thread's place in a pool. It goes when the thread does, and gives the lane back."""

    def __init__(self, ledger: Ledger, lease: Lease) -> None:
        self.ledger = ledger
        self.lease = lease
        self.depth = 0
        self.work: AbstractContextManager[None] | None = None

    def __del__(self) -> None:
        self.ledger.give_back(self.lease)


class _Seats(threading.local):
    seat: _Seat | None = None


class _Block:
    """The context manager behind `stream()`."""

    def __init__(self, pool: StreamPool, accepted: bool = False) -> None:
        self._pool = pool
        self._accepted = accepted
        self._lease: Lease | None = None

    def __enter__(self) -> Lane:
        self._lease = self._pool._enter(self._accepted).lease
        return self._lease.lane

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        seat = self._pool._seats.seat
        # A generator may be closed in another thread; its own thread's end settles the block.
        if seat is not None and seat.lease is self._lease:
            self._pool._leave(seat)


class StreamPool:
    """Lanes of one device, so that the work of several threads runs side by side and stays apart.

    A thread's first `stream()` takes a lane, which is the thread's until it ends. `on_exhausted`
    says what happens where all are taken: "share" one in turn, "wait" for one (`timeout` seconds,
    None is for ever), or "raise" PoolExhausted. The main thread always has the default lane.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        size: int = 31,
        on_exhausted: OnExhausted = "share",
        timeout: float | None = None,
    ) -> None:
        _check_size(size)
        _check_policy(on_exhausted, timeout)
        self._device = checked_device(device)
        self._lanes = open_lanes(self._device, 1 + size)
        self._ledger = Ledger(self._lanes, on_exhausted, timeout)
        self._workers = Workers(size, f"orchard-pool-{self._device}")
        self._seats = _Seats()
        self._process = os.getpid()
        _pools.add(self)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def size(self) -> int:
        """Lanes beside the default one."""
        return len(self._lanes) - 1

    def stream(self) -> AbstractContextManager[Lane]:
        """This thread's lane. Work inside the block runs there; a block inside it changes nothing.

        What the thread has queued before is waited for, by the device. What it queues inside is
        not: hand it over with `record` and `wait`, or `synchronize` the lane.
        """
        return _Block(self)

    def _enter(self, accepted: bool) -> _Seat:
        """`accepted` is for work that was taken on before, whatever has become of the pool."""
        self._check_process()
        ending.enter()
        try:
            seat = self._seats.seat
            if seat is None:
                ledger = self._ledger
                seat = _Seat(ledger, ledger.take_at_once() if accepted else ledger.take())
                self._seats.seat = seat
            if not seat.depth:
                users = self._ledger.activate(seat.lease, accepted)
                try:
                    work = seat.lease.lane.occupied(users)
                    work.__enter__()
                except BaseException:
                    self._ledger.rest(seat.lease)
                    raise
                seat.work = work
            seat.depth += 1
        except BaseException:
            ending.leave()
            raise
        return seat

    def _leave(self, seat: _Seat) -> None:
        seat.depth -= 1
        try:
            if not seat.depth and seat.work is not None:
                work, seat.work = seat.work, None
                try:
                    if self._is_usable():
                        work.__exit__(None, None, None)
                finally:
                    self._ledger.rest(seat.lease)
        finally:
            ending.leave()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call fn on a thread of the pool, in a lane. The future is filled when its work is done.

        inference_mode, grad mode, autocast and context variables are the submitter's. A pool
        thread that submits runs the call at once, itself: waiting for it cannot lock up.
        """
        if not callable(fn):
            raise ArgumentTypeError(f"fn is a {type(fn).__name__}; it must be callable")
        self._check_process()
        self._ledger.check_open()
        outside = self._lanes[0].outside()
        return self._workers.submit(
            partial(self._call, Carried(), outside, partial(fn, *args, **kwargs))
        )

    def _call(self, carried: Carried, outside: Hashable, call: Callable[[], R]) -> R:
        outermost = self._seats.seat is None
        try:
            with _Block(self, accepted=True) as lane:
                lane.follow(outside)
                try:
                    result: R = carried.run(call)
                finally:
                    lane.synchronize()
                return result
        finally:
            if outermost:
                self._stand_up()

    def _stand_up(self) -> None:
        """Give the calling thread's lane back before the thread ends."""
        seat, self._seats.seat = self._seats.seat, None
        if seat is not None:
            self._ledger.give_back(seat.lease)  # an error's traceback may keep the seat

    def synchronize(self) -> None:
        """Wait until all lanes have finished what was queued on them so far."""
        self._check_process()
        for lane in self._lanes:
            lane.synchronize()

    def stats(self) -> PoolStats:
        self._check_process()
        return PoolStats(**asdict(self._ledger.counts()), **asdict(self._workers.counts()))

    def close(self) -> None:
        """Take nothing new, tell those who wait for a lane, and wait for what was submitted.

        Blocks that are open go on to their end. In a forked process there is nothing to close.
        """
        if self._is_usable():
            self._ledger.close()
            self._workers.wait_until_idle()

    def __enter__(self) -> StreamPool:
        self._check_process()
        self._ledger.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StreamPool of {self.size} lanes on {self._device}>"

    def _is_usable(self) -> bool:
        return self._lanes[0].survives_fork or os.getpid() == self._process

    def _check_process(self) -> None:
        self._lanes[0].check_process()

    def _after_fork_in_child(self) -> None:
        seat = self._seats.seat
        self._ledger.after_fork_in_child([] if seat is None else [seat.lease])
        self._workers.after_fork_in_child()
        if seat is not None and seat.work is not None and self._is_usable():
            seat.work.__exit__(None, None, None)  # for what a lane is in this process
            seat.work = seat.lease.lane.occupied(1)
            seat.work.__enter__()


_pools: Registry[StreamPool] = Registry()


def _after_fork_in_child() -> None:
    for pool in _pools:
        pool._after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise ArgumentTypeError(f"size is {size!r}; it must be an int")
    if size < 1:
        raise ArgumentValueError(f"size is {size}; it must be at least 1")


def _check_policy(on_exhausted: OnExhausted, timeout: float | None) -> None:
    if on_exhausted not in get_args(OnExhausted):
        raise ArgumentValueError(
            f"on_exhausted is {on_exhausted!r}; it must be 'share', 'wait' or 'raise'"
        )
    if timeout is None:
        return
    if on_exhausted != "wait":
        raise ArgumentValueError(
            f"timeout is {timeout!r} with on_exhausted={on_exhausted!r}, which never waits; "
            "it must be None"
        )
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise ArgumentTypeError(f"timeout is {timeout!r}; it must be seconds, or None")
    if not 0 <= timeout <= threading.TIMEOUT_MAX or math.isnan(timeout):
        raise ArgumentValueError(f"timeout is {timeout}; it must be seconds from 0 on, or None")
