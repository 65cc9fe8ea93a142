"""What a lane is on each device, and the events by which lanes hand work to one another."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from orchard.errors import ArgumentTypeError, ArgumentValueError, ForkedProcessError
from orchard.serving import cores
from orchard.text import one_line

_mps: Any = torch.mps  # what it has differs from one torch to the next


class Event:
    """A point in the work of a lane. This one has passed already, as on the CPU they all have."""

    def done(self) -> bool:
        """Whether the work before this point is finished; never waits."""
        return True

    def synchronize(self) -> None:
        """Wait in this thread until the work before this point is finished."""


class Lane:
    """A place where one thread's work runs in order. `index` 0 is the main thread's.

    What is not overridden is right where work is finished when the call returns.
    """

    survives_fork: ClassVar[bool] = False

    def __init__(self, device: torch.device, index: int) -> None:
        self.device = device
        self.index = index
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.index} on {self.device}>"

    def record(self) -> Event:
        """The point after all work queued here so far."""
        self.check_process()
        return self._record()

    def wait(self, event: Event) -> None:
        """Let later work here begin after the event; only the device waits where it can."""
        if not isinstance(event, Event):
            raise ArgumentTypeError(
                f"event is a {type(event).__name__}; it must be what a lane's record() returned"
            )
        self.check_process()
        self._wait(event)

    def synchronize(self) -> None:
        """Wait in this thread until the work queued here so far is finished."""
        self.record().synchronize()

    def keep_alive(self, tensor: Tensor) -> None:
        """Say that work queued here uses a tensor of another lane, so that its memory stays.

        A tensor that is not on the lane's kind of device needs nothing.
        """
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f"tensor is a {type(tensor).__name__}; it must be a Tensor")
        self.check_process()
        if tensor.device.type == self.device.type:
            self._keep_alive(tensor)

    def check_process(self) -> None:
        if not self.survives_fork and os.getpid() != self._process:
            raise ForkedProcessError(
                f"this StreamPool is on {self.device}, which a forked process cannot use; start "
                'processes with torch.multiprocessing.get_context("spawn") and make the pool there'
            )

    def outside(self) -> Hashable:
        """Where the calling thread queues its work now; None where that is done already."""
        return None

    def follow(self, outside: Hashable) -> None:
        """Let later work here begin after what has been queued there so far."""

    def lend(self, tensors: Iterable[Tensor], outside: Hashable) -> None:
        """Say that work queued there will use tensors of this lane."""

    def home(self, outside: Hashable) -> Home | None:
        """Where tensors may be made that need not be lent; None where there is no such place."""
        return None

    def occupied(self, users: int) -> AbstractContextManager[None]:
        """A context in which this thread's work runs here, one of so many threads at work."""
        return nullcontext()

    def _record(self) -> Event:
        return Event()

    def _wait(self, event: Event) -> None:
        event.synchronize()

    def _keep_alive(self, tensor: Tensor) -> None:
        """Nothing, where memory is not given to others before the work with it is finished."""


class CpuLane(Lane):
    """A share of the cores."""

    survives_fork = True

    def occupied(self, users: int) -> AbstractContextManager[None]:
        return cores.limited_to(cores.share(users))


class CudaEvent(Event):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.raw = torch.cuda.Event()
        self.raw.record(stream)

    def done(self) -> bool:
        return bool(self.raw.query())

    def synchronize(self) -> None:
        self.raw.synchronize()


class Home:
    """Memory of the stream that will read what one lane writes. Where such a tensor is dropped no
    event has to tell the allocator when it may be used again: half the cost of a small one.
    """

    def __init__(self, writer: torch.cuda.Stream, reader: torch.cuda.Stream) -> None:
        self.device = reader.device
        self.is_left = False  # some of what was made is the writer's
        self._writer = writer
        self._reader = reader

    def make(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """What `make` makes: the reader's, if all that it has queued is done. What is not might
        still use that memory, and the writer does not wait for it.
        """
        if self._reader.query():
            torch.cuda.set_stream(self._reader)
            try:
                made = make()
            finally:
                torch.cuda.set_stream(self._writer)
            if self._reader.query():  # once more: others may have queued and dropped meanwhile
                return made
        self.is_left = True
        return make()


class CudaLane(Lane):
    """A stream of torch's; lane 0 is the default stream."""

    def __init__(self, device: torch.device, index: int) -> None:
        super().__init__(device, index)
        self.stream = torch.cuda.Stream(device) if index else torch.cuda.default_stream(device)
        self.number: int = self.stream.device_index

    def occupied(self, users: int) -> AbstractContextManager[None]:
        return _OnStream(self)

    def outside(self) -> Hashable:
        # As torch.cuda.current_stream, at a twentieth of its cost.
        return torch._C._cuda_getCurrentStream(self.number)

    def follow(self, outside: Hashable) -> None:
        stream = _stream_of(outside)
        if stream is not None and stream != self.stream:
            self.stream.wait_event(CudaEvent(stream).raw)

    def lend(self, tensors: Iterable[Tensor], outside: Hashable) -> None:
        stream = _stream_of(outside)
        if stream is not None:
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(stream)

    def home(self, outside: Hashable) -> Home | None:
        stream = _stream_of(outside)
        return None if stream is None else Home(self.stream, stream)

    def _record(self) -> Event:
        return CudaEvent(self.stream)

    def _wait(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            self.stream.wait_event(event.raw)
        else:
            event.synchronize()

    def _keep_alive(self, tensor: Tensor) -> None:
        tensor.record_stream(self.stream)


@lru_cache(maxsize=256)
def _stream_of(outside: Hashable) -> torch.cuda.Stream | None:
    if not isinstance(outside, tuple):
        return None
    stream, device, kind = outside
    return torch.cuda.Stream(stream_id=stream, device_index=device, device_type=kind)


class _OnStream(AbstractContextManager[None]):
    """As torch.cuda.stream, at a fraction of its cost, and after what was queued outside."""

    def __init__(self, lane: CudaLane) -> None:
        self._lane = lane

    def __enter__(self) -> None:
        lane = self._lane
        self._outside = lane.outside()
        self._device = torch.cuda.current_device()
        lane.follow(self._outside)
        torch.cuda.set_stream(lane.stream)

    def __exit__(self, *_: object) -> None:
        stream = _stream_of(self._outside)
        if stream is not None:
            torch.cuda.set_stream(stream)
        if self._device != self._lane.number:
            torch.cuda.set_device(self._device)


_mps_lock = threading.RLock()  # of the process: two threads in MPS at once can end it


class MpsEvent(Event):
    def __init__(self) -> None:
        self.raw = _mps.Event()
        self.raw.record()

    def done(self) -> bool:
        with _mps_lock:
            return bool(self.raw.query())

    def synchronize(self) -> None:
        with _mps_lock:
            self.raw.synchronize()


class MpsTurnLane(Lane):
    """A turn on torch's only MPS stream: a thread inside has it alone, in every pool."""

    @contextmanager
    def occupied(self, users: int) -> Iterator[None]:
        with _mps_lock:
            yield

    def _record(self) -> Event:
        with _mps_lock:
            return MpsEvent()

    def _wait(self, event: Event) -> None:
        if not isinstance(event, MpsEvent):  # the same stream is in order by itself
            event.synchronize()


class MpsStreamLane(Lane):
    """A stream of torch.mps. torch records events on the default one only, so others are waited
    for in the thread, and tensors are held until then.
    """

    def __init__(self, device: torch.device, index: int) -> None:
        super().__init__(device, index)
        self.stream = _mps.Stream() if index else _mps.default_stream()
        self._lock = threading.Lock()
        self._kept: list[Tensor] = []

    @contextmanager
    def occupied(self, users: int) -> Iterator[None]:
        self.outside()
        try:
            with _mps.stream(self.stream):
                yield
        finally:
            if self._kept:
                self._record()

    def outside(self) -> Hashable:
        _mps.current_stream().synchronize()
        return None

    def _record(self) -> Event:
        with self._lock:
            kept, self._kept = self._kept, []
        self.stream.synchronize()
        del kept
        return Event()

    def _keep_alive(self, tensor: Tensor) -> None:
        with self._lock:
            self._kept.append(tensor)


def mps_streams_work() -> bool:
    """Whether this torch computes on MPS streams of its own; seen by doing so."""
    try:
        stream = _mps.Stream()
        with _mps.stream(stream):
            inside = _mps.current_stream() == stream
            answer = torch.arange(8, device="mps") * 2
        stream.synchronize()
        return inside and answer.tolist() == list(range(0, 16, 2))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False


def _present(kind: str) -> int:
    """How many devices of a kind this process sees."""
    if kind == "cuda":
        return torch.cuda.device_count()
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return int(kind == "cpu")


def checked_device(device: torch.device | str | int | None) -> torch.device:
    """The device, with its index; None is the best kind there is."""
    if device is None:
        device = next(kind for kind in ("cuda", "mps", "cpu") if _present(kind))
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentValueError(f"device is {device!r}; {one_line(error)}") from error
    if found.type not in ("cpu", "cuda", "mps"):
        raise ArgumentValueError(f"device is {str(found)!r}; it must be on cpu, cuda or mps")
    present = _present(found.type)
    if (found.index or 0) >= present:
        raise ArgumentValueError(f"device is {str(found)!r}; there are {present} of its kind here")
    if found.type == "cuda":
        index = torch.cuda.current_device() if found.index is None else found.index
        return torch.device("cuda", index)
    return torch.device(found.type)


def open_lanes(device: torch.device, count: int) -> list[Lane]:
    """Lanes of a checked device; the first is the default one."""
    kind: type[Lane] = CpuLane
    if device.type == "cuda":
        kind = CudaLane
    elif device.type == "mps":
        kind = MpsStreamLane if mps_streams_work() else MpsTurnLane
    return [kind(device, index) for index in range(count)]
