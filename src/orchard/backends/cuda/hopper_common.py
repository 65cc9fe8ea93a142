"""What the Hopper kernels share: rings of shared memory, barriers, products, and bands."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma
from triton.language.core import _aggregate as aggregate

ROWS = gl.constexpr(64)  # rows of a warpgroup, given by wgmma
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
NUMBER = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # of a tensor with one element


@builtin
def tma_reduce_add(descriptor, coordinates, source, _semantic=None):
    """Add a tile of shared memory to global memory; triton 3.6 has only the binding of it."""
    values = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, values, source.handle)


@gluon.jit
def in_each_thread(ASSEMBLY: gl.constexpr):
    """Assembly that every thread of a warpgroup executes once: barriers, and waits of its own."""
    threads = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        ASSEMBLY + " mov.b32 $0, $1;", "=r,r", [threads], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def product_layout(columns):
    """Where wgmma leaves a product of 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def multiply(left, right):
    """Begin left times right^T, both in shared memory."""
    COLUMNS: gl.constexpr = right.shape[0]
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
    return warpgroup_mma(left, right.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def operand(values, D: gl.constexpr):
    """A tensor as the left operand of a product with D columns: in registers, where it is."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(D), k_width=2)
    return gl.convert_layout(values, LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def _axis(layout, axis, rank):
    """The layout of one axis: the others are sliced away, the last first."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def axis_index(AXIS: gl.constexpr, RANK: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """0, 1, ... along an axis."""
    index = gl.arange(0, SIZE, layout=_axis(LAYOUT, AXIS, RANK))
    for other in gl.static_range(RANK):
        if other != AXIS:
            index = gl.expand_dims(index, other)
    return index


@gluon.constexpr_function
def _parts_layout(columns):
    """A product of 64 rows as [64, columns / 8, 4, 2]: lanes are in the third axis alone."""
    eights = [[0, 1 << bit, 0, 0] for bit in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [[16, 0, 0, 0], [32, 0, 0, 0]]
    registers = [[0, 0, 0, 1], [8, 0, 0, 0], *eights]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, columns // 8, 4, 2])


@gluon.constexpr_function
def lane_layout(columns):
    """Of a number for each row and each lane of its quad, [64, 4], beside such a product."""
    return gl.SliceLayout(1, gl.SliceLayout(3, _parts_layout(columns)))


@gluon.jit
def _parts(values):
    """A product of 64 rows as [64, columns / 8, 4, 2], where it is."""
    COLUMNS: gl.constexpr = values.shape[1]
    parts = gl.reshape(values, [ROWS, COLUMNS // 8, 4, 2])
    return gl.convert_layout(parts, _parts_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def _fours(values):
    """[64, n, 4] as [64, n / 4, 4, 4]."""
    return gl.reshape(values, [ROWS, values.shape[1] // 4, 4, 4])


@gluon.jit
def lane_sums(values, TREE: gl.constexpr):
    """Of a product's rows what each lane has of them summed, [64, 4]: nothing is exchanged.

    A tree has fewer steps that wait for one another.
    """
    sums = gl.sum(_parts(values), axis=3)
    if TREE:
        sums = gl.sum(_fours(sums), axis=2)
    sums = gl.sum(sums, axis=1)
    return gl.convert_layout(sums, lane_layout(values.shape[1]), assert_trivial=True)


@gluon.jit
def row_max(values, TREE: gl.constexpr):
    """The highest of each row of a product."""
    if TREE:
        highest = gl.max(_fours(gl.max(_parts(values), axis=3)), axis=2)
        highest = gl.max(gl.max(highest, axis=1), axis=1)
        ROW: gl.constexpr = gl.SliceLayout(1, values.type.layout)
        result = gl.convert_layout(highest, ROW, assert_trivial=True)
    else:
        result = gl.max(values, axis=1)
    return result


@gluon.jit
def for_lanes(values, COLUMNS: gl.constexpr):
    """A number of each row, [64], for all lanes of its quad: [64, 1]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, lane_layout(COLUMNS))
    return gl.expand_dims(gl.convert_layout(values, LAYOUT, assert_trivial=True), 1)


@gluon.jit
def over_lanes(sums, ROW: gl.constexpr):
    """What the lanes of a quad have summed, together: [64]."""
    return gl.convert_layout(gl.sum(sums, axis=1), ROW, assert_trivial=True)


@gluon.jit
def _before_lanes(bounds, LAYOUT: gl.constexpr):
    """Bounds of columns by row, [64], less the part of a column that depends on the lane."""
    bounds = gl.convert_layout(bounds, _axis(LAYOUT, 0, 4), assert_trivial=True)
    for axis in gl.static_range(1, 4):
        bounds = gl.expand_dims(bounds, axis)
    return bounds - 2 * axis_index(2, 4, 4, LAYOUT)


@gluon.jit
def within(first, last, COLUMNS: gl.constexpr, HAS_FIRST: gl.constexpr, HAS_LAST: gl.constexpr):
    """Where first <= column <= last in a product of 64 rows.

    In each register a constant is compared: column numbers would be kept through a whole loop.
    """
    PARTS: gl.constexpr = _parts_layout(COLUMNS)
    column = axis_index(1, 4, COLUMNS // 8, PARTS) * 8 + axis_index(3, 4, 2, PARTS)
    if HAS_FIRST and HAS_LAST:
        result = (column >= _before_lanes(first, PARTS)) & (column <= _before_lanes(last, PARTS))
    elif HAS_FIRST:
        result = column >= _before_lanes(first, PARTS)
    else:
        result = column <= _before_lanes(last, PARTS)
    result = gl.reshape(result, [ROWS, COLUMNS])
    return gl.convert_layout(result, product_layout(COLUMNS), assert_trivial=True)


@aggregate
class Ring:
    """Stages of shared memory that a producer fills and consumers give back."""

    buffers: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, ready, free, STAGES):
        self.buffers = buffers
        self.ready = ready
        self.free = free
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def wait_free(self, step):
        """Producer: wait until a stage is free."""
        mbarrier.wait(self.free.index(step % self.STAGES), ((step // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def fill(self, step):
        """Producer: this warpgroup has written the stage."""
        mbarrier.arrive(self.ready.index(step % self.STAGES), count=1)

    @gluon.jit
    def acquire(self, step, BYTES: gl.constexpr):
        """Producer: wait until a stage is free and announce what will arrive in it."""
        self.wait_free(step)
        mbarrier.expect(self.ready.index(step % self.STAGES), BYTES)

    @gluon.jit
    def load(self, step, descriptor, coordinates):
        """Producer: wait for a free stage and fill it with one tile."""
        self.acquire(step, descriptor.block_type.nbytes)
        stage = step % self.STAGES
        tma.async_copy_global_to_shared(
            descriptor, coordinates, self.ready.index(stage), self.buffers.index(stage)
        )

    @gluon.jit
    def wait(self, step):
        """Consumer: wait until a stage is filled."""
        mbarrier.wait(self.ready.index(step % self.STAGES), (step // self.STAGES) & 1)

    @gluon.jit
    def tile(self, step, SHAPE: gl.constexpr):
        return self.buffers.index(step % self.STAGES).reshape(SHAPE)

    @gluon.jit
    def release(self, step):
        """Consumer: this warpgroup has read the stage."""
        mbarrier.arrive(self.free.index(step % self.STAGES), count=1)


@gluon.jit
def make_ring(buffers, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring around these buffers, its barriers initialised."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    return Ring(buffers, ready, free, STAGES)


@aggregate
class Work:
    """Tiles of query rows, dealt out to programs, and the tiles of keys that they see."""

    rows: gl.tensor
    keys: gl.tensor
    heads: gl.tensor
    group: gl.tensor  # query heads of a key head
    planes: gl.tensor  # batch entries times heads
    cohort: gl.tensor  # planes that are worked on side by side
    low: gl.tensor
    high: gl.tensor
    CONSUMERS: gl.constexpr
    TILE: gl.constexpr  # keys of a tile
    LOW: gl.constexpr  # whether the band has a lower bound
    HIGH: gl.constexpr
    TAIL: gl.constexpr  # whether the last tile of keys is not whole

    @gluon.constexpr_function
    def __init__(
        self, rows, keys, heads, group, planes, cohort, low, high, CONSUMERS, TILE, LOW, HIGH, TAIL
    ):
        self.rows = rows
        self.keys = keys
        self.heads = heads
        self.group = group
        self.planes = planes
        self.cohort = cohort
        self.low = low
        self.high = high
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.TILE = gl.constexpr(TILE)
        self.LOW = gl.constexpr(LOW)
        self.HIGH = gl.constexpr(HIGH)
        self.TAIL = gl.constexpr(TAIL)

    @gluon.jit
    def row_tiles(self):
        return gl.cdiv(self.rows, ROWS * self.CONSUMERS)

    @gluon.jit
    def tiles(self):
        return self.row_tiles() * self.planes

    @gluon.jit
    def position(self, turn):
        """Which tile this program takes: dealt out to and fro, so that sums of lengths are even."""
        programs = gl.num_programs(0)
        program = gl.program_id(0)
        return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)

    @gluon.jit
    def place(self, position):
        """First row, batch entry and head of a tile; in a cohort the longest tiles come first."""
        row_tiles = self.row_tiles()
        cohort_tiles = self.cohort * row_tiles
        first_plane = (position // cohort_tiles) * self.cohort
        members = gl.minimum(self.cohort, self.planes - first_plane)
        inside = position % cohort_tiles
        row_tile = row_tiles - 1 - inside // members
        plane = first_plane + inside % members
        first_row = row_tile * (ROWS * self.CONSUMERS)
        return first_row, plane // self.heads, plane % self.heads

    @gluon.jit
    def begin(self, first_row):
        """First tile of keys that rows from `first_row` on see."""
        tile = gl.to_tensor(0)
        if self.LOW:
            tile = gl.maximum(first_row + self.low, 0) // self.TILE
        return gl.minimum(tile, gl.cdiv(self.keys, self.TILE) - 1)

    @gluon.jit
    def end(self, last_row, begin):
        """Past the last tile of keys that rows up to `last_row` see; at least one tile."""
        tile = gl.cdiv(self.keys, self.TILE)
        if self.HIGH:
            seen = gl.maximum(gl.minimum(last_row + self.high + 1, self.keys), 0)
            tile = gl.maximum(gl.cdiv(seen, self.TILE), begin + 1)
        return tile

    @gluon.jit
    def span(self, tile_row):
        """The tiles of keys that a tile of rows sees: [begin, end)."""
        begin = self.begin(tile_row)
        last_row = gl.minimum(tile_row + ROWS * self.CONSUMERS, self.rows) - 1
        return begin, self.end(last_row, begin)

    @gluon.jit
    def whole(self, first_row, begin, end):
        """Which of the tiles [begin, end) 64 rows see whole: a range of them."""
        whole_end = self.keys // self.TILE
        if self.HIGH:
            seen = gl.maximum(gl.minimum(first_row + self.high + 1, self.keys), 0)
            whole_end = seen // self.TILE
        whole_begin = begin
        if self.LOW:
            unseen = gl.maximum(first_row + (ROWS - 1) + self.low, 0)
            whole_begin = gl.maximum(gl.cdiv(unseen, self.TILE), begin)
        whole_end = gl.minimum(gl.maximum(whole_end, begin), end)
        return gl.minimum(whole_begin, whole_end), whole_end

    @gluon.jit
    def own_span(self, first_row):
        """The tiles of keys that 64 rows see: [begin, end), and those that they see whole."""
        begin = self.begin(first_row)
        end = self.end(gl.minimum(first_row + ROWS, self.rows) - 1, begin)
        whole_begin, whole_end = self.whole(first_row, begin, end)
        return begin, end, whole_begin, whole_end

    @gluon.jit
    def seen(self, first_row, first_key, COLUMNS: gl.constexpr):
        """Which of 64 rows sees which of the keys from `first_key` on, as a product lies."""
        ROW: gl.constexpr = gl.SliceLayout(1, product_layout(COLUMNS))
        row = first_row + gl.arange(0, ROWS, layout=ROW)
        last = row * 0 + (self.keys - 1)
        if self.HIGH:
            last = gl.minimum(row + self.high, self.keys - 1)
        first = row + self.low - first_key
        return within(first, last - first_key, COLUMNS, self.LOW, True)

    @gluon.jit
    def load_keys(self, key, value, keys, values, step, batch, head, tile):
        """Producer: a tile of keys and one of values."""
        at = [batch, head // self.group, tile * self.TILE, 0]
        keys.load(step, key, at)
        values.load(step, value, at)


@aggregate
class Schedule:
    """Which tile comes next: the producer finds it, the consumers are told."""

    work: Work
    told: Ring  # of one number
    counter: gl.tensor  # tiles taken by all programs; 0 at first
    DYNAMIC: gl.constexpr  # whether a program takes a tile when it is ready for one

    @gluon.constexpr_function
    def __init__(self, work, told, counter, DYNAMIC):
        self.work = work
        self.told = told
        self.counter = counter
        self.DYNAMIC = gl.constexpr(DYNAMIC)

    @gluon.jit
    def following(self, turn):
        """Producer: the tile of the turn after this one; past the last where there is none."""
        if self.DYNAMIC:
            position = gl.atomic_add(self.counter, 1, sem="relaxed") + gl.num_programs(0)
        else:
            position = self.work.position(turn + 1)
        return position

    @gluon.jit
    def tell(self, turn, position):
        """Producer: tell the consumers."""
        self.told.wait_free(turn)
        number = gl.full([1], 0, gl.int32, NUMBER) + position
        self.told.buffers.index(turn % self.told.STAGES).store(number)
        self.told.fill(turn)

    @gluon.jit
    def hear(self, turn):
        """Consumer: the tile of this turn."""
        self.told.wait(turn)
        position = gl.max(self.told.buffers.index(turn % self.told.STAGES).load(NUMBER), axis=0)
        self.told.release(turn)
        return position


@gluon.jit
def make_schedule(work, counter, DYNAMIC: gl.constexpr):
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], LAYOUT)
    return Schedule(work, make_ring(numbers, 2, work.CONSUMERS), counter, DYNAMIC)
