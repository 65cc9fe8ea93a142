"""torch.mps.compile_shader on a CPU: the same source, the same arguments, and every check."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from orchard.backends.metal.limits import BUFFERS, GROUP_THREADS, THREADGROUP_BYTES
from orchard.testing.metal import rewriter, toolchain
from orchard.testing.metal.binding import Addresses, Argument, Bounds, Inline, Memory, bind
from orchard.testing.metal.errors import (
    BindingError,
    DivergenceError,
    EmulationError,
    OutOfBoundsError,
    RaceError,
    UndefinedBehaviourError,
)
from orchard.testing.metal.machine import (
    ARRAY,
    ARRAY_START,
    SLOTS,
    ArrayInfo,
    Launch,
    Report,
    machine,
)
from orchard.testing.metal.toolchain import Mode

Schedule = Literal["in-order", "reversed", "random"]
SCHEDULES: tuple[Schedule, ...] = ("in-order", "reversed", "random")

SIMD_WIDTH = 32
EAGER = 8  # kernels of a source that are compiled with it; of a larger one, when asked for
_ERRORS = struct.Struct("<128s128s250s2xI")
_ERROR_COUNT = 30
_PROBLEM = (
    "",
    "buffer",
    "read-only",
    "array",
    "wild",
    "misaligned",
    "race",
    "barrier",
    "simd",
    "stack",
    "undefined",
)


@dataclass(frozen=True)
class Counters:
    """What launches did. Bytes are counted in the modes "checked" and "flat" only.

    A collective counts once per simdgroup, a threadgroup barrier once per threadgroup. Inline
    arguments are not device memory.
    """

    multiplies: int = 0  # of 8x8 matrices, with accumulation
    shuffles: int = 0
    reductions: int = 0
    votes: int = 0
    simdgroup_barriers: int = 0
    threadgroup_barriers: int = 0
    device_read: int = 0
    device_written: int = 0
    inline_read: int = 0
    threadgroup_read: int = 0
    threadgroup_written: int = 0
    threadgroups: int = 0
    switches: int = 0  # between threads: what the emulator's time goes with

    def __add__(self, other: Counters) -> Counters:
        names = [item.name for item in fields(self)]
        return Counters(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass
class Emulator:
    """Compiles and runs kernels; settings other than `mode` may change between launches.

    mode: "checked" finds every access out of bounds and every race in threadgroup memory, "fast"
    none, "flat" drops the address spaces and adds the compiler's undefined-behaviour checks.
    bounds: what a tensor argument may be accessed in: all of its storage after its first element,
    as Metal binds it, or its own first to last element.
    workers: operating-system threads that share the threadgroups of a launch.
    divergence: whether reductions and shuffles may be reached by some lanes only.
    """

    mode: Mode = "checked"
    schedule: Schedule = "in-order"
    seed: int = 0
    bounds: Bounds = "storage"
    workers: int = 1
    divergence: bool = False
    counters: dict[str, Counters] = field(default_factory=dict)  # by kernel name, summed

    def compile_shader(self, source: str) -> ShaderLibrary:
        """The kernels of a source; raises SyntaxError with the compiler's words."""
        if not source.isascii():
            line = next(i for i, text in enumerate(source.split("\n"), 1) if not text.isascii())
            raise SyntaxError(f"program_source:{line}: error: Metal source must be ASCII")
        try:
            return ShaderLibrary(self, rewriter.Source(toolchain.preprocess(source)))
        except (toolchain.CompileError, rewriter.RewriteError) as error:
            raise SyntaxError(_readable(str(error))) from None


def compile_shader(source: str, mode: Mode = "checked") -> ShaderLibrary:
    """As torch.mps.compile_shader, with CPU tensors in the place of MPS tensors."""
    return Emulator(mode).compile_shader(source)


class ShaderLibrary:
    """The kernels of a source as attributes."""

    def __init__(self, emulator: Emulator, source: rewriter.Source) -> None:
        self._emulator = emulator
        self._source = source
        self._kernels: dict[str, MetalKernel] = {}
        if len(source.kernels) <= EAGER:
            for name in source.kernels:
                self._kernel(name)
        if not self._kernels:
            toolchain.build(source.text(None), emulator.mode)

    def __dir__(self) -> list[str]:
        return list(self._source.kernels)

    def __getattr__(self, name: str) -> MetalKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._source.kernels:
            raise RuntimeError(f"Failed to create function state object for: {name}")
        try:
            return self._kernel(name)
        except toolchain.CompileError as error:
            raise SyntaxError(_readable(str(error))) from None

    def _kernel(self, name: str) -> MetalKernel:
        if name not in self._kernels:
            path = toolchain.build(self._source.text(name), self._emulator.mode)
            kernel = self._source.kernels[name]
            self._kernels[name] = MetalKernel(self._emulator, kernel, toolchain.load(path))
        return self._kernels[name]


class MetalKernel:
    """A kernel that can be launched."""

    def __init__(self, emulator: Emulator, kernel: rewriter.Kernel, library: ctypes.CDLL) -> None:
        self._emulator = emulator
        self._kernel = kernel
        self._run = library.emu_run
        self._run.restype = None
        self._entry = ctypes.cast(library.emu_entry, ctypes.c_void_p)
        library.emu_worker_size.restype = ctypes.c_uint64
        self._worker_size: int = library.emu_worker_size()
        self._arrays = _arrays(library, kernel)
        self.last_counters = Counters()
        self._scalars = {index: int(library.emu_scalar(index)) for index in kernel.buffers}
        self.max_threads_per_threadgroup = min(GROUP_THREADS, int(library.emu_limit()))
        self.thread_execution_width = SIMD_WIDTH

    @property
    def name(self) -> str:
        return self._kernel.name

    @property
    def static_thread_group_memory_length(self) -> int:
        return sum(-(-info.size // 16) * 16 for info in self._arrays.values())

    def __call__(
        self,
        *args: Any,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: str | Mapping[int, str] | None = None,
        error_buf_idx: int | None = None,
    ) -> None:
        grid, group = _vector(threads), _vector(group_size)
        arguments = dict(enumerate(bind(args, arg_casts, self._emulator.bounds)))
        if grid is None:
            first = next((arg for arg in args if isinstance(arg, Tensor)), None)
            grid = None if first is None else [first.numel()]
        errors = torch.zeros(4 + _ERRORS.size * _ERROR_COUNT, dtype=torch.uint8)
        if error_buf_idx is not None:
            (arguments[error_buf_idx],) = bind([errors], None, "storage")
        if grid is None:
            raise RuntimeError("Number of threads is undefined or has wrong dimension")
        if group is not None and len(group) != len(grid):
            raise RuntimeError("threads and group_size must have the same length")
        self._launch(arguments, *self._shape(grid, group))
        _raise_reported(errors)

    def _shape(self, grid: list[int], group: list[int] | None) -> tuple[list[int], list[int]]:
        if 0 in grid:
            raise RuntimeError(f"{self.name}: a launch of {tuple(grid)} threads; skip it instead")
        limit = self.max_threads_per_threadgroup
        if group is None:
            group = [min(grid[0], limit)] if len(grid) == 1 else [limit, 1, 1][: len(grid)]
        size = 1
        for extent in group:
            size *= extent
        if size > limit:
            raise ValueError(f"Threadgroup size exceeds {limit} limit")
        if size == 0:
            raise ValueError(f"group_size {tuple(group)} has no threads")
        pad = [1] * (3 - len(grid))
        return grid + pad, group + pad

    def _launch(self, arguments: dict[int, Argument], grid: list[int], group: list[int]) -> None:
        memory = self.static_thread_group_memory_length
        if memory > THREADGROUP_BYTES:
            raise RuntimeError(
                f"{self.name}: {memory} bytes of threadgroup memory, the limit is"
                f" {THREADGROUP_BYTES}"
            )
        self._check_bound(arguments)
        emulator = self._emulator
        with machine.lock:
            placed = _Placed()
            try:
                launches = []
                for number in range(emulator.workers):
                    worker = machine.worker(number, self._worker_size)
                    launches.append(worker.launch())
                placed.place(arguments)
                for number, launch in enumerate(launches):
                    self._fill(launch, placed, grid, group)
                    launch.first, launch.step = number, emulator.workers
                self._execute(launches)
                report = next((item.report for item in launches if item.report.kind), None)
                if report is not None:
                    raise self._error(report, placed)
                placed.write_back()
            finally:
                placed.clear()
            total = Counters()
            for launch in launches:
                names = (item.name for item in fields(Counters))
                total += Counters(**{name: getattr(launch.counters, name) for name in names})
        self.last_counters = total
        emulator.counters[self.name] = emulator.counters.get(self.name, Counters()) + total

    def _check_bound(self, arguments: Mapping[int, Argument]) -> None:
        unbound = sorted(self._kernel.buffers - arguments.keys())
        if unbound:
            raise RuntimeError(f"{self.name}: nothing is bound to buffer {unbound[0]}")
        for index, argument in arguments.items():
            if index not in self._scalars:
                raise BindingError(f"{self.name}: an argument for buffer {index}, which it has not")
            wanted = self._scalars[index]
            if not isinstance(argument, Inline) or wanted == 0:
                continue
            given = -argument.element if argument.floating else argument.element
            if given != wanted:
                raise BindingError(
                    f"{self.name}: {_numbers(given)} are bound to buffer {index}, and the kernel"
                    f" reads {_numbers(wanted)}"
                )

    def _execute(self, launches: list[Launch]) -> None:
        if len(launches) == 1:
            self._run(ctypes.byref(launches[0]))
            return
        with ThreadPoolExecutor(len(launches)) as pool:
            list(pool.map(lambda launch: self._run(ctypes.byref(launch)), launches))

    def _fill(self, launch: Launch, placed: _Placed, grid: list[int], group: list[int]) -> None:
        emulator = self._emulator
        launch.entry = self._entry
        launch.threads[:], launch.group[:] = grid, group
        launch.schedule = SCHEDULES.index(emulator.schedule)
        launch.seed = emulator.seed & 0xFFFFFFFF
        launch.divergence = emulator.divergence
        launch.heap = machine.heap.address
        placed.fill(launch)
        launch.granule = 0 if any(info.element == 1 for info in self._arrays.values()) else 1
        offset = 0
        for slot, info in self._arrays.items():
            array = launch.array[slot]
            array.start = launch.arena + slot * ARRAY + ARRAY_START + offset % 4096
            if info.align < 16:  # on its alignment and no more, which is all that Metal promises
                array.start += info.align
            array.size, array.offset = info.size, offset
            offset += -(-info.size // 16) * 16

    # ---- Reports

    def _error(self, report: Report, placed: _Placed) -> EmulationError:
        problem = _PROBLEM[report.kind]
        who = f"thread {report.thread} of threadgroup {tuple(report.group)}"
        after = f", after the synchronisation at {report.site}" if report.site.file else ""
        access = f"{'wrote' if report.write else 'read'} {report.size} bytes"
        context = _readable(f"{who}{after}")
        if problem in ("buffer", "read-only"):
            index, element, size = placed.describe(report.slot)
            at = (report.address - report.start + (1 << 64)) % (1 << 64)
            at = (at - (1 << 64) if at >> 63 else at) // element
            what = f"of {size // element} elements" if problem == "buffer" else "which is read-only"
            message = f"{self.name}: {access} at element {at} of buffer {index}, {what} ({context})"
            return OutOfBoundsError(message, buffer=index, index=at)
        if problem in ("array", "race"):
            name, at, size = self._element(report)
            if problem == "array":
                message = f"{self.name}: {access} at {name}[{at}] of {size} elements ({context})"
                return OutOfBoundsError(message, variable=name, index=at)
            other = f"thread {report.other} {'wrote' if report.other_write else 'read'} it"
            if report.other_site.file:
                other = _readable(f"{other}, now at {report.other_site}")
            return RaceError(
                f"{self.name}: race on {name}[{at}]: {access} ({context}); {other};"
                " no barrier for threadgroup memory is between them"
            )
        if problem in ("barrier", "simd"):
            return DivergenceError(self._divergence(report, problem))
        if problem == "wild":
            return OutOfBoundsError(
                f"{self.name}: {access} at {report.address:#x}, in no buffer ({context})"
            )
        if problem == "misaligned":
            return UndefinedBehaviourError(
                f"{self.name}: {access} at {report.address:#x}, misaligned ({context})"
            )
        if problem == "stack":
            return EmulationError(f"{self.name}: the stack overflowed ({context})")
        detail = report.detail.decode().replace("_", " ")
        return UndefinedBehaviourError(f"{self.name}: {detail} ({context})")

    def _element(self, report: Report) -> tuple[str, int, int]:
        """Name, index and number of elements of a threadgroup variable."""
        info = self._arrays.get(report.slot)
        if info is None:
            return "threadgroup memory", 0, 0
        variable = self._kernel.variables[report.slot]
        at = report.address - report.start
        return variable.name, at // info.element, info.size // info.element

    def _divergence(self, report: Report, problem: str) -> str:
        where, group = _readable(str(report.site)), tuple(report.group)
        elsewhere = (
            _readable(f"; others are at {report.other_site}") if report.other_site.file else ""
        )
        if problem == "barrier":
            return (
                f"{self.name}: {report.lanes} of {report.expected} threads of threadgroup {group}"
                f" wait at the threadgroup barrier at {where}{elsewhere}"
            )
        simdgroup = report.thread // SIMD_WIDTH
        return (
            f"{self.name}: lanes {report.lanes:#010x} of {report.expected:#010x} of simdgroup"
            f" {simdgroup} of threadgroup {group} are at the collective at {where}{elsewhere}"
        )


class _Placed:
    """Arguments in the machine's memory."""

    def __init__(self) -> None:
        self._buffers: dict[int, int] = {}
        self._slots: list[tuple[int, int, int, Memory | Inline]] = []  # index, start, size
        self._known: dict[tuple[object, ...], int] = {}

    def place(self, arguments: dict[int, Argument]) -> None:
        for index, argument in arguments.items():
            if not 0 <= index < BUFFERS:
                raise RuntimeError(f"buffer index {index}: a kernel takes {BUFFERS} at most")
            if isinstance(argument, Addresses):
                pointers = [self._place(index, memory) for memory in argument.memories]
                argument = Inline(struct.pack(f"<{len(pointers)}Q", *pointers), 8)
            self._buffers[index] = self._place(index, argument)

    def _place(self, index: int, argument: Memory | Inline) -> int:
        if isinstance(argument, Memory):
            if argument.identity in self._known:
                return self._known[argument.identity]
            size, offset = argument.size, argument.alignment
        else:
            size, offset = len(argument.data), 0
        if len(self._slots) == SLOTS:
            raise RuntimeError(f"the emulator takes {SLOTS} buffers, those in lists included")
        start = machine.heap.place(len(self._slots), size, offset)
        self._slots.append((index, start, size, argument))
        if isinstance(argument, Inline):
            ctypes.memmove(start, argument.data, size)
            return start
        self._known[argument.identity] = start
        if size:
            argument.cells(start).copy_(argument.cells(argument.address))
        return start

    def fill(self, launch: Launch) -> None:
        for index, start in self._buffers.items():
            launch.buffers[index] = start
        launch.slots = SLOTS
        for number, (_, start, size, argument) in enumerate(self._slots):
            slot = launch.slot[number]
            slot.low, slot.high = start, start + size
            slot.writable = isinstance(argument, Memory)

    def describe(self, number: int) -> tuple[int, int, int]:
        """Buffer index, element size and size of a place."""
        if number >= len(self._slots):
            return -1, 1, 0
        index, _, size, argument = self._slots[number]
        return index, argument.element, size

    def write_back(self) -> None:
        """Only what changed: arguments may overlap, each in a place of its own."""
        changes = []
        for _, start, size, argument in self._slots:
            if isinstance(argument, Inline) or size == 0:
                continue
            before, after = argument.cells(argument.address), argument.cells(start)
            if not torch.equal(before, after):
                changed = before != after
                changes.append((before, changed, after[changed]))
        for before, changed, values in changes:
            before[changed] = values

    def clear(self) -> None:
        for _, start, size, _ in self._slots:
            machine.heap.clear(start, size)


def _numbers(scalar: int) -> str:
    """In words, what `emu_scalar` says of a buffer."""
    return f"{8 * abs(scalar)}-bit {'floats' if scalar < 0 else 'integers'}"


def _arrays(library: ctypes.CDLL, kernel: rewriter.Kernel) -> dict[int, ArrayInfo]:
    """Threadgroup variables of a kernel by their slot."""
    library.emu_arrays.restype = ctypes.POINTER(ArrayInfo)
    count = ctypes.c_uint32()
    table = library.emu_arrays(ctypes.byref(count))
    found = {info.slot: info for info in table[: count.value]} if count.value else {}
    numbers = {variable.number: variable.slot for variable in kernel.variables}
    return {numbers[slot]: info for slot, info in sorted(found.items()) if slot in numbers}


def _vector(value: int | Sequence[int] | None) -> list[int] | None:
    if value is None:
        return None
    values = [value] if isinstance(value, int) else list(value)
    if not 0 < len(values) < 4 or not all(isinstance(v, int) and v >= 0 for v in values):
        raise RuntimeError(f"threads and group_size are 1 to 3 counts, not {value!r}")
    return values


def _raise_reported(errors: Tensor) -> None:
    """What a kernel reported through c10/metal/error.h, which a Mac raises when it next waits."""
    data = ctypes.string_at(errors.data_ptr(), errors.numel())
    (count,) = struct.unpack_from("<I", data)
    if not count:
        return
    lines = []
    for number in range(min(count, _ERROR_COUNT)):
        *texts, line = _ERRORS.unpack_from(data, 4 + number * _ERRORS.size)
        file, function, message = (text.split(b"\0")[0].decode() for text in texts)
        lines.append(f"{file}:{line} in {function}: {message}")
    raise RuntimeError("\n".join(lines))


def _readable(text: str) -> str:
    """A compiler's words as a writer of Metal knows them."""
    for number, space in ((1, "device"), (2, "constant"), (3, "threadgroup")):
        text = text.replace(f"__attribute__((address_space({number})))", space)
    text = re.sub(r"'(?:\w+ )?emu_type_\w+' \(aka ('[^']*')\)", r"\1", text)
    return text.replace(f"{toolchain.TORCH_HEADERS}/", "").replace("<stdin>", "program_source")
