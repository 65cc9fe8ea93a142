"""Lanes that are streams: CUDA's on an NVIDIA GPU, and MPS's logic on a stand-in for torch.mps."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import orchard
from orchard.errors import ForkedProcessError
from orchard.serving import Event, Lane, StreamPool, lanes, stream_pool

LONG = 60.0  # seconds after which a test that waits has failed
LATE = 2_000_000_000  # cycles for which a kernel sleeps: about a second


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call returns, or raises, in a thread of its own that has ended."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONG)
    return future.result(0)


@pytest.fixture
def warm() -> None:
    """What CUDA loads and allocates at its first use may wait for the device."""
    x = torch.full((1 << 20,), 1.0, device="cuda")
    _ = x.fill_(2.0) * 2, x + 1, x * x, x.clone(), torch.arange(10, device="cuda") * 2
    torch.cuda._sleep(1)
    torch.cuda.synchronize()


def cuda(test: Callable[..., None]) -> Callable[..., None]:
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    return pytest.mark.cuda(missing(pytest.mark.usefixtures("warm")(test)))


@pytest.fixture
def no_device_wide_wait(warm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.cuda.synchronize, and operators that wait for the device unasked, raise."""

    def refuse(*_: object) -> None:
        raise AssertionError("device-wide synchronise")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def late(value: float, *shape: int) -> Tensor:
    """A tensor whose values come a second after this returns, and are NaN until then."""
    tensor = torch.full(shape, float("nan"), device="cuda")
    torch.cuda._sleep(LATE)
    return tensor.fill_(value)


@cuda
def test_every_thread_has_a_stream_of_its_own() -> None:
    """Inside its blocks only; the main thread has the default stream."""
    pool = StreamPool("cuda", size=8, on_exhausted="raise")
    default = torch.cuda.default_stream()

    def streams(more: int) -> set[int]:
        """Of this thread, and of as many begun while it lives."""
        with pool.stream() as lane:
            inside = torch.cuda.current_stream()
            with pool.stream():
                assert torch.cuda.current_stream() == inside
            assert torch.cuda.current_stream() == inside == lane.stream
        assert torch.cuda.current_stream() == default
        rest: set[int] = in_thread(lambda: streams(more - 1)) if more else set()
        return {inside.cuda_stream} | rest

    found = in_thread(lambda: streams(7))
    assert len(found) == 8
    assert default.cuda_stream not in found
    with pool.stream() as lane:
        assert lane.index == 0
        assert torch.cuda.current_stream() == default


@cuda
@pytest.mark.usefixtures("no_device_wide_wait")
def test_consumer_waits_for_the_producer_on_the_device() -> None:
    """The values that come a second later are those that are read; no thread has waited."""
    pool = StreamPool("cuda")

    def produce() -> tuple[int, int, Tensor, Event]:
        with pool.stream() as lane:
            x = late(3.0, 1024)
            event = lane.record()
            return lane.index, *in_thread(lambda: consume(x, event))

    def consume(x: Tensor, event: Event) -> tuple[int, Tensor, Event]:
        with pool.stream() as lane:
            lane.wait(event)
            lane.keep_alive(x)
            return lane.index, x * 2, lane.record()

    first, second, doubled, event = in_thread(produce)
    assert first != second
    assert not event.done()
    event.synchronize()
    assert event.done()
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(doubled.cpu(), torch.full((1024,), 6.0))


@cuda
def test_hand_over_does_not_wait_for_other_lanes() -> None:
    """While two lanes exchange values and are synchronised, a third is still busy."""
    pool = StreamPool("cuda")

    def occupy(cycles: int) -> Event:
        with pool.stream() as lane:
            for _ in range(5):
                torch.cuda._sleep(cycles)
            return lane.record()

    def produce() -> tuple[Tensor, Event]:
        with pool.stream() as lane:
            return torch.arange(1000, device="cuda"), lane.record()

    def exchange() -> Tensor:
        with pool.stream() as lane:
            x, event = in_thread(produce)
            lane.wait(event)
            lane.keep_alive(x)
            doubled = x * 2
            lane.synchronize()
            return doubled.cpu()

    def work(cycles: int) -> tuple[Event, Tensor, bool]:
        busy = occupy(cycles)  # this thread keeps its lane while the others take theirs
        return busy, in_thread(exchange), busy.done()

    in_thread(lambda: work(1))  # allocates on the same lanes
    event, doubled, was_done = in_thread(lambda: work(LATE))
    assert torch.equal(doubled, torch.arange(0, 2000, 2))
    assert not was_done
    pool.synchronize()
    assert event.done()


@cuda
@pytest.mark.usefixtures("no_device_wide_wait")
def test_a_block_waits_for_what_its_thread_queued_before() -> None:
    pool = StreamPool("cuda")

    def work() -> tuple[Tensor, Event]:
        x = late(5.0, 512)
        with pool.stream() as lane:
            lane.keep_alive(x)
            return x + 1, lane.record()

    found, event = in_thread(work)
    event.synchronize()
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), torch.full((512,), 6.0))


@cuda
@pytest.mark.parametrize("kept", [True, False])
def test_keep_alive_keeps_the_memory(kept: bool) -> None:
    """A tensor of one lane, dropped while another still reads it, is not written over.

    Without keep_alive its memory is given out again at once; that shows that the test can fail.
    """
    pool = StreamPool("cuda", size=2)

    def read(x: Tensor, event: Event) -> tuple[Tensor, Event]:
        with pool.stream() as lane:
            lane.wait(event)
            if kept:
                lane.keep_alive(x)
            torch.cuda._sleep(LATE)
            return x.clone(), lane.record()

    def work() -> bool:
        with pool.stream() as lane:
            held = [torch.full((1 << 20,), 1.0, device="cuda")]
            event = lane.record()
            copy, copied = in_thread(lambda: read(held[0], event))
            address = held.pop().data_ptr()
            again = torch.full((1 << 20,), 2.0, device="cuda")
            reused = again.data_ptr() == address
            copied.synchronize()
            if kept:
                assert torch.equal(copy.cpu(), torch.ones(1 << 20))
            return reused

    assert in_thread(work) is not kept


@cuda
@pytest.mark.usefixtures("no_device_wide_wait")
def test_submit_takes_over_and_hands_back_finished_work() -> None:
    """It begins after what the submitter queued, and its future is filled when values are there."""
    pool = StreamPool("cuda")
    x = late(4.0, 256)

    def work() -> tuple[Tensor, Lane]:
        with pool.stream() as lane:
            torch.cuda._sleep(LATE // 10)
            return x * x, lane

    squared, lane = pool.submit(work).result(LONG)
    assert lane.stream.query()
    assert lane.stream != torch.cuda.default_stream()
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(squared.cpu(), torch.full((256,), 16.0))


def whole(*shape: int, seed: int) -> Tensor:
    """Small whole numbers, whose products and sums are exact in any order, in TF32 too."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


@cuda
@pytest.mark.stress
def test_eight_threads_on_eight_streams_compute_what_one_does() -> None:
    pool = StreamPool("cuda", size=8, on_exhausted="raise")
    conv = nn.Conv2d(4, 8, 3, bias=False)
    conv.weight.data = whole(8, 4, 3, 3, seed=99)
    conv.cuda()
    weight = whole(64, 64, seed=98).cuda()
    norm = nn.LayerNorm(64).cuda()

    @torch.no_grad()
    def compute(seed: int) -> list[Tensor]:
        image = whole(2, 4, 16, 16, seed=seed).cuda(non_blocking=True)
        rows = whole(2, 4, 128, 64, seed=seed).cuda(non_blocking=True)
        found = []
        for _ in range(20):
            found = [conv(image), rows @ weight, rows @ rows.mT, norm(rows)]
            found.append(orchard.attention(rows, rows, rows, causal=True))
        return found

    together = threading.Barrier(8)

    def work(seed: int) -> list[Tensor]:
        together.wait(LONG)
        return compute(seed)

    expected = [compute(seed) for seed in range(8)]
    torch.cuda.synchronize()
    for _ in range(4):
        futures = [pool.submit(work, seed) for seed in range(8)]
        for future, right in zip(futures, expected, strict=True):
            for found, value in zip(future.result(LONG), right, strict=True):
                assert torch.equal(found, value)
    assert pool.stats().peak == 8
    assert pool.stats().shared == 0


@cuda
def test_a_cuda_pool_has_the_device_s_index() -> None:
    pool = StreamPool("cuda", size=1)
    assert pool.device == torch.device("cuda", torch.cuda.current_device())
    assert StreamPool().device.type == "cuda"
    with pool.stream() as lane:
        lane.keep_alive(torch.ones(3))  # of the CPU: nothing to keep


# In a child of a fork; a stand-in shows it where there is no GPU


class StreamLike(Lane):
    """A lane of a device that does not survive a fork, and says when it is entered and left."""

    log: list[str]

    @contextmanager
    def occupied(self, users: int) -> Iterator[None]:
        self.log.append("enter")
        yield
        self.log.append("leave")


def pool_of(kind: type[Lane], monkeypatch: pytest.MonkeyPatch, **options: Any) -> StreamPool:
    monkeypatch.setattr(
        stream_pool,
        "open_lanes",
        lambda device, count: [kind(torch.device("cuda", 0), index) for index in range(count)],
    )
    return StreamPool("cpu", **options)


def in_child(check: Callable[[], None]) -> None:
    """Run a check in a forked child, which must end well."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_to_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it touches; leaving a block, and closing, are quiet; the parent goes on."""
    StreamLike.log = []
    pool = pool_of(StreamLike, monkeypatch)

    def check() -> None:
        for use in (
            lambda: pool.stream().__enter__(),
            lambda: pool.submit(int),
            pool.synchronize,
            pool.stats,
            pool.__enter__,
            lane.record,
            lane.synchronize,
            lambda: lane.wait(Event()),
            lambda: lane.keep_alive(torch.ones(1)),
        ):
            with pytest.raises(ForkedProcessError, match=r'cuda:0.*get_context\("spawn"\)'):
                use()
        block.__exit__(None, None, None)
        assert StreamLike.log == ["enter"]
        pool.close()

    block = pool.stream()
    lane = block.__enter__()
    in_child(check)
    block.__exit__(None, None, None)
    assert StreamLike.log == ["enter", "leave"]
    assert pool.submit(lambda: 6).result(LONG) == 6


def test_a_lane_that_cannot_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes through, and the pool is as before."""

    class Broken(StreamLike):
        @contextmanager
        def occupied(self, users: int) -> Iterator[None]:
            raise RuntimeError("no stream")
            yield

    pool = pool_of(Broken, monkeypatch, size=1, on_exhausted="raise")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no stream"):
            in_thread(lambda: pool.stream().__enter__())
    future = pool.submit(int)
    assert str(future.exception(LONG)) == "no stream"
    stats = pool.stats()
    assert (stats.active, stats.in_use, stats.failed) == (0, 0, 1)


# MPS, on a stand-in for torch.mps


class MpsStandIn:
    """What the lanes use of torch.mps, written down in the order of use."""

    def __init__(self, streams: bool, right: bool = True) -> None:
        self.log: list[str] = []
        self.right = right
        here = threading.local()
        log = self.log

        class Stream:
            def synchronize(self) -> None:
                log.append("synchronize")

        class Event:
            def record(self) -> None:
                log.append("record")

            def query(self) -> bool:
                return "synchronize event" in log

            def synchronize(self) -> None:
                log.append("synchronize event")

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            before, here.stream = current(), chosen if right else default
            yield
            here.stream = before

        def current() -> Stream:
            return getattr(here, "stream", default)

        default = Stream()
        self.Event = Event
        if streams:
            self.Stream, self.stream = Stream, stream
            self.default_stream, self.current_stream = lambda: default, current


@pytest.fixture
def on_cpu_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that the probe asks for on MPS are made here."""
    usual = torch.arange
    monkeypatch.setattr(torch, "arange", lambda end, device: usual(end))


@pytest.mark.usefixtures("on_cpu_instead")
@pytest.mark.parametrize(
    ("stand_in", "works"),
    [
        (MpsStandIn(streams=True), True),
        (MpsStandIn(streams=False), False),
        (MpsStandIn(streams=True, right=False), False),
    ],
    ids=["streams", "none", "streams that do not take"],
)
def test_mps_streams_are_probed_by_use(
    stand_in: MpsStandIn, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "_mps", stand_in)
    assert lanes.mps_streams_work() is works
    kind = lanes.MpsStreamLane if works else lanes.MpsTurnLane
    assert {type(lane) for lane in lanes.open_lanes(torch.device("mps"), 3)} == {kind}


def test_without_mps_streams_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all pools together; a nested block and the lane's own methods do not lock up."""
    stand_in = MpsStandIn(streams=False)
    monkeypatch.setattr(lanes, "_mps", stand_in)
    pools = [pool_of(lanes.MpsTurnLane, monkeypatch) for _ in range(2)]
    entered = threading.Event()

    def work() -> None:
        with pools[1].stream() as lane, pools[0].stream() as second:
            entered.set()
            lane.wait(second.record())

    thread = threading.Thread(target=work)
    with pools[0].stream(), pools[1].stream():
        thread.start()
        assert not entered.wait(0.1)
    assert entered.wait(LONG)
    thread.join(LONG)
    assert stand_in.log == ["record"]
    with pools[0].stream() as lane:
        event = lane.record()
        assert not event.done()
        lane.synchronize()
        assert event.done()
        lane.wait(Event())


def test_with_mps_streams_lanes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread, since torch records no events there; kept tensors are held until then."""
    stand_in = MpsStandIn(streams=True)
    monkeypatch.setattr(lanes, "_mps", stand_in)
    pool = pool_of(lanes.MpsStreamLane, monkeypatch)

    def work() -> None:
        with pool.stream() as lane:
            assert stand_in.log == ["synchronize"]  # what was queued outside
            assert stand_in.current_stream() is lane.stream
            lane._keep_alive(torch.ones(1))
            event = lane.record()
            assert event.done()
            assert stand_in.log == ["synchronize"] * 2
            assert lane._kept == []
            lane._keep_alive(torch.ones(1))
        assert lane._kept == []
        assert stand_in.log == ["synchronize"] * 3
        assert stand_in.current_stream() is stand_in.default_stream()

    in_thread(work)
    assert pool.submit(lambda: 8).result(LONG) == 8
