"""What shapes a score beside the product: softcap, a mask, dropout."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from orchard.backends.cuda.general_backward import LSE_LIMIT
from orchard.backends.cuda.hopper_common import LOG2_E, ROWS, axis_index

NONE = gl.constexpr(0)  # kinds of masks
BOOL = gl.constexpr(1)
ADDITIVE = gl.constexpr(2)

_LARGE_LSE = gl.constexpr(LSE_LIMIT.value / 2)  # the highest score of such a row may be smaller

_DECLARE = """
.reg .u32 a, b, c, d, low0, high0, low1, high1, key0, key1, lane, sent, even, odd;
.reg .u64 wide;
.reg .pred bit;
mov.u32 a, $4; mov.u32 b, $5; mov.u32 c, $6; mov.u32 d, 0; mov.u32 key0, $7; mov.u32 key1, $8;
"""
_ROUND = """
mul.wide.u32 wide, a, 0xD2511F53; mov.b64 {low0, high0}, wide;
mul.wide.u32 wide, c, 0xCD9E8D57; mov.b64 {low1, high1}, wide;
xor.b32 a, high1, b; xor.b32 a, a, key0; mov.u32 b, low1;
xor.b32 c, high0, d; xor.b32 c, c, key1; mov.u32 d, low0;
add.u32 key0, key0, 0x9E3779B9; add.u32 key1, key1, 0xBB67AE85;
"""
_RESULT = "mov.u32 $0, a; mov.u32 $1, b; mov.u32 $2, c; mov.u32 $3, d;"


def _test(bit: int) -> str:
    """Set the predicate from a bit of the lane."""
    return f"mov.u32 lane, %laneid; and.b32 lane, lane, {bit}; setp.ne.u32 bit, lane, 0;"


def _swap(first: str, second: str, distance: int) -> str:
    """Transpose 2x2 words among lanes `distance` apart: the lower keeps `first`."""
    return f"""
selp.b32 sent, {first}, {second}, bit; shfl.sync.bfly.b32 sent, sent, {distance}, 31, -1;
selp.b32 {first}, sent, {first}, bit; selp.b32 {second}, {second}, sent, bit;
"""


def _swap_halves(first: str, second: str, distance: int) -> str:
    """Transpose 2x2 halves of each of two words among lanes `distance` apart."""
    return f"""
selp.b32 even, 0x5410, 0x7632, bit; prmt.b32 sent, {first}, {second}, even;
shfl.sync.bfly.b32 sent, sent, {distance}, 31, -1;
selp.b32 even, 0x3254, 0x5410, bit; prmt.b32 {first}, {first}, sent, even;
selp.b32 odd, 0x3276, 0x7610, bit; prmt.b32 {second}, {second}, sent, odd;
"""


_QUAD = _test(1) + _swap("a", "b", 1) + _swap("c", "d", 1)
_QUAD += _test(2) + _swap("a", "c", 2) + _swap("b", "d", 2)
_OCTET = _test(4) + _swap_halves("a", "b", 4) + _swap_halves("c", "d", 4)
_OCTET += _test(8) + _swap("a", "b", 8) + _swap("c", "d", 8)
_OCTET += _test(16) + _swap("a", "c", 16) + _swap("b", "d", 16)
# Philox4x32-10 of (group of 8 keys, row, plane, 0), then an exchange among the lanes that share
# these keys: four calls of a quad that has them side by side, eight of lanes that have one each.
_BY_ROW = gl.constexpr("{" + _DECLARE + 10 * _ROUND + _QUAD + _RESULT + "}")
_BY_KEY = gl.constexpr("{" + _DECLARE + 10 * _ROUND + _OCTET + _RESULT + "}")
_OPERANDS = gl.constexpr("=r,=r,=r,=r,r,r,r,r,r")
# Compared and selected in one piece: apart, LLVM selects rounded halves, with moves around them.
_KEEP = gl.constexpr("""{ .reg .pred kept; setp.ge.u32 kept, $2, $3;
selp.f32 $0, $1, 0f00000000, kept; }""")
_SIGN = gl.constexpr("""{ .reg .pred kept; .reg .f32 negative; setp.ge.u32 kept, $2, $3;
neg.f32 negative, $1; selp.f32 $0, $1, negative, kept; }""")
# Triton's abs is an instruction of its own, this one a part of the product.
_LESS = gl.constexpr("""{ .reg .f32 kept, all; max.NaN.f32 kept, $1, 0f00000000;
abs.f32 all, $1; mul.f32 all, all, $3; neg.f32 all, all; fma.rn.f32 $0, kept, $2, all; }""")
_POSITIVE = gl.constexpr("max.NaN.f32 $0, $1, 0f00000000;")
_WORDS = gl.constexpr((gl.uint32, gl.uint32, gl.uint32, gl.uint32))


@gluon.constexpr_function
def _row_calls(keys):
    """[64 rows, keys / 32, 4]: a call of 8 keys to each lane of a quad."""
    registers = [[8, 0, 0], [0, 1, 0]] + ([[0, 2, 0]] if keys == 128 else [])
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, keys // 32, 4])


@gluon.constexpr_function
def _key_calls():
    """[8 groups of keys, 2, 4, 4, 2]: 64 rows as 32, 8, 2 and 1."""
    registers = [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0]]
    warps = [[2, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [8, 2, 4, 4, 2])


@gluon.jit
def _joined(words):
    """Four tensors as one with two more axes."""
    w0, w1, w2, w3 = words
    return gl.join(gl.join(w0, w2), gl.join(w1, w3))


@aggregate
class Terms:
    """The numbers that softcap, mask and dropout need, and which of them there are.

    Scores are in units of log 2. Not so where a mask is added: the lowest number of fp32 is a
    usual mask, and times log2(e) it would be infinite.
    """

    factor: gl.tensor  # of a product: to its score, or to 2 log2(e) times what tanh is taken of
    cap: gl.tensor
    mask: gl.tensor  # nothing to be read where its tiles come by TMA
    mask_batch: gl.tensor  # strides, in elements
    mask_head: gl.tensor
    mask_row: gl.tensor
    philox_0: gl.tensor  # the key of the dropout bits
    philox_1: gl.tensor
    threshold: gl.tensor  # in the upper half of a word
    keep_scale: gl.tensor
    SOFTCAP: gl.constexpr
    MASK: gl.constexpr
    MASK_KEYS: gl.constexpr  # whether the mask has an element for each key
    MASK_TILES: gl.constexpr  # whether its tiles come by TMA
    DROPOUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, factor, cap, mask, mask_batch, mask_head, mask_row,
        philox_0, philox_1, threshold, keep_scale,
        SOFTCAP, MASK, MASK_KEYS, MASK_TILES, DROPOUT,
    ):  # fmt: skip
        self.factor = factor
        self.cap = cap
        self.mask = mask
        self.mask_batch = mask_batch
        self.mask_head = mask_head
        self.mask_row = mask_row
        self.philox_0 = philox_0
        self.philox_1 = philox_1
        self.threshold = threshold
        self.keep_scale = keep_scale
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.MASK = gl.constexpr(MASK)
        self.MASK_KEYS = gl.constexpr(MASK_KEYS)
        self.MASK_TILES = gl.constexpr(MASK_TILES)
        self.DROPOUT = gl.constexpr(DROPOUT)

    @gluon.jit
    def is_late(self):
        """Whether scores stay products until they are exponents."""
        return not self.SOFTCAP and self.MASK != ADDITIVE

    @gluon.jit
    def mask_tile(
        self, work, batch, head, first_row, first_key, KEYS: gl.constexpr, LAYOUT: gl.constexpr
    ):
        """[64 rows, KEYS] of the mask; the last row stands for those past it."""
        tile = gl.to_tensor(0)
        if self.MASK != NONE:
            row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
            at = self._mask_rows(batch, head, gl.minimum(row, work.rows - 1), 1)
            if self.MASK_KEYS:
                # 64-bit from the start: then they are constant offsets of a load.
                keys = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT)).to(gl.int64)
                key = gl.expand_dims(keys, 0)
                at += first_key
                if first_key + KEYS > work.keys:
                    found = gl.load(at + key, mask=key < work.keys - first_key, other=0)
                else:
                    found = gl.load(at + key)
                tile = found
            else:
                tile = gl.load(at)
        return tile

    @gluon.jit
    def mask_place(self, batch, head, row, key):
        """Where a tile that comes by TMA begins. An axis of stride 0 is one of size 1 to TMA."""
        batch = gl.where(self.mask_batch == 0, 0, batch)
        return [batch, gl.where(self.mask_head == 0, 0, head), row, key]

    @gluon.jit
    def mask_tile_by_key(self, block, batch, head, first_key, first_row, LAYOUT: gl.constexpr):
        """[64 keys, 64 rows] of the mask; the last key and row stand for those past them."""
        tile = gl.to_tensor(0)
        if self.MASK != NONE:
            row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
            at = self._mask_rows(batch, head, gl.minimum(row, block.rows - 1), 0)
            if self.MASK_KEYS:
                key = first_key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
                at = at + gl.expand_dims(gl.minimum(key, block.keys - 1), 1)
            tile = gl.load(at)
        return tile

    @gluon.jit
    def _mask_rows(self, batch, head, row, AXIS: gl.constexpr):
        """Where rows of the mask begin."""
        at = self.mask + batch.to(gl.int64) * self.mask_batch + head.to(gl.int64) * self.mask_head
        return gl.expand_dims(at + row.to(gl.int64) * self.mask_row, AXIS)

    @gluon.jit
    def capped(self, products):
        """cap tanh(scale product / cap), as cap - 2 cap / (1 + e^2x)."""
        return self.cap - (2.0 * self.cap) / (1.0 + gl.exp2(products * self.factor))

    @gluon.jit
    def slope(self, scores):
        """Derivative of the softcap, from capped scores in units of log 2."""
        part = scores / self.cap
        return 1.0 - part * part

    @gluon.jit
    def score(self, products, mask_tile):
        """Scores, unless they are late; -inf where a bool mask is False."""
        scores = products
        if self.SOFTCAP:
            scores = self.capped(products)
        if self.MASK == ADDITIVE:
            if not self.SOFTCAP:
                scores = scores * self.factor
            scores = scores + mask_tile.to(gl.float32)
        if self.MASK == BOOL:
            scores = gl.where(mask_tile != 0, scores, float("-inf"))
        return scores

    @gluon.jit
    def power(self, scores, origin):
        """e to the score, relative to that of `origin`, which is in units of scores."""
        if self.is_late():
            result = gl.exp2(scores * self.factor - origin)
        else:
            result = gl.exp2(scores - origin)
        return result

    @gluon.jit
    def probability(self, scores, lse, spare, AXIS: gl.constexpr):
        """Of a backward, whose rows lie along the other axis than `AXIS`.

        With an added mask a large lse has become two numbers: the highest score, and at `spare` the
        logarithm to base 2 of the sum of what is relative to it.
        """
        LAYOUT: gl.constexpr = lse.type.layout
        origin = gl.expand_dims(lse, AXIS)
        if self.MASK == ADDITIVE:
            exponents = (scores - origin) * LOG2_E
            large = gl.where(lse == float("inf"), 0.0, gl.abs(lse))
            if gl.max(large, axis=0) > _LARGE_LSE:
                found = gl.load(spare + gl.arange(0, ROWS, layout=LAYOUT))
                exponents = exponents - gl.expand_dims(found, AXIS)
            result = gl.exp2(exponents)
        else:
            result = self.power(scores, origin)
        return result

    @gluon.jit
    def bits_by_row(self, like, plane, first_row, first_key):
        """Of [64 rows, keys], in the layout of `like`: words whose upper half dropout looks at."""
        KEYS: gl.constexpr = like.shape[1]
        CALLS: gl.constexpr = _row_calls(KEYS)
        row = first_row + axis_index(0, 3, 64, CALLS)
        group = axis_index(1, 3, KEYS // 32, CALLS) * 4 + axis_index(2, 3, 4, CALLS)
        group = group + first_key // 8
        words = gl.inline_asm_elementwise(
            _BY_ROW,
            _OPERANDS,
            [group, row, plane, self.philox_0, self.philox_1],
            dtype=_WORDS,
            is_pure=True,
            pack=1,
        )
        words = gl.permute(gl.reshape(_joined(words), [64, KEYS // 32, 4, 4]), (0, 1, 3, 2))
        return _laid_out(gl.reshape(gl.join(words << 16, words), [64, KEYS]), like)

    @gluon.jit
    def bits_by_key(self, like, plane, first_key, first_row):
        """The same of [64 keys, 64 rows]."""
        CALLS: gl.constexpr = _key_calls()
        group = first_key // 8 + axis_index(0, 5, 8, CALLS)
        row = first_row + axis_index(1, 5, 2, CALLS) * 32 + axis_index(2, 5, 4, CALLS) * 8
        row = row + axis_index(3, 5, 4, CALLS) * 2 + axis_index(4, 5, 2, CALLS)
        words = gl.inline_asm_elementwise(
            _BY_KEY,
            _OPERANDS,
            [group, row, plane, self.philox_0, self.philox_1],
            dtype=_WORDS,
            is_pure=True,
            pack=1,
        )
        words = gl.reshape(_joined(words), [8, 2, 4, 4, 2, 4])
        halves = gl.permute(gl.join(words << 16, words), (0, 2, 4, 1, 5, 3, 6))
        return _laid_out(gl.reshape(halves, [64, 64]), like)

    @gluon.jit
    def kept(self, weights, bits):
        """`weights`, but 0 where dropped."""
        return _by_bits(_KEEP, weights, bits, self.threshold)

    @gluon.jit
    def signed(self, weights, bits):
        """`weights`, but negative where dropped."""
        return _by_bits(_SIGN, weights, bits, self.threshold)


@gluon.jit
def _laid_out(bits, like):
    return gl.convert_layout(bits, like.type.layout, assert_trivial=True)


@gluon.jit
def _by_bits(ASSEMBLY: gl.constexpr, weights, bits, threshold):
    return gl.inline_asm_elementwise(
        ASSEMBLY,
        "=f,f,r,r",
        [weights, bits, threshold],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def positive(values):
    """`values`, but 0 where they are negative; NaN stays."""
    return gl.inline_asm_elementwise(
        _POSITIVE, "=f,f", [values], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def kept_less_all(signed, factor, delta):
    """What is kept of `signed`, times `factor`, less all of it times `delta`."""
    return gl.inline_asm_elementwise(
        _LESS, "=f,f,f,f", [signed, factor, delta], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def philox_key(seed, DROPOUT: gl.constexpr):
    """The two words of the seed, where there is one."""
    first = gl.to_tensor(0)
    second = gl.to_tensor(0)
    if DROPOUT:
        first = gl.load(seed)
        second = gl.load(seed + 1)
    return first, second
