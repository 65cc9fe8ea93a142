"""Problems, how to solve them, and what is the same: shared by the tests and their programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from orchard.attention.dropout import draw_seed
from orchard.attention.ops import Settings, forward_op
from orchard.attention.problem import Tensors, Upstream
from orchard.testing.budget import Results, Standard, compare, standard
from orchard.testing.conformance import Case, build

BACKEND = "cpu"
PLAIN = Settings(None, 0.0, 0.0, -1, -1, False, BACKEND)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF)


@dataclass(frozen=True)
class Exercise:
    """A problem with its operands: enough to solve it, whole or in part."""

    tensors: Tensors
    settings: Settings
    upstream: Upstream
    mask_grad: bool = False

    def solve(self) -> Results:
        """Forward and backward, through the operators that `orchard.attention` calls."""
        query, key, value, mask, seed = self.tensors
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        if mask is not None and self.mask_grad:
            mask = mask.detach().requires_grad_()
            leaves.append(mask)
        tensors = Tensors(*leaves[:3], mask, seed)
        out, lse = forward_op(
            tensors, self.settings, return_lse=True, grad=True, mask_grad=self.mask_grad
        )
        outputs, grads = [out], [self.upstream.out]
        if self.upstream.lse is not None:
            outputs.append(lse)
            grads.append(self.upstream.lse)
        found = torch.autograd.grad(outputs, leaves, grads)
        return Results(out.detach(), lse.detach(), *found)

    @cached_property
    def standard(self) -> Standard:
        options = self.settings.options(self.tensors.query, self.tensors.key)
        return standard(self.tensors, options, self.upstream, mask_grad=self.mask_grad)

    def complaints(self, results: Results) -> list[str]:
        """What is out of budget beside the definition."""
        verdicts = compare(results, self.standard)
        assert len(verdicts) >= 5
        return [str(verdict) for verdict in verdicts if not verdict.ok]

    def part(self, batch: slice, groups: slice) -> Exercise:
        """The same for these batch entries and these key heads with the query heads they serve."""
        query, key, value, mask, seed = self.tensors
        share = query.shape[1] // key.shape[1]
        heads = slice(groups.start * share, groups.stop * share)
        if mask is not None:
            mask = mask[batch if mask.shape[0] > 1 else slice(None)]
            mask = mask[:, heads if mask.shape[1] > 1 else slice(None)]
        lse = self.upstream.lse
        return replace(
            self,
            tensors=Tensors(
                query[batch, heads], key[batch, groups], value[batch, groups], mask, seed
            ),
            upstream=Upstream(
                self.upstream.out[batch, heads], None if lse is None else lse[batch, heads]
            ),
        )


def settings(case: Case, backend: str = BACKEND) -> Settings:
    left, right = case.window or (-1, -1)
    return Settings(
        case.scale,
        case.softcap or 0.0,
        case.dropout_p,
        left,
        0 if case.causal else right,
        case.causal == "bottom_right",
        backend,
    )


@cache
def exercise(case: Case, backend: str = BACKEND) -> Exercise:
    """The operands of a conformance case, with a seed where it drops."""
    inputs = build(case, torch.device("cpu"))
    query, key, value = (operand.tensor for operand in inputs.operands)
    mask = inputs.mask.tensor if inputs.mask else None
    source = torch.Generator().manual_seed(5)
    seed = draw_seed(query.device, source) if case.dropout_p else None
    return Exercise(
        Tensors(query, key, value, mask, seed),
        settings(case, backend),
        Upstream(inputs.grad_out.tensor, inputs.grad_lse if case.lse_grad else None),
        case.mask_grad,
    )


def differences(one: Results, other: Results) -> list[str]:
    """Names of the results that are not the same to the bit."""
    return [
        name
        for name, a, b in zip(Results._fields, one, other, strict=True)
        if (a is None) != (b is None) or (a is not None and b is not None and not same(a, b))
    ]


def same(one: Tensor, other: Tensor) -> bool:
    """Whether shape, type and every bit are equal."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = BITS[one.dtype.itemsize]
    return torch.equal(one.view(bits), other.view(bits))


SMALL = Case("small", "shape", batch=2, heads=4, kv_heads=2, rows=70, keys=90, causal=True)
ASSORTED = (
    SMALL,
    replace(SMALL, name="bf16, dropout", dtype=torch.bfloat16, dim=64, dropout_p=0.2),
    replace(SMALL, name="fp16, bool mask", dtype=torch.float16, mask="bool", mask_axes="bk"),
    replace(SMALL, name="one row, many keys", rows=1, keys=1500, causal=False, lse_grad=True),
    replace(SMALL, name="decode, dropout", rows=3, keys=300, causal=False, dropout_p=0.3),
    replace(SMALL, name="value dimension, strided", value_dim=40, views=("last_strided",) * 3),
    replace(SMALL, name="gradient of a mask", mask="additive", mask_axes="hk", mask_grad=True),
    replace(SMALL, name="window, softcap", causal=False, window=(20, 9), softcap=4.0),
    replace(SMALL, name="empty rows", causal="bottom_right", rows=120, dim=80),
)


def normal(*shape: int) -> Tensor:
    """The same numbers in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def long_operand(seconds: float) -> Tensor:
    """A query, key and value in one whose forward takes at least this long here and now."""
    heads = 16
    while True:
        operand = normal(1, 1, 1024, 64).expand(1, heads, 1024, 64)
        begun = time.perf_counter()
        forward(operand)
        if time.perf_counter() - begun > seconds:
            return operand
        heads *= 2


def forward(operand: Tensor) -> Tensor:
    """By itself, without lse."""
    tensors = Tensors(operand, operand, operand, None, None)
    out, _ = forward_op(tensors, PLAIN, return_lse=False, grad=False, mask_grad=False)
    return out


def is_inside(thread: int) -> bool:
    """Whether the thread is in the backend's own code at this moment, for all that Python sees."""
    frame = sys._current_frames().get(thread)
    return frame is not None and is_backends(frame.f_code.co_filename)


def is_backends(file: str) -> bool:
    """Whether this file is part of the backend."""
    return f"orchard/backends/{BACKEND}/" in Path(file).as_posix()


def wait_until_inside(*threads: int) -> None:
    """Return when all these threads have been seen inside a call several times in a row."""
    seen = 0
    while seen < 3:
        time.sleep(0.002)
        seen = seen + 1 if all(map(is_inside, threads)) else 0


def files_of(error: BaseException) -> Iterator[str]:
    """The files of an exception's frames, the outermost first."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename
        traceback = traceback.tb_next
