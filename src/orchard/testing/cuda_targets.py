"""What the kernels for NVIDIA GPUs are to reach on an H200, and who they are measured against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from orchard.testing.benchmark import Case
from orchard.testing.targets import Target, case_name

SINGLE = "fp32 forward, no TF32"
RATES = "rate by length"  # the targets that the plot of rates is made of


class Shape(NamedTuple):
    batch: int
    heads: int
    length: int
    dim: int


_LARGE = (
    Shape(4, 16, 4096, 128),
    Shape(4, 32, 4096, 64),
    Shape(2, 16, 16384, 128),
    Shape(2, 16, 16384, 64),
)
_MIDDLE = _LARGE[:2]
_LONG = _LARGE[2:]
_SHORT = (Shape(16, 16, 1024, 128), Shape(16, 16, 1024, 64))
_SMALL = (Shape(1, 24, 1024, 128), Shape(1, 24, 1024, 64))
_TOKENS = 16384
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_WINDOW = (1023, 0)
_BACKWARD: dict[str, Any] = {"backward": True, "backward_only": True}
_EITHER = (False, True)


def _cases(
    work: str, shapes: Iterable[Shape], causal: Iterable[bool] = _EITHER, **more: Any
) -> tuple[Case, ...]:
    return tuple(
        Case(
            case_name(work, "", shape.length, shape.dim, shape.dim, each),
            shape.batch,
            shape.heads,
            shape.heads,
            shape.length,
            shape.length,
            shape.dim,
            shape.dim,
            causal=each,
            **{"dtype": torch.bfloat16, **more},
        )
        for shape in shapes
        for each in causal
    )


def cuda() -> list[Target]:
    """what the kernels for NVIDIA GPUs must reach, in about eight minutes on an H200"""
    return [*_plain(), *_small(), *_layouts(), *_terms(), *_others(), *_memory(), *_rates()]


def _fused(
    work: str, must: float | None, aim: float | None, cases: tuple[Case, ...], **more: Any
) -> Target:
    return Target(work, must, aim, cases, **{"against": "fused", **more})


def _plain() -> list[Target]:
    forward, fused, split = "forward", "backward, fused", "backward, deterministic"
    stable = {**_BACKWARD, "deterministic": True}
    return [
        _fused(forward, 1.08, 1.20, _cases(forward, _LARGE), worst=1.02),
        _fused(fused, 1.03, 1.12, _cases(fused, _LARGE, **_BACKWARD), worst=0.98),
        _fused(split, 0.95, 1.03, _cases(split, _LARGE, **stable)),
        _fused("S 1024, B16 H16, forward", 1.03, 1.10, _cases("S 1024", _SHORT)),
    ]


def _small() -> list[Target]:
    gpu, host = "B1 H24 S1024, forward, GPU time", "B1 H24 S1024, forward, host time"
    return [
        _fused(gpu, 1.0, 1.15, _cases(gpu, _SMALL), kind="gpu_time"),
        Target(host, 45.0, 25.0, _cases(host, _SMALL), "host_time"),
    ]


def _layouts() -> list[Target]:
    permuted = "[B, S, H, D] view against contiguous, forward"
    transposed = "sequence contiguous, last dimension strided, forward"
    strided = "any other last-dimension stride, forward"
    in_steps = _cases(strided, _MIDDLE, views=("last_strided",) * 3)
    everywhere = _cases(
        f"{strided}, all axes", _MIDDLE[:1], (False,), views=("every_axis_strided",) * 3
    )
    return [
        Target(permuted, 0.94, 0.98, _cases(permuted, _MIDDLE, views=("bshd",) * 3), "layout"),
        Target(transposed, 10.0, 15.0, _cases(transposed, _MIDDLE, views=("last_outermost",) * 3)),
        Target(strided, 8.0, None, (*in_steps, *everywhere)),
    ]


def _terms() -> list[Target]:
    dropped, trained = "dropout 0.1, forward", "dropout 0.1, forward+backward"
    masked = "additive mask [B,1,S,S], forward"
    learnt = "additive mask [B,1,S,S] with gradient, forward+backward"
    window, softcap = "window 1024, S 16384", "softcap"
    bias = {"mask": "batch_bias"}
    # The gradient of such a mask is checked over every head at once: fp64 holds 2048 rows of it.
    shorter = [shape._replace(length=2048) for shape in _MIDDLE]
    learning = {**bias, "mask_grad": True, "backward": True}
    banded, capped = {"window": _WINDOW}, {"softcap": 20.0}
    return [
        _fused(dropped, 1.15, 1.4, _cases(dropped, _MIDDLE, dropout_p=0.1)),
        _fused(trained, 1.05, 1.4, _cases(trained, _MIDDLE, dropout_p=0.1, backward=True)),
        _fused(masked, 1.5, 2.5, _cases(masked, _MIDDLE, (False,), **bias)),
        _fused(learnt, 1.5, 2.5, _cases(learnt, shorter, (False,), **learning)),
        *(
            Target(
                f"{work}, {step}",
                must,
                aim,
                _cases(f"{work}, {step}", shapes, (True,), **more),
                against="flex",
            )
            for work, must, aim, shapes, terms in (
                (window, 1.1, 1.4, _LONG, banded),
                (softcap, 1.1, 1.3, _MIDDLE, capped),
            )
            for step, more in (("forward", terms), ("backward", {**terms, **_BACKWARD}))
        ),
    ]


def _others() -> list[Target]:
    decode = "decode: Sq 1, Sk 16384, 32/8 heads, D 128, batch 8"
    step = Case(decode, 8, 32, 8, rows=1, keys=16384, dim=128, value_dim=128, dtype=torch.bfloat16)
    return [
        _fused(decode, 1.0, 1.3, (step,), kind="decode", copy_share=0.9, must_copy_share=0.75),
        _fused(SINGLE, 1.5, 2.0, _cases(SINGLE, _MIDDLE, dtype=torch.float32)),
    ]


def _memory() -> list[Target]:
    split, fused = (f"extra memory, S 65536, H 16, D 128, {kind}" for kind in ("split", "fused"))
    shape = [Shape(1, 16, 65536, 128)]
    trained = {"backward": True, "grad_rows": 64}
    return [
        Target(
            f"{split}: deterministic",
            64.0,
            None,
            _cases(split, shape, (False,), **trained, deterministic=True),
            "memory",
        ),
        Target(
            f"{fused}: beyond one fp32 dQ",
            64.0,
            None,
            _cases(fused, shape, (False,), **trained),
            "memory",
            fp32_dq=True,
        ),
    ]


def _rates() -> list[Target]:
    """Held to nothing: for the plot, a constant number of tokens."""
    shapes = [
        Shape(_TOKENS // length, heads, length, dim)
        for heads, dim in ((16, 128), (32, 64))
        for length in _LENGTHS
    ]
    works: dict[str, dict[str, Any]] = {f"{RATES}, forward": {}, f"{RATES}, backward": _BACKWARD}
    return [_fused(work, None, None, _cases(work, shapes, **more)) for work, more in works.items()]
