"""Arguments of a launch, taken exactly as torch.mps.compile_shader's kernels take them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from orchard.backends.metal.limits import BUFFERS, INLINE_BYTES

Bounds = Literal["storage", "view"]

DENSE = 1 << 29  # bytes up to which a tensor's memory is copied whole, gaps and all
_CASTS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
_INT64 = range(-(2**63), 2**63)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Memory:
    """A tensor's memory from its first element on."""

    tensor: Tensor
    address: int
    size: int
    alignment: int  # bytes from the start of its storage, as far as they matter

    @property
    def element(self) -> int:
        return self.tensor.element_size()

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for two arguments that can share one copy."""
        view = (self.tensor.shape, self.tensor.stride()) if self.size > DENSE else ()
        return (self.address, self.size, *view)

    def cells(self, address: int) -> Tensor:
        """As integers, what lies at `address` if this memory does: of a large one its elements."""
        memory = (ctypes.c_uint8 * self.size).from_address(address)
        if self.size <= DENSE:
            return torch.frombuffer(memory, dtype=torch.uint8)
        axes = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        shape = [size if stride else 1 for size, stride in axes]
        cells = torch.frombuffer(memory, dtype=_BITS[self.element])
        return cells.as_strided(shape, self.tensor.stride())


@dataclass(frozen=True)
class Inline:
    """Bytes that travel with the launch. Kernels cannot write to them."""

    data: bytes
    element: int  # bytes of a number
    floating: bool = False


@dataclass(frozen=True)
class Addresses:
    """A packed array of pointers to tensors."""

    memories: tuple[Memory, ...]


Argument = Memory | Inline | Addresses


def bind(
    args: Sequence[Any], arg_casts: str | Mapping[int, str] | None, bounds: Bounds
) -> list[Argument]:
    """One argument per buffer index."""
    if not (arg_casts is None or isinstance(arg_casts, (str, dict))):
        raise RuntimeError(f"Unexpected caster arg type {type(arg_casts).__name__}")
    if len(args) > BUFFERS:
        raise RuntimeError(f"{len(args)} arguments: a kernel takes {BUFFERS} buffers at most")
    casts = arg_casts if isinstance(arg_casts, dict) else {}
    default = arg_casts if isinstance(arg_casts, str) else ""
    return [_argument(arg, casts.get(i, default), bounds) for i, arg in enumerate(args)]


def _argument(arg: Any, cast: str, bounds: Bounds) -> Argument:
    if isinstance(arg, Tensor):
        return _tensor(arg, bounds)
    if isinstance(arg, (list, tuple)):
        if not arg:
            raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
        if isinstance(arg[0], int):
            return _numbers(list(map(_int64, arg)), cast)
        if isinstance(arg[0], float):
            return _numbers(list(map(_float32, arg)), cast)
        if isinstance(arg[0], Tensor):
            if not all(isinstance(item, Tensor) for item in arg):
                raise RuntimeError("Unable to cast Python instance to a list of tensors")
            found = tuple(_tensor(item, bounds) for item in arg)
            if not all(isinstance(item, Memory) for item in found):
                raise RuntimeError("a list of tensors cannot hold a CPU scalar")
            return Addresses(tuple(item for item in found if isinstance(item, Memory)))
        raise RuntimeError("Unexpected argument types")
    if isinstance(arg, float):
        return _numbers([_float32(arg)], cast)
    if isinstance(arg, int):
        return _numbers([_int64(arg)], cast)
    raise RuntimeError("Unsupported argument type")


def _int64(value: Any) -> int:
    if isinstance(value, int) and value in _INT64:
        return int(value)
    raise RuntimeError(f"Unable to cast Python instance {value!r} to C++ type int64_t")


def _float32(value: Any) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    raise RuntimeError(f"Unable to cast Python instance {value!r} to C++ type float")


def _numbers(values: list[int] | list[float], cast: str) -> Inline:
    floating = isinstance(values[0], float)
    tensor = torch.tensor(values, dtype=torch.float32 if floating else torch.int64)
    if cast:
        if cast not in _CASTS:
            raise RuntimeError(f"Unsupported cast instruction {cast}")
        tensor = tensor.to(_CASTS[cast])
    size = tensor.numel() * tensor.element_size()
    if size > INLINE_BYTES:
        raise RuntimeError(f"{size} bytes of inline arguments: Metal takes {INLINE_BYTES} at most")
    data = ctypes.string_at(tensor.data_ptr(), size)
    return Inline(data, tensor.element_size(), tensor.is_floating_point())


def _tensor(tensor: Tensor, bounds: Bounds) -> Memory | Inline:
    if tensor.device.type != "cpu":
        raise RuntimeError(f"the emulator takes CPU tensors, not tensors on {tensor.device}")
    if tensor.dtype in (torch.float64, torch.complex128):
        if tensor.dtype == torch.float64 and tensor.dim() == 0:
            return Inline(struct.pack("<f", float(tensor)), 4, floating=True)
        raise RuntimeError(f"MPS has no {tensor.dtype}")
    storage = tensor.untyped_storage()
    offset = int(tensor.storage_offset()) * tensor.element_size()
    if bounds == "storage":
        size = storage.nbytes() - offset
    elif tensor.numel() == 0:
        size = 0
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum(int(n - 1) * int(stride) for n, stride in steps)
        size = (1 + last) * tensor.element_size()
    if size > DENSE and bounds == "storage":
        raise MemoryError(f"{size} bytes of storage: the emulator takes so many by bounds='view'")
    return Memory(tensor, storage.data_ptr() + offset, size, offset % 256)
