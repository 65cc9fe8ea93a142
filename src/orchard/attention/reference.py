"""The definition of attention, and the oracle every backend is held to.

`attend` is the definition: plain torch operations, differentiable any number of times. `gradients`
is its derivative written out, because an operator's kernel runs below autograd. The functions
after them go through the problem in chunks, so that few scores are in flight at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from orchard.attention.dropout import keep_mask, keep_scale
from orchard.attention.memory import empty_following, empty_lse
from orchard.attention.problem import (
    Band,
    Gradients,
    Options,
    Saved,
    Tensors,
    Upstream,
    accumulation_dtype,
)

# Bytes of scores in a chunk; a few tensors of this size are alive at once. On a CPU 4 MiB ran
# twice as fast as 64 MiB: larger temporaries leave the cache.
CPU_CHUNK_BYTES = 4 * 2**20
GPU_CHUNK_BYTES = 64 * 2**20
BAND_ROWS = 256  # rows of a chunk under causal or a window, so that it skips keys out of sight

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Origin(NamedTuple):
    """Where a chunk begins in the whole problem, and how many heads the whole has."""

    batch: int
    head: int
    row: int
    key: int
    heads: int


class Rows(NamedTuple):
    """Softmax of the scores, [B, Hq, Sq, Sk], and what belongs to it."""

    probabilities: Tensor  # before dropout
    factor: Tensor | float  # of dropout: 0 where dropped, 1 / (1 - p) where kept
    slope: Tensor | float  # derivative of softcap
    lse: Tensor
    empty: Tensor  # rows with nothing to attend to


def _without_autocast(
    function: Callable[Concatenate[Tensors, _P], _T],
) -> Callable[Concatenate[Tensors, _P], _T]:
    """Autocast has had its say about the operands; what is computed from them is not its own."""

    @functools.wraps(function)
    def run(tensors: Tensors, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        kind = tensors.query.device.type
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return function(tensors, *args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return function(tensors, *args, **kwargs)

    return run


def softmax_rows(tensors: Tensors, options: Options, origin: Origin | None = None) -> Rows:
    """Scores, masks, softmax and dropout, in the dtype of the operands."""
    query, key, _, mask, seed = tensors
    batch, heads, rows, _ = query.shape
    origin = origin or Origin(0, 0, 0, 0, heads)
    keys, device = range(origin.key, origin.key + key.shape[2]), query.device

    scores = options.scale * _by_group("bhgid,bhjd->bhgij", query, key)
    slope: Tensor | float = 1.0
    if options.softcap:
        tanh = torch.tanh(scores / options.softcap)
        scores, slope = options.softcap * tanh, 1.0 - tanh * tanh
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    row = torch.arange(origin.row, origin.row + rows, device=device)
    if options.band is not None:
        distance = torch.arange(keys.start, keys.stop, device=device) - row[:, None]
        low, high = options.band
        if low is not None:
            scores = scores.masked_fill(distance < low, -torch.inf)
        if high is not None:
            scores = scores.masked_fill(distance > high, -torch.inf)

    top = scores.detach().amax(-1, keepdim=True) if keys else scores.sum(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (torch.log(total) + top).masked_fill(empty, -torch.inf).squeeze(-1)

    factor: Tensor | float = 1.0
    if options.threshold and seed is not None:
        b = torch.arange(origin.batch, origin.batch + batch, device=device)
        h = torch.arange(origin.head, origin.head + heads, device=device)
        keep = keep_mask(seed, options.threshold, b[:, None] * origin.heads + h, row, keys)
        factor = keep.to(scores.dtype) * keep_scale(options.threshold)
    return Rows(weights / total, factor, slope, lse, empty)


def _by_group(equation: str, by_head: Tensor, by_kv_head: Tensor) -> Tensor:
    """einsum of a [B, Hq, ...] and a [B, Hkv, ...] tensor, each query head with its key head."""
    kv_heads = by_kv_head.shape[1]
    group = by_head.shape[1] // kv_heads if kv_heads else 1
    result = torch.einsum(equation, by_head.unflatten(1, (kv_heads, group)), by_kv_head)
    return result.flatten(1, 2)


@_without_autocast
def attend(tensors: Tensors, options: Options, origin: Origin | None = None) -> Saved:
    """Attention over these operands, in their dtype: (out, lse)."""
    rows = softmax_rows(tensors, options, origin)
    out = _by_group("bhgij,bhjd->bhgid", rows.probabilities * rows.factor, tensors.value)
    return Saved(out.masked_fill(rows.empty, 0.0), rows.lse)


@_without_autocast
def define(tensors: Tensors, options: Options) -> Saved:
    """`attend` in the accumulation dtype, out in the operands': all of the call, in one piece."""
    wide = accumulation_dtype(tensors.query.dtype)
    query, key, value = (t.to(wide) for t in tensors[:3])
    out, lse = attend(tensors._replace(query=query, key=key, value=value), options)
    return Saved(out.to(tensors.query.dtype), lse)


@_without_autocast
def gradients(
    tensors: Tensors, options: Options, upstream: Upstream, origin: Origin | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Derivative of `attend` by query, key, value and score (before the mask's axes are summed)."""
    return propagate(softmax_rows(tensors, options, origin), tensors, options, upstream)


def propagate(
    rows: Rows, tensors: Tensors, options: Options, upstream: Upstream, *, magnitudes: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gradients` from given rows; with `magnitudes` nothing cancels, for error analysis."""
    query, key, value, _, _ = tensors
    p, factor, slope, _, empty = rows
    # Nothing flows through an empty row, not even NaN.
    grad_out = upstream.out.masked_fill(empty, 0.0)
    by_p = factor * _by_group("bhgid,bhjd->bhgij", grad_out, value)
    by_p = by_p.masked_fill(empty, 0.0)
    by_row = (p * by_p).sum(-1, keepdim=True) * (1.0 if magnitudes else -1.0)
    if upstream.lse is not None:
        by_row = by_row + upstream.lse[..., None].masked_fill(empty, 0.0)
    by_score = p * (by_p + by_row)
    by_product = options.scale * slope * by_score
    by_query = _by_group("bhgij,bhjd->bhgid", by_product, key)
    by_key = _sum_over_rows(by_product, query, key.shape[1])
    by_value = _sum_over_rows(p * factor, grad_out, key.shape[1])
    return by_query, by_key, by_value, by_score


def _sum_over_rows(weights: Tensor, rows: Tensor, kv_heads: int) -> Tensor:
    """Rows summed with weights for each key, over every query head of a key head."""
    split = (kv_heads, rows.shape[1] // kv_heads if kv_heads else 1)
    return torch.einsum("bhgij,bhgid->bhjd", weights.unflatten(1, split), rows.unflatten(1, split))


class Chunk(NamedTuple):
    """Batch entries, key heads with their query heads, rows, and the keys that these see."""

    batch: slice
    heads: slice
    kv_heads: slice
    rows: slice
    keys: slice

    def cut(self, tensors: Tensors) -> Tensors:
        """Views of the operands that this chunk needs."""
        return Tensors(
            tensors.query[self.output],
            tensors.key[self.input],
            tensors.value[self.input],
            None if tensors.mask is None else self.cut_mask(tensors.mask),
            tensors.seed,
        )

    def cut_mask(self, mask: Tensor) -> Tensor:
        """The chunk's part of a mask, or of its gradient; axes of size one stay whole."""
        for axis, part in enumerate((*self.output, self.keys)):
            if mask.shape[axis] != 1:
                mask = mask.narrow(axis, part.start, part.stop - part.start)
        return mask

    @property
    def output(self) -> tuple[slice, slice, slice]:
        """Where the chunk's rows lie in a [B, Hq, Sq, ...] tensor."""
        return self.batch, self.heads, self.rows

    @property
    def input(self) -> tuple[slice, slice, slice]:
        """Where the keys that they see lie in a [B, Hkv, Sk, ...] tensor."""
        return self.batch, self.kv_heads, self.keys

    def origin(self, tensors: Tensors) -> Origin:
        return Origin(
            self.batch.start,
            self.heads.start,
            self.rows.start,
            self.keys.start,
            tensors.query.shape[1],
        )


def chunks(tensors: Tensors, options: Options, chunk_bytes: int | None = None) -> Iterator[Chunk]:
    """Parts whose scores take at most `chunk_bytes` each; one row of one head is never split."""
    on_cpu = tensors.query.device.type == "cpu"
    budget = chunk_bytes or (CPU_CHUNK_BYTES if on_cpu else GPU_CHUNK_BYTES)
    batch, heads, rows, _ = tensors.query.shape
    kv_heads, keys = tensors.key.shape[1], tensors.key.shape[2]
    group = heads // kv_heads if kv_heads else 1
    rows_at_once = min(rows, BAND_ROWS) if options.band else rows
    score_bytes = max(1, keys * accumulation_dtype(tensors.query.dtype).itemsize)
    row_bytes = group * score_bytes
    head_bytes = row_bytes * max(1, rows_at_once)
    batch_bytes = head_bytes * max(1, kv_heads)
    batch_step = max(1, budget // batch_bytes)
    head_step = kv_heads if batch_bytes <= budget else max(1, budget // head_bytes)
    row_step = rows_at_once if head_bytes <= budget else max(1, budget // row_bytes)
    group_step = group if row_bytes <= budget else max(1, budget // score_bytes)
    for b in _steps(batch, batch_step):
        for h in _steps(kv_heads, head_step):
            for g in _steps(group, group_step):  # a part of a group only for a single key head
                heads_here = slice(h.start * group + g.start, (h.stop - 1) * group + g.stop)
                for i in _steps(rows, row_step):
                    yield Chunk(b, heads_here, h, i, _keys_in_band(options.band, i, keys))


def _keys_in_band(band: Band | None, rows: slice, keys: int) -> slice:
    """The keys that any of these rows may see."""
    low, high = band or (None, None)
    start = 0 if low is None else min(max(rows.start + low, 0), keys)
    stop = keys if high is None else min(max(rows.stop + high, start), keys)
    return slice(start, stop)


def _steps(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, max(1, step)):
        yield slice(start, min(start + step, size))


def _widened(tensors: Tensors) -> Tensors:
    """Detached operands in the accumulation dtype."""
    wide = accumulation_dtype(tensors.query.dtype)
    query, key, value, mask, seed = tensors
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.detach().to(wide)
    return Tensors(
        query.detach().to(wide), key.detach().to(wide), value.detach().to(wide), mask, seed
    )


@_without_autocast
def forward(tensors: Tensors, options: Options, *, chunk_bytes: int | None = None) -> Saved:
    """(out, lse), chunk by chunk."""
    query, value = tensors.query, tensors.value
    out = empty_following(query, (*query.shape[:3], value.shape[3]))
    lse = empty_lse(query)
    with torch.no_grad():
        for chunk in chunks(tensors, options, chunk_bytes):
            part = attend(_widened(chunk.cut(tensors)), options, chunk.origin(tensors))
            out[chunk.output], lse[chunk.output] = part
    return Saved(out, lse)


def _sums(tensors: Tensors, mask_grad: bool) -> list[Tensor]:
    """Zeros in the accumulation dtype for the gradients of query, key, value and the mask."""
    wide = accumulation_dtype(tensors.query.dtype)
    operands = [tensors.query, tensors.key, tensors.value]
    if mask_grad and tensors.mask is not None:
        operands.append(tensors.mask)
    return [torch.zeros(operand.shape, dtype=wide, device=operand.device) for operand in operands]


def _add_to_sums(sums: list[Tensor], chunk: Chunk, grads: tuple[Tensor, ...]) -> None:
    sums[0][chunk.output] += grads[0]
    sums[1][chunk.input] += grads[1]
    sums[2][chunk.input] += grads[2]
    if len(sums) > 3:
        part = chunk.cut_mask(sums[3])
        part += grads[3].sum_to_size(part.shape)


def _narrowed(sums: list[Tensor], tensors: Tensors) -> Gradients:
    """Sums in the dtype of their operands."""
    query, key, value = (
        total.to(operand.dtype) for total, operand in zip(sums[:3], tensors[:3], strict=True)
    )
    mask = tensors.mask
    return Gradients(
        query, key, value, sums[3].to(mask.dtype) if mask is not None and sums[3:] else None
    )


@_without_autocast
def backward(
    tensors: Tensors,
    options: Options,
    upstream: Upstream,
    *,
    mask_grad: bool = False,
    chunk_bytes: int | None = None,
) -> Gradients:
    """Gradients of the operands, chunk by chunk."""
    wide = accumulation_dtype(tensors.query.dtype)
    sums = _sums(tensors, mask_grad)
    with torch.no_grad():
        for chunk in chunks(tensors, options, chunk_bytes):
            part = Upstream(
                upstream.out[chunk.output].to(wide),
                None if upstream.lse is None else upstream.lse[chunk.output],
            )
            operands = _widened(chunk.cut(tensors))
            _add_to_sums(sums, chunk, gradients(operands, options, part, chunk.origin(tensors)))
    return _narrowed(sums, tensors)


@_without_autocast
def double_backward(
    tensors: Tensors,
    options: Options,
    upstream: Upstream,
    directions: Gradients,
    *,
    chunk_bytes: int | None = None,
) -> tuple[Upstream, Gradients]:
    """Gradients of <backward(tensors, upstream), directions> by upstream and by the operands.

    torch differentiates `gradients`, so this runs where autograd records. Where gradients of the
    result are wanted too (grad mode is on), it stays on the graph, in one piece.
    """
    if torch.is_grad_enabled():
        return _second_gradients(tensors, options, upstream, directions, create_graph=True)
    sums = _sums(tensors, directions.mask is not None)
    by_out = torch.zeros_like(upstream.out)
    by_lse = None if upstream.lse is None else torch.zeros_like(upstream.lse)
    for chunk in chunks(tensors, options, chunk_bytes):
        along = Gradients(
            directions.query[chunk.output],
            directions.key[chunk.input],
            directions.value[chunk.input],
            None if directions.mask is None else chunk.cut_mask(directions.mask),
        )
        part = Upstream(
            upstream.out[chunk.output],
            None if upstream.lse is None else upstream.lse[chunk.output],
        )
        by_part, grads = _second_gradients(
            _widened(chunk.cut(tensors)), options, part, along, chunk.origin(tensors)
        )
        _add_to_sums(sums, chunk, tuple(grad for grad in grads if grad is not None))
        by_out[chunk.output] = by_part.out
        if by_lse is not None and by_part.lse is not None:
            by_lse[chunk.output] = by_part.lse
    return Upstream(by_out, by_lse), _narrowed(sums, tensors)


def _second_gradients(
    tensors: Tensors,
    options: Options,
    upstream: Upstream,
    directions: Gradients,
    origin: Origin | None = None,
    *,
    create_graph: bool = False,
) -> tuple[Upstream, Gradients]:
    wide = accumulation_dtype(tensors.query.dtype)
    along = [way.to(wide) for way in directions if way is not None]
    with torch.enable_grad():
        # Partial derivatives: by these aliases only, not by what `directions` come from.
        inputs = [_alias(t) for t in (*tensors[:3], upstream.out)]
        query, key, value, out = (t.to(wide) for t in inputs)
        lse, mask = upstream.lse, tensors.mask
        if lse is not None:
            lse = _alias(lse)
            inputs.append(lse)
        if mask is not None and directions.mask is not None:
            mask = _alias(mask)
            inputs.append(mask)
        operands = Tensors(query, key, value, mask, tensors.seed)
        firsts = gradients(operands, options, Upstream(out, lse), origin)
        if mask is not None and directions.mask is not None:
            firsts = (*firsts[:3], firsts[3].sum_to_size(mask.shape))
        seconds = torch.autograd.grad(
            firsts[: len(along)], inputs, along, create_graph=create_graph, materialize_grads=True
        )
    by_query, by_key, by_value, by_out, *rest = seconds
    by_lse = None if lse is None else rest.pop(0)
    return Upstream(by_out, by_lse), Gradients(by_query, by_key, by_value, *rest or (None,))


def _alias(tensor: Tensor) -> Tensor:
    """The same values as a tensor of their own to differentiate by, still on the graph."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
