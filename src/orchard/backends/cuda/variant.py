"""What a kernel is compiled for, and the numbers it is launched with."""

from __future__ import annotations

from typing import Any, NamedTuple


class Variant(NamedTuple):
    """Blocks, head dimensions and the parts of attention that a compiled kernel has in it."""

    block_rows: int
    block_keys: int
    head_dim: int
    value_dim: int
    head_block: int  # the head dimension as the kernel holds it: a power of two
    value_block: int
    exact: bool  # operands are fp32
    precision: str = "ieee"  # of products of fp32 operands
    mask: str = "none"  # or "bool", "additive"
    low: bool = False  # the band has this bound
    high: bool = False
    softcap: bool = False
    dropout: bool = False
    late_scale: bool = False  # scores stay unscaled until they are exponents
    lse: bool = False  # a forward stores it
    split: bool = False  # a decode leaves parts to join
    whole: bool = False  # there is no band, and every block of keys is a whole one
    early: bool = False  # a program begins while the kernel before it ends, and waits for that
    grad_lse: bool = False
    empty_rows: bool = False  # some row may have nothing to attend to
    mask_grad: str = "none"  # what is written: "tile", or sums over "rows" or "keys"


class Strides(NamedTuple):
    """Elements from one index of an axis to the next."""

    batch: Any
    head: Any
    row: Any
    column: Any


class Numbers(NamedTuple):
    """What a problem tells every kernel."""

    batch: Any
    heads: Any
    group: Any  # query heads that share a key head
    rows: Any
    keys: Any
    low: Any  # row i sees key j where low <= j - i <= high
    high: Any
    threshold: Any  # dropout: 16-bit values below it are dropped
    keep_scale: Any
    scale: Any
    factor: Any  # of a product: the scale, in the units of the scores or of the softcap
    cap: Any  # the softcap in the units of the scores
