"""The C ABI of native/include/orchard.h through ctypes. Nothing is loaded on import."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from orchard.backends.cpu import location
from orchard.dispatch import settings
from orchard.dispatch.backend import Reason
from orchard.errors import ArgumentValueError, NativeError
from orchard.text import one_line

ABI_VERSION = 1
MOST_THREADS = 1024  # that are asked for; the pool holds fewer
OK, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, WRONG_ABI = range(5)
DTYPES = {  # fp64 and bool are types of masks only
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float64: 3,
    torch.bool: 4,
}
FIX = (
    "install a C++20 compiler and CMake, then run in a clone: "
    "pip install --force-reinstall --no-deps ."
)


class TensorArgs(ctypes.Structure):
    """orchard_tensor"""

    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


def _fields(tensors: str) -> list[tuple[str, type]]:
    """The fields of a call's struct: its tensors between what both structs begin and end with."""
    return [
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        *((name, TensorArgs) for name in tensors.split()),
        ("band_low", ctypes.c_int64),
        ("band_high", ctypes.c_int64),
        ("seed", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("drop_threshold", ctypes.c_uint32),
        ("threads", ctypes.c_int32),
    ]


class ForwardArgs(ctypes.Structure):
    """orchard_forward_args"""

    _fields_: ClassVar = _fields("query key value mask out lse")


class BackwardArgs(ctypes.Structure):
    """orchard_backward_args"""

    _fields_: ClassVar = _fields(
        "query key value mask out lse grad_out grad_lse grad_query grad_key grad_value grad_mask"
    )


class UnavailableError(Exception):
    """The library cannot be used, for a reason that the planner can show."""

    def __init__(self, sentence: str, fix: str = FIX) -> None:
        super().__init__(sentence)
        self.reason = Reason("unavailable", sentence, fix)


class Library:
    """The functions of one shared library. ctypes releases the GIL while one of them runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        handle = ctypes.CDLL(str(path))

        def function(name: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
            found = handle[f"orchard_{name}"]
            found.restype, found.argtypes = result, arguments
            return found

        self.abi_version = function("abi_version", ctypes.c_uint32)
        self.forward = function("attention_forward", ctypes.c_int, ctypes.c_void_p)
        self.backward = function("attention_backward", ctypes.c_int, ctypes.c_void_p)
        self.quantized_forward = function("quantized_forward", ctypes.c_int, ctypes.c_void_p)
        self.quantize = function("quantize", ctypes.c_int, ctypes.c_void_p)
        self.sum_over_rows = function("sum_over_rows", ctypes.c_int, ctypes.c_void_p)
        self.pool_threads = function("pool_threads", ctypes.c_int)
        self.share_threads = function("share_threads", None, ctypes.c_void_p)
        self.exp2 = function("exp2", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._last_error = function("last_error", ctypes.c_char_p)
        self._isa_compiled = function("isa_compiled", ctypes.c_char_p)
        self._isa_available = function("isa_available", ctypes.c_char_p)
        self._isa = function("isa", ctypes.c_char_p)
        self._select_isa = function("select_isa", ctypes.c_int, ctypes.c_char_p)

    @property
    def isa(self) -> str:
        return _text(self._isa())

    @property
    def isa_compiled(self) -> list[str]:
        return _names(self._isa_compiled())

    @property
    def isa_available(self) -> list[str]:
        return _names(self._isa_available())

    def select_isa(self, name: str | None) -> None:
        """Use this instruction set from the next call on; None is the best there is."""
        status = self._select_isa(None if name is None else name.encode())
        if status != OK:
            self.fail(status)

    def fail(self, status: int) -> None:
        """Raise what a status other than OK means."""
        message = _text(self._last_error()) or f"status {status} without a message"
        if status == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(message)
        if status == INVALID_ARGUMENT:
            raise ArgumentValueError(message)
        raise NativeError(message)


def _text(found: bytes | None) -> str:
    return (found or b"").decode(errors="replace")


def _names(found: bytes | None) -> list[str]:
    return [name for name in _text(found).split(",") if name]


_library: Library | None = None


def loaded() -> Library:
    """The process's library, loaded at the first call; a failure is tried again at the next."""
    global _library
    if _library is None:
        _library = _load()
    return _library


def _load() -> Library:
    path = location.find_library()
    if path is None:
        raise UnavailableError(f"its native library is missing: {location.expected()}")
    try:
        loaded = Library(path)
        version = loaded.abi_version()
    except (OSError, AttributeError) as error:  # no library of this machine, or of ours
        raise UnavailableError(f"its native library does not load: {one_line(error)}") from error
    if version != ABI_VERSION:
        raise UnavailableError(
            f"its native library has ABI version {version}, this package needs {ABI_VERSION}"
        )
    return loaded


def use_isa(name: str | None) -> Library:
    """The library, set to an instruction set by name, or to the best of this machine."""
    found = loaded()
    try:
        found.select_isa(name)
    except ArgumentValueError as error:
        raise UnavailableError(
            f"ORCHARD_CPU_ISA is {name!r}: {error}",
            f"unset it, or use one of {', '.join(found.isa_available)}",
        ) from error
    return found


def threads() -> int:
    """How many threads a call may use now."""
    return min(settings.current().num_threads or torch.get_num_threads(), MOST_THREADS)


def torch_team() -> int | None:
    """The address of GOMP_parallel in the OpenMP library that torch runs on, where it is GNU's."""
    home = str(Path(torch.__file__).parent)  # torch.libs, beside it, begins with the same
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
        paths = {line.split(maxsplit=5)[-1] for line in mapped if "libgomp" in line}
        (path,) = (path for path in paths if path.startswith(home))
        return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, ValueError, AttributeError):  # another system, or another OpenMP
        return None


def describe(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> TensorArgs:
    """A tensor of up to four axes without its address; axes that are missing have size 1."""
    more = (1,) * (4 - len(shape))
    return TensorArgs(None, (*shape, *more), (*strides, *more), DTYPES[dtype], 0)
