"""torch's own fused operators, where they compute exactly the problem.

Never with dropout: their random bits are not Orchard's. What each takes was found by running it.
"""

from __future__ import annotations

import torch

from orchard.attention.problem import Gradients, Problem, Saved, Tensors, Upstream
from orchard.backends.aten import leaves
from orchard.dispatch.backend import Backend, Capability, Reason

_ALL = (torch.float32, torch.float16, torch.bfloat16)
_HALF = (torch.float16, torch.bfloat16)
_MPS_HEAD_DIMS = (32, 64, 72, 80, 96, 128, 256)  # the others materialise the scores


class AtenBackend(Backend):
    name = "aten"
    summary = "torch's own fused operators, without their dropout"
    capabilities = (
        Capability(
            kernel="cpu-flash",
            devices=("cpu",),
            dtypes=_ALL,
            grouped_heads=True,
            masks=("bool", "additive"),
            bands=("causal",),
            mask_with_band=True,
            lse=True,
            strided_grad_out=True,
            unaligned_rows=True,
            deterministic=True,
        ),
        Capability(
            # Its backward gave wrong gradients for a grad_out laid out otherwise than at the
            # first call of that shape (torch 2.11, H200), so it is not used.
            kernel="cudnn",
            devices=("cuda",),
            dtypes=_HALF,
            stages=("forward",),
            max_head_dim=256,
            head_dim_multiple=8,
            other_value_dim=True,
            grouped_heads=True,
            bands=("causal",),
            lse=True,
        ),
        Capability(
            kernel="flash",
            devices=("cuda",),
            dtypes=_HALF,
            max_head_dim=256,
            head_dim_multiple=8,
            grouped_heads=True,
            bands=("bottom_right",),
            lse=True,
            deterministic=True,
        ),
        Capability(
            kernel="efficient",
            devices=("cuda",),
            dtypes=_ALL,
            other_value_dim=True,
            masks=("bool", "additive"),
            bands=("causal",),
            mask_with_band=True,
            lse=True,
        ),
        Capability(
            kernel="mps",
            devices=("mps",),
            dtypes=_ALL,
            stages=("forward",),
            max_head_dim=256,
            masks=("bool", "additive"),
            bands=("causal",),
            unaligned_rows=True,
        ),
    )

    def special_reasons(self, capability: Capability, problem: Problem) -> tuple[Reason, ...]:
        found: list[Reason] = []
        if capability.kernel == "cpu-flash" and _overlapping_rows(problem):
            # In bf16 it reads outside the operand; BLAS promises nothing in fp32 either.
            found.append(Reason("overlap", "its matrix products take no rows that overlap"))
        if capability.kernel == "cpu-flash" and _coarse_sums(problem):
            found.append(Reason("accuracy", "sums many keys for few fp32 rows too coarsely"))
        mask = problem.mask
        rounded = mask is not None and mask.dtype not in (torch.bool, problem.dtype)
        if capability.kernel in ("efficient", "mps") and rounded:
            found.append(Reason("mask_dtype", "would round the mask to the operands' dtype"))
        if capability.kernel == "cudnn" and not torch.cuda.is_available():
            return (Reason("device", "torch sees no CUDA device"),)
        if capability.kernel == "cudnn":
            major = torch.cuda.get_device_capability(problem.device)[0]
            if major < 9:
                found.append(Reason("arch", "torch prefers flash to it before Hopper"))
        if capability.kernel == "efficient" and mask and mask.shape[3] == 1 < problem.key_length:
            found.append(Reason("mask_layout", "takes no mask that is broadcast along the keys"))
        if capability.kernel == "mps" and problem.head_dim not in _MPS_HEAD_DIMS:
            dims = ", ".join(map(str, _MPS_HEAD_DIMS))
            found.append(
                Reason(
                    "head_dim",
                    f"materialises the scores for head dimension {problem.head_dim}",
                    f"use one of {dims}",
                )
            )
        if capability.kernel == "mps" and problem.key_length < problem.query_length <= 8:
            found.append(Reason("few_keys", "materialises the scores of 2 to 8 rows of fewer keys"))
        if capability.kernel == "mps" and _torch_version() < (2, 15) and _far_elements(problem):
            found.append(Reason("offset", "counts offsets in 31 bits before torch 2.15"))
        return tuple(found)

    def probe(self, capability: Capability, device: torch.device) -> Reason | None:
        if capability.kernel == "mps" and _torch_version() < (2, 13):
            return Reason("unavailable", "torch has no fused attention on MPS before 2.13")
        return super().probe(capability, device)

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        return leaves.FORWARD[kernel](problem, tensors)

    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        return leaves.BACKWARD[kernel](problem, tensors, saved, upstream)


def _overlapping_rows(problem: Problem) -> bool:
    return any(
        0 < strides[2] < shape[3] and shape[2] > 1 for shape, strides in problem.operands.values()
    )


def _coarse_sums(problem: Problem) -> bool:
    """Where its error passed the budget: it sums each row of a group by itself."""
    few_rows, grouped = problem.query_length < 4, problem.heads != problem.kv_heads
    return problem.dtype == torch.float32 and few_rows and grouped


def _far_elements(problem: Problem) -> bool:
    """Whether an element of an operand lies 2^31 elements or more from the first."""
    places = list(problem.operands.values())
    if problem.mask is not None:
        places.append((problem.mask.shape, problem.mask.strides))
    return any(
        sum((size - 1) * stride for size, stride in zip(*place, strict=True)) >= 2**31
        for place in places
    )


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
