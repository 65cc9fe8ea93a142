"""How a problem becomes launches: specialisation, argument lists, grids, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from orchard.attention.dropout import keep_scale
from orchard.attention.memory import Place, dense, following
from orchard.attention.problem import Gradients, Problem, Saved, Tensors, Upstream
from orchard.backends.metal.runtime import Kernel
from orchard.backends.metal.source import (
    FLOATS,
    INTEGERS,
    RESIDENT,
    SIMDGROUPS,
    STRIDED,
    THREADS,
    Library,
    Specialisation,
)
from orchard.dispatch.backend import rows_aligned

DECODE_ROWS = 8  # rows of all query heads of a key head, up to which a call is a decode
_RUN_KEYS = 64  # keys of a run at least: below, joining the runs costs more than it gains
_RUNS = 1024  # simdgroups that keep any Apple GPU busy
_MOST_RUNS = 256  # of one head: more take longer to join
_LOG2_E = 1.4426950408889634
_FURTHEST = 2**31 - 1  # a bound of the band that excludes nothing
_GROUP = (THREADS, 1, 1)

Shape = tuple[int, ...]


class ForwardPlan(NamedTuple):
    """What a forward needs beside its tensors: made once for each problem."""

    specialisation: Specialisation
    integers: list[int]
    floats: list[float]
    out: Place
    lse: Place | None
    runs: int  # of keys in a decode; 0: not a decode


class StoredParts(NamedTuple):
    """Further arguments of a forward whose operands are in few bits."""

    groups: list[int]
    tensors: tuple[Tensor | None, ...]  # scales and zero points of each operand, mean of the key


class BackwardKind(NamedTuple):
    """What a backward's arguments depend on."""

    problem: Problem
    out: Shape
    lse: Shape
    grad_lse: Shape | None


class BackwardPlan(NamedTuple):
    specialisation: Specialisation
    integers: list[int]
    floats: list[float]
    grad_query: Place
    grad_key: Place
    grad_value: Place
    grad_mask: Place | None  # of a mask that is not broadcast
    sums: Place | None  # of one that is


def is_empty(problem: Problem) -> bool:
    """Whether there is no row or no key, and nothing to launch."""
    return 0 in (problem.batch, problem.heads, problem.query_length, problem.key_length)


def plan_forward(problem: Problem) -> ForwardPlan:
    rows = _group(problem) * problem.query_length
    runs = _runs(problem) if 0 < rows <= DECODE_ROWS else 0
    wanted = problem.lse or problem.grad
    specialisation = _specialise(problem)._replace(
        lse=wanted,
        packed=runs == 0 and _is_packed(problem),
        decode_rows=rows if runs else 0,
    )
    out = Place((*problem.query_shape[:3], problem.value_dim), problem.out_strides, problem.dtype)
    lse = dense(problem.query_shape[:3]) if wanted else None
    integers = _integers(
        problem,
        {"RUNS": runs, "RUN_KEYS": _run_keys(problem, runs)},
        {**_strides(problem), "OUT": out.strides},
    )
    return ForwardPlan(specialisation, integers, _floats(problem), out, lse, runs)


def plan_backward(kind: BackwardKind) -> BackwardPlan:
    problem, mask = kind.problem, kind.problem.mask
    places = [following(*operand, problem.dtype) for operand in problem.operands.values()]
    strides = _strides(problem)
    strides |= {"OUT": kind.out, "LSE": kind.lse, "GRAD_OUT": problem.grad_strides or ()}
    strides |= {
        f"GRAD_{name.upper()}": place.strides
        for name, place in zip(problem.operands, places, strict=True)
    }
    if kind.grad_lse is not None:
        strides["GRAD_LSE"] = kind.grad_lse
    grad_mask = sums = None
    shape = (*problem.query_shape[:3], problem.key_length)
    sizes: dict[str, int] = {}
    if mask is not None and problem.mask_grad:
        if mask.shape == shape:
            grad_mask = following(mask.shape, mask.strides, mask.dtype)
            strides["GRAD_MASK"] = grad_mask.strides
        else:
            # Where rows or keys are summed, batch and heads give the threadgroups to do it.
            planes = mask.shape[:2] if mask.shape[2:] == shape[2:] else shape[:2]
            sums = dense((*planes, *mask.shape[2:]))
            strides["SUMS"] = sums.strides
            names = ("SUMS_BATCH", "SUMS_HEADS", "SUMS_ROWS", "SUMS_KEYS")
            sizes = dict(zip(names, sums.shape, strict=True))
    specialisation = _specialise(problem)._replace(
        packed=_is_packed(problem),
        grad_lse=kind.grad_lse is not None,
        grad_mask=grad_mask is not None,
    )
    integers = _integers(problem, sizes, strides)
    return BackwardPlan(
        specialisation, integers, _floats(problem), places[0], places[1], places[2], grad_mask, sums
    )


def forward_kernels(library: Library, plan: ForwardPlan) -> tuple[Kernel, ...]:
    """What a forward launches, compiled."""
    if not plan.runs:
        return (library.kernel("forward.metal", "attention_forward", plan.specialisation),)
    names = ("attention_runs", "attention_join")
    return tuple(library.kernel("decode.metal", name, plan.specialisation) for name in names)


def run_forward(
    library: Library,
    problem: Problem,
    plan: ForwardPlan,
    tensors: Tensors,
    stored: StoredParts | None = None,
) -> Saved:
    device = tensors.query.device
    out = plan.out.allocate(device)
    lse = plan.lse.allocate(device) if plan.lse else torch.empty(0, device=device)
    if is_empty(problem):
        return Saved(out.zero_(), lse.fill_(-torch.inf))
    query, key, value, mask, seed = _bound(tensors)
    lists = plan.integers, plan.floats
    more: list[Tensor | list[int]] = []
    if stored is not None:
        parts = [query if part is None else _some(part, query) for part in stored.tensors]
        more = [stored.groups, *parts]
    by_head = (problem.heads, problem.batch)
    first, *second = forward_kernels(library, plan)
    if not second:
        first(
            *(query, key, value, _some(out, query), _some(lse, out, query), mask, seed, *lists),
            *more,
            threads=_grid(problem.query_length, RESIDENT, *by_head),
            group_size=_GROUP,
        )
        return Saved(out, lse)
    rows = (*problem.query_shape[:3], plan.runs)
    sums = dense((*rows, max(1, problem.value_dim))).allocate(device)
    tops, totals = dense(rows).allocate(device), dense(rows).allocate(device)
    first(
        *(query, key, value, sums, tops, totals, mask, seed, *lists, *more),
        threads=_grid(plan.runs, SIMDGROUPS, problem.kv_heads, problem.batch),
        group_size=_GROUP,
    )
    (join,) = second
    join(
        *(sums, tops, totals, _some(out, query), _some(lse, sums), *lists),
        threads=_grid(problem.query_length, SIMDGROUPS, *by_head),
        group_size=_GROUP,
    )
    return Saved(out, lse)


def run_backward(
    library: Library,
    problem: Problem,
    plan: BackwardPlan,
    tensors: Tensors,
    saved: Saved,
    upstream: Upstream,
) -> Gradients:
    device, mask_operand = tensors.query.device, tensors.mask
    places = (plan.grad_query, plan.grad_key, plan.grad_value)
    grads = [place.allocate(device) for place in places]
    grad_mask = plan.grad_mask.allocate(device) if plan.grad_mask else None
    sums = plan.sums.allocate(device) if plan.sums else None
    if is_empty(problem):
        for grad in grads:
            grad.zero_()
        if mask_operand is not None and problem.mask_grad:
            grad_mask = torch.zeros_like(mask_operand)
        return Gradients(grads[0], grads[1], grads[2], grad_mask)
    if grad_mask is not None and problem.options.band is not None:
        grad_mask.zero_()  # what lies outside the band is not visited
    query, key, value, mask, seed = _bound(tensors)
    grad_out = _some(upstream.out, query)
    grad_lse = saved.lse if upstream.lse is None else upstream.lse
    lists = plan.integers, plan.floats
    statistics = dense((*problem.query_shape[:3], 3)).allocate(device)  # struct Row of each row
    by_head = (problem.heads, problem.batch)

    def launch(name: str, *args: Tensor | list[int] | list[float], threads: Shape) -> None:
        kernel = library.kernel("backward.metal", name, plan.specialisation)
        kernel(*args, threads=threads, group_size=_GROUP)

    launch(
        "attention_rows",
        *(_some(saved.out, query), saved.lse, grad_out, grad_lse, statistics, plan.integers),
        threads=_grid(problem.query_length, SIMDGROUPS, *by_head),
    )
    launch(
        "attention_coarse_rows",
        *(query, key, mask, statistics, *lists),
        threads=_grid(problem.query_length, RESIDENT, *by_head),
    )
    rows = (query, key, value, grad_out, statistics)
    launch(
        "attention_grad_query",
        *(*rows, _some(grads[0], query), mask, mask if grad_mask is None else grad_mask),
        *(seed, *lists),
        threads=_grid(problem.query_length, RESIDENT, *by_head),
    )
    launch(
        "attention_grad_key_value",
        *(*rows, _some(grads[1], query), _some(grads[2], query), mask, seed, *lists),
        threads=_grid(problem.key_length, RESIDENT, problem.kv_heads, problem.batch),
    )
    if mask_operand is not None and sums is not None:
        tiles = 1 if sums.shape[2] == 1 else _blocks(problem.query_length, RESIDENT)
        tiles *= 1 if sums.shape[3] == 1 else _blocks(problem.key_length, plan.specialisation.block)
        launch(
            "attention_grad_mask",
            *(*rows, sums, mask, seed, *lists),
            threads=_grid(tiles, 1, sums.shape[1], sums.shape[0]),
        )
        grad_mask = sums.sum_to_size(mask_operand.shape).to(mask_operand.dtype)
    return Gradients(grads[0], grads[1], grads[2], grad_mask)


def _specialise(problem: Problem) -> Specialisation:
    options, mask = problem.options, problem.mask
    return Specialisation(
        problem.dtype,
        problem.head_dim,
        problem.value_dim,
        mask.dtype if mask is not None else None,
        band=options.band is not None,
        softcap=options.softcap != 0.0,
        dropout=options.threshold != 0,
    )


def _is_packed(problem: Problem) -> bool:
    """Whether every row is contiguous, begins on 16 bytes and is whole groups of four."""
    strided = any(strides[3] != 1 for _, strides in problem.operands.values())
    if problem.grad_strides is not None:
        strided = strided or problem.grad_strides[3] != 1
    whole = problem.head_dim % 4 == 0 and problem.value_dim % 4 == 0
    return whole and not strided and rows_aligned(problem)


def _group(problem: Problem) -> int:
    """Query heads that share a key head."""
    return problem.heads // max(1, problem.kv_heads)


def _runs(problem: Problem) -> int:
    """Into how many runs of keys a decode is split; a function of the problem alone."""
    others = problem.batch * problem.kv_heads
    most = min(_MOST_RUNS, max(1, _RUNS // max(1, others)))
    wanted = max(1, min(_blocks(problem.key_length, _RUN_KEYS), most))
    return _blocks(problem.key_length, _blocks(problem.key_length, wanted))


def _run_keys(problem: Problem, runs: int) -> int:
    return _blocks(problem.key_length, runs) if runs else 0


def _blocks(length: int, size: int) -> int:
    return -(-length // size) if size else 0


def _grid(length: int, per_group: int, heads: int, batch: int) -> Shape:
    """Threads of the whole grid."""
    return (_blocks(length, per_group) * THREADS, heads, batch)


def _integers(
    problem: Problem, sizes: Mapping[str, int], strides: Mapping[str, Sequence[int]]
) -> list[int]:
    low, high = problem.options.band or (None, None)
    known = {
        "BATCH": problem.batch,
        "HEADS": problem.heads,
        "GROUP": _group(problem),
        "ROWS": problem.query_length,
        "KEYS": problem.key_length,
        "LOW": -_FURTHEST if low is None else max(low, -_FURTHEST),
        "HIGH": _FURTHEST if high is None else min(high, _FURTHEST),
        "THRESHOLD": problem.options.threshold,
        **sizes,
    }
    values = [known.get(name, 0) for name in INTEGERS]
    for name in STRIDED:
        steps = tuple(strides.get(name, ()))
        values += (*steps, *(0,) * (4 - len(steps)))
    return values


def _floats(problem: Problem) -> list[float]:
    """Scores are in units of log 2 unless a mask is added to them; see common.h."""
    options, mask = problem.options, problem.mask
    unit = 1.0 if mask is not None and mask.kind == "additive" else _LOG2_E
    known = {
        "SCALE": options.scale if options.softcap else options.scale * unit,
        "CAP": options.softcap,
        "CAP_IN_UNITS": options.softcap * unit,
        "KEEP_SCALE": keep_scale(options.threshold),
        "GRAD_SCALE": options.scale,
    }
    return [float(known[name]) for name in FLOATS]


def _strides(problem: Problem) -> dict[str, Shape]:
    found = {name.upper(): strides for name, (_, strides) in problem.operands.items()}
    if problem.mask is not None:
        # An axis of size one serves every index.
        pairs = zip(problem.mask.shape, problem.mask.strides, strict=True)
        found["MASK"] = tuple(0 if size == 1 else stride for size, stride in pairs)
    return found


def _some(*tensors: Tensor) -> Tensor:
    """The first tensor with memory: a kernel does not touch what stands for an empty one."""
    found = next((tensor for tensor in tensors if tensor.numel()), None)
    return tensors[0].new_empty(1) if found is None else found


def _bound(tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operands as arguments, something in the place of those that are not there."""
    query, key, value, mask, seed = tensors
    query = _some(query, value)
    key, value = _some(key, query), _some(value, query)
    return query, key, value, query if mask is None else mask, query if seed is None else seed
