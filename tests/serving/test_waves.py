"""Threads that wait for results are woken one after the other, and none is ever left."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import suppress
from typing import Any
from weakref import ref

import pytest
import torch

from orchard.serving import cores, requests, tickets
from orchard.serving.batch_queue import BatchQueue
from orchard.serving.express import IS_COMPILED
from orchard.serving.requests import Request, Wave
from orchard.serving.tickets import Outcome
from orchard.testing.serving_load import closed_loop, triple_and_one

PATIENCE = 60.0
needs_gil = pytest.mark.skipif(not tickets._HAS_GIL, reason="without a GIL there are no waves")
in_python = pytest.mark.skipif(IS_COMPILED, reason="of what is in Python: make test-in-python")


class Nobody:
    """A queue that requests cannot leave."""

    def cancelled(self, request: Request) -> None:
        raise AssertionError("nobody cancels here")


def running(value: object) -> Request:
    """A request whose outcome is decided."""
    request = Request(None, None, 0, Nobody())
    assert request.begin()
    request.settle(Outcome(value))
    return request


class Waiting:
    """A thread that waits for a result."""

    def __init__(self, request: Request) -> None:
        self.got: Any = None
        self._request: Any = request
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        end = time.monotonic() + PATIENCE
        while not request._is_awaited:
            assert time.monotonic() < end
            time.sleep(0.001)

    def _run(self) -> None:
        with suppress(SystemExit):  # of a test that interrupts it
            request, self._request = self._request, None
            self.got = request.result()

    def join(self) -> Any:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        return self.got


def run(wave: Wave, abreast: int = 1) -> None:
    """As the worker does, but not for ever."""
    worker = threading.Thread(target=wave.run, args=(PATIENCE, abreast), daemon=True)
    worker.start()
    worker.join(PATIENCE)
    assert not worker.is_alive()


@pytest.fixture
def opened_by(monkeypatch: pytest.MonkeyPatch) -> dict[int, threading.Thread]:
    """Which thread has opened a request first, by the request's id."""
    found: dict[int, threading.Thread] = {}
    real = Request.open

    def open_and_tell(request: Request) -> None:
        found.setdefault(id(request), threading.current_thread())
        real(request)

    monkeypatch.setattr(Request, "open", open_and_tell)
    return found


@in_python
@needs_gil
def test_who_has_passed_wakes_the_next(
    monkeypatch: pytest.MonkeyPatch, opened_by: dict[int, threading.Thread]
) -> None:
    monkeypatch.setattr(requests, "_STALLED", PATIENCE)
    asked = [running(n) for n in range(5)]
    waiting = [Waiting(request) for request in asked]
    wave = Wave()
    for request in asked:
        request.announce(wave)
    assert opened_by == {}
    assert all(request.done() for request in asked)
    run(wave)
    assert [each.join() for each in waiting] == list(range(5))
    found = [opened_by[id(request)] for request in asked]
    assert found[1:] == [each.thread for each in waiting[:-1]]
    assert found[0] not in found[1:]


@in_python
@needs_gil
def test_the_worker_waits_until_they_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_STALLED", PATIENCE)
    passed: list[int] = []
    real = Wave.pass_on

    def slow(wave: Wave) -> None:
        if threading.current_thread() in threads:
            time.sleep(0.01)
            passed.append(1)
        real(wave)

    monkeypatch.setattr(Wave, "pass_on", slow)
    asked = [running(n) for n in range(4)]
    waiting = [Waiting(request) for request in asked]
    threads = [each.thread for each in waiting]
    wave = Wave()
    for request in asked:
        request.announce(wave)
    run(wave)
    assert len(passed) == 4
    assert [each.join() for each in waiting] == list(range(4))


@needs_gil
def test_one_that_does_not_pass_holds_nobody_up() -> None:
    """The first is taken to be waited for, and nobody does: a wait that was interrupted."""
    asked = [running(n) for n in range(5)]
    asked[0]._is_awaited = True
    waiting = [Waiting(request) for request in asked[1:]]
    wave = Wave()
    for request in asked:
        request.announce(wave)
    run(wave)
    assert [each.join() for each in waiting] == [1, 2, 3, 4]
    assert asked[0].result() == 0


@in_python
@needs_gil
def test_a_thread_that_is_interrupted_as_it_passes_on_leaves_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between taking the next out of the line and waking it."""
    monkeypatch.setattr(requests, "_STALLED", 0.5)
    real = Request.open
    lost: list[Request] = []

    def open_unless_lost(request: Request) -> None:
        if threading.current_thread() is waiting[0].thread and not lost:
            lost.append(request)
            raise SystemExit
        real(request)

    asked = [running(n) for n in range(5)]
    waiting = [Waiting(request) for request in asked]
    monkeypatch.setattr(Request, "open", open_unless_lost)
    wave = Wave()
    for request in asked:
        request.announce(wave)
    run(wave)
    assert [each.join() for each in waiting] == [None, 1, 2, 3, 4]
    assert lost == [asked[1]]


@needs_gil
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_so_many_are_woken_abreast(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more, until one has passed; here nobody does."""
    asked = [running(n) for n in range(count)]
    wave, left = Wave(), []
    for request in asked:
        request._is_awaited = True
        request.announce(wave)
    monkeypatch.setattr(Wave, "wait", lambda wave, _: left.append(wave.left))
    assert not wave.run(PATIENCE, abreast=3)
    assert left == ([count - 3] if count > 3 else [])
    assert [request.result() for request in asked] == list(range(count))


@needs_gil
@pytest.mark.parametrize("count", [2, 3, 8])
def test_threads_abreast_all_pass(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_STALLED", PATIENCE)
    asked = [running(n) for n in range(count)]
    waiting = [Waiting(request) for request in asked]
    wave = Wave()
    for request in asked:
        request.announce(wave)
    run(wave, abreast=3)
    assert [each.join() for each in waiting] == list(range(count))


@needs_gil
def test_a_callback_holds_up_nobody_who_waits() -> None:
    """Those before it are woken first, also where the callback waits for one of them."""
    asked = [running(n) for n in range(4)]
    waiting = [Waiting(request) for request in asked[:3]]
    seen: list[Any] = []
    asked[3].add_done_callback(lambda _: seen.extend(each.join() for each in waiting))
    wave = Wave()
    for request in asked:
        request.announce(wave)
    assert seen == [0, 1, 2]
    run(wave)


def test_what_is_asked_for_later_waits_for_no_wave() -> None:
    """As in a process forked meanwhile, where nobody opens it."""
    request = running(7)
    request._is_awaited = True
    request.announce(Wave())
    assert request.done()
    waiting = threading.Thread(target=request.result, daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert request.result() == 7


@needs_gil
def test_requests_are_not_kept_by_their_wave() -> None:
    """Nor by one another: they go as soon as who waited lets go, without the collector."""
    gc.collect()
    gc.disable()
    try:
        asked = [running(n) for n in range(3)]
        left = [ref(request) for request in asked]
        waiting = [Waiting(request) for request in asked]
        wave = Wave()
        for request in asked:
            request.announce(wave)
        del asked, request
        run(wave)
        assert [each.join() for each in waiting] == [0, 1, 2]
        assert [reference() for reference in left] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [15, 16])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("threads", [2, 16, 64])
def test_a_closed_loop_of_threads(
    threads: int, workers: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "usable", lambda: count)
    with BatchQueue(triple_and_one, max_batch=32, workers=workers) as queue:
        assert queue._core._limits.abreast == (3 if count == 16 else 1)
        closed_loop(queue, threads, 30)
        assert queue.stats().completed == threads * 30


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no thread is kept on a core")
def test_on_one_core_they_are_woken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable", lambda: 16)
    with BatchQueue(triple_and_one, core=min(os.sched_getaffinity(0))) as queue:
        assert queue._core._limits.abreast == 1


@in_python
def test_waves_that_come_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody passes on: the worker wakes them all, if later."""
    real = Wave.pass_on

    def by_the_worker(wave: Wave) -> None:
        if threading.current_thread().name.startswith("orchard-queue"):
            real(wave)

    monkeypatch.setattr(Wave, "pass_on", by_the_worker)
    with BatchQueue(triple_and_one, max_batch=8) as queue:
        closed_loop(queue, 8, 5)


def test_a_worker_that_dies_in_a_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch has answers, which all get; another takes its place."""
    real = Wave.run
    deaths: list[Wave] = []

    def die_once(wave: Wave, seconds: float, abreast: int) -> bool:
        if not deaths:
            deaths.append(wave)
            raise SystemExit
        return real(wave, seconds, abreast)

    monkeypatch.setattr(Wave, "run", die_once)
    with BatchQueue(triple_and_one, max_batch=8) as queue:
        closed_loop(queue, 8, 5)
        stats = queue.stats()
    assert (stats.completed, stats.failed, stats.workers_replaced) == (40, 0, 1)


@pytest.mark.parametrize("threads", [8, 16])
def test_a_worker_waits_for_no_wave_where_a_batch_waits_for_it(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two batches' threads the others have asked while a batch ran, and that took long."""
    waves: list[int] = []
    real = Wave.run

    def run_and_tell(wave: Wave, seconds: float, abreast: int) -> bool:
        waves.append(len(wave))
        return real(wave, seconds, abreast)

    monkeypatch.setattr(Wave, "run", run_and_tell)
    begun = threading.Semaphore(0)

    def slow(x: torch.Tensor) -> torch.Tensor:
        begun.release()
        end = time.monotonic() + PATIENCE
        while queue.stats().pending < threads - 8 and not is_last.is_set():
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(0.02)
        return x * 3 + 1

    is_last = threading.Event()
    with BatchQueue(slow, max_batch=8, max_delay=PATIENCE) as queue:
        clients = [Waiting(queue.submit(torch.ones(1, 1) * n)) for n in range(threads)]
        begun.acquire(timeout=PATIENCE)
        is_last.set()
        assert [each.join().item() for each in clients] == [3 * n + 1 for n in range(threads)]
        assert queue.stats().workers_replaced == 0
    assert waves == [8]
