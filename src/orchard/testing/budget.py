"""How far off a result may be: measured on each problem, never picked by hand.

The oracle is the definition in fp64. The yardstick is the same definition in the operands' own
dtype. An output may be off by twice the yardstick's error, a gradient by three times, each plus
one rounding step: of the result in its dtype, of the accumulator on the terms it sums, for a sum
that cancels to zero has errors too, and for a gradient of what a backward is handed: lse, from
which it rebuilds each row's probabilities, and out in its dtype. fp64 is held to 1e-10 of its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from orchard.attention.problem import Options, Tensors, Upstream, accumulation_dtype
from orchard.attention.reference import attend, propagate, softmax_rows

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
DOUBLE_LIMIT = 1e-10
LSE_LIMIT = 128.0  # an lse up to which a backward may rely on its digits


class Results(NamedTuple):
    """What a call computes, forward and, where asked for, backward."""

    out: Tensor
    lse: Tensor | None
    grad_query: Tensor | None = None
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None
    grad_mask: Tensor | None = None


@dataclass(frozen=True)
class Comparison:
    """The error of one result beside what it may be."""

    name: str
    error: float
    budget: float

    @property
    def ok(self) -> bool:
        return self.error <= self.budget

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.3g}, budget {self.budget:.3g}"


class Standard(NamedTuple):
    """What results are held to: the definition in fp64 and in their dtype, and their terms."""

    yardstick: Results
    exact: Results
    sizes: Results
    handed: Results  # the terms, each row's as often as lse has steps in them
    dtype: torch.dtype


def standard(
    tensors: Tensors,
    options: Options,
    upstream: Upstream | None = None,
    *,
    mask_grad: bool = False,
) -> Standard:
    """The standard of a problem, which serves any number of results.

    All tensors are on one device that has fp64. Without `upstream` only the forward is judged.
    """
    dtype = tensors.query.dtype
    exact = define(tensors, options, torch.float64, upstream, mask_grad=mask_grad)
    sizes = handed = term_sizes(tensors, options, upstream, mask_grad=mask_grad)
    if upstream is not None and exact.lse is not None:
        # Half a step of lse where it is stored, half where a score is taken from it. A row whose
        # lse is larger than this has to be rebuilt in another way.
        steps = exact.lse.abs().nan_to_num(posinf=0.0).clamp(max=LSE_LIMIT)
        by_row = Upstream(
            upstream.out.double() * steps[..., None],
            None if upstream.lse is None else upstream.lse.double() * steps,
        )
        handed = term_sizes(tensors, options, by_row, mask_grad=mask_grad)
    return Standard(
        define(tensors, options, dtype, upstream, mask_grad=mask_grad),
        exact,
        sizes,
        handed,
        dtype,
    )


def compare(actual: Results, held_to: Standard) -> list[Comparison]:
    """Every result beside its budget; what is not finite has an infinite error."""
    accumulator = torch.finfo(accumulation_dtype(held_to.dtype)).eps
    found = []
    for name, mine in actual._asdict().items():
        low, high, size, handed = (getattr(part, name) for part in held_to[:4])
        if mine is None or low is None:
            continue
        step = accumulator * _largest(size)
        if name.startswith("grad"):
            step += accumulator * _largest(handed)
        if name in ("grad_query", "grad_key", "grad_mask"):  # through grad_out . out
            step += torch.finfo(held_to.dtype).eps / 2 * _largest(size)
        found.append(_compare(name, mine, low, high, step))
    return found


def judge(
    actual: Results,
    tensors: Tensors,
    options: Options,
    upstream: Upstream | None = None,
    *,
    mask_grad: bool = False,
) -> list[Comparison]:
    """`compare` with the standard of one problem, made for it alone."""
    return compare(actual, standard(tensors, options, upstream, mask_grad=mask_grad))


def define(
    tensors: Tensors,
    options: Options,
    dtype: torch.dtype,
    upstream: Upstream | None = None,
    *,
    mask_grad: bool = False,
) -> Results:
    """The definition carried out in `dtype` and differentiated by torch."""
    operands = _cast(tensors, dtype)
    leaves = [operands.query, operands.key, operands.value]
    if mask_grad and operands.mask is not None:
        leaves.append(operands.mask)
    if upstream is None:
        return Results(*attend(operands, options))
    for leaf in leaves:
        leaf.requires_grad_()
    out, lse = attend(operands, options)
    outputs, grads = [out], [upstream.out.to(dtype)]
    if upstream.lse is not None:
        outputs.append(lse.masked_fill(lse == -torch.inf, 0.0))
        grads.append(upstream.lse.to(dtype))
    found = torch.autograd.grad(outputs, leaves, grads, materialize_grads=True)
    return Results(out.detach(), lse.detach(), *found)


def term_sizes(
    tensors: Tensors, options: Options, upstream: Upstream | None, *, mask_grad: bool
) -> Results:
    """For each result, the sum of the magnitudes of the terms it is a sum of."""
    operands = _cast(tensors, torch.float64)
    rows = softmax_rows(operands, options)
    size = Tensors(operands.query.abs(), operands.key.abs(), operands.value.abs())
    unsigned = options._replace(scale=abs(options.scale))
    products = attend(size, Options(unsigned.scale))
    out, _ = attend(operands._replace(value=size.value), options)
    if upstream is None:
        return Results(out, products.lse)
    wide = Upstream(
        upstream.out.double().abs(), None if upstream.lse is None else upstream.lse.double().abs()
    )
    by_query, by_key, by_value, by_score = propagate(rows, size, unsigned, wide, magnitudes=True)
    mask = tensors.mask
    by_mask = by_score.sum_to_size(mask.shape) if mask_grad and mask is not None else None
    return Results(out, products.lse, by_query, by_key, by_value, by_mask)


def _cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    query, key, value, mask, seed = tensors
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.detach().to(dtype)
    return Tensors(
        query.detach().to(dtype), key.detach().to(dtype), value.detach().to(dtype), mask, seed
    )


def _compare(
    name: str, actual: Tensor, yardstick: Tensor, exact: Tensor, accumulator_step: float
) -> Comparison:
    if actual.shape != exact.shape:
        return Comparison(f"{name} has shape {tuple(actual.shape)}", torch.inf, 0.0)
    error, largest = _distance(actual, exact), _largest(exact)
    if actual.dtype == torch.float64:
        return Comparison(name, error, DOUBLE_LIMIT * max(largest, 1.0))
    factor = GRADIENT_FACTOR if name.startswith("grad") else OUTPUT_FACTOR
    step = torch.finfo(actual.dtype).eps * largest + accumulator_step
    return Comparison(name, error, factor * _distance(yardstick, exact) + step)


def _largest(tensor: Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _distance(actual: Tensor, exact: Tensor) -> float:
    """Largest absolute difference; equal infinities (the lse of an empty row) count as none."""
    if not exact.numel():
        return 0.0
    actual = actual.detach().double()
    difference = torch.where(actual == exact, 0.0, (actual - exact).abs())
    return float(torch.nan_to_num(difference, nan=torch.inf).max())
