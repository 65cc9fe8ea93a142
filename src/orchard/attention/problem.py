"""A call described without its tensors: what the planner decides on and caches by."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from orchard.attention.strides import axis_order, dense_strides

Stage = Literal["forward", "backward", "double_backward"]


class Band(NamedTuple):
    """Row i sees key j where low <= j - i <= high; None is unbounded."""

    low: int | None
    high: int | None


class Options(NamedTuple):
    """What shapes a score and a probability, apart from the mask."""

    scale: float
    softcap: float = 0.0  # 0 is off
    band: Band | None = None
    threshold: int = 0  # dropout: 16-bit values below it are dropped


class Tensors(NamedTuple):
    """The operands of a call: [B, H, S, D] each, the mask four-dimensional and not expanded."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    seed: Tensor | None = None


class Saved(NamedTuple):
    """What a forward leaves for a backward, beside the operands."""

    out: Tensor
    lse: Tensor


class Upstream(NamedTuple):
    """Gradients that arrive at the outputs."""

    out: Tensor
    lse: Tensor | None


class Gradients(NamedTuple):
    """Gradients of the operands; `mask` is None unless the problem asks for it."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None


class MaskSpec(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def kind(self) -> Literal["bool", "additive"]:
        return "bool" if self.dtype == torch.bool else "additive"


class Problem(NamedTuple):
    """One call: shapes, strides, types and options. Hashable, and holds no tensor."""

    stage: Stage
    device: torch.device
    dtype: torch.dtype
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    query_strides: tuple[int, ...]
    key_strides: tuple[int, ...]
    value_strides: tuple[int, ...]
    grad_strides: tuple[int, ...] | None  # of grad_out; None in a forward
    mask: MaskSpec | None
    options: Options
    lse: bool  # forward: lse is wanted; backward: a gradient arrives through it
    grad: bool  # a backward follows (always true in a backward)
    mask_grad: bool
    aligned: bool  # every operand starts on a 16-byte boundary
    deterministic: bool  # torch asked for deterministic algorithms
    tf32: bool = False  # torch allows TF32 in products of these operands

    @property
    def batch(self) -> int:
        return self.query_shape[0]

    @property
    def heads(self) -> int:
        return self.query_shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key_shape[1]

    @property
    def query_length(self) -> int:
        return self.query_shape[2]

    @property
    def key_length(self) -> int:
        return self.key_shape[2]

    @property
    def head_dim(self) -> int:
        return self.query_shape[3]

    @property
    def value_dim(self) -> int:
        return self.value_shape[3]

    @property
    def operands(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shape and strides of each operand by its name."""
        return {
            "query": (self.query_shape, self.query_strides),
            "key": (self.key_shape, self.key_strides),
            "value": (self.value_shape, self.value_strides),
        }

    @property
    def band_kind(self) -> Literal["none", "causal", "bottom_right", "window"]:
        """The band by the name its users know it under."""
        band = self.options.band
        if band is None:
            return "none"
        if band.low is None and band.high == 0:
            return "causal"
        if band.low is None and band.high == self.key_length - self.query_length:
            return "bottom_right"
        return "window"

    @property
    def out_strides(self) -> tuple[int, ...]:
        """Strides of the output, whose axes lie in memory as the query's."""
        order = axis_order(self.query_shape, self.query_strides)
        return dense_strides((*self.query_shape[:3], self.value_dim), order)

    def next_backward(self, *, lse_grad: bool) -> Problem:
        """The backward this forward would be followed by, if grad_out has the output's strides."""
        return self._replace(
            stage="backward", grad_strides=self.out_strides, lse=lse_grad, grad=True
        )


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 accumulates in fp64, everything else in fp32; lse has this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def drop_threshold(dropout_p: float) -> int:
    """`dropout_p` as the 16-bit value below which a probability is dropped."""
    return min(round(dropout_p * 65536), 65535)


def make_band(
    left: int, right: int, bottom_right: bool, query_length: int, key_length: int
) -> Band | None:
    """The band of a window around the diagonal; bounds that exclude nothing become None."""
    diagonal = key_length - query_length if bottom_right else 0
    low = None if left < 0 or diagonal - left <= 1 - query_length else diagonal - left
    high = None if right < 0 or diagonal + right >= key_length - 1 else diagonal + right
    return None if low is None and high is None else Band(low, high)


def is_traced(tensor: Tensor) -> bool:
    """Whether this is torch's stand-in for a tensor in a trace: it has no data."""
    return type(tensor).__module__.startswith("torch._subclasses.")


def default_scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def allows_tf32(query: Tensor) -> bool:
    """TF32 is for fp32 operands on CUDA, and only where torch is told to allow it."""
    if query.dtype is not torch.float32 or not query.is_cuda:
        return False
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32"


def describe(
    tensors: Tensors,
    options: Options,
    *,
    stage: Stage = "forward",
    grad_out: Tensor | None = None,
    lse: bool = False,
    grad: bool = False,
    mask_grad: bool = False,
) -> Problem:
    """The problem that these operands pose."""
    query, key, value, mask, _ = tensors
    pointers = query.data_ptr() | key.data_ptr() | value.data_ptr()
    if grad_out is not None:
        pointers |= grad_out.data_ptr()
    return Problem(
        stage,
        query.device,
        query.dtype,
        query.shape,
        key.shape,
        value.shape,
        query.stride(),
        key.stride(),
        value.stride(),
        None if grad_out is None else grad_out.stride(),
        None if mask is None else MaskSpec(mask.dtype, mask.shape, mask.stride()),
        options,
        lse,
        grad,
        mask_grad,
        pointers % 16 == 0,
        torch.are_deterministic_algorithms_enabled(),
        allows_tf32(query),
    )
