"""Few rows against many keys. The query heads that share a key head are rows of one block, so that
keys and values are read once; the keys are split among programs, and a second kernel joins them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from orchard.backends.cuda.common import (
    INFINITY,
    Block,
    Plane,
    lse_of,
    plane_of,
    read_seed,
    shrinkage,
)
from orchard.backends.cuda.general_forward import Seen, attend, result_of


@triton.jit
def attention_splits(
    query,
    key,
    value,
    mask,
    seed,
    out,
    lse,
    sums,
    tops,
    totals,
    query_strides,
    key_strides,
    value_strides,
    mask_strides,
    out_strides,
    numbers,
    splits,
    split_blocks,
    how: tl.constexpr,
):
    """Packed row r of a key head is row r % rows of its query head r // rows.

    Parts go to sums[b * Hq + h][row][split][column], tops and totals[b * Hq + h][row][split]; with
    one split there is nothing to join, and the result is stored as it is.
    """
    split = tl.program_id(0) % splits
    kv_plane = tl.program_id(0) // splits
    kv_heads = numbers.heads // numbers.group
    batch = kv_plane // kv_heads
    kv_head = kv_plane % kv_heads
    packed = tl.arange(0, how.block_rows)
    valid = packed < numbers.group * numbers.rows
    index = packed % numbers.rows
    head = kv_head * numbers.group + packed // numbers.rows
    plane = batch * numbers.heads + head
    rows = Block(index, plane, valid, 0, numbers.rows - 1)

    dims = tl.arange(0, how.head_block)[None, :]
    queries = plane_of(query, query_strides, batch, head)
    places = (queries.start + index.to(tl.int64) * queries.row)[:, None]
    q = tl.load(
        places + dims.to(tl.int64) * queries.column,
        mask=valid[:, None] & (dims < how.head_dim),
        other=0.0,
    )
    masks = Plane(0, 0, 0)
    if how.mask != "none":
        of_head = plane_of(mask, mask_strides, batch, head)
        masks = Plane(of_head.start[:, None], of_head.row, of_head.column)
    seen = Seen(
        plane_of(key, key_strides, batch, kv_head),
        plane_of(value, value_strides, batch, kv_head),
        masks,
        read_seed(seed, how),
    )
    begin = split * split_blocks
    end = tl.minimum(begin + split_blocks, tl.cdiv(numbers.keys, how.block_keys))
    part, top, total = attend(q, rows, seen, begin, end, numbers, how)
    columns = tl.arange(0, how.value_block)[None, :]
    inside = valid[:, None] & (columns < how.value_dim)
    row = plane.to(tl.int64) * numbers.rows + index
    if how.split:
        place = row * splits + split
        tl.store(sums + place[:, None] * how.value_dim + columns, part, mask=inside)
        tl.store(tops + place, top, mask=valid)
        tl.store(totals + place, total, mask=valid)
    else:
        result = result_of(part, total, numbers)
        outs = plane_of(out, out_strides, batch, head)
        places = (outs.start + index.to(tl.int64) * outs.row)[:, None]
        places += columns.to(tl.int64) * outs.column
        tl.store(places, result.to(out.dtype.element_ty), mask=inside)
        if how.lse:
            tl.store(lse + row, lse_of(top, total, how), mask=valid)


@triton.jit
def attention_join(
    sums,
    tops,
    totals,
    out,
    lse,
    out_strides,
    numbers,
    splits,
    how: tl.constexpr,
):
    """One row from its parts, in their order."""
    if how.early:
        gdc_wait()
    size: tl.constexpr = how.block_keys
    value_block: tl.constexpr = how.value_block
    row = tl.program_id(0)
    index = row % numbers.rows
    plane = row // numbers.rows
    columns = tl.arange(0, value_block)
    top = tl.full([1], -INFINITY, tl.float32)
    total = tl.zeros([1], tl.float32)
    result = tl.zeros([value_block], tl.float32)
    for block in tl.range(0, tl.cdiv(splits, size)):
        split = block * size + tl.arange(0, size)
        place = row.to(tl.int64) * splits + split
        part_top = tl.load(tops + place, mask=split < splits, other=-INFINITY)
        part_total = tl.load(totals + place, mask=split < splits, other=0.0)
        part = tl.load(
            sums + place[:, None] * how.value_dim + columns[None, :],
            mask=(split < splits)[:, None] & (columns < how.value_dim)[None, :],
            other=0.0,
        )
        peak = tl.maximum(top, tl.max(part_top, 0))
        base = tl.where(peak == -INFINITY, 0.0, peak)
        shrink = shrinkage(top, base, how)
        share = shrinkage(part_top, base, how)
        total = total * shrink + tl.sum(part_total * share, 0)
        result = result * shrink + tl.sum(part * share[:, None], 0)
        top = peak
    empty = total == 0.0
    result = tl.where(empty, 0.0, result * (numbers.keep_scale / tl.where(empty, 1.0, total)))
    outs = plane_of(out, out_strides, plane // numbers.heads, plane % numbers.heads)
    places = outs.start + index.to(tl.int64) * outs.row + columns.to(tl.int64) * outs.column
    tl.store(places, result.to(out.dtype.element_ty), mask=columns < how.value_dim)
    if how.lse:
        tl.store(lse + row + tl.arange(0, 1), lse_of(top, total, how))
