"""fp32 forward on Hopper: a number is three of bf16, 24 bits in all, a product six by wgmma.

One warpgroup loads tiles, splits them and leaves the parts in shared memory. Each of the others
owns 64 query rows and walks the keys from right to left.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from orchard.backends.cuda.hopper_common import (
    ROWS,
    Ring,
    Work,
    lane_layout,
    make_ring,
    make_schedule,
    operand,
    over_lanes,
    product_layout,
)
from orchard.backends.cuda.hopper_forward import Rows, faded, result_of, softmax, store_lse
from orchard.backends.cuda.hopper_fp32_plan import CONSUMERS, WIDTH
from orchard.backends.cuda.hopper_terms import Terms, philox_key

_CONSUMERS = gl.constexpr(CONSUMERS)
_PARTS = gl.constexpr(3)
_WIDTH = gl.constexpr(WIDTH)  # columns of a tile; two side by side are 128
_UPPER_HALF = gl.constexpr(-65536)
_LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@aggregate
class Plane:
    """One head of an operand in global memory; its last axis is contiguous."""

    start: gl.tensor
    row: gl.tensor  # stride, in elements
    length: gl.tensor
    width: gl.tensor
    PADDED: gl.constexpr  # whether tiles have more columns than there are

    @gluon.constexpr_function
    def __init__(self, start, row, length, width, PADDED):
        self.start = start
        self.row = row
        self.length = length
        self.width = width
        self.PADDED = gl.constexpr(PADDED)

    @gluon.jit
    def places(self, first, COUNT: gl.constexpr, COLUMN: gl.constexpr, LAYOUT: gl.constexpr):
        """Where rows from `first` on and 64 columns from COLUMN on lie, and which of them exist."""
        row = first + gl.arange(0, COUNT, layout=gl.SliceLayout(1, LAYOUT))
        column = COLUMN + gl.arange(0, _WIDTH, layout=gl.SliceLayout(0, LAYOUT))
        column = gl.expand_dims(column, 0)
        inside = gl.expand_dims(row < self.length, 1)
        if self.PADDED:
            inside = inside & (column < self.width)
        return self.start + gl.expand_dims(row.to(gl.int64) * self.row, 1) + column, inside


@aggregate
class Planes:
    """An operand: its first plane, and the strides of its outer axes."""

    first: Plane
    batch: gl.tensor
    head: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, batch, head):
        self.first = first
        self.batch = batch
        self.head = head

    @gluon.jit
    def plane(self, batch, head):
        first = self.first
        start = first.start + batch.to(gl.int64) * self.batch + head.to(gl.int64) * self.head
        return Plane(start, first.row, first.length, first.width, first.PADDED)


@gluon.jit
def _either(second, one, other):
    """One of two planes that have as many rows."""
    start = gl.where(second, other.start, one.start)
    row = gl.where(second, other.row, one.row)
    return Plane(start, row, one.length, gl.where(second, other.width, one.width), one.PADDED)


@gluon.jit
def _split(values):
    """The values as sums of three numbers of bf16. Infinity has no rest, and becomes NaN."""
    # The upper half of a word: what bf16 keeps without rounding, so that it is never infinite.
    high = (values.to(gl.int32, bitcast=True) & _UPPER_HALF).to(gl.float32, bitcast=True)
    rest = values - high
    middle = rest.to(gl.bfloat16)
    low = (rest - middle.to(gl.float32)).to(gl.bfloat16)
    return high.to(gl.bfloat16), middle, low


@aggregate
class Split:
    """A ring of split tiles: in each stage the three parts of 64 columns, then of 64 more."""

    ring: Ring
    WIDTHS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ring, WIDTHS):
        self.ring = ring
        self.WIDTHS = gl.constexpr(WIDTHS)

    @gluon.jit
    def part(self, step, WIDTH: gl.constexpr, PART: gl.constexpr):
        stage = step % self.ring.STAGES
        return self.ring.buffers.index((stage * self.WIDTHS + WIDTH) * _PARTS + PART)

    @gluon.jit
    def parts(self, step, WIDTH: gl.constexpr):
        return self.part(step, WIDTH, 0), self.part(step, WIDTH, 1), self.part(step, WIDTH, 2)

    @gluon.jit
    def leave(self, step, WIDTH: gl.constexpr, values):
        """Producer: leave parts in a stage that is free."""
        high, middle, low = _split(values)
        self.part(step, WIDTH, 0).store(high)
        self.part(step, WIDTH, 1).store(middle)
        self.part(step, WIDTH, 2).store(low)

    @gluon.jit
    def fill(self, step, source, first):
        """Producer: load a tile of a plane, wait for a free stage and leave it there."""
        COUNT: gl.constexpr = self.ring.buffers.shape[1]
        places, inside = source.places(first, COUNT, 0, _LOADED)
        values = gl.load(places, mask=inside, other=0.0)
        more = values
        if self.WIDTHS == 2:
            if source.PADDED:
                places, inside = source.places(first, COUNT, _WIDTH, _LOADED)
                more = gl.load(places, mask=inside, other=0.0)
            else:
                more = gl.load(places + _WIDTH, mask=inside, other=0.0)
        self.ring.wait_free(step)
        self.leave(step, 0, values)
        if self.WIDTHS == 2:
            self.leave(step, 1, more)
        fence_async_shared()
        self.ring.fill(step)


@gluon.jit
def make_split(
    STAGES: gl.constexpr, COUNT: gl.constexpr, WIDTHS: gl.constexpr, CONSUMERS: gl.constexpr
):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SHAPE: gl.constexpr = [STAGES * WIDTHS * _PARTS, COUNT, _WIDTH]
    buffers = gl.allocate_shared_memory(gl.bfloat16, SHAPE, LAYOUT)
    return Split(make_ring(buffers, STAGES, CONSUMERS), WIDTHS)


@aggregate
class Consumer:
    """One warpgroup: what it reads."""

    work: Work
    terms: Terms
    queries: Split
    tiles: Split  # of keys, and after each that of its values
    INDEX: gl.constexpr
    LSE: gl.constexpr  # whether it is stored

    @gluon.constexpr_function
    def __init__(self, work, terms, queries, tiles, INDEX, LSE):
        self.work = work
        self.terms = terms
        self.queries = queries
        self.tiles = tiles
        self.INDEX = gl.constexpr(INDEX)
        self.LSE = gl.constexpr(LSE)

    @gluon.jit
    def release(self, step, count):
        """Give back tiles that only the other consumer needs."""
        for _ in range(count):
            self.tiles.ring.wait(2 * step)
            self.tiles.ring.release(2 * step)
            self.tiles.ring.wait(2 * step + 1)
            self.tiles.ring.release(2 * step + 1)
            step += 1
        return step


@gluon.jit
def _produce(schedule, query, key, value, queries, tiles):
    work = schedule.work
    turn = 0
    step = 0
    position = work.position(turn)
    while position < work.tiles():
        schedule.tell(turn, position)
        first_row, batch, head = work.place(position)
        for consumer in range(work.CONSUMERS):
            slot = turn * work.CONSUMERS + consumer
            queries.fill(slot, query.plane(batch, head), first_row + consumer * ROWS)
        begin, end = work.span(first_row)
        keys = key.plane(batch, head // work.group)
        values = value.plane(batch, head // work.group)
        # One piece of code for keys and values: of two the addresses would not fit in registers.
        for index in range(2 * (end - begin)):
            source = _either(index % 2 == 1, keys, values)
            tiles.fill(step, source, (end - 1 - index // 2) * work.TILE)
            step += 1
        position = schedule.following(turn)
        turn += 1
    schedule.tell(turn, position)


@gluon.jit
def _add_small(product, left, right, FRESH: gl.constexpr):
    """Begin to add the products of split operands but the largest; those of 2^-24 are left out."""
    high, middle, low = left
    right_high, right_middle, right_low = right
    product = warpgroup_mma(middle, right_middle, product, use_acc=not FRESH, is_async=True)
    product = warpgroup_mma(low, right_high, product, is_async=True)
    product = warpgroup_mma(high, right_low, product, is_async=True)
    product = warpgroup_mma(middle, right_high, product, is_async=True)
    return warpgroup_mma(high, right_middle, product, is_async=True)


@gluon.jit
def _products(consumer, slot, step):
    """Begin the products of 64 rows and a tile of keys, the smallest first."""
    TILE: gl.constexpr = consumer.work.TILE
    queries = consumer.queries
    tiles = consumer.tiles
    products = gl.zeros([ROWS, TILE], gl.float32, product_layout(TILE))
    for width in gl.static_range(tiles.WIDTHS):
        high, middle, low = tiles.parts(2 * step, width)
        right = high.permute((1, 0)), middle.permute((1, 0)), low.permute((1, 0))
        products = _add_small(products, queries.parts(slot, width), right, width == 0)
    for width in gl.static_range(tiles.WIDTHS):
        left = queries.part(slot, width, 0)
        right = tiles.part(2 * step, width, 0).permute((1, 0))
        products = warpgroup_mma(left, right, products, is_async=True)
    return products


@gluon.jit
def _added(sums, fade, left, right):
    """Sums of values and those of a tile. Added here: tensor cores would cut what they add to."""
    product = gl.zeros([ROWS, _WIDTH], gl.float32, product_layout(_WIDTH))
    product = _add_small(product, left, right, True)
    product = warpgroup_mma(left[0], right[0], product, is_async=True)
    product = warpgroup_mma_wait(0, deps=[product, left[0], left[1], left[2]])[0]
    return faded(sums, fade) + product


@gluon.jit
def _tile(consumer, rows, slot, step, state, tile):
    """One tile of keys: scores, softmax, output, one after the other."""
    sums, more, top, total = state
    work = consumer.work
    terms = consumer.terms
    tiles = consumer.tiles
    TILE: gl.constexpr = work.TILE
    mask_tile = terms.mask_tile(
        work, rows.batch, rows.head, rows.first, tile * TILE, TILE, product_layout(TILE)
    )
    tiles.ring.wait(2 * step)
    products = warpgroup_mma_wait(0, deps=[_products(consumer, slot, step)])
    tiles.ring.release(2 * step)
    scores = terms.score(products, mask_tile)
    weights, top, total, fade = softmax(work, terms, rows, scores, tile, top, total, False)
    high, middle, low = _split(weights)
    left = operand(high, _WIDTH), operand(middle, _WIDTH), operand(low, _WIDTH)
    tiles.ring.wait(2 * step + 1)
    sums = _added(sums, fade, left, tiles.parts(2 * step + 1, 0))
    if tiles.WIDTHS == 2:
        more = _added(more, fade, left, tiles.parts(2 * step + 1, 1))
    tiles.ring.release(2 * step + 1)
    return sums, more, top, total


@gluon.jit
def _store(out, rows, result, COLUMN: gl.constexpr):
    places, inside = out.places(rows.first, ROWS, COLUMN, product_layout(_WIDTH))
    gl.store(places, result, mask=inside)


@gluon.jit
def _attend(consumer, rows, out, lse, slot, step, begin, end):
    """64 rows over key tiles [begin, end): their output and lse."""
    work = consumer.work
    terms = consumer.terms
    ROW: gl.constexpr = gl.SliceLayout(1, product_layout(work.TILE))
    WIDE: gl.constexpr = consumer.tiles.WIDTHS == 2
    sums = gl.zeros([ROWS, _WIDTH], gl.float32, product_layout(_WIDTH))
    more = sums if WIDE else gl.to_tensor(0)
    top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    total = gl.full([ROWS, 4], 0.0, gl.float32, lane_layout(work.TILE))
    state = sums, more, top, total
    for index in range(end - begin):
        state = _tile(consumer, rows, slot, step, state, end - 1 - index)
        step += 1
    sums, more, top, total = state
    total = over_lanes(total, ROW)
    plane = out.plane(rows.batch, rows.head)
    _store(plane, rows, result_of(terms, sums, total), 0)
    if WIDE:
        _store(plane, rows, result_of(terms, more, total), _WIDTH)
    if consumer.LSE:
        store_lse(work, terms, rows, lse, top, total)
    return step


@gluon.jit
def _consume(consumer, schedule, out, lse):
    work = consumer.work
    queries = consumer.queries
    INDEX: gl.constexpr = consumer.INDEX
    turn = 0
    step = 0
    position = schedule.hear(turn)
    while position < work.tiles():
        tile_row, batch, head = work.place(position)
        first_row = tile_row + INDEX * ROWS
        tile_begin, tile_end = work.span(tile_row)
        slot = turn * work.CONSUMERS + INDEX
        queries.ring.wait(slot)
        if first_row < work.rows:
            begin, end, whole_begin, whole_end = work.own_span(first_row)
            rows = Rows(batch, head, first_row, whole_begin, whole_end)
            step = consumer.release(step, tile_end - end)
            step = _attend(consumer, rows, out, lse, slot, step, begin, end)
            step = consumer.release(step, begin - tile_begin)
        else:
            step = consumer.release(step, tile_end - tile_begin)
        queries.ring.release(slot)
        turn += 1
        position = schedule.hear(turn)


@gluon.jit
def fp32_kernel(
    query, key, value, out, lse, counter,
    query_batch, query_head, query_row, key_batch, key_head, key_row,
    value_batch, value_head, value_row, out_batch, out_head, out_row, head_dim, value_dim,
    rows, key_count, heads, group, planes, cohort, low, high,
    factor, cap, mask, mask_batch, mask_head, mask_row, seed, threshold, keep_scale,
    WIDTHS: gl.constexpr, PADDED: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    DYNAMIC: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, TAIL: gl.constexpr,
    LSE: gl.constexpr, SOFTCAP: gl.constexpr, MASK: gl.constexpr, MASK_KEYS: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    work = Work(
        rows, key_count, heads, group, planes, cohort, low, high, _CONSUMERS, TILE, LOW, HIGH, TAIL
    )
    philox_0, philox_1 = philox_key(seed, DROPOUT)
    terms = Terms(
        factor, cap, mask, mask_batch, mask_head, mask_row,
        philox_0, philox_1, threshold, keep_scale,
        SOFTCAP, MASK, MASK_KEYS, False, DROPOUT,
    )  # fmt: skip
    queries = make_split(_CONSUMERS, ROWS, WIDTHS, 1)
    tiles = make_split(2 * STAGES, TILE, WIDTHS, _CONSUMERS)
    schedule = make_schedule(work, counter, DYNAMIC)
    fence_async_shared()
    given = Planes(Plane(query, query_row, rows, head_dim, PADDED), query_batch, query_head)
    keys = Planes(Plane(key, key_row, key_count, head_dim, PADDED), key_batch, key_head)
    values = Planes(Plane(value, value_row, key_count, value_dim, PADDED), value_batch, value_head)
    result = Planes(Plane(out, out_row, rows, value_dim, PADDED), out_batch, out_head)
    produced = schedule, given, keys, values, queries, tiles
    first = Consumer(work, terms, queries, tiles, 0, LSE), schedule, result, lse
    second = Consumer(work, terms, queries, tiles, 1, LSE), schedule, result, lse
    gl.warp_specialize(
        [(_produce, produced), (_consume, first), (_consume, second)],
        [4, 4],
        [REGISTERS, REGISTERS],
    )
