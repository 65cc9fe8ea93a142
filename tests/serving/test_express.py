"""What every request passes through, compiled and in Python: the same, and neither to be broken."""

from __future__ import annotations

import gc
import importlib.util
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from concurrent.futures._base import CANCELLED, FINISHED, PENDING, RUNNING
from types import ModuleType
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from orchard.errors import ArgumentTypeError, QueueFull
from orchard.serving import express, queue_core, tickets
from orchard.serving.batch_queue import BatchQueue
from orchard.serving.express import IS_COMPILED
from orchard.serving.lanes import Lane
from orchard.serving.requests import Request
from orchard.serving.stream_pool import StreamPool
from orchard.serving.tickets import Outcome, Place
from orchard.testing.serving_load import closed_loop, triple_and_one

PATIENCE = 60.0
compiled = pytest.mark.skipif(not IS_COMPILED, reason="the extension was not built, or is left out")


def _both() -> list[Any]:
    found: list[Any] = [pytest.param(tickets, id="python")]
    if IS_COMPILED:
        from orchard.serving import _express

        found.append(pytest.param(_express, id="compiled"))
    return found


@pytest.fixture(params=_both())
def halves(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


class Pending:
    def __init__(self, count: int = 0) -> None:
        self.count = count


def test_what_was_built_is_used() -> None:
    assert IS_COMPILED is (importlib.util.find_spec("orchard.serving._express") is not None)


# Tickets


def ticket(halves: ModuleType, rows: int = 1, group: Any = "a", priority: int = 0) -> Any:
    class Both(halves.Ticket, Future):  # type: ignore[misc]
        def _slow_result(self, timeout: float | None) -> Any:
            return "slow", timeout

    return Both(halves.Parcel((torch.ones(rows),), None, rows, group), "runner", priority, "owner")


def test_a_new_ticket(halves: ModuleType) -> None:
    it = ticket(halves, rows=3, priority=-5)
    assert (it.parcel.rows, it.runner, it.priority, it._owner) == (3, "runner", -5, "owner")
    assert (it._state, it._result, it._exception, it._claimed) == (PENDING, None, None, None)
    assert (it.number, it.arrival, it.deadline, it.place) == (0, 0.0, None, Place.ARRIVED)
    assert (it.outcome, it.admission, it.wave) == (None, None, None)
    assert (it._is_open, it._is_awaited) == (False, False)


def test_what_is_asked_for_first_is_granted(halves: ModuleType) -> None:
    run, cancelled, filled = ticket(halves), ticket(halves), ticket(halves)
    assert run.begin()
    assert run.begin()
    assert not run._claim(CANCELLED)
    assert run._state == RUNNING
    assert cancelled._claim(CANCELLED)
    assert not cancelled.begin()
    assert cancelled._state == PENDING
    filled._state = FINISHED
    assert not filled.begin()


def test_a_settled_ticket_keeps_neither_tensors_nor_model(halves: ModuleType) -> None:
    it = ticket(halves)
    x = ref(it.parcel.leaves[0])
    it.settle(Outcome(1))
    assert (it.place, it.outcome) == (Place.SETTLED, Outcome(1))
    assert x() is None
    for name in ("parcel", "runner"):
        with pytest.raises(AttributeError):
            getattr(it, name)


def test_a_plain_announcement(halves: ModuleType) -> None:
    it = ticket(halves)
    assert not it.announce_plainly(None)
    it.begin()
    it.settle(Outcome(7))
    assert it.announce_plainly(None)
    assert (it._state, it._result, it.outcome, it._is_open) == (FINISHED, 7, None, True)
    assert it.result() == it.result(None) == it.result(timeout=None) == 7
    assert not it.announce_plainly(None)


def test_who_needs_more_is_not_announced_plainly(halves: ModuleType) -> None:
    with_condition, cancelled = ticket(halves), ticket(halves)
    with_condition.begin()
    with_condition.settle(Outcome(1))
    with_condition._made("_condition", threading.Condition())
    assert not with_condition.announce_plainly(None)
    assert with_condition.outcome == Outcome(1)
    cancelled.settle(None)
    assert not cancelled.announce_plainly(None)


def test_errors_and_timeouts_go_the_usual_way(halves: ModuleType) -> None:
    it = ticket(halves)
    assert it.result(0.5) == ("slow", 0.5)
    assert it.result(timeout=0.25) == ("slow", 0.25)
    it.begin()
    it.settle(Outcome(error=KeyError("x")))
    assert it.announce_plainly(None)
    assert it.result() == ("slow", None)


def test_what_is_made_once_stays(halves: ModuleType) -> None:
    it = ticket(halves)
    assert it._peek("_waiters") is None
    first: list[int] = []
    assert it._made("_waiters", first) is first
    assert it._made("_waiters", [1]) is first
    assert it._peek("_waiters") is first
    it.open()
    it._begin_again()
    assert it._peek("_waiters") is None
    assert not it._is_open


def test_wrong_arguments_of_result(halves: ModuleType) -> None:
    it = ticket(halves)
    for args, named in (((1, 2), {}), ((), {"patience": 1}), ((1,), {"timeout": 1})):
        with pytest.raises(TypeError):
            it.result(*args, **named)


def test_a_ticket_and_its_result_are_collected_together(halves: ModuleType) -> None:
    class Holder:
        it: Any

    gone = []
    for where in ("_result", "admission", "_condition"):
        it, holder = ticket(halves), Holder()
        holder.it = it
        setattr(it, where, holder)
        gone.append(ref(holder))
        del it, holder
    gc.collect()
    assert [each() for each in gone] == [None] * 3


# A line of sleepers


def test_a_line_that_is_left_opens_its_gates(halves: ModuleType) -> None:
    line = halves.Sleepers()
    its = [ticket(halves) for _ in range(200)]
    for it in its:
        line.add(it)
    assert (len(line), line.left, line.wait(0.0)) == (200, 200, False)
    line.pass_on()
    assert (line.left, [it._is_open for it in its[:2]]) == (199, [True, False])
    line.end()
    assert (len(line), line.left) == (200, 0)
    assert all(it._is_open for it in its)
    assert not line.wait(0.001)
    line.pass_on()
    line.pass_on()
    assert line.wait(0.0)
    assert not line.wait(0.0)


# The desk


@pytest.fixture
def desk() -> Any:
    found: Any = express.Desk()
    found._lock = threading.RLock()
    found._is_inside = found._lock._is_owned
    found._work = threading.Condition(found._lock)
    found._now = time.monotonic
    found._pending, found._waiting = Pending(), OrderedDict()
    found._arrivals, found._unsettled = deque(), OrderedDict()
    found._arrived_rows = found._last_number = 0
    found._alarm = sys.maxsize
    found._max_pending = 100
    found._closed = found._forked = False
    return found


def arrived(desk: Any, *rows: int, moment: float = 5.0, **kind: Any) -> list[Any]:
    found = []
    for count in rows:
        it = ticket(sys.modules[express.Ticket.__module__], rows=count, **kind)
        it.arrival = moment
        desk._arrivals.append(it)
        desk._arrived_rows += count or 1
        found.append(it)
    return found


@compiled
@pytest.mark.parametrize(
    ("rows", "limit", "now", "count"),
    [
        ([1, 1, 1], 3, 5.0, 3),  # full
        ([1, 1, 1, 1], 3, 5.0, 3),  # more than full
        ([1, 1], 3, 5.5, 2),  # due
        ([1, 1], 3, 5.4, None),  # neither
        ([2, 2], 3, 5.0, 1),  # the second does not fit
        ([7, 1], 3, 5.0, 1),  # larger than any batch
        ([0, 0, 3], 3, 5.0, 3),  # without rows
        ([0], 3, 5.6, 1),
        ([], 3, 9.0, None),
        ([1] * 20, 4, 5.0, None),  # too many to look at
    ],
)
def test_a_hurried_batch(
    rows: list[int], limit: int, now: float, count: int | None, desk: Any
) -> None:
    its = arrived(desk, *rows)
    taken = desk.take_hurried(limit, now, 0.5)
    if count is not None:
        parcels = [it.parcel for it in its[:count]]
        assert taken == (tuple(its[:count]), parcels, [now - 5.0] * count)
        assert list(desk._unsettled.items()) == list(enumerate(its[:count], 1))
        assert [it.number for it in its[:count]] == list(range(1, count + 1))
        assert {(it._state, it.place, it._claimed) for it in its[:count]} == {
            (RUNNING, Place.RUNNING, RUNNING)
        }
        assert desk._last_number == count
    else:
        count = 0
        assert taken == (5.5 if rows and len(rows) <= 4 * limit else None)
        assert {it._state for it in its} <= {PENDING}
        assert not desk._unsettled
    assert list(desk._arrivals) == its[count:]
    assert desk._arrived_rows == sum(row or 1 for row in rows[count:])


@compiled
def test_what_is_not_plain_is_not_hurried(desk: Any) -> None:
    def cancel(its: list[Any]) -> None:
        its[1]._claim(CANCELLED)

    def register(its: list[Any]) -> None:
        its[1].number = 9

    def hold_back(its: list[Any]) -> None:
        its[1].admission = threading.Event()

    def another_group(its: list[Any]) -> None:
        arrived(desk, 1, group="b")

    def another_priority(its: list[Any]) -> None:
        arrived(desk, 1, priority=1)

    def somebody_waits(its: list[Any]) -> None:
        desk._waiting[1] = its[0]

    def somebody_pends(its: list[Any]) -> None:
        desk._pending.count = 1

    kept = desk._pending
    for spoil in (
        cancel,
        register,
        hold_back,
        another_group,
        another_priority,
        somebody_waits,
        somebody_pends,
    ):
        desk._arrivals.clear()
        desk._waiting.clear()
        kept.count = 0
        its = arrived(desk, 1, 1, 1)
        assert desk.arrivals_are("a", 0, 3)
        spoil(its)
        assert desk.take_hurried(3, 5.0, 0.5) is None, spoil
        assert its[0]._state == PENDING
        is_elsewhere = spoil in (somebody_waits, somebody_pends)
        assert desk.arrivals_are("a", 0, 3) is is_elsewhere, spoil
    assert not desk._unsettled
    arrived(desk, *[1] * 20)
    assert desk.arrivals_are("a", 0, 5)
    assert not desk.arrivals_are("a", 0, 4)  # too many for that to be found out each time


def test_a_batch_is_settled_announced_and_forgotten(halves: ModuleType) -> None:
    its = [ticket(halves) for _ in range(4)]
    for number, it in enumerate(its[:3], 1):
        it.begin()
        it.number, it.place = number, Place.RUNNING
    its[3].number = 4
    error = KeyError("x")
    outcomes = [Outcome(1), Outcome(error=error), Outcome(3), Outcome(4)]
    settled: list[Any] = []
    assert halves.settle_each(tuple(its), outcomes, settled) == 2
    assert settled == its[:3]
    unsettled = OrderedDict(enumerate(its, 1))
    others = halves.announce_each(settled, None)
    for it in others:
        assert it.announce_plainly(None)
    assert [it._result for it in its] == [1, None, 3, None]
    assert [it._exception for it in its] == [None, error, None, None]
    assert [it._is_open for it in its] == [True, True, True, False]
    halves.forget_each(settled, unsettled)
    halves.forget_each(settled, unsettled)
    assert list(unsettled) == [4]
    with pytest.raises(ValueError, match=r"argument|outcomes"):
        halves.settle_each(tuple(its), outcomes[:3], [])


@compiled
def test_what_is_not_a_ticket_is_refused() -> None:
    module: Any = sys.modules[express.Ticket.__module__]
    desk = module.Desk()
    line = module.Sleepers()
    it = ticket(module)
    x = torch.ones(1)
    calls: list[tuple[type[Exception], Any]] = [
        (TypeError, lambda: module.Ticket(1)),
        (TypeError, lambda: module.Ticket(None, None, "first", None)),
        (TypeError, lambda: module.Parcel([1], None, 1, None)),
        (TypeError, lambda: module.Parcel((1,), None, "one", None)),
        (TypeError, lambda: line.add(3)),
        (TypeError, lambda: line.wait("long")),
        (TypeError, lambda: it.announce_plainly(3)),
        (AttributeError, lambda: it._made("_state", 1)),
        (AttributeError, lambda: it._peek(5)),
        (TypeError, lambda: module.settle_each((1,), [Outcome(1)], [])),
        (TypeError, lambda: module.settle_each([it], [Outcome(1)], [])),
        (TypeError, lambda: module.announce_each([1], None)),
        (TypeError, lambda: module.announce_each([it], 3)),
        (TypeError, lambda: module.forget_each([None], {})),
        (RuntimeError, lambda: desk.take_hurried(1, 0.0, 0.0)),
        (RuntimeError, lambda: desk.arrivals_are(None, 0, 1)),
        (TypeError, lambda: module.Entrance(3, None, Request, None)),
        (TypeError, lambda: module.Entrance(desk, None, int, None)),
        (RuntimeError, lambda: module.Entrance(desk, None, Request, None).submit(x, [])),
        (RuntimeError, lambda: module.Entrance.__new__(module.Entrance).submit(x, [])),
        (TypeError, lambda: module.Entrance(desk, None, Request, None).submit(x)),
        (TypeError, lambda: module.Ticket(None, None, 0, None, colour="red")),
    ]
    for expected, call in calls:
        with pytest.raises(expected):
            call()


# In a queue


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each batch that was taken was a hurried one."""
    found: list[bool] = []
    take, hurried = queue_core.QueueCore._take, queue_core.QueueCore._take_hurried
    here = threading.local()

    def look(core: Any, worker: Any) -> Any:
        here.load = got = hurried(core, worker)
        return got

    def look_around(core: Any, worker: Any) -> Any:
        got = take(core, worker)
        if got is not None:
            found.append(got is here.load)
        return got

    monkeypatch.setattr(queue_core.QueueCore, "_take_hurried", look)
    monkeypatch.setattr(queue_core.QueueCore, "_take", look_around)
    return found


@compiled
@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_taken_in_a_hurry_again_after_something_else(
    takes: list[bool], workers: int
) -> None:
    """Twice as many clients as a batch has rows: some always wait."""
    with BatchQueue(triple_and_one, max_batch=4, max_delay=0.05, workers=workers) as queue:
        closed_loop(queue, 8, 50)
        assert sum(takes) > 0.9 * len(takes)
        for disturb in (
            queue.flush,
            queue.stats,
            lambda: queue.submit(torch.ones(1, 2)).cancel(),
            lambda: queue.submit(torch.ones(1, 2), deadline=50.0).result(),
            lambda: queue.submit(torch.ones(1, 2), priority=3).result(),
            lambda: queue.submit(torch.ones(1, 3)).result(),
        ):
            others = threading.Thread(target=closed_loop, args=(queue, 8, 100), daemon=True)
            others.start()
            while len(takes) < 20:
                time.sleep(0.001)
            disturb()
            others.join(PATIENCE)
            assert not others.is_alive()
            takes.clear()
            closed_loop(queue, 8, 50)
            assert sum(takes) > 0.9 * len(takes)


@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_tensors_of_several_kinds(kinds: int) -> None:
    """Each learns anew after a while what the others have made it forget."""
    shapes = [(1, 2), (2, 2), (1, 3)][:kinds]
    with BatchQueue(triple_and_one, max_batch=8, max_delay=0) as queue:
        for turn in range(60):
            x = torch.full(shapes[turn // 20 % kinds], float(turn))
            assert torch.equal(queue.submit(x).result(PATIENCE), x * 3 + 1)
            x = torch.full(shapes[turn % kinds], float(turn), dtype=torch.float64)
            got = queue.submit(x).result(PATIENCE)
            assert got.dtype == torch.float64
            assert torch.equal(got, x * 3 + 1)


class Marked(Tensor):
    """A class of tensors of somebody's own."""


def test_what_only_looks_like_the_tensors_before() -> None:
    """Of the same shape and dtype, but not to be treated alike."""
    with BatchQueue(lambda x: x * 2, max_batch=8, max_delay=0) as queue:
        for _ in range(40):
            assert torch.equal(
                queue.submit(torch.ones(1, 2)).result(PATIENCE), torch.full((1, 2), 2.0)
            )
        for x in (torch.ones(1, 2).to_sparse(), [torch.ones(1, 2).to_sparse()]):
            with pytest.raises(ArgumentTypeError, match="strided"):
                queue.submit(x)
        marked = torch.ones(1, 2).as_subclass(Marked)
        assert torch.equal(queue.submit(marked).result(PATIENCE), torch.full((1, 2), 2.0))
        parameter = torch.nn.Parameter(torch.ones(1, 2))
        assert not queue.submit(parameter).result(PATIENCE).requires_grad
        for no_tensor in (None, 3, "x", Tensor, object()):
            with pytest.raises(ArgumentTypeError):
                queue.submit(no_tensor)
        for priority in (0.0, None, "0"):
            with pytest.raises(ValueError, match="priority"):
                queue.submit(torch.ones(1, 2), priority=priority)  # type: ignore[arg-type]
        scalar = torch.ones(())
        with pytest.raises(ValueError, match="first dimension"):
            queue.submit(scalar)
        assert queue.stats().submitted == 42


@pytest.mark.parametrize("on_full", ["raise", "drop-oldest", "wait"])
def test_a_full_queue_is_full_for_all(on_full: Any) -> None:
    opened, began = threading.Event(), threading.Event()

    def function(x: Tensor) -> Tensor:
        began.set()
        assert opened.wait(PATIENCE)
        return x * 2

    with BatchQueue(function, max_batch=2, max_delay=0, max_pending=3, on_full=on_full) as queue:
        running = queue.submit(torch.ones(1, 1))
        assert began.wait(PATIENCE)
        pending = [queue.submit(torch.full((1, 1), float(n))) for n in range(3)]
        others: list[Any] = []
        if on_full == "raise":
            with pytest.raises(QueueFull):
                queue.submit(torch.ones(1, 1))
        elif on_full == "drop-oldest":
            others.append(queue.submit(torch.full((1, 1), 3.0)))
            with pytest.raises(QueueFull):
                pending.pop(0).result(PATIENCE)
        else:
            late = threading.Thread(
                target=lambda: others.append(queue.submit(torch.ones(1, 1) * 3))
            )
            late.start()
            while queue.stats().waiting < 1:
                time.sleep(0.001)
            opened.set()
            late.join(PATIENCE)
        opened.set()
        answers = [future.result(PATIENCE).item() for future in [running, *pending, *others]]
        expected = {"raise": [0, 2, 4], "drop-oldest": [2, 4, 6], "wait": [0, 2, 4, 6]}[on_full]
        assert answers == [2, *expected]


def _held() -> list[int]:
    """How often what all requests refer to is referred to."""
    shared = (
        Place.ARRIVED,
        Place.RUNNING,
        Place.SETTLED,
        PENDING,
        RUNNING,
        FINISHED,
        torch.float32,
    )
    return [sys.getrefcount(each) for each in (*shared, torch.strided, Request, express.Parcel)]


def test_nothing_is_kept_of_requests_that_are_done() -> None:
    """Neither they, nor what they refer to, whatever became of them."""
    x = torch.ones(1, 2)
    function = torch.nn.Identity().eval()

    def some(queue: BatchQueue) -> None:
        closed_loop_of_one = [queue.submit(x) for _ in range(20)]
        closed_loop_of_one[7].cancel()
        for future in closed_loop_of_one:
            if not future.cancelled():
                future.result(PATIENCE)
        queue.submit(torch.ones(2, 2)).result(PATIENCE)
        queue.submit(x, priority=1).result(PATIENCE)
        with pytest.raises(ArgumentTypeError):
            queue.submit(3)
        future = queue.submit(x)
        future.add_done_callback(lambda _: None)
        future.result(PATIENCE)
        threads = [threading.Thread(target=lambda: queue.submit(x).result()) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        queue.flush()

    with BatchQueue(function, max_batch=4, max_delay=0.001) as queue:
        for _ in range(3):
            some(queue)
        gc.collect()
        before = _held()
        mine = sys.getrefcount(x), sys.getrefcount(queue._runner), sys.getrefcount(queue._core)
        for _ in range(40):
            some(queue)
        gc.collect()
        # A worker that has just announced may have its last batch in hand.
        assert max(after - had for after, had in zip(_held(), before, strict=True)) < 8
        after = sys.getrefcount(x), sys.getrefcount(queue._runner), sys.getrefcount(queue._core)
        assert max(now - had for now, had in zip(after, mine, strict=True)) < 4
        left = [each for each in gc.get_objects() if type(each) in (Request, express.Parcel)]
        assert len(left) < 8
    assert torch.equal(x, torch.ones(1, 2))


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals are sent to threads")
def test_ctrl_c_in_a_wait_for_a_result() -> None:
    """It comes at once, the request goes on, and its result can be asked for again."""
    opened = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def function(x: Tensor) -> Tensor:
        assert opened.wait(PATIENCE)
        return x * 2

    with BatchQueue(function, max_delay=0) as queue:
        future = queue.submit(torch.ones(1, 1))
        sent = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
        before = time.monotonic()
        # A shell's background job ignores it.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            sent.start()
            with pytest.raises(KeyboardInterrupt):
                future.result()
        finally:
            signal.signal(signal.SIGINT, handler)
        assert time.monotonic() - before < PATIENCE / 2
        assert not future.done()
        opened.set()
        assert future.result().item() == 2
        assert queue.submit(torch.ones(1, 1)).result().item() == 2


@compiled
def test_an_error_of_the_desk_leaves_no_request_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were no memory for the last step: the worker could not be told."""
    with BatchQueue(lambda x: x * 2, max_delay=0) as queue:
        for _ in range(3):
            queue.submit(torch.ones(1, 1)).result(PATIENCE)

        def fail() -> None:
            monkeypatch.undo()
            raise MemoryError

        def idle() -> bool:
            with queue._core._lock:
                return queue._core._sleeping == 1 and queue._core._alarm == 1

        end = time.monotonic() + PATIENCE
        while not idle():
            assert time.monotonic() < end
        monkeypatch.setattr(queue._core._work, "notify", fail)
        with pytest.raises(MemoryError):
            queue.submit(torch.ones(1, 1))
        assert queue.submit(torch.ones(1, 1)).result(PATIENCE).item() == 2
        queue.flush()
        stats = queue.stats()
    assert (stats.completed, stats.cancelled, stats.pending, stats.running) == (4, 1, 0, 0)


# What a review has found


def entrance(desk: Any, **kinds: Any) -> Any:
    """An entrance that learns a group and the rows of a tensor, and calls `outside` for each."""
    made: Any = express.Entrance
    outside = kinds.get("outside")
    learn = lambda x: (None, x.size(0), (x.dtype, x.shape[1:]), None, False, outside)  # noqa: E731
    return made(desk, "runner", Request, learn)


@compiled
def test_a_pattern_that_changes_meanwhile(desk: Any) -> None:
    """While one submits, another has its own kind learnt: where threads take turns, or in code of
    the caller's that comes in between.
    """
    others: list[Any] = []

    def outside() -> None:
        if not others:
            others.append(None)
            for _ in range(40):
                way_in.submit(torch.ones(3, 2, dtype=torch.float64), others)

    way_in = entrance(desk, outside=outside)
    x, mine = torch.ones(1, 2), []
    assert way_in.submit(x, mine)
    others.clear()
    assert sum(way_in.submit(x, mine) for _ in range(20))  # learnt again
    assert len({request.parcel.rows for request in desk._arrivals}) == 2
    for request in desk._arrivals:
        (leaf,) = request.parcel.leaves
        assert request.parcel.rows == leaf.size(0)
        assert request.parcel.group == (leaf.dtype, leaf.shape[1:])


@compiled
def test_cancelling_beside_a_worker_that_takes() -> None:
    """It never fails those that were to run with the cancelled one."""
    before = sys.getswitchinterval()
    wrong: list[object] = []
    end = time.monotonic() + 2

    def client() -> None:
        x = torch.ones(1, 1)
        while time.monotonic() < end:
            futures = [queue.submit(x) for _ in range(6)]
            futures[3].cancel()
            for future in futures:
                if not future.cancelled() and future.result().item() != 2:
                    wrong.append(future)

    with BatchQueue(lambda x: x * 2, max_batch=6, max_delay=0.0005) as queue:
        sys.setswitchinterval(1e-6)
        try:
            clients = [threading.Thread(target=client, daemon=True) for _ in range(4)]
            for each in clients:
                each.start()
            for each in clients:
                each.join(PATIENCE)
        finally:
            sys.setswitchinterval(before)
        stats = queue.stats()
    assert wrong == []
    assert (stats.failed, stats.workers_replaced) == (0, 0)
    assert stats.completed


def test_a_submitter_is_waited_for_each_time() -> None:
    """Also where that ends in nothing to be kept, as on MPS."""

    class Waits(Lane):
        waited = 0

        def outside(self) -> None:
            self.waited += 1

    meta = torch.device("meta")
    with BatchQueue(lambda x: x * 2, max_delay=0) as queue:
        lane = queue._runner._entries[meta] = Waits(meta, 0)
        queue._runner._own_pools[meta] = StreamPool("cpu", size=1)
        for _ in range(40):
            queue.submit(torch.ones(1, 1, device=meta)).result(PATIENCE)
    assert lane.waited == 40


@compiled
def test_rows_that_were_counted_and_did_not_come() -> None:
    """A submit that was interrupted in between: forgotten once the line is empty."""
    with BatchQueue(lambda x: x * 2, max_delay=0) as queue:
        queue._core._arrived_rows = 7
        for _ in range(3):
            assert queue.submit(torch.ones(1, 1)).result(PATIENCE).item() == 2
        assert queue._core._arrived_rows == 0


def test_a_limit_that_falls_while_requests_wait() -> None:
    """What fills a batch now does not wait for company, beside a worker that is free."""
    held, short, began = threading.Event(), threading.Event(), threading.Event()

    def function(x: Tensor) -> Tensor:
        if x[0, 0] == 9:
            began.set()
            assert short.wait(PATIENCE)
            if len(x) > 1:
                raise MemoryError
        if x[0, 0] == 1:
            assert held.wait(PATIENCE)
        return x * 2

    with BatchQueue(function, max_batch=8, max_delay=PATIENCE, workers=2) as queue:
        guilty = [queue.submit(torch.full((1, 2), 9.0)) for _ in range(8)]
        assert began.wait(PATIENCE)
        first = queue.submit(torch.ones(1, 2))
        while queue.stats().pending < 1 or not queue._core._sleeping:
            time.sleep(0.001)
        others = [queue.submit(torch.full((1, 2), 2.0)) for _ in range(6)]
        short.set()
        assert [each.result(PATIENCE / 2)[0, 0].item() for each in others] == [4] * 6
        assert [each.result(PATIENCE / 2)[0, 0].item() for each in guilty] == [18] * 8
        held.set()
        assert first.result(PATIENCE)[0, 0] == 2


@compiled
def test_ctrl_c_in_code_that_looks_at_the_tensor() -> None:
    class Interrupts(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), named: Any = None
        ) -> Any:
            if armed and getattr(function, "__self__", None) is Tensor.layout:
                armed.clear()
                raise KeyboardInterrupt
            return function(*args, **(named or {}))

    armed: list[int] = []
    with BatchQueue(lambda x: x * 2, max_delay=0) as queue, Interrupts():
        queue.submit(torch.ones(1, 1)).result(PATIENCE)
        armed.append(1)
        with pytest.raises(KeyboardInterrupt):
            queue.submit(torch.ones(1, 1))
        assert queue.submit(torch.ones(1, 1)).result(PATIENCE).item() == 2


def test_ctrl_c_as_submit_returns() -> None:
    """The request, whose future nobody gets, is withdrawn."""
    opened, began = threading.Event(), threading.Event()

    def function(x: Tensor) -> Tensor:
        began.set()
        assert opened.wait(PATIENCE)
        return x * 2

    with BatchQueue(function, max_delay=0) as queue:
        first = queue.submit(torch.ones(1, 1))
        assert began.wait(PATIENCE)
        real: Any = queue._entrance

        class Interrupts:
            def submit(self, x: Tensor, mine: list[Request]) -> bool:
                real.submit(x, mine)
                raise KeyboardInterrupt

        queue._entrance = Interrupts()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            queue.submit(torch.ones(1, 1))
        queue._entrance = real
        opened.set()
        assert first.result(PATIENCE).item() == 2
        stats = queue.stats()
    assert (stats.completed, stats.cancelled) == (1, IS_COMPILED)


def test_sizes_beyond_all_bounds() -> None:
    with BatchQueue(lambda x: x * 2, max_batch=10**20, max_pending=10**20, max_delay=0.01) as queue:
        assert queue.submit(torch.ones(1, 1)).result(PATIENCE).item() == 2
        assert queue.stats().workers_replaced == 0
    with BatchQueue(lambda x: x, max_delay=0.01) as queue:
        huge = [queue.submit(torch.empty(2**62, 0)) for _ in range(4)]
        assert [each.result(PATIENCE).shape for each in huge] == [(2**62, 0)] * 4


def test_another_import_of_the_package() -> None:
    program = """
import sys, torch
from orchard.serving.batch_queue import BatchQueue
kept = dict(sys.modules)
for name in [name for name in sys.modules if name.startswith("orchard.serving")]:
    del sys.modules[name]
from orchard.serving.batch_queue import BatchQueue
with BatchQueue(lambda x: x * 2, max_delay=0.001) as queue:
    for options in ({}, {"priority": 1}, {"deadline": 50.0}):
        assert queue.submit(torch.ones(1, 1), **options).result(60).item() == 2
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_ticket_without_a_wave(halves: ModuleType) -> None:
    it = ticket(halves)
    it.wave = None
    it.begin()
    it.settle(Outcome(7))
    it._is_awaited = True
    it.announce_plainly(None)
    it._is_open = False
    assert it.result() == 7


@compiled
def test_code_that_comes_in_between_breaks_nothing(desk: Any) -> None:
    """Finalizers and comparisons that do what the queue never does."""

    class Meddles:
        def __init__(self, how: Any) -> None:
            self.how = how

        def __del__(self) -> None:
            self.how()

        def __eq__(self, other: object) -> bool:
            for each in list(desk._arrivals):
                each.settle(None)
            return True

        __hash__ = None  # type: ignore[assignment]

    class Settles(dict[int, Any]):
        def __setitem__(self, number: int, request: Any) -> None:
            request.settle(None)

    def forget_the_time() -> bool:
        del desk._now
        return False

    module = sys.modules[express.Ticket.__module__]
    it = ticket(module)
    it.begin()
    it.settle(Outcome(1))
    it._result = Meddles(lambda: setattr(it, "outcome", None))
    assert it.announce_plainly(None)
    assert it.result() == 1
    arrived(desk, 1, group=Meddles(lambda: None))
    arrived(desk, 1, group=Meddles(lambda: None))
    assert desk.take_hurried(5, 10.0, 0.0) is None
    desk._arrivals.clear()
    desk._unsettled = Settles()
    arrived(desk, 1)
    assert len(desk.take_hurried(5, 10.0, 0.0)) == 3
    desk._is_inside = forget_the_time
    with pytest.raises(TypeError):
        entrance(desk).submit(torch.ones(1, 1), [])
    with pytest.raises(RuntimeError):
        express.Entrance.__init__(way_in := entrance(desk), desk, None, Request, None)  # type: ignore[arg-type]
    del way_in
