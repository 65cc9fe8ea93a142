"""fp32 forward on Hopper: a number is three of bf16, 24 bits in all, a product six by wgmma.

One warpgroup loads tiles, splits them and leaves the parts in shared memory. Each of the others
owns 64 query rows and walks the keys from right to left.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from orchard.backends.cuda.hopper_common import (
    ROWS,
    Ring,
    Work,
    make_ring,
    make_schedule,
    operand,
    product_layout,
)
from orchard.backends.cuda.hopper_forward import Rows, faded, loaded_mask_tile, lse_of, softmax
from orchard.backends.cuda.hopper_terms import Terms, philox_key

_CONSUMERS = gl.constexpr(2)
_PARTS = gl.constexpr(3)
_WIDTH = gl.constexpr(64)  # columns of a tile; two side by side are 128
_UPPER_HALF = gl.constexpr(-65536)  # of a word: what bf16 keeps of fp32
_LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@aggregate
class Planes:
    """An operand in global memory, whose last axis is contiguous."""

    start: gl.tensor
    batch: gl.tensor  # strides, in elements
    head: gl.tensor
    row: gl.tensor
    length: gl.tensor
    width: gl.tensor
    PADDED: gl.constexpr  # whether tiles have more columns than there are

    @gluon.constexpr_function
    def __init__(self, start, batch, head, row, length, width, PADDED):
        self.start = start
        self.batch = batch
        self.head = head
        self.row = row
        self.length = length
        self.width = width
        self.PADDED = gl.constexpr(PADDED)

    @gluon.jit
    def plane(self, batch, head):
        return self.start + batch.to(gl.int64) * self.batch + head.to(gl.int64) * self.head

    @gluon.jit
    def places(self, plane, first, COUNT: gl.constexpr, COLUMN: gl.constexpr, LAYOUT: gl.constexpr):
        """Where rows from `first` on and 64 columns from COLUMN on lie, and which of them exist."""
        row = first + gl.arange(0, COUNT, layout=gl.SliceLayout(1, LAYOUT))
        column = COLUMN + gl.arange(0, _WIDTH, layout=gl.SliceLayout(0, LAYOUT))
        column = gl.expand_dims(column, 0)
        inside = gl.expand_dims(row < self.length, 1)
        if self.PADDED:
            inside = inside & (column < self.width)
        return plane + gl.expand_dims(row.to(gl.int64) * self.row, 1) + column, inside


@gluon.jit
def _upper(values):
    """What bf16 keeps of each without rounding."""
    return (values.to(gl.int32, bitcast=True) & _UPPER_HALF).to(gl.float32, bitcast=True)


@gluon.jit
def _split(values):
    """The values as sums of three numbers of bf16, none of them infinite."""
    high = _upper(values)
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
        high = _upper(values)
        self.part(step, WIDTH, 0).store(high.to(gl.bfloat16))
        # Infinity is a number of bf16, and has no rest.
        rest = gl.where(gl.abs(values) == float("inf"), 0.0, values - high)
        middle = rest.to(gl.bfloat16)
        self.part(step, WIDTH, 1).store(middle)
        self.part(step, WIDTH, 2).store((rest - middle.to(gl.float32)).to(gl.bfloat16))

    @gluon.jit
    def fill(self, step, source, plane, first):
        """Producer: load a tile, wait for a free stage and leave it there."""
        ring = self.ring
        COUNT: gl.constexpr = ring.buffers.shape[1]
        places, inside = source.places(plane, first, COUNT, 0, _LOADED)
        values = gl.load(places, mask=inside, other=0.0)
        more = values
        if self.WIDTHS == 2:
            if source.PADDED:
                places, inside = source.places(plane, first, COUNT, _WIDTH, _LOADED)
                more = gl.load(places, mask=inside, other=0.0)
            else:
                more = gl.load(places + _WIDTH, mask=inside, other=0.0)
        stage = step % ring.STAGES
        mbarrier.wait(ring.free.index(stage), ((step // ring.STAGES) & 1) ^ 1)
        self.leave(step, 0, values)
        if self.WIDTHS == 2:
            self.leave(step, 1, more)
        fence_async_shared()
        mbarrier.arrive(ring.ready.index(stage), count=1)


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
    ACCUMULATED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, work, terms, queries, tiles, INDEX, LSE):
        self.work = work
        self.terms = terms
        self.queries = queries
        self.tiles = tiles
        self.INDEX = gl.constexpr(INDEX)
        self.LSE = gl.constexpr(LSE)
        self.ACCUMULATED = gl.constexpr(False)

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
        plane = query.plane(batch, head)
        for consumer in range(work.CONSUMERS):
            slot = turn * work.CONSUMERS + consumer
            queries.fill(slot, query, plane, first_row + consumer * ROWS)
        begin, end = work.span(first_row)
        keys = key.plane(batch, head // work.group)
        values = value.plane(batch, head // work.group)
        # One piece of code for keys and values: of two the addresses would not fit in registers.
        for index in range(2 * (end - begin)):
            odd = index % 2 == 1
            source = Planes(
                key.start, key.batch, key.head, gl.where(odd, value.row, key.row),
                key.length, gl.where(odd, value.width, key.width), key.PADDED,
            )  # fmt: skip
            tiles.fill(
                step, source, gl.where(odd, values, keys), (end - 1 - index // 2) * work.TILE
            )
            step += 1
        position = schedule.following(turn)
        turn += 1
    schedule.tell(turn, position)


@gluon.jit
def _add_small(product, left, right, FRESH: gl.constexpr):
    """Begin to add the products of split operands but the largest; what is 2^-24 is left out."""
    high, middle, low = left
    right_high, right_middle, right_low = right
    product = warpgroup_mma(middle, right_middle, product, use_acc=not FRESH, is_async=True)
    product = warpgroup_mma(low, right_high, product, is_async=True)
    product = warpgroup_mma(high, right_low, product, is_async=True)
    product = warpgroup_mma(middle, right_high, product, is_async=True)
    return warpgroup_mma(high, right_middle, product, is_async=True)


@gluon.jit
def _scores(consumer, slot, step):
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
    tiles = consumer.tiles
    mask_tile = loaded_mask_tile(consumer, rows, tile)
    tiles.ring.wait(2 * step)
    products = warpgroup_mma_wait(0, deps=[_scores(consumer, slot, step)])
    tiles.ring.release(2 * step)
    weights, top, total, fade = softmax(consumer, rows, products, mask_tile, tile, top, total)
    high, middle, low = _split(weights)
    left = operand(high, _WIDTH), operand(middle, _WIDTH), operand(low, _WIDTH)
    tiles.ring.wait(2 * step + 1)
    sums = _added(sums, fade, left, tiles.parts(2 * step + 1, 0))
    if tiles.WIDTHS == 2:
        more = _added(more, fade, left, tiles.parts(2 * step + 1, 1))
    tiles.ring.release(2 * step + 1)
    return sums, more, top, total


@gluon.jit
def _store(out, rows, sums, COLUMN: gl.constexpr):
    plane = out.plane(rows.batch, rows.head)
    places, inside = out.places(plane, rows.first, ROWS, COLUMN, product_layout(_WIDTH))
    gl.store(places, sums, mask=inside)


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
    total = gl.full([ROWS], 0.0, gl.float32, ROW)
    state = sums, more, top, total
    for index in range(end - begin):
        state = _tile(consumer, rows, slot, step, state, end - 1 - index)
        step += 1
    sums, more, top, total = state
    part = gl.where(total == 0.0, 0.0, 1.0 / total)
    if terms.DROPOUT:
        part = part * terms.keep_scale
    _store(out, rows, faded(sums, part), 0)
    if WIDE:
        _store(out, rows, faded(more, part), _WIDTH)
    if consumer.LSE:
        row = rows.first + gl.arange(0, ROWS, layout=ROW)
        plane = (rows.batch * work.heads + rows.head).to(gl.int64)
        at = lse + plane * work.rows + row
        gl.store(at, lse_of(terms, top, total), mask=row < work.rows)
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
            begin = work.begin(first_row)
            end = work.end(gl.minimum(first_row + ROWS, work.rows) - 1, begin)
            whole_begin, whole_end = work.whole(first_row, begin, end)
            query = queries.part(slot, 0, 0)
            rows = Rows(query, gl.to_tensor(0), batch, head, first_row, whole_begin, whole_end)
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
    given = Planes(query, query_batch, query_head, query_row, rows, head_dim, PADDED)
    keys = Planes(key, key_batch, key_head, key_row, key_count, head_dim, PADDED)
    values = Planes(value, value_batch, value_head, value_row, key_count, value_dim, PADDED)
    result = Planes(out, out_batch, out_head, out_row, rows, value_dim, PADDED)
    produced = schedule, given, keys, values, queries, tiles
    first = Consumer(work, terms, queries, tiles, 0, LSE), schedule, result, lse
    second = Consumer(work, terms, queries, tiles, 1, LSE), schedule, result, lse
    gl.warp_specialize(
        [(_produce, produced), (_consume, first), (_consume, second)],
        [4, 4],
        [REGISTERS, REGISTERS],
    )
