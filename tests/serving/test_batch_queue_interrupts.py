"""A BatchQueue where an exception comes from outside: Ctrl-C, signal handlers, finalizers.

`Interruption` raises at every point where CPython runs signal handlers, one after the other.
"""

from __future__ import annotations

import dis
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.errors import QueueClosed
from orchard.serving import batch_queue, queue_core, requests, tickets
from orchard.serving.batch_queue import BatchQueue
from orchard.serving.express import IS_COMPILED
from orchard.serving.queue_core import Clock

PATIENCE = 60.0  # seconds; reached only by a test that fails
FILES = (queue_core.__file__, requests.__file__, tickets.__file__, batch_queue.__file__)
FEW = {"a wait for a result": 0, "a submit that is taken": 2} if IS_COMPILED else {}

traces = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="since 3.12 a tracer does not see every step"
)


def points(code: CodeType) -> set[int]:
    """Where signal handlers may run: at the entry, after a call, and where a loop jumps back."""
    found, before = set(), ""
    for step in dis.get_instructions(code):
        if step.opname in ("RESUME", "JUMP_BACKWARD") or before.startswith("CALL"):
            found.add(step.offset)
        if step.opname != "CACHE":
            before = step.opname
    return found


class Interruption:
    """KeyboardInterrupt at the n-th such point of the queue's code in this thread, from 0 on."""

    def __init__(self, n: int) -> None:
        self._left = n
        self.place = ""

    def __enter__(self) -> Interruption:
        gc.collect()
        gc.disable()  # finalizers of queues before are not what is interrupted
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        gc.enable()

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        # Inside of a generator an exception of the tracer's does not leave a `with` block.
        if frame.f_code.co_filename not in FILES or frame.f_code.co_flags & 0x20:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and not self.place and frame.f_lasti in points(frame.f_code):
            self._left -= 1
            if self._left < 0:
                self.place = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._step


class Scene:
    """A worker that is held, three requests pending in a queue of three, and who else waits."""

    def __init__(self, on_full: Any = "wait", submitters: int = 0) -> None:
        self.open = threading.Event()
        began = threading.Event()

        def function(x: Tensor) -> Tensor:
            began.set()
            assert self.open.wait(PATIENCE)
            return x * 2

        self.queue = BatchQueue(function, max_batch=4, max_delay=0, max_pending=3, on_full=on_full)
        self.futures = [self.queue.submit(torch.ones(1, 2))]
        assert began.wait(PATIENCE)
        self.futures += [self.queue.submit(torch.ones(1, 2)) for _ in range(3)]
        self.threads = [threading.Thread(target=self._submit) for _ in range(submitters)]
        for thread in self.threads:
            thread.start()
        while self.queue.stats().waiting < submitters:
            pass

    def _submit(self) -> None:
        self.futures.append(self.queue.submit(torch.ones(1, 2)))

    def end(self) -> None:
        """Every future is done, every thread goes on, and the numbers add up."""
        self.open.set()
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a submitter hangs"
        _, lost = wait(self.futures, PATIENCE)
        assert not lost, f"{len(lost)} lost"
        answered = [f for f in self.futures if not f.cancelled() and f.exception() is None]
        for call in (self.queue.flush, self.queue.close, *(f.result for f in answered)):
            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{call.__name__} hangs"
        stats = self.queue.stats()
        assert stats.waiting == stats.pending == stats.running == 0
        for future in answered:
            assert torch.equal(future.result(), torch.full((1, 2), 2.0))


def _drop(scene: Scene) -> None:
    scene.queue.submit(torch.ones(1, 2))


def _cancel(scene: Scene) -> None:
    scene.futures[1].cancel()


def _wait(scene: Scene) -> None:
    scene.open.set()
    scene.futures[1].result()


def _dismiss(scene: Scene) -> None:
    scene.queue._core.dismiss()


def _give_up(scene: Scene) -> None:
    scene.queue._core.abandon()
    scene.queue._core.wait_until_idle(0.0)


ACTS: dict[str, tuple[Callable[[Scene], None], dict[str, Any]]] = {
    "a submit that drops another": (_drop, {"on_full": "drop-oldest"}),
    "a submit that is taken": (_drop, {}),
    "cancel, with others held back": (_cancel, {"submitters": 2}),
    "a wait for a result": (_wait, {}),
    "close without drain": (_dismiss, {}),
    "close that gives up": (_give_up, {}),
}


def _interrupted(act: str) -> Iterator[str]:
    """The act, interrupted once at each of its points; yields where."""
    do, options = ACTS[act]
    n = 0
    while True:
        scene = Scene(**options)
        if act == "a submit that is taken":
            scene.futures[1].cancel()
        interruption = Interruption(n)
        try:
            with interruption:
                do(scene)
        except KeyboardInterrupt:
            yield interruption.place
        try:
            scene.end()
        except AssertionError as error:
            raise AssertionError(f"{error}, interrupted at {interruption.place}") from error
        if not interruption.place:
            return
        n += 1


@traces
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("act", ACTS)
def test_an_interruption_anywhere_loses_nobody(act: str) -> None:
    places = list(_interrupted(act))
    # The tracer has seen code, of which there is hardly any where the rest is compiled.
    assert len(places) >= FEW.get(act, 1 if act == "a wait for a result" else 10)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="signals are timed")
@pytest.mark.parametrize("act", ACTS)
def test_signals_at_any_moment_lose_nobody(act: str) -> None:
    """Where CPython itself delivers them, whatever its version."""
    do, options = ACTS[act]
    places: set[str] = set()
    armed = False

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal armed
        # In compiled code it comes to who has called that.
        assert frame is not None
        code = frame.f_code
        if armed and (code.co_filename in FILES or code is _wait.__code__):
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            places.add(f"{code.co_qualname}:{frame.f_lineno}")
            raise KeyboardInterrupt

    gc.freeze()  # else it takes long to collect
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for turn in range(150):
            scene = Scene(**options)
            if act == "a submit that is taken":
                scene.futures[1].cancel()
            gc.collect()
            gc.disable()  # finalizers of queues before are not what is interrupted
            armed = True
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + 7 * turn % 300), 1e-4)
                do(scene)
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            gc.enable()
            try:
                scene.end()
            except AssertionError as error:
                raise AssertionError(f"{error}, interrupted at one of {places}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
        gc.unfreeze()
    assert places or act in FEW


class Meddler(Clock):
    """A clock at whose next use something else comes in between, as a signal handler would."""

    def __init__(self) -> None:
        self.meddle: Callable[[], object] | None = None

    def now(self) -> float:
        if threading.current_thread() is threading.main_thread():
            meddle, self.meddle = self.meddle, None
            if meddle is not None:
                meddle()
        return super().now()


@pytest.mark.parametrize("drain", [True, False])
def test_a_handler_that_closes_the_queue_it_came_into(drain: bool) -> None:
    """It does not wait, and what was submitted has its outcome."""
    clock = Meddler()
    queue = BatchQueue(lambda x: x * 2, clock=clock, log_every=3600.0)
    clock.meddle = lambda: queue.close(drain)
    future = queue.submit(torch.ones(1, 2))
    assert wait([future], PATIENCE).done
    if drain:
        assert torch.equal(future.result(), torch.full((1, 2), 2.0))
    else:
        assert isinstance(future.exception(), QueueClosed)
    with pytest.raises(QueueClosed):
        queue.submit(torch.ones(1, 2))
    queue.close()


@pytest.mark.parametrize("call", ["stats", "flush"])
def test_a_handler_that_asks_in_the_middle_of_a_submit(call: str) -> None:
    """It sees what there is, and the change that it came into goes on as it was."""
    clock = Meddler()
    with BatchQueue(lambda x: x * 2, clock=clock, max_delay=3600.0) as queue:
        first = queue.submit(torch.ones(1, 2))
        clock.meddle = getattr(queue, call)
        second = queue.submit(torch.ones(1, 2), deadline=3600.0)
        assert clock.meddle is None
        queue.flush()
        assert first.result(0).sum() == second.result(0).sum() == 4
        stats = queue.stats()
        assert (stats.submitted, stats.completed, stats.pending) == (2, 2, 0)


def test_a_handler_that_submits_into_a_submit_is_refused() -> None:
    clock = Meddler()
    with BatchQueue(lambda x: x * 2, clock=clock) as queue:
        said: list[str] = []

        def submit() -> None:
            with pytest.raises(RuntimeError, match="signal handler") as refused:
                queue.submit(torch.ones(1, 2))
            said.append(str(refused.value))

        clock.meddle = submit
        assert queue.submit(torch.ones(1, 2)).result(PATIENCE).sum() == 4
        assert len(said) == 1


def test_a_cancel_in_the_middle_of_a_submit() -> None:
    """It takes effect at the latest when the request's turn comes."""
    clock = Meddler()
    with BatchQueue(lambda x: x * 2, clock=clock, max_delay=3600.0) as queue:
        first = queue.submit(torch.ones(1, 2))
        clock.meddle = first.cancel
        second = queue.submit(torch.ones(1, 2))
        queue.flush()
        assert first.cancelled()
        assert second.result(0).sum() == 4
        assert queue.stats().cancelled == 1


@pytest.mark.parametrize("method", ["take", "oldest"])
def test_a_worker_that_fails_in_the_queue_s_own_code(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another takes its place and runs what it had before it."""
    real = getattr(requests.Pending, method)
    fails = iter([True])

    def broken(self: requests.Pending, *args: Any) -> Any:
        found = real(self, *args)
        if found and next(fails, False):
            raise MemoryError
        return found

    with BatchQueue(lambda x: x * 2, max_delay=3600.0) as queue:
        monkeypatch.setattr(requests.Pending, method, broken)
        futures: list[Future[Any]] = [queue.submit(torch.ones(1, 2)) for _ in range(5)]
        # `oldest` is asked for while a batch is not ready, `take` has nothing before it is.
        end = time.monotonic() + PATIENCE
        while method == "oldest" and not queue.stats().workers_replaced:
            assert time.monotonic() < end
            time.sleep(0.001)
        queue.flush()
        assert [future.result(PATIENCE).sum().item() for future in futures] == [4] * 5
        assert queue.stats().workers_replaced == 1


def test_leaves_that_cannot_be_compared() -> None:
    """The request that holds one is refused; the others do not notice."""

    class Odd:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            raise ZeroDivisionError

    with BatchQueue(lambda tree: tree[0] * 2) as queue:
        first = queue.submit((torch.ones(1, 2), Odd()))
        with pytest.raises(ZeroDivisionError):
            queue.submit((torch.ones(1, 2), Odd()))
        assert first.result(PATIENCE).sum() == 4
        queue.flush()
        assert queue.stats().submitted == 1


def test_dropped_results_do_not_wait_for_a_deadline() -> None:
    """Futures with deadlines that are dropped keep no memory."""
    with BatchQueue(lambda x: x * 2, max_delay=0.0) as queue:
        queue.submit(torch.ones(1, 2), deadline=1000.0).result(PATIENCE)
        held = [queue.submit(torch.ones(1, 2), deadline=2000.0) for _ in range(20)]
        results = [future.result(PATIENCE) for future in held]
        queue.flush()
        queue.submit(torch.ones(1, 2)).result(PATIENCE)  # its thread has left the batch before
        seen = [weakref.ref(result) for result in results]
        del held, results
        gc.collect()
        assert [ref() for ref in seen] == [None] * 20


def test_a_queue_closed_while_its_future_makes_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the finalizer of a queue, where the collector runs in the midst of `future.done()`."""
    queue = BatchQueue(lambda x: x * 2, max_delay=0.02)
    made = threading.Condition

    def interrupted() -> threading.Condition:
        if threading.current_thread() is asker:
            time.sleep(0.1)  # meanwhile the worker comes to begin the request
            queue.close()
        return made()

    monkeypatch.setattr(requests, "Condition", interrupted)
    future = queue.submit(torch.ones(1, 2))
    asker = threading.Thread(target=future.done, daemon=True)
    asker.start()
    asker.join(PATIENCE)
    assert not asker.is_alive(), "the queue and its future wait for each other"
    assert future.result(PATIENCE).tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("drain", [True, False])
def test_a_queue_closed_from_inside_of_a_future_s_lock(drain: bool) -> None:
    """As by a signal handler that comes in the midst of `add_done_callback`: nobody waits."""
    queue = BatchQueue(lambda x: x * 2, max_delay=0.02)
    future = queue.submit(torch.ones(1, 2))

    def ask() -> None:
        with future._condition:
            queue.close(drain=drain)
            queue.flush()

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(PATIENCE)
    assert not asker.is_alive(), "the queue and its future wait for each other"
    error = future.exception(PATIENCE)
    assert isinstance(error, QueueClosed) if error else future.result().sum() == 4


def test_a_queue_collected_inside_of_a_future_s_lock() -> None:
    began = threading.Event()

    def collect() -> None:
        with future._condition:
            held.clear()
            assert began.wait(PATIENCE)  # the worker needs no lock of the future to begin
            gc.collect()

    def function(x: Tensor) -> Tensor:
        began.set()
        return x * 2

    held: list[Any] = [BatchQueue(function, max_delay=0.02)]
    held.append(held)
    future = held[0].submit(torch.ones(1, 2))
    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    collector.join(PATIENCE)
    assert not collector.is_alive(), "the queue and its future wait for each other"
    assert future.result(PATIENCE).sum() == 4


@traces
def test_callbacks_of_an_interrupted_cancel() -> None:
    """Called once, at the latest in the request's turn; lost only between its being taken from
    the list and called."""
    lost = []
    for n in range(1000):
        scene, called = Scene(), []
        future = scene.futures[-1]
        future.add_done_callback(called.append)
        with Interruption(n) as interruption, suppress(KeyboardInterrupt):
            future.cancel()
        scene.end()
        assert called in ([], [future])
        if not called:
            lost.append(interruption.place)
        if not interruption.place:
            break
    assert 10 < n < 999
    assert len(lost) <= 2, lost
