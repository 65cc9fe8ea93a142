"""Tensors whose elements lie further apart than there is memory."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from orchard.testing.metal.machine import NO_RESERVE


def far_apart(tensor: Tensor, axis: int, stride: int) -> Tensor:
    """A copy in which `axis` has this stride; what lies between takes addresses, not memory."""
    beside = [1 if number == axis else size for number, size in enumerate(tensor.shape)]
    strides = list(torch.empty(beside, device="meta").stride())
    strides[axis] = stride
    pairs = zip(tensor.shape, strides, strict=True)
    span = 1 + sum((size - 1) * step for size, step in pairs)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, span * tensor.element_size(), flags=flags)
    flat = torch.frombuffer(memory, dtype=tensor.dtype)
    return flat.as_strided(tensor.shape, strides).copy_(tensor)
