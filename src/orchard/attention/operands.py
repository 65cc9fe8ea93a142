"""What a caller of the operators can get wrong. `attention` has checked its arguments already.

What a problem holds is checked once, when it is planned. What it does not hold is checked at
every call, by a few comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchard.attention.problem import Problem, Saved, Upstream, accumulation_dtype
from orchard.errors import ArgumentTypeError, ArgumentValueError


def check_operands(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Four axes, one dtype and one device, before the operands become a problem."""
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ArgumentValueError(
            f"query, key and value have {query.ndim}, {key.ndim} and {value.ndim} axes; "
            "they must have 4 axes each"
        )
    dtype, device = query.dtype, query.device
    if key.dtype is not dtype or value.dtype is not dtype:
        raise ArgumentTypeError(
            f"key and value are {key.dtype} and {value.dtype}; they must be query's {dtype}"
        )
    if key.device != device or value.device != device:
        raise ArgumentValueError(
            f"key and value are on {key.device} and {value.device}; they must be on query's "
            f"device, {device}"
        )
    if mask is not None and mask.device != device:
        raise ArgumentValueError(
            f"mask is on {mask.device}; it must be on query's device, {device}"
        )


def checked_seed(seed: Tensor | None, device: torch.device) -> Tensor:
    """The seed that dropout needs, its two words beside one another."""
    if seed is None:
        raise ArgumentTypeError("seed is None; with dropout it must be two int32 words")
    if seed.dtype is not torch.int32 or seed.numel() != 2 or seed.device != device:
        raise ArgumentTypeError(
            f"seed is {seed.dtype} {list(seed.shape)} on {seed.device}; it must be two int32 words "
            f"on {device}"
        )
    return seed.contiguous()


def check_results(problem: Problem, saved: Saved, upstream: Upstream) -> None:
    """What a forward left and what arrives at it fit a backward."""
    rows = problem.query_shape[:3]
    out, number = (*rows, problem.value_dim), accumulation_dtype(problem.dtype)
    _check(problem, "out", saved.out, out, problem.dtype)
    _check(problem, "lse", saved.lse, rows, number)
    _check(problem, "grad_out", upstream.out, out, problem.dtype)
    if upstream.lse is not None:
        _check(problem, "grad_lse", upstream.lse, rows, number)


def _check(
    problem: Problem, name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> None:
    if tensor.dtype is not dtype:
        raise ArgumentTypeError(f"{name} is {tensor.dtype}; it must be {dtype}{_shown(problem)}")
    if tensor.shape != shape:
        raise ArgumentValueError(
            f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}{_shown(problem)}"
        )
    if tensor.device != problem.device:
        raise ArgumentValueError(
            f"{name} is on {tensor.device}; it must be on query's device, {problem.device}"
        )


def check_shapes(problem: Problem) -> None:
    """The shapes of operands and mask go together."""
    batch, heads, rows, dim = problem.query_shape
    _, kv_heads, keys, _ = problem.key_shape
    wanted = {
        "key": ((batch, kv_heads, keys, dim), "query"),
        "value": ((batch, kv_heads, keys, problem.value_dim), "query and key"),
    }
    for name, (shape, others) in wanted.items():
        found, _ = problem.operands[name]
        if found != shape:
            raise ArgumentValueError(
                f"{name} has shape {list(found)}; it must be {list(shape)}, to go with {others}"
                + _shown(problem)
            )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ArgumentValueError(
            f"key has {kv_heads} heads; their number must divide query's, {heads}{_shown(problem)}"
        )
    mask = problem.mask
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ArgumentTypeError(f"mask is {mask.dtype}; it must be bool or floating")
    full = (batch, heads, rows, keys)
    fits = len(mask.shape) == 4 and all(
        have in (1, want) for have, want in zip(mask.shape, full, strict=True)
    )
    if not fits:
        raise ArgumentValueError(
            f"mask has shape {list(mask.shape)}; it must have 4 axes that broadcast to "
            f"{list(full)}{_shown(problem)}"
        )


def _shown(problem: Problem) -> str:
    """The operands, for the end of a message."""
    return "".join(
        f"\n  {name}: shape {list(shape)}, strides {strides}"
        for name, (shape, strides) in problem.operands.items()
    )
