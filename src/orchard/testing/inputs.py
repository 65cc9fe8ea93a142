"""Operands laid out in every way torch can express, inside buffers that show any stray access."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

GUARD = 64  # elements of NaN before and after an operand


@dataclass(frozen=True)
class View:
    """How the axes of an operand lie in memory."""

    name: str
    order: tuple[int, ...] = (0, 1, 2, 3)  # axes from the outermost to the innermost
    step: tuple[int, ...] = (1, 1, 1, 1)  # element step of each axis
    pad: tuple[int, ...] = (0, 0, 0, 0)  # unused elements after each run along an axis
    offset: int = 0
    expanded: tuple[int, ...] = ()  # axes of stride 0
    overlapping: bool = False  # rows that begin one element after another

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        strides = [0] * len(shape)
        run = 1
        for axis in reversed(self.order):
            if axis in self.expanded:
                continue
            strides[axis] = run * self.step[axis]
            run = strides[axis] * max(shape[axis], 1) + self.pad[axis]
        if self.overlapping:
            strides[-2] = strides[-1]
        return tuple(strides)


VIEWS = (
    View("contiguous"),
    View("bshd", order=(0, 2, 1, 3)),
    View("sbhd", order=(2, 0, 1, 3)),
    View("rows_padded", pad=(0, 0, 0, 3)),
    View("qkv_slice", order=(0, 2, 1, 3), pad=(0, 128, 0, 0), offset=64),
    View("odd_offset", offset=1),
    View("last_strided", step=(1, 1, 1, 2)),
    View("last_outermost", order=(0, 1, 3, 2)),
    View("every_axis_strided", step=(2, 3, 2, 3)),
    View("batch_expanded", expanded=(0,)),
    View("heads_expanded", expanded=(1,)),
    View("rows_expanded", expanded=(2,)),
    View("last_expanded", expanded=(3,)),
    View("rows_overlapping", overlapping=True),
)
BY_NAME = {view.name: view for view in VIEWS}


@dataclass(frozen=True)
class Guarded:
    """A view into a buffer whose every other element is NaN, with a copy to compare with."""

    tensor: Tensor
    buffer: Tensor
    before: Tensor

    def intact(self) -> bool:
        """Whether neither the operand nor anything around it has changed, to the bit."""
        return torch.equal(_bits(self.buffer), _bits(self.before))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8)


def guarded(
    shape: Sequence[int],
    view: View = VIEWS[0],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    scale: float = 1.0,
) -> Guarded:
    """Normal values of `shape`, laid out as `view` says, between guards of NaN.

    They are drawn where `generator` is, on the CPU without one.
    """
    home = torch.device("cpu") if generator is None else generator.device
    draw = partial(torch.randn, generator=generator, dtype=torch.float64, device=home)
    strides = view.strides(shape)
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    start = GUARD + view.offset
    buffer = torch.full((start + span + GUARD,), torch.nan, dtype=dtype, device=home)
    tensor = buffer.as_strided(tuple(shape), strides, start)
    if tensor.numel():
        # Written through the first copy of each expanded axis; overlaps settle on the last write.
        once = tuple(1 if axis in view.expanded else size for axis, size in enumerate(shape))
        target = buffer.as_strided(once, strides, start)
        values = draw(once) * scale
        if view.overlapping:
            flat = buffer[start : start + span]
            flat.copy_(draw(span) * scale)
        else:
            target.copy_(values)
    buffer = buffer.to(device)
    return Guarded(buffer.as_strided(tuple(shape), strides, start), buffer, buffer.clone())
