"""torch's own attention call, served by Orchard where it can be and by torch where not."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from orchard.attention.api import attention
from orchard.attention.problem import is_traced
from orchard.dispatch.backend import Reason
from orchard.dispatch.journal import journal

_operator = torch.ops.aten.scaled_dot_product_attention.default
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Who serves torch's eager calls in this thread instead of `attention`, if anybody.
stand_in: ContextVar[Callable[..., Tensor] | None] = ContextVar("stand_in", default=None)
routed = False  # torch's function comes back to Orchard, which then counts what stays with torch


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: its signature, meaning and errors.

    What Orchard does not serve (see `why_torch`) is computed, or refused, by torch itself and
    counted in `orchard.stats()`.
    """
    reason = why_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if reason is None:
        return serve(query, key, value, attn_mask, dropout_p, is_causal, scale)
    theirs: Any = _operator
    if not torch.compiler.is_compiling():
        theirs = F.scaled_dot_product_attention
        if not routed:
            journal.delegated(reason)
    return theirs(  # type: ignore[no-any-return]
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def serve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Orchard's answer to a call of torch's that `why_torch` has nothing against."""
    server: Callable[..., Tensor] = attention
    if not torch.compiler.is_compiling():
        server = stand_in.get() or attention
    return server(
        query, key, value, mask=attn_mask, causal=is_causal, scale=scale, dropout_p=dropout_p
    )


def why_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Reason | None:
    """Why a call stays with torch; None where Orchard computes the same."""
    flags = isinstance(is_causal, bool) and isinstance(enable_gqa, bool)
    if not flags or not _is_number(dropout_p) or not (scale is None or _is_number(scale)):
        return Reason("argument", "an argument is of another type than torch documents")
    tensors = [query, key, value] + ([] if attn_mask is None else [attn_mask])
    if not all(_is_plain(tensor) for tensor in tensors):
        return Reason("tensor", "an operand is not a plain dense tensor")
    if any(tensor.device != query.device for tensor in tensors):
        return Reason("device", "the operands are on different devices")
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        return Reason("dtype", "the operands are not all of one floating dtype")
    if query.ndim not in (2, 3, 4) or not query.ndim == key.ndim == value.ndim:
        return Reason("rank", "the operands do not all have 2, 3 or 4 axes")
    outer, heads = _outer(query), _heads(query)
    same = outer == _outer(key) == _outer(value) and _heads(key) == _heads(value)
    if not same or key.shape[-2] != value.shape[-2] or query.shape[-1] != key.shape[-1]:
        return Reason("shape", "the shapes need broadcasting or do not fit")
    if heads != _heads(key) and not (enable_gqa and _heads(key) and heads % _heads(key) == 0):
        return Reason("heads", "the head counts differ and are not grouped")
    if enable_gqa and query.ndim == 2:
        return Reason("heads", "operands without a head axis cannot be grouped")
    if attn_mask is not None:
        if is_causal:
            return Reason("mask_with_causal", "torch decides what a mask together with causal is")
        full = (*query.shape[:-1], key.shape[-2])
        fits = 2 <= attn_mask.ndim <= query.ndim and all(
            have in (1, want)
            for have, want in zip(reversed(attn_mask.shape), reversed(full), strict=False)
        )
        if not fits or attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            return Reason("mask", "the mask's shape or dtype does not fit")
    if not 0.0 <= dropout_p < 1.0:
        return Reason("dropout_p", "dropout_p is outside [0, 1)")
    if scale is not None and not -math.inf < scale < math.inf:
        return Reason("scale", "scale is not finite")
    return None


def _is_number(thing: object) -> bool:
    return isinstance(thing, float | int | torch.SymFloat) and not isinstance(thing, bool)


def _is_plain(tensor: Tensor) -> bool:
    kind = type(tensor)
    known = kind is Tensor or kind is torch.nn.Parameter or is_traced(tensor)
    return known and tensor.layout is torch.strided and not tensor.is_nested


def _outer(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim == 4 else 1


def _heads(tensor: Tensor) -> int:
    return tensor.shape[-3] if tensor.ndim > 2 else 1
