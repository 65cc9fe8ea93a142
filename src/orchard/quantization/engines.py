"""Who computes attention on quantised operands: engines in order of preference, and the plan.

An engine takes operands as they are stored. A kernel that reads levels and scales itself is one
more entry of ENGINES, before the last, which serves everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Generator, Tensor

from orchard.attention import api
from orchard.attention.api import Causal, Layout
from orchard.attention.problem import Problem, Tensors
from orchard.dispatch.backend import Reason
from orchard.dispatch.journal import Tally
from orchard.dispatch.planner import AUTO, Plan, fallen_back, planner
from orchard.quantization import cpu, kernel_calls, metal
from orchard.quantization.config import OPERANDS
from orchard.quantization.formats import Format, Group, QuantizedTensor
from orchard.text import table

STAGE = "quantized_forward"  # in the journal; the backward is one of attention
_READS = "stored"


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

    @property
    def passes_through(self) -> bool:
        """Whether the source itself is stored, in its own memory."""
        stored = self.stored
        unchanged = stored.scales is None and stored.mean is None
        return self.source is not None and unchanged and stored.data.dtype == self.source.dtype

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
    plain: Plan  # of attention on fp32 operands of these shapes: arguments checked, options settled
    seed: Tensor | None = None  # of the dropout, drawn once whoever serves

    @property
    def may_overflow(self) -> bool:
        """Whether the top level may stand for half a step more than the largest fp16."""
        value = self.value.stored
        return self.dtype == value.dtype == torch.float16 and value.zero_points is not None

    @property
    def problem(self) -> QuantizedProblem:
        stored = tuple(_Stored.of(operand.stored) for operand in self[:3])
        return QuantizedProblem(self.plain.problem, stored, self.dtype)


class _Stored(NamedTuple):
    """How an operand is stored, without its tensors."""

    format: Format
    group: Group
    smoothed: bool
    strides: tuple[int, ...]  # of the data

    @classmethod
    def of(cls, tensor: QuantizedTensor) -> _Stored:
        return cls(tensor.format, tensor.group, tensor.mean is not None, tensor.data.stride())


class QuantizedProblem(NamedTuple):
    """What a call is, without its tensors: an engine that fails is set aside for one of these."""

    attention: Problem
    stored: tuple[_Stored, ...]
    dtype: torch.dtype


class Served(NamedTuple):
    """What an engine returns, in the layout and rank of the query; `out` is fp32 or the call's."""

    out: Tensor
    lse: Tensor | None


@dataclass(frozen=True)
class Engine:
    """A way to compute attention on stored operands."""

    name: str
    kernel: str  # what it is counted as
    summary: str
    reasons: Callable[[QuantizedCall], tuple[Reason, ...]]  # why not, all of them
    serve: Callable[[QuantizedCall], Served]
    explain: Callable[[QuantizedCall], Plan | None]  # the plan of the attention it calls


def _attend_dequantised(call: QuantizedCall) -> Served:
    """The definition: `orchard.attention` on the dequantised values."""
    query, key, value = (
        kernel_calls.four_axes(operand.values(), operand.stored) for operand in call[:3]
    )
    tensors = Tensors(query, key, value, kernel_calls.mask_of(call), call.seed)
    layout, rank = call.options.get("layout", "bhsd"), call.query.stored.ndim
    with torch.autocast(query.device.type, enabled=False):
        settings = kernel_calls.settings_of(call)
        out, lse = api.attend(tensors, settings, layout, 4 - rank, call.return_lse)
    return Served(out, lse if call.return_lse else None)


def _explain_dequantised(call: QuantizedCall) -> Plan:
    query, key, value = (operand.values() for operand in call[:3])
    with torch.autocast(query.device.type, enabled=False):
        return api.explain(query, key, value, **call.options, return_lse=call.return_lse)


def _metal(name: str, summary: str) -> Engine:
    """The engine of a backend that runs the Metal kernels."""
    return Engine(
        name,
        _READS,
        summary,
        partial(metal.reasons, name),
        lambda call: Served(*metal.serve(name, call)),
        lambda call: None,
    )


ENGINES: tuple[Engine, ...] = (
    Engine(
        "cpu",
        _READS,
        "reads int8 and int4 where they lie, in the native CPU kernels",
        cpu.reasons,
        lambda call: Served(*cpu.serve(call)),
        lambda call: None,
    ),
    _metal("metal", "reads int8 and int4 where they lie, in the Metal kernels"),
    _metal("metal-emulated", "the same Metal kernels on the CPU, to test them without a Mac"),
    Engine(
        "dequantise",
        "attention",
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
    problem: QuantizedProblem
    engine: Engine
    rejected: tuple[tuple[str, tuple[Reason, ...]], ...]

    @property
    def requested(self) -> str:
        return self.call.options.get("backend", AUTO)

    def serve(self) -> Served:
        return self.engine.serve(self.call)

    @property
    def has_next(self) -> bool:
        return self.engine is not ENGINES[-1]

    @cached_property
    def passed_over(self) -> tuple[tuple[str, Reason], ...]:
        """Reasons of the engines that would have been preferred on this device."""
        if planner().insists(self.requested):
            return ()
        return tuple((name, r) for name, reasons in self.rejected for r in fallen_back(reasons))

    @cached_property
    def tally(self) -> Tally:
        codes = dict.fromkeys((engine, reason.code) for engine, reason in self.passed_over)
        return Tally(STAGE, self.engine.name, self.engine.kernel, tuple(codes))

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
    problem = call.problem
    named = planner().insists(call.options.get("backend", "auto"))
    for engine in ENGINES:
        failed = None if named else planner().set_aside(engine.name, problem)
        reasons = engine.reasons(call) if failed is None else (failed,)
        if not reasons:
            return QuantizedPlan(call, problem, engine, tuple(rejected))
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
