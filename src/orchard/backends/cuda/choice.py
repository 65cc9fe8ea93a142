"""Which kernels there are, in the order of preference, and what each serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from orchard.attention.problem import Problem, Stage
from orchard.backends.cuda import hopper_fp32_plan, hopper_plan
from orchard.backends.cuda.launch import (
    BackwardKind,
    Packed,
    Setting,
    packed_strides,
    plan_backward,
    plan_decode,
    plan_forward,
)
from orchard.backends.cuda.runtime import Gpu
from orchard.backends.cuda.tuning import group
from orchard.dispatch.backend import Capability, Reason

# Rows of all query heads of a key head, up to which a call is a decode. Products of fp32 operands
# take more registers.
DECODE_ROWS = {torch.float16: 64, torch.bfloat16: 64, torch.float32: 16}
PACKED_ROWS = 256  # rows from which a copy of strided operands costs less than it gains

_DEVICES = ("cuda",)
_MASKS = (torch.bool, torch.float32, torch.float16, torch.bfloat16)
_SIZE_LIMIT = 2**30  # of an axis: the sum of two indices has to be a number of 32 bits


def _general(kernel: str, stages: tuple[Stage, ...] = ("forward", "backward")) -> Capability:
    return Capability.everything(
        kernel,
        _DEVICES,
        tuple(DECODE_ROWS),
        stages=stages,
        max_head_dim=256,
        mask_dtypes=_MASKS,
        size_limit=_SIZE_LIMIT,
    )


_HOPPER = Capability(
    "hopper",
    _DEVICES,
    hopper_plan.DTYPES,
    max_head_dim=hopper_plan.HEAD_TILES[-1],
    other_value_dim=True,
    grouped_heads=True,
    masks=("bool", "additive"),
    mask_dtypes=_MASKS,
    mask_grad=True,
    bands=("causal", "bottom_right", "window"),
    mask_with_band=True,
    softcap=True,
    dropout=True,
    lse=True,
    lse_grad=True,
    size_limit=_SIZE_LIMIT,
    deterministic=True,
)


_HOPPER_FP32 = Capability(
    "hopper_fp32",
    _DEVICES,
    (torch.float32,),
    stages=("forward",),
    max_head_dim=hopper_plan.HEAD_TILES[-1],
    other_value_dim=True,
    grouped_heads=True,
    masks=("bool",),
    mask_dtypes=(torch.bool,),
    bands=("causal", "bottom_right", "window"),
    mask_with_band=True,
    dropout=True,
    lse=True,
    unaligned_rows=True,
    size_limit=_SIZE_LIMIT,
    deterministic=True,
)


def _no_backward(kind: BackwardKind, setting: Setting) -> Any:
    raise AssertionError("a kernel was planned for a stage it does not have")


def _runs_everywhere(gpu: Gpu) -> Reason | None:
    return None


class Kernel(NamedTuple):
    """What it serves, as a table and as what a table cannot say, and how it is planned.

    A plan has `run(runtime, tensors)`, of a backward `run(runtime, tensors, saved, upstream)`.
    """

    capability: Capability
    reasons: Callable[[Problem], tuple[Reason, ...]]
    forward: Callable[[Problem, Setting], Any]
    backward: Callable[[BackwardKind, Setting], Any] = _no_backward
    refuses: Callable[[Gpu], Reason | None] = _runs_everywhere


def by_name(name: str) -> Kernel:
    return next(kernel for kernel in KERNELS if kernel.capability.kernel == name)


def _no_reasons(problem: Problem) -> tuple[Reason, ...]:
    return ()


def _decode_reasons(problem: Problem) -> tuple[Reason, ...]:
    rows, most = group(problem) * problem.query_length, DECODE_ROWS.get(problem.dtype, 0)
    if rows <= most:
        return ()
    return (Reason("rows", f"takes {most} rows of a key head, not {rows}"),)


def _packed_reasons(problem: Problem) -> tuple[Reason, ...]:
    if problem.query_length < PACKED_ROWS:
        return (Reason("rows", f"copies nothing for fewer than {PACKED_ROWS} rows"),)
    if not _strided(problem):
        return (Reason("packed", "every operand has runs of elements; nothing is to be copied"),)
    return ()


def _strided(problem: Problem) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shape and strides of the tensors that have neither contiguous rows nor contiguous columns."""
    tensors = dict(problem.operands)
    if problem.grad_strides is not None:
        shape = (*problem.query_shape[:3], problem.value_dim)
        tensors["grad_out"] = shape, problem.grad_strides
    return {
        name: (shape, strides)
        for name, (shape, strides) in tensors.items()
        if shape[3] > 1 and strides[3] != 1 and strides[2] != 1
    }


def _packed_problem(problem: Problem) -> tuple[tuple[str, ...], Problem]:
    """Names of the tensors to copy, and the problem that their copies pose."""
    copied = {name: packed_strides(*tensor) for name, tensor in _strided(problem).items()}
    packed = problem._replace(
        query_strides=copied.get("query", problem.query_strides),
        key_strides=copied.get("key", problem.key_strides),
        value_strides=copied.get("value", problem.value_strides),
        grad_strides=copied.get("grad_out", problem.grad_strides),
    )
    return tuple(copied), packed


def _plan_packed_forward(problem: Problem, setting: Setting) -> Packed:
    copied, inner = _packed_problem(problem)
    return Packed(copied, plan_forward(inner, setting))


def _plan_packed_backward(kind: BackwardKind, setting: Setting) -> Packed:
    copied, inner = _packed_problem(kind.problem)
    return Packed(copied, plan_backward(kind._replace(problem=inner), setting))


def _plan_hopper_forward(problem: Problem, setting: Setting) -> hopper_plan.ForwardPlan:
    return hopper_plan.plan_forward(problem, setting.gpu.processors)


def _plan_hopper_fp32(problem: Problem, setting: Setting) -> hopper_fp32_plan.Plan:
    return hopper_fp32_plan.plan(problem, setting.gpu.processors)


def _plan_hopper_backward(kind: BackwardKind, setting: Setting) -> hopper_plan.BackwardPlan:
    return hopper_plan.plan_backward(kind, setting)


def _not_hopper(gpu: Gpu) -> Reason | None:
    if gpu.architecture != hopper_plan.ARCHITECTURE:
        return Reason("arch", f"needs compute capability 9.0, this is {gpu.family}")
    from orchard.backends.cuda import hopper_source  # imports Triton

    missing = hopper_source.unavailable()
    return Reason("unavailable", missing, "pip install triton==3.6.0") if missing else None


# What serves everything comes last. A kernel for fewer problems is an entry before it.
KERNELS = (
    Kernel(_general("decode", ("forward",)), _decode_reasons, plan_decode),
    Kernel(
        _HOPPER,
        hopper_plan.reasons,
        _plan_hopper_forward,
        _plan_hopper_backward,
        refuses=_not_hopper,
    ),
    Kernel(_HOPPER_FP32, hopper_fp32_plan.reasons, _plan_hopper_fp32, refuses=_not_hopper),
    Kernel(_general("packed"), _packed_reasons, _plan_packed_forward, _plan_packed_backward),
    Kernel(_general("tiled"), _no_reasons, plan_forward, plan_backward),
)
CAPABILITIES = tuple(kernel.capability for kernel in KERNELS)
