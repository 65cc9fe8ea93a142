"""Operands as they are stored in few bits: what the kernels are told of them beside their data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from orchard.attention.problem import Options, Problem, Saved, Tensors, describe
from orchard.backends.metal.launch import ForwardPlan, StoredParts, plan_forward, run_forward
from orchard.backends.metal.source import Library, Storage

INT4 = torch.uint8  # two to a byte, which are loaded byte by byte

_NONE = (0, 0, 0)  # strides of what is not there


class Stored(Protocol):
    """An operand [B, H, S, D] in few bits, or, without scales, as it was."""

    @property
    def data(self) -> Tensor: ...
    @property
    def scales(self) -> Tensor | None: ...
    @property
    def zero_points(self) -> Tensor | None: ...
    @property
    def mean(self) -> Tensor | None: ...
    @property
    def group(self) -> tuple[int, int, int]: ...
    @property
    def head_dim(self) -> int: ...


class StoredOperands(NamedTuple):
    """Query, key and value; only the key may have a mean."""

    query: Stored
    key: Stored
    value: Stored


class StoredProblem(NamedTuple):
    """What a launch depends on, as Problem says it for operands of one dtype."""

    problem: Problem  # of the values, fp32; its strides and `aligned` are those of the data
    storage: tuple[Storage, Storage, Storage]
    smoothed: bool
    groups: tuple[int, ...]  # the list that source.GROUPED lays out


def describe_stored(
    operands: StoredOperands, mask: Tensor | None, options: Options
) -> StoredProblem:
    mean = operands.key.mean
    problem = describe(_tensors(operands, mask), options, lse=True)
    query, key, value = ((*o.data.shape[:3], o.head_dim) for o in operands)
    problem = problem._replace(
        dtype=torch.float32,
        query_shape=query,
        key_shape=key,
        value_shape=value,
        aligned=problem.aligned and (mean is None or mean.data_ptr() % 16 == 0),
    )
    query_kind, key_kind, value_kind = (
        Storage(o.data.dtype, (o.scales is not None) + (o.zero_points is not None))
        for o in operands
    )
    return StoredProblem(
        problem,
        (query_kind, key_kind, value_kind),
        mean is not None,
        (*(number for o in operands for number in _groups(o)), *_mean_strides(mean)),
    )


def plan_stored(stored: StoredProblem) -> ForwardPlan:
    plan = plan_forward(stored.problem)
    specialisation = plan.specialisation._replace(
        packed=plan.runs == 0 and _is_packed(stored),
        stored=stored.storage,
        smoothed=stored.smoothed,
    )
    return plan._replace(specialisation=specialisation)


def run_stored(
    library: Library,
    stored: StoredProblem,
    plan: ForwardPlan,
    operands: StoredOperands,
    mask: Tensor | None,
    seed: Tensor | None,
) -> Saved:
    """(out, lse), both fp32. The kernels read every part of an operand where it lies."""
    tensors = _tensors(operands, mask, seed)
    parts = [part for o in operands for part in (o.scales, o.zero_points)]
    more = StoredParts(list(stored.groups), (*parts, operands.key.mean))
    return run_forward(library, stored.problem, plan, tensors, more)


def _tensors(operands: StoredOperands, mask: Tensor | None, seed: Tensor | None = None) -> Tensors:
    query, key, value = operands
    return Tensors(query.data, key.data, value.data, mask, seed)


def _groups(operand: Stored) -> Iterator[int]:
    yield from operand.group
    for part in (operand.scales, operand.zero_points):
        yield from _NONE if part is None else part.stride()


def _mean_strides(mean: Tensor | None) -> tuple[int, ...]:
    if mean is None:
        return _NONE
    batch, head, _, column = mean.stride()
    return batch, head, column


def _is_packed(stored: StoredProblem) -> bool:
    """Whether every row is contiguous and whole groups of four, and a load of four is aligned."""
    problem, kinds = stored.problem, stored.storage
    rows = [strides for _, strides in problem.operands.values()]
    whole = [strides[:3] for strides, kind in zip(rows, kinds, strict=True) if kind.dtype != INT4]
    if stored.smoothed:
        rows.append(stored.groups[-3:])
        whole.append(stored.groups[-3:-1])
    contiguous = all(strides[-1] == 1 for strides in rows)
    fours = (problem.head_dim, problem.value_dim, *(step for steps in whole for step in steps))
    return problem.aligned and contiguous and all(number % 4 == 0 for number in fours)
