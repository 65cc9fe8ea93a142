"""Orchard's own Metal kernels, launched through torch.mps.compile_shader."""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.attention.problem import Gradients, Problem, Saved, Tensors, Upstream
from orchard.backends.metal.launch import (
    BackwardKind,
    BackwardPlan,
    ForwardPlan,
    plan_backward,
    plan_forward,
    run_backward,
    run_forward,
)
from orchard.backends.metal.runtime import MetalRuntime, TorchRuntime
from orchard.backends.metal.source import MASK_TYPES, TYPES, Library
from orchard.dispatch.backend import Backend, Capability, Reason, dtype_name
from orchard.errors import ArgumentTypeError

_KNOWN_CALLS = 4096
_SIZE_LIMIT = 2**31 - 64  # the end of a tile past the last row has to be a number too


def capability(device: str) -> Capability:
    """What the kernels serve, on whatever stands for the device."""
    return Capability(
        kernel="simdgroup",
        devices=(device,),
        dtypes=tuple(TYPES),
        max_head_dim=256,
        other_value_dim=True,
        grouped_heads=True,
        masks=("bool", "additive"),
        mask_grad=True,
        bands=("causal", "bottom_right", "window"),
        mask_with_band=True,
        softcap=True,
        dropout=True,
        lse=True,
        lse_grad=True,
        zero_sizes=True,
        strided_last_axis=True,
        strided_grad_out=True,
        unaligned_rows=True,
        deterministic=True,
    )


class MetalBackend(Backend):
    name = "metal"
    summary = "Orchard's own Metal kernels, for Apple GPUs"
    capabilities = (capability("mps"),)

    def __init__(self, runtime: MetalRuntime | None = None) -> None:
        super().__init__()
        self.runtime: MetalRuntime = runtime or TorchRuntime()
        self.shaders = Library(self.runtime)
        self._forwards: dict[Problem, ForwardPlan] = {}
        self._backwards: dict[BackwardKind, BackwardPlan] = {}

    def special_reasons(self, capability: Capability, problem: Problem) -> tuple[Reason, ...]:
        found: list[Reason] = []
        mask = problem.mask
        if mask is not None and mask.dtype not in MASK_TYPES:
            sentence = f"takes no mask of {dtype_name(mask.dtype)}"
            found.append(Reason("mask_dtype", sentence, "convert the mask to float32"))
        if 0.0 < problem.options.softcap < torch.finfo(torch.float32).tiny:
            sentence = "takes no softcap below the normal numbers of fp32"
            found.append(Reason("softcap", sentence, "drop softcap"))
        sizes = (*problem.query_shape, *problem.key_shape, *problem.value_shape)
        if max(sizes) >= _SIZE_LIMIT or problem.batch * problem.heads >= _SIZE_LIMIT:
            found.append(Reason("size", "counts rows, keys and heads in 31 bits"))
        return tuple(found)

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        _check_operands(problem, tensors)
        tensors = tensors._replace(seed=_checked_seed(tensors.seed, problem))
        with self.runtime.lock:
            plan = self._forwards.get(problem)
            if plan is None:
                if len(self._forwards) >= _KNOWN_CALLS:
                    self._forwards.clear()
                plan = self._forwards[problem] = plan_forward(problem)
            return run_forward(self.shaders, problem, plan, tensors)

    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        _check_operands(problem, tensors, *saved, *upstream)
        tensors = tensors._replace(seed=_checked_seed(tensors.seed, problem))
        by_lse = None if upstream.lse is None else upstream.lse.stride()
        kind = BackwardKind(problem, saved.out.stride(), saved.lse.stride(), by_lse)
        with self.runtime.lock:
            plan = self._backwards.get(kind)
            if plan is None:
                if len(self._backwards) >= _KNOWN_CALLS:
                    self._backwards.clear()
                plan = self._backwards[kind] = plan_backward(kind)
            return run_backward(self.shaders, problem, plan, tensors, saved, upstream)


def _check_operands(problem: Problem, tensors: Tensors, *more: Tensor | None) -> None:
    """What the problem does not say; only a caller of the operator itself can get it wrong."""
    _, key, value, mask, _ = tensors
    if key.dtype is not problem.dtype or value.dtype is not problem.dtype:
        raise ArgumentTypeError(
            f"key and value are {key.dtype} and {value.dtype}; they must be query's {problem.dtype}"
        )
    for tensor in (key, value, mask, *more):
        if tensor is not None and tensor.device != problem.device:
            raise ArgumentTypeError(
                f"an operand is on {tensor.device}; all must be on {problem.device}"
            )


def _checked_seed(seed: Tensor | None, problem: Problem) -> Tensor | None:
    if seed is None:
        return None
    if seed.dtype is not torch.int32 or seed.numel() != 2 or seed.device != problem.device:
        raise ArgumentTypeError(f"seed must be two int32 words on {problem.device}")
    return seed.contiguous()
