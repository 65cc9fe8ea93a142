"""Attention on operands in fewer bits: attention at the dequantised values, by definition."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from orchard.attention import api
from orchard.attention.dropout import draw_seed
from orchard.attention.leaving import inside
from orchard.attention.memory import strides_following
from orchard.attention.strides import axis_order
from orchard.dispatch.planner import Plan, planner
from orchard.errors import ArgumentTypeError, ArgumentValueError, NotServedError
from orchard.quantization.config import OPERANDS, QuantizationConfig
from orchard.quantization.engines import (
    AttentionOptions,
    QuantizedCall,
    QuantizedPlan,
    StoredOperand,
    plan,
)
from orchard.quantization.formats import PASS_THROUGH, QuantizedTensor
from orchard.quantization.operands import quantize_together

Given = Tensor | QuantizedTensor
_DEFAULT = QuantizationConfig()


@overload
def quantized_attention(
    query: Given,
    key: Given,
    value: Given,
    *,
    config: QuantizationConfig | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def quantized_attention(
    query: Given,
    key: Given,
    value: Given,
    *,
    config: QuantizationConfig | None = None,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


def quantized_attention(
    query: Given,
    key: Given,
    value: Given,
    *,
    config: QuantizationConfig | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`orchard.attention` at the dequantised values of its operands, accumulated in fp32.

    Tensors are quantised as `config` says; a QuantizedTensor is taken as it is. The options are
    those of `orchard.attention`. Gradients of tensors pass straight through the rounding.

    Returns:
        The output in the query's dtype (of the tensor it was made from, where it is quantised),
        or in `config.output_precision`; with `return_lse`, (output, lse).
    """
    call = _prepare(query, key, value, config or _DEFAULT, return_lse, options)
    if call.plain.problem.options.threshold:
        call = call._replace(seed=draw_seed(call.query.stored.device, options.get("generator")))
    with inside:
        out, lse = planner().carry_out(lambda: plan(call), QuantizedPlan.serve)
    if call.may_overflow:
        largest = torch.finfo(call.dtype).max
        out = out.clamp(-largest, largest)
    out = out.to(call.dtype)
    if isinstance(query, Tensor):
        out = _ordered_as(out, query)
    return out if lse is None else (out, lse)


def explain(
    query: Given,
    key: Given,
    value: Given,
    *,
    config: QuantizationConfig | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> QuantizedPlan:
    """How `quantized_attention` would store its operands and who would compute; print it.

    The operands are quantised, because hybrid looks at their values; no attention is computed.
    """
    return plan(_prepare(query, key, value, config or _DEFAULT, return_lse, options))


def _prepare(
    query: Given,
    key: Given,
    value: Given,
    config: QuantizationConfig,
    return_lse: bool,
    options: AttentionOptions,
) -> QuantizedCall:
    """The call with every operand stored: tensors as configured, the others as they are."""
    if not isinstance(config, QuantizationConfig):
        raise ArgumentTypeError(f"config is {config!r}; it must be a QuantizationConfig")
    given = dict(zip(OPERANDS, (query, key, value), strict=True))
    layout = options.get("layout", "bhsd")
    for name, operand in given.items():
        if isinstance(operand, QuantizedTensor) and operand.ndim > 2 and operand.layout != layout:
            raise ArgumentValueError(
                f"{name} was quantised with layout {operand.layout!r}; the call's is {layout!r}"
            )
    tensors = {str(n): o for n, o in given.items() if not isinstance(o, QuantizedTensor)}
    _refuse_transforms([*tensors.values(), options.get("mask")])
    stored = quantize_together(
        tensors,
        config.formats,
        layout,
        one_choice=not config.hybrid_per_operand,
    )
    query_, key_, value_ = (
        StoredOperand(operand, None)
        if isinstance(operand, QuantizedTensor)
        else StoredOperand(stored[name], operand)
        for name, operand in given.items()
    )
    wanted = config.output_precision
    dtype = PASS_THROUGH[wanted] if wanted is not None else query.dtype
    plain = _plan_plainly((query_, key_, value_), options, return_lse)
    return QuantizedCall(query_, key_, value_, options, return_lse, dtype, plain)


def _refuse_transforms(tensors: Sequence[object]) -> None:
    """Rounding has no derivative: that it is passed over is known to backward alone."""
    duals = [t for t in tensors if isinstance(t, Tensor)] if forward_ad._current_level >= 0 else []
    if torch._C._are_functorch_transforms_active() or any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in duals
    ):
        raise NotServedError(
            "quantized_attention has no rule for torch.func and forward-mode derivatives; "
            "take those of orchard.attention at the dequantised values"
        )


def _plan_plainly(
    operands: tuple[StoredOperand, ...], options: AttentionOptions, return_lse: bool
) -> Plan:
    """The plan of attention on operands of these shapes, which checks the arguments."""
    stand_ins = [_nothing(o.stored.device).expand(o.stored.shape) for o in operands]
    kind = operands[0].stored.device.type
    if not torch.is_autocast_enabled(kind):
        return api.explain(*stand_ins, **options, return_lse=return_lse)
    with torch.autocast(kind, enabled=False):
        return api.explain(*stand_ins, **options, return_lse=return_lse)


def _ordered_as(out: Tensor, query: Tensor) -> Tensor:
    """`out` with its axes in the memory order of `query`, a copy only where it has another."""
    if out.stride() == strides_following(query, out.shape):
        return out
    order = axis_order(query.shape, query.stride())
    return out.permute(order).contiguous().permute(sorted(range(out.ndim), key=order.__getitem__))


@cache
def _nothing(device: torch.device) -> Tensor:
    """A number that nobody reads."""
    return torch.empty((), device=device)
