"""Who computes attention on quantised operands: engines in order of preference, and the plan.

An engine takes operands as they are stored. A kernel that reads levels and scales itself is one
more entry of ENGINES, before the last, which serves everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Generator, Tensor

from orchard.attention import api
from orchard.attention.api import Causal, Layout
from orchard.dispatch.backend import Reason
from orchard.dispatch.planner import Plan
from orchard.quantization import cpu, metal
from orchard.quantization.config import OPERANDS
from orchard.quantization.formats import QuantizedTensor
from orchard.text import table


class AttentionOptions(TypedDict, total=False):
    """What `orchard.attention` takes beside its operands and `return_lse`."""

    mask: Tensor | None
    causal: Causal
    window: tuple[int, int] | None
    scale: float | None
    softcap: float | None
    dropout_p: float
    layout: Layout
    generator: Generator | None
    backend: str


class StoredOperand(NamedTuple):
    """An operand as it is stored, and the tensor that its gradient goes to, if any."""

    stored: QuantizedTensor
    source: Tensor | None

    def values(self) -> Tensor:
        """The dequantised values in fp32, on the graph of the source."""
        values = self.stored.dequantize(torch.float32)
        if self.source is None or not (self.source.requires_grad and torch.is_grad_enabled()):
            return values
        return _StraightThrough.apply(self.source, values)  # type: ignore[no-any-return, no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    """The rounded values forward, the gradient as it comes backward."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, values: Tensor) -> Tensor:
        ctx.dtype = source.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class QuantizedCall(NamedTuple):
    """One call: its operands as they are stored, and the options of attention."""

    query: StoredOperand
    key: StoredOperand
    value: StoredOperand
    options: AttentionOptions
    return_lse: bool
    dtype: torch.dtype  # of the output


class Served(NamedTuple):
    """What an engine returns, in the layout and rank of the query; `out` is fp32 or the call's."""

    out: Tensor
    lse: Tensor | None


@dataclass(frozen=True)
class Engine:
    """A way to compute attention on stored operands."""

    name: str
    summary: str
    reasons: Callable[[QuantizedCall], tuple[Reason, ...]]  # why not, all of them
    serve: Callable[[QuantizedCall], Served]
    explain: Callable[[QuantizedCall], Plan | None]  # the plan of the attention it calls


@contextmanager
def _values(call: QuantizedCall) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The dequantised operands, with autocast out of the way: the precisions are the config's."""
    query, key, value = (operand.values() for operand in call[:3])
    with torch.autocast(query.device.type, enabled=False):
        yield query, key, value


def _attend_dequantised(call: QuantizedCall) -> Served:
    """The definition: `orchard.attention` on the dequantised values."""
    with _values(call) as operands:
        if call.return_lse:
            return Served(*api.attention(*operands, **call.options, return_lse=True))
        return Served(api.attention(*operands, **call.options), None)


def _explain_dequantised(call: QuantizedCall) -> Plan:
    with _values(call) as operands:
        return api.explain(*operands, **call.options, return_lse=call.return_lse)


def _metal(name: str, summary: str) -> Engine:
    """The engine of a backend that runs the Metal kernels."""
    return Engine(
        name,
        summary,
        partial(metal.reasons, name),
        lambda call: Served(*metal.serve(name, call)),
        lambda call: None,
    )


ENGINES: tuple[Engine, ...] = (
    Engine(
        "cpu",
        "reads int8 and int4 where they lie, in the native CPU kernels",
        cpu.reasons,
        lambda call: Served(*cpu.serve(call)),
        lambda call: None,
    ),
    _metal("metal", "reads int8 and int4 where they lie, in the Metal kernels"),
    _metal("metal-emulated", "the same Metal kernels on the CPU, to test them without a Mac"),
    Engine(
        "dequantise",
        "dequantises every operand to fp32 and calls attention",
        lambda call: (),
        _attend_dequantised,
        _explain_dequantised,
    ),
)


@dataclass(frozen=True)
class QuantizedPlan:
    """Which engine serves a quantised call and why none before it, and how operands are stored."""

    call: QuantizedCall
    engine: Engine
    rejected: tuple[tuple[str, tuple[Reason, ...]], ...]

    @cached_property
    def attention(self) -> Plan | None:
        """The plan of the attention that the engine calls, if it calls one."""
        return self.engine.explain(self.call)

    def __str__(self) -> str:
        inner = self.attention
        served = self.engine.name + (f", then {inner.backend}" if inner is not None else "")
        operands = zip(OPERANDS, self.call[:3], strict=True)
        rows = [_describe(name, operand) for name, operand in operands]
        lines = [
            f"quantised attention: {served} ({self.engine.summary})",
            "",
            table(["operand", "stored as", "scales", "bytes", "why"], rows),
        ]
        for name, reasons in self.rejected:
            lines += [f"{name}: {reason.sentence}" for reason in reasons]
        return "\n".join(lines if inner is None else [*lines, "", str(inner)])


def plan(call: QuantizedCall) -> QuantizedPlan:
    """The first engine that has nothing against the call, and the reasons of those before it."""
    rejected: list[tuple[str, tuple[Reason, ...]]] = []
    for engine in ENGINES:
        reasons = engine.reasons(call)
        if not reasons:
            return QuantizedPlan(call, engine, tuple(rejected))
        rejected.append((engine.name, reasons))
    raise AssertionError("the last engine serves every call")


def _describe(name: str, operand: StoredOperand) -> list[str]:
    stored = operand.stored
    words: list[str] = [stored.format.precision]
    scales = "none"
    if stored.scales is not None:
        words.append("symmetric" if stored.format.symmetric else "asymmetric")
        batch, heads, rows = stored.group
        scales = f"{stored.scales.numel()}: one for {rows} row(s), {heads} head(s), {batch} batch"
    if stored.mean is not None:
        words.append("mean taken out")
    whole = stored.shape.numel() * stored.dtype.itemsize
    share = f"{stored.nbytes} ({stored.nbytes / whole:.0%})" if whole else "0"
    why = stored.reasoning or ("given so" if operand.source is None else "as configured")
    return [name, ", ".join(words), scales, share, why]
