"""A tiny case of operands in few bits, by which the kernels prove themselves on a device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from orchard.attention.problem import Tensors
from orchard.backends.metal.quantized import StoredOperands

_GROUP = (1, 1, 8)
_DIM = 64


class Levels(NamedTuple):
    """int8, or int4 two to a byte, with a zero point and a scale for every eight rows."""

    data: Tensor
    scales: Tensor
    zero_points: Tensor
    mean: Tensor | None
    group: tuple[int, int, int] = _GROUP
    head_dim: int = _DIM


def probe_case(rows: int, device: torch.device) -> tuple[StoredOperands, Tensors]:
    """Query and value in int8 and a smoothed key in int4, and in fp64 what they stand for."""
    source = Generator().manual_seed(0)

    def make(length: int, *, int4: bool, smoothed: bool = False) -> tuple[Levels, Tensor]:
        top, groups = (8 if int4 else 128), (1, 2, -(-length // _GROUP[2]))
        levels = torch.randint(-top, top, (1, 2, length, _DIM), generator=source)
        zeros = torch.randint(-top, top, groups, generator=source)
        scales = (torch.rand(groups, generator=source) + 1.0) / top
        mean = torch.randn((1, 2, 1, _DIM), generator=source) if smoothed else None
        scale, zero = (
            part.repeat_interleave(_GROUP[2], 2)[:, :, :length, None] for part in (scales, zeros)
        )
        values = (levels - zero) * scale.double()
        data = levels.to(torch.int8)
        if int4:
            data = (levels[..., ::2] & 15 | (levels[..., 1::2] & 15) << 4).to(torch.uint8)
        if mean is not None:
            values, mean = values + mean, mean.to(device)
        parts = (data.to(device), scales.to(device), zeros.to(device, torch.int8))
        return Levels(*parts, mean), values

    cases = (make(rows, int4=False), make(16, int4=True, smoothed=True), make(16, int4=False))
    (query, q), (key, k), (value, v) = cases
    return StoredOperands(query, key, value), Tensors(q, k, v)
