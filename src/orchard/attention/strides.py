"""Arithmetic on shapes and strides."""

from __future__ import annotations

from collections.abc import Sequence


def axis_order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Axes from the outermost in memory to the innermost.

    Expanded axes and axes of size one keep their logical place.
    """
    order = [0]
    for axis in range(1, len(shape)):
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


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps for axes that lie in memory in this order, outermost first."""
    strides = [1] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * max(shape[axis], 1)
    return tuple(strides)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return dense_strides(shape, range(len(shape)))
