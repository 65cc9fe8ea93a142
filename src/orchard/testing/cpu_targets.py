"""What the native CPU engine is to reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from orchard.testing.benchmark import Case
from orchard.testing.targets import DTYPES, Target, case_name

_LENGTHS = (512, 1024, 2048, 4096)
_SHORTER = (512, 1024, 2048)  # where torch holds every score at once
_DIMS = ((64, 64), (128, 128))
_STRIDED = ("last_strided", "last_strided", "last_strided")


def _grid(
    work: str,
    dtypes: Sequence[str],
    lengths: Sequence[int] = _LENGTHS,
    dims: Sequence[tuple[int, int]] = _DIMS,
    **more: Any,
) -> tuple[Case, ...]:
    """Every length, head dimension and dtype, full and causal, one batch of eight heads."""
    return tuple(
        Case(
            case_name(work, name if len(dtypes) > 1 else "", s, d, dv, causal),
            batch=1,
            rows=s,
            keys=s,
            dim=d,
            value_dim=dv,
            dtype=DTYPES[name],
            causal=causal,
            **more,
        )
        for name in dtypes
        for s in lengths
        for d, dv in dims
        for causal in (False, True)
    )


def cpu() -> list[Target]:
    """the table of what the native CPU engine must reach, in about fifteen minutes on two cores"""
    forward = {"bf16": (1.8, 2.3), "fp16": (1.6, 2.0), "fp32": (1.02, 1.15)}
    trained = {"bf16": (1.3, 1.7), "fp16": (6.0, 9.0), "fp32": (1.02, 1.15)}
    both = ("fp32", "bf16")
    targets = []

    def ratio(work: str, must: float, aim: float, dtypes: Sequence[str], **more: Any) -> None:
        targets.append(Target(work, must, aim, _grid(work, dtypes, **more)))

    for dtype, limits in forward.items():
        ratio(f"{dtype} forward", *limits, [dtype])
    for dtype, limits in trained.items():
        ratio(f"{dtype} forward+backward", *limits, [dtype], backward=True)
        if dtype == "fp16":  # torch takes minutes for all of them
            shorter = tuple(case for case in targets[-1].cases if case.rows < 4096 or case.causal)
            targets[-1] = replace(targets[-1], cases=shorter)
    dropped = {"dropout_p": 0.1, "backward": True}
    for dtype in forward:
        ratio(f"dropout 0.1, forward+backward, {dtype}", 4.0, 7.0, [dtype], **dropped)
    ratio("last dimension strided, forward", 3.0, 5.0, both, lengths=_SHORTER, views=_STRIDED)
    other = {"lengths": _SHORTER, "dims": ((64, 128), (128, 64)), "backward": True}
    ratio("Dv != D, forward+backward", 2.0, 4.0, both, **other)
    biased = {"lengths": _SHORTER, "mask": "bias", "mask_grad": True, "backward": True}
    ratio("additive mask with gradient, forward+backward", 2.0, 4.0, both, **biased)
    return [*targets, _decode(), *_small(), *_matmul_shares(), _extra_memory()]


def _decode() -> Target:
    work = "decode: Sq 1, Sk 4096, 32 heads, D 128, bf16"
    case = Case(work, 1, 32, 32, rows=1, keys=4096, dim=128, value_dim=128, dtype=torch.bfloat16)
    return Target(work, 2.5, 3.3, (case,), "decode", copy_share=0.8)


def _small() -> list[Target]:
    """A text encoder's call, where what surrounds the attention counts."""
    targets = []
    for dtype in ("fp32", "bf16"):
        work = f"1x12x77x64, {dtype}"
        cases = _grid(work, [dtype], (77,), ((64, 64),))
        heads = tuple(replace(case, heads=12, kv_heads=12) for case in cases)
        targets.append(Target(work, 1.0, 1.3, heads))
    return targets


def _matmul_shares() -> list[Target]:
    targets = []
    for dtype, must, aim in (("fp32", 0.85, 0.95), ("bf16", 0.6, 0.8)):
        work = f"share of torch's matmul rate, D 128, S 2048, full, {dtype}"
        full = _grid(work, [dtype], (2048,), ((128, 128),))[0]
        targets.append(Target(work, must, aim, (replace(full, name=work),), "matmul"))
    return targets


def _extra_memory() -> Target:
    work = "extra memory of forward+backward, B1 H8 S16384 D64, fp32"
    case = Case(work, batch=1, rows=16384, keys=16384, backward=True, grad_rows=64)
    return Target(work, 64.0, 16.0, (case,), "memory")
