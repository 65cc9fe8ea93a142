"""Quantisation and quantised attention by the native library: operands as levels and scales."""

from __future__ import annotations

import ctypes
import struct
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from orchard.attention.memory import Place, dense
from orchard.attention.problem import Options, Saved
from orchard.backends.cpu import native
from orchard.backends.cpu.native import Library, TensorArgs
from orchard.dispatch import settings
from orchard.dispatch.planner import planner

INT8, INT4 = 5, 6
_LEAST, _GREATEST = -(2**63), 2**63 - 1


class OperandArgs(ctypes.Structure):
    """orchard_operand"""

    _fields_: ClassVar = [
        *((name, TensorArgs) for name in ("data", "scales", "zeros", "mean")),
        ("group", ctypes.c_int64 * 3),
        ("dim", ctypes.c_int64),
    ]


class QuantizedArgs(ctypes.Structure):
    """orchard_quantized_args"""

    _fields_: ClassVar = [
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        *((name, OperandArgs) for name in ("query", "key", "value")),
        *((name, TensorArgs) for name in ("mask", "out", "lse")),
        ("band_low", ctypes.c_int64),
        ("band_high", ctypes.c_int64),
        ("seed", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("bf16_accuracy", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("drop_threshold", ctypes.c_uint32),
        ("threads", ctypes.c_int32),
    ]


class QuantizeArgs(ctypes.Structure):
    """orchard_quantize_args"""

    _fields_: ClassVar = [
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("source", TensorArgs),
        ("mean", TensorArgs),
        ("result", OperandArgs),
        ("threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class SumArgs(ctypes.Structure):
    """orchard_sum_args"""

    _fields_: ClassVar = [
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("source", TensorArgs),
        ("sums", TensorArgs),
        ("threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


_FEW_ELEMENTS = 1 << 15  # of a tensor that is quantised sooner than a second thread wakes up


class Operand(NamedTuple):
    """An operand [B, H, S, dim]: levels with their scales, or a floating tensor without any."""

    data: Tensor  # int8; uint8 is int4, two to a byte
    scales: Tensor | None
    zeros: Tensor | None
    mean: Tensor | None
    group: tuple[int, int, int]
    dim: int


def usable_library() -> Library | None:
    """The library, where the CPU backend is registered, switched on and works here."""
    backend = planner().backends.get("cpu")
    if backend is None or backend.name in settings.current().disabled:
        return None
    broken = backend.unavailable(backend.capabilities[0], torch.device("cpu"))
    return native.loaded() if broken is None else None


def attend(
    library: Library,
    query: Operand,
    key: Operand,
    value: Operand,
    mask: Tensor | None,
    seed: Tensor | None,
    options: Options,
    place: Place,
    *,
    bf16_accuracy: bool,
) -> Saved:
    """out at its place, and lse, from operands that the library serves."""
    args = QuantizedArgs()
    args.struct_size, args.abi_version = ctypes.sizeof(args), native.ABI_VERSION
    args.query, args.key, args.value = (_described(operand) for operand in (query, key, value))
    out = place.allocate(query.data.device)
    lse = dense(query.data.shape[:3]).allocate(query.data.device)
    args.out, args.lse = _tensor(out), _tensor(lse)
    if mask is not None:
        args.mask = _tensor(mask)
    if seed is not None:
        args.seed = seed.data_ptr()
    low, high = options.band or (None, None)
    args.band_low = _LEAST if low is None else low
    args.band_high = _GREATEST if high is None else high
    args.scale, args.softcap = options.scale, options.softcap
    args.bf16_accuracy = bf16_accuracy
    args.drop_threshold, args.threads = options.threshold, native.threads()
    status = library.quantized_forward(ctypes.addressof(args))
    if status:
        library.fail(status)
    return Saved(out, lse)


def quantize(
    library: Library,
    source: Tensor,
    mean: Tensor | None,
    group: tuple[int, int, int],
    *,
    int4: bool,
    symmetric: bool,
) -> Operand | None:
    """A floating [B, H, S, D] tensor as levels; None where it holds what cannot be stored."""
    batch, heads, rows, dim = source.shape
    data = torch.empty(
        (batch, heads, rows, (dim + 1) // 2 if int4 else dim),
        dtype=torch.uint8 if int4 else torch.int8,
        device=source.device,
    )
    groups = tuple(-(-n // per) for n, per in zip(source.shape[:3], group, strict=True))
    scales = torch.empty(groups, dtype=torch.float32, device=source.device)
    zeros = None if symmetric else torch.empty(groups, dtype=torch.int8, device=source.device)
    result = Operand(data, scales, zeros, None, group, dim)
    args = QuantizeArgs()
    args.struct_size, args.abi_version = ctypes.sizeof(args), native.ABI_VERSION
    args.source, args.result = _tensor(source), _described(result)
    if mean is not None:
        args.mean = _tensor(mean)
    args.threads = _threads_for(source)
    status = library.quantize(ctypes.addressof(args))
    if status == native.INVALID_ARGUMENT:
        return None
    if status:
        library.fail(status)
    return result._replace(mean=mean)


def sum_over_rows(library: Library, source: Tensor) -> Tensor:
    """Of a floating [B, H, S, D] tensor over S, fp32 [B, H, 1, D]."""
    batch, heads, _, dim = source.shape
    sums = torch.empty((batch, heads, 1, dim), dtype=torch.float32, device=source.device)
    args = SumArgs()
    args.struct_size, args.abi_version = ctypes.sizeof(args), native.ABI_VERSION
    args.source, args.sums = _tensor(source), _tensor(sums)
    args.threads = _threads_for(source)
    status = library.sum_over_rows(ctypes.addressof(args))
    if status:
        library.fail(status)
    return sums


def _threads_for(source: Tensor) -> int:
    return native.threads() if source.numel() > _FEW_ELEMENTS else 1


def _described(operand: Operand) -> OperandArgs:
    args = OperandArgs(dim=operand.dim)
    args.data = _tensor(operand.data)
    if operand.scales is not None:
        args.scales = _tensor(operand.scales)
        args.group[:] = operand.group
    if operand.zeros is not None:
        args.zeros = _tensor(operand.zeros)
    if operand.mean is not None:
        args.mean = _tensor(operand.mean)
    return args


_PACKED = struct.Struct("P4q4qii")
_DTYPES = native.DTYPES | {torch.int8: INT8, torch.uint8: INT4}


def _tensor(tensor: Tensor) -> TensorArgs:
    """As the library takes it; packed at once, which takes half as long as field by field."""
    more = (1,) * (4 - tensor.ndim)
    sizes, strides = (*tensor.shape, *more), (*tensor.stride(), *more)
    packed = _PACKED.pack(tensor.data_ptr(), *sizes, *strides, _DTYPES[tensor.dtype], 0)
    return TensorArgs.from_buffer_copy(packed)
