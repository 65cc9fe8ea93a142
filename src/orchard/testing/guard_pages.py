"""Tensors against pages that nobody may touch: one element out of bounds ends the process.

Buffers of NaN show a stray read only where its value reaches the result. Here the hardware sees
every one. A run that may crash belongs in a process of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor

from orchard.attention import memory
from orchard.testing.inputs import Guarded

Side = Literal["start", "end"]  # of the tensor: which of them touches a forbidden page
SIDES: tuple[Side, Side] = ("start", "end")
_NAN = 0xFF  # a byte that makes NaN of every floating type
_PROT_NONE = 0


def moved(tensor: Tensor, side: Side, dtype: torch.dtype | None = None) -> Guarded:
    """A copy with the same strides, gaps included, whose first or last element meets the page."""
    dtype = tensor.dtype if dtype is None else dtype
    shape, strides = tensor.shape, tensor.stride()
    span = _span(shape, strides)
    room = _room(span * dtype.itemsize)
    start = _start(room, span * dtype.itemsize, side) // dtype.itemsize
    flat = room.view(dtype)
    source = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
    flat[start : start + span].copy_(source)
    return Guarded(flat.as_strided(shape, strides, start), room, room.clone())


@contextmanager
def guarded_outputs(side: Side) -> Iterator[list[Guarded]]:
    """While this lasts, every output that Orchard allocates begins as NaN and meets the page.

    Yields the outputs as they are made; `intact` speaks of the memory around them.
    """
    made: list[Guarded] = []

    def allocate(
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        if device.type != "cpu":
            raise ValueError(f"guard pages are in the CPU's memory, not on {device}")
        size = _span(shape, strides) * dtype.itemsize
        room = _room(size)
        start = _start(room, size, side)
        around = room[:start] if side == "end" else room[size:]
        output = room.view(dtype).as_strided(tuple(shape), tuple(strides), start // dtype.itemsize)
        made.append(Guarded(output, around, around.clone()))
        return output

    original = memory.allocate
    memory.allocate = cast(
        "Any", allocate
    )  # takes what Orchard passes, not all of torch's overloads
    try:
        yield made
    finally:
        memory.allocate = original


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _start(room: Tensor, size: int, side: Side) -> int:
    return 0 if side == "start" else room.numel() - size


def _room(size: int) -> Tensor:
    """Whole pages for `size` bytes, filled with NaN, between two pages without access."""
    pages = max(1, -(-size // mmap.PAGESIZE))
    mapping = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for page in (first, first + (pages + 1) * mmap.PAGESIZE):
        _forbid(page)
    room = torch.frombuffer(
        mapping, dtype=torch.uint8, count=pages * mmap.PAGESIZE, offset=mmap.PAGESIZE
    )
    return room.fill_(_NAN)


def _forbid(page: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    status = library.mprotect(
        ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_int(_PROT_NONE)
    )
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
