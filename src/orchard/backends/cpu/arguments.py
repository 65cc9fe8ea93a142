"""Argument structs, made once for each kind of call and copied for every call of that kind.

A copy is an array of 64-bit words, into which a call writes what only it knows: addresses and the
number of threads. That takes a fraction of the time of filling a ctypes structure.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from orchard.attention.problem import Problem
from orchard.attention.strides import axis_order, contiguous_strides, dense_strides
from orchard.backends.cpu import native
from orchard.backends.cpu.native import BackwardArgs, ForwardArgs

Shape = tuple[int, ...]
_LITTLE = sys.byteorder == "little"
_LEAST, _GREATEST = -(2**63), 2**63 - 1


class Place(NamedTuple):
    """Where an output goes: shape and strides to allocate."""

    shape: Shape
    strides: Shape


class TensorKind(NamedTuple):
    """A tensor that the problem does not describe in full."""

    dtype: torch.dtype
    shape: Shape
    strides: Shape


class BackwardKind(NamedTuple):
    """What a backward's struct depends on."""

    problem: Problem
    out: TensorKind
    lse: TensorKind
    grad_out: TensorKind
    grad_lse: TensorKind | None


class ForwardTemplate(NamedTuple):
    words: array[int]
    out: Place
    lse: Place | None


class BackwardTemplate(NamedTuple):
    words: array[int]
    grad_query: Place
    grad_key: Place
    grad_value: Place
    grad_mask: Place | None
    mask_dtype: torch.dtype  # of grad_mask as the kernel writes it


def word(structure: type[ctypes.Structure], field: str) -> int:
    """The index of the word in which a field, or a tensor's address, lies."""
    return int(getattr(structure, field).offset) // 8


def last_word(threshold: int, threads: int) -> int:
    """The two 32-bit fields that a struct ends with."""
    return threshold | threads << 32 if _LITTLE else threshold << 32 | threads


def kind_of(tensor: Tensor) -> TensorKind:
    return TensorKind(tensor.dtype, tensor.shape, tensor.stride())


def forward_template(problem: Problem) -> ForwardTemplate:
    args = ForwardArgs()
    _fill(args, problem)
    out = Place((*problem.query_shape[:3], problem.value_dim), problem.out_strides)
    args.out = native.describe(problem.dtype, *out)
    lse = None
    if problem.lse or problem.grad:
        rows = problem.query_shape[:3]
        lse = Place(rows, contiguous_strides(rows))
        args.lse = native.describe(torch.float32, *lse)
    return ForwardTemplate(_words(args), out, lse)


def backward_template(kind: BackwardKind) -> BackwardTemplate:
    args, problem = BackwardArgs(), kind.problem
    _fill(args, problem)
    args.out, args.lse = native.describe(*kind.out), native.describe(*kind.lse)
    args.grad_out = native.describe(*kind.grad_out)
    if kind.grad_lse is not None:
        args.grad_lse = native.describe(*kind.grad_lse)
    places = {name: _following(*operand) for name, operand in problem.operands.items()}
    for name, place in places.items():
        setattr(args, f"grad_{name}", native.describe(problem.dtype, *place))
    grad_mask, mask_dtype = None, torch.float32
    if problem.mask is not None and problem.mask_grad:
        grad_mask = _following(problem.mask.shape, problem.mask.strides)
        once = problem.mask.shape == (*problem.query_shape[:3], problem.key_length)
        if once and problem.mask.dtype in (torch.float16, torch.bfloat16):
            mask_dtype = problem.mask.dtype  # nothing is summed, so nothing has to be wider
        args.grad_mask = native.describe(mask_dtype, *grad_mask)
    return BackwardTemplate(
        _words(args), places["query"], places["key"], places["value"], grad_mask, mask_dtype
    )


def _fill(args: ForwardArgs | BackwardArgs, problem: Problem) -> None:
    """Everything that the problem tells."""
    options = problem.options
    args.struct_size = ctypes.sizeof(args)
    args.abi_version = native.ABI_VERSION
    for name, (shape, strides) in problem.operands.items():
        setattr(args, name, native.describe(problem.dtype, shape, strides))
    if problem.mask is not None:
        args.mask = native.describe(*problem.mask)
    low, high = options.band or (None, None)
    args.band_low = _LEAST if low is None else low
    args.band_high = _GREATEST if high is None else high
    args.scale, args.softcap = options.scale, options.softcap


def _words(args: ctypes.Structure) -> array[int]:
    return array("Q", bytes(args))


def _following(shape: Shape, strides: Shape) -> Place:
    """A dense place whose axes lie in memory as those of an operand."""
    return Place(tuple(shape), dense_strides(shape, axis_order(shape, strides)))
