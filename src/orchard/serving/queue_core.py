"""The state of a BatchQueue and the threads that serve it.

All state is guarded by one lock, and the conditions are on it. Nothing of the caller's (function,
collate, callbacks of futures) is ever called with it held: what a thread decides under the lock
it announces after it has left it. The main thread leaves that to a thread of the queue's.

Ctrl-C may raise at any point of the main thread. So a change of the state is marked while it is
under way, `_unsettled` has every request from its first moment to its last, and whoever finds a
change that was broken off puts each request where it belongs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchard.dispatch.settings import logger
from orchard.errors import (
    DeadlineExceeded,
    ForkedProcessError,
    OrchardError,
    QueueClosed,
    QueueFull,
    WorkerDied,
)
from orchard.serving import ending
from orchard.serving.batch_runner import BatchRunner, Report
from orchard.serving.express import Desk, Parcel, announce_each, forget_each, settle_each
from orchard.serving.queue_stats import QueueStats, Record
from orchard.serving.registry import Registry
from orchard.serving.requests import Deadlines, Pending, Request, Wave
from orchard.serving.tickets import Outcome, Place
from orchard.text import one_line

_NEVER = sys.maxsize
_SOON = 0.05  # seconds
_PACE = 25e-6  # seconds in which a thread is woken and wakes the next, until it was measured
_SLOWEST_PACE = 50e-6  # that a worker waits for while there is a batch
_LONGEST_STEP = 100e-6  # seconds that a worker waits for each of a wave, all in all
_RECOVERY = 16  # batches in a row without running out of memory, before the limit doubles again


class Clock:
    """Where a queue's time comes from."""

    now: Callable[[], float] = staticmethod(time.monotonic)

    def wait_until(self, condition: threading.Condition, moment: float | None) -> None:
        """Wait on a condition whose lock is held, at the longest until `moment`."""
        if moment is None:
            condition.wait()
        else:
            condition.wait(min(max(0.0, moment - self.now()), threading.TIMEOUT_MAX))


@dataclass(frozen=True)
class Limits:
    max_batch: int
    max_delay: float
    max_pending: int
    on_full: str
    abreast: int  # threads of a wave that are on their way at a time


class Load(NamedTuple):
    """What a worker runs next: `close` may let go of the requests meanwhile, not of these."""

    runner: BatchRunner
    parcels: list[Parcel]


@dataclass(eq=False)
class Worker:
    """A thread's place; `batch` is what it runs now."""

    index: int
    started: float
    thread: threading.Thread | None = None
    first: Callable[[], None] | None = None  # run before the first batch
    batch: tuple[Request, ...] = ()
    wave: Wave | None = None  # of the batch before, while it is under way
    pace: float = _PACE  # of waves so far
    busy: float = 0.0
    retired: bool = False


class _Announcement:
    """Announces at its end what was settled meanwhile, under the lock inside."""

    __slots__ = ("_core", "_settled", "_wave")

    def __init__(self, core: QueueCore, wave: Wave | None = None) -> None:
        self._core = core
        self._wave = wave
        self._settled: list[Request] = []

    def __enter__(self) -> list[Request]:
        return self._settled

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._core._mend_if_torn(self._settled)
        self._core._announce(self._settled, self._wave)


class QueueCore(Desk):
    """What the threads of a queue share. It knows its function only through its requests, so
    that idle threads keep neither the function nor the BatchQueue alive.
    """

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._now = clock.now
        self._max_pending = limits.max_pending
        self._pending = Pending()
        self._arrivals: deque[Request] = deque()  # submitted; the next change looks at them
        self._arrived_rows = 0  # of these
        self._alarm = _NEVER  # arrived rows for which a worker is woken
        self._sleeping = 0  # workers
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._unsettled: OrderedDict[int, Request] = OrderedDict()  # until it is announced
        self._deadlines = Deadlines()
        self._record = Record()
        self._limit = limits.max_batch
        self._batches_in_memory = 0  # since the limit last changed
        self._last_number = 0
        self._flushed = 0  # requests up to this number wait for no company
        self._torn = False  # a change of the state is under way, or was broken off
        self._unannounced: list[Request] = []  # settled by the main thread
        self._closed = False
        self._dismissed = False  # closed, and nothing more is run
        self._forked = False
        self._workers: list[Worker] = []
        self._clerk: threading.Thread | None = None
        self._make_locks()
        _cores.add(self)
        ending.watch(self)

    def _make_locks(self) -> None:
        # Reentrant, because a signal handler or a finalizer may come in between and close.
        self._lock = threading.RLock()
        lock: Any = self._lock
        self._is_inside: Callable[[], bool] = lock._is_owned  # as threading.Condition asks it
        self._work = threading.Condition(self._lock)  # there may be a batch for a worker
        self._time = threading.Condition(self._lock)  # there may be a sooner deadline
        self._announced = threading.Condition(self._lock)  # requests have their outcome

    # Changing the state, and announcing what was decided

    def _begin_change(self, settled: list[Request], looks: bool = True) -> None:
        """To be called first under the lock; takes over what a broken change had settled, and
        what has arrived where the change looks at it.
        """
        if self._torn:
            self._mend(settled)
        self._torn = True
        if looks:
            self._receive()

    def _end_change(self, settled: list[Request]) -> None:
        """To be called last under the lock, or before waiting there."""
        if settled and threading.current_thread() is threading.main_thread():
            self._unannounced += settled
            try:
                self._hire_clerk()
                self._time.notify()
            except RuntimeError:  # no thread to be had
                settled[:] = self._unannounced
                self._unannounced.clear()
            else:
                settled.clear()
        self._torn = False

    def _mend_if_torn(self, settled: list[Request]) -> None:
        if self._is_inside():
            return
        with self._lock:
            if self._torn:
                self._begin_change(settled)
                self._work.notify_all()
                self._end_change(settled)

    def _mend(self, settled: list[Request]) -> None:
        """Put every request where its place says that it is."""
        running = {request for worker in self._workers for request in worker.batch}
        self._pending, self._deadlines = Pending(), Deadlines()
        self._waiting = OrderedDict()
        self._unannounced.clear()
        rows = sum(each.parcel.rows or 1 for each in self._arrivals if not each.number)
        self._arrived_rows = min(rows, _NEVER)
        for number, request in list(self._unsettled.items()):
            request.number = number
            if request.place is Place.SETTLED:
                settled.append(request)
            elif request in running:
                continue
            elif request.place is Place.RUNNING:
                self._settle(request, Outcome(error=WorkerDied("the request was lost")), settled)
            else:
                request.place = Place.WAITING
                self._waiting[request.number] = request
                self._deadlines.add(request)
        self._admit()

    def _announce(self, settled: list[Request], wave: Wave | None = None) -> None:
        if not settled:
            return
        try:
            others = announce_each(settled, wave)
        except MemoryError:
            others = settled  # those that are announced already only stay so
        for request in others:
            try:
                request.announce(wave)
            except BaseException as error:  # Ctrl-C, where the main thread announces
                logger.error("a request was announced in part: %s", one_line(error))
                if request.done():
                    request.open()
        with self._lock:
            forget_each(settled, self._unsettled)
            self._announced.notify_all()

    def _withdraw(self, request: Request, settled: list[Request]) -> bool:
        """Take a request that does not run out of the queue; False if it was cancelled."""
        if request.place is Place.PENDING:
            self._pending.remove(request)
        else:
            self._waiting.pop(request.number)
        return self._begin(request, settled)

    def _begin(self, request: Request, settled: list[Request]) -> bool:
        """Let a request that was taken out run; False if it was cancelled."""
        if request.deadline is not None:
            self._deadlines.discard(request)
        if request.admission is not None:
            request.admission.set()
        wanted = request.begin()
        if wanted:
            request.place = Place.RUNNING
        else:
            request.settle(None)
            self._record.counts.cancelled += 1
            if request.is_announced:
                self._unsettled.pop(request.number, None)
                self._announced.notify_all()
            else:
                settled.append(request)
        return wanted

    def _refuse(self, request: Request, error: OrchardError, settled: list[Request]) -> bool:
        """Settle a request that has not run to its end; False if it was cancelled."""
        if request.place is not Place.RUNNING and not self._withdraw(request, settled):
            return False
        request.settle(Outcome(error=error))
        settled.append(request)
        return True

    def _close_out(self, requests: Iterable[Request], settled: list[Request], why: str) -> None:
        for request in requests:
            if self._refuse(request, QueueClosed(why), settled):
                self._record.counts.closed += 1

    # Submitting

    def submit(self, request: Request, deadline: float | None) -> None:
        """Accept a request, hold it back, or refuse it; never blocks."""
        if self._is_inside():
            raise RuntimeError(
                "submit was called by a signal handler or a finalizer that came in the middle of "
                "another call of this queue"
            )
        with self._lock:
            is_open = not self._closed and not self._forked
            if is_open and deadline is None and not self._waiting and self._has_space():
                request.arrival = self._now()
                # First: what is counted and did not come wakes a worker too often, not too seldom.
                self._arrived_rows = min(self._arrived_rows + (request.parcel.rows or 1), _NEVER)
                self._arrivals.append(request)
                if self._arrived_rows >= self._alarm:
                    self._work.notify()
                    self._alarm = _NEVER
                return
        self._submit(request, deadline)

    def _has_space(self) -> bool:
        return self._pending.count + len(self._arrivals) < self._limits.max_pending

    def _submit(self, request: Request, deadline: float | None) -> None:
        """Accept it at once, hold it back, or refuse it."""
        with _Announcement(self) as settled, self._lock:
            self.check_open()
            full = not self._has_space()
            if full and self._limits.on_full == "raise":
                self._record.counts.rejected += 1
                raise QueueFull(f"the queue holds max_pending={self._limits.max_pending} requests")
            if deadline is not None:
                self._hire_clerk()
            self._begin_change(settled)
            request.arrival = self._clock.now()
            self._register(request)
            if deadline is not None:
                request.deadline = request.arrival + deadline
                self._deadlines.add(request)
                if request.deadline == self._deadlines.next():
                    self._time.notify()
            if full or self._waiting:
                request.place = Place.WAITING
                self._waiting[request.number] = request
            else:
                self._accept(request)
            if full and self._limits.on_full == "drop-oldest":
                self._drop_for(request, settled)
                self._admit()
            self._end_change(settled)

    def _register(self, request: Request) -> None:
        """Give it the next number, and from here to its end a place among the unsettled."""
        self._last_number += 1
        self._unsettled[self._last_number] = request
        request.number = self._last_number

    def _receive(self, enough: int = _NEVER) -> None:
        """Accept what has arrived, until one has made its group have `enough` rows. Each stays in
        its line until that is done; one that was registered already is of a change that was broken
        off.
        """
        rows = 0
        while self._arrivals and rows < enough:
            request = self._arrivals[0]
            counted = 0
            if not request.number:
                counted = request.parcel.rows or 1
                self._register(request)
                rows = self._accept(request)
            self._arrivals.popleft()
            self._arrived_rows = max(self._arrived_rows - counted, 0)
        if not self._arrivals:
            self._arrived_rows = 0

    def check_open(self) -> None:
        """Raise where nothing can be submitted any more."""
        if self._forked:
            self._check_process()
        if self._closed:
            raise QueueClosed("the queue is closed")

    def _drop_for(self, request: Request, settled: list[Request]) -> None:
        """Give up the oldest request of the lowest priority, which may be the new one."""
        victim = self._pending.least()
        if victim is None or victim.priority > request.priority:
            victim = request
        why = f"the queue holds max_pending={self._limits.max_pending} requests: dropped"
        if self._refuse(victim, QueueFull(why), settled):
            self._record.counts.dropped += 1

    def _admit(self) -> None:
        """Let those held back in while there is space, in their order."""
        while self._waiting and self._pending.count < self._limits.max_pending:
            self._accept(self._waiting.popitem(last=False)[1])

    def _accept(self, request: Request) -> int:
        """Take it in; the rows that its group has now."""
        request.place = Place.PENDING
        if request.admission is not None:
            request.admission.set()
        rows = self._pending.add(request)
        self._alarm = max(self._alarm - request.parcel.rows, 0)
        # Others of its group have set a timer; a worker is needed for the first and the last.
        if rows == request.parcel.rows or rows >= self._limit:
            self._work.notify()
        return rows

    def await_admission(self, request: Request) -> None:
        """Block while the request is held back; not in a thread that would have to make space."""
        if request.place is not Place.WAITING or self._is_one_of_us():
            return
        with self._lock:
            if request.place is not Place.WAITING:
                return
            request.admission = threading.Event()
        # The rest of the question takes longer, the more requests there are.
        if not request.admission.wait(_SOON) and self.may_wait():
            request.admission.wait()

    def cancelled(self, request: Request) -> None:
        """A request whose future was cancelled leaves the queue, at the latest in its turn."""
        if self._forked or self._is_inside():
            return
        with _Announcement(self) as settled, self._lock:
            self._begin_change(settled)
            waits = request.place in (Place.PENDING, Place.WAITING)
            if waits and request.number in self._unsettled:
                self._withdraw(request, settled)
                self._admit()
            self._end_change(settled)

    # The clerk: it keeps deadlines, also while all workers are busy, and announces what the main
    # thread has settled

    def _hire_clerk(self) -> None:
        if self._clerk is None or not self._clerk.is_alive():
            name = "orchard-queue-clerk"
            clerk = threading.Thread(target=self._keep_books, name=name, daemon=True)
            clerk.start()
            self._clerk = clerk

    def _keep_books(self) -> None:
        while True:
            with _Announcement(self) as settled, self._lock:
                self._begin_change(settled)
                settled += self._unannounced
                self._unannounced.clear()
                self._expire(settled)
                self._end_change(settled)
                if settled:
                    continue
                soonest = self._deadlines.next()
                if self._forked or (self._closed and soonest is None):
                    self._clerk = None
                    return
                self._clock.wait_until(self._time, soonest)

    def _expire(self, settled: list[Request]) -> None:
        now = self._clock.now()
        passed = self._deadlines.passed(now)
        for request in passed:
            late = now - request.arrival
            why = f"the request's deadline passed before it ran, {late:.3g} s after submit"
            if self._refuse(request, DeadlineExceeded(why), settled):
                self._record.counts.expired += 1
        if passed:
            self._admit()

    # The workers

    def start_worker(self, first: Callable[[], None] | None) -> None:
        with self._lock:
            worker = Worker(len(self._workers), self._clock.now(), first=first)
            self._workers.append(worker)
            self._start_thread(worker)

    def _start_thread(self, worker: Worker) -> None:
        name = f"orchard-queue-{worker.index}"
        worker.thread = threading.Thread(target=self._live, args=(worker,), name=name, daemon=True)
        worker.thread.start()

    def _live(self, worker: Worker) -> None:
        first, worker.first = worker.first, None
        if first is not None:
            first()
        del first
        while not worker.retired:
            try:
                worker.retired = not self._serve(worker)
            except BaseException as error:  # whatever ends this thread, its requests are answered
                self._bury(worker, error)

    def _serve(self, worker: Worker) -> bool:
        """Run one batch; False when there will be no more for this thread."""
        load = self._take(worker)
        if load is None:
            return False
        start = self._clock.now()
        report = load.runner.run(load.parcels)
        self._conclude(worker, report, start)
        is_fatal = report.fatal
        del load, report  # a request and its result are left to who waits for them
        if worker.wave is not None:
            self._await_wave(worker, worker.wave)
        return not is_fatal or not self._replace(worker)

    def _await_wave(self, worker: Worker, wave: Wave) -> None:
        start = time.monotonic()
        if wave.run(_LONGEST_STEP * len(wave), self._limits.abreast) and len(wave) > 1:
            found = (time.monotonic() - start) / len(wave)
            worker.pace = min(0.75 * worker.pace + 0.25 * found, _SLOWEST_PACE)
        worker.wave = None

    def _take(self, worker: Worker) -> Load | None:
        """Wait for the worker's next batch; None when the queue has ended."""
        while True:
            with _Announcement(self) as settled, self._lock:
                if not self._torn and not self._closed:
                    hurried = self._take_hurried(worker)
                    if isinstance(hurried, Load):
                        return hurried
                    if hurried is not None:
                        self._sleep(hurried, self._limit)
                        continue
                self._begin_change(settled, looks=False)
                # Those that come after all others anyway are left where they are quickly taken.
                kind = self._pending.only_kind()
                if not kind or not self.arrivals_are(*kind, self._limit):
                    self._receive()
                elif self._pending.largest < self._limit:
                    self._receive(self._limit)
                self._expire(settled)
                if self._dismissed:
                    self._close_out(self._idle_requests(), settled, "the queue was closed")
                if settled:
                    self._end_change(settled)
                    continue
                if self._forked or (self._closed and not self._pending):
                    self._time.notify_all()
                    self._end_change(settled)
                    return None
                now = self._clock.now()
                max_delay = 0.0 if self._closed else self._limits.max_delay
                taken = self._pending.take(self._limit, now, max_delay, self._flushed)
                if not taken:
                    oldest = self._pending.oldest()
                    self._end_change(settled)
                    self._sleep(None if oldest is None else oldest + max_delay)
                    continue
                worker.batch = tuple(taken)  # before anything else may fail
                # A list first: CPython keeps up to 2000 tuples of each size made from generators.
                begun = [request for request in taken if self._begin(request, settled)]
                worker.batch = tuple(begun)
                self._record.queue_seconds.extend(now - r.arrival for r in worker.batch)
                self._admit()
                # The thread that watched the rest may have been this one.
                if self._pending or self._arrivals:
                    self._work.notify()
                self._set_alarm()
                self._end_change(settled)
                if worker.batch:
                    parcels = [request.parcel for request in worker.batch]
                    return Load(worker.batch[0].runner, parcels)

    def _take_hurried(self, worker: Worker) -> Load | float | None:
        """A batch of what has just arrived, where nothing else is there to be looked at; or when
        there will be one, as far as that is known.
        """
        self._torn = True
        taken = self.take_hurried(self._limit, self._now(), self._limits.max_delay)
        if isinstance(taken, tuple):
            worker.batch, parcels, waited = taken
            self._record.queue_seconds.extend(waited)
            if self._arrivals:
                self._work.notify()
            self._set_alarm()
            self._torn = False
            return Load(worker.batch[0].runner, parcels)
        self._torn = False
        return taken

    def _sleep(self, moment: float | None, enough: int | None = None) -> None:
        """Wait for work, at the longest until `moment`, or until `enough` rows have arrived."""
        self._sleeping += 1
        self._set_alarm()
        if enough is not None:
            self._alarm = enough
        try:
            self._clock.wait_until(self._work, moment)
        finally:
            self._sleeping -= 1

    def _set_alarm(self) -> None:
        """Have those who submit wake a worker once a batch may be full, or begin to gather."""
        self._alarm = self._pending.missing(self._limit) if self._sleeping else _NEVER

    def _conclude(self, worker: Worker, report: Report, start: float) -> None:
        """Settle and announce the batch. Those who wait are woken in a wave, which the worker waits
        for, where it has nothing else to do or that takes no less than a batch.
        """
        now = self._clock.now()
        is_short = now - start <= worker.pace * len(worker.batch)
        worker.wave = Wave() if is_short or not self._has_batch() else None
        with _Announcement(self, worker.wave) as settled, self._lock:
            self._begin_change(settled, looks=False)
            worker.busy += now - start
            record = self._record
            record.run_seconds.append(now - start)
            record.filled += report.filled
            record.positions += report.positions
            record.counts.batches += report.batches
            record.counts.rows += report.rows
            record.counts.retried += report.retried
            record.counts.oom_retries += len(report.out_of_memory)
            self._adapt(report)
            before = len(settled)
            completed = settle_each(worker.batch, report.outcomes, settled)
            record.counts.completed += completed
            record.counts.failed += len(settled) - before - completed
            worker.batch = ()
            self._end_change(settled)

    def _has_batch(self) -> bool:
        """Whether a batch could run now, as a guess."""
        count = self._pending.count + len(self._arrivals)
        return count >= (self._limit if self._limits.max_delay else 1)

    def _settle(self, request: Request, outcome: Outcome, settled: list[Request]) -> None:
        """The outcome of a request that ran, unless `close` gave up on it meanwhile."""
        if request.place is not Place.RUNNING:
            return
        request.settle(outcome)
        if outcome.error is None:
            self._record.counts.completed += 1
        else:
            self._record.counts.failed += 1
        settled.append(request)

    def _adapt(self, report: Report) -> None:
        """Halve the limit after running out of memory; double it again after a while without."""
        if report.out_of_memory and report.memory_is_at_fault:
            self._limit = max(1, min(self._limit, *report.out_of_memory) // 2)
            self._set_alarm()
            self._batches_in_memory = 0
        elif not report.out_of_memory and self._limit < self._limits.max_batch:
            self._batches_in_memory += 1
            if self._batches_in_memory >= _RECOVERY:
                self._limit = min(self._limits.max_batch, 2 * self._limit)
                self._batches_in_memory = 0

    def _bury(self, worker: Worker, error: BaseException) -> None:
        """A thread ends out of turn: answer its batch and put another in its place."""
        with _Announcement(self) as settled, self._lock:
            for request in worker.batch:
                died = WorkerDied(f"the worker thread that ran the request died: {one_line(error)}")
                died.__cause__ = error
                self._settle(request, Outcome(error=died), settled)
            worker.batch = ()
            self._torn = True  # what it had taken and not begun is to be run by another
            self._begin_change(settled)
            self._end_change(settled)
        worker.retired = self._replace(worker)
        if worker.wave is not None:
            worker.wave.end()

    def _replace(self, worker: Worker) -> bool:
        """Start another thread in the worker's place; False where none can be started."""
        with self._lock:
            self._record.counts.workers_replaced += 1
            successor = Worker(worker.index, worker.started, busy=worker.busy)
            try:
                self._start_thread(successor)
            except RuntimeError:  # no thread to be had: the old one goes on
                return False
            self._workers[worker.index] = successor
            return True

    # From outside

    def flush(self) -> None:
        """Run what has been submitted without waiting for company, and wait for its outcome."""
        may_wait = self.may_wait()
        self._look_at_arrivals()
        with self._lock:
            number = self._flushed = self._last_number
            self._work.notify_all()
        if not may_wait:
            return
        with self._lock:
            self._announced.wait_for(lambda: next(iter(self._unsettled), number + 1) > number)

    def _look_at_arrivals(self) -> None:
        """Not where a signal handler or a finalizer came into a change: that goes on later."""
        self._check_process()
        if self._is_inside():
            return
        with _Announcement(self) as settled, self._lock:
            self._begin_change(settled)
            self._end_change(settled)

    def stats(self) -> QueueStats:
        self._look_at_arrivals()
        with self._lock:
            now = self._clock.now()
            return self._record.stats(
                waiting=len(self._waiting),
                pending=self._pending.count + sum(not each.number for each in self._arrivals),
                running=sum(r.place is Place.RUNNING for r in self._unsettled.values()),
                limit=self._limit,
                max_batch=self._limits.max_batch,
                busy=tuple(w.busy / max(now - w.started, 1e-9) for w in self._workers),
            )

    def close(self, drain: bool, timeout: float | None) -> bool:
        """End the queue; whether its threads have ended too."""
        if drain:
            self.abandon()
        else:
            self.dismiss()
        return not self._forked and self.wait_until_idle(timeout)

    def abandon(self) -> None:
        """Accept nothing more and let the threads end after what has been submitted."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._time.notify_all()

    def dismiss(self) -> bool:
        """Accept nothing more and run nothing more; whether somebody may have to be told."""
        self._dismissed = True
        is_told = not self._closed or bool(self._unsettled or self._arrivals)
        self.abandon()
        if not self._forked and not self._is_inside():  # there a worker sees to it
            with _Announcement(self) as settled, self._lock:
                self._begin_change(settled)
                self._close_out(self._idle_requests(), settled, "the queue was closed")
                self._end_change(settled)
        return is_told

    def wait_until_idle(self, timeout: float | None) -> bool:
        """Wait for the threads of a closed queue; what is not done in time is given up."""
        if self._forked or not self.may_wait():
            return False
        if self._join(timeout):
            return True
        with _Announcement(self) as settled, self._lock:
            self._begin_change(settled)
            why = f"the queue was closed, and the request was not done {timeout:g} s later"
            running = [r for r in self._unsettled.values() if r.place is Place.RUNNING]
            given_up = [*self._idle_requests(), *running]
            self._close_out(given_up, settled, why)
            self._end_change(settled)
        with self._lock:
            self._announced.wait_for(lambda: all(request.done() for request in given_up))
        return False

    def _idle_requests(self) -> list[Request]:
        return [*self._pending, *self._waiting.values()]

    def _join(self, timeout: float | None) -> bool:
        """Wait for the threads, also for those that replace others meanwhile."""
        end = None if timeout is None else time.monotonic() + timeout
        while threads := self._living():
            left = None if end is None else max(0.0, end - time.monotonic())
            if left == 0.0:
                return False
            threads[0].join(left)
        return True

    def _living(self) -> list[threading.Thread]:
        with self._lock:
            threads = [*(worker.thread for worker in self._workers), self._clerk]
        return [thread for thread in threads if thread is not None and thread.is_alive()]

    def may_wait(self) -> bool:
        """Whether the calling thread may wait for the queue's, and is not what they wait for."""
        if self._is_one_of_us():
            return False
        with self._lock:
            return not any(each.is_held for each in (*self._unsettled.values(), *self._arrivals))

    def _is_one_of_us(self) -> bool:
        return self._is_inside() or threading.current_thread() in self._living()

    # Fork

    def _check_process(self) -> None:
        if self._forked:
            raise ForkedProcessError(
                "this BatchQueue belongs to the parent of this process, and its threads are there; "
                "make a queue in the child, or start processes with spawn"
            )

    def after_fork_in_child(self) -> None:
        """The threads are gone: what they would have answered is answered here."""
        self._make_locks()
        self._forked = True
        for request in {*self._unsettled.values(), *self._arrivals}:
            request.orphan(
                ForkedProcessError("the request was submitted in the parent of this process")
            )
        self._unsettled.clear()
        self._arrivals.clear()


_cores: Registry[QueueCore] = Registry()


def _after_fork_in_child() -> None:
    for core in _cores:
        core.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
