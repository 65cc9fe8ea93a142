"""The state of a BatchQueue and the threads that serve it.

All state is guarded by one lock, and the conditions are on it. Nothing of the caller's (function,
collate, callbacks of futures) is ever called with it held: what a thread decides under the lock
it announces after it has left it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import NamedTuple

from orchard.dispatch.settings import logger
from orchard.errors import (
    DeadlineExceeded,
    ForkedProcessError,
    QueueClosed,
    QueueFull,
    WorkerDied,
)
from orchard.serving import ending
from orchard.serving.batch_runner import BatchRunner, Outcome, Report
from orchard.serving.batching import Parcel
from orchard.serving.queue_stats import QueueStats, Record
from orchard.serving.registry import Registry
from orchard.serving.requests import Deadlines, Pending, Place, Request
from orchard.text import one_line

_RECOVERY = 16  # batches in a row without running out of memory, before the limit doubles again


class Clock:
    """Where a queue's time comes from."""

    def now(self) -> float:
        return time.monotonic()

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


class Load(NamedTuple):
    """What a worker runs next: `close` may let go of the requests meanwhile, not of these."""

    runner: BatchRunner
    parcels: list[Parcel]


class Verdict(NamedTuple):
    """An outcome that has been decided and not yet announced."""

    request: Request
    outcome: Outcome


@dataclass(eq=False)
class Worker:
    """A thread's place; `batch` is what it runs now."""

    index: int
    started: float
    thread: threading.Thread | None = None
    first: Callable[[], None] | None = None  # run before the first batch
    batch: tuple[Request, ...] = ()
    busy: float = 0.0
    retired: bool = False


class _Announcement:
    """Announces at its end the verdicts that were collected meanwhile, under the lock inside."""

    __slots__ = ("_core", "_verdicts")

    def __init__(self, core: QueueCore) -> None:
        self._core = core
        self._verdicts: list[Verdict] = []

    def __enter__(self) -> list[Verdict]:
        return self._verdicts

    def __exit__(self, *_: object) -> None:
        self._core._announce(self._verdicts)


class QueueCore:
    """What the threads of a queue share. It knows its function only through its requests, so
    that idle threads keep neither the function nor the BatchQueue alive.
    """

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._pending = Pending()
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._unsettled: OrderedDict[int, Request] = OrderedDict()  # until it is announced
        self._deadlines = Deadlines()
        self._record = Record()
        self._limit = limits.max_batch
        self._batches_in_memory = 0  # since the limit last changed
        self._last_number = 0
        self._flushed = 0  # requests up to this number wait for no company
        self._closed = False
        self._forked = False
        self._workers: list[Worker] = []
        self._timekeeper: threading.Thread | None = None
        self._make_locks()
        _cores.add(self)
        ending.watch(self)

    def _make_locks(self) -> None:
        # Reentrant, because a garbage collection under the lock may run `abandon`.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # there may be a batch for a worker
        self._time = threading.Condition(self._lock)  # there may be a sooner deadline
        self._announced = threading.Condition(self._lock)  # requests have their outcome

    # Deciding and announcing

    def _announce(self, verdicts: list[Verdict]) -> None:
        if not verdicts:
            return
        interruption: BaseException | None = None
        for request, outcome in verdicts:
            try:
                if outcome.error is None:
                    request.set_result(outcome.value)
                else:
                    request.set_exception(outcome.error)
            except InvalidStateError:  # the holder of the future has filled it
                continue
            except BaseException as error:  # of a callback; futures pass over mere Exceptions
                interruption = error
        self._forget(verdict.request for verdict in verdicts)
        if interruption is not None and not self._is_own_thread():
            raise interruption
        if interruption is not None:
            logger.error("a callback of a future raised %s", one_line(interruption))

    def _forget(self, requests: Iterable[Request]) -> None:
        with self._lock:
            for request in requests:
                self._unsettled.pop(request.number, None)
            self._announced.notify_all()

    def _withdraw(self, request: Request) -> bool:
        """Take a request that does not run out of the queue; False if it was cancelled."""
        if request.place is Place.PENDING:
            self._pending.remove(request)
        else:
            self._waiting.pop(request.number)
        return self._begin(request, Place.SETTLED)

    def _begin(self, request: Request, place: Place) -> bool:
        """Make a request that was taken out run or settled; False if it was cancelled."""
        if request.deadline is not None:
            self._deadlines.discard(request)
        request.let_go()
        try:
            wanted = request.set_running_or_notify_cancel()
        except RuntimeError:  # the holder of the future has filled it
            wanted = False
        if not wanted:
            self._record.counts.cancelled += 1
            self._unsettled.pop(request.number, None)
            self._announced.notify_all()
        if wanted and place is Place.RUNNING:
            request.place = place
        else:
            request.settle()
        return wanted

    def _close_out(self, requests: Iterable[Request], verdicts: list[Verdict], why: str) -> None:
        for request in requests:
            if request.place is Place.RUNNING:
                request.settle()
            elif not self._withdraw(request):
                continue
            self._record.counts.closed += 1
            verdicts.append(Verdict(request, Outcome(error=QueueClosed(why))))

    # Submitting

    def submit(
        self, parcel: Parcel, runner: BatchRunner, priority: int, deadline: float | None
    ) -> Request:
        """Accept a request, hold it back, or refuse it; never blocks."""
        with _Announcement(self) as verdicts, self._lock:
            self._check_process()
            if self._closed:
                raise QueueClosed("the queue is closed")
            full = len(self._pending) >= self._limits.max_pending
            if full and self._limits.on_full == "raise":
                self._record.counts.rejected += 1
                raise QueueFull(f"the queue holds max_pending={len(self._pending)} requests")
            if deadline is not None:
                self._start_timekeeper()
            number = self._last_number = self._last_number + 1
            now = self._clock.now()
            moment = None if deadline is None else now + deadline
            request = Request(number, parcel, runner, priority, now, moment, self._cancelled)
            self._record.counts.submitted += 1
            self._unsettled[number] = request
            if full or self._waiting:
                self._waiting[number] = request
            else:
                self._accept(request)
            if moment is not None:
                self._deadlines.add(request)
                if moment == self._deadlines.next():
                    self._time.notify()
            if full and self._limits.on_full == "drop-oldest":
                self._drop_for(request, verdicts)
                self._admit()
        return request

    def _drop_for(self, request: Request, verdicts: list[Verdict]) -> None:
        """Give up the oldest request of the lowest priority, which may be the new one."""
        victim = self._pending.least()
        if victim is None or victim.priority > request.priority:
            victim = request
        if self._withdraw(victim):
            self._record.counts.dropped += 1
            why = f"the queue holds max_pending={self._limits.max_pending} requests: dropped"
            verdicts.append(Verdict(victim, Outcome(error=QueueFull(why))))

    def _admit(self) -> None:
        """Let those held back in while there is space, in their order."""
        while self._waiting and len(self._pending) < self._limits.max_pending:
            self._accept(self._waiting.popitem(last=False)[1])

    def _accept(self, request: Request) -> None:
        request.place = Place.PENDING
        request.let_go()
        rows = self._pending.add(request)
        # Others of its group have set a timer; a worker is needed for the first and the last.
        if rows == request.parcel.rows or rows >= self._limit:
            self._work.notify()

    def await_admission(self, request: Request) -> None:
        """Block while the request is held back; not in a thread that would have to make space."""
        if request.place is not Place.WAITING or self._is_own_thread():
            return
        with self._lock:
            if request.place is not Place.WAITING:
                return
            request.admission = threading.Event()
        try:
            request.admission.wait()
        except BaseException:  # KeyboardInterrupt: the caller will never see the future
            request.cancel()
            raise

    def _cancelled(self, request: Request) -> None:
        """A request whose future was cancelled leaves the queue."""
        if self._forked:
            return
        with self._lock:
            if request.place in (Place.PENDING, Place.WAITING):
                self._withdraw(request)
                self._admit()

    # The timekeeper

    def _start_timekeeper(self) -> None:
        """See from now on that deadlines are kept, also while all workers are busy."""
        if self._timekeeper is None:
            name = "orchard-queue-deadlines"
            timekeeper = threading.Thread(target=self._keep_time, name=name, daemon=True)
            timekeeper.start()
            self._timekeeper = timekeeper

    def _keep_time(self) -> None:
        while True:
            with _Announcement(self) as verdicts, self._lock:
                self._expire(verdicts)
                if not verdicts:
                    soonest = self._deadlines.next()
                    if self._forked or (self._closed and soonest is None):
                        return
                    self._clock.wait_until(self._time, soonest)

    def _expire(self, verdicts: list[Verdict]) -> None:
        now = self._clock.now()
        passed = self._deadlines.passed(now)
        for request in passed:
            if self._withdraw(request):
                self._record.counts.expired += 1
                late = now - request.arrival
                why = f"the request's deadline passed before it ran, {late:.3g} s after submit"
                verdicts.append(Verdict(request, Outcome(error=DeadlineExceeded(why))))
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
        return not report.fatal or not self._replace(worker)

    def _take(self, worker: Worker) -> Load | None:
        """Wait for the worker's next batch; None when the queue has ended."""
        while True:
            with _Announcement(self) as verdicts, self._lock:
                self._expire(verdicts)
                if verdicts:
                    continue
                if self._forked or (self._closed and not self._pending):
                    self._time.notify_all()
                    return None
                now = self._clock.now()
                max_delay = 0.0 if self._closed else self._limits.max_delay
                taken = self._pending.take(self._limit, now, max_delay, self._flushed)
                if not taken:
                    oldest = self._pending.oldest()
                    self._clock.wait_until(
                        self._work, None if oldest is None else oldest + max_delay
                    )
                    continue
                worker.batch = tuple(r for r in taken if self._begin(r, Place.RUNNING))
                self._record.queue_seconds.extend(now - r.arrival for r in worker.batch)
                self._admit()
                if self._pending:  # the thread that watched the rest may have been this one
                    self._work.notify()
                if worker.batch:
                    parcels = [request.parcel for request in worker.batch]
                    return Load(worker.batch[0].runner, parcels)

    def _conclude(self, worker: Worker, report: Report, start: float) -> None:
        with _Announcement(self) as verdicts, self._lock:
            now = self._clock.now()
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
            for request, outcome in zip(worker.batch, report.outcomes, strict=True):
                self._settle(request, outcome, verdicts)
            worker.batch = ()

    def _settle(self, request: Request, outcome: Outcome, verdicts: list[Verdict]) -> None:
        """The outcome of a request that ran, unless `close` gave up on it meanwhile."""
        if request.place is not Place.RUNNING:
            return
        request.settle()
        if outcome.error is None:
            self._record.counts.completed += 1
        else:
            self._record.counts.failed += 1
        verdicts.append(Verdict(request, outcome))

    def _adapt(self, report: Report) -> None:
        """Halve the limit after running out of memory; double it again after a while without."""
        if report.out_of_memory and report.memory_is_at_fault:
            self._limit = max(1, min(self._limit, *report.out_of_memory) // 2)
            self._batches_in_memory = 0
        elif self._limit < self._limits.max_batch:
            self._batches_in_memory += 1
            if self._batches_in_memory >= _RECOVERY:
                self._limit = min(self._limits.max_batch, 2 * self._limit)
                self._batches_in_memory = 0

    def _bury(self, worker: Worker, error: BaseException) -> None:
        """A thread ends out of turn: answer its batch and put another in its place."""
        with _Announcement(self) as verdicts, self._lock:
            for request in worker.batch:
                died = WorkerDied(f"the worker thread that ran the request died: {one_line(error)}")
                died.__cause__ = error
                self._settle(request, Outcome(error=died), verdicts)
            worker.batch = ()
        worker.retired = self._replace(worker)

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
        with self._lock:
            self._check_process()
            number = self._flushed = self._last_number
            self._work.notify_all()
            if self._is_own_thread():
                return
            self._announced.wait_for(lambda: next(iter(self._unsettled), number + 1) > number)

    def stats(self) -> QueueStats:
        with self._lock:
            self._check_process()
            now = self._clock.now()
            return self._record.stats(
                waiting=len(self._waiting),
                pending=len(self._pending),
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

    def dismiss(self) -> None:
        """Accept nothing more and run nothing more."""
        with _Announcement(self) as verdicts, self._lock:
            self.abandon()
            if not self._forked:
                self._close_out(self._idle_requests(), verdicts, "the queue was closed")

    def wait_until_idle(self, timeout: float | None) -> bool:
        """Wait for the threads of a closed queue; what is not done in time is given up."""
        if self._forked or self._is_own_thread():
            return False
        if self._join(timeout):
            return True
        with _Announcement(self) as verdicts, self._lock:
            why = f"the queue was closed, and the request was not done {timeout:g} s later"
            running = [r for r in self._unsettled.values() if r.place is Place.RUNNING]
            self._close_out([*self._idle_requests(), *running], verdicts, why)
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
            threads = [*(worker.thread for worker in self._workers), self._timekeeper]
            return [thread for thread in threads if thread is not None and thread.is_alive()]

    def _is_own_thread(self) -> bool:
        return threading.current_thread() in self._living()

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
        for request in list(self._unsettled.values()):
            # Its lock may have been held by a thread of the parent, so it is made anew.
            Future.__init__(request)
            request.set_exception(
                ForkedProcessError("the request was submitted in the parent of this process")
            )
            if request.place is not Place.SETTLED:
                request.settle()
        self._unsettled.clear()


_cores: Registry[QueueCore] = Registry()


def _after_fork_in_child() -> None:
    for core in _cores:
        core.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
