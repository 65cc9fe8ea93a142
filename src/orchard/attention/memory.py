"""Allocation of outputs: one place, so that their order is one rule and tests can poison them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchard.attention.problem import accumulation_dtype, contiguous_strides

allocate = torch.empty_strided  # the one source of output memory


def axis_order(tensor: Tensor) -> list[int]:
    """Axes of `tensor` from the outermost in memory to the innermost.

    Expanded axes and axes of size one keep their logical place.
    """
    shape, strides = tensor.shape, tensor.stride()
    order = [0]
    for axis in range(1, tensor.ndim):
        place = axis
        for position in range(axis - 1, -1, -1):
            other = order[position]
            if 0 in (strides[axis], strides[other]) or 1 in (shape[axis], shape[other]):
                continue
            if strides[axis] <= strides[other]:
                break
            place = position
        order.insert(place, axis)
    return order


def strides_following(tensor: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Dense strides of `shape` with its axes in the memory order of `tensor`."""
    strides = [1] * len(shape)
    step = 1
    for axis in reversed(axis_order(tensor)):
        strides[axis] = step
        step = step * max(shape[axis], 1)
    return tuple(strides)


def empty_following(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """An uninitialised tensor of `shape` that lies in memory as `tensor` does."""
    strides = strides_following(tensor, shape)
    return allocate(tuple(shape), strides, dtype=tensor.dtype, device=tensor.device)


def empty_lse(query: Tensor) -> Tensor:
    """An uninitialised lse for `query` [B, H, S, D]."""
    shape = query.shape[:3]
    dtype = accumulation_dtype(query.dtype)
    return allocate(shape, contiguous_strides(shape), dtype=dtype, device=query.device)


def conform(actual: Tensor, tensor: Tensor) -> Tensor:
    """`actual` in the dtype and memory order of `tensor`: itself where it has them, else a copy."""
    strides = strides_following(tensor, actual.shape)
    if actual.dtype == tensor.dtype and actual.stride() == strides:
        return actual
    return empty_following(tensor, actual.shape).copy_(actual)
