"""The attention calls of `metal_sdpa_extension`, its quantisation mode and its counters."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from orchard.attention.api import attention
from orchard.attention.compat import scaled_dot_product_attention, stand_in, why_torch
from orchard.attention.problem import accumulation_dtype
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
_INTEGERS = {"QUANT_INT8": QUANT_INT8, "QUANT_INT4": QUANT_INT4}
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
    """Quantise `metal_scaled_dot_product_attention` in this thread from here on.

    While the backend is registered, torch's eager calls too. Calls on fp64 are served as they are.
    Other threads, and asyncio tasks that exist already, do not see it.

    Args:
        precision: QUANT_INT8 or QUANT_INT4, of query, key and value; QUANT_NONE clears the mode.
        block_mode: what shares a scale: QUANT_TENSOR_WISE, QUANT_BLOCK_WISE (64 rows of a head) or
            QuantizationGranularity.ROW_WISE.
    """
    granularity = _mode_granularity("block_mode", block_mode)
    if _constant("precision", precision, {"QUANT_NONE": QUANT_NONE, **_INTEGERS}) == QUANT_NONE:
        _set_mode(None)
    else:
        _set_mode(_mode_settings(precision, granularity))


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


def _constant(name: str, given: object, allowed: Mapping[str, int]) -> int:
    if isinstance(given, int) and not isinstance(given, bool) and given in allowed.values():
        return given
    listed = ", ".join(f"{constant} ({number})" for constant, number in allowed.items())
    raise ArgumentValueError(f"{name} is {given!r}; it must be one of {listed}")


def _mode_granularity(name: str, given: object) -> QuantizationGranularity:
    granularity = member(QuantizationGranularity, name, given)
    if granularity == QuantizationGranularity.HYBRID:
        raise ArgumentValueError(f"{name} is HYBRID; it must be tensor, row or block wise")
    return granularity


def _mode_settings(precision: int, granularity: QuantizationGranularity) -> Settings:
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
    for name, operand in (("query", query), ("key", key), ("value", value)):
        if not isinstance(operand, Tensor):
            raise ArgumentTypeError(f"{name} is {operand!r}; it must be a torch.Tensor")
    if mode is not None and _quantises(query, key, value):
        grouped = min(query.ndim, key.ndim) > 2 and query.shape[-3] != key.shape[-3]
        if grouped and not enable_gqa:
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
    precision = _constant("target_precision", target_precision, _INTEGERS)
    settings = _mode_settings(precision, _mode_granularity("quant_mode", quant_mode))
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
    """Pairs (2i, 2i + 1) of the last axis turned by the tables' angles, in fp32 (fp64 in fp64)."""
    if x.ndim not in (2, 3, 4) or x.shape[-1] % 2:
        raise ArgumentValueError(
            f"an operand has shape {list(x.shape)}; it must have 2 to 4 axes, the last of them even"
        )
    batch = x.shape[0] if x.ndim == 4 else 1
    for name, given in (("rope_cos", cos), ("rope_sin", sin)):
        if not isinstance(given, Tensor):
            raise ArgumentTypeError(f"{name} is {given!r}; it must be a torch.Tensor")
        fits = given.ndim in (2, 3) and given.shape[-2:] == x.shape[-2:]
        if not fits or (given.ndim == 3 and given.shape[0] not in (1, batch)):
            raise ArgumentValueError(
                f"{name} has shape {list(given.shape)}; it must be [S, D], [1, S, D] or [B, S, D] "
                f"for an operand of shape {list(x.shape)}"
            )
    # [B, S, D] serves every head; without an axis of batch entries there is one.
    cos, sin = (t if t.ndim == 2 else t[:, None] if x.ndim == 4 else t[0] for t in (cos, sin))
    wide = x.to(accumulation_dtype(x.dtype))
    even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-odd, even), -1).flatten(-2)
    return (wide * cos + turned * sin).to(x.dtype)


def hadamard_rotate(tensor: Tensor, block_size: int) -> Tensor:
    """Each block of the last axis times the Hadamard matrix over sqrt(block_size), in place."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.ndim:
        raise ArgumentTypeError(f"tensor is {tensor!r}; it must be a floating tensor with an axis")
    if not isinstance(block_size, int) or block_size not in HADAMARD_BLOCKS:
        raise ArgumentValueError(
            f"block_size is {block_size!r}; it must be a power of 2 from 8 to 1024"
        )
    if tensor.shape[-1] % block_size:
        raise ArgumentValueError(
            f"tensor has a last axis of {tensor.shape[-1]}; block_size {block_size} must divide it"
        )
    wide = tensor.detach().to(accumulation_dtype(tensor.dtype))
    matrix = wide.new_ones(1, 1)
    step = wide.new_tensor([[1.0, 1.0], [1.0, -1.0]])
    while matrix.shape[0] < block_size:
        matrix = torch.kron(matrix, step)
    blocks = wide.unflatten(-1, (tensor.shape[-1] // block_size, block_size))
    with torch.no_grad():
        return tensor.copy_((blocks @ matrix / math.sqrt(block_size)).flatten(-2))


def sparse_indexer_scores(q: Tensor, k: Tensor, scale: float = 1.0) -> Tensor:
    """relu(q k^T * scale)."""
    return torch.relu(q @ k.transpose(-2, -1) * scale)
