"""Metal source for a kind of problem: definitions in front of the kernels, compiled once."""

from __future__ import annotations

import re
import threading
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from orchard.backends.metal.limits import THREADGROUP_BYTES
from orchard.backends.metal.runtime import Kernel, MetalRuntime

KERNELS = Path(__file__).parent / "kernels"
TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
MASK_TYPES = {torch.bool: "uchar", **TYPES}
STORED_TYPES = {torch.int8: "char", torch.uint8: "uchar", **TYPES}  # uchar is int4, two to a byte

# The two argument lists of every kernel. Here and in the kernels they go by these names.
INTEGERS = (
    "BATCH",
    "HEADS",
    "GROUP",
    "ROWS",
    "KEYS",
    "LOW",
    "HIGH",
    "THRESHOLD",
    "RUNS",
    "RUN_KEYS",
    "SUMS_BATCH",
    "SUMS_HEADS",
    "SUMS_ROWS",
    "SUMS_KEYS",
)
STRIDED = (  # four strides each, after the integers
    "QUERY",
    "KEY",
    "VALUE",
    "OUT",
    "MASK",
    "LSE",
    "GRAD_OUT",
    "GRAD_LSE",
    "GRAD_QUERY",
    "GRAD_KEY",
    "GRAD_VALUE",
    "GRAD_MASK",
    "SUMS",
)
FLOATS = ("SCALE", "CAP", "CAP_IN_UNITS", "KEEP_SCALE", "GRAD_SCALE")

# A third list, of operands in few bits: by batch entry, head and row each.
GROUPS = ("GROUP_SIZES", "SCALE_STRIDES", "ZERO_STRIDES")  # of an operand
GROUPED = ("QUERY_GROUPS", "KEY_GROUPS", "VALUE_GROUPS")  # the operands; MEAN_STRIDES follow

SIMDGROUPS = 4
THREADS = 32 * SIMDGROUPS
RESIDENT = 8 * SIMDGROUPS  # rows or keys that a threadgroup holds
_HEADERS = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;"


class MetalCompileError(RuntimeError):
    """Apple's compiler refused a kernel, in its own words."""


class Storage(NamedTuple):
    """How an operand lies in memory, as far as a kernel is compiled for it."""

    dtype: torch.dtype
    parts: int = 0  # beside its data: 1 is scales, 2 is scales and zero points


class Specialisation(NamedTuple):
    """What a kernel is compiled for."""

    dtype: torch.dtype
    head_dim: int
    value_dim: int
    mask: torch.dtype | None = None
    band: bool = False
    softcap: bool = False
    dropout: bool = False
    lse: bool = False
    packed: bool = False  # rows may be read four elements at a time
    grad_lse: bool = False
    grad_mask: bool = False  # written along with the gradient of the query
    decode_rows: int = 0
    stored: tuple[Storage, Storage, Storage] | None = None  # query, key, value; None: all `dtype`
    smoothed: bool = False  # the key has a mean, which is not in its levels

    @property
    def block(self) -> int:
        """Keys (or rows) of a tile in threadgroup memory: as many as fit."""
        size = self.dtype.itemsize
        row = sum(8 * max(1, -(-dim // 8)) + 16 // size for dim in (self.head_dim, self.value_dim))
        others = 16 * THREADS if self.dropout else 0
        per_row = row * size + 4 * max(3, SIMDGROUPS)  # its numbers, or sums of each simdgroup
        return next((n for n in (32, 16) if n * per_row + others <= THREADGROUP_BYTES), 8)

    @property
    def definitions(self) -> dict[str, str | int]:
        """The macros that the kernels are written in."""
        query, key, value = self.stored or (Storage(self.dtype),) * 3
        return {
            "TYPE": TYPES[self.dtype],
            "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "SIMDGROUPS": SIMDGROUPS,
            "BLOCK": self.block,
            "MASK": 0 if self.mask is None else 1 if self.mask == torch.bool else 2,
            "MASK_TYPE": MASK_TYPES[self.mask or torch.bool],
            "BAND": int(self.band),
            "SOFTCAP": int(self.softcap),
            "DROPOUT": int(self.dropout),
            "LSE": int(self.lse),
            "PACKED": int(self.packed),
            "GRAD_LSE": int(self.grad_lse),
            "GRAD_MASK": int(self.grad_mask),
            "DECODE_ROWS": self.decode_rows,
            "QUANTISED": int(self.stored is not None),
            "SMOOTHED": int(self.smoothed),
            "QUERY_TYPE": STORED_TYPES[query.dtype],
            "KEY_TYPE": STORED_TYPES[key.dtype],
            "VALUE_TYPE": STORED_TYPES[value.dtype],
            "QUERY_PARTS": query.parts,
            "KEY_PARTS": key.parts,
            "VALUE_PARTS": value.parts,
        }


def source(file: str, specialisation: Specialisation) -> str:
    """The whole text that the compiler gets for the kernels of a file."""
    defined = [f"#define {name} {value}" for name, value in specialisation.definitions.items()]
    return "\n".join((_HEADERS, *defined, _layout(), _inlined(file)))


@cache
def _layout() -> str:
    strides = [f"{name}_STRIDES = {stride_index(name)}" for name in STRIDED]
    groups = [f"{name} = {3 * at}" for at, name in enumerate(GROUPS)]
    grouped = [f"{name} = {3 * len(GROUPS) * at}" for at, name in enumerate(GROUPED)]
    lists = {
        "Integers": (*INTEGERS, *strides),
        "Floats": FLOATS,
        "Groups": groups,
        "Grouped": (*grouped, f"MEAN_STRIDES = {3 * len(GROUPS) * len(GROUPED)}"),
    }
    return "\n".join(f"enum {kind} {{ {', '.join(names)} }};" for kind, names in lists.items())


def stride_index(name: str) -> int:
    """Where the strides of a tensor begin in the list of integers."""
    return len(INTEGERS) + 4 * STRIDED.index(name)


@cache
def _inlined(file: str) -> str:
    """A file with its own headers in place; those of Metal are the compiler's."""
    text = (KERNELS / file).read_text(encoding="ascii")
    return re.sub(r'#include "([\w.]+)"', lambda found: _inlined(found[1]), text)


class Library:
    """Compiled kernels, each compiled once, whichever threads ask for it first."""

    def __init__(self, runtime: MetalRuntime) -> None:
        self._runtime = runtime
        self._missing = threading.RLock()  # held while something is compiled or looked up
        self._kernels: dict[tuple[str, str, Specialisation], Kernel] = {}
        self._compiled: dict[tuple[str, Specialisation], object | MetalCompileError] = {}

    def kernel(self, file: str, name: str, specialisation: Specialisation) -> Kernel:
        """A kernel of a file by its name; torch makes a new object at every look."""
        key = (file, name, specialisation)
        found = self._kernels.get(key)
        if found is not None:
            return found
        with self._missing:
            if key not in self._kernels:
                self._kernels[key] = getattr(self._compile(file, specialisation), name)
            return self._kernels[key]

    def _compile(self, file: str, specialisation: Specialisation) -> object:
        key = (file, specialisation)
        if key not in self._compiled:
            try:
                self._compiled[key] = self._runtime.compile(source(file, specialisation))
            except SyntaxError as error:
                self._compiled[key] = MetalCompileError(f"{file}: {_diagnosis(str(error))}")
        compiled = self._compiled[key]
        if isinstance(compiled, MetalCompileError):
            raise MetalCompileError(*compiled.args)
        return compiled


def _diagnosis(text: str) -> str:
    """The compiler's errors, each with its place and without the lines of source that follow."""
    errors = [line.strip() for line in text.splitlines() if "error:" in line]
    return "; ".join(errors) or text
