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

from orchard.attention.memory import Place, dense, following
from orchard.attention.problem import Problem
from orchard.backends.cpu import native
from orchard.backends.cpu.native import BackwardArgs, ForwardArgs

Shape = tuple[int, ...]
_LITTLE = sys.byteorder == "little"
_LEAST, _GREATEST = -(2**63), 2**63 - 1


class BackwardKind(NamedTuple):
    """What a backward's struct depends on."""

    problem: Problem
    out: Shape  # strides, here and below
    lse: Shape
    grad_lse: Shape | None


class ForwardTemplate(NamedTuple):
    words: array[int]
    out: Place
    lse: Place | None


class BackwardTemplate(NamedTuple):
    words: array[int]
    grad_query: Place
    grad_key: Place
    grad_value: Place
    grad_mask: Place | None  # in the type that the kernel writes


def word(structure: type[ctypes.Structure], field: str) -> int:
    """The index of the word in which a field, or a tensor's address, lies."""
    return int(getattr(structure, field).offset) // 8


def last_word(threshold: int, threads: int) -> int:
    """The two 32-bit fields that a struct ends with."""
    return threshold | threads << 32 if _LITTLE else threshold << 32 | threads


def forward_template(problem: Problem) -> ForwardTemplate:
    args = ForwardArgs()
    _fill(args, problem)
    out = Place((*problem.query_shape[:3], problem.value_dim), problem.out_strides, problem.dtype)
    args.out = _described(out)
    lse = None
    if problem.lse or problem.grad:
        lse = dense(problem.query_shape[:3])
        args.lse = _described(lse)
    return ForwardTemplate(_words(args), out, lse)


def backward_template(kind: BackwardKind) -> BackwardTemplate:
    args, problem = BackwardArgs(), kind.problem
    _fill(args, problem)
    rows = problem.query_shape[:3]
    shape = (*rows, problem.value_dim)
    args.out = native.describe(problem.dtype, shape, kind.out)
    args.grad_out = native.describe(problem.dtype, shape, problem.grad_strides or ())
    args.lse = native.describe(torch.float32, rows, kind.lse)
    if kind.grad_lse is not None:
        args.grad_lse = native.describe(torch.float32, rows, kind.grad_lse)
    places = {
        name: following(*operand, problem.dtype) for name, operand in problem.operands.items()
    }
    for name, place in places.items():
        setattr(args, f"grad_{name}", _described(place))
    mask, grad_mask = problem.mask, None
    if mask is not None and problem.mask_grad:
        once = mask.shape == (*rows, problem.key_length)
        half = mask.dtype in (torch.float16, torch.bfloat16)
        # Where nothing is summed, nothing has to be wider.
        grad_mask = following(
            mask.shape, mask.strides, mask.dtype if once and half else torch.float32
        )
        args.grad_mask = _described(grad_mask)
    return BackwardTemplate(
        _words(args), places["query"], places["key"], places["value"], grad_mask
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


def _described(place: Place) -> native.TensorArgs:
    return native.describe(place.dtype, place.shape, place.strides)
