"""Gradients of attention by pointers. No two programs add to the same memory, so the same inputs
give the same bits: one kernel owns keys and walks over rows, another owns rows and walks over keys.

A row's probabilities come back from three numbers that the first kernel prepares: e^(score - shift)
over 2^spare. `shift` is lse in the units of scores and `spare` is 0. Where lse is so large that its
digits no longer tell the probabilities, they are the row's highest score and the log of its sum;
kernels of 16-bit operands without an additive mask do without `spare`, whose digits they have not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from orchard.backends.cuda.common import (
    INFINITY,
    LOG2_E,
    block_of,
    highest,
    kept,
    load_head,
    load_value,
    mask_plane_of,
    plane_of,
    read_seed,
    score_of,
    shrinkage,
    span,
    store_head,
    store_value,
    weight,
)

LSE_LIMIT = tl.constexpr(128.0)  # up to which the digits of lse tell the probabilities


class Statistics(NamedTuple):
    """Of each row: pointers to [b * Hq + h][row], or the numbers of some rows."""

    shift: Any
    delta: Any  # grad_out . out - grad_lse
    spare: Any


class OwnKeys(NamedTuple):
    """Keys and values that a program holds."""

    first: Any
    key: Any
    value: Any


class QueryHead(NamedTuple):
    """What a program that holds keys walks over."""

    plane: Any  # b * Hq + h
    query: Any
    grad_out: Any
    mask: Any
    statistics: Any
    seed: Any


class OwnRows(NamedTuple):
    """Rows that a program holds."""

    rows: Any
    query: Any
    grad_out: Any
    statistics: Any


class KeyHead(NamedTuple):
    """What a program that holds rows walks over, and where it leaves the mask's gradient."""

    key: Any
    value: Any
    mask: Any
    grad_mask: Any
    seed: Any


@triton.jit
def _rebuilt(q, key, mask, rows, numbers, how: tl.constexpr):
    """Highest score and total of rows, from their keys."""
    block_rows: tl.constexpr = how.block_rows
    size: tl.constexpr = how.block_keys
    top = tl.full([block_rows], -INFINITY, tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    seen = span(
        rows.first, rows.last, numbers.low, numbers.high, numbers.keys, size, how.low, how.high
    )
    for block in tl.range(seen[0], seen[3]):
        first = block * size
        k = load_head(key, first, numbers.keys, size, how, True)
        product = tl.dot(q, tl.trans(k), input_precision=how.precision)
        keys = first + tl.arange(0, size)
        score = score_of(product, rows, keys, mask, numbers, how, True, False)[0]
        peak = tl.maximum(top, highest(score, numbers, how))
        base = tl.where(peak == -INFINITY, 0.0, peak)
        total = total * shrinkage(top, base, how)
        total += tl.sum(weight(score, base[:, None], numbers, how), 1)
        top = peak
    return top, total


@triton.jit
def _numbers_of_rows(pointer, strides, batch, head, rows, other: tl.constexpr):
    """A number of each row, `other` where there is no such row."""
    plane = plane_of(pointer, strides, batch, head)
    places = plane.start + rows.index.to(tl.int64) * plane.row
    return tl.load(places, mask=rows.valid, other=other)


@triton.jit
def attention_rows(
    query,
    key,
    mask,
    out,
    lse,
    grad_out,
    grad_lse,
    shift,
    delta,
    spare,
    query_strides,
    key_strides,
    mask_strides,
    out_strides,
    lse_strides,
    grad_out_strides,
    grad_lse_strides,
    numbers,
    how: tl.constexpr,
):
    """What the other kernels need to know of each row. An empty one has an infinite shift."""
    size: tl.constexpr = how.block_rows
    blocks = tl.cdiv(numbers.rows, size)
    plane = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * size
    batch = plane // numbers.heads
    head = plane % numbers.heads
    rows = block_of(first, plane, numbers.rows, size)
    outs = plane_of(out, out_strides, batch, head)
    grads = plane_of(grad_out, grad_out_strides, batch, head)
    result = load_value(outs, first, numbers.rows, size, how, True)
    grad = load_value(grads, first, numbers.rows, size, how, True)
    by_row = tl.sum(result.to(tl.float32) * grad.to(tl.float32), 1)
    if how.grad_lse:
        by_row -= _numbers_of_rows(grad_lse, grad_lse_strides, batch, head, rows, 0.0)
    total = _numbers_of_rows(lse, lse_strides, batch, head, rows, -INFINITY)
    empty = total == -INFINITY
    base = total
    if how.mask != "additive":
        base = total * LOG2_E
    places = plane.to(tl.int64) * numbers.rows + rows.index
    if how.exact or how.mask == "additive":
        log_sum = tl.zeros_like(total)
        large = (tl.abs(total) > LSE_LIMIT) & (total != -INFINITY)
        if tl.max(large.to(tl.int32), 0) > 0:
            queries = plane_of(query, query_strides, batch, head)
            q = load_head(queries, first, numbers.rows, size, how, True)
            keys = plane_of(key, key_strides, batch, head // numbers.group)
            masks = mask_plane_of(mask, mask_strides, batch, head, how)
            peak, sum_of_row = _rebuilt(q, keys, masks, rows, numbers, how)
            base = tl.where(large, peak, base)
            log_sum = tl.where(large, tl.log2(sum_of_row), log_sum)
        tl.store(spare + places, log_sum, mask=rows.valid)
    tl.store(shift + places, tl.where(empty, INFINITY, base), mask=rows.valid)
    tl.store(delta + places, tl.where(empty, 0.0, by_row), mask=rows.valid)


@triton.jit
def _statistic(pointer, rows, other: tl.constexpr, edge: tl.constexpr):
    if edge:
        found = tl.load(pointer + rows.index, mask=rows.valid, other=other)
    else:
        found = tl.load(pointer + rows.index)
    return found


@triton.jit
def _statistics(pointers, rows, plane, length, how: tl.constexpr, edge: tl.constexpr):
    start = plane.to(tl.int64) * length
    shift = _statistic(pointers.shift + start, rows, INFINITY, edge)
    delta = _statistic(pointers.delta + start, rows, 0.0, edge)
    spare = delta
    if how.exact or how.mask == "additive":
        spare = _statistic(pointers.spare + start, rows, 0.0, edge)
    return Statistics(shift, delta, spare)


@triton.jit
def _gradients(
    product,
    by_p,
    rows,
    row,
    first_key,
    mask,
    seed,
    numbers,
    how: tl.constexpr,
    edge: tl.constexpr,
    keys_first: tl.constexpr,
):
    """Of a tile, from q k and grad_out v: (weights of grad_out, by score, by product / scale).

    `row` are the statistics of `rows`; the keys are a whole block.
    """
    keys = first_key + tl.arange(0, how.block_keys)
    score, slope = score_of(product, rows, keys, mask, numbers, how, edge, keys_first)
    if keys_first:
        row = Statistics(row.shift[None, :], row.delta[None, :], row.spare[None, :])
    else:
        row = Statistics(row.shift[:, None], row.delta[:, None], row.spare[:, None])
    if how.late_scale:
        exponent = score * numbers.factor - row.shift
    elif how.mask == "additive":
        exponent = (score - row.shift) * LOG2_E
    else:
        exponent = score - row.shift
    if how.exact or how.mask == "additive":
        exponent -= row.spare
    p = tl.exp2(exponent)
    weights = p
    if how.dropout:
        keep = kept(rows, first_key, seed, numbers, how, keys_first)
        weights = tl.where(keep, p * numbers.keep_scale, 0.0)
        by_p = tl.where(keep, by_p * numbers.keep_scale, 0.0)
    by_score = p * (by_p - row.delta)
    if how.empty_rows:
        by_score = tl.where(row.shift == INFINITY, 0.0, by_score)  # though values be not finite
    return weights, by_score, by_score * slope


@triton.jit
def _without_empty(grad, row, how: tl.constexpr):
    """Rows of grad_out; nothing flows through a row with nothing to attend to, not even NaN."""
    if how.empty_rows:
        grad = tl.where((row.shift == INFINITY)[:, None], 0.0, grad).to(grad.dtype)
    return grad


@triton.jit
def _walk_rows(state, begin, end, own, head, numbers, how: tl.constexpr, edge: tl.constexpr):
    """Take blocks [begin, end) of rows into the gradients of a block of keys."""
    size: tl.constexpr = how.block_rows
    by_key, by_value, by_mask = state
    length = numbers.rows
    for block in tl.range(begin, end):
        first = block * size
        rows = block_of(first, head.plane, length, size)
        row = _statistics(head.statistics, rows, head.plane, length, how, edge)
        q = load_head(head.query, first, length, size, how, edge)
        grad = load_value(head.grad_out, first, length, size, how, edge)
        grad = _without_empty(grad, row, how)
        product = tl.dot(own.key, tl.trans(q), input_precision=how.precision)
        by_p = tl.dot(own.value, tl.trans(grad), input_precision=how.precision)
        weights, by_score, by_product = _gradients(
            product, by_p, rows, row, own.first, head.mask, head.seed, numbers, how, edge, True
        )
        if how.mask_grad == "rows":
            by_mask += tl.sum(by_score, 1)
        by_value = tl.dot(weights.to(grad.dtype), grad, by_value, input_precision=how.precision)
        by_key = tl.dot(by_product.to(q.dtype), q, by_key, input_precision=how.precision)
    return by_key, by_value, by_mask


@triton.jit
def attention_grad_key_value(
    query,
    key,
    value,
    mask,
    seed,
    grad_out,
    shift,
    delta,
    spare,
    grad_key,
    grad_value,
    grad_mask,
    query_strides,
    key_strides,
    value_strides,
    mask_strides,
    grad_out_strides,
    grad_key_strides,
    grad_value_strides,
    numbers,
    how: tl.constexpr,
):
    """A program owns a block of keys of one key head, and walks over the rows of its query heads.

    A mask's gradient that is summed over rows goes to grad_mask[b * Hq + h][key].
    """
    size: tl.constexpr = how.block_keys
    head_block: tl.constexpr = how.head_block
    value_block: tl.constexpr = how.value_block
    length = numbers.keys
    blocks = tl.cdiv(length, size)
    first = tl.program_id(0) % blocks * size
    kv_plane = tl.program_id(0) // blocks
    kv_heads = numbers.heads // numbers.group
    batch = kv_plane // kv_heads
    kv_head = kv_plane % kv_heads
    keys = plane_of(key, key_strides, batch, kv_head)
    values = plane_of(value, value_strides, batch, kv_head)
    own = OwnKeys(
        first,
        load_head(keys, first, length, size, how, True),
        load_value(values, first, length, size, how, True),
    )
    last = tl.minimum(first + size, length) - 1
    least, inner, outer, most = span(
        first, last, -numbers.high, -numbers.low, numbers.rows, how.block_rows, how.high, how.low
    )
    if first + size > length:
        outer = inner  # keys past the last one make every block an edge
    by_key = tl.zeros([size, head_block], tl.float32)
    by_value = tl.zeros([size, value_block], tl.float32)
    for member in tl.range(0, numbers.group):
        index = kv_head * numbers.group + member
        head = QueryHead(
            batch * numbers.heads + index,
            plane_of(query, query_strides, batch, index),
            plane_of(grad_out, grad_out_strides, batch, index),
            mask_plane_of(mask, mask_strides, batch, index, how),
            Statistics(shift, delta, spare),
            read_seed(seed, how),
        )
        state = by_key, by_value, tl.zeros([size], tl.float32)
        if how.high:
            state = _walk_rows(state, least, inner, own, head, numbers, how, True)
        state = _walk_rows(state, inner, outer, own, head, numbers, how, False)
        by_key, by_value, by_mask = _walk_rows(state, outer, most, own, head, numbers, how, True)
        if how.mask_grad == "rows":
            place = first + tl.arange(0, size)
            sums = grad_mask + head.plane.to(tl.int64) * length
            tl.store(sums + place, by_mask, mask=place < length)
    grad_keys = plane_of(grad_key, grad_key_strides, batch, kv_head)
    by_key *= numbers.scale
    store_head(grad_keys, first, length, by_key, size, how)
    grad_values = plane_of(grad_value, grad_value_strides, batch, kv_head)
    store_value(grad_values, first, length, by_value, size, how)


@triton.jit
def _store_scores(plane, rows, first_key, values, numbers, how: tl.constexpr):
    """Into a [row][key] plane."""
    keys = first_key + tl.arange(0, how.block_keys)
    places = plane.start + (
        rows.index[:, None].to(tl.int64) * plane.row + keys[None, :].to(tl.int64) * plane.column
    )
    inside = rows.valid[:, None] & (keys < numbers.keys)[None, :]
    tl.store(places, values.to(plane.start.dtype.element_ty), mask=inside)


@triton.jit
def _walk_keys(state, begin, end, own, head, numbers, how: tl.constexpr, edge: tl.constexpr):
    """Take blocks [begin, end) of keys into the gradients of a block of rows."""
    size: tl.constexpr = how.block_keys
    by_query, by_mask = state
    length = numbers.keys
    rows = own.rows
    row = own.statistics
    for block in tl.range(begin, end):
        first = block * size
        k = load_head(head.key, first, length, size, how, edge)
        v = load_value(head.value, first, length, size, how, edge)
        product = tl.dot(own.query, tl.trans(k), input_precision=how.precision)
        by_p = tl.dot(own.grad_out, tl.trans(v), input_precision=how.precision)
        _, by_score, by_product = _gradients(
            product, by_p, rows, row, first, head.mask, head.seed, numbers, how, edge, False
        )
        if how.mask_grad == "keys":
            by_mask += tl.sum(by_score, 1)
        if how.mask_grad == "tile":
            _store_scores(head.grad_mask, rows, first, by_score, numbers, how)
        by_query = tl.dot(by_product.to(k.dtype), k, by_query, input_precision=how.precision)
    return by_query, by_mask


@triton.jit
def attention_grad_query(
    query,
    key,
    value,
    mask,
    seed,
    grad_out,
    shift,
    delta,
    spare,
    grad_query,
    grad_mask,
    query_strides,
    key_strides,
    value_strides,
    mask_strides,
    grad_out_strides,
    grad_query_strides,
    grad_mask_strides,
    numbers,
    how: tl.constexpr,
):
    """A program owns a block of rows of one head, and walks over its keys.

    A mask's gradient that is not summed is written on the way, where the band lets a key be seen;
    one that is summed over keys goes to grad_mask[b][h][row].
    """
    size: tl.constexpr = how.block_rows
    head_block: tl.constexpr = how.head_block
    length = numbers.rows
    blocks = tl.cdiv(length, size)
    block = tl.program_id(0) % blocks
    plane = tl.program_id(0) // blocks
    if how.high:
        block = blocks - 1 - block  # as in the forward
    first = block * size
    batch = plane // numbers.heads
    index = plane % numbers.heads
    kv_head = index // numbers.group
    rows = block_of(first, plane, length, size)
    row = _statistics(Statistics(shift, delta, spare), rows, plane, length, how, True)
    queries = plane_of(query, query_strides, batch, index)
    grads = plane_of(grad_out, grad_out_strides, batch, index)
    grad = load_value(grads, first, length, size, how, True)
    own = OwnRows(
        rows,
        load_head(queries, first, length, size, how, True),
        _without_empty(grad, row, how),
        row,
    )
    masks = mask_plane_of(mask, mask_strides, batch, index, how)
    grad_masks = masks
    if how.mask_grad != "none":
        grad_masks = plane_of(grad_mask, grad_mask_strides, batch, index)
    head = KeyHead(
        plane_of(key, key_strides, batch, kv_head),
        plane_of(value, value_strides, batch, kv_head),
        masks,
        grad_masks,
        read_seed(seed, how),
    )
    least, inner, outer, most = span(
        first,
        rows.last,
        numbers.low,
        numbers.high,
        numbers.keys,
        how.block_keys,
        how.low,
        how.high,
    )
    state = tl.zeros([size, head_block], tl.float32), tl.zeros([size], tl.float32)
    if how.low:
        state = _walk_keys(state, least, inner, own, head, numbers, how, True)
    state = _walk_keys(state, inner, outer, own, head, numbers, how, False)
    by_query, by_mask = _walk_keys(state, outer, most, own, head, numbers, how, True)
    grad_queries = plane_of(grad_query, grad_query_strides, batch, index)
    by_query *= numbers.scale
    store_head(grad_queries, first, length, by_query, size, how)
    if how.mask_grad == "keys":
        places = grad_masks.start + rows.index.to(tl.int64) * grad_masks.row
        tl.store(places, by_mask, mask=rows.valid)


@triton.jit
def attention_grad_mask(
    query,
    key,
    value,
    mask,
    seed,
    grad_out,
    shift,
    delta,
    spare,
    grad_mask,
    query_strides,
    key_strides,
    value_strides,
    mask_strides,
    grad_out_strides,
    grad_mask_strides,
    numbers,
    mask_batch,
    mask_heads,
    how: tl.constexpr,
):
    """The gradient of a mask that serves several batch entries or heads.

    A program owns a tile of it, and adds up what flows into that tile from each of them, in order.
    """
    block_rows: tl.constexpr = how.block_rows
    block_keys: tl.constexpr = how.block_keys
    key_blocks = tl.cdiv(numbers.keys, block_keys)
    tiles = tl.cdiv(numbers.rows, block_rows) * key_blocks
    tile = tl.program_id(0) % tiles
    mask_plane = tl.program_id(0) // tiles
    first = tile // key_blocks * block_rows
    key_block = tile % key_blocks
    first_key = key_block * block_keys
    rows = block_of(first, 0, numbers.rows, block_rows)
    seen = span(
        first,
        rows.last,
        numbers.low,
        numbers.high,
        numbers.keys,
        block_keys,
        how.low,
        how.high,
    )
    # An axis of size one is shared by all, another one by nobody.
    head_sharers = numbers.heads // mask_heads
    sharers = numbers.batch // mask_batch * head_sharers
    if (key_block < seen[0]) | (key_block >= seen[3]):
        sharers = 0
    seeds = read_seed(seed, how)
    by_mask = tl.zeros([block_rows, block_keys], tl.float32)
    for sharer in tl.range(0, sharers):
        batch = mask_plane // mask_heads + sharer // head_sharers
        head = mask_plane % mask_heads + sharer % head_sharers
        kv_head = head // numbers.group
        plane = batch * numbers.heads + head
        rows = block_of(first, plane, numbers.rows, block_rows)
        row = _statistics(Statistics(shift, delta, spare), rows, plane, numbers.rows, how, True)
        queries = plane_of(query, query_strides, batch, head)
        grads = plane_of(grad_out, grad_out_strides, batch, head)
        keys = plane_of(key, key_strides, batch, kv_head)
        values = plane_of(value, value_strides, batch, kv_head)
        q = load_head(queries, first, numbers.rows, block_rows, how, True)
        grad = load_value(grads, first, numbers.rows, block_rows, how, True)
        k = load_head(keys, first_key, numbers.keys, block_keys, how, True)
        v = load_value(values, first_key, numbers.keys, block_keys, how, True)
        product = tl.dot(q, tl.trans(k), input_precision=how.precision)
        by_p = tl.dot(grad, tl.trans(v), input_precision=how.precision)
        masks = mask_plane_of(mask, mask_strides, batch, head, how)
        gradients = _gradients(
            product, by_p, rows, row, first_key, masks, seeds, numbers, how, True, False
        )
        by_mask += gradients[1]
    grad_masks = plane_of(
        grad_mask, grad_mask_strides, mask_plane // mask_heads, mask_plane % mask_heads
    )
    _store_scores(grad_masks, rows, first_key, by_mask, numbers, how)
