"""Allocation of outputs: one place, so that their order is one rule and tests can poison them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _get_deterministic_algorithms, _len_torch_dispatch_stack

from orchard.attention.problem import accumulation_dtype
from orchard.attention.strides import axis_order, contiguous_strides, dense_strides


def allocate(
    shape: tuple[int, ...], strides: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The one source of output memory, all of which is written afterwards.

    So what torch fills where it was asked for deterministic algorithms is not filled here.
    """
    plain = not _get_deterministic_algorithms() or device.type == "mps"
    if plain or _len_torch_dispatch_stack():  # a mode wants to see it, or has no real memory
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    elements = 0 if 0 in shape else 1 + reach
    storage = torch.UntypedStorage(elements * dtype.itemsize, device=device)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, strides)


class Place(NamedTuple):
    """Memory to allocate: what a backend's plan of a call holds in the place of an output."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def allocate(self, device: torch.device) -> Tensor:
        return allocate(self.shape, self.strides, dtype=self.dtype, device=device)


def dense(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Place:
    """A contiguous place."""
    return Place(tuple(shape), contiguous_strides(shape), dtype)


def following(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Place:
    """A dense place of this shape whose axes lie in memory as these strides have them."""
    return Place(tuple(shape), dense_strides(shape, axis_order(shape, strides)), dtype)


def strides_following(tensor: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Dense strides of `shape` with its axes in the memory order of `tensor`."""
    return dense_strides(shape, axis_order(tensor.shape, tensor.stride()))


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
    shape, strides = actual.shape, actual.stride()
    if actual.dtype == tensor.dtype:
        # A dense result with the very strides of `tensor` needs no further thought.
        if strides == tensor.stride() and shape == tensor.shape:
            return actual
        promised = strides_following(tensor, shape)
        if strides == promised:
            return actual
        if all(map(lambda n, a, b: n == 1 or a == b, shape, strides, promised)):
            return actual.as_strided(shape, promised)
    return empty_following(tensor, actual.shape).copy_(actual)
