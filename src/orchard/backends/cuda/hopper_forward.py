"""Forward on Hopper: one warpgroup loads tiles by TMA, the others multiply them by wgmma.

Each consumer owns 64 query rows and walks the keys from right to left.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from orchard.backends.cuda.hopper_common import (
    LN_2,
    LOG2_E,
    ROWS,
    Ring,
    Work,
    for_lanes,
    in_each_thread,
    lane_layout,
    lane_sums,
    make_ring,
    make_schedule,
    multiply,
    operand,
    over_lanes,
    product_layout,
    row_max,
)
from orchard.backends.cuda.hopper_terms import ADDITIVE, NONE, Terms, philox_key

_QUERY_STAGES = gl.constexpr(2)

_HUGE = gl.constexpr(2.0**27)  # fp32 has multiples of 16 from here on

_PRODUCT = gl.constexpr("mul.rn.f32 $0, $1, $2;")
# bf16 is the upper half of fp32.
_WIDEN = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


@gluon.constexpr_function
def _barrier_text(kind, consumer):
    return f"bar.{kind} {9 + consumer}, 256;"


@aggregate
class Consumer:
    """One warpgroup: what it reads, and its place among the others."""

    work: Work
    terms: Terms
    keys: Ring
    values: Ring
    masks: Ring  # a stage of each consumer after the other
    INDEX: gl.constexpr
    PIPELINED: gl.constexpr  # scores of a tile are computed beside the output of the one before
    LSE: gl.constexpr  # whether it is stored
    ACCUMULATED: gl.constexpr  # whether products are added to an added mask
    TREE: gl.constexpr  # whether a row's scores and weights are reduced as a tree

    @gluon.constexpr_function
    def __init__(self, work, terms, keys, values, masks, INDEX, PIPELINED, LSE, ACCUMULATED, TREE):
        self.work = work
        self.terms = terms
        self.keys = keys
        self.values = values
        self.masks = masks
        self.INDEX = gl.constexpr(INDEX)
        self.PIPELINED = gl.constexpr(PIPELINED)
        self.LSE = gl.constexpr(LSE)
        self.ACCUMULATED = gl.constexpr(ACCUMULATED)
        self.TREE = gl.constexpr(TREE)

    @gluon.jit
    def take_turn(self):
        """Two pipelined consumers take turns at the tensor cores: one multiplies while the other
        exponentiates, instead of both at once."""
        if self.PIPELINED:
            in_each_thread(_barrier_text("sync", self.INDEX))

    @gluon.jit
    def pass_turn(self):
        if self.PIPELINED:
            in_each_thread(_barrier_text("arrive", 1 - self.INDEX))

    @gluon.jit
    def release(self, step, count):
        """Give back tiles that only other consumers need."""
        for _ in range(count):
            self.take_turn()
            self.pass_turn()
            self.keys.wait(step)
            self.keys.release(step)
            self.values.wait(step)
            self.values.release(step)
            if self.terms.MASK_TILES:
                self.masks.wait(self.mask_slot(step))
                self.masks.release(self.mask_slot(step))
            step += 1
        return step

    @gluon.jit
    def mask_slot(self, step):
        return step * self.work.CONSUMERS + self.INDEX

    @gluon.jit
    def loaded_mask(self, step, mask_tile):
        """The tile of the mask that came by TMA; `mask_tile` where none does."""
        TILE: gl.constexpr = self.work.TILE
        if self.terms.MASK_TILES:
            slot = self.mask_slot(step)
            self.masks.wait(slot)
            tile = _widened(self.masks.tile(slot, [ROWS, TILE]).load(product_layout(TILE)))
        else:
            tile = mask_tile
        return tile

    @gluon.jit
    def begin_scores(self, query, step):
        """Begin the products of a tile, and its mask where they are added to it."""
        TILE: gl.constexpr = self.work.TILE
        D: gl.constexpr = query.tile.shape[1]
        if self.ACCUMULATED:
            tile = self.loaded_mask(step, gl.to_tensor(0))
            self.keys.wait(step)
            self.take_turn()
            right = self.keys.tile(step, [TILE, D]).permute((1, 0))
            products = warpgroup_mma(query.left, right, tile, is_async=True)
        else:
            self.keys.wait(step)
            self.take_turn()
            products = multiply(query.tile, self.keys.tile(step, [TILE, D]))
        return products

    @gluon.jit
    def remaining_mask(self, step, mask_tile):
        """The tile of the mask, where it is not in the products already."""
        if not self.ACCUMULATED:
            mask_tile = self.loaded_mask(step, mask_tile)
        return mask_tile

    @gluon.jit
    def release_scores(self, step):
        """Give back the tiles that the scores were made of."""
        if self.terms.MASK_TILES:
            # TMA must not overwrite what a warp has asked for and not got yet.
            fence_async_shared()
            self.masks.release(self.mask_slot(step))
        self.keys.release(step)


@aggregate
class Query:
    """The query of a consumer's 64 rows."""

    tile: gl.shared_memory_descriptor
    left: gl.tensor  # in registers, scaled, where products are added to a mask

    @gluon.constexpr_function
    def __init__(self, tile, left):
        self.tile = tile
        self.left = left


@aggregate
class Rows:
    """The 64 rows of a consumer: their place, and the tiles that they see whole."""

    batch: gl.tensor
    head: gl.tensor
    first: gl.tensor
    whole_begin: gl.tensor
    whole_end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, head, first, whole_begin, whole_end):
        self.batch = batch
        self.head = head
        self.first = first
        self.whole_begin = whole_begin
        self.whole_end = whole_end


@gluon.jit
def _produce(schedule, terms, query, key, value, mask, queries, keys, values, masks):
    work = schedule.work
    turn = 0
    step = 0
    position = work.position(turn)
    while position < work.tiles():
        schedule.tell(turn, position)
        first_row, batch, head = work.place(position)
        for consumer in gl.static_range(work.CONSUMERS):
            row = first_row + consumer * ROWS
            queries.load(turn * work.CONSUMERS + consumer, query, [batch, head, row, 0])
        begin, end = work.span(first_row)
        for index in range(end - begin):
            tile = end - 1 - index
            if terms.MASK_TILES:
                for consumer in gl.static_range(work.CONSUMERS):
                    row = first_row + consumer * ROWS
                    at = terms.mask_place(batch, head, row, tile * work.TILE)
                    masks.load(step * work.CONSUMERS + consumer, mask, at)
            work.load_keys(key, value, keys, values, step, batch, head, tile)
            step += 1
        position = schedule.following(turn)
        turn += 1
    schedule.tell(turn, position)


@gluon.jit
def _mask_tile(consumer, rows, tile):
    work = consumer.work
    TILE: gl.constexpr = work.TILE
    found = gl.to_tensor(0)
    if not consumer.terms.MASK_TILES:
        found = consumer.terms.mask_tile(
            work, rows.batch, rows.head, rows.first, tile * TILE, TILE, product_layout(TILE)
        )
    return found


@gluon.jit
def _clip(work, rows, scores, tile):
    """-inf where a key is outside of the band or past the end."""
    # A branch in one loop: of loops one after the other ptxas 12.8 miscompiled the second.
    if (tile < rows.whole_begin) | (tile >= rows.whole_end):
        seen = work.seen(rows.first, tile * work.TILE, work.TILE)
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def _widened(tile):
    """A tile in fp32."""
    if tile.dtype == gl.bfloat16:
        wide = gl.inline_asm_elementwise(
            _WIDEN, "=f,=f,r", [tile], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        wide = tile.to(gl.float32)
    return wide


@gluon.jit
def _unit(origin):
    """What scores are multiplied by in exponents. Beside a huge origin they differ by nothing or by
    16 and more: there 1, for the rounding of a product would be an exponent itself."""
    return gl.where(gl.abs(origin) > _HUGE, 1.0, LOG2_E)


@gluon.jit
def _base(origin, unit):
    """Their product, rounded: what exponents are relative to. Not part of a fused operation, so
    that a row's next tile finds the same number again."""
    return gl.inline_asm_elementwise(
        _PRODUCT, "=f,f,f", [origin, unit], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _added_fade(top, origin, unit, base):
    """What sums relative to `top` are multiplied by, with an added mask."""
    apart = _base(top, unit) - base
    return gl.exp2(gl.where(_unit(top) == unit, apart, top - origin))


@gluon.jit
def softmax(work, terms, rows, scores, tile, top, total, TREE: gl.constexpr):
    """Weights of a tile, the new top and total, and what earlier sums are multiplied by.

    Totals are of lanes, and summed after the last tile.
    """
    if work.LOW or work.HIGH or work.TAIL:
        scores = _clip(work, rows, scores, tile)
    highest = row_max(scores, TREE)
    if terms.is_late():
        highest = highest * terms.factor
    new_top = gl.maximum(top, highest)
    origin = new_top
    if work.LOW or work.HIGH or terms.MASK != NONE:
        # A row that has seen no key yet: any finite origin makes its weights 0.
        origin = gl.where(new_top == float("-inf"), 0.0, new_top)
    if terms.MASK == ADDITIVE:
        unit = _unit(origin)
        base = _base(origin, unit)
        weights = gl.exp2(scores * gl.expand_dims(unit, 1) - gl.expand_dims(base, 1))
        fade = _added_fade(top, origin, unit, base)
    else:
        weights = terms.power(scores, gl.expand_dims(origin, 1))
        fade = gl.exp2(top - origin)
    total = total * for_lanes(fade, work.TILE) + lane_sums(weights, TREE)
    if terms.DROPOUT:
        plane = rows.batch * work.heads + rows.head
        bits = terms.bits_by_row(weights, plane, rows.first, tile * work.TILE)
        weights = terms.kept(weights, bits)
    return weights, new_top, total, fade


@gluon.jit
def _softmax(consumer, rows, products, mask_tile, tile, top, total):
    """The same from the products of a tile."""
    scores = products
    if not consumer.ACCUMULATED:
        scores = consumer.terms.score(products, mask_tile)
    return softmax(consumer.work, consumer.terms, rows, scores, tile, top, total, consumer.TREE)


@gluon.jit
def faded(sums, fade):
    ROW: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    return sums * gl.expand_dims(gl.convert_layout(fade, ROW, assert_trivial=True), 1)


@gluon.jit
def _plain_tile(consumer, rows, query, step, state, tile):
    """One tile of keys: scores, softmax, output, one after the other."""
    sums, top, total = state
    values = consumer.values
    TILE: gl.constexpr = consumer.work.TILE
    D: gl.constexpr = query.tile.shape[1]
    mask_tile = _mask_tile(consumer, rows, tile)
    products = consumer.begin_scores(query, step)
    mask_tile = consumer.remaining_mask(step, mask_tile)
    products = warpgroup_mma_wait(0, deps=[products])
    consumer.release_scores(step)
    weights, top, total, fade = _softmax(consumer, rows, products, mask_tile, tile, top, total)
    sums = faded(sums, fade)
    left = operand(weights.to(query.tile.dtype), D)
    values.wait(step)
    sums = warpgroup_mma(left, values.tile(step, [TILE, D]), sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    values.release(step)
    return sums, top, total


@gluon.jit
def _pipelined_tile(consumer, rows, query, step, state, tile):
    """Scores and softmax of tile `step + 1` while the output of tile `step` is computed."""
    sums, top, total, left = state
    values = consumer.values
    TILE: gl.constexpr = consumer.work.TILE
    D: gl.constexpr = query.tile.shape[1]
    mask_tile = _mask_tile(consumer, rows, tile)
    products = consumer.begin_scores(query, step + 1)
    values.wait(step)
    sums = warpgroup_mma(left, values.tile(step, [TILE, D]), sums, is_async=True)
    consumer.pass_turn()
    mask_tile = consumer.remaining_mask(step + 1, mask_tile)
    products = warpgroup_mma_wait(1, deps=[products])
    consumer.release_scores(step + 1)
    weights, top, total, fade = _softmax(consumer, rows, products, mask_tile, tile, top, total)
    sums, left = warpgroup_mma_wait(0, deps=[sums, left])
    values.release(step)
    return faded(sums, fade), top, total, operand(weights.to(query.tile.dtype), D)


@gluon.jit
def _attend(consumer, rows, query, step, begin, end):
    """Output sums, top score and total weight of 64 rows over key tiles [begin, end)."""
    values = consumer.values
    TILE: gl.constexpr = consumer.work.TILE
    D: gl.constexpr = query.tile.shape[1]
    ROW: gl.constexpr = gl.SliceLayout(1, product_layout(TILE))
    sums = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    total = gl.full([ROWS, 4], 0.0, gl.float32, lane_layout(TILE))
    if consumer.PIPELINED:
        mask_tile = _mask_tile(consumer, rows, end - 1)
        products = consumer.begin_scores(query, step)
        consumer.pass_turn()
        mask_tile = consumer.remaining_mask(step, mask_tile)
        products = warpgroup_mma_wait(0, deps=[products])
        consumer.release_scores(step)
        weights, top, total, _ = _softmax(consumer, rows, products, mask_tile, end - 1, top, total)
        state = sums, top, total, operand(weights.to(query.tile.dtype), D)
        for index in range(1, end - begin):
            state = _pipelined_tile(consumer, rows, query, step, state, end - 1 - index)
            step += 1
        sums, top, total, left = state
        values.wait(step)
        consumer.take_turn()
        sums = warpgroup_mma(left, values.tile(step, [TILE, D]), sums, is_async=True)
        consumer.pass_turn()
        sums = warpgroup_mma_wait(0, deps=[sums])
        values.release(step)
        step += 1
    else:
        plain_state = sums, top, total
        for index in range(end - begin):
            plain_state = _plain_tile(consumer, rows, query, step, plain_state, end - 1 - index)
            step += 1
        sums, top, total = plain_state
    return sums, top, over_lanes(total, ROW), step


@gluon.jit
def result_of(terms, sums, total):
    """The output of rows. Nothing flows into one that sees no key, not even NaN."""
    share = 1.0 / total
    if terms.DROPOUT:
        share = share * terms.keep_scale
    ROW: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    empty = gl.convert_layout(total, ROW, assert_trivial=True) == 0.0
    return gl.where(gl.expand_dims(empty, 1), 0.0, faded(sums, share))


@gluon.jit
def _lse(terms, top, total):
    """The natural logarithm of the sum of exponentials; -inf for an empty row."""
    if terms.MASK == ADDITIVE:
        result = top + gl.log2(total) * LN_2
    else:
        result = (top + gl.log2(total)) * LN_2
    return gl.where(total == 0.0, float("-inf"), result)


@gluon.jit
def store_lse(work, terms, rows, lse, top, total):
    row = rows.first + gl.arange(0, ROWS, layout=top.type.layout)
    plane = (rows.batch * work.heads + rows.head).to(gl.int64)
    places = lse + plane * work.rows + row
    gl.store(places, _lse(terms, top, total), mask=row < work.rows)


@gluon.jit
def _consume(consumer, schedule, out, lse, queries):
    work = consumer.work
    terms = consumer.terms
    INDEX: gl.constexpr = consumer.INDEX
    D: gl.constexpr = out.block_shape[3]
    if INDEX == 1:
        consumer.pass_turn()
    turn = 0
    step = 0
    position = schedule.hear(turn)
    while position < work.tiles():
        tile_row, batch, head = work.place(position)
        first_row = tile_row + INDEX * ROWS
        tile_begin, tile_end = work.span(tile_row)
        slot = turn * work.CONSUMERS + INDEX
        queries.wait(slot)
        if first_row < work.rows:
            begin, end, whole_begin, whole_end = work.own_span(first_row)
            tile = queries.tile(slot, [ROWS, D])
            left = gl.to_tensor(0)
            if consumer.ACCUMULATED:
                # Exact: the scale is a power of two.
                held = tile.load(gl.DotOperandLayout(0, product_layout(work.TILE), k_width=2))
                left = (held.to(gl.float32) * terms.factor).to(tile.dtype)
            query = Query(tile, left)
            rows = Rows(batch, head, first_row, whole_begin, whole_end)
            step = consumer.release(step, tile_end - end)
            sums, top, total, step = _attend(consumer, rows, query, step, begin, end)
            step = consumer.release(step, begin - tile_begin)
            tile.store(result_of(terms, sums, total).to(tile.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(
                out, [batch, head, first_row, 0], queries.buffers.index(slot % queries.STAGES)
            )
            if consumer.LSE:
                store_lse(work, terms, rows, lse, top, total)
            tma.store_wait(pendings=0)
        else:
            step = consumer.release(step, tile_end - tile_begin)
            # As many turns as the other consumer takes: one for each tile, and one for the last.
            consumer.take_turn()
            consumer.pass_turn()
        queries.release(slot)
        turn += 1
        position = schedule.hear(turn)
    # The last turn of consumer 1 is passed to consumer 0, which has to take it.
    if INDEX == 0:
        consumer.take_turn()


@gluon.jit
def forward_kernel(
    query, key, value, out, lse, counter,
    rows, key_count, heads, group, planes, cohort, low, high,
    factor, cap, mask, mask_batch, mask_head, mask_row, seed, threshold, keep_scale,
    CONSUMERS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    PIPELINED: gl.constexpr, DYNAMIC: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, TAIL: gl.constexpr,
    LSE: gl.constexpr, ACCUMULATED: gl.constexpr, TREE: gl.constexpr,
    SOFTCAP: gl.constexpr, MASK: gl.constexpr, MASK_KEYS: gl.constexpr,
    MASK_TILES: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = out.block_shape[3]
    DTYPE: gl.constexpr = out.dtype
    QUERIES: gl.constexpr = _QUERY_STAGES * CONSUMERS
    work = Work(
        rows, key_count, heads, group, planes, cohort, low, high, CONSUMERS, TILE, LOW, HIGH, TAIL
    )
    philox_0, philox_1 = philox_key(seed, DROPOUT)
    terms = Terms(
        factor, cap, lse if MASK_TILES else mask, mask_batch, mask_head, mask_row,
        philox_0, philox_1, threshold, keep_scale,
        SOFTCAP, MASK, MASK_KEYS, MASK_TILES, DROPOUT,
    )  # fmt: skip
    queries = make_ring(
        gl.allocate_shared_memory(DTYPE, [QUERIES, 1, 1, ROWS, D], query.layout), QUERIES, 1
    )
    keys = make_ring(
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, TILE, D], key.layout), STAGES, CONSUMERS
    )
    values = make_ring(
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, TILE, D], value.layout), STAGES, CONSUMERS
    )
    masks = keys
    if MASK_TILES:
        # As many stages as shared memory has room for.
        SLOTS: gl.constexpr = CONSUMERS if D * TILE > 64 * 128 else 2 * CONSUMERS
        masks = make_ring(
            gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, ROWS, TILE], mask.layout), SLOTS, 1
        )
    schedule = make_schedule(work, counter, DYNAMIC)
    fence_async_shared()
    produced = schedule, terms, query, key, value, mask, queries, keys, values, masks
    consumer = Consumer(work, terms, keys, values, masks, 0, PIPELINED, LSE, ACCUMULATED, TREE)
    first = consumer, schedule, out, lse, queries
    consumer = Consumer(work, terms, keys, values, masks, 1, PIPELINED, LSE, ACCUMULATED, TREE)
    second = consumer, schedule, out, lse, queries
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_produce, produced), (_consume, first), (_consume, second)],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
    else:
        consumer = Consumer(work, terms, keys, values, masks, 2, PIPELINED, LSE, ACCUMULATED, TREE)
        third = consumer, schedule, out, lse, queries
        if CONSUMERS == 3:
            gl.warp_specialize(
                [(_produce, produced), (_consume, first), (_consume, second), (_consume, third)],
                [4, 4, 4],
                [REGISTERS, REGISTERS, REGISTERS],
            )
        else:
            consumer = Consumer(
                work, terms, keys, values, masks, 3, PIPELINED, LSE, ACCUMULATED, TREE
            )
            fourth = consumer, schedule, out, lse, queries
            gl.warp_specialize(
                [
                    (_produce, produced),
                    (_consume, first),
                    (_consume, second),
                    (_consume, third),
                    (_consume, fourth),
                ],
                [4, 4, 4, 4],
                [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
            )
