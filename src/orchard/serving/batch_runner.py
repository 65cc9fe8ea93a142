"""Running one batch: on its lane, in halves where it fails, with an outcome for every request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from orchard.errors import ArgumentValueError, WorkerDied
from orchard.serving import ending
from orchard.serving.batching import Batching, Origin, OutputShapeError, Parcel
from orchard.serving.lanes import Lane, open_lanes
from orchard.text import one_line

_OUT_OF_MEMORY = (  # how torch's allocators and CUDA's libraries say it in a plain RuntimeError
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class LanePool(Protocol):
    """What is needed of a StreamPool."""

    @property
    def device(self) -> torch.device: ...

    def stream(self) -> AbstractContextManager[Lane]: ...

    def close(self) -> None: ...


class Outcome(NamedTuple):
    value: Any = None
    error: BaseException | None = None


@dataclass
class Report:
    """What became of a batch."""

    outcomes: list[Outcome] = field(default_factory=list)  # in the order of the parcels
    batches: int = 0
    rows: int = 0
    filled: int = 0
    positions: int = 0
    retried: int = 0
    out_of_memory: list[int] = field(default_factory=list)  # rows of the batches that had to halve
    memory_is_at_fault: bool = True  # False once a request ran out of memory alone
    fatal: bool = False  # the function raised what ends a thread


class BatchRunner:
    """The function, how its batches are made, and where they run."""

    def __init__(
        self,
        function: Callable[..., Any],
        batching: Batching,
        *,
        device: torch.device | None,
        pool: LanePool | None,
        make_pool: Callable[[torch.device], LanePool],
        allow_training: bool,
    ) -> None:
        self._function = function
        self._batching = batching
        self._moves_to = device
        self._pool = pool
        self._make_pool = make_pool
        model = None if allow_training else model_of(function)
        self._modules = () if model is None else tuple(model.modules())
        home = device or (pool.device if pool else _device_of(model_of(function)))
        self._home = home and _indexed(home)
        self._own_pools: dict[torch.device, LanePool] = {}
        self._entries: dict[torch.device, Lane] = {}
        self._lock = threading.Lock()
        self.check_mode()

    def check_mode(self) -> None:
        """Refuse a model of which any part is in training mode."""
        for module in self._modules:
            if module.training:
                names = {part: name for name, part in self._modules[0].named_modules()}
                raise ArgumentValueError(
                    "model_or_fn is in training mode "
                    f"({names.get(module) or type(module).__name__}); call .eval() on it first, or "
                    "pass allow_training=True"
                )

    def parcel(self, tree: Any) -> Parcel:
        """A request taken apart, with where it comes from; called by the submitter."""
        parcel = self._batching.parcel(tree)
        device = self._accelerator([parcel])
        if device is not None:
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            is_there = any(tensor.device == device for tensor in parcel.tensors)
            parcel.origin = Origin(self._entry(device).before() if is_there else None, stream)
        return parcel

    def _entry(self, device: torch.device) -> Lane:
        with self._lock:
            if device not in self._entries:
                self._entries[device] = open_lanes(device, 1)[0]
            return self._entries[device]

    def _accelerator(self, parcels: Sequence[Parcel]) -> torch.device | None:
        """The one device other than the CPU that the requests need, if they need one."""
        devices = {
            tensor.device for parcel in parcels for tensor in parcel.tensors if not tensor.is_cpu
        }
        if self._home is not None:
            strangers = devices - {self._home}
            if strangers:
                raise ArgumentValueError(
                    f"x has a tensor on {strangers.pop()}; the queue runs on {self._home}, and "
                    "tensors must be there or on the CPU"
                )
            return self._home if self._home.type != "cpu" else None
        if len(devices) > 1:
            raise ArgumentValueError(
                f"x has tensors on {', '.join(sorted(map(str, devices)))}; besides the CPU one "
                "device is allowed"
            )
        return devices.pop() if devices else None

    def warm(self, examples: Sequence[Any]) -> None:
        """Run each example as a batch of its own."""
        for example in examples:
            self._run([self.parcel(example)])

    def run(self, parcels: Sequence[Parcel]) -> Report:
        """Run the batch; one that fails is run again in halves until the guilty are alone."""
        report = Report()
        parts = [parcels]
        while parts:
            part = parts.pop()
            if not self._settled(part, report):
                middle = len(part) // 2
                report.retried += 1
                parts += [part[middle:], part[:middle]]
        return report

    def _settled(self, parcels: Sequence[Parcel], report: Report) -> bool:
        """Run one part, the next in order; False where it failed and has to be halved.

        The exception of a part that is halved ends here: its traceback would keep the batch's
        memory while the halves need it.
        """
        rows = sum(parcel.rows for parcel in parcels)
        try:
            results = self._run(parcels)
        except OutputShapeError as error:
            report.outcomes += [Outcome(error=OutputShapeError(*error.args)) for _ in parcels]
            return True
        except BaseException as error:  # SystemExit from a model is an outcome too
            memory = is_out_of_memory(error)
            report.fatal |= not isinstance(error, Exception)
            if len(parcels) > 1:
                if memory:
                    report.out_of_memory.append(rows)
                return False
            report.memory_is_at_fault &= not memory
            report.outcomes.append(Outcome(error=_given(error)))
            return True
        report.outcomes += map(Outcome, results)
        filled, positions = self._batching.positions(parcels)
        report.batches += 1
        report.rows += rows
        report.filled += filled
        report.positions += positions
        return True

    def _run(self, parcels: Sequence[Parcel]) -> list[Any]:
        """Results whose data is ready."""
        self.check_mode()
        with torch.no_grad(), self._lane(self._accelerator(parcels)) as lane:
            if lane is not None:
                for parcel in parcels:
                    _take_over(parcel, lane)
            results = self._batching.run(self._function, parcels, self._moves_to)
            if lane is not None:
                lane.record().synchronize()
            else:
                self._await(results)
        for result, parcel in zip(results, parcels, strict=True):
            if parcel.origin is not None and parcel.origin.stream is not None:
                _hand_over(result, parcel.origin.stream)
        return results

    def _await(self, results: list[Any]) -> None:
        """Wait for what a function computed on a device that its requests do not name."""
        leaves = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        for device in {leaf.device for leaf in leaves if not leaf.is_cpu}:
            self._entry(device).before().synchronize()
            self._entry(device).synchronize()

    def _lane(self, device: torch.device | None) -> AbstractContextManager[Lane | None]:
        if self._pool is not None:
            return self._pool.stream()
        if device is None:
            return ending.Stay()
        with self._lock:
            if device not in self._own_pools:
                self._own_pools[device] = self._make_pool(device)
            pool = self._own_pools[device]
        return pool.stream()

    def close(self) -> None:
        """Close the pools that were made here."""
        with self._lock:
            pools = list(self._own_pools.values())
        for pool in pools:
            pool.close()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch might have been served."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _OUT_OF_MEMORY)


def model_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module that is called: the function itself, or the one it is a method of."""
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, nn.Module) else None


def _device_of(model: nn.Module | None) -> torch.device | None:
    """Where a model lies; None where it lies nowhere or on several devices."""
    if model is None:
        return None
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return devices.pop() if len(devices) == 1 else None


def _indexed(device: torch.device) -> torch.device:
    """The device as tensors on it name it."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, 0)


def _given(error: BaseException) -> BaseException:
    """What a request's future holds for an error of its own, without our frames."""
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    if isinstance(error, Exception):
        return error
    died = WorkerDied(f"the worker thread was ended by its batch: {one_line(error)}")
    died.__cause__ = error
    return died


def _take_over(parcel: Parcel, lane: Lane) -> None:
    """Let the lane begin after the submitter's work on the request's tensors."""
    if parcel.origin is not None and parcel.origin.ready is not None:
        lane.wait(parcel.origin.ready)
        for tensor in parcel.tensors:
            lane.keep_alive(tensor)


def _hand_over(result: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that the submitter's stream will use the result's memory."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            leaf.record_stream(stream)
