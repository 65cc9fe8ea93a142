"""Running one batch: on its lane, in halves where it fails, with an outcome for every request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from orchard.errors import ArgumentValueError, WorkerDied
from orchard.serving import ending
from orchard.serving.batching import Batching, Concatenation, OutputShapeError
from orchard.serving.express import Parcel
from orchard.serving.lanes import Lane, open_lanes
from orchard.serving.one_core import OneCore
from orchard.serving.tickets import Outcome
from orchard.text import one_line

_OUT_OF_MEMORY = (  # how torch's allocators and CUDA's libraries say it in a plain RuntimeError
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


_device, _outside, _rows = attrgetter("device"), attrgetter("outside"), attrgetter("rows")
_succeeded = partial(tuple.__new__, Outcome)  # of (value, None), at a third of the class's own cost


class LanePool(Protocol):
    """What is needed of a StreamPool."""

    @property
    def device(self) -> torch.device: ...

    def stream(self) -> AbstractContextManager[Lane]: ...

    def close(self) -> None: ...


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
        one_core: OneCore | None = None,
    ) -> None:
        self._function = function
        self._batching = batching
        self._moves_to = device
        self._pool = pool
        self._make_pool = make_pool
        self._one_core = one_core
        model = None if allow_training else model_of(function)
        self._modules = () if model is None else tuple(model.modules())
        home = device or (pool.device if pool else _device_of(model_of(function)))
        self._home = home and _indexed(home)
        self._abroad = self._home if self._home and self._home.type != "cpu" else None
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
        self._place(parcel)
        outside = self._outside(parcel)
        if outside is not None:
            parcel.outside = outside()
        return parcel

    def _outside(self, parcel: Parcel) -> Callable[[], Hashable] | None:
        """What tells where the submitter of such a parcel queues its work, and waits if need be."""
        if parcel.device is not None and (parcel.is_there or parcel.device.type == "cuda"):
            return self._entry(parcel.device).outside
        return None

    def pattern(self, x: Any) -> tuple[Any, ...] | None:
        """What parcels of tensors like x have in common, if x is a plain tensor: structure, rows,
        group, device, whether it is there, and `_outside`.
        """
        if type(x) is not Tensor or not isinstance(self._batching, Concatenation) or not x.dim():
            return None
        it = self._batching.parcel(x)
        self._place(it)
        return it.spec, it.rows, it.group, it.device, it.is_there, self._outside(it)

    def _place(self, parcel: Parcel) -> None:
        """Find the one device other than the CPU that the request needs, if it needs one."""
        parcel.device = self._abroad
        for leaf in parcel.leaves:
            if not isinstance(leaf, Tensor) or leaf.is_cpu:
                continue
            device = leaf.device
            if self._home is not None and device != self._home:
                raise ArgumentValueError(
                    f"x has a tensor on {device}; the queue runs on {self._home}, and tensors "
                    "must be there or on the CPU"
                )
            if parcel.device is not None and device != parcel.device:
                raise _two_devices({device, parcel.device})
            parcel.device, parcel.is_there = device, True

    def _entry(self, device: torch.device) -> Lane:
        """The default lane of a device."""
        entry = self._entries.get(device)
        if entry is None:
            with self._lock:
                entry = self._entries.get(device) or open_lanes(device, 1)[0]
                self._entries[device] = entry
        return entry

    def warm(self, examples: Sequence[Any]) -> None:
        """Run each example as a batch of its own."""
        for example in examples:
            self._run([self.parcel(example)])

    def run(self, parcels: Sequence[Parcel]) -> Report:
        """Run the batch; one that fails is run again in halves until the guilty are alone."""
        if self._one_core is not None:
            self._one_core.join_as_worker()
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
        rows = sum(map(_rows, parcels))
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
        report.outcomes += map(_succeeded, zip(results, repeat(None)))
        filled, positions = self._batching.positions(parcels)
        report.batches += 1
        report.rows += rows
        report.filled += filled
        report.positions += positions
        return True

    def _run(self, parcels: Sequence[Parcel]) -> list[Any]:
        """Results whose data is ready."""
        self.check_mode()
        devices = set(map(_device, parcels)) - {None}
        if len(devices) > 1:
            raise _two_devices(devices)
        device = devices.pop() if devices else None
        with torch.no_grad(), self._lane(device) as lane:
            if lane is None:
                results = self._batching.run(self._function, parcels, self._moves_to)
                self._await(results)
            else:
                results = self._run_in(lane, parcels)
        return results

    def _run_in(self, lane: Lane, parcels: Sequence[Parcel]) -> list[Any]:
        """The requests' tensors are held until their work is done, so no lane has to be told."""
        for outside in {parcel.outside for parcel in parcels if parcel.is_there}:
            lane.follow(outside)
        outsides = set(map(_outside, parcels))
        home = lane.home(*outsides) if len(outsides) == 1 else None
        try:
            results = self._batching.run(self._function, parcels, self._moves_to, home)
        except BaseException:
            with suppress(RuntimeError):  # the first error says more
                lane.synchronize()
            raise
        lane.synchronize()
        if home is None or home.is_left:
            for outside in outsides:
                theirs = (r for r, p in zip(results, parcels, strict=True) if p.outside == outside)
                lane.lend(chain.from_iterable(map(_tensors_of, theirs)), outside)
        return results

    def _await(self, results: list[Any]) -> None:
        """Wait for what a function computed on a device that its requests do not name."""
        leaves = (leaf for result in results for leaf in _tensors_of(result))
        for device in {leaf.device for leaf in leaves if not leaf.is_cpu}:
            entry = self._entry(device)
            entry.follow(entry.outside())
            entry.synchronize()

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


def _tensors_of(result: Any) -> Sequence[Tensor]:
    """The tensors of a result; a lone one is no tree to walk."""
    if isinstance(result, Tensor):
        return (result,)
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


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


def _two_devices(devices: Iterable[torch.device | None]) -> ArgumentValueError:
    return ArgumentValueError(
        f"x has tensors on {', '.join(sorted(map(str, devices)))}; besides the CPU one device is "
        "allowed"
    )
