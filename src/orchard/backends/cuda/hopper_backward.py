"""Backward on Hopper: blocks of 128 keys stay in shared memory, tiles of query rows pass by.

Scores are computed transposed, S^T = K Q^T, so that P^T and dS^T are already the left operands of
dV = P^T dO and dK = dS^T Q. Two consumers own 64 keys each. Fused, they exchange dS through shared
memory and add dQ = dS K to an fp32 buffer by TMA; its order of additions varies from run to run.
So it may where programs share the rows of a block, and add up what they have of dK and dV.
"""

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
    NUMBER,
    ROWS,
    Ring,
    Work,
    in_each_thread,
    make_ring,
    make_schedule,
    multiply,
    operand,
    product_layout,
    tma_reduce_add,
    within,
)
from orchard.backends.cuda.hopper_plan import COUNTER, SPAN_ELEMENTS
from orchard.backends.cuda.hopper_terms import Terms, kept_less_all, philox_key, positive

_KEYS = gl.constexpr(128)  # of a block
_BOTH_CONSUMERS = gl.constexpr("bar.sync 9, 256;")
_COLUMNS = gl.constexpr(16)  # that are cleared at a time
_MASK_STAGES = gl.constexpr(2)  # of 64 rows each
_EARLY_ELEMENTS = gl.constexpr(512)  # of dQ that are converted at a time, four by each thread
_SPAN_ELEMENTS = gl.constexpr(SPAN_ELEMENTS)
_COUNTER = gl.constexpr(COUNTER)
_ADDED = gl.constexpr("cp.async.bulk.wait_group 0;")  # what this thread gave to TMA is in memory
# The kernel after this one may begin once all programs here have; it waits for what these leave.
_LET_BEGIN = gl.constexpr("griddepcontrol.launch_dependents;")
_AWAIT_BEFORE = gl.constexpr("griddepcontrol.wait;")
# What a program keeps in shared memory for its end, where registers are too few.
_SUMS = gl.constexpr(0)  # address of the sums of its block
_PARTS = gl.constexpr(1)  # programs that share them
_BEFORE = gl.constexpr(2)  # of these, those that came before
_FINISHED = gl.constexpr(3)  # address of the counter of finished blocks


@aggregate
class Share:
    """A program's part of the rows of a block that several programs have: tiles [begin, end)."""

    begin: gl.tensor
    end: gl.tensor
    numbers: gl.shared_memory_descriptor  # see _SUMS
    SHARED: gl.constexpr  # whether any block is

    @gluon.constexpr_function
    def __init__(self, begin, end, numbers, SHARED):
        self.begin = begin
        self.end = end
        self.numbers = numbers
        self.SHARED = gl.constexpr(SHARED)

    @gluon.jit
    def number(self, PLACE: gl.constexpr):
        return gl.max(self.numbers.index(PLACE).load(NUMBER), axis=0)

    @gluon.jit
    def tell(self, PLACE: gl.constexpr, value):
        self.numbers.index(PLACE).store(gl.full([1], 0, gl.int64, NUMBER) + value)

    @gluon.jit
    def joined(self, by_key, by_value, CONSUMER: gl.constexpr):
        """Add to the sums. Who comes last has them all, and is told so."""
        D: gl.constexpr = by_key.shape[1]
        LAYOUT: gl.constexpr = product_layout(D)
        parts = self.number(_PARTS)
        sums = self.number(_SUMS).to(gl.pointer_type(gl.float32), bitcast=True)
        key = CONSUMER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        column = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
        of_key = sums + gl.expand_dims(key * D, 1) + gl.expand_dims(column, 0)
        of_value = of_key + _KEYS * D
        gl.atomic_add(of_key, by_key, sem="relaxed")
        gl.atomic_add(of_value, by_value, sem="relaxed")
        in_each_thread(_BOTH_CONSUMERS)
        if CONSUMER == 0:
            arrivals = (sums + 2 * _KEYS * D).to(gl.pointer_type(gl.int32), bitcast=True)
            self.tell(_BEFORE, gl.atomic_add(arrivals, 1, sem="acq_rel"))
        # Fences, because the compiler may move plain accesses across the barrier.
        fence_async_shared()
        in_each_thread(_BOTH_CONSUMERS)
        fence_async_shared()
        last = self.number(_BEFORE) == parts - 1
        if last:
            by_key = gl.load(of_key, cache_modifier=".cg")
            by_value = gl.load(of_value, cache_modifier=".cg")
        return by_key, by_value, last


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
    share: Share
    ROW_TILE: gl.constexpr
    LOW: gl.constexpr  # whether the band has a lower bound
    HIGH: gl.constexpr
    TAIL: gl.constexpr  # whether the last block of keys is not whole
    GROUPED: gl.constexpr  # whether query heads share a key head
    EMPTY_ROWS: gl.constexpr  # whether some row may see no key
    FUSED: gl.constexpr
    ROTATED: gl.constexpr  # whether blocks begin with different rows; not where grouped

    @gluon.constexpr_function
    def __init__(
        self, rows, keys, heads, group, low, high, batch, kv_head, first_key, spare, padded_rows,
        terms, share, ROW_TILE, LOW, HIGH, TAIL, GROUPED, EMPTY_ROWS, FUSED, ROTATED,
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
        self.share = share
        self.ROW_TILE = gl.constexpr(ROW_TILE)
        self.LOW = gl.constexpr(LOW)
        self.HIGH = gl.constexpr(HIGH)
        self.TAIL = gl.constexpr(TAIL)
        self.GROUPED = gl.constexpr(GROUPED)
        self.EMPTY_ROWS = gl.constexpr(EMPTY_ROWS)
        self.FUSED = gl.constexpr(FUSED)
        self.ROTATED = gl.constexpr(ROTATED)

    @gluon.jit
    def span(self):
        """The tiles of rows that see the block and are this program's: [begin, end), if any."""
        begin = gl.to_tensor(0)
        if self.HIGH:
            begin = gl.maximum(self.first_key - self.high, 0) // self.ROW_TILE
        end = self.rows
        if self.LOW:
            last_key = gl.minimum(self.first_key + _KEYS, self.keys) - 1
            end = gl.maximum(gl.minimum(last_key - self.low + 1, self.rows), 0)
        end = gl.cdiv(end, self.ROW_TILE)
        if self.share.SHARED:
            begin = self.share.begin
            end = self.share.end
        return begin, end

    @gluon.jit
    def start(self, begin, end):
        """The tile to begin with; where blocks are rotated, another one in each."""
        start = begin
        if self.ROTATED:
            passed = (end - begin).to(gl.int64) * (self.first_key // _KEYS)
            start = begin + (passed // gl.cdiv(self.keys, _KEYS)).to(gl.int32)
        return start

    @gluon.jit
    def after(self, tile, begin, end):
        """The tile after this one, and whether the next head begins with it."""
        tile += 1
        over = tile == end
        if self.GROUPED or self.ROTATED:
            tile = gl.where(over, begin, tile)
        return tile, over

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
            tile = masks.tile(slot, [ROWS, _KEYS]).slice(CONSUMER * ROWS, ROWS, dim=1)
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
    exchange: gl.shared_memory_descriptor  # dS^T of both consumers
    staging: gl.shared_memory_descriptor  # dQ on its way to memory

    @gluon.constexpr_function
    def __init__(self, queries, grads, masks, lse, delta, keys, values, loaded, exchange, staging):
        self.queries = queries
        self.grads = grads
        self.masks = masks
        self.lse = lse
        self.delta = delta
        self.keys = keys
        self.values = values
        self.loaded = loaded
        self.exchange = exchange
        self.staging = staging

    @gluon.jit
    def row_values(self, values, step, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
        """Statistics of 64 rows of a tile."""
        tile = values.index(step % self.queries.STAGES)
        return tile.reshape([tile.shape[1]]).slice(FIRST, ROWS, dim=0).load(LAYOUT)

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


@gluon.constexpr_function
def _early_layout(D):
    """One warp has a row of 128 columns, or two of 64."""
    return gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])


@aggregate
class Early:
    """dQ of planes that are finished, from its sums, by the producer between its loads.

    Rows are taken in spans; the kernel after this one does what nobody has taken.
    """

    sums: gl.tensor
    grad_query: gl.tensor
    batch_step: gl.tensor  # strides of the gradient
    head_step: gl.tensor
    row_step: gl.tensor
    finished: gl.tensor  # blocks of each key plane
    taken: gl.tensor  # spans of each plane
    lag: gl.tensor  # how many key planes earlier one is likely to be finished
    rows: gl.tensor
    heads: gl.tensor
    head_dim: gl.tensor
    scale: gl.tensor
    D: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, sums, grad_query, batch_step, head_step, row_step, finished, taken, lag,
        rows, heads, head_dim, scale, D,
    ):  # fmt: skip
        self.sums = sums
        self.grad_query = grad_query
        self.batch_step = batch_step
        self.head_step = head_step
        self.row_step = row_step
        self.finished = finished
        self.taken = taken
        self.lag = lag
        self.rows = rows
        self.heads = heads
        self.head_dim = head_dim
        self.scale = scale
        self.D = gl.constexpr(D)

    @gluon.jit
    def planes(self, key_plane, group, blocks):
        """The planes to convert, [begin, end): none where they are not finished."""
        earlier = key_plane - self.lag
        begin = gl.to_tensor(0)
        end = gl.to_tensor(0)
        done = gl.atomic_add(self.finished + gl.maximum(earlier, 0), 0, sem="acquire")
        if (earlier >= 0) & (done == blocks):
            begin = earlier * group
            end = begin + group
        return begin, end

    @gluon.jit
    def step(self, plane, end, row, row_end):
        """Convert a few rows; where these were the last, take more the next time."""
        SPAN: gl.constexpr = _SPAN_ELEMENTS // self.D
        if row < row_end:
            self.convert(plane, row)
            row += _EARLY_ELEMENTS // self.D
        elif plane < end:
            row = gl.atomic_add(self.taken + plane, 1, sem="relaxed") * SPAN
            row_end = gl.minimum(row + SPAN, self.rows)
            if row >= self.rows:
                plane += 1
        return plane, row, row_end

    @gluon.jit
    def convert(self, plane, first_row):
        LAYOUT: gl.constexpr = _early_layout(self.D)
        row = first_row + gl.arange(0, _EARLY_ELEMENTS // self.D, layout=gl.SliceLayout(1, LAYOUT))
        column = gl.arange(0, self.D, layout=gl.SliceLayout(0, LAYOUT))
        inside = gl.expand_dims(row < self.rows, 1) & gl.expand_dims(column < self.head_dim, 0)
        first = self.sums + plane.to(gl.int64) * self.rows * self.head_dim
        row = row.to(gl.int64)
        offsets = gl.expand_dims(row * self.head_dim, 1) + gl.expand_dims(column, 0)
        total = gl.load(first + offsets, mask=inside, other=0.0, cache_modifier=".cg")
        batch = plane // self.heads
        head = plane - batch * self.heads
        to = self.grad_query + batch * self.batch_step + head * self.head_step
        to += gl.expand_dims(row * self.row_step, 1) + gl.expand_dims(column, 0)
        gl.store(to, (total * self.scale).to(self.grad_query.dtype.element_ty), mask=inside)


@gluon.jit
def _produce(block, shared, early, query, key, value, grad_out, mask, lse, delta):
    at = [block.batch, block.kv_head, block.first_key, 0]
    mbarrier.expect(shared.loaded, key.block_type.nbytes + value.block_type.nbytes)
    tma.async_copy_global_to_shared(key, at, shared.loaded, shared.keys)
    tma.async_copy_global_to_shared(value, at, shared.loaded, shared.values)
    if block.FUSED:
        in_each_thread(_AWAIT_BEFORE)
    in_each_thread(_LET_BEGIN)
    STATISTICS: gl.constexpr = block.ROW_TILE * 4
    HALVES: gl.constexpr = block.ROW_TILE // ROWS
    terms = block.terms
    step = 0
    begin, end = block.span()
    key_plane = block.batch * (block.heads // block.group) + block.kv_head
    plane_early = gl.to_tensor(0)
    plane_end = plane_early
    row_early = plane_early
    row_end = plane_early
    if block.FUSED:
        blocks = gl.cdiv(block.keys, _KEYS)
        plane_early, plane_end = early.planes(key_plane, block.group, blocks)
    for member in range(block.group):
        head = block.kv_head * block.group + member
        plane = block.batch * block.heads + head
        tile = block.start(begin, end)
        for _ in range(end - begin):
            row = tile * block.ROW_TILE
            tile, _ = block.after(tile, begin, end)
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
            step += 1
            if block.FUSED:
                plane_early, row_early, row_end = early.step(
                    plane_early, plane_end, row_early, row_end
                )
    if block.FUSED:
        while row_early < row_end:
            plane_early, row_early, row_end = early.step(plane_early, plane_end, row_early, row_end)


@gluon.jit
def _add_to_query(shared, sums, product, coordinates, CONSUMER: gl.constexpr):
    """Add a tile to the sums of dQ, as soon as the staging memory has been read."""
    staging = shared.staging.index(CONSUMER)
    tma.store_wait(pendings=0)
    staging.reshape(product.shape).store(product)
    fence_async_shared()
    tma_reduce_add(sums, coordinates, staging)


@gluon.jit
def _first_scores(keys, queries, steps, ROW_TILE: gl.constexpr, FIRST: gl.constexpr):
    """Scores of 64 keys and of 64 rows of the first tile, if there is one."""
    D: gl.constexpr = keys.shape[1]
    if steps > 0:
        queries.wait(0)
    rows = queries.tile(0, [ROW_TILE, D]).slice(FIRST, ROWS, dim=0)
    return warpgroup_mma_wait(0, deps=[multiply(keys, rows)])


@gluon.jit
def _next_tile(queries, step, steps, SHAPE: gl.constexpr):
    """The tile after this one, once it has come; after the last itself, to no purpose."""
    following = gl.minimum(step + 1, steps - 1)
    queries.wait(following)
    return queries.tile(following, SHAPE)


@gluon.jit
def _consume_tiles(block, shared, sums, CONSUMER: gl.constexpr):
    """dK and dV of 64 keys: tiles of 64 rows, dQ split by columns."""
    D: gl.constexpr = shared.keys.shape[3]
    gl.static_assert(D == 128 or not block.FUSED)  # half of 64 columns is no tile of the sums
    HALF: gl.constexpr = D // 2
    # Scores of the next tile beside the sums of this one: with D 128 registers are too few.
    AHEAD: gl.constexpr = D == 64
    DTYPE: gl.constexpr = shared.keys.dtype
    ROW: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS))
    queries = shared.queries
    grads = shared.grads
    all_keys = shared.keys.reshape([_KEYS, D])
    keys = all_keys.slice(CONSUMER * ROWS, ROWS, dim=0)
    values = shared.values.reshape([_KEYS, D]).slice(CONSUMER * ROWS, ROWS, dim=0)
    first_key = block.first_key + CONSUMER * ROWS
    by_key = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    by_value = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    mbarrier.wait(shared.loaded, 0)
    begin, end = block.span()
    tile = block.start(begin, end)
    plane = block.batch * block.heads + block.kv_head * block.group
    steps = block.group * gl.maximum(end - begin, 0)
    if AHEAD:
        products = _first_scores(keys, queries, steps, ROWS, 0)
    for step in range(steps):
        row = tile * ROWS
        query = queries.tile(step, [ROWS, D])
        grad = grads.tile(step, [ROWS, D])
        if not AHEAD:
            queries.wait(step)
            products = multiply(keys, query)
        lse = shared.row_values(shared.lse, step, 0, ROW)
        grads.wait(step)
        if block.EMPTY_ROWS:
            shared.clear_empty_rows(grad, lse, 0)
        by_weight = multiply(values, grad)
        mask = block.mask_tile(shared.masks, step, first_key, row, plane, CONSUMER)
        if not AHEAD:
            products = warpgroup_mma_wait(1, deps=[products])
        block.release_mask(shared.masks, step)
        weights, sources = block.weights(products, mask, lse, first_key, row, plane)
        left = operand(weights.to(DTYPE), D)
        by_value = warpgroup_mma(left, grad, by_value, is_async=True)
        delta = shared.row_values(shared.delta, step, 0, ROW)
        by_weight = warpgroup_mma_wait(1, deps=[by_weight])
        by_score = block.by_score(sources, by_weight, delta).to(DTYPE)
        exchanged = shared.exchange.index(step % 2)
        if block.FUSED:
            exchanged.slice(CONSUMER * ROWS, ROWS, dim=0).store(by_score)
            fence_async_shared()
        by_value, left = warpgroup_mma_wait(0, deps=[by_value, left])
        grads.release(step)
        left = operand(by_score, D)
        if block.FUSED:
            in_each_thread(_BOTH_CONSUMERS)
            by_query = warpgroup_mma(
                exchanged.permute((1, 0)),
                all_keys.slice(CONSUMER * HALF, HALF, dim=1),
                gl.zeros([ROWS, HALF], gl.float32, product_layout(HALF)),
                use_acc=False,
                is_async=True,
            )
            by_key = warpgroup_mma(left, query, by_key, is_async=True)
            by_query = warpgroup_mma_wait(1, deps=[by_query])
            _add_to_query(shared, sums, by_query, [plane, row, CONSUMER * HALF], CONSUMER)
        else:
            by_key = warpgroup_mma(left, query, by_key, is_async=True)
        if AHEAD:
            products = multiply(keys, _next_tile(queries, step, steps, [ROWS, D]))
            by_key, left, products = warpgroup_mma_wait(0, deps=[by_key, left, products])
        else:
            by_key, left = warpgroup_mma_wait(0, deps=[by_key, left])
        queries.release(step)
        tile, over = block.after(tile, begin, end)
        if block.GROUPED:
            plane += over.to(gl.int32)
    return by_key, by_value


@gluon.jit
def _half_weights(
    block, shared, products, grad, by_value, step, row, plane,
    CONSUMER: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Weights of 64 of a tile's 128 rows; their product with grad_out is begun."""
    ROW: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS))
    first_key = block.first_key + CONSUMER * ROWS
    first_row = row + HALF * ROWS
    slot = step * 2 + HALF
    mask = block.mask_tile(shared.masks, slot, first_key, first_row, plane, CONSUMER)
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
    exchanged.slice(HALF * ROWS, ROWS, dim=1).store(by_score)
    left = operand(by_score, query.shape[1])
    return left, warpgroup_mma(left, query, by_key, is_async=True)


@gluon.jit
def _consume_halves(block, shared, sums, CONSUMER: gl.constexpr):
    """dK and dV of 64 keys: tiles of 128 rows in two halves, dQ split by rows.

    The next scores are begun before this dQ is stored, so that tensor cores do not wait.
    """
    gl.static_assert(block.FUSED)
    D: gl.constexpr = shared.keys.shape[3]
    # Philox, masks and a softcap take registers: then one half comes after the other.
    SPARING: gl.constexpr = block.terms.DROPOUT or block.terms.SOFTCAP or block.terms.MASK != 0
    ROW: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS))
    queries = shared.queries
    grads = shared.grads
    all_keys = shared.keys.reshape([_KEYS, D])
    keys = all_keys.slice(CONSUMER * ROWS, ROWS, dim=0)
    values = shared.values.reshape([_KEYS, D]).slice(CONSUMER * ROWS, ROWS, dim=0)
    by_key = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    by_value = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    mbarrier.wait(shared.loaded, 0)
    begin, end = block.span()
    tile = block.start(begin, end)
    plane = block.batch * block.heads + block.kv_head * block.group
    steps = block.group * gl.maximum(end - begin, 0)
    products_0 = _first_scores(keys, queries, steps, block.ROW_TILE, 0)
    if not SPARING:
        products_1 = _first_scores(keys, queries, steps, block.ROW_TILE, ROWS)
    for step in range(steps):
        row = tile * block.ROW_TILE
        query = queries.tile(step, [block.ROW_TILE, D])
        grad = grads.tile(step, [block.ROW_TILE, D])
        query_0 = query.slice(0, ROWS, dim=0)
        query_1 = query.slice(ROWS, ROWS, dim=0)
        grad_0 = grad.slice(0, ROWS, dim=0)
        grad_1 = grad.slice(ROWS, ROWS, dim=0)
        exchanged = shared.exchange.index(step % 2)
        own = exchanged.slice(CONSUMER * ROWS, ROWS, dim=0)
        grads.wait(step)
        if block.EMPTY_ROWS:
            shared.clear_empty_rows(grad, shared.row_values(shared.lse, step, 0, ROW), 0)
            shared.clear_empty_rows(grad, shared.row_values(shared.lse, step, ROWS, ROW), ROWS)
        by_weight_0 = multiply(values, grad_0)
        sources_0, p_0, by_value = _half_weights(
            block, shared, products_0, grad_0, by_value, step, row, plane,
            CONSUMER, 0,
        )  # fmt: skip
        if SPARING:
            by_weight_0 = warpgroup_mma_wait(1, deps=[by_weight_0])
            ds_0, by_key = _half_scores(
                block, shared, sources_0, by_weight_0, query_0, by_key, own, step, 0
            )
            products_1 = multiply(keys, query_1)
        # Only now: four products of 64x64 beside the sums would not fit into the registers.
        by_weight_1 = multiply(values, grad_1)
        if SPARING:
            products_1 = warpgroup_mma_wait(1, deps=[products_1])
        sources_1, p_1, by_value = _half_weights(
            block, shared, products_1, grad_1, by_value, step, row, plane,
            CONSUMER, 1,
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
        fence_async_shared()
        by_value, p_0, p_1 = warpgroup_mma_wait(1 if SPARING else 2, deps=[by_value, p_0, p_1])
        grads.release(step)
        in_each_thread(_BOTH_CONSUMERS)
        by_query = warpgroup_mma(
            exchanged.slice(CONSUMER * ROWS, ROWS, dim=1).permute((1, 0)),
            all_keys,
            gl.zeros([ROWS, D], gl.float32, product_layout(D)),
            use_acc=False,
            is_async=True,
        )
        by_key, ds_0, ds_1 = warpgroup_mma_wait(1, deps=[by_key, ds_0, ds_1])
        queries.release(step)
        following = _next_tile(queries, step, steps, [block.ROW_TILE, D])
        products_0 = multiply(keys, following.slice(0, ROWS, dim=0))
        if not SPARING:
            products_1 = multiply(keys, following.slice(ROWS, ROWS, dim=0))
        by_query = warpgroup_mma_wait(1 if SPARING else 2, deps=[by_query])
        _add_to_query(shared, sums, by_query, [plane, row + CONSUMER * ROWS, 0], CONSUMER)
        products_0 = warpgroup_mma_wait(0, deps=[products_0])
        if not SPARING:
            products_1 = warpgroup_mma_wait(0, deps=[products_1])
        tile, over = block.after(tile, begin, end)
        if block.GROUPED:
            plane += over.to(gl.int32)
    return by_key, by_value


@gluon.jit
def _leave(
    block, shared, by_key, by_value, grad_key, grad_value, grad_scale, CONSUMER: gl.constexpr
):
    """Store the gradients of the block, through the memory of its keys and values."""
    D: gl.constexpr = shared.keys.shape[3]
    DTYPE: gl.constexpr = shared.keys.dtype
    in_each_thread(_BOTH_CONSUMERS)  # nobody reads these any more
    keys = shared.keys.reshape([_KEYS, D]).slice(CONSUMER * ROWS, ROWS, dim=0)
    values = shared.values.reshape([_KEYS, D]).slice(CONSUMER * ROWS, ROWS, dim=0)
    keys.store((by_key * grad_scale).to(DTYPE))
    values.store(by_value.to(DTYPE))
    fence_async_shared()
    in_each_thread(_BOTH_CONSUMERS)
    at = [block.batch, block.kv_head, block.first_key, 0]
    if CONSUMER == 0:
        tma.async_copy_shared_to_global(grad_key, at, shared.keys)
        if block.FUSED:
            # Of a block without rows perhaps before this is cleared: then dQ is left for later.
            finished = block.share.number(_FINISHED).to(gl.pointer_type(gl.int32), bitcast=True)
            gl.atomic_add(finished, 1, sem="release")
    else:
        tma.async_copy_shared_to_global(grad_value, at, shared.values)
    tma.store_wait(pendings=0)


@gluon.jit
def _consume(block, shared, sums, grad_key, grad_value, grad_scale, CONSUMER: gl.constexpr):
    if block.ROW_TILE == ROWS:
        by_key, by_value = _consume_tiles(block, shared, sums, CONSUMER)
    else:
        by_key, by_value = _consume_halves(block, shared, sums, CONSUMER)
    if block.terms.DROPOUT:
        by_value = by_value * block.terms.keep_scale
    if block.FUSED:
        in_each_thread(_ADDED)
    if block.share.SHARED:
        last = gl.to_tensor(True)
        if block.share.number(_PARTS) > 1:
            by_key, by_value, last = block.share.joined(by_key, by_value, CONSUMER)
        if last:
            _leave(block, shared, by_key, by_value, grad_key, grad_value, grad_scale, CONSUMER)
    else:
        _leave(block, shared, by_key, by_value, grad_key, grad_value, grad_scale, CONSUMER)


@gluon.jit
def make_share(unshared, parts, fewer, sums, tiles, D: gl.constexpr, SHARED: gl.constexpr):
    """The block of this program and its share of it: blocks from `unshared` on have `parts` each,
    those after `fewer` of them one more.

    The sums of a block, [2, 128, D] and 0 at first, are followed by a counter.
    """
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int64, [4, 1], LAYOUT)
    block = gl.program_id(0)
    share = Share(gl.to_tensor(0), tiles, numbers, SHARED)
    if SHARED:
        beyond = gl.maximum(block - unshared, 0)
        begin = gl.to_tensor(0)
        end = tiles
        count = gl.to_tensor(1)
        index = gl.to_tensor(0)  # among the blocks that are shared
        if block >= unshared:
            count = parts
            if beyond >= fewer * parts:
                beyond -= fewer * parts
                index = gl.to_tensor(0) + fewer
                count = parts + 1
            index += beyond // count
            # A number of tiles times one of processors may need more than 32 bits.
            part = (beyond % count).to(gl.int64)
            begin = (tiles * part // count).to(gl.int32)
            end = (tiles * (part + 1) // count).to(gl.int32)
            block = unshared + index
        share = Share(begin, end, numbers, SHARED)
        sums += index * (2 * _KEYS * D + _COUNTER)
        share.tell(_SUMS, sums.to(gl.int64, bitcast=True))
        share.tell(_PARTS, count)
    return block, share


@gluon.jit
def backward_kernel(
    query, key, value, grad_out, lse, delta, grad_key, grad_value, sums, spare, padded_rows,
    shared_sums, unshared, parts, fewer,
    sums_start, grad_query, grad_batch, grad_head, grad_row, finished, taken, lag, head_dim,
    rows, key_count, heads, group, planes, cohort, low, high,
    factor, cap, mask, mask_batch, mask_head, mask_row, seed, threshold, keep_scale, grad_scale,
    ROW_TILE: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, TAIL: gl.constexpr, GROUPED: gl.constexpr,
    EMPTY_ROWS: gl.constexpr, FUSED: gl.constexpr, SHARED: gl.constexpr, ROTATED: gl.constexpr,
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
    blocks = gl.cdiv(key_count, _KEYS)
    # In a cohort of planes the first blocks come first: under a causal band they are the longest.
    tiles = gl.cdiv(rows, ROW_TILE)
    position, share = make_share(unshared, parts, fewer, shared_sums, tiles, D, SHARED)
    cohort_blocks = cohort * blocks
    first_plane = (position // cohort_blocks) * cohort
    members = gl.minimum(cohort, planes - first_plane)
    inside = position % cohort_blocks
    plane = first_plane + inside % members
    kv_heads = heads // group
    first_key = (inside // members) * _KEYS
    block = Block(
        rows, key_count, heads, group, low, high,
        plane // kv_heads, plane % kv_heads, first_key, spare, padded_rows, terms, share,
        ROW_TILE, LOW, HIGH, TAIL, GROUPED, EMPTY_ROWS, FUSED, ROTATED,
    )  # fmt: skip
    early = Early(
        sums_start, grad_query, grad_batch, grad_head, grad_row, finished, taken, lag,
        rows, heads, head_dim, grad_scale, D,
    )  # fmt: skip
    if FUSED:
        share.tell(_FINISHED, (finished + plane).to(gl.int64, bitcast=True))
    SCORES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    queries = make_ring(
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, ROW_TILE, D], query.layout), STAGES, 2
    )
    masks = queries
    if MASK_TILES:
        masks = make_ring(
            gl.allocate_shared_memory(DTYPE, [_MASK_STAGES, 1, 1, ROWS, _KEYS], mask.layout),
            _MASK_STAGES,
            2,
        )
    shared = Shared(
        queries,
        make_ring(
            gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, ROW_TILE, D], grad_out.layout),
            STAGES,
            2,
        ),
        masks,
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROW_TILE], lse.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROW_TILE], delta.layout),
        gl.allocate_shared_memory(DTYPE, [1, 1, _KEYS, D], key.layout),
        gl.allocate_shared_memory(DTYPE, [1, 1, _KEYS, D], value.layout),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(DTYPE, [2, _KEYS, ROW_TILE], SCORES),
        gl.allocate_shared_memory(gl.float32, [2, 1, ROWS, 64], sums.layout),
    )
    mbarrier.init(shared.loaded, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_produce, (block, shared, early, query, key, value, grad_out, mask, lse, delta)),
            (_consume, (block, shared, sums, grad_key, grad_value, grad_scale, 0)),
            (_consume, (block, shared, sums, grad_key, grad_value, grad_scale, 1)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
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
    in_each_thread(_AWAIT_BEFORE)


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
    if HALF == 0:
        shared.keys.wait(step)
    products = multiply(query, shared.keys.tile(step, SHAPE).slice(HALF * ROWS, ROWS, dim=0))
    if HALF == 0:
        shared.values.wait(step)
    values = shared.values.tile(step, SHAPE).slice(HALF * ROWS, ROWS, dim=0)
    return products, multiply(grad, values)


@gluon.jit
def _consume_rows(
    schedule, terms, shared, statistics, grad_query, grad_scale, CONSUMER: gl.constexpr
):
    """dQ of 64 rows: tiles of 128 keys in two halves, from right to left."""
    work = schedule.work
    D: gl.constexpr = grad_query.block_shape[3]
    DTYPE: gl.constexpr = grad_query.dtype
    SCORES: gl.constexpr = product_layout(ROWS)
    # Three consumers have no registers for more than a half, and hide each other's waits. Two begin
    # a half while they work on the one before, be it of another tile.
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
        if not SPARING:
            products_0, by_weight_0 = warpgroup_mma_wait(
                0, deps=_begin_half(work, shared, query, grad, step, 0)
            )
        for index in range(end - begin):
            tile = end - 1 - index
            first_key = tile * work.TILE
            clipped = False
            if work.LOW or work.HIGH or work.TAIL:
                clipped = (tile < whole_begin) | (tile >= whole_end)
            key_0 = keys.tile(step, [work.TILE, D]).slice(0, ROWS, dim=0)
            key_1 = keys.tile(step, [work.TILE, D]).slice(ROWS, ROWS, dim=0)
            mask = terms.mask_tile(work, batch, head, first_row, first_key, ROWS, SCORES)
            if SPARING:
                products_0, by_weight_0 = warpgroup_mma_wait(
                    0, deps=_begin_half(work, shared, query, grad, step, 0)
                )
            else:
                products_1, by_weight_1 = _begin_half(work, shared, query, grad, step, 1)
            ds_0 = _by_score(
                work, terms, products_0, by_weight_0, mask, lse, spare, delta, plane,
                (first_row, first_key), clipped,
            )  # fmt: skip
            left_0 = operand(ds_0.to(DTYPE), D)
            by_query = warpgroup_mma(left_0, key_0, by_query, is_async=True)
            if SPARING:
                products_1, by_weight_1 = _begin_half(work, shared, query, grad, step, 1)
            mask = terms.mask_tile(work, batch, head, first_row, first_key + ROWS, ROWS, SCORES)
            products_1, by_weight_1 = warpgroup_mma_wait(
                0 if SPARING else 1, deps=[products_1, by_weight_1]
            )
            if SPARING:
                values.release(step)
            ds_1 = _by_score(
                work, terms, products_1, by_weight_1, mask, lse, spare, delta, plane,
                (first_row, first_key + ROWS), clipped,
            )  # fmt: skip
            left_1 = operand(ds_1.to(DTYPE), D)
            by_query = warpgroup_mma(left_1, key_1, by_query, is_async=True)
            if SPARING:
                by_query, left_0, left_1 = warpgroup_mma_wait(0, deps=[by_query, left_0, left_1])
            else:
                # After the last tile itself, to no purpose.
                following = gl.minimum(step + 1, step + end - 1 - begin - index)
                products_0, by_weight_0 = _begin_half(work, shared, query, grad, following, 0)
                by_query, left_0, left_1, products_0, by_weight_0 = warpgroup_mma_wait(
                    0, deps=[by_query, left_0, left_1, products_0, by_weight_0]
                )
                values.release(step)
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
        CONSUMERS, _KEYS, LOW, HIGH, TAIL,
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
            gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, _KEYS, D], key.layout),
            STAGES,
            CONSUMERS,
        ),
        make_ring(
            gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, _KEYS, D], value.layout),
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
