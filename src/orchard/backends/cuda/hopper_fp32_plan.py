"""What the fp32 kernel for Hopper serves, and how a problem becomes its launch.

Nothing here imports Triton: the kernel is imported when a first problem is planned.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from orchard.attention.memory import Place, dense
from orchard.attention.problem import Problem, Saved, Tensors
from orchard.backends.cuda import hopper_plan
from orchard.backends.cuda.hopper_plan import ScoreTerms, TermsSpecialisation
from orchard.backends.cuda.launch import NO_LSE
from orchard.dispatch.backend import Reason

if TYPE_CHECKING:
    from orchard.backends.cuda.hopper_source import Kernel

CONSUMERS = 2
WIDTH = 64  # columns of a tile
_WIDE = 4  # elements of a wide load


class Config(NamedTuple):
    keys: int  # of a tile
    stages: int  # of keys, and of values
    registers: int  # of a thread in a consumer


# By tiles side by side, chosen on an H200 from those that fit in shared memory.
_CONFIGS = {1: Config(64, 2, 208), 2: Config(64, 1, 208)}


class Specialisation(NamedTuple):
    """What the kernel is compiled for."""

    widths: int  # tiles side by side
    padded: bool  # they have more columns than the operands
    wide: bool  # rows begin on 16 bytes
    low: bool
    high: bool
    tail: bool  # the last tile of keys is not whole
    dynamic: bool  # programs take tiles when they are ready, instead of having them dealt out
    lse: bool  # it is stored
    terms: TermsSpecialisation
    config: Config

    def fitting(self, mask: Tensor | None) -> Specialisation:
        """This, or what takes a mask that begins where its wide loads cannot."""
        if hopper_plan.begins_wide(mask):
            return self
        return self._replace(terms=self.terms.narrow)


def reasons(problem: Problem) -> tuple[Reason, ...]:
    """Why the kernel does not take a problem that its capability takes."""
    found = hopper_plan.score_reasons(problem)
    if problem.tf32:
        fix = 'set torch.backends.cuda.matmul.fp32_precision = "ieee"'
        found.append(Reason("tf32", "makes products of 24 bits, and torch allows TF32", fix))
    return tuple(found)


class Plan(NamedTuple):
    """What a launch needs beside its tensors."""

    special: Specialisation
    kernel: Kernel
    programs: int
    device: int
    out: Place
    lse: Place | None
    numbers: tuple[int, ...]  # strides, dimensions, and the work
    terms: ScoreTerms

    def run(self, _: Any, tensors: Tensors) -> Saved:
        query, key, value, mask, seed = tensors
        device = query.device
        out = self.out.allocate(device)
        lse = None if self.lse is None else self.lse.allocate(device)
        counter = hopper_plan.new_counter(device, self.special.dynamic)
        special, kernel = self.special.fitting(mask), self.kernel
        if special is not self.special:
            kernel = _kernel(special, device)
        kernel(
            self.programs,
            self.device,
            *(tensor.data_ptr() for tensor in (query, key, value, out)),
            *(hopper_plan.address_of(lse), hopper_plan.address_of(counter)),
            *self.numbers,
            *self.terms.arguments(mask, seed),
        )
        return Saved(out, NO_LSE if lse is None else lse)


def specialise(problem: Problem, processors: int, config: Config | None = None) -> Specialisation:
    low, high = problem.options.band or (None, None)
    widths = -(-max(problem.head_dim, problem.value_dim) // WIDTH)
    config = config or _CONFIGS[widths]
    dims = problem.head_dim, problem.value_dim
    strides = [step for _, steps in problem.operands.values() for step in steps[:3]]
    return Specialisation(
        widths,
        padded=dims != (widths * WIDTH,) * 2,
        wide=problem.aligned and all(n % _WIDE == 0 for n in (*strides, *dims)),
        low=low is not None,
        high=high is not None,
        tail=problem.key_length % config.keys != 0,
        dynamic=hopper_plan.takes_tiles(problem, CONSUMERS, processors),
        lse=problem.lse or problem.grad,
        terms=hopper_plan.terms_of(problem),
        config=config,
    )


def plan(problem: Problem, processors: int, config: Config | None = None) -> Plan:
    """`config` is given where configurations are compared."""
    special = specialise(problem, processors, config)
    shape = (*problem.query_shape[:3], problem.value_dim)
    out = Place(shape, problem.out_strides, problem.dtype)
    strides = *(steps for _, steps in problem.operands.values()), out.strides
    return Plan(
        special,
        _kernel(special, problem.device),
        min(hopper_plan.row_tiles(problem, CONSUMERS), processors),
        hopper_plan.index_of(problem.device),
        out,
        dense(shape[:3]) if special.lse else None,
        (
            *(step for steps in strides for step in steps[:3]),
            *(problem.head_dim, problem.value_dim),
            *hopper_plan.work_of(problem, WIDTH * special.widths, special.dynamic),
        ),
        ScoreTerms.of(problem),
    )


@functools.lru_cache(hopper_plan.KNOWN_PROBLEMS)
def _kernel(special: Specialisation, device: torch.device) -> Kernel:
    from orchard.backends.cuda.hopper_source import Kernel, fp32_source

    with torch.cuda.device(device):
        return Kernel(fp32_source(special))
