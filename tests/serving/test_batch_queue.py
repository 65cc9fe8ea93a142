"""BatchQueue: real batches, definite outcomes, nobody's model changed."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, _base, as_completed, wait
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import orchard
from orchard.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DeadlineExceeded,
    ForkedProcessError,
    QueueClosed,
    QueueFull,
    WorkerDied,
)
from orchard.serving.batch_queue import BatchQueue
from orchard.serving.batch_runner import is_out_of_memory
from orchard.serving.express import IS_COMPILED
from orchard.serving.lanes import Event, Lane
from orchard.serving.requests import Request
from orchard.serving.stream_pool import StreamPool
from orchard.testing.serving_load import ManualClock

PATIENCE = 60.0  # seconds; reached only by a test that fails
HELD = 100.0
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class Gate:
    """A function that can be held: it tells when it has begun, and goes on when allowed to."""

    def __init__(self, function: Callable[..., Any] = lambda x: x * 2) -> None:
        self.function = function
        self.batches: list[list[float]] = []  # the first column of each batch
        self.began = threading.Semaphore(0)
        self.open = threading.Event()
        self.open.set()

    def __call__(self, x: Tensor) -> Any:
        self.batches.append(x.flatten(1)[:, 0].tolist())
        self.began.release()
        assert self.open.wait(PATIENCE)
        return self.function(x)

    def hold(self, queue: BatchQueue) -> Future[Any]:
        """Keep one worker busy with a request of its own until `open` is set."""
        while self.began.acquire(blocking=False):
            pass
        self.open.clear()
        future = queue.submit(row(HELD))
        assert self.began.acquire(timeout=PATIENCE)
        self.batches.clear()
        return future


def row(value: float, rows: int = 1) -> Tensor:
    return torch.full((rows, 3), float(value))


def answers(futures: list[Future[Any]]) -> list[float]:
    return [future.result(PATIENCE)[0, 0].item() for future in futures]


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def queue_threads(queue: BatchQueue) -> list[threading.Thread]:
    return queue._core._living()


# Batches


def test_requests_that_wait_run_together() -> None:
    """64 requests of one row behind a held gate are two calls of 32."""
    gate = Gate()
    with BatchQueue(gate) as queue:
        held = gate.hold(queue)
        futures = [queue.submit(row(n)) for n in range(64)]
        gate.open.set()
        assert answers(futures) == [2.0 * n for n in range(64)]
        assert answers([held]) == [2 * HELD]
    assert gate.batches == [list(map(float, range(32))), list(map(float, range(32, 64)))]


def test_requests_within_max_delay_run_together() -> None:
    """A free worker waits for company for max_delay from the first arrival, and not longer."""
    clock, gate = ManualClock(), Gate()
    with BatchQueue(gate, max_delay=1.0, clock=clock) as queue:
        futures = [queue.submit(row(0))]
        clock.advance(0.75)
        futures.append(queue.submit(row(1)))
        assert gate.batches == []
        clock.advance(0.25)
        assert answers(futures) == [0, 2]
    assert gate.batches == [[0, 1]]


def test_a_full_batch_does_not_wait() -> None:
    gate = Gate()
    with BatchQueue(gate, max_batch=3, max_delay=1.0, clock=ManualClock()) as queue:
        assert answers([queue.submit(row(n)) for n in range(3)]) == [0, 2, 4]


@pytest.mark.parametrize("between", ["stats", "deadline", "cancel", "other kind", "rows"])
def test_a_full_batch_does_not_wait_whatever_came_before_its_last(between: str) -> None:
    """Those who submit wake the worker: what they count by must not miss what others do."""
    gate = Gate()
    with BatchQueue(gate, max_batch=8, max_delay=1.0, clock=ManualClock()) as queue:
        futures = [queue.submit(row(n)) for n in range(5)]
        match between:
            case "stats":
                assert queue.stats().pending == 5
            case "deadline":
                futures.append(queue.submit(row(5), deadline=60.0))
            case "cancel":
                assert futures.pop().cancel()
            case "other kind":
                other = [queue.submit(torch.ones(1, 5)) for _ in range(7)]
            case "rows":
                futures.append(queue.submit(row(5, rows=2)))
        rows = sum(2 if between == "rows" and n == 5 else 1 for n in range(len(futures)))
        assert gate.batches == []
        futures += [queue.submit(row(10 + n)) for n in range(8 - rows)]
        assert len(answers(futures)) == len(futures)
        assert [len(batch) for batch in gate.batches] == [8]
        if between == "other kind":
            assert queue.submit(torch.ones(1, 5)).result(PATIENCE).shape == (1, 5)
            assert [future.done() for future in other] == [True] * 7


def test_a_lone_request_runs_without_a_clock_by_hand() -> None:
    with BatchQueue(Gate(), max_delay=0.001) as queue:
        assert answers([queue.submit(row(4))]) == [8]


def test_a_full_group_leaves_the_timer_to_another_worker() -> None:
    """One worker runs a full group for as long as it likes; the other's lone request is served."""
    clock, gate = ManualClock(), Gate()
    with BatchQueue(gate, max_batch=2, max_delay=1.0, workers=2, clock=clock) as queue:
        gate.open.clear()
        lone = queue.submit(torch.ones(1, 5))
        full = [queue.submit(row(n)) for n in range(2)]
        assert gate.began.acquire(timeout=PATIENCE)
        clock.advance(1.0)
        assert gate.began.acquire(timeout=PATIENCE)
        assert sorted(gate.batches) == [[0, 1], [1]]
        gate.open.set()
        assert answers([*full, lone]) == [0, 2, 2]


def test_max_batch_counts_rows() -> None:
    """3 + 2 rows fill a batch of 5; a request of 9 rows runs alone; order is kept."""
    gate = Gate()
    with BatchQueue(gate, max_batch=5) as queue:
        gate.hold(queue)
        futures = [queue.submit(row(n, rows)) for n, rows in enumerate([3, 2, 9, 4, 2])]
        gate.open.set()
        for n, future in enumerate(futures):
            assert future.result(PATIENCE).eq(2 * n).all()
        assert [future.result().size(0) for future in futures] == [3, 2, 9, 4, 2]
        queue.flush()
        assert gate.batches == [[0, 0, 0, 1, 1], [2] * 9, [3] * 4, [4] * 2]
        stats = queue.stats()
    assert (stats.batches, stats.rows, stats.mean_batch_rows) == (5, 21, 4.2)
    assert stats.fill == pytest.approx(4.2 / 5)


def test_kinds_are_not_mixed() -> None:
    gate = Gate()
    with BatchQueue(gate) as queue:
        gate.hold(queue)
        kinds = [torch.ones(1, 3), torch.ones(1, 4), torch.ones(1, 3).double(), torch.ones(1, 3)]
        futures = [queue.submit(x) for x in kinds]
        gate.open.set()
        for x, future in zip(kinds, futures, strict=True):
            torch.testing.assert_close(future.result(PATIENCE), x * 2, rtol=0, atol=0)
    assert sorted(map(len, gate.batches)) == [1, 1, 2]


def test_flush_waits_for_no_company() -> None:
    with BatchQueue(Gate(), max_delay=1.0, clock=ManualClock()) as queue:
        futures = [queue.submit(row(n)) for n in range(3)]
        queue.flush()
        assert all(future.done() for future in futures)
        assert answers(futures) == [0, 2, 4]
        later = queue.submit(row(9))
        assert not later.done()
        queue.flush()
        assert answers([later]) == [18]


def test_padding_through_the_queue() -> None:
    """Ragged requests in one call; the share of padding is counted."""
    calls = []

    def function(x: Tensor, mask: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        return x * 2 + mask.sum(1, keepdim=True)

    with BatchQueue(function, collate="pad", max_delay=1.0, clock=ManualClock()) as queue:
        requests = [torch.rand(1, length) for length in (2, 4, 3)]
        futures = [queue.submit(x) for x in requests]
        queue.flush()
        for x, future in zip(requests, futures, strict=True):
            torch.testing.assert_close(future.result(), x * 2 + x.size(1), rtol=0, atol=0)
        assert queue.stats().padding == 1 - 9 / 12
    assert calls == [(3, 4), (1, 2)]


def test_answers_do_not_depend_on_company() -> None:
    """Attention alone, in a batch and with other companions: the same bits."""

    def attend(tree: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return orchard.attention(*tree, causal=True)

    requests = [tuple(torch.randn(rows, 2, 33, 16) for _ in range(3)) for rows in (1, 3, 1, 2)]
    with BatchQueue(attend, max_delay=1.0, clock=ManualClock()) as queue:
        for chosen in (requests, requests[::-1], requests[:1]):
            futures = [queue.submit(x) for x in chosen]
            queue.flush()
            for x, future in zip(chosen, futures, strict=True):
                assert torch.equal(future.result(), attend(x))


# Failures


def refuse_negative(x: Tensor) -> Tensor:
    if (x < 0).any():
        raise ValueError(f"{int((x < 0).any(1).sum())} bad rows")
    return x * 2


@pytest.mark.parametrize("guilty", [[5], [0, 7], [0, 1, 2, 3, 4, 5, 6, 7], [3, 4]])
def test_only_the_guilty_fail(guilty: list[int]) -> None:
    gate = Gate(refuse_negative)
    with BatchQueue(gate) as queue:
        gate.hold(queue)
        futures = [queue.submit(row(-1 if n in guilty else n)) for n in range(8)]
        gate.open.set()
        errors = []
        for n, future in enumerate(futures):
            if n in guilty:
                error = future.exception(PATIENCE)
                assert isinstance(error, ValueError)
                assert str(error) == "1 bad rows"
                assert error.__traceback__ is not None
                errors.append(error)
            else:
                assert future.result(PATIENCE).eq(2 * n).all()
        assert len(set(map(id, errors))) == len(guilty)
        assert len({id(error.__traceback__) for error in errors}) == len(guilty)
        queue.flush()
        stats = queue.stats()
    assert (stats.completed, stats.failed) == (9 - len(guilty), len(guilty))
    assert stats.retried >= len(guilty) - 1


def test_the_held_request_fails_alone_too() -> None:
    with BatchQueue(refuse_negative) as queue:
        assert isinstance(queue.submit(row(-1)).exception(PATIENCE), ValueError)
        assert answers([queue.submit(row(1))]) == [2]


def test_a_result_without_rows_fails_its_batch() -> None:
    """No split can be right, not even of halves that happen to fit: nobody gets another's row."""
    table = torch.arange(2.0)[:, None]
    gate = Gate(lambda x: x if x[0, 0] == HELD else table)
    with BatchQueue(gate) as queue:
        gate.hold(queue)
        futures = [queue.submit(row(n)) for n in range(4)]
        gate.open.set()
        errors = [future.exception(PATIENCE) for future in futures]
    assert all(isinstance(error, ArgumentValueError) for error in errors)
    assert "returned [2, 1] for a batch of 4 rows" in str(errors[0])
    assert len(set(map(id, errors))) == 4
    assert gate.batches == [[0, 1, 2, 3]]


def out_of_memory_above(rows: int, make: Callable[[], Exception]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        if len(x) > rows:
            raise make()
        return x * 2

    return function


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.OutOfMemoryError("CUDA out of memory. Tried"), id="torch"),
        pytest.param(lambda: MemoryError(), id="python"),
        pytest.param(lambda: RuntimeError("MPS backend out of memory (..."), id="mps"),
    ],
)
def test_out_of_memory_halves_and_recovers(make: Callable[[], Exception]) -> None:
    """16 rows do not fit, 4 do: nobody fails, the limit is 4, and grows back to 16."""
    gate = Gate(out_of_memory_above(4, make))
    with BatchQueue(gate, max_batch=16) as queue:
        gate.hold(queue)
        futures = [queue.submit(row(n)) for n in range(16)]
        gate.open.set()
        assert answers(futures) == [2.0 * n for n in range(16)]
        queue.flush()
        assert list(map(len, gate.batches)) == [16, 8, 4, 4, 8, 4, 4]
        stats = queue.stats()
        assert (stats.limit, stats.oom_retries, stats.retried, stats.failed) == (4, 3, 3, 0)

        gate.batches.clear()
        gate.hold(queue)
        futures = [queue.submit(row(n)) for n in range(8)]
        gate.open.set()
        answers(futures)
        assert list(map(len, gate.batches)) == [4, 4]
        gate.function = lambda x: x * 2
        for batches, limit in ((12, 4), (1, 8), (15, 8), (1, 16), (40, 16)):  # 3 before
            for n in range(batches):
                assert answers([queue.submit(row(n))]) == [2.0 * n]
            assert queue.stats().limit == limit


def test_out_of_memory_in_one_request() -> None:
    """A real failed allocation in one of eight: seven finish, and the limit stays."""

    def function(x: Tensor) -> Tensor:
        return x * 2 + torch.empty(1 << (48 if (x < 0).any() else 1)).numel() * 0

    with BatchQueue(function, max_delay=1.0, clock=ManualClock()) as queue:
        futures = [queue.submit(row(-1 if n == 3 else n)) for n in range(8)]
        queue.flush()
        error = futures.pop(3).exception()
        assert error is not None
        assert is_out_of_memory(error)
        assert answers(futures) == [0, 2, 4, 8, 10, 12, 14]
        stats = queue.stats()
    assert (stats.failed, stats.completed, stats.limit) == (1, 7, 32)


def test_a_worker_that_dies_is_replaced() -> None:
    """SystemExit from one request: it gets WorkerDied, its companions their results."""

    def function(x: Tensor) -> Tensor:
        if (x < 0).any():
            raise SystemExit(3)
        return x * 2

    with BatchQueue(function, max_delay=1.0, clock=ManualClock()) as queue:
        before = queue_threads(queue)
        futures = [queue.submit(row(-1 if n == 1 else n)) for n in range(4)]
        queue.flush()
        error = futures.pop(1).exception()
        assert isinstance(error, WorkerDied)
        assert isinstance(error.__cause__, SystemExit)
        assert answers(futures) == [0, 4, 6]
        join(before)
        later = queue.submit(row(8))
        queue.flush()
        assert answers([later]) == [16]
        assert queue.stats().workers_replaced == 1
        assert queue_threads(queue) != before


def test_a_worker_that_dies_in_our_code_answers_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever ends the thread after it took a batch, the batch has an outcome."""
    with BatchQueue(refuse_negative) as queue:
        with monkeypatch.context() as patch:
            patch.setattr(queue._runner, "run", lambda batch: {}["lost"])
            error = queue.submit(row(1)).exception(PATIENCE)
        assert isinstance(error, WorkerDied)
        assert isinstance(error.__cause__, KeyError)
        assert answers([queue.submit(row(1))]) == [2]
        assert queue.stats().workers_replaced == 1


def test_a_worker_goes_on_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        if (x < 0).any():
            raise SystemExit
        return x * 2

    def refuse(worker: object) -> None:
        raise RuntimeError("can't start new thread")

    with BatchQueue(function) as queue:
        monkeypatch.setattr(queue._core, "_start_thread", refuse)
        assert isinstance(queue.submit(row(-1)).exception(PATIENCE), WorkerDied)
        assert answers([queue.submit(row(2))]) == [4]


# Models


def test_the_model_is_not_modified() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.LayerNorm(4)).eval().half()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(5, 3).half()
    with BatchQueue(model) as queue:
        result = queue.submit(x).result(PATIENCE)
    assert torch.equal(result, model(x))
    assert not result.requires_grad
    assert not result.is_inference()
    assert not any(module.training for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float16
        assert torch.equal(tensor, before[name])


@pytest.mark.errors
def test_training_mode_is_refused() -> None:
    """At the start and later, in any part, also behind a bound method; unless it is allowed."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Dropout(0.5))).eval()
    with BatchQueue(model, max_delay=1.0, clock=ManualClock()) as queue:
        model[1][0].train()
        futures = [queue.submit(row(n)) for n in range(2)]
        queue.flush()
        for future in futures:
            with pytest.raises(ArgumentValueError, match=r"training mode \(1.0\); call .eval()"):
                future.result()
        model.eval()
        fine = queue.submit(row(1))
        queue.flush()
        assert torch.equal(fine.result(), model(row(1)))
    for module in (model.train(), model.forward):
        with pytest.raises(ArgumentValueError, match=r"training mode \(Sequential\)"):
            BatchQueue(module)
    with BatchQueue(nn.Dropout(0.0), allow_training=True) as queue:
        assert answers([queue.submit(row(7))]) == [7]


def test_warmup_runs_in_each_worker() -> None:
    seen: list[tuple[str, float]] = []

    def function(x: Tensor) -> Tensor:
        seen.append((threading.current_thread().name, x[0, 0].item()))
        return x

    with BatchQueue(function, workers=2, warmup=[row(1), row(2)]) as queue:
        assert seen == [(f"orchard-queue-{n}", v) for n in range(2) for v in (1, 2)]
        assert queue.stats().batches == 0
    with BatchQueue(function, warmup=row(3)):
        assert seen[-1] == ("orchard-queue-0", 3)


@pytest.mark.errors
def test_a_warmup_that_fails_raises() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="1 bad rows"):
        BatchQueue(refuse_negative, warmup=row(-1))
    join(list(set(threading.enumerate()) - before))


# Full queues


@contextmanager
def full_queue(on_full: Any, pending: int = 2, **options: Any) -> Iterator[tuple[BatchQueue, Gate]]:
    """A queue whose worker is held and whose line is full of rows 0, 1, ..."""
    gate = Gate()
    with BatchQueue(gate, max_pending=pending, on_full=on_full, **options) as queue:
        gate.hold(queue)
        queue.test_futures = [queue.submit(row(n)) for n in range(pending)]
        try:
            yield queue, gate
        finally:
            gate.open.set()


def blocked(thread: threading.Thread, queue: BatchQueue) -> None:
    """Return when the thread's request is held back."""
    while not queue.stats().waiting:
        assert thread.is_alive()


def test_full_raises() -> None:
    with full_queue("raise") as (queue, gate):
        with pytest.raises(QueueFull, match="max_pending=2"):
            queue.submit(row(9))
        gate.open.set()
        assert answers(queue.test_futures) == [0, 2]
        stats = queue.stats()
    assert (stats.rejected, stats.submitted) == (1, 3)


def test_full_drops_the_oldest_of_the_lowest_priority() -> None:
    with full_queue("drop-oldest", pending=3) as (queue, gate):
        zero, one, two = queue.test_futures
        urgent = queue.submit(row(3), priority=1)
        assert isinstance(zero.exception(PATIENCE), QueueFull)
        normal = queue.submit(row(4))
        assert isinstance(one.exception(PATIENCE), QueueFull)
        humble = queue.submit(row(5), priority=-1)
        assert isinstance(humble.exception(PATIENCE), QueueFull)
        gate.open.set()
        assert answers([two, urgent, normal]) == [4, 6, 8]
        assert queue.stats().dropped == 3


def test_full_waits() -> None:
    """submit blocks while the line is full and goes on as soon as there is space."""
    with full_queue("wait") as (queue, gate):
        got: list[Future[Any]] = []
        thread = threading.Thread(target=lambda: got.append(queue.submit(row(5))))
        thread.start()
        blocked(thread, queue)
        assert got == []
        gate.open.set()
        join([thread])
        assert answers([*queue.test_futures, *got]) == [0, 2, 10]


def test_cancelling_makes_space() -> None:
    with full_queue("wait") as (queue, gate):
        got: list[Future[Any]] = []
        thread = threading.Thread(target=lambda: got.append(queue.submit(row(5))))
        thread.start()
        blocked(thread, queue)
        assert queue.test_futures[0].cancel()
        join([thread])
        gate.open.set()
        assert answers([queue.test_futures[1], *got]) == [2, 10]
    assert gate.batches == [[1, 5]]


def test_a_deadline_passes_while_submit_blocks() -> None:
    clock = ManualClock()
    gate = Gate()
    with BatchQueue(gate, max_pending=1, max_batch=1, clock=clock) as queue:
        gate.hold(queue)
        queue.submit(row(0))
        got: list[Future[Any]] = []
        thread = threading.Thread(target=lambda: got.append(queue.submit(row(5), deadline=2.0)))
        thread.start()
        blocked(thread, queue)
        clock.advance(2.0)
        join([thread])
        assert isinstance(got[0].exception(PATIENCE), DeadlineExceeded)
        gate.open.set()


def test_an_interrupted_submit_loses_nothing() -> None:
    """Ctrl-C in a submit that blocks: it raises, its request is withdrawn, the others are served.

    The interrupt is sent when the request is held back; the main thread may not have begun to
    wait yet, which is another moment that must be right.
    """
    with full_queue("wait") as (queue, gate):
        main = threading.main_thread()

        def interrupt() -> None:
            blocked(main, queue)
            signal.pthread_kill(main.ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                queue.submit(row(5))
        finally:
            signal.signal(signal.SIGINT, before)
        join([thread])
        assert queue.stats().waiting == 0
        gate.open.set()
        assert answers(queue.test_futures) == [0, 2]
        queue.flush()
        stats = queue.stats()
    assert stats.cancelled == 1
    assert gate.batches == [[0, 1]]


# Order


def test_priorities_come_first() -> None:
    gate = Gate()
    with BatchQueue(gate, max_batch=1) as queue:
        gate.hold(queue)
        futures = [queue.submit(row(p), priority=p) for p in (0, -1, 2, 0, 1)]
        gate.open.set()
        answers(futures)
    assert gate.batches == [[2], [1], [0], [0], [-1]]


def test_priorities_age() -> None:
    """A step is worth 0.1 s: a request that has waited longer than that overtakes."""
    clock, gate = ManualClock(), Gate()
    with BatchQueue(gate, max_batch=1, clock=clock) as queue:
        gate.hold(queue)
        futures = [queue.submit(row(0))]
        clock.advance(0.25)
        for value, priority in ((1, 1), (2, 2), (3, 3), (4, 0)):
            futures.append(queue.submit(row(value), priority=priority))
        gate.open.set()
        answers(futures)
    assert gate.batches == [[3], [0], [2], [1], [4]]


def test_nothing_starves() -> None:
    """However many urgent requests come, the humblest runs 20 s later at the latest."""
    clock, gate = ManualClock(), Gate()
    with BatchQueue(gate, max_batch=1, clock=clock) as queue:
        gate.hold(queue)
        futures = [queue.submit(row(-7), priority=-100)]
        for second in range(30):
            futures.append(queue.submit(row(second), priority=100))
            clock.advance(1.0)
        gate.open.set()
        answers(futures)
    assert gate.batches.index([-7]) == 20


def test_drop_in_company_keeps_order_in_the_batch() -> None:
    gate = Gate()
    with BatchQueue(gate, max_batch=4) as queue:
        gate.hold(queue)
        futures = [queue.submit(row(n), priority=n % 2) for n in range(4)]
        gate.open.set()
        assert answers(futures) == [0, 2, 4, 6]
    assert gate.batches == [[1, 3, 0, 2]]


# Deadlines and cancellation


def test_a_deadline_is_kept_while_all_workers_are_busy() -> None:
    clock, gate = ManualClock(), Gate()
    with BatchQueue(gate, max_delay=0, clock=clock) as queue:
        gate.hold(queue)
        short, long = queue.submit(row(1), deadline=1.0), queue.submit(row(2), deadline=3.0)
        at_once = queue.submit(row(3), deadline=0)
        assert isinstance(at_once.exception(PATIENCE), DeadlineExceeded)
        clock.advance(1.0)
        with pytest.raises(DeadlineExceeded, match="1 s after submit"):
            short.result(PATIENCE)
        gate.open.set()
        assert answers([long]) == [4]
        clock.advance(5.0)
        stats = queue.stats()
    assert stats.expired == 2
    assert gate.batches == [[2]]


def test_a_request_that_has_begun_has_no_deadline() -> None:
    clock, gate = ManualClock(), Gate()
    with BatchQueue(gate, clock=clock, max_delay=0) as queue:
        gate.open.clear()
        future = queue.submit(row(1), deadline=1.0)
        assert gate.began.acquire(timeout=PATIENCE)
        clock.advance(2.0)
        assert not future.cancel()
        gate.open.set()
        assert answers([future]) == [2]


def test_cancelled_requests_do_not_run() -> None:
    """Those who wait for several futures are told too."""
    gate = Gate()
    with BatchQueue(gate) as queue:
        gate.hold(queue)
        futures = [queue.submit(row(n)) for n in range(4)]
        assert futures[1].cancel()
        assert futures[1].cancel()
        done, _ = wait([futures[1]], PATIENCE)
        assert done == {futures[1]}
        assert queue.stats().pending == 3
        gate.open.set()
        assert answers([futures[0], futures[2], futures[3]]) == [0, 4, 6]
        with pytest.raises(CancelledError):
            futures[1].result()
        assert queue.stats().cancelled == 1
    assert gate.batches == [[0, 2, 3]]


def test_a_future_that_its_holder_fills_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before it runs and while it runs; its companions have their results."""
    gate = Gate()
    with BatchQueue(gate) as queue:
        held = gate.hold(queue)
        futures = [queue.submit(row(n)) for n in range(3)]
        futures[1].set_result("mine")
        held.set_result("mine too")
        gate.open.set()
        queue.flush()
        assert (held.result(0), futures[1].result(0)) == ("mine too", "mine")
        assert answers([futures[0], futures[2]]) == [0, 4]
        assert queue.stats().workers_replaced == 0
    assert gate.batches == [[0, 2]]


# Callbacks


def test_callbacks_that_raise_do_not_kill_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    with BatchQueue(gate) as queue:
        gate.hold(queue)
        futures = [queue.submit(row(n)) for n in range(3)]

        def fail(kind: type[BaseException]) -> Any:
            def callback(future: Future[Any]) -> None:
                raise kind

            return callback

        futures[0].add_done_callback(fail(ValueError))
        futures[1].add_done_callback(fail(SystemExit))
        gate.open.set()
        assert answers(futures) == [0, 2, 4]
        assert answers([queue.submit(row(4))]) == [8]
        assert queue.stats().workers_replaced == 0


def test_callbacks_may_submit_to_a_full_queue() -> None:
    """The only worker cannot wait for space that only it can make."""
    with full_queue("wait") as (queue, gate):
        inner: list[Future[Any]] = []
        for n, future in enumerate(queue.test_futures):
            for m in range(3):
                value = 10 * n + m
                future.add_done_callback(
                    lambda _, value=value: inner.append(queue.submit(row(value)))
                )
        gate.open.set()
        answers(queue.test_futures)
        queue.flush()
        assert sorted(answers(inner)) == [0, 2, 4, 20, 22, 24]


def test_callbacks_may_close_and_flush() -> None:
    gate = Gate()
    queue = BatchQueue(gate, max_batch=1)
    gate.hold(queue)
    first, second = queue.submit(row(1)), queue.submit(row(2))
    first.add_done_callback(lambda _: (queue.flush(), queue.close(drain=False)))
    gate.open.set()
    assert answers([first]) == [2]
    assert isinstance(second.exception(PATIENCE), QueueClosed)
    queue.close()
    assert queue_threads(queue) == []


# Closing


def test_close_drains() -> None:
    gate = Gate()
    queue = BatchQueue(gate, max_batch=2)
    held = gate.hold(queue)
    futures = [queue.submit(row(n)) for n in range(5)]
    closer = threading.Thread(target=queue.close)
    closer.start()
    while not queue._core._closed:
        assert closer.is_alive()
    gate.open.set()
    join([closer])
    assert all(future.done() for future in [held, *futures])
    assert answers(futures) == [0, 2, 4, 6, 8]
    with pytest.raises(QueueClosed, match="the queue is closed"):
        queue.submit(row(1))
    queue.close()
    assert queue_threads(queue) == []


def test_close_without_draining() -> None:
    """What runs has its result, what does not run QueueClosed, a blocked submitter too."""
    with full_queue("wait") as (queue, gate):
        futures = list(queue.test_futures)
        got: list[Future[Any]] = []
        thread = threading.Thread(target=lambda: got.append(queue.submit(row(5), deadline=60.0)))
        thread.start()
        blocked(thread, queue)
        closer = threading.Thread(target=queue.close, kwargs={"drain": False})
        closer.start()
        for future in futures:
            assert isinstance(future.exception(PATIENCE), QueueClosed)
        join([thread])
        assert isinstance(got[0].exception(PATIENCE), QueueClosed)
        gate.open.set()
        join([closer])
        stats = queue.stats()
    assert (stats.closed, stats.completed) == (3, 1)


def test_close_gives_up_after_its_timeout() -> None:
    """A model that hangs: its requests get QueueClosed, and its late answer is dropped."""
    gate = Gate()
    queue = BatchQueue(gate)
    held = gate.hold(queue)
    pending = queue.submit(row(1))
    queue.close(timeout=0.01)
    for future in (held, pending):
        with pytest.raises(QueueClosed, match=r"not done 0.01 s later"):
            future.result(0)
    threads = queue_threads(queue)
    gate.open.set()
    join(threads)
    assert queue.stats().closed == 2
    assert queue.stats().completed == 0


def test_an_error_in_the_block_does_not_drain() -> None:
    gate = Gate()
    queue = BatchQueue(gate)
    held = gate.hold(queue)
    pending = queue.submit(row(1))
    pending.add_done_callback(lambda _: gate.open.set())
    with pytest.raises(KeyError), queue:
        raise KeyError
    assert isinstance(pending.exception(0), QueueClosed)
    assert answers([held]) == [2 * HELD]


def test_a_queue_that_is_dropped_answers_and_ends() -> None:
    """Nobody could add company, so what was submitted runs at once, and the threads end."""
    queue = BatchQueue(Gate(), max_delay=1.0, max_pending=1, clock=ManualClock())
    threads = queue_threads(queue)
    future = queue.submit(row(3), deadline=100.0)
    del queue
    assert answers([future]) == [6]
    join(threads)


@pytest.mark.parametrize("deadline", [None, PATIENCE])  # with one nothing is taken in a hurry
def test_batches_leave_no_memory_behind(deadline: float | None) -> None:
    """CPython keeps 2000 tuples of each size that were made from a generator, which has no length
    to begin with: half a megabyte for batches of this one.
    """
    batches, each = 400, 18
    with BatchQueue(lambda x: x * 2, max_batch=each, max_delay=PATIENCE) as queue:

        def run(rows: int) -> None:
            futures = [queue.submit(row(1, rows), deadline=deadline) for _ in range(each // rows)]
            assert answers(futures) == [2] * len(futures)

        for _ in range(2100):  # until the record of recent times is full
            run(each)
        for _ in range(10):
            run(1)
        before = sys.getallocatedblocks()
        for _ in range(batches):
            run(1)
        # The worker may still have the last batch: seven blocks for each of its requests.
        assert sys.getallocatedblocks() - before < batches / 2


def test_a_queue_in_a_cycle_with_its_function_is_collected() -> None:
    class Server:
        def __init__(self) -> None:
            self.queue = BatchQueue(self.answer)

        def answer(self, x: Tensor) -> Tensor:
            return x * 2

    server = Server()
    threads = queue_threads(server.queue)
    assert answers([server.queue.submit(row(3))]) == [6]
    server.queue.flush()
    alive = weakref.ref(server)
    del server
    while alive() is not None:  # its thread may be about to leave the batch
        gc.collect()
    join(threads)


def test_idle_queue_keeps_no_request() -> None:
    with BatchQueue(Gate()) as queue:
        future = queue.submit(x := row(1))
        result = future.result(PATIENCE)
        seen = [weakref.ref(thing) for thing in (x, result, future)]
        queue.flush()
        assert answers([queue.submit(row(2))]) == [4]  # its thread has left the first batch
        del x, result, future
        assert [thing() for thing in seen] == [None] * 3


@pytest.mark.parametrize("outcome", ["result", "cancelled", "closed"])
def test_a_future_that_is_kept_keeps_its_result_only(outcome: str) -> None:
    """Neither the tensors of the request nor the function."""
    gate = Gate()
    queue = BatchQueue(gate)
    threads = queue_threads(queue)
    gate.hold(queue)
    future = queue.submit(x := row(1))
    seen = [weakref.ref(thing) for thing in (x, gate)]
    if outcome == "cancelled":
        assert future.cancel()
    if outcome == "closed":
        queue.close(drain=False, timeout=0.0)
        assert isinstance(future.exception(PATIENCE), QueueClosed)
    gate.open.set()
    queue.close()
    join(threads)
    assert future.cancelled() if outcome == "cancelled" else future.done()
    del x, gate, queue
    gc.collect()
    assert [thing() for thing in seen] == [None] * 2


# asyncio


def test_asubmit() -> None:
    async def main() -> list[Tensor]:
        with BatchQueue(refuse_negative) as queue:
            results = await asyncio.gather(*(queue.asubmit(row(n)) for n in range(40)))
            with pytest.raises(ValueError, match="1 bad rows"):
                await queue.asubmit(row(-1))
            with pytest.raises(DeadlineExceeded):
                await queue.asubmit(row(1), deadline=0)
            return results

    assert [x[0, 0].item() for x in asyncio.run(main())] == [2.0 * n for n in range(40)]


def test_asubmit_does_not_block_the_loop() -> None:
    """With the line full and the only worker held, the loop goes on."""

    async def main() -> list[float]:
        with full_queue("wait") as (queue, gate):
            tasks = [asyncio.create_task(queue.asubmit(row(n))) for n in range(3)]
            while queue.stats().waiting < 3:
                await asyncio.sleep(0)
            gate.open.set()
            return [(await task)[0, 0].item() for task in tasks]

    assert asyncio.run(main()) == [0, 2, 4]


def test_asubmit_raises_when_full() -> None:
    async def main() -> None:
        with full_queue("raise") as (queue, _), pytest.raises(QueueFull):
            await queue.asubmit(row(1))

    asyncio.run(main())


@pytest.mark.parametrize("held_back", [False, True])
def test_cancelling_the_task_cancels_the_request(held_back: bool) -> None:
    async def main() -> list[list[float]]:
        with full_queue("wait", pending=2 if held_back else 3) as (queue, gate):
            if not held_back:
                queue.test_futures.pop().cancel()
            task = asyncio.create_task(queue.asubmit(row(9)))
            while queue.stats().submitted < (4 if held_back else 5):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while queue.stats().pending > 2 or queue.stats().waiting:
                await asyncio.sleep(0)
            gate.open.set()
            answers(queue.test_futures[:2])
            return gate.batches

    assert asyncio.run(main()) == [[0, 1]]


# Arguments


@pytest.mark.errors
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_batch": 0}, "max_batch is 0; it must be an integer of at least 1"),
        ({"max_batch": 2.0}, "max_batch is 2.0"),
        ({"workers": True}, "workers is True"),
        ({"max_pending": -1}, "max_pending is -1"),
        ({"max_delay": -1}, "max_delay is -1"),
        ({"max_delay": float("nan")}, "max_delay is nan"),
        ({"max_delay": "0"}, "max_delay is '0'"),
        ({"on_full": "drop"}, "on_full is 'drop'; it must be one of"),
        ({"collate": "stack"}, "collate is 'stack'"),
        ({"device": "abacus"}, "device is 'abacus'"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentValueError, match=words):
        BatchQueue(refuse_negative, **options)


@pytest.mark.errors
def test_bad_arguments() -> None:
    with pytest.raises(ArgumentTypeError, match="model_or_fn is a int; it must be callable"):
        BatchQueue(3)
    with BatchQueue(refuse_negative) as queue:
        for priority in (101, 1.5, "high"):
            with pytest.raises(ArgumentValueError, match="it must be an integer from -100 to 100"):
                queue.submit(row(1), priority=priority)
        for deadline in (float("nan"), "soon"):
            with pytest.raises(ArgumentValueError, match=r"deadline is .*; it must be seconds"):
                queue.submit(row(1), deadline=deadline)
        with pytest.raises(ArgumentTypeError, match="x holds no tensor"):
            queue.submit(1)
        assert queue.stats().submitted == 0
    with (
        BatchQueue(nn.Linear(3, 3).eval()) as queue,
        pytest.raises(ArgumentValueError, match="x has a tensor on meta; the queue runs on cpu"),
    ):
        queue.submit(torch.ones(1, 3, device="meta"))


def test_stats_add_up() -> None:
    gate = Gate(refuse_negative)
    with BatchQueue(gate, max_pending=4, on_full="drop-oldest") as queue:
        held = gate.hold(queue)
        futures = [queue.submit(row(n - 2)) for n in range(5)]
        futures[4].cancel()
        queue.submit(row(1), deadline=0).exception(PATIENCE)
        stats = queue.stats()
        assert (stats.running, stats.pending, stats.dropped) == (1, 3, 1)
        assert (stats.cancelled, stats.expired, stats.submitted) == (1, 1, 7)
        gate.open.set()
        queue.flush()
        stats = queue.stats()
        assert held.done()
    assert (stats.completed, stats.failed, stats.running, stats.pending) == (3, 1, 0, 0)
    outcomes = stats.completed + stats.failed + stats.cancelled + stats.expired + stats.dropped
    assert outcomes == stats.submitted
    for times in (stats.queue_seconds, stats.run_seconds):
        assert 0 < times.p50 <= times.p90 <= times.p99
    assert len(stats.busy) == 1
    assert 0 < stats.busy[0] <= 1
    assert str(stats).startswith("7 submitted, 3 completed, 1 failed, 1 cancelled")


# Lanes


class RecordingPool:
    """A pool of one lane on the CPU that writes down what is asked of it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def stream(self) -> Iterator[Lane]:
        self.events.append("enter")
        yield RecordingLane(self.events)
        self.events.append("leave")

    def close(self) -> None:
        self.events.append("close")


class RecordingLane(Lane):
    def __init__(self, events: list[str]) -> None:
        super().__init__(torch.device("cpu"), 1)
        self.events = events

    @contextmanager
    def occupied(self, users: int) -> Iterator[None]:
        yield

    def _record(self) -> Event:
        self.events.append("record")
        return RecordedEvent(self.events)

    def _wait(self, event: Event) -> None:
        self.events.append("wait")


class RecordedEvent(Event):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def synchronize(self) -> None:
        self.events.append("synchronize")


def test_a_result_is_set_after_its_event() -> None:
    """Also of the halves of a batch that failed; a pool that was given stays open."""
    pool = RecordingPool()

    def function(x: Tensor) -> Tensor:
        pool.events.append(f"call {len(x)}")
        return refuse_negative(x)

    with BatchQueue(function, pool=pool, max_delay=1.0, clock=ManualClock()) as queue:
        good, bad = queue.submit(row(1)), queue.submit(row(-1))
        good.add_done_callback(lambda _: pool.events.append("resolved"))
        queue.flush()
    assert answers([good]) == [2]
    assert isinstance(bad.exception(), ValueError)
    ready = ["record", "synchronize"]  # also of what failed: it may still read its requests
    done = ["enter", "call 1", *ready, "leave"]
    assert pool.events == ["enter", "call 2", *ready, *done, "enter", "call 1", *ready, "resolved"]


def test_workers_run_in_the_lanes_of_a_pool() -> None:
    gate = Gate()
    with StreamPool("cpu", size=2) as pool, BatchQueue(gate, workers=2, pool=pool) as queue:
        gate.open.clear()
        futures = [queue.submit(torch.ones(1, n)) for n in (2, 3)]
        for _ in futures:
            assert gate.began.acquire(timeout=PATIENCE)
        assert pool.stats().in_use == 2
        gate.open.set()
        assert answers(futures) == [2, 2]


@pytest.mark.errors
def test_the_pool_and_the_device_must_agree() -> None:
    pool = RecordingPool()
    pool.device = torch.device("meta")
    with pytest.raises(ArgumentValueError, match="device"):
        BatchQueue(refuse_negative, pool=pool, device="cpu")


# Futures


@pytest.mark.parametrize("collate", ["cat", (torch.cat, lambda out, xs: out.split([0]))])
def test_a_request_without_rows_runs_alone(collate: Any) -> None:
    with BatchQueue(lambda x: x * 2, max_delay=0, collate=collate) as queue:
        assert queue.submit(torch.empty(0, 4)).result(PATIENCE).shape == (0, 4)


@pytest.mark.skipif(IS_COMPILED, reason="of what is in Python: make test-in-python")
def test_a_finished_future_is_read_without_a_lock() -> None:
    """A fork may have left its gate to a thread that is not in the child."""
    with BatchQueue(lambda x: x * 2, max_delay=0) as queue:
        future: Any = queue.submit(row(1))
        assert answers([future]) == [2]
        queue.flush()
        assert future._gate.acquire(timeout=PATIENCE)
        assert future.result()[0, 0] == 2


def test_the_state_of_a_future_is_read_without_a_lock() -> None:
    gate = Gate()
    with BatchQueue(gate, max_delay=0) as queue:
        running, pending = gate.hold(queue), queue.submit(row(1))
        pending.cancel()
        read: list[tuple[bool, ...]] = []

        def ask() -> None:
            read.extend((f.running(), f.done(), f.cancelled()) for f in (running, pending))

        with running._condition, pending._condition:
            asker = threading.Thread(target=ask)
            asker.start()
            join([asker])
        gate.open.set()
    assert read == [(True, False, False), (False, True, True)]


def test_a_future_that_is_only_asked_for_its_result_is_bare() -> None:
    with BatchQueue(lambda x: x * 2, max_delay=0) as queue:
        future = queue.submit(row(1))
        assert future.result()[0, 0] == 2
        queue.flush()
        assert future.done()
        assert "_condition" not in vars(future)


@pytest.mark.parametrize(
    "ask", [lambda f: wait([f], PATIENCE).done, lambda f: set(as_completed([f]))]
)
def test_a_future_is_not_filled_while_others_look_at_it(
    ask: Callable[[Future[Any]], set[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """concurrent.futures looks at a state twice inside of a future's lock, and relies on it."""
    gate, seen = Gate(), []
    install = _base._create_and_install_waiters

    def late(futures: Any, when: Any) -> Any:
        gate.open.set()
        time.sleep(0.05)  # the worker comes to fill it
        seen.append(future.done())
        return install(futures, when)

    with BatchQueue(gate, max_delay=0) as queue:
        future = gate.hold(queue)
        monkeypatch.setattr(_base, "_create_and_install_waiters", late)
        assert ask(future) == {future}
    assert seen == [False]


@pytest.mark.parametrize("by", ["worker", "canceller"])
def test_every_callback_is_called_whatever_another_raises(by: str) -> None:
    called: list[int] = []

    def leave(_: Future[Any]) -> None:
        raise SystemExit

    gate = Gate()
    with BatchQueue(gate, max_delay=0) as queue:
        gate.hold(queue)
        future = queue.submit(row(1))
        for callback in (leave, lambda _: called.append(1), leave, lambda _: called.append(2)):
            future.add_done_callback(callback)
        if by == "canceller":
            assert future.cancel()
            assert queue.stats().pending == 0
        gate.open.set()
        wait([future], PATIENCE)
        queue.flush()
    assert called == [1, 2]


def test_what_a_signal_handler_raises_ends_a_wait() -> None:
    """Be it RuntimeError, as of handlers that find a process dead."""
    gate = Gate()

    def handler(*_: object) -> None:
        raise RuntimeError("a process is gone")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with BatchQueue(gate, max_delay=0) as queue:
            future = gate.hold(queue)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(RuntimeError, match="a process is gone"):
                future.result()
            gate.open.set()
            assert answers([future]) == [2 * HELD]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_future_that_is_cancelled_while_the_process_forks() -> None:
    """By a thread that has no time left to tell those who wait: the child does."""
    request = Request(None, None, 0, None)
    request._claim(_base.CANCELLED)
    Future.cancel(request)
    request.orphan(ForkedProcessError("of the parent"))
    assert wait([request], 0).done == {request}
    with pytest.raises(CancelledError):
        request.result()


def test_a_cancelled_future_is_done_for_those_who_wait() -> None:
    """At once, also where it is not the next to run."""
    gate = Gate()
    with BatchQueue(gate, max_delay=0) as queue:
        gate.hold(queue)
        future = queue.submit(row(1))
        assert future.cancel()
        assert future.cancel()
        assert wait([future], PATIENCE).done == {future}
        gate.open.set()
        queue.flush()
        assert queue.stats().cancelled == 1


def test_an_exception_that_was_raised_keeps_no_future() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    with BatchQueue(fail, max_delay=0) as queue:
        future = queue.submit(row(1))
        with pytest.raises(ZeroDivisionError):
            future.result()
        queue.flush()
        kept = weakref.ref(future)
        gc.collect()
        gc.disable()
        try:
            del future
            assert kept() is None
        finally:
            gc.enable()


def test_a_future_has_what_concurrent_futures_gives_it() -> None:
    """A request makes these itself: another Python may name them otherwise."""
    made = {"_condition", "_waiters", "_done_callbacks"}
    assert set(vars(Future())) == made | {"_state", "_result", "_exception"}


def test_several_threads_wait_for_one_result() -> None:
    gate = Gate()
    with BatchQueue(gate, max_delay=0) as queue:
        held = gate.hold(queue)
        future = queue.submit(row(7))
        found: list[float] = []
        waits = [
            lambda: future.result(),
            lambda: future.result(PATIENCE),
            lambda: wait([future], PATIENCE).done.pop().result(),
            lambda: next(as_completed([future], PATIENCE)).result(),
            lambda: asyncio.run(awaited(future)),
        ]
        threads = [
            threading.Thread(target=lambda ask=ask: found.append(ask()[0, 0].item()))
            for ask in 3 * waits
        ]
        for thread in threads:
            thread.start()
        gate.open.set()
        join(threads)
        assert answers([held]) == [2 * HELD]
    assert found == [14.0] * 15


async def awaited(future: Future[Any]) -> Any:
    return await asyncio.wrap_future(future)


@pytest.mark.parametrize("outcome", ["result", "error", "cancelled"])
def test_who_waits_goes_on_before_callbacks_are_called(outcome: str) -> None:
    """A callback may wait for the thread that waits for the result."""

    def function(x: Tensor) -> Tensor:
        if outcome == "error":
            raise ZeroDivisionError
        return x * 2

    gate = Gate(function)
    with BatchQueue(gate, max_delay=0) as queue:
        gate.hold(queue)
        future = queue.submit(row(1))
        went_on, seen = threading.Event(), []

        def ask() -> None:
            with (
                pytest.raises((CancelledError, ZeroDivisionError))
                if outcome != "result"
                else (nullcontext())
            ):
                assert future.result()[0, 0].item() == 2
            went_on.set()

        thread = threading.Thread(target=ask)
        thread.start()
        future.add_done_callback(lambda _: seen.append(went_on.wait(PATIENCE)))
        if outcome == "cancelled":
            assert future.cancel()
        gate.open.set()
        join([thread])
        queue.flush()
        assert seen == [True]


def test_a_future_that_its_holder_fills() -> None:
    """As with every future that is another's: the queue's answer is dropped, nobody hangs."""
    gate = Gate()
    with BatchQueue(gate, max_delay=0) as queue:
        gate.hold(queue)
        before, meanwhile = queue.submit(row(1)), queue.submit(row(2))
        before.set_result("mine")
        assert before.result() == "mine"
        gate.open.set()
        assert answers([meanwhile]) == [4]
        assert before.result() == "mine"


# CUDA


def slow_square(x: Tensor) -> Tensor:
    """The square of each row, after work that keeps the device busy for a while."""
    torch.cuda._sleep(50_000_000)
    return x * x


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("workers", [1, 3])
def test_cuda_results_are_ready_when_the_future_is(workers: int) -> None:
    """Read on another stream that waits for nothing."""
    with BatchQueue(slow_square, workers=workers, max_batch=4) as queue:
        requests = [torch.full((1, 1024), float(n), device="cuda") for n in range(16)]
        futures = [queue.submit(x) for x in requests]
        reader = torch.cuda.Stream()
        for n, future in enumerate(futures):
            result = future.result(PATIENCE)
            with torch.cuda.stream(reader):
                copy = result.clone()
            reader.synchronize()
            assert copy.eq(n * n).all()


@pytest.mark.cuda
@needs_cuda
def test_cuda_inputs_may_still_be_computed() -> None:
    """The submitter's stream has not finished when it submits, and drops its tensor at once."""
    with BatchQueue(lambda x: x + 1, max_delay=0) as queue:
        side = torch.cuda.Stream()
        futures = []
        with torch.cuda.stream(side):
            for n in range(20):
                torch.cuda._sleep(5_000_000)
                futures.append(queue.submit(torch.full((2, 4096), float(n), device="cuda")))
        for n, future in enumerate(futures):
            assert future.result(PATIENCE).eq(n + 1).all()


@pytest.mark.cuda
@needs_cuda
def test_cuda_results_may_be_dropped_while_in_use() -> None:
    """The submitter's stream still reads a result whose last reference is gone."""
    with BatchQueue(lambda x: x * 2, max_delay=0) as queue:
        sums = []
        for n in range(30):
            result = queue.submit(torch.full((1, 1 << 20), float(n), device="cuda")).result(
                PATIENCE
            )
            torch.cuda._sleep(5_000_000)
            sums.append(result.mean())
            del result
        assert [x.item() for x in sums] == [2.0 * n for n in range(30)]


@pytest.mark.cuda
@needs_cuda
def test_cuda_results_are_lent_to_every_stream_that_asked() -> None:
    """Two streams in each batch, of which the second still reads while others are answered; what
    they submit lies on the CPU, so that no batch waits for them.
    """
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    means = []
    with BatchQueue(lambda x: x * 2, device="cuda", max_batch=2, max_delay=60) as queue:
        for n in range(20):
            futures = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    futures.append(queue.submit(torch.full((1, 1 << 20), float(n))))
            for stream in streams:
                result = futures.pop(0).result(PATIENCE)
                with torch.cuda.stream(stream):
                    if stream is streams[1]:
                        torch.cuda._sleep(20_000_000)
                    means.append(result.mean())
                del result
    torch.cuda.synchronize()
    assert [x.item() for x in means] == [2.0 * (n // 2) for n in range(40)]


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("is_busy", [True, False])
def test_cuda_results_of_one_stream(is_busy: bool) -> None:
    """They are read while others are answered, on a stream that rests meanwhile or not."""
    stream = torch.cuda.Stream()
    means = []
    with (
        BatchQueue(lambda x: x * 2, device="cuda", max_batch=2, max_delay=60) as queue,
        torch.cuda.stream(stream),
    ):
        for n in range(40):
            futures = [queue.submit(torch.full((1, 1 << 20), n + k / 2)) for k in range(2)]
            for future in futures:
                result = future.result(PATIENCE)
                if is_busy:
                    torch.cuda._sleep(20_000_000)
                means.append(result.mean())
                del result
    torch.cuda.synchronize()
    assert [x.item() for x in means] == [2.0 * n + k for n in range(40) for k in range(2)]


@pytest.mark.cuda
@needs_cuda
def test_cuda_results_are_not_written_where_their_reader_still_reads() -> None:
    """Memory that it has dropped, and that what it has queued will still use."""
    stream = torch.cuda.Stream()
    means = []
    with BatchQueue(lambda x: x * 2, device="cuda", max_delay=0) as queue:
        with torch.cuda.stream(stream):
            torch.full((1, 1 << 20), 1.0, device="cuda")  # memory of this stream's
        queue.submit(torch.ones(1, 1 << 20)).result(PATIENCE)
        torch.cuda.synchronize()
        for n in range(20):
            with torch.cuda.stream(stream):
                x = torch.full((1, 1 << 20), 100.0 + n, device="cuda")
                torch.cuda._sleep(40_000_000)
                means.append(x.mean())
                del x
                result = queue.submit(torch.full((1, 1 << 20), 1.0)).result(PATIENCE)
                means.append(result.mean())
                del result
    torch.cuda.synchronize()
    assert [x.item() for x in means] == [v for n in range(20) for v in (100.0 + n, 2.0)]


@pytest.mark.cuda
@needs_cuda
def test_cuda_results_lie_in_memory_of_the_stream_that_asked() -> None:
    """So dropping one gives it back there at once, with nothing to be waited for."""
    stream = torch.cuda.Stream()
    queue = BatchQueue(lambda x: x * 2, device="cuda", max_delay=0)
    with queue, torch.cuda.stream(stream):
        for _ in range(3):
            stream.synchronize()
            result = queue.submit(torch.ones(1, 1 << 20)).result(PATIENCE)
            where, alive = result.data_ptr(), weakref.ref(result)
            del result
            end = time.monotonic() + PATIENCE
            while alive() is not None:  # the worker may be about to leave the batch
                assert time.monotonic() < end
                time.sleep(0.001)
            others = [torch.empty(1, 1 << 20, device="cuda") for _ in range(8)]
            assert where in [each.data_ptr() for each in others]


@pytest.mark.cuda
@needs_cuda
def test_cuda_moves_batches_to_the_device() -> None:
    model = nn.Linear(3, 2, device="cuda").eval()
    with BatchQueue(model, device="cuda") as queue:
        x = torch.randn(4, 3)
        result = queue.submit(x).result(PATIENCE)
        assert result.device.type == "cuda"
        assert torch.equal(result, model(x.cuda()))


@pytest.mark.cuda
@needs_cuda
def test_cuda_workers_have_lanes_of_their_own() -> None:
    streams: list[int] = []
    together = threading.Barrier(3)

    def function(x: Tensor) -> Tensor:
        streams.append(torch.cuda.current_stream().cuda_stream)
        together.wait(PATIENCE)
        return x * 2

    with BatchQueue(function, workers=3) as queue:
        futures = [queue.submit(torch.ones(1, n, device="cuda")) for n in (1, 2, 3)]
        assert answers(futures) == [2, 2, 2]
    assert len(set(streams)) == 3
    assert 0 not in streams
    with StreamPool("cuda", size=3) as pool, BatchQueue(function, workers=3, pool=pool) as queue:
        futures = [queue.submit(torch.ones(1, n, device="cuda")) for n in (1, 2, 3)]
        assert answers(futures) == [2, 2, 2]
        assert pool.stats().in_use == 3


@pytest.mark.cuda
@needs_cuda
def test_cuda_out_of_memory_halves() -> None:
    """Each row needs a fifth of what is free: eight rows do not fit, four do."""
    free, _ = torch.cuda.mem_get_info()
    share = free // 5

    def function(x: Tensor) -> Tensor:
        scratch = torch.empty(len(x) * share, dtype=torch.uint8, device="cuda")
        return x * 2 + scratch[:1] * 0

    with BatchQueue(function, max_batch=8, max_delay=1.0, clock=ManualClock()) as queue:
        futures = [queue.submit(torch.full((1, 4), float(n), device="cuda")) for n in range(8)]
        queue.flush()
        assert answers(futures) == [2.0 * n for n in range(8)]
        stats = queue.stats()
    torch.cuda.empty_cache()
    assert (stats.failed, stats.oom_retries, stats.limit) == (0, 1, 4)


@pytest.mark.cuda
@needs_cuda
def test_cuda_out_of_memory_in_one_request() -> None:
    def function(x: Tensor) -> Tensor:
        need = 1 << (48 if (x < 0).any() else 2)
        return x * 2 + torch.empty(need, dtype=torch.uint8, device="cuda")[:1] * 0

    with BatchQueue(function, max_delay=1.0, clock=ManualClock()) as queue:
        futures = [
            queue.submit(torch.full((1, 4), -1.0 if n == 3 else float(n), device="cuda"))
            for n in range(8)
        ]
        queue.flush()
        assert isinstance(futures.pop(3).exception(), torch.OutOfMemoryError)
        assert answers(futures) == [0, 2, 4, 8, 10, 12, 14]
