"""Where torch's own kernels were measured faster: a table in the repository, and how it is read.

benchmarks/kernel_choice.py writes it from a stored run of `orchard bench --preset cuda`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from orchard.attention.problem import Problem
from orchard.dispatch.backend import Reason, dtype_name

_LENGTHS = math.sqrt(2.0)  # a measurement holds for lengths up to this factor away
_PLANES = 2.0  # and for so many times as many heads, or as few


class Measurement(NamedTuple):
    """A plain problem that was timed: equal heads, rows and head dimensions, full or causal."""

    stage: str
    dtype: str
    head_dim: int
    causal: bool
    planes: int  # batch times heads
    length: int
    kernel: str  # ours
    torch: Mapping[str, Sequence[float]]  # by kernel: its time over ours, p20, p50 and p80


class Measured(NamedTuple):
    """What was measured on a family of GPUs."""

    place: str  # the GPU, the versions and the date
    measurements: tuple[Measurement, ...]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Measured:
        found = (Measurement(**entry) for entry in data["measurements"])
        return cls(data["place"], tuple(found))


@cache
def table() -> dict[str, Measured]:
    """By family of GPUs."""
    text = files("orchard.backends.cuda").joinpath("measured.json").read_text()
    return {family: Measured.of(data) for family, data in json.loads(text).items()}


def slower(problem: Problem, family: str, kernel: str, torch_kernel: str) -> Reason | None:
    """That a kernel of torch's was measured faster than ours on such a problem, or that nothing was
    measured on such a GPU; None where it was and ours is to serve."""
    known = table().get(family)
    if known is None:
        return Reason("measured", f"was not measured on {family}, where torch's kernel serves too")
    nearest = _nearest(problem, kernel, known.measurements)
    if nearest is None or torch_kernel not in nearest.torch:
        return None
    _, middle, high = nearest.torch[torch_kernel]
    if high >= 1.0:  # some rounds found ours as fast
        return None
    return Reason(
        "measured",
        f"{kernel} takes {1.0 / middle:.2f} times the time of torch's {torch_kernel}, measured "
        f"with {nearest.planes} heads of {nearest.length} rows on {known.place}",
        'backend="cuda" insists on it',
    )


def _nearest(
    problem: Problem, kernel: str, measurements: Sequence[Measurement]
) -> Measurement | None:
    """The measurement that speaks for `problem`, if one is near enough."""
    if not _is_plain(problem):
        return None
    like = problem.stage, dtype_name(problem.dtype), problem.head_dim
    causal, planes = problem.options.band is not None, problem.batch * problem.heads

    def distances(known: Measurement) -> tuple[float, float]:
        return (
            abs(math.log(known.length / problem.query_length)),
            abs(math.log(known.planes / planes)),
        )

    near = [
        known
        for known in measurements
        if known[:4] == (*like, causal)
        and known.kernel == kernel
        and distances(known)[0] <= math.log(_LENGTHS)
        and distances(known)[1] <= math.log(_PLANES)
    ]
    return min(near, key=lambda known: sum(distances(known)), default=None)


def _is_plain(problem: Problem) -> bool:
    options = problem.options
    return (
        0 not in (problem.batch, problem.heads, problem.query_length)
        and problem.kv_heads == problem.heads
        and problem.query_length == problem.key_length
        and problem.head_dim == problem.value_dim
        and problem.mask is None
        and problem.band_kind in ("none", "causal")
        and not (options.softcap or options.threshold)
        and not problem.deterministic
        and all(strides[3] == 1 for _, strides in problem.operands.values())
    )
