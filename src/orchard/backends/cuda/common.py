"""What the kernels share: tiles, bands, scores, exponents and the dropout bits.

A tile of scores is [rows, keys], or [keys, rows] where keys come first. Strides are 64-bit.

Scores are kept in units of log 2, so that exp2 needs no factor. Not so where a mask is added: the
lowest number of fp32 is a usual mask, and times log2(e) it would be infinite.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INFINITY = tl.constexpr(float("inf"))

# Philox4x32-10.
_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_WEYL_0 = tl.constexpr(0x9E3779B9)
_WEYL_1 = tl.constexpr(0xBB67AE85)
_ROUNDS = tl.constexpr(10)


class Plane(NamedTuple):
    """One head of one batch entry: where it begins, and the strides of its rows and columns."""

    start: Any
    row: Any
    column: Any


class Block(NamedTuple):
    """Rows that a program works on."""

    index: Any  # [n], in the sequence
    plane: Any  # [n], b * Hq + h: dropout's third counter
    valid: Any  # [n], whether there is such a row
    first: Any  # the least and the greatest index
    last: Any


@triton.jit
def plane_of(pointer, strides, batch, head):
    start = pointer + batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head
    return Plane(start, strides.row, strides.column)


@triton.jit
def mask_plane_of(pointer, strides, batch, head, how: tl.constexpr):
    plane = Plane(0, 0, 0)
    if how.mask != "none":
        plane = plane_of(pointer, strides, batch, head)
    return plane


@triton.jit
def block_of(first, plane, length, size: tl.constexpr):
    """The rows of one head from `first` on."""
    index = first + tl.arange(0, size)
    last = tl.minimum(first + size, length) - 1
    return Block(index, tl.full([size], plane, tl.int32), index < length, first, last)


@triton.jit
def read_seed(pointer, how: tl.constexpr):
    """The seed is in device memory, so that a captured graph may be replayed with another one."""
    seed = 0, 0
    if how.dropout:
        seed = tl.load(pointer).to(tl.uint32), tl.load(pointer + 1).to(tl.uint32)
    return seed


@triton.jit
def _places(plane, first, size: tl.constexpr, padded: tl.constexpr):
    start = plane.start + first.to(tl.int64) * plane.row
    rows = tl.arange(0, size)[:, None].to(tl.int64)
    columns = tl.arange(0, padded)[None, :].to(tl.int64)
    return start + (rows * plane.row + columns * plane.column)


@triton.jit
def _load_tile(
    plane,
    first,
    length,
    size: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    edge: tl.constexpr,
):
    places = _places(plane, first, size, padded)
    rows = first + tl.arange(0, size)[:, None]
    columns = tl.arange(0, padded)[None, :]
    if edge and width < padded:
        tile = tl.load(places, mask=(rows < length) & (columns < width), other=0.0)
    elif edge:
        tile = tl.load(places, mask=rows < length, other=0.0)
    elif width < padded:
        tile = tl.load(places, mask=columns < width, other=0.0)
    else:
        tile = tl.load(places)
    return tile


@triton.jit
def load_head(plane, first, length, size: tl.constexpr, how: tl.constexpr, edge: tl.constexpr):
    """[size, head_block] from row `first` on: zero past the head dimension and, at an edge, past
    the length."""
    return _load_tile(plane, first, length, size, how.head_dim, how.head_block, edge)


@triton.jit
def load_value(plane, first, length, size: tl.constexpr, how: tl.constexpr, edge: tl.constexpr):
    """[size, value_block], likewise."""
    return _load_tile(plane, first, length, size, how.value_dim, how.value_block, edge)


@triton.jit
def _store_tile(
    plane,
    first,
    length,
    tile,
    size: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
):
    rows = first + tl.arange(0, size)[:, None]
    inside = (rows < length) & (tl.arange(0, padded)[None, :] < width)
    places = _places(plane, first, size, padded)
    tl.store(places, tile.to(plane.start.dtype.element_ty), mask=inside)


@triton.jit
def store_head(plane, first, length, tile, size: tl.constexpr, how: tl.constexpr):
    _store_tile(plane, first, length, tile, size, how.head_dim, how.head_block)


@triton.jit
def store_value(plane, first, length, tile, size: tl.constexpr, how: tl.constexpr):
    _store_tile(plane, first, length, tile, size, how.value_dim, how.value_block)


@triton.jit
def span(
    first,
    last,
    low,
    high,
    length,
    size: tl.constexpr,
    has_low: tl.constexpr,
    has_high: tl.constexpr,
):
    """The blocks of [0, length) that [first, last] sees: (begin, inner begin, inner end, end).

    j is seen from i where low <= j - i <= high. Inner blocks are seen whole, from everywhere.
    """
    begin = length * 0
    inner_begin = begin
    inner_end = length // size
    end = tl.cdiv(length, size)
    if has_low:
        begin = tl.minimum(tl.maximum(first + low, 0) // size, end)
        inner_begin = tl.cdiv(tl.maximum(last + low, 0), size)
    if has_high:
        end = tl.minimum(tl.cdiv(tl.maximum(last + high + 1, 0), size), end)
        inner_end = tl.minimum(tl.maximum(first + high + 1, 0) // size, inner_end)
    inner_begin = tl.minimum(inner_begin, end)
    return begin, inner_begin, tl.maximum(inner_end, inner_begin), end


@triton.jit
def tanh(x, exact: tl.constexpr):
    """Where `exact`, a polynomial near 0, for 1 - 2 / (e^2x + 1) cancels there."""
    result = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
    if exact:
        s = x * x
        p = -5.8950684e-03 * s + 2.0795900e-02
        p = p * s - 5.3783812e-02
        p = p * s + 1.3331924e-01
        p = p * s - 3.3333299e-01
        result = tl.where(s < 0.36, x + x * s * p, result)
    return result


@triton.jit
def score_of(
    product,
    rows,
    keys,
    mask,
    numbers,
    how: tl.constexpr,
    edge: tl.constexpr,
    keys_first: tl.constexpr,
):
    """Scores, -inf where a key is hidden, and the derivative of softcap.

    At an edge the band and the end of the keys are looked at.
    """
    if keys_first:
        index = rows.index[None, :]
        valid = rows.valid[None, :]
        keys = keys[:, None]
    else:
        index = rows.index[:, None]
        valid = rows.valid[:, None]
        keys = keys[None, :]
    score = product
    slope = 1.0
    if how.softcap:
        bent = tanh(product * numbers.factor, how.exact)
        slope = 1.0 - bent * bent
        score = bent * numbers.cap
    elif not how.late_scale:
        score = product * numbers.factor
    if how.mask != "none":
        inside = valid
        if edge:
            inside = valid & (keys < numbers.keys)
        places = mask.start + (index.to(tl.int64) * mask.row + keys.to(tl.int64) * mask.column)
        entry = tl.load(places, mask=inside, other=0)
        if how.mask == "bool":
            score = tl.where(entry != 0, score, -INFINITY)
        else:
            score += entry.to(tl.float32)
    if edge:
        seen = keys < numbers.keys
        if how.low:
            seen = seen & (keys - index >= numbers.low)
        if how.high:
            seen = seen & (keys - index <= numbers.high)
        score = tl.where(seen, score, -INFINITY)
    return score, slope


@triton.jit
def highest(score, numbers, how: tl.constexpr):
    """The highest score of each row, as `weight` takes it for its base."""
    top = tl.max(score, 1)
    if how.late_scale:
        top = top * numbers.factor
    return top


@triton.jit
def weight(score, base, numbers, how: tl.constexpr):
    """e^(score - base), each in its units."""
    if how.late_scale:
        result = tl.exp2(score * numbers.factor - base)
    else:
        result = shrinkage(score, base, how)
    return result


@triton.jit
def shrinkage(old, new, how: tl.constexpr):
    """What a sum with base `old` is multiplied by to have base `new`."""
    exponent = old - new
    if how.mask == "additive":
        exponent *= LOG2_E
    return tl.exp2(exponent)


@triton.jit
def lse_of(top, total, how: tl.constexpr):
    """The natural logarithm of a row's sum; -inf for an empty row."""
    peak = top
    if how.mask != "additive":
        peak = top * LN_2
    return tl.where(total == 0.0, -INFINITY, peak + tl.log(total))


@triton.jit
def _product(word, multiplier: tl.constexpr):
    """High and low half of a 64-bit product."""
    wide = word.to(tl.uint64) * multiplier
    return (wide >> 32).to(tl.uint32), wide.to(tl.uint32)


@triton.jit
def _philox(x0, x1, x2, x3, k0, k1):
    """Philox4x32-10. The counters broadcast, so the first rounds work on less than a tile."""
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = _product(x0, _MULTIPLIER_0)
        high1, low1 = _product(x2, _MULTIPLIER_1)
        x0 = high1 ^ x1 ^ k0
        x1 = low1
        x2 = high0 ^ x3 ^ k1
        x3 = low0
        k0 = k0 + _WEYL_0
        k1 = k1 + _WEYL_1
    return x0, x1, x2, x3


@triton.jit
def kept(rows, first_key, seed, numbers, how: tl.constexpr, keys_first: tl.constexpr):
    """Which probabilities survive dropout: [rows, keys], or [keys, rows] where keys come first.

    `first_key` is a multiple of 8.
    """
    block_rows: tl.constexpr = how.block_rows
    block_keys: tl.constexpr = how.block_keys
    groups = (first_key // 8 + tl.arange(0, block_keys // 8)).to(tl.uint32)
    index = rows.index.to(tl.uint32)
    plane = rows.plane.to(tl.uint32)
    none = tl.zeros([1, 1], tl.uint32)
    k0 = none + seed[0]
    k1 = none + seed[1]
    if keys_first:
        w0, w1, w2, w3 = _philox(groups[:, None], index[None, :], plane[None, :], none, k0, k1)
    else:
        w0, w1, w2, w3 = _philox(groups[None, :], index[:, None], plane[:, None], none, k0, k1)
    # The last axes become (word // 2, word % 2, half): the order of eight keys.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    bits = tl.join(words & 0xFFFF, words >> 16)
    if keys_first:
        bits = tl.permute(bits, 0, 2, 3, 4, 1)
        bits = tl.reshape(bits, [block_keys, block_rows])
    else:
        bits = tl.reshape(bits, [block_rows, block_keys])
    return bits >= numbers.threshold.to(tl.uint32)
