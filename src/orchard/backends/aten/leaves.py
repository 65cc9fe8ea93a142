"""torch's fused leaf operators, each with Orchard's (out, lse) around it.

Orchard's lse of an empty row is -inf. The leaves write 0 (cpu, efficient) or +inf (flash) there,
and their backwards want back what they wrote, or any finite value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.attention.problem import Gradients, Problem, Saved, Tensors, Upstream

aten = torch.ops.aten


def _is_causal(problem: Problem) -> bool:
    return problem.options.band is not None


def _compact(mask: Tensor) -> Tensor:
    """The mask with one copy of each expanded axis, so that no conversion multiplies it."""
    for axis, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            mask = mask.narrow(axis, 0, 1)
    return mask


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as values to add, broadcast as it came."""
    if mask is None:
        return None
    mask = _compact(mask)
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask if mask.dtype in (dtype, torch.float32) else mask.to(torch.float32)


def _without_empty_rows(out: Tensor, lse: Tensor, problem: Problem, mask: Tensor | None) -> Saved:
    """Output 0 and lse -inf where mask and causal leave a row no key, whatever value holds."""
    if mask is None:
        return Saved(out, lse)
    mask = _compact(mask)
    seen = mask if mask.dtype == torch.bool else mask != -torch.inf
    empty = ~seen.any(-1)
    if _is_causal(problem) and mask.shape[3] > 1:
        first = seen.to(torch.uint8).argmax(-1)  # the first key a row may see
        empty = empty | (first > torch.arange(lse.shape[2], device=lse.device))
    return Saved(out.masked_fill_(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf))


def _reaching(upstream: Upstream, saved: Saved, mask: Tensor | None) -> Tensor:
    """grad_out with 0 for empty rows, whose gradients are 0 whatever arrives."""
    if mask is None:
        return upstream.out
    return upstream.out.masked_fill((saved.lse == -torch.inf)[..., None], 0.0)


def _finite(lse: Tensor, mask: Tensor | None) -> Tensor:
    """lse with 0 for empty rows, which only a mask can leave where these kernels serve."""
    return lse if mask is None else lse.masked_fill(lse == -torch.inf, 0.0)


def cpu_flash(problem: Problem, tensors: Tensors) -> Saved:
    query, key, value, mask, _ = tensors
    # Not torch.ops: this binding takes 2 us less, of which a decode step has many.
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        query,
        key,
        value,
        0.0,
        _is_causal(problem),
        attn_mask=_additive(mask, query.dtype),
        scale=problem.options.scale,
    )
    return _without_empty_rows(out, lse, problem, mask)


def cpu_flash_backward(
    problem: Problem, tensors: Tensors, saved: Saved, upstream: Upstream
) -> Gradients:
    query, key, value, mask, _ = tensors
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        _reaching(upstream, saved, mask),
        query,
        key,
        value,
        saved.out,
        _finite(saved.lse, mask),
        0.0,
        _is_causal(problem),
        attn_mask=_additive(mask, query.dtype),
        scale=problem.options.scale,
    )
    return Gradients(grads[0], grads[1], grads[2], None)


def cuda_flash(problem: Problem, tensors: Tensors) -> Saved:
    query, key, value, _, _ = tensors
    result = aten._scaled_dot_product_flash_attention.default(
        query, key, value, 0.0, _is_causal(problem), False, scale=problem.options.scale
    )
    return Saved(result[0], result[1].masked_fill(result[1] == torch.inf, -torch.inf))


def cuda_flash_backward(
    problem: Problem, tensors: Tensors, saved: Saved, upstream: Upstream
) -> Gradients:
    query, key, value, _, _ = tensors
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grads = aten._scaled_dot_product_flash_attention_backward.default(
        upstream.out,
        query,
        key,
        value,
        saved.out,
        saved.lse.masked_fill(saved.lse == -torch.inf, torch.inf),
        None,
        None,
        problem.query_length,
        problem.key_length,
        0.0,
        _is_causal(problem),
        state,
        state[:0],
        scale=problem.options.scale,
    )
    return Gradients(grads[0], grads[1], grads[2], None)


def cuda_cudnn(problem: Problem, tensors: Tensors) -> Saved:
    query, key, value, _, _ = tensors
    result = aten._scaled_dot_product_cudnn_attention.default(
        query,
        key,
        value,
        None,
        True,
        0.0,
        _is_causal(problem),
        False,
        scale=problem.options.scale,
    )
    return Saved(result[0], result[1].reshape(problem.query_shape[:3]))


def cuda_efficient(problem: Problem, tensors: Tensors) -> Saved:
    query, key, value, mask, _ = tensors
    out, lse, _, _ = aten._scaled_dot_product_efficient_attention.default(
        query,
        key,
        value,
        _efficient_bias(problem, mask),
        True,
        0.0,
        _is_causal(problem),
        scale=problem.options.scale,
    )
    return _without_empty_rows(out, lse[..., : problem.query_length], problem, mask)


def cuda_efficient_backward(
    problem: Problem, tensors: Tensors, saved: Saved, upstream: Upstream
) -> Gradients:
    query, key, value, mask, _ = tensors
    rows = problem.query_length
    lse = query.new_full(
        (*problem.query_shape[:2], -(-rows // 32) * 32), torch.inf, dtype=torch.float32
    )
    lse[..., :rows] = _finite(saved.lse, mask)
    state = torch.zeros((), dtype=torch.int64, device=query.device)
    grads = aten._scaled_dot_product_efficient_attention_backward.default(
        _reaching(upstream, saved, mask),
        query,
        key,
        value,
        _efficient_bias(problem, mask),
        saved.out.transpose(1, 2).contiguous().transpose(1, 2),  # it reads [B, S, H, D] only
        lse,
        state,
        state,
        0.0,
        [True, True, True, False],
        _is_causal(problem),
        scale=problem.options.scale,
    )
    return Gradients(grads[0], grads[1], grads[2], None)


def _efficient_bias(problem: Problem, mask: Tensor | None) -> Tensor | None:
    """The mask as the kernel takes it: full shape by stride 0, rows on 16-byte boundaries."""
    if mask is None:
        return None
    mask, keys = _compact(mask), problem.key_length
    multiple = 16 // problem.dtype.itemsize
    aligned = all(s % multiple == 0 for s in mask.stride()[:3]) and mask.data_ptr() % 16 == 0
    if mask.dtype != problem.dtype or mask.stride(3) != 1 or not aligned:
        padded = mask.new_zeros(  # the kernel reads the padding, and garbage there spoils gradients
            (*mask.shape[:3], -(-keys // multiple) * multiple), dtype=problem.dtype
        )
        bias = padded[..., :keys]
        if mask.dtype == torch.bool:
            bias.masked_fill_(~mask, -torch.inf)
        else:
            bias.copy_(mask)
        mask = bias
    return mask.expand(*problem.query_shape[:3], keys)


def mps(problem: Problem, tensors: Tensors) -> Saved:
    query, key, value, mask, _ = tensors
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    out, _ = aten._scaled_dot_product_attention_math_for_mps.default(
        query, key, value, mask, 0.0, _is_causal(problem), scale=problem.options.scale
    )
    return Saved(out, out.new_empty(0, dtype=torch.float32))


FORWARD = {
    "cpu-flash": cpu_flash,
    "cudnn": cuda_cudnn,
    "flash": cuda_flash,
    "efficient": cuda_efficient,
    "mps": mps,
}
BACKWARD = {
    "cpu-flash": cpu_flash_backward,
    "flash": cuda_flash_backward,
    "efficient": cuda_efficient_backward,
}
