"""Backward on Hopper: blocks of keys stay in shared memory, tiles of query rows pass by.

Scores are computed transposed, S^T = K Q^T, so that P^T and dS^T are already the left operands of
dV = P^T dO and dK = dS^T Q. Two or three consumers own 64 keys each. Fused, they exchange dS
through shared memory and add dQ = dS K to an fp32 buffer by TMA; its order of additions varies from
run to run.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from orchard.backends.cuda.hopper_common import (
    LOG2_E,
    ROWS,
    Ring,
    Work,
    make_ring,
    make_schedule,
    multiply,
    named_barrier,
    operand,
    product_layout,
    tma_reduce_add,
    within,
)
from orchard.backends.cuda.hopper_terms import Terms, kept_less_all, philox_key, positive

_MASK_KEYS = gl.constexpr(128)  # of a tile of a mask, for two consumers
_ROW_KEYS = gl.constexpr(128)  # of a tile of keys in the kernel of rows
_COLUMNS = gl.constexpr(16)  # that are cleared at a time
_MASK_STAGES = gl.constexpr(2)  # of 64 rows each


@gluon.constexpr_function
def _all_consumers(consumers):
    return f"bar.sync 9, {128 * consumers};"


@gluon.constexpr_function
def _turn(kind, consumer):
    return f"bar.{kind} {10 + consumer}, 256;"


@triton.jit
def statistics_kernel(
    out, grad_out, lse, grad_lse, scaled_lse, delta, grad_query_sums,
    rows, padded_rows, heads, head_dim, value_dim,
    out_batch, out_head, out_row,
    grad_batch, grad_head, grad_row,
    lse_batch, lse_head, lse_row,
    grad_lse_batch, grad_lse_head, grad_lse_row,
    HEAD_TILE: tl.constexpr, BLOCK: tl.constexpr, GRAD_LSE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """delta = out . grad_out - grad_lse and lse in units of log 2; zeros for the sums of dQ.

    Empty rows and the padding get lse = +inf, so that their probabilities are 0.
    """
    blocks = padded_rows // BLOCK
    plane = (tl.program_id(0) // blocks).to(tl.int64)
    row = ((tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    batch = plane // heads
    head = plane % heads
    column = tl.arange(0, HEAD_TILE)[None, :]
    inside = row < rows
    valid = inside[:, None] & (column < value_dim)
    out_at = out + batch * out_batch + head * out_head
    grad_at = grad_out + batch * grad_batch + head * grad_head
    o = tl.load(out_at + row[:, None] * out_row + column, mask=valid, other=0.0)
    g = tl.load(grad_at + row[:, None] * grad_row + column, mask=valid, other=0.0)
    sums = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    lse_at = lse + batch * lse_batch + head * lse_head
    log = tl.load(lse_at + row * lse_row, mask=inside, other=float("-inf"))
    if GRAD_LSE:
        grad_lse_at = grad_lse + batch * grad_lse_batch + head * grad_lse_head
        sums -= tl.load(grad_lse_at + row * grad_lse_row, mask=inside, other=0.0)
    empty = log == float("-inf")
    at = plane * padded_rows + row
    tl.store(delta + at, tl.where(empty, 0.0, sums))
    tl.store(scaled_lse + at, tl.where(empty, float("inf"), log * LOG2_E))
    if SUMS:
        sums_at = grad_query_sums + (plane * rows + row)[:, None] * head_dim + column
        zeros = tl.zeros([BLOCK, HEAD_TILE], tl.float32)
        tl.store(sums_at, zeros, mask=inside[:, None] & (column < head_dim))


@triton.jit
def grad_query_kernel(
    sums, grad_query, rows, heads, head_dim, scale,
    grad_batch, grad_head, grad_row,
    HEAD_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of dQ, scaled, in the dtype and strides of the gradient."""
    blocks = tl.cdiv(rows, BLOCK)
    plane = (tl.program_id(0) // blocks).to(tl.int64)
    row = ((tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    column = tl.arange(0, HEAD_TILE)[None, :]
    valid = (row < rows) & (column < head_dim)
    total = tl.load(sums + (plane * rows + row) * head_dim + column, mask=valid, other=0.0)
    at = grad_query + (plane // heads) * grad_batch + (plane % heads) * grad_head
    at += row * grad_row + column
    tl.store(at, (total * scale).to(grad_query.dtype.element_ty), mask=valid)


@aggregate
class Walk:
    """Tiles [begin, end) from `first` on and around, once for each query head of a key head."""

    begin: gl.tensor
    end: gl.tensor
    first: gl.tensor

    @gluon.constexpr_function
    def __init__(self, begin, end, first):
        self.begin = begin
        self.end = end
        self.first = first

    @gluon.jit
    def tiles(self):
        return gl.maximum(self.end - self.begin, 0)

    @gluon.jit
    def following(self, tile, plane):
        """The next tile and its plane."""
        tile = gl.where(tile + 1 == self.end, self.begin, tile + 1)
        return tile, plane + (tile == self.first).to(gl.int32)


@aggregate
class Block:
    """The block of keys that a program owns, and the rows that see it."""

    rows: gl.tensor
    keys: gl.tensor
    heads: gl.tensor
    group: gl.tensor  # query heads of a key head
    low: gl.tensor
    high: gl.tensor
    batch: gl.tensor
    kv_head: gl.tensor
    first_key: gl.tensor
    spare: gl.tensor  # see Terms.probability
    padded_rows: gl.tensor
    terms: Terms
    CONSUMERS: gl.constexpr  # of 64 keys each
    ROW_TILE: gl.constexpr
    LATE: gl.constexpr  # tiles after which dQ of a tile is computed
    ALTERNATE: gl.constexpr  # whether two consumers exponentiate in turns
    APART: gl.constexpr  # whether blocks begin with different rows
    LOW: gl.constexpr  # whether the band has a lower bound
    HIGH: gl.constexpr
    TAIL: gl.constexpr  # whether the last block of keys is not whole
    EMPTY_ROWS: gl.constexpr  # whether some row may see no key
    FUSED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, rows, keys, heads, group, low, high, batch, kv_head, first_key, spare, padded_rows,
        terms, CONSUMERS, ROW_TILE, LATE, ALTERNATE, APART, LOW, HIGH, TAIL, EMPTY_ROWS, FUSED,
    ):  # fmt: skip
        self.rows = rows
        self.keys = keys
        self.heads = heads
        self.group = group
        self.low = low
        self.high = high
        self.batch = batch
        self.kv_head = kv_head
        self.first_key = first_key
        self.spare = spare
        self.padded_rows = padded_rows
        self.terms = terms
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.ROW_TILE = gl.constexpr(ROW_TILE)
        self.LATE = gl.constexpr(LATE)
        self.ALTERNATE = gl.constexpr(ALTERNATE)
        self.APART = gl.constexpr(APART)
        self.LOW = gl.constexpr(LOW)
        self.HIGH = gl.constexpr(HIGH)
        self.TAIL = gl.constexpr(TAIL)
        self.EMPTY_ROWS = gl.constexpr(EMPTY_ROWS)
        self.FUSED = gl.constexpr(FUSED)

    @gluon.jit
    def begin(self):
        """First tile of rows that see the block."""
        tile = gl.to_tensor(0)
        if self.HIGH:
            tile = gl.maximum(self.first_key - self.high, 0) // self.ROW_TILE
        return tile

    @gluon.jit
    def end(self):
        """Past the last tile of rows that see the block; may be before `begin`."""
        end = self.rows
        if self.LOW:
            last_key = gl.minimum(self.first_key + self.CONSUMERS * ROWS, self.keys) - 1
            end = gl.maximum(gl.minimum(last_key - self.low + 1, self.rows), 0)
        return gl.cdiv(end, self.ROW_TILE)

    @gluon.jit
    def walk(self):
        """The way through the tiles of rows, for each query head of the key head."""
        begin = self.begin()
        end = self.end()
        first = begin
        if self.APART:
            # Blocks that see the same rows would add to the same sums at the same time.
            keys = self.CONSUMERS * ROWS
            first = (self.first_key // keys) * end // gl.cdiv(self.keys, keys)
        return Walk(begin, end, first)

    @gluon.jit
    def first_plane(self):
        return self.batch * self.heads + self.kv_head * self.group

    @gluon.jit
    def clipped(self, weights, first_key, first_row):
        """`weights` [keys, rows], but 0 outside of the band and past the last key."""
        # Key and row of the tile see each other where low <= key - row + apart <= high.
        apart = first_key - first_row
        partly = False
        if self.TAIL:
            partly = partly | (first_key + ROWS > self.keys)
        if self.HIGH:
            partly = partly | (apart - self.high > 1 - ROWS)
        if self.LOW:
            partly = partly | (apart - self.low < ROWS - 1)
        if partly:
            key = gl.arange(0, ROWS, layout=gl.SliceLayout(1, weights.type.layout))
            first = key * 0
            if self.HIGH:
                first = key + (apart - self.high)
            if self.TAIL:
                first = gl.where(key < self.keys - first_key, first, ROWS)
            last = key + (apart - self.low)
            seen = within(first, last, ROWS, self.HIGH or self.TAIL, self.LOW)
            weights = gl.where(seen, weights, 0.0)
        return weights

    @gluon.jit
    def mask_tile(self, masks, slot, first_key, first_row, plane, CONSUMER: gl.constexpr):
        """[64 keys, 64 rows] of the mask, where there is one."""
        LAYOUT: gl.constexpr = product_layout(ROWS)
        if self.terms.MASK_TILES:
            masks.wait(slot)
            tile = masks.tile(slot, [ROWS, _MASK_KEYS]).slice(CONSUMER * ROWS, ROWS, dim=1)
            found = tile.permute((1, 0)).load(LAYOUT)
        else:
            head = plane - self.batch * self.heads
            found = self.terms.mask_tile_by_key(
                self, self.batch, head, first_key, first_row, LAYOUT
            )
        return found

    @gluon.jit
    def release_mask(self, masks, slot):
        if self.terms.MASK_TILES:
            # TMA must not overwrite what a warp has asked for and not got yet.
            fence_async_shared()
            masks.release(slot)

    @gluon.jit
    def weights(self, products, mask, lse, first_key, first_row, plane):
        """Of [64 keys, 64 rows]: weights of the values, and what dS is computed from.

        The latter are probabilities times the slope of the softcap, negative where dropped.
        """
        terms = self.terms
        scores = terms.score(products, mask)
        at = plane.to(gl.int64) * self.padded_rows + first_row
        weights = terms.probability(scores, lse, self.spare + at, 0)
        weights = self.clipped(weights, first_key, first_row)
        sources = weights
        if terms.SOFTCAP:
            sources = weights * terms.slope(terms.capped(products))
        if terms.DROPOUT:
            bits = terms.bits_by_key(weights, plane, first_key, first_row)
            sources = terms.signed(sources, bits)
            weights = terms.kept(weights, bits) if terms.SOFTCAP else positive(sources)
        return weights, sources

    @gluon.jit
    def by_score(self, sources, by_weight, delta):
        """dS of [64 keys, 64 rows], before the scale; with dropout also before `keep_scale`."""
        if self.terms.DROPOUT:
            delta = gl.expand_dims(delta * (1.0 / self.terms.keep_scale), 0)
            result = kept_less_all(sources, by_weight, delta)
        else:
            result = sources * (by_weight - gl.expand_dims(delta, 0))
        return result


@gluon.constexpr_function
def _parts(consumers):
    """Sizes are powers of two: the keys of two consumers are one part, of three they are three."""
    return 1 if consumers == 2 else consumers


@gluon.constexpr_function
def _part(keys, consumer):
    """The part that a consumer's keys lie in."""
    return consumer if keys.shape[0] > 1 else 0


@gluon.jit
def _of_consumer(part, CONSUMER: gl.constexpr):
    """What is a consumer's of a part."""
    FIRST: gl.constexpr = CONSUMER * ROWS if part.shape[0] > ROWS else 0
    return part.slice(FIRST, ROWS, dim=0)


@aggregate
class Shared:
    """Shared memory of a program."""

    queries: Ring
    grads: Ring
    masks: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    loaded: gl.shared_memory_descriptor  # barrier: keys and values have arrived
    scores: Ring  # dS^T, of one consumer after the other
    staging: gl.shared_memory_descriptor  # dQ on its way to memory

    @gluon.constexpr_function
    def __init__(self, queries, grads, masks, lse, delta, keys, values, loaded, scores, staging):
        self.queries = queries
        self.grads = grads
        self.masks = masks
        self.lse = lse
        self.delta = delta
        self.keys = keys
        self.values = values
        self.loaded = loaded
        self.scores = scores
        self.staging = staging

    @gluon.jit
    def row_values(self, values, step, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
        """Statistics of 64 rows of a tile."""
        tile = values.index(step % self.queries.STAGES)
        return tile.reshape([tile.shape[1]]).slice(FIRST, ROWS, dim=0).load(LAYOUT)

    @gluon.jit
    def key_part(self, PART: gl.constexpr):
        """One of the parts that a block of keys lies in, [keys, D]."""
        return self.keys.index(PART).reshape([self.keys.shape[3], self.keys.shape[4]])

    @gluon.jit
    def value_part(self, PART: gl.constexpr):
        return self.values.index(PART).reshape([self.values.shape[3], self.values.shape[4]])

    @gluon.jit
    def score_part(self, step, PART: gl.constexpr):
        """dS^T of a part, [keys, rows of a tile]."""
        PARTS: gl.constexpr = self.keys.shape[0]
        return self.scores.buffers.index((step % self.scores.STAGES) * PARTS + PART)

    @gluon.jit
    def keys_of(self, CONSUMER: gl.constexpr):
        """Its 64 keys, [64, D]."""
        return _of_consumer(self.key_part(_part(self.keys, CONSUMER)), CONSUMER)

    @gluon.jit
    def values_of(self, CONSUMER: gl.constexpr):
        return _of_consumer(self.value_part(_part(self.keys, CONSUMER)), CONSUMER)

    @gluon.jit
    def scores_of(self, step, CONSUMER: gl.constexpr):
        """dS^T of its keys, [64, rows of a tile]."""
        return _of_consumer(self.score_part(step, _part(self.keys, CONSUMER)), CONSUMER)

    @gluon.jit
    def by_query(
        self, step, FIRST_ROW: gl.constexpr, FIRST_COLUMN: gl.constexpr, COLUMNS: gl.constexpr
    ):
        """Begin dQ of 64 rows of a tile: a product for each part of the keys."""
        PARTS: gl.constexpr = self.keys.shape[0]
        result = gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
        for part in gl.static_range(PARTS):
            by_score = self.score_part(step, part).slice(FIRST_ROW, ROWS, dim=1)
            keys = self.key_part(part).slice(FIRST_COLUMN, COLUMNS, dim=1)
            result = warpgroup_mma(
                by_score.permute((1, 0)), keys, result, use_acc=part > 0, is_async=True
            )
        return result

    @gluon.jit
    def clear_empty_rows(self, grad, lse, FIRST: gl.constexpr):
        """Nothing flows through a row that sees no key, not even NaN.

        Both consumers do this, each before it reads; what they write is the same.
        """
        D: gl.constexpr = grad.shape[1]
        LAYOUT: gl.constexpr = product_layout(_COLUMNS)
        if gl.max(lse, axis=0) == float("inf"):
            empty = gl.convert_layout(lse, gl.SliceLayout(1, LAYOUT)) == float("inf")
            for first in gl.static_range(0, D, _COLUMNS):
                part = grad.slice(FIRST, ROWS, dim=0).slice(first, _COLUMNS, dim=1)
                found = part.load(LAYOUT)
                nothing = gl.zeros([ROWS, _COLUMNS], found.dtype, LAYOUT)
                part.store(gl.where(gl.expand_dims(empty, 1), nothing, found))
            fence_async_shared()


@gluon.jit
def _produce(block, shared, query, key, value, grad_out, mask, lse, delta):
    KEY_BYTES: gl.constexpr = key.block_type.nbytes + value.block_type.nbytes
    PARTS: gl.constexpr = _parts(block.CONSUMERS)
    mbarrier.expect(shared.loaded, KEY_BYTES * PARTS)
    for part in gl.static_range(PARTS):
        at = [block.batch, block.kv_head, block.first_key + part * key.block_shape[2], 0]
        tma.async_copy_global_to_shared(key, at, shared.loaded, shared.keys.index(part))
        tma.async_copy_global_to_shared(value, at, shared.loaded, shared.values.index(part))
    STATISTICS: gl.constexpr = block.ROW_TILE * 4
    HALVES: gl.constexpr = block.ROW_TILE // ROWS
    terms = block.terms
    walk = block.walk()
    tile = walk.first
    plane = block.first_plane()
    for step in range(block.group * walk.tiles()):
        head = plane - block.batch * block.heads
        row = tile * block.ROW_TILE
        stage = step % shared.queries.STAGES
        shared.queries.acquire(step, query.block_type.nbytes + STATISTICS)
        ready = shared.queries.ready.index(stage)
        tma.async_copy_global_to_shared(
            query, [block.batch, head, row, 0], ready, shared.queries.buffers.index(stage)
        )
        tma.async_copy_global_to_shared(lse, [plane, row], ready, shared.lse.index(stage))
        if terms.MASK_TILES:
            for half in gl.static_range(HALVES):
                at = terms.mask_place(block.batch, head, row + half * ROWS, block.first_key)
                shared.masks.load(step * HALVES + half, mask, at)
        shared.grads.acquire(step, grad_out.block_type.nbytes + STATISTICS)
        ready = shared.grads.ready.index(stage)
        tma.async_copy_global_to_shared(
            grad_out, [block.batch, head, row, 0], ready, shared.grads.buffers.index(stage)
        )
        tma.async_copy_global_to_shared(delta, [plane, row], ready, shared.delta.index(stage))
        tile, plane = walk.following(tile, plane)


@aggregate
class Rows:
    """A tile of rows, to whose sums of dQ is added."""

    plane: gl.tensor
    first: gl.tensor

    @gluon.constexpr_function
    def __init__(self, plane, first):
        self.plane = plane
        self.first = first

    @gluon.jit
    def add(
        self, shared, sums, by_query,
        FIRST_ROW: gl.constexpr, FIRST_COLUMN: gl.constexpr, CONSUMER: gl.constexpr,
    ):  # fmt: skip
        """Add as soon as the staging memory has been read."""
        staging = shared.staging.index(CONSUMER)
        tma.store_wait(pendings=0)
        staging.reshape(by_query.shape).store(by_query)
        fence_async_shared()
        tma_reduce_add(sums, [self.plane, self.first + FIRST_ROW, FIRST_COLUMN], staging)

    @gluon.jit
    def add_late(
        self, shared, sums, step, FIRST_ROW: gl.constexpr, FIRST_COLUMN: gl.constexpr,
        COLUMNS: gl.constexpr, CONSUMER: gl.constexpr,
    ):  # fmt: skip
        """Compute dQ from dS that the others have stored, or are about to, and add it."""
        shared.scores.wait(step)
        by_query = shared.by_query(step, FIRST_ROW, FIRST_COLUMN, COLUMNS)
        by_query = warpgroup_mma_wait(0, deps=[by_query])
        shared.scores.release(step)
        self.add(shared, sums, by_query, FIRST_ROW, FIRST_COLUMN, CONSUMER)


@gluon.jit
def _consume_tiles(block, shared, sums, CONSUMER: gl.constexpr):
    """dK and dV of 64 keys: tiles of 64 rows, dQ split by columns or computed in turns."""
    D: gl.constexpr = shared.keys.shape[4]
    DTYPE: gl.constexpr = shared.keys.dtype
    ROW: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS))
    CONSUMERS: gl.constexpr = block.CONSUMERS
    # With D 128 each has half of the columns, with D 64 one tile after the other.
    TURNS: gl.constexpr = block.FUSED and D == 64
    # Then statistics are loaded where they are used.
    SPARING: gl.constexpr = CONSUMERS == 3 or block.LATE > 0
    AT_ONCE: gl.constexpr = block.FUSED and block.LATE == 0
    LATE: gl.constexpr = block.LATE if block.FUSED and not TURNS else 0
    COLUMNS: gl.constexpr = D if TURNS else D // 2
    FIRST_COLUMN: gl.constexpr = 0 if TURNS else CONSUMER * COLUMNS
    queries = shared.queries
    grads = shared.grads
    scores = shared.scores
    keys = shared.keys_of(CONSUMER)
    values = shared.values_of(CONSUMER)
    first_key = block.first_key + CONSUMER * ROWS
    by_key = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    by_value = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    walk = block.walk()
    steps = block.group * walk.tiles()
    tile = walk.first
    plane = block.first_plane()
    # Of the tiles before: at first none, which TMA drops.
    last = Rows(gl.to_tensor(-1), gl.to_tensor(0))
    late = last
    mbarrier.wait(shared.loaded, 0)
    if block.ALTERNATE and CONSUMER == 1:
        named_barrier(_turn("arrive", 0))
    for step in range(steps):
        rows = Rows(plane, tile * ROWS)
        query = queries.tile(step, [ROWS, D])
        grad = grads.tile(step, [ROWS, D])
        if block.ALTERNATE:
            named_barrier(_turn("sync", CONSUMER))
        if LATE:
            late_step = gl.maximum(step - LATE, 0)
            scores.wait(late_step, when=step >= LATE)
            by_query = shared.by_query(late_step, 0, FIRST_COLUMN, COLUMNS)
        queries.wait(step)
        products = multiply(keys, query)
        if LATE:
            by_query = warpgroup_mma_wait(1, deps=[by_query])
            scores.release(late_step, when=step >= LATE)
            late.add(shared, sums, by_query, 0, FIRST_COLUMN, CONSUMER)
        if block.EMPTY_ROWS or not SPARING:
            lse = shared.row_values(shared.lse, step, 0, ROW)
        grads.wait(step)
        if block.EMPTY_ROWS:
            shared.clear_empty_rows(grad, lse, 0)
        by_weight = multiply(values, grad)
        mask = block.mask_tile(shared.masks, step, first_key, rows.first, plane, CONSUMER)
        products = warpgroup_mma_wait(1, deps=[products])
        block.release_mask(shared.masks, step)
        if SPARING:
            lse = shared.row_values(shared.lse, step, 0, ROW)
        weights, sources = block.weights(products, mask, lse, first_key, rows.first, plane)
        left = operand(weights.to(DTYPE), D)
        by_value = warpgroup_mma(left, grad, by_value, is_async=True)
        if block.ALTERNATE:
            named_barrier(_turn("arrive", 1 - CONSUMER))
        if not SPARING:
            delta = shared.row_values(shared.delta, step, 0, ROW)
        by_weight = warpgroup_mma_wait(1, deps=[by_weight])
        if SPARING:
            delta = shared.row_values(shared.delta, step, 0, ROW)
        by_score = block.by_score(sources, by_weight, delta).to(DTYPE)
        if block.FUSED:
            if not AT_ONCE:
                scores.wait_free(step)
            shared.scores_of(step, CONSUMER).store(by_score)
            fence_async_shared()
        by_value, left = warpgroup_mma_wait(0, deps=[by_value, left])
        if block.FUSED and not AT_ONCE:
            scores.fill(step)
        grads.release(step)
        left = operand(by_score, D)
        if AT_ONCE:
            named_barrier(_all_consumers(CONSUMERS))
            by_query = shared.by_query(step, 0, FIRST_COLUMN, COLUMNS)
        by_key = warpgroup_mma(left, query, by_key, is_async=True)
        if AT_ONCE:
            by_query = warpgroup_mma_wait(1, deps=[by_query])
            rows.add(shared, sums, by_query, 0, FIRST_COLUMN, CONSUMER)
        by_key, left = warpgroup_mma_wait(0, deps=[by_key, left])
        queries.release(step)
        if TURNS and (step > 0) & ((step - 1) % CONSUMERS == CONSUMER):
            last.add_late(shared, sums, step - 1, 0, 0, D, CONSUMER)
        late = last if block.LATE == 2 else rows
        last = rows
        tile, plane = walk.following(tile, plane)
    if block.ALTERNATE and CONSUMER == 0:
        named_barrier(_turn("sync", 0))  # the last turn of consumer 1 was passed to it
    if LATE == 2 and steps > 1:
        late.add_late(shared, sums, steps - 2, 0, FIRST_COLUMN, COLUMNS, CONSUMER)
    if LATE > 0 and steps > 0:
        last.add_late(shared, sums, steps - 1, 0, FIRST_COLUMN, COLUMNS, CONSUMER)
    if TURNS and (steps > 0) & ((steps - 1) % CONSUMERS == CONSUMER):
        last.add_late(shared, sums, steps - 1, 0, 0, D, CONSUMER)
    return by_key, by_value


@gluon.jit
def _half_weights(
    block, shared, products, grad, by_value, step, row, plane,
    CONSUMER: gl.constexpr, HALF: gl.constexpr, PENDING: gl.constexpr,
):  # fmt: skip
    """Weights of 64 of a tile's 128 rows; their product with grad_out is begun."""
    ROW: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS))
    first_key = block.first_key + CONSUMER * ROWS
    first_row = row + HALF * ROWS
    slot = step * 2 + HALF
    mask = block.mask_tile(shared.masks, slot, first_key, first_row, plane, CONSUMER)
    products = warpgroup_mma_wait(PENDING, deps=[products])
    block.release_mask(shared.masks, slot)
    lse = shared.row_values(shared.lse, step, HALF * ROWS, ROW)
    weights, sources = block.weights(products, mask, lse, first_key, first_row, plane)
    left = operand(weights.to(grad.dtype), grad.shape[1])
    return sources, left, warpgroup_mma(left, grad, by_value, is_async=True)


@gluon.jit
def _half_scores(
    block, shared, sources, by_weight, query, by_key, exchanged, step, HALF: gl.constexpr
):
    """Gradient of the scores of 64 of a tile's 128 rows; their product with query is begun."""
    ROW: gl.constexpr = gl.SliceLayout(0, by_weight.type.layout)
    delta = shared.row_values(shared.delta, step, HALF * ROWS, ROW)
    by_score = block.by_score(sources, by_weight, delta).to(query.dtype)
    if block.FUSED:
        exchanged.slice(HALF * ROWS, ROWS, dim=1).store(by_score)
    left = operand(by_score, query.shape[1])
    return left, warpgroup_mma(left, query, by_key, is_async=True)


@gluon.jit
def _consume_halves(block, shared, sums, CONSUMER: gl.constexpr):
    """dK and dV of 64 keys: tiles of 128 rows in two halves, dQ split by rows."""
    D: gl.constexpr = shared.keys.shape[4]
    # Philox takes registers: then one half comes after the other.
    SPARING: gl.constexpr = block.terms.DROPOUT
    FIRST_ROW: gl.constexpr = CONSUMER * ROWS  # of which it computes dQ
    ROW: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS))
    queries = shared.queries
    grads = shared.grads
    scores = shared.scores
    keys = shared.keys_of(CONSUMER)
    values = shared.values_of(CONSUMER)
    by_key = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    by_value = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    walk = block.walk()
    steps = block.group * walk.tiles()
    tile = walk.first
    plane = block.first_plane()
    # Of the tile before: at first none, which TMA drops.
    last = Rows(gl.to_tensor(-1), gl.to_tensor(0))
    mbarrier.wait(shared.loaded, 0)
    for step in range(steps):
        row = tile * block.ROW_TILE
        rows = Rows(plane, row)
        query = queries.tile(step, [block.ROW_TILE, D])
        grad = grads.tile(step, [block.ROW_TILE, D])
        query_0 = query.slice(0, ROWS, dim=0)
        query_1 = query.slice(ROWS, ROWS, dim=0)
        grad_0 = grad.slice(0, ROWS, dim=0)
        grad_1 = grad.slice(ROWS, ROWS, dim=0)
        own = shared.scores_of(step, CONSUMER)
        queries.wait(step)
        products_0 = multiply(keys, query_0)
        if not SPARING:
            products_1 = multiply(keys, query_1)
        grads.wait(step)
        if block.EMPTY_ROWS:
            shared.clear_empty_rows(grad, shared.row_values(shared.lse, step, 0, ROW), 0)
            shared.clear_empty_rows(grad, shared.row_values(shared.lse, step, ROWS, ROW), ROWS)
        by_weight_0 = multiply(values, grad_0)
        sources_0, p_0, by_value = _half_weights(
            block, shared, products_0, grad_0, by_value, step, row, plane,
            CONSUMER, 0, 1 if SPARING else 2,
        )  # fmt: skip
        if block.FUSED and block.LATE:
            scores.wait_free(step)
        if SPARING:
            by_weight_0 = warpgroup_mma_wait(1, deps=[by_weight_0])
            ds_0, by_key = _half_scores(
                block, shared, sources_0, by_weight_0, query_0, by_key, own, step, 0
            )
            products_1 = multiply(keys, query_1)
        # Only now: four products of 64x64 beside the sums would not fit into the registers.
        by_weight_1 = multiply(values, grad_1)
        sources_1, p_1, by_value = _half_weights(
            block, shared, products_1, grad_1, by_value, step, row, plane,
            CONSUMER, 1, 1 if SPARING else 3,
        )  # fmt: skip
        if not SPARING:
            by_weight_0 = warpgroup_mma_wait(3, deps=[by_weight_0])
            ds_0, by_key = _half_scores(
                block, shared, sources_0, by_weight_0, query_0, by_key, own, step, 0
            )
        by_weight_1 = warpgroup_mma_wait(1 if SPARING else 2, deps=[by_weight_1])
        ds_1, by_key = _half_scores(
            block, shared, sources_1, by_weight_1, query_1, by_key, own, step, 1
        )
        if block.FUSED:
            fence_async_shared()
            if block.LATE:
                scores.fill(step)
        by_value, p_0, p_1 = warpgroup_mma_wait(1 if SPARING else 2, deps=[by_value, p_0, p_1])
        grads.release(step)
        if block.FUSED:
            if block.LATE:
                late_step = gl.maximum(step - 1, 0)
                scores.wait(late_step, when=step > 0)
                by_query = shared.by_query(late_step, FIRST_ROW, 0, D)
            else:
                named_barrier(_all_consumers(block.CONSUMERS))
                by_query = shared.by_query(step, FIRST_ROW, 0, D)
                last = rows
            by_key, ds_0, ds_1 = warpgroup_mma_wait(1, deps=[by_key, ds_0, ds_1])
            queries.release(step)
            by_query = warpgroup_mma_wait(0, deps=[by_query])
            if block.LATE:
                scores.release(late_step, when=step > 0)
            last.add(shared, sums, by_query, FIRST_ROW, 0, CONSUMER)
        else:
            by_key, ds_0, ds_1 = warpgroup_mma_wait(0, deps=[by_key, ds_0, ds_1])
            queries.release(step)
        last = rows
        tile, plane = walk.following(tile, plane)
    if block.FUSED and block.LATE > 0 and steps > 0:
        last.add_late(shared, sums, steps - 1, FIRST_ROW, 0, D, CONSUMER)
    return by_key, by_value


@gluon.jit
def _consume(block, shared, sums, grad_key, grad_value, grad_scale, CONSUMER: gl.constexpr):
    DTYPE: gl.constexpr = shared.keys.dtype
    if block.ROW_TILE == ROWS:
        by_key, by_value = _consume_tiles(block, shared, sums, CONSUMER)
    else:
        by_key, by_value = _consume_halves(block, shared, sums, CONSUMER)
    if block.terms.DROPOUT:
        by_value = by_value * block.terms.keep_scale
    # The gradients leave through the memory of keys and values, once nobody reads these.
    named_barrier(_all_consumers(block.CONSUMERS))
    shared.keys_of(CONSUMER).store((by_key * grad_scale).to(DTYPE))
    shared.values_of(CONSUMER).store(by_value.to(DTYPE))
    fence_async_shared()
    PARTS: gl.constexpr = _parts(block.CONSUMERS)
    if PARTS == 1:
        named_barrier(_all_consumers(block.CONSUMERS))
        at = [block.batch, block.kv_head, block.first_key, 0]
        if CONSUMER == 0:
            tma.async_copy_shared_to_global(grad_key, at, shared.keys.index(0))
        else:
            tma.async_copy_shared_to_global(grad_value, at, shared.values.index(0))
    else:
        at = [block.batch, block.kv_head, block.first_key + CONSUMER * ROWS, 0]
        tma.async_copy_shared_to_global(grad_key, at, shared.keys.index(CONSUMER))
        tma.async_copy_shared_to_global(grad_value, at, shared.values.index(CONSUMER))
    tma.store_wait(pendings=0)


@gluon.jit
def backward_kernel(
    query, key, value, grad_out, lse, delta, grad_key, grad_value, sums, spare, padded_rows,
    rows, key_count, heads, group, planes, cohort, low, high,
    factor, cap, mask, mask_batch, mask_head, mask_row, seed, threshold, keep_scale, grad_scale,
    CONSUMERS: gl.constexpr, ROW_TILE: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, LATE: gl.constexpr, ALTERNATE: gl.constexpr, APART: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, TAIL: gl.constexpr, EMPTY_ROWS: gl.constexpr,
    FUSED: gl.constexpr,
    SOFTCAP: gl.constexpr, MASK: gl.constexpr, MASK_KEYS: gl.constexpr,
    MASK_TILES: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = key.block_shape[3]
    DTYPE: gl.constexpr = key.dtype
    philox_0, philox_1 = philox_key(seed, DROPOUT)
    terms = Terms(
        factor, cap, seed if MASK_TILES else mask, mask_batch, mask_head, mask_row,
        philox_0, philox_1, threshold, keep_scale,
        SOFTCAP, MASK, MASK_KEYS, MASK_TILES, DROPOUT,
    )  # fmt: skip
    # Where consumers compute dQ in turns, they do so late.
    gl.static_assert(not FUSED or LATE > 0 or D == 128 or ROW_TILE > ROWS)
    KEYS: gl.constexpr = CONSUMERS * ROWS
    blocks = gl.cdiv(key_count, KEYS)
    # In a cohort of planes the first blocks come first: under a causal band they are the longest.
    position = gl.program_id(0)
    cohort_blocks = cohort * blocks
    first_plane = (position // cohort_blocks) * cohort
    members = gl.minimum(cohort, planes - first_plane)
    inside = position % cohort_blocks
    plane = first_plane + inside % members
    kv_heads = heads // group
    first_key = (inside // members) * KEYS
    block = Block(
        rows, key_count, heads, group, low, high,
        plane // kv_heads, plane % kv_heads, first_key, spare, padded_rows, terms,
        CONSUMERS, ROW_TILE, LATE, ALTERNATE, APART, LOW, HIGH, TAIL, EMPTY_ROWS, FUSED,
    )  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PARTS: gl.constexpr = _parts(CONSUMERS)
    PART_KEYS: gl.constexpr = KEYS // PARTS
    # Four slots let a consumer be more than a tile ahead of another.
    SLOTS: gl.constexpr = 4 if LATE and ROW_TILE == ROWS else 2
    READERS: gl.constexpr = 1 if D == 64 and ROW_TILE == ROWS else CONSUMERS
    queries = make_ring(
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, ROW_TILE, D], query.layout),
        STAGES,
        CONSUMERS,
    )
    masks = queries
    if MASK_TILES:
        masks = make_ring(
            gl.allocate_shared_memory(DTYPE, [_MASK_STAGES, 1, 1, ROWS, _MASK_KEYS], mask.layout),
            _MASK_STAGES,
            CONSUMERS,
        )
    shared = Shared(
        queries,
        make_ring(
            gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, ROW_TILE, D], grad_out.layout),
            STAGES,
            CONSUMERS,
        ),
        masks,
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROW_TILE], lse.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROW_TILE], delta.layout),
        gl.allocate_shared_memory(DTYPE, [PARTS, 1, 1, PART_KEYS, D], key.layout),
        gl.allocate_shared_memory(DTYPE, [PARTS, 1, 1, PART_KEYS, D], value.layout),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        make_ring(
            gl.allocate_shared_memory(DTYPE, [SLOTS * PARTS, PART_KEYS, ROW_TILE], SCORES),
            SLOTS,
            READERS,
            CONSUMERS,
        ),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS, 1, ROWS, 64], sums.layout),
    )
    mbarrier.init(shared.loaded, count=1)
    fence_async_shared()
    # The number of a consumer is a constant only where it is written into the list.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_produce, (block, shared, query, key, value, grad_out, mask, lse, delta)),
                (_consume, (block, shared, sums, grad_key, grad_value, grad_scale, 0)),
                (_consume, (block, shared, sums, grad_key, grad_value, grad_scale, 1)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_produce, (block, shared, query, key, value, grad_out, mask, lse, delta)),
                (_consume, (block, shared, sums, grad_key, grad_value, grad_scale, 0)),
                (_consume, (block, shared, sums, grad_key, grad_value, grad_scale, 1)),
                (_consume, (block, shared, sums, grad_key, grad_value, grad_scale, 2)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


@aggregate
class RowsShared:
    """Shared memory of a program that owns rows."""

    queries: Ring
    grads: Ring
    keys: Ring
    values: Ring

    @gluon.constexpr_function
    def __init__(self, queries, grads, keys, values):
        self.queries = queries
        self.grads = grads
        self.keys = keys
        self.values = values


@aggregate
class RowStatistics:
    """Numbers of each row in global memory, planes one after the other."""

    lse: gl.tensor
    spare: gl.tensor  # see Terms.probability
    delta: gl.tensor
    padded_rows: gl.tensor

    @gluon.constexpr_function
    def __init__(self, lse, spare, delta, padded_rows):
        self.lse = lse
        self.spare = spare
        self.delta = delta
        self.padded_rows = padded_rows

    @gluon.jit
    def load(self, plane, first_row, LAYOUT: gl.constexpr):
        """lse and delta of 64 rows, and where their spare numbers are."""
        first = plane.to(gl.int64) * self.padded_rows + first_row
        row = gl.arange(0, ROWS, layout=LAYOUT)
        known = row < self.padded_rows - first_row
        lse = gl.load(self.lse + first + row, mask=known, other=float("inf"))
        return lse, gl.load(self.delta + first + row, mask=known, other=0.0), self.spare + first


@gluon.jit
def _produce_rows(schedule, shared, query, grad_out, key, value):
    work = schedule.work
    turn = 0
    step = 0
    position = work.position(turn)
    while position < work.tiles():
        schedule.tell(turn, position)
        first_row, batch, head = work.place(position)
        for consumer in gl.static_range(work.CONSUMERS):
            at = [batch, head, first_row + consumer * ROWS, 0]
            shared.queries.load(turn * work.CONSUMERS + consumer, query, at)
            shared.grads.load(turn * work.CONSUMERS + consumer, grad_out, at)
        begin, end = work.span(first_row)
        for index in range(end - begin):
            tile = end - 1 - index
            work.load_keys(key, value, shared.keys, shared.values, step, batch, head, tile)
            step += 1
        position = schedule.following(turn)
        turn += 1
    schedule.tell(turn, position)


@gluon.jit
def _by_score(work, terms, products, by_weight, mask, lse, spare, delta, plane, at, clipped):
    """dS of 64 rows and 64 keys that begin `at` (row, key), before the scale."""
    first_row, first_key = at
    scores = terms.score(products, mask)
    weights = terms.probability(scores, lse, spare, 1)
    if clipped:
        weights = gl.where(work.seen(first_row, first_key, ROWS), weights, 0.0)
    if terms.DROPOUT:
        bits = terms.bits_by_row(weights, plane, first_row, first_key)
        by_weight = terms.kept(by_weight * terms.keep_scale, bits)
    if terms.SOFTCAP:
        weights = weights * terms.slope(terms.capped(products))
    return weights * (by_weight - gl.expand_dims(delta, 1))


@gluon.jit
def _begin_half(work, shared, query, grad, step, HALF: gl.constexpr):
    """Begin the products of 64 rows with half of a tile of keys, and with its values."""
    SHAPE: gl.constexpr = [work.TILE, query.shape[1]]
    key = shared.keys.tile(step, SHAPE).slice(HALF * ROWS, ROWS, dim=0)
    value = shared.values.tile(step, SHAPE).slice(HALF * ROWS, ROWS, dim=0)
    if HALF == 0:
        shared.keys.wait(step)
    products = multiply(query, key)
    if HALF == 0:
        shared.values.wait(step)
    return products, multiply(grad, value), key


@gluon.jit
def _consume_rows(
    schedule, terms, shared, statistics, grad_query, grad_scale, CONSUMER: gl.constexpr
):
    """dQ of 64 rows: tiles of 128 keys in two halves, from right to left."""
    work = schedule.work
    D: gl.constexpr = grad_query.block_shape[3]
    DTYPE: gl.constexpr = grad_query.dtype
    SCORES: gl.constexpr = product_layout(ROWS)
    # Three consumers have no registers for both halves at once, and hide each other's waits.
    SPARING: gl.constexpr = work.CONSUMERS == 3
    queries = shared.queries
    grads = shared.grads
    keys = shared.keys
    values = shared.values
    turn = 0
    step = 0
    position = schedule.hear(turn)
    while position < work.tiles():
        tile_row, batch, head = work.place(position)
        first_row = tile_row + CONSUMER * ROWS
        begin, end = work.span(tile_row)
        whole_begin, whole_end = work.whole(first_row, begin, end)
        plane = batch * work.heads + head
        lse, delta, spare = statistics.load(plane, first_row, gl.SliceLayout(1, SCORES))
        slot = turn * work.CONSUMERS + CONSUMER
        query = queries.tile(slot, [ROWS, D])
        grad = grads.tile(slot, [ROWS, D])
        by_query = gl.zeros([ROWS, D], gl.float32, product_layout(D))
        queries.wait(slot)
        grads.wait(slot)
        for index in range(end - begin):
            tile = end - 1 - index
            first_key = tile * work.TILE
            clipped = False
            if work.LOW or work.HIGH or work.TAIL:
                clipped = (tile < whole_begin) | (tile >= whole_end)
            products_0, by_weight_0, key_0 = _begin_half(work, shared, query, grad, step, 0)
            if not SPARING:
                products_1, by_weight_1, key_1 = _begin_half(work, shared, query, grad, step, 1)
            mask_0 = terms.mask_tile(work, batch, head, first_row, first_key, ROWS, SCORES)
            mask_1 = terms.mask_tile(work, batch, head, first_row, first_key + ROWS, ROWS, SCORES)
            products_0, by_weight_0 = warpgroup_mma_wait(
                0 if SPARING else 2, deps=[products_0, by_weight_0]
            )
            ds_0 = _by_score(
                work, terms, products_0, by_weight_0, mask_0, lse, spare, delta, plane,
                (first_row, first_key), clipped,
            )  # fmt: skip
            left_0 = operand(ds_0.to(DTYPE), D)
            by_query = warpgroup_mma(left_0, key_0, by_query, is_async=True)
            if SPARING:
                products_1, by_weight_1, key_1 = _begin_half(work, shared, query, grad, step, 1)
            products_1, by_weight_1 = warpgroup_mma_wait(
                0 if SPARING else 1, deps=[products_1, by_weight_1]
            )
            values.release(step)
            ds_1 = _by_score(
                work, terms, products_1, by_weight_1, mask_1, lse, spare, delta, plane,
                (first_row, first_key + ROWS), clipped,
            )  # fmt: skip
            left_1 = operand(ds_1.to(DTYPE), D)
            by_query = warpgroup_mma(left_1, key_1, by_query, is_async=True)
            by_query, left_0, left_1 = warpgroup_mma_wait(0, deps=[by_query, left_0, left_1])
            keys.release(step)
            step += 1
        # Nothing flows through a row that sees no key, not even NaN.
        ROW: gl.constexpr = gl.SliceLayout(1, product_layout(D))
        empty = gl.convert_layout(lse, ROW, assert_trivial=True) == float("inf")
        by_query = gl.where(gl.expand_dims(empty, 1), 0.0, by_query * grad_scale)
        query.store(by_query.to(DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(
            grad_query, [batch, head, first_row, 0], queries.buffers.index(slot % queries.STAGES)
        )
        tma.store_wait(pendings=0)
        queries.release(slot)
        grads.release(slot)
        turn += 1
        position = schedule.hear(turn)


@gluon.jit
def rows_kernel(
    query, key, value, grad_out, grad_query, lse, spare, delta, counter,
    rows, key_count, heads, group, planes, cohort, low, high,
    factor, cap, mask, mask_batch, mask_head, mask_row, seed, threshold, keep_scale,
    padded_rows, grad_scale,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    DYNAMIC: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, TAIL: gl.constexpr,
    SOFTCAP: gl.constexpr, MASK: gl.constexpr, MASK_KEYS: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """dQ alone, each row by one consumer: the same bits in every run."""
    D: gl.constexpr = key.block_shape[3]
    DTYPE: gl.constexpr = key.dtype
    work = Work(
        rows, key_count, heads, group, planes, cohort, low, high,
        CONSUMERS, _ROW_KEYS, LOW, HIGH, TAIL,
    )  # fmt: skip
    philox_0, philox_1 = philox_key(seed, DROPOUT)
    terms = Terms(
        factor, cap, mask, mask_batch, mask_head, mask_row,
        philox_0, philox_1, threshold, keep_scale,
        SOFTCAP, MASK, MASK_KEYS, False, DROPOUT,
    )  # fmt: skip
    # With D 64 there is room for the rows of the next tile.
    SLOTS: gl.constexpr = CONSUMERS * (2 if D == 64 else 1)
    shared = RowsShared(
        make_ring(gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, ROWS, D], query.layout), SLOTS, 1),
        make_ring(
            gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, ROWS, D], grad_out.layout), SLOTS, 1
        ),
        make_ring(
            gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, _ROW_KEYS, D], key.layout),
            STAGES,
            CONSUMERS,
        ),
        make_ring(
            gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, _ROW_KEYS, D], value.layout),
            STAGES,
            CONSUMERS,
        ),
    )
    schedule = make_schedule(work, counter, DYNAMIC)
    statistics = RowStatistics(lse, spare, delta, padded_rows)
    fence_async_shared()
    # The number of a consumer is a constant only where it is written into the list.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_produce_rows, (schedule, shared, query, grad_out, key, value)),
                (_consume_rows, (schedule, terms, shared, statistics, grad_query, grad_scale, 0)),
                (_consume_rows, (schedule, terms, shared, statistics, grad_query, grad_scale, 1)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_produce_rows, (schedule, shared, query, grad_out, key, value)),
                (_consume_rows, (schedule, terms, shared, statistics, grad_query, grad_scale, 0)),
                (_consume_rows, (schedule, terms, shared, statistics, grad_query, grad_scale, 1)),
                (_consume_rows, (schedule, terms, shared, statistics, grad_query, grad_scale, 2)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )
