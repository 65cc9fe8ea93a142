"""How far quantised attention is from exact attention: inputs, measurement and table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from orchard.attention.problem import Options, Tensors, default_scale
from orchard.attention.reference import attend
from orchard.quantization import Deviation, QuantizationConfig, explain
from orchard.quantization.formats import Granularity, Precision, deviation

SHAPE = (1, 4, 128, 64)
DEGREES_OF_FREEDOM = 5  # Student's t: tails that fall as a fifth power
OFFSET_CHANNELS = 4  # of each head of a key
OFFSET = 10.0
SEED = 11
HEADERS = ("input", "precision", "scale for each", "cosine", "relative L2", "largest", "gradients")

Operands = tuple[Tensor, Tensor, Tensor]


def normal(source: Generator) -> Operands:
    """standard normal values"""
    query, key, value = (torch.randn(SHAPE, generator=source) for _ in range(3))
    return query, key, value


def heavy_tailed(source: Generator) -> Operands:
    """Student's t with 5 degrees of freedom, in units of its deviation: many outliers"""
    degrees = DEGREES_OF_FREEDOM
    drawn = []
    for _ in range(3):
        normals = torch.randn((degrees + 1, *SHAPE), generator=source)
        size = normals[1:].square().mean(0).sqrt()
        drawn.append(normals[0] / size * ((degrees - 2) / degrees) ** 0.5)
    query, key, value = drawn
    return query, key, value


def offset_channels(source: Generator) -> Operands:
    """normal values, with four channels of each key head far from 0, as in language models"""
    query, key, value = normal(source)
    heads, channels = SHAPE[1], SHAPE[3]
    for head in range(heads):
        chosen = torch.randperm(channels, generator=source)[:OFFSET_CHANNELS]
        signs = torch.randint(2, (OFFSET_CHANNELS,), generator=source) * 2 - 1
        key[:, head, :, chosen] += OFFSET * signs
    return query, key, value


INPUTS: Mapping[str, Callable[[Generator], Operands]] = {
    "normal": normal,
    "heavy-tailed": heavy_tailed,
    "offset channels": offset_channels,
}


class Measured(NamedTuple):
    """Errors of a configuration on an input."""

    out: Deviation
    gradients: Deviation  # of the gradient that is worst


class Line(NamedTuple):
    """A line of the table."""

    input: str
    precision: Precision
    granularity: Granularity
    smooth: bool
    measured: Measured

    def cells(self) -> list[str]:
        words = self.granularity + (", smoothed key" if self.smooth else "")
        out, gradients = self.measured
        return [
            self.input,
            self.precision,
            words if self.precision != "bf16" else "-",
            f"{out.cosine:.5f}",
            f"{out.relative_l2:.2g}",
            f"{out.largest:.2g}",
            f"{gradients.cosine:.5f}",
        ]


def inputs(name: str) -> Operands:
    """The operands of that name, always the same."""
    return INPUTS[name](Generator().manual_seed(SEED))


def measure(operands: Operands, configs: Sequence[QuantizationConfig]) -> list[Measured]:
    """Attention at the dequantised values against attention at the given ones, both in fp64.

    So it is the error of the formats alone, and the same on every machine.
    """
    exact = _gradients(operands)
    found = []
    for config in configs:
        call = explain(*operands, config=config).call
        stored = [operand.stored.dequantize(torch.float32) for operand in call[:3]]
        out, *by_operand = map(deviation, _gradients(stored), exact)
        found.append(Measured(out, min(by_operand, key=lambda gradient: gradient.cosine)))
    return found


def _gradients(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """(out, its gradients by the operands), in fp64, for one arriving gradient."""
    leaves = [operand.double().requires_grad_() for operand in operands]
    query, key, value = leaves
    out, _ = attend(Tensors(query, key, value), Options(default_scale(SHAPE[3])))
    arriving = torch.randn(out.shape, generator=Generator().manual_seed(SEED), dtype=out.dtype)
    return (out.detach(), *torch.autograd.grad(out, leaves, arriving))


def lines() -> list[Line]:
    """Every line of the table, measured."""
    asked: list[tuple[Precision, Granularity, bool]] = [("bf16", "block", False)]
    precisions: tuple[Precision, ...] = ("int8", "fp8", "int4")
    granularities: tuple[Granularity, ...] = ("tensor", "block", "row")
    for precision in precisions:
        asked += [(precision, granularity, False) for granularity in granularities]
        asked.append((precision, "block", True))
    configs = [QuantizationConfig(p, p, p, granularity=g, smooth_key=s) for p, g, s in asked]
    return [
        Line(name, *settings, measured)
        for name in INPUTS
        for settings, measured in zip(asked, measure(inputs(name), configs), strict=True)
    ]


def table() -> str:
    """The table as Markdown."""
    rows = [HEADERS, ("---",) * len(HEADERS), *(line.cells() for line in lines())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
