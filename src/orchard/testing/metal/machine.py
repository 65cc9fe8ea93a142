"""The memory that kernels run in, and the structures shared with runtime.c.

Every buffer is copied into a place of its own in the middle of 128 GiB of addresses, so an access
can be attributed to its buffer however far off it is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading

from orchard.backends.metal.limits import BUFFERS, GROUP_THREADS, THREADGROUP_BYTES

STACK = 1 << 18
SLOTS = 64
SLOT = 1 << 37
ARRAYS = 64
ARRAY = 1 << 16
ARRAY_START = 1 << 14  # of an array within its place
_SHADOW = 32 * THREADGROUP_BYTES
_NAN = 0xFF  # a byte that makes NaN of every floating type

NO_RESERVE = 0x40 if sys.platform == "darwin" else 0x4000  # mmap has no name for it yet
_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


class Site(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("line", ctypes.c_uint32), ("column", ctypes.c_uint32)]

    def __str__(self) -> str:
        return f"{self.file.decode()}:{self.line}" if self.file else ""


class ArrayInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("slot", "size", "align", "element")]


class Slot(ctypes.Structure):
    _fields_ = [
        ("low", ctypes.c_uint64),
        ("high", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


class Array(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("start", "size", "offset")]


class Counts(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "multiplies",
            "shuffles",
            "reductions",
            "votes",
            "simdgroup_barriers",
            "threadgroup_barriers",
            "device_read",
            "device_written",
            "inline_read",
            "threadgroup_read",
            "threadgroup_written",
            "threadgroups",
            "switches",
        )
    ]


class Report(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("group", ctypes.c_uint32 * 3),
        ("slot", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("write", ctypes.c_uint32),
        ("other", ctypes.c_uint32),
        ("other_write", ctypes.c_uint32),
        ("lanes", ctypes.c_uint32),
        ("expected", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("site", Site),
        ("other_site", Site),
        ("detail", ctypes.c_char_p),
    ]


class Launch(ctypes.Structure):
    """The part of a worker that is filled in for a launch, and what comes back."""

    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("threads", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("first", ctypes.c_uint32),
        ("step", ctypes.c_uint32),
        ("schedule", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("divergence", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("buffers", ctypes.c_void_p * BUFFERS),
        ("slot", Slot * SLOTS),
        ("heap", ctypes.c_uint64),
        ("stacks", ctypes.c_uint64),
        ("arena", ctypes.c_uint64),
        ("shadow", ctypes.c_void_p),
        ("granule", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("array", Array * ARRAYS),
        ("counters", Counts),
        ("report", Report),
    ]


class Worker:
    """What one operating-system thread needs to run threadgroups."""

    def __init__(self, size: int) -> None:
        self.address = _map(size, writable=True)
        stacks = _map((GROUP_THREADS + 1) * STACK, writable=True)
        self.stacks = -(-stacks // STACK) * STACK
        self.arena = _map(ARRAYS * ARRAY, writable=True)
        self.shadow = _map(_SHADOW, writable=True)

    def launch(self) -> Launch:
        """A cleared launch; what the runtime keeps from one to the next stays."""
        ctypes.memset(self.address, 0, ctypes.sizeof(Launch))
        launch = Launch.from_address(self.address)
        launch.stacks, launch.arena, launch.shadow = self.stacks, self.arena, self.shadow
        return launch


class Heap:
    """Addresses for buffers, one place each."""

    def __init__(self) -> None:
        self.address = _map(SLOTS * SLOT, writable=False)

    def place(self, slot: int, size: int, offset: int) -> int:
        """A place for `size` bytes, `offset` after an aligned address: zeros, and NaN around them.

        A page takes memory once it is touched, so a large place may be used here and there.
        """
        if size > SLOT // 4:
            raise MemoryError(f"a buffer of {size} bytes is too large for the emulator")
        start = self.address + slot * SLOT + SLOT // 2 + offset
        first, last = _pages(start, size)
        _map(last - first, writable=True, at=first)
        ctypes.memset(first, _NAN, start - first)
        ctypes.memset(start + size, _NAN, last - start - size)
        return start

    def clear(self, start: int, size: int) -> None:
        first, last = _pages(start, size)
        _map(last - first, writable=False, at=first)


class Machine:
    """One launch at a time per process; `lock` is held for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.workers: list[Worker] = []
        self._heap: Heap | None = None

    @property
    def heap(self) -> Heap:
        if self._heap is None:
            self._heap = Heap()
        return self._heap

    def worker(self, number: int, size: int) -> Worker:
        while len(self.workers) <= number:
            self.workers.append(Worker(size))
        return self.workers[number]


machine = Machine()


def _pages(start: int, size: int) -> tuple[int, int]:
    page = mmap.PAGESIZE
    return start // page * page, -(-(start + max(size, 1)) // page) * page


def _map(size: int, *, writable: bool, at: int = 0) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE | (_FIXED if at else 0)
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else 0
    address: int | None = library.mmap(
        ctypes.c_void_p(at),
        ctypes.c_size_t(size),
        ctypes.c_int(access),
        ctypes.c_int(flags),
        ctypes.c_int(-1),
        ctypes.c_longlong(0),
    )
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address
