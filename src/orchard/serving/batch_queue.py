"""Many callers, one model: requests that come close together run as one batch."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch

from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.serving import cores
from orchard.serving.batch_runner import BatchRunner, LanePool
from orchard.serving.batching import batching_for
from orchard.serving.express import Entrance
from orchard.serving.lanes import checked_device
from orchard.serving.metrics import PeriodicLog
from orchard.serving.one_core import OneCore
from orchard.serving.queue_core import Clock, Limits, QueueCore
from orchard.serving.queue_stats import QueueStats
from orchard.serving.requests import HIGHEST_PRIORITY, Request
from orchard.serving.stream_pool import StreamPool
from orchard.serving.tickets import Place

OnFull = Literal["wait", "raise", "drop-oldest"]
Collate = Literal["cat", "pad"] | tuple[Callable[[list[Any]], Any], Callable[[Any, list[Any]], Any]]
_MOST = sys.maxsize  # that is counted
_MANY_CORES = 16  # with fewer, threads of a wave are woken one after the other
_ABREAST = 3  # that are on their way at a time: 10 to 25 % more answers, measured on 16
_LONGEST = threading.TIMEOUT_MAX / 2  # seconds that a thread can wait for another
_ON_FULL = ("wait", "raise", "drop-oldest")


class BatchQueue:
    """Runs single requests as batches of a model, and gives every request a definite outcome.

    model_or_fn: called with one argument, the requests' tree with their rows concatenated (and
        under collate="pad" with a mask, bool [rows, length]); returns a tree of tensors with the
        same rows. It runs in worker threads without gradients. A module must be in eval mode.
    max_batch: rows in a batch; a request with more rows than that runs alone.
    max_delay: seconds that a request waits for company while a worker is free.
    max_pending: requests that may be accepted and not yet run.
    on_full: what `submit` does then: "wait", "raise" QueueFull, or "drop-oldest", which gives
        QueueFull to the oldest request of the lowest priority.
    workers: threads that run batches.
    collate: "cat", "pad" (dimension 1 may differ between requests), or a pair of callables
        collate(requests) -> batch and split(output, requests) -> results.
    pool: a StreamPool in whose lanes the workers run.
    device: where batches are moved; None leaves them where they are.
    warmup: an example request, or a list of them, that each worker runs before this returns.
    allow_training: serve a module that is in training mode.
    log_every: seconds between lines of `stats()` in the log of "orchard"; None for none.
    core: keeps the workers and every thread that calls `submit`, but the main thread, on this core
        of the machine until the queue is closed. For a model on a GPU that many threads wait for.
    clock: where time comes from; for tests and simulations.
    """

    def __init__(
        self,
        model_or_fn: Callable[..., Any],
        *,
        max_batch: int = 32,
        max_delay: float = 0.002,
        max_pending: int = 1024,
        on_full: OnFull = "wait",
        workers: int = 1,
        collate: Collate = "cat",
        pool: LanePool | None = None,
        device: torch.device | str | None = None,
        warmup: Any = None,
        allow_training: bool = False,
        log_every: float | None = None,
        core: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not callable(model_or_fn):
            kind = type(model_or_fn).__name__
            raise ArgumentTypeError(f"model_or_fn is a {kind}; it must be callable")
        for name, value in (
            ("max_batch", max_batch),
            ("max_pending", max_pending),
            ("workers", workers),
        ):
            _check_count(name, value)
        if not _is_seconds(max_delay) or not 0 <= max_delay < math.inf:
            raise ArgumentValueError(f"max_delay is {max_delay!r}; it must be seconds, at least 0")
        if on_full not in _ON_FULL:
            raise ArgumentValueError(f"on_full is {on_full!r}; it must be one of {_ON_FULL}")
        where = None if device is None else checked_device(device)
        if pool is not None and where is not None and checked_device(pool.device) != where:
            raise ArgumentValueError(f"device is {where}; the pool is on {pool.device}")
        self._one_core = None if core is None else OneCore(core)
        self._runner = BatchRunner(
            model_or_fn,
            batching_for(collate),
            device=where,
            pool=pool,
            make_pool=partial(StreamPool, size=workers),
            allow_training=allow_training,
            one_core=self._one_core,
        )
        abreast = _ABREAST if core is None and cores.usable() >= _MANY_CORES else 1
        limits = Limits(min(max_batch, _MOST), max_delay, min(max_pending, _MOST), on_full, abreast)
        self._core = QueueCore(limits, clock or Clock())
        self._entrance = Entrance(self._core, self._runner, Request, self._runner.pattern)
        self._log = None if log_every is None else _log(self._core, log_every)
        self._abandon = weakref.finalize(self, _abandon, self._core, self._log, self._one_core)
        self._abandon.atexit = False  # the end of the interpreter closes all queues
        self._start(workers, warmup)

    def _start(self, workers: int, warmup: Any) -> None:
        examples = warmup if isinstance(warmup, list) else [] if warmup is None else [warmup]
        try:
            for _ in range(workers):  # one after the other: a first call may compile
                warm: Future[None] = Future()
                self._core.start_worker(partial(_report, warm, self._runner, examples))
                warm.result()
        except BaseException:
            self._abandon()
            raise

    def submit(self, x: Any, *, deadline: float | None = None, priority: int = 0) -> Future[Any]:
        """Queue a request; the future gets its rows of the function's result.

        x: a tensor, or a tree of them, that carries its own rows in the first dimension; not to
            be changed before the future is done.
        deadline: seconds from now within which it must begin to run; else DeadlineExceeded.
        priority: -100 to 100; a step counts as much as having waited 0.1 s longer.
        """
        if self._one_core is not None:
            self._one_core.join()
        if deadline is None and type(priority) is int and priority == 0:
            mine: list[Request] = []
            try:
                if self._entrance.submit(x, mine):
                    return mine[0]
            except BaseException:  # the caller will never see the future
                for request in mine:
                    request.cancel()
                raise
        request = self._request(x, deadline, priority)
        try:
            self._core.submit(request, deadline)
            if request.place is Place.WAITING:
                self._core.await_admission(request)
        except BaseException:  # the caller will never see the future
            request.cancel()
            raise
        return request

    async def asubmit(self, x: Any, *, deadline: float | None = None, priority: int = 0) -> Any:
        """The result of a request; cancelling the task cancels the request if it has not begun."""
        request = self._request(x, deadline, priority)
        try:
            self._core.submit(request, deadline)
            return await asyncio.wrap_future(request)
        except BaseException:
            request.cancel()
            raise

    def _request(self, x: Any, deadline: float | None, priority: int) -> Request:
        if deadline is not None and not _is_seconds(deadline):
            raise ArgumentValueError(
                f"deadline is {deadline!r}; it must be seconds from now, or None"
            )
        if not isinstance(priority, int) or abs(priority) > HIGHEST_PRIORITY:
            raise ArgumentValueError(
                f"priority is {priority!r}; it must be an integer from {-HIGHEST_PRIORITY} to "
                f"{HIGHEST_PRIORITY}"
            )
        self._core.check_open()
        return Request(self._runner.parcel(x), self._runner, priority, self._core)

    def flush(self) -> None:
        """Run everything submitted so far without waiting for company; returns when it is done."""
        self._core.flush()

    def stats(self) -> QueueStats:
        """What the queue has done so far."""
        return self._core.stats()

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Accept nothing more; run what was submitted, or give it QueueClosed if not `drain`.

        Waits for the workers, at most `timeout` seconds; what is not done then gets QueueClosed.
        """
        if timeout is not None and not (_is_seconds(timeout) and timeout >= 0):
            raise ArgumentValueError(
                f"timeout is {timeout!r}; it must be seconds, at least 0, or None"
            )
        may_wait = self._core.may_wait()
        try:
            if self._core.close(drain, None if timeout is None else min(timeout, _LONGEST)):
                self._runner.close()
        finally:
            if self._one_core is not None:
                self._one_core.leave()
        if self._log is not None:
            self._log.stop() if may_wait else self._log.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(drain=error is None)


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentValueError(f"{name} is {value!r}; it must be an integer of at least 1")


def _is_seconds(value: object) -> bool:
    """Whether it is a number that a moment can be reckoned with."""
    return (isinstance(value, float) and not math.isnan(value)) or (
        isinstance(value, int) and abs(value) < 2**1000
    )


def _log(core: QueueCore, every: float) -> PeriodicLog:
    if not _is_seconds(every) or not 0 < every < math.inf:
        raise ArgumentValueError(f"log_every is {every!r}; it must be seconds above 0, or None")
    return PeriodicLog(core.stats, every, "BatchQueue")


def _abandon(core: QueueCore, log: PeriodicLog | None, one_core: OneCore | None) -> None:
    core.abandon()
    if one_core is not None:
        one_core.leave()
    if log is not None:
        log.end()


def _report(warm: Future[None], runner: BatchRunner, examples: list[Any]) -> None:
    """Run the examples in this thread, and tell how it went."""
    try:
        runner.warm(examples)
    except BaseException as error:  # raised again in the constructor
        warm.set_exception(error)
    else:
        warm.set_result(None)
