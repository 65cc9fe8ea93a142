"""What runs before and after the Hopper backward, in plain Triton: statistics of rows and cleared
memory, and dQ from its sums.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from orchard.backends.cuda.common import LOG2_E


@triton.jit
def statistics_kernel(
    out, grad_out, lse, grad_lse, scaled_lse, delta, grad_query_sums, further,
    rows, padded_rows, heads, head_dim, value_dim, further_count,
    out_batch, out_head, out_row,
    grad_batch, grad_head, grad_row,
    lse_batch, lse_head, lse_row,
    grad_lse_batch, grad_lse_head, grad_lse_row,
    HEAD_TILE: tl.constexpr, BLOCK: tl.constexpr, GRAD_LSE: tl.constexpr, SUMS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """delta = out . grad_out - grad_lse and lse in units of log 2; zeros for all sums.

    Empty rows and the padding get lse = +inf, so that their probabilities are 0. EARLY: the kernel
    after this one begins before this has ended.
    """
    if EARLY:
        gdc_launch_dependents()
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
        nothing = tl.zeros([BLOCK * HEAD_TILE], tl.float32)
        first = tl.program_id(0).to(tl.int64) * (BLOCK * HEAD_TILE)
        while first < further_count:
            element = first + tl.arange(0, BLOCK * HEAD_TILE)
            tl.store(further + element, nothing, mask=element < further_count)
            first += tl.num_programs(0).to(tl.int64) * (BLOCK * HEAD_TILE)


@triton.jit
def grad_query_kernel(
    sums, taken, grad_query, rows, heads, head_dim, scale,
    grad_batch, grad_head, grad_row,
    HEAD_TILE: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The sums of dQ, scaled, in the dtype and strides of the gradient: rows not yet `Early`.

    EARLY: this may begin before the kernel in front has ended.
    """
    if EARLY:
        gdc_wait()
    blocks = tl.cdiv(rows, BLOCK)
    plane = (tl.program_id(0) // blocks).to(tl.int64)
    row = ((tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    column = tl.arange(0, HEAD_TILE)[None, :]
    valid = (row < rows) & (column < head_dim) & (row >= tl.load(taken + plane) * SPAN)
    total = tl.load(sums + (plane * rows + row) * head_dim + column, mask=valid, other=0.0)
    at = grad_query + (plane // heads) * grad_batch + (plane % heads) * grad_head
    at += row * grad_row + column
    tl.store(at, (total * scale).to(grad_query.dtype.element_ty), mask=valid)
