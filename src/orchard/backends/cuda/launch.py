"""How a problem becomes launches: variants, arguments, grids, memory.

A plan is made once for each problem, and run with the tensors of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchard.attention.dropout import keep_scale
from orchard.attention.memory import Place, dense, following
from orchard.attention.problem import Gradients, Problem, Saved, Tensors, Upstream
from orchard.attention.strides import axis_order, dense_strides
from orchard.backends.cuda import tuning
from orchard.backends.cuda.configs import Config, Role
from orchard.backends.cuda.runtime import Gpu, Runtime, Step
from orchard.backends.cuda.tuning import blocks, chosen_twice, head_block
from orchard.backends.cuda.variant import Numbers, Strides, Variant

_LOG2_E = 1.4426950408889634
_EARLY_LAUNCHES = 90  # the least architecture with programmatic dependent launches
_ABSENT = Strides(0, 0, 0, 0)  # of a tensor that is not there
NO_LSE = torch.empty(0)  # stands for an lse that was not asked for; nobody writes to it

Shape = tuple[int, ...]
Statistics = tuple[Tensor, Tensor, Tensor | None]  # shift, delta and spare of rows


class BackwardKind(NamedTuple):
    """What a backward's arguments depend on."""

    problem: Problem
    out: Shape
    lse: Shape
    grad_lse: Shape | None


class Setting(NamedTuple):
    """What a plan depends on beside the problem."""

    gpu: Gpu
    trials: Mapping[Role, Config] | None = None  # configs to try in the place of the tables'

    def config(self, problem: Problem, role: Role) -> Config:
        return tuning.config(problem, self.gpu, role, self.trials)


class Forward(NamedTuple):
    """A block of rows to a program."""

    step: Step
    out: Place
    lse: Place | None

    def run(self, runtime: Runtime, tensors: Tensors) -> Saved:
        out, lse = _allocate(self.out, self.lse, tensors.query.device)
        runtime.launch(self.step, *tensors, out, lse)
        return Saved(out, NO_LSE if lse is None else lse)


class Decode(NamedTuple):
    """A part of the keys to a program; with one part there is nothing to join."""

    step: Step
    join: Step | None
    sums: Place
    part: Place  # for a number of each row and part
    out: Place
    lse: Place | None

    def run(self, runtime: Runtime, tensors: Tensors) -> Saved:
        device = tensors.query.device
        out, lse = _allocate(self.out, self.lse, device)
        if self.join is None:
            runtime.launch(self.step, *tensors, out, lse, None, None, None)
        else:
            parts = (
                self.sums.allocate(device),
                self.part.allocate(device),
                self.part.allocate(device),
            )
            runtime.launch(self.step, *tensors, None, None, *parts)
            runtime.launch(self.join, *parts, out, lse)
        return Saved(out, NO_LSE if lse is None else lse)


class MaskGradient(NamedTuple):
    """Who writes the gradient of a mask, and where; `summed` axes are folded on the way there."""

    writer: str  # "grad_query", "grad_key_value" or "grad_mask"
    place: Place
    summed: str  # "tile": none; "rows", "keys"


class Backward(NamedTuple):
    """Statistics of the rows first, then one kernel that owns keys and one that owns rows."""

    rows: Step
    grad_key_value: Step
    grad_query: Step
    grad_mask: Step | None
    statistic: Place
    has_spare: bool
    places: tuple[Place, Place, Place]
    mask: MaskGradient | None
    partly_seen: bool  # the band leaves parts of a mask's gradient unwritten

    def run(
        self, runtime: Runtime, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        device, mask = tensors.query.device, tensors.mask
        by_query, by_key, by_value = (place.allocate(device) for place in self.places)
        rows = self.statistics(runtime, tensors, saved, upstream)
        by_mask = self.mask_apart(runtime, tensors, upstream, rows)
        writer = self.mask.writer if self.mask else ""
        if self.mask and by_mask is None:
            by_mask = self.mask.place.allocate(device)
            if self.partly_seen and writer == "grad_query":
                by_mask.zero_()
        given = *tensors, upstream.out, *rows
        to_mask = by_mask if writer == "grad_key_value" else None
        runtime.launch(self.grad_key_value, *given, by_key, by_value, to_mask)
        to_mask = by_mask if writer == "grad_query" else None
        runtime.launch(self.grad_query, *given, by_query, to_mask)
        if mask is not None and by_mask is not None:
            by_mask = by_mask.sum_to_size(mask.shape).to(mask.dtype)
        return Gradients(by_query, by_key, by_value, by_mask)

    def mask_apart(
        self, runtime: Runtime, tensors: Tensors, upstream: Upstream, rows: Statistics
    ) -> Tensor | None:
        """The gradient of the mask, where a kernel of its own makes it."""
        if self.mask is None or self.grad_mask is None:
            return None
        by_mask = self.mask.place.allocate(tensors.query.device)
        runtime.launch(self.grad_mask, *tensors, upstream.out, *rows, by_mask)
        return by_mask

    def statistics(
        self, runtime: Runtime, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Statistics:
        """What the kernels need to know of each row."""
        query, key, _, mask, _ = tensors
        shift, delta = self.statistic.allocate(query.device), self.statistic.allocate(query.device)
        spare = self.statistic.allocate(query.device) if self.has_spare else None
        results = saved.out, saved.lse, upstream.out, upstream.lse
        runtime.launch(self.rows, query, key, mask, *results, shift, delta, spare)
        return shift, delta, spare


class Packed(NamedTuple):
    """A plan on copies of the operands that no kernel reads in runs of elements."""

    copied: tuple[str, ...]
    inner: Any

    def run(self, runtime: Runtime, tensors: Tensors, *rest: Any) -> Any:
        tensors = tensors._replace(
            **{name: _pack(getattr(tensors, name)) for name in self.copied if name != "grad_out"}
        )
        if rest and "grad_out" in self.copied:
            saved, upstream = rest
            rest = saved, upstream._replace(out=_pack(upstream.out))
        return self.inner.run(runtime, tensors, *rest)


class EmptyForward(NamedTuple):
    """No row or no key, and nothing to launch."""

    out: Place
    lse: Place | None

    def run(self, _: Runtime, tensors: Tensors) -> Saved:
        out, lse = _allocate(self.out, self.lse, tensors.query.device)
        return Saved(out.zero_(), NO_LSE if lse is None else lse.fill_(-torch.inf))


class EmptyBackward(NamedTuple):
    """Likewise."""

    places: tuple[Place, Place, Place]
    mask_grad: bool

    def run(self, _: Runtime, tensors: Tensors, saved: Saved, upstream: Upstream) -> Gradients:
        device = tensors.query.device
        by_query, by_key, by_value = (place.allocate(device).zero_() for place in self.places)
        by_mask = None
        if tensors.mask is not None and self.mask_grad:
            by_mask = torch.zeros_like(tensors.mask)
        return Gradients(by_query, by_key, by_value, by_mask)


def is_empty(problem: Problem) -> bool:
    """Whether there is no row or no key."""
    return 0 in (problem.batch, problem.heads, problem.query_length, problem.key_length)


def plan_empty_forward(problem: Problem) -> EmptyForward:
    return EmptyForward(*_outputs(problem))


def plan_empty_backward(problem: Problem) -> EmptyBackward:
    return EmptyBackward(_gradient_places(problem), problem.mask_grad)


def plan_forward(problem: Problem, setting: Setting) -> Forward:
    config = setting.config(problem, "forward")
    out, lse = _outputs(problem)
    step = _step(
        problem,
        "general_forward.attention_forward",
        (*_operand_strides(problem), Strides(*out.strides)),
        _variant(problem, config)._replace(lse=lse is not None),
        config,
        programs=_row_blocks(problem, config),
    )
    return Forward(step, out, lse)


def plan_decode(problem: Problem, setting: Setting) -> Decode:
    config = setting.config(problem, "decode")
    out, lse = _outputs(problem)
    key_blocks = blocks(problem.key_length, config.keys)
    per_split = blocks(key_blocks, tuning.splits(problem, setting.gpu, config))
    splits = blocks(key_blocks, per_split)
    variant = _variant(problem, config)._replace(lse=lse is not None, split=splits > 1)
    whole = problem.options.band is None and problem.key_length % config.keys == 0
    step = _step(
        problem,
        "decode.attention_splits",
        (*_operand_strides(problem), Strides(*out.strides)),
        variant._replace(whole=whole),
        config,
        integers=(splits, per_split),
        programs=splits * problem.kv_heads * problem.batch,
    )
    join = None
    if splits > 1:
        joining = setting.config(problem, "join")
        early = setting.gpu.architecture >= _EARLY_LAUNCHES
        join = _step(
            problem,
            "decode.attention_join",
            (Strides(*out.strides),),
            variant._replace(block_keys=joining.keys, early=early),
            joining,
            integers=(splits,),
            programs=problem.query_length * problem.heads * problem.batch,
        )
    parts = (*problem.query_shape[:3], splits)
    return Decode(step, join, dense((*parts, problem.value_dim)), dense(parts), out, lse)


def plan_backward(kind: BackwardKind, setting: Setting) -> Backward:
    problem = kind.problem
    gradient = _mask_gradient(problem)
    empty_rows = _has_empty_rows(problem)

    def step(
        role: Role,
        strides: Sequence[Strides],
        programs: Callable[[Problem, Config], int],
        integers: Sequence[int] = (),
        **parts: Any,
    ) -> Step:
        config = setting.config(problem, role)
        writes = gradient.summed if gradient and gradient.writer == role else "none"
        variant = _variant(problem, config)._replace(mask_grad=writes, **parts)
        kernel, count = f"general_backward.attention_{role}", programs(problem, config)
        return _step(problem, kernel, strides, variant, config, integers=integers, programs=count)

    places = _gradient_places(problem)
    by_query, by_key, by_value = (Strides(*place.strides) for place in places)
    by_mask = Strides(*gradient.place.strides) if gradient else _ABSENT
    operands = _operand_strides(problem)
    grad_out = Strides(*(problem.grad_strides or ()))
    given = *operands, grad_out
    query, key, _, mask = operands
    results = Strides(*kind.out), _of_rows(kind.lse), grad_out, _of_rows(kind.grad_lse)
    grad_mask = None
    if problem.mask and gradient and gradient.writer == "grad_mask":
        sharers = problem.mask.shape[:2]
        grad_mask = step(
            "grad_mask", (*given, by_mask), _mask_tiles, sharers, empty_rows=empty_rows
        )
    return Backward(
        step("rows", (query, key, mask, *results), _row_blocks, grad_lse=kind.grad_lse is not None),
        step("grad_key_value", (*given, by_key, by_value), _key_blocks, empty_rows=empty_rows),
        step("grad_query", (*given, by_query, by_mask), _row_blocks, empty_rows=empty_rows),
        grad_mask,
        dense(problem.query_shape[:3]),
        _has_spare(problem),
        places,
        gradient,
        problem.options.band is not None,
    )


def _row_blocks(problem: Problem, config: Config) -> int:
    return blocks(problem.query_length, config.rows) * problem.heads * problem.batch


def _key_blocks(problem: Problem, config: Config) -> int:
    return blocks(problem.key_length, config.keys) * problem.kv_heads * problem.batch


def _mask_tiles(problem: Problem, config: Config) -> int:
    planes = problem.mask.shape[0] * problem.mask.shape[1] if problem.mask else 0
    tiles = blocks(problem.query_length, config.rows) * blocks(problem.key_length, config.keys)
    return planes * tiles


def _step(
    problem: Problem,
    kernel: str,
    strides: Sequence[Strides],
    variant: Variant,
    config: Config,
    *,
    programs: int,
    integers: Sequence[int] = (),
) -> Step:
    return Step(
        kernel,
        strides,
        _numbers(problem),
        variant,
        integers=integers,
        programs=programs,
        warps=config.warps,
        stages=config.stages,
        device=problem.device,
    )


def _variant(problem: Problem, config: Config) -> Variant:
    options, mask = problem.options, problem.mask
    low, high = options.band or (None, None)
    kind = mask.kind if mask is not None else "none"
    return Variant(
        config.rows,
        config.keys,
        problem.head_dim,
        problem.value_dim,
        head_block(problem.head_dim),
        head_block(problem.value_dim),
        exact=problem.dtype == torch.float32,
        precision="tf32" if problem.tf32 and not chosen_twice(problem) else config.precision,
        mask=kind,
        low=low is not None,
        high=high is not None,
        softcap=options.softcap != 0.0,
        dropout=options.threshold != 0,
        # The highest score is that of the highest product only where the scale is positive.
        late_scale=not options.softcap and kind != "additive" and options.scale > 0.0,
    )


def _numbers(problem: Problem) -> Numbers:
    """Scores are in units of log 2 unless a mask is added to them; see common.py."""
    options, mask = problem.options, problem.mask
    low, high = options.band or (None, None)
    unit = 1.0 if mask is not None and mask.kind == "additive" else _LOG2_E
    cap = options.softcap
    return Numbers(
        problem.batch,
        problem.heads,
        tuning.group(problem),
        problem.query_length,
        problem.key_length,
        _bound(low, problem),
        _bound(high, problem),
        options.threshold,
        keep_scale(options.threshold),
        options.scale,
        options.scale / cap if cap else options.scale * unit,
        cap * unit,
    )


def _bound(bound: int | None, problem: Problem) -> int:
    """A bound of the band as a number of 32 bits; further out it hides no less, or no more."""
    return min(max(bound or 0, -problem.query_length), problem.key_length)


def _operand_strides(problem: Problem) -> tuple[Strides, Strides, Strides, Strides]:
    query, key, value = (Strides(*strides) for _, strides in problem.operands.values())
    mask = _ABSENT
    if problem.mask is not None:
        # An axis of size one serves every index.
        pairs = zip(problem.mask.shape, problem.mask.strides, strict=True)
        mask = Strides(*(0 if size == 1 else stride for size, stride in pairs))
    return query, key, value, mask


def _of_rows(strides: Shape | None) -> Strides:
    """Of a tensor with a number for each row."""
    batch, head, row = strides or (0, 0, 0)
    return Strides(batch, head, row, 0)


def _outputs(problem: Problem) -> tuple[Place, Place | None]:
    out = Place((*problem.query_shape[:3], problem.value_dim), problem.out_strides, problem.dtype)
    return out, dense(problem.query_shape[:3]) if problem.lse or problem.grad else None


def _gradient_places(problem: Problem) -> tuple[Place, Place, Place]:
    query, key, value = (
        following(*operand, problem.dtype) for operand in problem.operands.values()
    )
    return query, key, value


def has_mask_apart(problem: Problem) -> bool:
    """Whether a kernel of its own makes the gradient of the mask, if that is wanted at all."""
    gradient = _mask_gradient(problem)
    return gradient is None or gradient.writer == "grad_mask"


def _mask_gradient(problem: Problem) -> MaskGradient | None:
    """Sums over keys and over rows are made by the kernels that walk over these anyway; those over
    batch and heads by one of its own, unless rows or keys are folded: what is left is small."""
    mask = problem.mask
    if mask is None or not problem.mask_grad:
        return None
    planes, rows, keys = problem.query_shape[:2], problem.query_length, problem.key_length
    if mask.shape[3] != keys:
        return MaskGradient("grad_query", dense((*planes, rows, 1)), "keys")
    if mask.shape[2] != rows:
        return MaskGradient("grad_key_value", dense((*planes, 1, keys)), "rows")
    place = following(mask.shape, mask.strides, mask.dtype)
    return MaskGradient("grad_query" if mask.shape[:2] == planes else "grad_mask", place, "tile")


def _has_empty_rows(problem: Problem) -> bool:
    """Whether some row may have nothing to attend to."""
    low, high = problem.options.band or (None, None)
    before = high is not None and high < 0
    after = low is not None and problem.query_length - 1 + low > problem.key_length - 1
    return problem.mask is not None or before or after


def _has_spare(problem: Problem) -> bool:
    """Whether a row whose lse is large is rebuilt from its keys; see general_backward.py."""
    additive = problem.mask is not None and problem.mask.kind == "additive"
    return additive or problem.dtype == torch.float32


def _allocate(out: Place, lse: Place | None, device: torch.device) -> tuple[Tensor, Tensor | None]:
    return out.allocate(device), lse.allocate(device) if lse else None


def packed_strides(shape: Shape, strides: Shape) -> Shape:
    """Dense, with the last axis innermost and the others in the order in which they lie."""
    order = [axis for axis in axis_order(shape, strides) if axis != 3]
    return dense_strides(shape, (*order, 3))


def _pack(tensor: Tensor) -> Tensor:
    strides = packed_strides(tensor.shape, tensor.stride())
    place = Place(tuple(tensor.shape), strides, tensor.dtype)
    return place.allocate(tensor.device).copy_(tensor)
