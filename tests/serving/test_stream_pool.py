"""StreamPool in one process: leases, policies, values from many threads, submit."""

from __future__ import annotations

import contextvars
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import orchard
from orchard.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    PoolClosed,
    PoolExhausted,
)
from orchard.serving import Event, Lane, StreamPool, cores, ending, lanes, workers
from orchard.testing import pool_load

LONG = 60.0  # seconds after which a test that waits has failed


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call returns, or raises, in a thread of its own that has ended."""
    return in_threads([call])[0]


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What calls return, each in a thread of its own, all begun together."""
    futures: list[Future[Any]] = [Future() for _ in calls]
    together = threading.Barrier(len(calls))

    def work(call: Callable[[], Any], future: Future[Any]) -> None:
        try:
            together.wait(LONG)
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(calls, futures, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    return [future.result(0) for future in futures]


class Holder:
    """A thread that has entered a lane and lives until it is told to end."""

    def __init__(self, pool: StreamPool, inside: bool = False) -> None:
        self.end = threading.Event()
        begun: Future[Lane] = Future()

        def work() -> None:
            try:
                with pool.stream() as lane:
                    if inside:
                        begun.set_result(lane)
                        self.end.wait(LONG)
            except BaseException as error:
                begun.set_exception(error)
                raise
            if not inside:
                begun.set_result(lane)
                self.end.wait(LONG)

        self.thread = threading.Thread(target=work)
        self.thread.start()
        self.lane = begun.result(LONG)

    def stop(self) -> None:
        self.end.set()
        self.thread.join(LONG)


@contextmanager
def holders(pool: StreamPool, count: int, inside: bool = False) -> Iterator[list[Holder]]:
    held: list[Holder] = []
    try:
        for _ in range(count):
            held.append(Holder(pool, inside))
        yield held
    finally:
        for holder in held:
            holder.stop()


def lane_index(pool: StreamPool) -> int:
    with pool.stream() as lane:
        return lane.index


def waits_until(condition: Callable[[], bool]) -> None:
    """Return when it holds; the pace does not matter."""
    pause = threading.Event()
    for _ in range(int(LONG / 0.001)):
        if condition():
            return
        pause.wait(0.001)
    pytest.fail("it never came to hold")


# Values


def sequence(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (4, 16)).transpose(1, 2)
    return orchard.attention(heads, heads, heads, causal=True)


@pytest.fixture
def one_core() -> Iterator[None]:
    """torch's sums depend on how many threads share them, so equal bits need equal counts."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.stress
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("threads", [2, 3, 8, 31, 64])
def test_many_threads_compute_what_one_does(threads: int) -> None:
    """Every module in every company, bit for bit."""
    pool_load.threads("cpu", threads)


@pytest.mark.stress
@pytest.mark.usefixtures("one_core")
def test_every_lane_a_hundred_times() -> None:
    """31 threads of 100 blocks each; each thread has a lane of its own throughout."""
    pool_load.every_lane("cpu", 31, 100)


@pytest.mark.stress
@pytest.mark.usefixtures("one_core")
def test_two_hundred_threads_in_turn() -> None:
    """One lane is enough for any number of threads one after the other."""
    pool_load.in_turn("cpu", 200)


@pytest.mark.stress
def test_churn_never_exhausts() -> None:
    """Thousands of short threads, two at a time, two lanes, and a policy that would raise."""
    pool_load.churn("cpu", 2000)


def test_producer_and_consumer_on_two_lanes() -> None:
    """Values cross lanes by record and wait, and arrive whole and in order."""
    pool = StreamPool("cpu")
    full: list[tuple[Tensor, Event]] = []
    came = threading.Condition()

    def produce() -> int:
        with pool.stream() as lane:
            for number in range(100):
                x = torch.full((64,), float(number)).cumsum(0)
                with came:
                    full.append((x, lane.record()))
                    came.notify()
            return lane.index

    def consume() -> tuple[int, list[float]]:
        sums = []
        with pool.stream() as lane:
            for number in range(100):
                with came:
                    came.wait_for(lambda number=number: len(full) > number, LONG)
                x, event = full[number]
                lane.wait(event)
                lane.keep_alive(x)
                assert event.done()
                sums.append(float(x[-1]))
            lane.synchronize()
            return lane.index, sums

    produced, (consumed, sums) = in_threads([produce, consume])
    assert {produced, consumed} == {1, 2}
    assert sums == [64.0 * number for number in range(100)]


def test_synchronize_while_others_work() -> None:
    pool = StreamPool("cpu")
    x = sequence(16, 16)

    def work() -> Tensor:
        total = torch.zeros(16, 16)
        for _ in range(50):
            with pool.stream():
                total += x @ x
        return total

    def synchronize() -> None:
        for _ in range(50):
            pool.synchronize()

    *answers, nothing = in_threads([work] * 4 + [synchronize])
    assert nothing is None
    assert all(torch.equal(found, work()) for found in answers)


# Leases


def test_main_thread_has_the_default_lane() -> None:
    """It is none of the leased ones, so it is there when those are gone."""
    pool = StreamPool("cpu", size=1, on_exhausted="raise")
    with holders(pool, 1) as (holder,):
        assert lane_index(pool) == 0
        assert holder.lane.index == 1


def test_a_thread_keeps_its_lane() -> None:
    """Between blocks too; others get others."""
    pool = StreamPool("cpu", size=3, on_exhausted="raise")

    def work() -> list[int]:
        first = lane_index(pool)
        with holders(pool, 2) as others:
            assert {holder.lane.index for holder in others} == {1, 2, 3} - {first}
            return [first, *(lane_index(pool) for _ in range(3))]

    assert len(set(in_thread(work))) == 1


def test_nesting_is_the_same_lease() -> None:
    pool = StreamPool("cpu", size=1, on_exhausted="raise")

    def work() -> None:
        with pool.stream() as outer:
            with pool.stream() as inner:
                assert inner is outer
                assert pool.stats().active == 1
            with pool.stream() as again:
                assert again is outer
            assert pool.stats().active == 1
        assert pool.stats().active == 0
        assert pool.stats().leases == 1

    in_thread(work)


def test_one_context_manager_used_again() -> None:
    """The object that stream() returns may be entered twice, and once more later."""
    pool = StreamPool("cpu")
    block = pool.stream()
    with block as outer, block as inner:
        assert inner is outer
    with block as later:
        assert later is outer
    assert pool.stats().active == 0


def test_a_body_that_raises_leaves_nothing_behind() -> None:
    pool = StreamPool("cpu", size=1, on_exhausted="raise")

    def work() -> None:
        before = torch.get_num_threads()
        with pytest.raises(KeyError, match="mine"), pool.stream():
            raise KeyError("mine")
        assert torch.get_num_threads() == before
        assert pool.stats().active == 1
        assert lane_index(pool) == 1

    with pool.stream():
        in_thread(work)
    assert pool.stats().active == 0


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_thread_that_dies_in_its_lane(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lane is the next thread's, even while its error is kept, with every frame."""
    kept = []
    monkeypatch.setattr(threading, "excepthook", kept.append)
    pool = StreamPool("cpu", size=1, on_exhausted="raise")

    def work() -> None:
        with pool.stream():
            raise error

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(LONG)
    assert len(kept) == 3
    assert in_thread(lambda: lane_index(pool)) == 1


def test_a_block_that_outlives_its_thread() -> None:
    """A generator stopped in a block, whose thread ends, holds no lane and closes in silence."""
    pool = StreamPool("cpu", size=1, on_exhausted="raise")

    def numbers() -> Iterator[int]:
        with pool.stream() as lane:
            yield lane.index

    stopped = numbers()
    assert in_thread(lambda: next(stopped)) == 1
    assert pool.stats().in_use == 0
    assert pool.stats().active == 0
    with pool.stream():
        stopped.close()
        assert pool.stats().active == 1
    assert pool.stats().active == 0


def test_sweep_finds_what_dead_threads_hold() -> None:
    """Where something keeps the thread's seat alive, the lane comes back when it is missed."""
    pool = StreamPool("cpu", size=1, on_exhausted="raise")
    kept: list[object] = []

    def work() -> None:
        with pool.stream():
            kept.append(pool._seats.seat)

    in_thread(work)
    assert pool.stats().in_use == 1
    assert in_thread(lambda: lane_index(pool)) == 1
    assert pool.stats().exhausted == 0
    kept.clear()
    assert pool.stats().in_use == 0


def test_a_pool_that_is_dropped_goes() -> None:
    """Neither the seats of threads that live nor the pool's own threads keep it."""
    pool = StreamPool("cpu", size=1)
    with pool.stream():
        assert pool.submit(lambda: 1).result(LONG) == 1
    gone = threading.Event()
    weakref.finalize(pool, gone.set)
    pool.close()
    del pool
    gc.collect()
    assert gone.wait(LONG)  # the last reference may be a pool thread's, about to let go


# When all lanes are taken


def test_share_takes_turns() -> None:
    """Round robin; a lane is free again when the last of its threads has ended."""
    pool = StreamPool("cpu", size=2)
    with holders(pool, 2) as first:
        with holders(pool, 5) as more:
            assert [holder.lane.index for holder in more] == [1, 2, 1, 2, 1]
            assert pool.stats().shared == 5
            first[0].stop()
            assert pool.stats().in_use == 2
            assert in_thread(lambda: lane_index(pool)) == 2
        assert pool.stats().in_use == 1
        assert pool.stats().shared == 6
        assert in_thread(lambda: lane_index(pool)) == 1
    assert pool.stats().in_use == 0


def test_raise_says_what_to_do() -> None:
    pool = StreamPool("cpu", size=2, on_exhausted="raise")
    with holders(pool, 2) as (one, _):
        for _ in range(2):
            with pytest.raises(PoolExhausted, match=r"all 2 lanes .* on cpu .* larger size"):
                in_thread(lambda: lane_index(pool))
        assert pool.stats().exhausted == 2
        one.stop()
        assert in_thread(lambda: lane_index(pool)) == one.lane.index


def test_wait_is_woken_by_a_thread_that_ends() -> None:
    """In the order of coming, each by a lane of its own."""
    pool = StreamPool("cpu", size=1, on_exhausted="wait")
    order: list[int] = []

    def work(number: int) -> None:
        with pool.stream() as lane:
            assert lane.index == 1
            order.append(number)

    with holders(pool, 1) as (holder,):
        waiting = []
        for number in range(5):
            waiting.append(threading.Thread(target=work, args=(number,)))
            waiting[-1].start()
            waits_until(lambda number=number: pool.stats().waits == number + 1)
        assert order == []
        holder.stop()
        for thread in waiting:
            thread.join(LONG)
    assert order == list(range(5))
    assert pool.stats().peak == 1


def test_wait_gives_up_after_its_time() -> None:
    """The lane that comes back later is not lost on it."""
    pool = StreamPool("cpu", size=1, on_exhausted="wait", timeout=0.01)
    with holders(pool, 1):
        with pytest.raises(PoolExhausted, match=r"none came back within 0\.01 s"):
            in_thread(lambda: lane_index(pool))
        assert pool.stats().waits == 1
        assert pool.stats().exhausted == 1
    assert in_thread(lambda: lane_index(pool)) == 1


def test_no_time_to_wait() -> None:
    pool = StreamPool("cpu", size=1, on_exhausted="wait", timeout=0)
    assert in_thread(lambda: lane_index(pool)) == 1
    with holders(pool, 1), pytest.raises(PoolExhausted):
        in_thread(lambda: lane_index(pool))


def test_a_waiter_that_is_interrupted_passes_the_lane_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the moment of the hand-over takes no lane out of the pool."""
    pool = StreamPool("cpu", size=1, on_exhausted="wait")
    usual = threading.Condition.wait

    def interrupted(self: threading.Condition, timeout: float | None = None) -> bool:
        usual(self, timeout)
        if threading.current_thread().name == "interrupted":
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr(threading.Condition, "wait", interrupted)
    ended = threading.Event()

    def work() -> None:
        with pytest.raises(KeyboardInterrupt):
            lane_index(pool)
        ended.set()

    with holders(pool, 1) as (holder,):
        thread = threading.Thread(target=work, name="interrupted")
        thread.start()
        waits_until(lambda: pool.stats().waits == 1)
        holder.stop()
        assert ended.wait(LONG)
        thread.join(LONG)
    assert pool.stats().in_use == 0
    assert in_thread(lambda: lane_index(pool)) == 1


# The end of a pool


def test_closed_pools_refuse() -> None:
    pool = StreamPool("cpu")
    in_use = Holder(pool)
    pool.close()
    pool.close()
    for use in (lambda: lane_index(pool), lambda: pool.submit(int), lambda: pool.__enter__()):
        with pytest.raises(PoolClosed, match="StreamPool on cpu has been closed"):
            use()
    with pytest.raises(PoolClosed):
        in_thread(lambda: lane_index(pool))
    in_use.stop()
    assert pool.stats().in_use == 0


def test_a_cached_lease_is_refused_too() -> None:
    """A thread that had a lane before gets no new block after."""
    pool = StreamPool("cpu")

    def work() -> None:
        lane_index(pool)
        pool.close()
        with pytest.raises(PoolClosed):
            lane_index(pool)

    in_thread(work)
    assert pool.stats().active == 0


def test_open_blocks_go_on_when_the_pool_is_closed() -> None:
    """Nested ones included; the block ends as usual."""
    pool = StreamPool("cpu")
    before = torch.get_num_threads()
    with pool.stream() as lane:
        pool.close()
        with pool.stream() as same:
            assert same is lane
        assert float(torch.ones(3).sum()) == 3
    assert torch.get_num_threads() == before
    assert pool.stats().active == 0


def test_close_tells_those_who_wait() -> None:
    pool = StreamPool("cpu", size=1, on_exhausted="wait")
    told: list[BaseException] = []

    def work() -> None:
        try:
            lane_index(pool)
        except PoolClosed as error:
            told.append(error)

    with holders(pool, 1):
        waiting = [threading.Thread(target=work) for _ in range(3)]
        for thread in waiting:
            thread.start()
        waits_until(lambda: pool.stats().waits == 3)
        pool.close()
        for thread in waiting:
            thread.join(LONG)
        assert len(told) == 3


def test_close_waits_for_what_was_submitted() -> None:
    """All of it, also what had not begun; from inside a block, and with no lane left."""
    pool = StreamPool("cpu", size=1, on_exhausted="wait")

    def work() -> list[int]:
        with pool.stream():
            futures = [pool.submit(lambda n=n: n * n) for n in range(20)]
            pool.close()
            assert all(future.done() for future in futures)
            return [future.result(0) for future in futures]

    assert in_thread(work) == [n * n for n in range(20)]


def test_with_closes() -> None:
    with StreamPool("cpu") as pool:
        future = pool.submit(lambda: 3)
    assert future.result(0) == 3
    with pytest.raises(PoolClosed):
        pool.submit(int)


def test_a_task_may_close_its_pool() -> None:
    pool = StreamPool("cpu")
    assert pool.submit(pool.close).result(LONG) is None
    with pytest.raises(PoolClosed):
        pool.submit(int)


# submit


def test_submit_answers_and_counts() -> None:
    pool = StreamPool("cpu", size=3)
    x = sequence(6, 6)
    futures = [pool.submit(torch.add, x, x, alpha=n) for n in range(50)]
    for n, future in enumerate(futures):
        assert torch.equal(future.result(LONG), torch.add(x, x, alpha=n))
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(LONG)
    pool.close()
    stats = pool.stats()
    assert (stats.submitted, stats.completed, stats.failed, stats.cancelled) == (51, 50, 1, 0)
    assert (stats.in_use, stats.active) == (0, 0)
    assert 1 <= stats.peak <= 3


def test_submit_runs_in_a_lane_of_its_own() -> None:
    """As many at once as there are lanes, none of them the main thread's."""
    pool = StreamPool("cpu", size=4)
    together = threading.Barrier(4)

    def work() -> int:
        together.wait(LONG)
        return lane_index(pool)

    with pool.stream():
        futures = [pool.submit(work) for _ in range(4)]
        assert sorted(future.result(LONG) for future in futures) == [1, 2, 3, 4]


def test_idle_pool_threads_hold_no_lane() -> None:
    """So that they never stand in the way of a thread that wants one."""
    pool = StreamPool("cpu", size=1, on_exhausted="raise")
    for _ in range(10):
        assert pool.submit(lambda: lane_index(pool)).result(LONG) == 1
        assert in_thread(lambda: lane_index(pool)) == 1


@pytest.mark.parametrize("policy", ["wait", "raise", "share"])
def test_submit_does_not_need_a_free_lane(policy: Any) -> None:
    """A thread that holds the only lane may wait for what it submits."""
    pool = StreamPool("cpu", size=1, on_exhausted=policy)

    def work() -> int:
        with pool.stream():
            return int(pool.submit(lambda: lane_index(pool)).result(LONG))

    assert in_thread(work) == 1


def test_submit_from_a_pool_thread() -> None:
    """Any depth, one thread: the inner call runs there, and its future is filled."""
    pool = StreamPool("cpu", size=1, on_exhausted="raise")

    def depth(left: int) -> tuple[int, int]:
        if not left:
            return threading.get_ident(), lane_index(pool)
        found: tuple[int, int] = pool.submit(depth, left - 1).result(LONG)
        assert found == (threading.get_ident(), lane_index(pool))
        return found

    pool.submit(depth, 20).result(LONG)
    pool.close()
    assert pool.stats().completed == 21
    assert pool.stats().leases == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_a_task_raises_is_in_its_future(error: type[BaseException]) -> None:
    """And the thread goes on with the next one."""
    pool = StreamPool("cpu", size=1)

    def fail() -> None:
        raise error("it")

    future = pool.submit(fail)
    assert pool.submit(lambda: 5).result(LONG) == 5
    assert type(future.exception(LONG)) is error
    assert pool.stats().failed == 1
    assert pool.stats().active == 0


def test_cancel_before_the_start() -> None:
    pool = StreamPool("cpu", size=1)
    begin, ran = threading.Event(), []
    first = pool.submit(begin.wait, LONG)
    second = pool.submit(ran.append, 1)
    third = pool.submit(lambda: 7)
    waits_until(first.running)
    assert second.cancel()
    assert not first.cancel()
    begin.set()
    assert third.result(LONG) == 7
    with pytest.raises(CancelledError):
        second.result(0)
    assert wait([first, second, third], LONG).not_done == set()
    pool.close()
    assert ran == []
    assert pool.stats().cancelled == 1


def test_a_callback_that_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes over, and the error is shown as any thread's is."""
    shown: Future[type[BaseException]] = Future()
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.set_result(args.exc_type))
    pool = StreamPool("cpu", size=1)
    begin = threading.Event()
    first = pool.submit(begin.wait, LONG)

    def die(_: Future[Any]) -> None:
        raise KeyboardInterrupt

    first.add_done_callback(die)
    second = pool.submit(lambda: 4)
    begin.set()
    assert second.result(LONG) == 4
    assert shown.result(LONG) is KeyboardInterrupt
    pool.close()
    assert pool.stats().completed == 2


def test_pool_threads_end_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are there again when there is."""
    monkeypatch.setattr(workers, "_IDLE", 0.001)
    pool = StreamPool("cpu", size=2)
    for n in range(20):
        assert pool.submit(lambda n=n: n + 1).result(LONG) == n + 1
        if n % 5 == 0:
            waits_until(lambda: pool._workers._threads == 0)


def test_when_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller is told, and no task is left behind."""
    pool = StreamPool("cpu", size=1)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(int)
    assert pool.stats().submitted == 0
    assert pool.submit(lambda: 9).result(LONG) == 9


VARIABLE = contextvars.ContextVar("VARIABLE", default="unset")


def modes() -> tuple[object, ...]:
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.is_autocast_cache_enabled(),
        VARIABLE.get(),
    )


def test_the_state_of_the_submitter_is_carried_over() -> None:
    """And is gone afterwards: the tasks run one after the other on one thread."""
    pool = StreamPool("cpu", size=1)
    usual = modes()
    x = sequence(3, 3).requires_grad_()

    def product() -> tuple[tuple[object, ...], Tensor]:
        return modes(), x @ x

    def check() -> Tensor:
        here, expected = product()
        there, found = pool.submit(product).result(LONG)
        assert there == here
        assert torch.equal(found, expected)
        assert (found.dtype, found.requires_grad, found.is_inference()) == (
            expected.dtype,
            expected.requires_grad,
            expected.is_inference(),
        )
        return found

    check()
    with torch.inference_mode():
        assert check().is_inference()
    with torch.no_grad():
        assert not check().requires_grad
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            assert check().dtype is dtype
        with torch.autocast("cpu", dtype=dtype), torch.inference_mode(), torch.enable_grad():
            check()
    token = VARIABLE.set("mine")
    check()
    pool.submit(VARIABLE.set, "theirs").result(LONG)
    assert VARIABLE.get() == "mine"
    VARIABLE.reset(token)
    assert pool.submit(modes).result(LONG) == usual
    check()


def test_gradients_from_pool_threads() -> None:
    """Backward in a task gives what it gives here."""
    pool = StreamPool("cpu")

    def gradient(seed: int) -> Tensor:
        x = sequence(2, 16, 64, seed=seed).requires_grad_()
        attention(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    futures = [pool.submit(gradient, seed) for seed in range(8)]
    for seed, future in enumerate(futures):
        assert torch.equal(future.result(LONG), gradient(seed))


# The cores of a CPU lane


@pytest.fixture
def six_cores() -> Iterator[None]:
    """This thread, and those begun later, may use six, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


needs_openmp = pytest.mark.skipif(not cores._set_in_this_thread, reason="torch has no OpenMP here")


@needs_openmp
@pytest.mark.usefixtures("six_cores")
def test_cores_are_shared_by_the_threads_at_work() -> None:
    """Six for one, three for the second, two for the third; and back."""
    pool = StreamPool("cpu")
    found: list[tuple[int, int]] = []

    def enter(left: int) -> None:
        with pool.stream():
            inside = torch.get_num_threads()
            if left:
                in_thread(lambda: enter(left - 1))
            assert torch.get_num_threads() == inside
        found.append((inside, torch.get_num_threads()))

    enter(7)
    assert found[::-1] == [(each, 6) for each in (6, 3, 2, 1, 1, 1, 1, 1)]


@needs_openmp
@pytest.mark.usefixtures("six_cores")
def test_a_share_is_one_thread_s_alone() -> None:
    """Threads that were there, and threads that first use torch meanwhile, have their six."""
    pool = StreamPool("cpu")
    inside, done = threading.Event(), threading.Event()

    def bystander() -> tuple[int, int]:
        before = torch.get_num_threads()
        inside.wait(LONG)
        after = torch.get_num_threads()
        done.set()
        return before, after

    def worker() -> tuple[int, int]:
        with pool.stream():
            inside.set()
            assert done.wait(LONG)
            return torch.get_num_threads(), in_thread(torch.get_num_threads)

    with pool.stream():
        assert in_threads([bystander, worker]) == [(6, 6), (3, 6)]
    assert in_thread(torch.get_num_threads) == 6


@needs_openmp
@pytest.mark.usefixtures("six_cores")
def test_pools_inside_pools() -> None:
    """A share is divided again, and every end restores what was before its beginning."""
    outer, inner = StreamPool("cpu"), StreamPool("cpu")

    def work() -> list[int]:
        seen = [torch.get_num_threads()]
        with outer.stream():
            seen.append(torch.get_num_threads())
            with holders(inner, 1, inside=True):
                with inner.stream():
                    seen.append(torch.get_num_threads())
                    seen.append(in_thread(torch.get_num_threads))
                seen.append(torch.get_num_threads())
        return [*seen, torch.get_num_threads(), in_thread(torch.get_num_threads)]

    with outer.stream():
        assert in_thread(work) == [6, 3, 1, 6, 3, 6, 6]


@pytest.mark.usefixtures("six_cores")
def test_where_torch_has_no_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are the process's there, and are left alone."""
    monkeypatch.setattr(cores, "_set_in_this_thread", ())
    pool = StreamPool("cpu")
    with pool.stream():
        assert in_thread(lambda: pool.submit(torch.get_num_threads).result(LONG)) == 6


@needs_openmp
def test_kernels_of_orchard_take_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU backend asks its library for is the lane's number."""
    from orchard.backends.cpu import native

    asked: list[int] = []
    usual = native.threads
    monkeypatch.setattr(native, "threads", lambda: asked.append(usual()) or asked[-1])
    x = sequence(1, 4, 32, 16)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        pool = StreamPool("cpu")

        def call() -> Tensor:
            with pool.stream():
                return orchard.attention(x, x, x, backend="cpu")

        alone = orchard.attention(x, x, x, backend="cpu")
        with pool.stream():
            assert torch.equal(in_thread(call), alone)
    finally:
        torch.set_num_threads(before)
    assert asked == [4, 2]


# Arguments


@pytest.mark.errors
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": 0}, ArgumentValueError, "size is 0; it must be at least 1"),
        ({"size": 2.0}, ArgumentTypeError, "size is 2.0; it must be an int"),
        ({"size": True}, ArgumentTypeError, "size is True; it must be an int"),
        ({"on_exhausted": "block"}, ArgumentValueError, "on_exhausted is 'block'; it must be"),
        ({"timeout": 1.0}, ArgumentValueError, "timeout is 1.0 with on_exhausted='share'"),
        ({"on_exhausted": "wait", "timeout": -1}, ArgumentValueError, "timeout is -1; it must"),
        ({"on_exhausted": "wait", "timeout": float("nan")}, ArgumentValueError, "timeout is nan"),
        ({"on_exhausted": "wait", "timeout": "1"}, ArgumentTypeError, "timeout is '1'; it must"),
        ({"device": "meta"}, ArgumentValueError, "device is 'meta'; it must be on cpu, cuda or"),
        ({"device": "nonsense"}, ArgumentValueError, "device is 'nonsense'; RuntimeError"),
        ({"device": "cuda:99"}, ArgumentValueError, "device is 'cuda:99'; there are"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        StreamPool(**{"device": "cpu", **arguments})
    assert message in str(raised.value)


@pytest.mark.errors
def test_bad_arguments_of_lanes_and_submit() -> None:
    pool = StreamPool("cpu")
    with pytest.raises(ArgumentTypeError, match="fn is a int; it must be callable"):
        pool.submit(3)
    with pool.stream() as lane:
        with pytest.raises(ArgumentTypeError, match="event is a NoneType; it must be what"):
            lane.wait(None)
        with pytest.raises(ArgumentTypeError, match="tensor is a list; it must be a Tensor"):
            lane.keep_alive([torch.ones(1)])


def test_what_a_pool_says_of_itself() -> None:
    pool = StreamPool("cpu", size=5)
    assert (pool.device, pool.size) == (torch.device("cpu"), 5)
    assert repr(pool) == "<StreamPool of 5 lanes on cpu>"
    with pool.stream() as lane:
        assert (lane.device, lane.index) == (torch.device("cpu"), 0)
        assert repr(lane) == "<CpuLane 0 on cpu>"


@pytest.mark.parametrize("present", ["cuda", "mps", "cpu"])
def test_the_best_device_is_chosen(present: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"cuda": ("cuda", "mps", "cpu"), "mps": ("mps", "cpu"), "cpu": ("cpu",)}[present]
    monkeypatch.setattr(lanes, "_present", lambda kind: int(kind in kinds))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert lanes.checked_device(None).type == present


# The end of the interpreter, as far as one process can show it


def test_threads_in_lanes_are_known_while_they_are() -> None:
    """Blocks that end, raise or are refused leave nobody inside."""
    pool = StreamPool("cpu")

    def inside() -> bool:
        return any(visit.depth for visit in ending._visits)

    assert not inside()
    with pool.stream(), pool.stream():
        assert inside()
    pool.close()
    with pytest.raises(PoolClosed):
        lane_index(pool)
    assert not inside()


def test_dismissed_tasks_are_cancelled_for_every_kind_of_waiter() -> None:
    pool = StreamPool("cpu", size=1)
    begin = threading.Event()
    first = pool.submit(begin.wait, LONG)
    waits_until(first.running)
    rest = [pool.submit(int) for _ in range(3)]
    pool._workers.dismiss()
    assert wait(rest, LONG).not_done == set()
    assert all(future.cancelled() for future in rest)
    assert not pool._workers.wait_until_idle(timeout=0)
    begin.set()
    assert pool._workers.wait_until_idle(timeout=LONG)
    assert first.result(0) is True
    assert pool.stats().cancelled == 3
