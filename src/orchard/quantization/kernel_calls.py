"""Calls served by kernels that read operands as they are stored: what such engines share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchard.attention.ops import Settings, backward_op
from orchard.attention.problem import Saved, is_traced
from orchard.dispatch.backend import Reason
from orchard.quantization.config import OPERANDS
from orchard.quantization.formats import QuantizedTensor

if TYPE_CHECKING:
    from orchard.quantization.engines import QuantizedCall, StoredOperand

# A forward: of a call, its mask and the dtype that `out` may have, or fp32.
Attend = Callable[["QuantizedCall", Tensor | None, torch.dtype], Saved]


def reasons(call: QuantizedCall, backend: str) -> tuple[Reason, ...]:
    """What any kernel on stored operands has against a call, and what `backend` has."""
    found = list(call.plain.why_not(backend))
    for name, operand in zip(OPERANDS, call[:3], strict=True):
        stored = operand.stored
        if stored.format.precision == "fp8":
            sentence = f"reads no fp8, which {name} is stored as"
            found.append(Reason("precision", sentence, "use int8 or int4"))
        if stored.mean is not None and (name != "key" or stored.scales is None):
            sentence = f"takes the mean of a smoothed key in few bits, not that of {name}"
            found.append(Reason("smoothing", sentence, f"quantise {name} without smooth"))
    given = [operand.source for operand in call[:3]] + [call.options.get("mask")]
    if any(is_traced(tensor) for tensor in given if tensor is not None):
        found.append(Reason("transform", "reads memory, which operands have none of in a trace"))
    return tuple(found)


def serve_by(attend: Attend, call: QuantizedCall) -> tuple[Tensor, Tensor | None]:
    """The output and, where asked for, lse, on the graph of the operands' sources."""
    mask = mask_of(call)
    given = [operand.source for operand in call[:3]]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*given, mask)):
        sources = [source_of(operand) for operand in call[:3]]
        out, lse = _Attention.apply(*sources, mask, call, attend)  # type: ignore[no-untyped-call]
    else:
        out, lse = attend(call, mask, torch.float32 if call.may_overflow else call.dtype)
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
        saved = attend(call, mask, torch.float32)  # as backward has its operands
        ctx.set_materialize_grads(False)
        # An operand that passes through is its source: autograd sees to it that it is unchanged.
        sources = zip((query, key, value), call[:3], strict=True)
        passed = [source for source, operand in sources if operand.passes_through]
        ctx.save_for_backward(mask, call.seed, *saved, *passed)
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
    return None if mask is None else mask.resolve_neg()[(None,) * (4 - mask.ndim)]


def source_of(operand: StoredOperand) -> Tensor | None:
    """The tensor that an operand was made from, as [B, H, S, D]."""
    return None if operand.source is None else four_axes(operand.source, operand.stored)


def four_axes(tensor: Tensor, stored: QuantizedTensor) -> Tensor:
    """A tensor in the layout and rank of an operand as [B, H, S, D]."""
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
