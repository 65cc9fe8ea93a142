"""The attention calls of `metal_sdpa_extension`, its quantisation mode and its counters."""

from __future__ import annotations

import math
import threading
from collections import Counter
from contextvars import ContextVar
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from orchard.attention.api import attention
from orchard.attention.compat import scaled_dot_product_attention, stand_in, why_torch
from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.integrations.metal_sdpa_extension.config import (
    GRANULARITIES,
    PRECISIONS,
    QuantizationConfig,
    QuantizationGranularity,
    QuantizationPrecision,
    member,
)
from orchard.quantization import QuantizationConfig as Settings
from orchard.quantization import quantized_attention
from orchard.quantization.engines import AttentionOptions

QUANT_NONE = 0
QUANT_INT8 = 3
QUANT_INT4 = 4
QUANT_TENSOR_WISE = 0
QUANT_BLOCK_WISE = 2
MODE_BLOCK = 64  # rows of a block in the calls that take a mode instead of a configuration
HADAMARD_BLOCKS = tuple(2**n for n in range(3, 11))
COUNTERS = (
    "total",
    "quantized_autograd",
    "fp32_autograd",
    "fp32_direct",
    "fp32_instream",
    "rope_instream",
    "rope_autograd",
    "pytorch_fallback",
    "mask_all_true_skipped",
)

_mode: ContextVar[Settings | None] = ContextVar("quantization_mode", default=None)
_counted: Counter[str] = Counter()
_lock = threading.Lock()


def set_quantization_mode(precision: int, block_mode: int) -> None:
    """Quantise the attention calls of this thread from here on: QUANT_INT8 or QUANT_INT4.

    While the backend is registered, torch's eager calls too. Calls on fp64 are served as they are.
    Other threads, and asyncio tasks that exist already, do not see it. QUANT_NONE clears it.
    """
    _set_mode(None if precision == QUANT_NONE else _mode_settings(precision, block_mode))


def clear_quantization_mode() -> None:
    """Undo `set_quantization_mode` for this thread."""
    _set_mode(None)


def _set_mode(mode: Settings | None) -> None:
    _mode.set(mode)
    stand_in.set(None if mode is None else partial(_quantised, mode))


def _quantised(
    mode: Settings, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]
) -> Tensor:
    if not _quantises(query, key, value):
        return attention(query, key, value, **options)
    _count("quantized_autograd")
    return quantized_attention(query, key, value, config=mode, **options)


def _quantises(*operands: Tensor) -> bool:
    """Whether a mode concerns these operands: fp64 is asked for where accuracy is."""
    return all(operand.dtype != torch.float64 for operand in operands)


def _mode_settings(precision: int, block_mode: int) -> Settings:
    if precision not in (QUANT_INT8, QUANT_INT4):
        raise ArgumentValueError(
            f"precision is {precision!r}; it must be QUANT_NONE (0), QUANT_INT8 (3) or "
            "QUANT_INT4 (4)"
        )
    granularity = member(QuantizationGranularity, "block_mode", block_mode)
    if granularity == QuantizationGranularity.HYBRID:
        raise ArgumentValueError("block_mode is HYBRID; it must be tensor, row or block wise")
    word = PRECISIONS[QuantizationPrecision(precision)]
    return Settings(
        query_precision=word,
        key_precision=word,
        value_precision=word,
        granularity=GRANULARITIES[granularity],
        query_block_size=MODE_BLOCK,
        key_block_size=MODE_BLOCK,
        value_block_size=MODE_BLOCK,
        smooth_key=False,
    )


def get_dispatch_stats() -> dict[str, int]:
    """How many calls of this module went which way; quantised ones are in no other count."""
    with _lock:
        return {name: _counted[name] for name in COUNTERS}


def reset_dispatch_stats() -> None:
    with _lock:
        _counted.clear()


def _count(name: str) -> None:
    with _lock:
        _counted["total"] += 1
        _counted[name] += 1


def _count_plain(kind: str, *operands: Tensor) -> None:
    """Count a call that is not quantised, by whether it is on a graph."""
    graph = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    without = "direct" if kind == "fp32" else "instream"
    _count(f"{kind}_autograd" if graph else f"{kind}_{without}")


def metal_scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's call, served by Orchard; quantised where this thread has a quantisation mode."""
    mode = _mode.get()
    if mode is not None and _quantises(query, key, value):
        if query.ndim > 2 and query.shape[-3] != key.shape[-3] and not enable_gqa:
            raise ArgumentValueError(
                f"key has {key.shape[-3]} heads; without enable_gqa it must have query's, "
                f"{query.shape[-3]}"
            )
        return _quantised(
            mode,
            query,
            key,
            value,
            mask=attn_mask,
            causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
        )
    call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if why_torch(*call) is None:
        _count_plain("fp32", query, key, value)
    else:
        _count("pytorch_fallback")
    return scaled_dot_product_attention(*call)


def metal_flash_attention_autograd(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float = 0.0
) -> Tensor:
    """Attention with gradients; a scale of 0.0 means 1/sqrt(D)."""
    _count_plain("fp32", query, key, value)
    return attention(query, key, value, causal=is_causal, scale=scale or None)


def metal_quantized_flash_attention_autograd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float = 0.0,
    target_precision: int = QUANT_INT8,
    quant_mode: int = QUANT_TENSOR_WISE,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Quantised attention with gradients, symmetric, all operands in one precision."""
    settings = _mode_settings(target_precision, quant_mode)
    _count("quantized_autograd")
    return quantized_attention(
        query,
        key,
        value,
        config=settings,
        mask=attn_mask,
        causal=is_causal,
        scale=scale or None,
    )


def quantized_scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    precision: str = "int8",
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Quantised attention, all operands in `precision`; the output has the query's dtype."""
    word = PRECISIONS[QuantizationConfig.string_to_quantization_precision(precision)]
    settings = Settings(word, word, word, granularity="tensor", symmetric=False, smooth_key=False)
    _count("quantized_autograd")
    return quantized_attention(query, key, value, config=settings, causal=is_causal, scale=scale)


def quantized_scaled_dot_product_attention_unified(
    query: Tensor, key: Tensor, value: Tensor, config: QuantizationConfig
) -> Tensor:
    """Quantised attention as `config` says, field by field."""
    if not isinstance(config, QuantizationConfig):
        raise ArgumentTypeError(f"config is {config!r}; it must be a QuantizationConfig")
    settings = config.settings()
    _count("quantized_autograd")
    return quantized_attention(
        query, key, value, config=settings, causal=config.is_causal, scale=config.scale
    )


quantized_scaled_dot_product_attention_with_config = quantized_scaled_dot_product_attention_unified
quantized_scaled_dot_product_attention_enhanced = quantized_scaled_dot_product_attention_unified


def rope_scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rope_cos: Tensor,
    rope_sin: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Rotary positions on query and key, interleaved pairs, then attention.

    The tables are [S, D], [1, S, D] or [B, S, D].
    """
    query, key = (_rotate(x, rope_cos, rope_sin) for x in (query, key))
    _count_plain("rope", query, key, value)
    return attention(query, key, value, mask=attn_mask, causal=is_causal, scale=scale)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) of the last axis turned by the tables' angles, in fp32."""
    for name, given in (("rope_cos", cos), ("rope_sin", sin)):
        fits = given.ndim in (2, 3) and given.shape[-2:] == x.shape[-2:]
        if not fits or (given.ndim == 3 and given.shape[0] not in (1, x.shape[0])):
            raise ArgumentValueError(
                f"{name} has shape {list(given.shape)}; it must be [S, D], [1, S, D] or [B, S, D] "
                f"for an operand of shape {list(x.shape)}"
            )
    cos, sin = (table if table.ndim == 2 else table[:, None] for table in (cos, sin))
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-odd, even), -1).flatten(-2)
    return (x.float() * cos + turned * sin).to(x.dtype)


def hadamard_rotate(tensor: Tensor, block_size: int) -> Tensor:
    """Each block of the last axis times the Hadamard matrix over sqrt(block_size), in place."""
    if block_size not in HADAMARD_BLOCKS:
        raise ArgumentValueError(
            f"block_size is {block_size!r}; it must be a power of 2 from 8 to 1024"
        )
    if tensor.shape[-1] % block_size:
        raise ArgumentValueError(
            f"tensor has a last axis of {tensor.shape[-1]}; block_size {block_size} must divide it"
        )
    matrix = torch.ones(1, 1, device=tensor.device)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=tensor.device)
    while matrix.shape[0] < block_size:
        matrix = torch.kron(matrix, step)
    blocks = tensor.detach().float().unflatten(-1, (-1, block_size))
    with torch.no_grad():
        return tensor.copy_((blocks @ matrix / math.sqrt(block_size)).flatten(-2))


def sparse_indexer_scores(q: Tensor, k: Tensor, scale: float = 1.0) -> Tensor:
    """relu(q k^T * scale)."""
    return torch.relu(q @ k.transpose(-2, -1) * scale)
