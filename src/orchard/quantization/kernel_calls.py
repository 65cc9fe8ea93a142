"""Calls served by kernels that read operands as they are stored: what such engines share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from orchard.attention import api
from orchard.attention.dropout import draw_seed
from orchard.attention.ops import Settings, backward_op
from orchard.attention.problem import Options, Saved, is_traced
from orchard.dispatch.backend import Reason
from orchard.dispatch.planner import Plan
from orchard.quantization.config import OPERANDS
from orchard.quantization.formats import QuantizedTensor

if TYPE_CHECKING:
    from orchard.quantization.engines import QuantizedCall

# A forward: of a call, its mask, its seed, its options and the dtype that `out` may have, or fp32.
Attend = Callable[["QuantizedCall", Tensor | None, Tensor | None, Options, torch.dtype], Saved]


def reasons(call: QuantizedCall, backend: str) -> tuple[Reason, ...]:
    """What any kernel on stored operands has against a call, and what `backend` has."""
    found = list(attention_plan(call).why_not(backend))
    for name, operand in zip(OPERANDS, call[:3], strict=True):
        stored = operand.stored
        if stored.format.precision == "fp8":
            sentence = f"reads no fp8, which {name} is stored as"
            found.append(Reason("precision", sentence, "use int8 or int4"))
        if stored.mean is not None and (name != "key" or stored.scales is None):
            sentence = f"takes the mean of a smoothed key in few bits, not that of {name}"
            found.append(Reason("smoothing", sentence, f"quantise {name} without smooth"))
    if _is_transformed(call):
        sentence = "has no rule for torch.func, forward-mode derivatives or tracing"
        found.append(Reason("transform", sentence))
    return tuple(found)


def serve_by(attend: Attend, call: QuantizedCall) -> tuple[Tensor, Tensor | None]:
    """The output and, where asked for, lse, on the graph of the operands' sources."""
    mask = mask_of(call)
    given = [operand.source for operand in call[:3]]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*given, mask)):
        sources = [four_axes(operand.source, operand.stored) for operand in call[:3]]
        out, lse = _Attention.apply(*sources, mask, call, attend)  # type: ignore[no-untyped-call]
    else:
        (out, lse), _ = _forward(call, mask, attend, call.dtype)
    stored = call.query.stored
    if stored.layout == "bshd" and stored.ndim > 2:
        out = out.transpose(1, 2)
    first = (0,) * (4 - stored.ndim)
    return out[first], lse[first] if call.return_lse else None


class _Attention(torch.autograd.Function):
    """A forward by kernels, with the gradient of attention at the dequantised values."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        mask: Tensor | None,
        call: QuantizedCall,
        attend: Attend,
    ) -> Saved:
        saved, seed = _forward(call, mask, attend, torch.float32)  # as backward has its operands
        ctx.set_materialize_grads(False)
        # An operand that passes through is its source: autograd sees to it that it is unchanged.
        ctx.save_for_backward(mask, seed, *saved, query, key, value)
        ctx.call = call
        return saved

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * 6
        mask, seed, out, lse, *_ = ctx.saved_tensors
        call = ctx.call
        if grad_out is None:
            grad_out = out.new_zeros(()).expand(out.shape)
        values = [four_axes(operand.values(), operand.stored) for operand in call[:3]]
        wanted = ctx.needs_input_grad
        with torch.autocast(out.device.type, enabled=False):
            grads = backward_op(
                grad_out, grad_lse, *values, mask, seed, out, lse, *settings_of(call), wanted[3]
            )
        found = [
            grad.to(operand.source.dtype) if wants else None
            for grad, operand, wants in zip(grads[:3], call[:3], wanted[:3], strict=True)
        ]
        return (*found, grads[3] if wanted[3] else None, None, None)


def mask_of(call: QuantizedCall) -> Tensor | None:
    """The mask with four axes."""
    mask = call.options.get("mask")
    return None if mask is None else mask[(None,) * (4 - mask.ndim)]


def attention_plan(call: QuantizedCall) -> Plan:
    """The plan of attention on operands of these shapes: the arguments checked, options settled."""
    stand_ins = (
        torch.empty((), device=operand.stored.device).expand(operand.stored.shape)
        for operand in call[:3]
    )
    with torch.autocast(call.query.stored.device.type, enabled=False):
        return api.explain(*stand_ins, **call.options, return_lse=call.return_lse)


def _forward(
    call: QuantizedCall, mask: Tensor | None, attend: Attend, dtype: torch.dtype
) -> tuple[Saved, Tensor | None]:
    """What the kernels compute, and the seed of the dropout, if there is any."""
    query, key = call.query.stored, call.key.stored
    options = settings_of(call).options(_shape_of(query), _shape_of(key))
    seed = None
    if options.threshold:
        seed = draw_seed(query.device, call.options.get("generator"))
    return attend(call, mask, seed, options, dtype), seed


def _shape_of(stored: QuantizedTensor) -> Tensor:
    """A tensor without memory that has the sizes of an operand, [B, H, S, D]."""
    return torch.empty((*stored.data.shape[:3], stored.head_dim), device="meta")


def four_axes(tensor: Tensor | None, stored: QuantizedTensor) -> Tensor | None:
    """A tensor in the layout and rank of an operand as [B, H, S, D]."""
    if tensor is None:
        return None
    if stored.layout == "bshd" and stored.ndim > 2:
        tensor = tensor.transpose(-3, -2)
    return tensor[(None,) * (4 - tensor.ndim)]


def settings_of(call: QuantizedCall) -> Settings:
    """The options as the backward operator takes them."""
    options = call.options
    causal = options.get("causal", False)
    left, right = options.get("window") or (-1, -1)
    return Settings(
        options.get("scale"),
        options.get("softcap") or 0.0,
        options.get("dropout_p", 0.0),
        left,
        0 if causal else right,
        causal == "bottom_right",
        options.get("backend", "auto"),
    )


def _is_transformed(call: QuantizedCall) -> bool:
    tensors = [operand.source for operand in call[:3]] + [call.options.get("mask")]
    given = [tensor for tensor in tensors if tensor is not None]
    if torch._C._are_functorch_transforms_active() or any(map(is_traced, given)):
        return True
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given)
