"""Attention by pointers: any strides, any head dimension to 256, any GPU that Triton compiles for.

A program owns a block of rows of one head and walks over the blocks of keys that they see, with an
online softmax in fp32. Blocks inside the band are walked without a thought of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from orchard.backends.cuda.common import (
    INFINITY,
    block_of,
    highest,
    kept,
    load_head,
    load_value,
    lse_of,
    mask_plane_of,
    plane_of,
    read_seed,
    score_of,
    shrinkage,
    span,
    store_value,
    weight,
)


class Seen(NamedTuple):
    """What rows attend to: planes of one key head and of the mask, and dropout's seed."""

    key: Any
    value: Any
    mask: Any
    seed: Any


@triton.jit
def _walk(state, begin, end, q, rows, seen, numbers, how: tl.constexpr, edge: tl.constexpr):
    """Take blocks [begin, end) of keys into (sums of values, highest score, total) of the rows."""
    size: tl.constexpr = how.block_keys
    sums, top, total = state
    length = numbers.keys
    for block in tl.range(begin, end):
        first = block * size
        k = load_head(seen.key, first, length, size, how, edge)
        product = tl.dot(q, tl.trans(k), input_precision=how.precision)
        keys = first + tl.arange(0, size)
        score = score_of(product, rows, keys, seen.mask, numbers, how, edge, False)[0]
        peak = tl.maximum(top, highest(score, numbers, how))
        base = peak
        if edge or how.mask != "none":
            base = tl.where(peak == -INFINITY, 0.0, peak)  # nothing seen yet
        shrink = shrinkage(top, base, how)
        p = weight(score, base[:, None], numbers, how)
        total = total * shrink + tl.sum(p, 1)
        if how.dropout:
            p = tl.where(kept(rows, first, seen.seed, numbers, how, False), p, 0.0)
        v = load_value(seen.value, first, length, size, how, edge)
        sums = tl.dot(p.to(v.dtype), v, sums * shrink[:, None], input_precision=how.precision)
        top = peak
    return sums, top, total


@triton.jit
def attend(q, rows, seen, begin, end, numbers, how: tl.constexpr):
    """Rows over blocks [begin, end) of keys: (sums of values, highest score, total)."""
    block_rows: tl.constexpr = how.block_rows
    value_block: tl.constexpr = how.value_block
    least, inner, outer, most = span(
        rows.first,
        rows.last,
        numbers.low,
        numbers.high,
        numbers.keys,
        how.block_keys,
        how.low,
        how.high,
    )
    inner = tl.minimum(tl.maximum(inner, begin), end)
    outer = tl.minimum(tl.maximum(outer, begin), end)
    state = (
        tl.zeros([block_rows, value_block], tl.float32),
        tl.full([block_rows], -INFINITY, tl.float32),
        tl.zeros([block_rows], tl.float32),
    )
    if how.low:
        state = _walk(state, tl.maximum(least, begin), inner, q, rows, seen, numbers, how, True)
    state = _walk(state, inner, outer, q, rows, seen, numbers, how, False)
    if not how.whole:
        last = tl.minimum(most, end)
        state = _walk(state, outer, last, q, rows, seen, numbers, how, True)
    return state


@triton.jit
def result_of(sums, total, numbers):
    """The output of rows; zero where there is nothing to attend to."""
    empty = total == 0.0
    share = numbers.keep_scale / tl.where(empty, 1.0, total)
    return tl.where(empty[:, None], 0.0, sums * share[:, None])


@triton.jit
def attention_forward(
    query,
    key,
    value,
    mask,
    seed,
    out,
    lse,
    query_strides,
    key_strides,
    value_strides,
    mask_strides,
    out_strides,
    numbers,
    how: tl.constexpr,
):
    blocks = tl.cdiv(numbers.rows, how.block_rows)
    block = tl.program_id(0) % blocks
    plane = tl.program_id(0) // blocks
    if how.high:
        block = blocks - 1 - block  # the last rows tend to see the most keys, and begin first
    batch = plane // numbers.heads
    head = plane % numbers.heads
    kv_head = head // numbers.group
    rows = block_of(block * how.block_rows, plane, numbers.rows, how.block_rows)
    queries = plane_of(query, query_strides, batch, head)
    q = load_head(queries, rows.first, numbers.rows, how.block_rows, how, True)
    seen = Seen(
        plane_of(key, key_strides, batch, kv_head),
        plane_of(value, value_strides, batch, kv_head),
        mask_plane_of(mask, mask_strides, batch, head, how),
        read_seed(seed, how),
    )
    key_blocks = tl.cdiv(numbers.keys, how.block_keys)
    sums, top, total = attend(q, rows, seen, 0, key_blocks, numbers, how)
    outs = plane_of(out, out_strides, batch, head)
    result = result_of(sums, total, numbers)
    store_value(outs, rows.first, numbers.rows, result, how.block_rows, how)
    if how.lse:
        places = lse + plane.to(tl.int64) * numbers.rows + rows.index
        tl.store(places, lse_of(top, total, how), mask=rows.valid)
