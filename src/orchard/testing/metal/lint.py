"""What Apple's compiler would refuse, or torch bind wrongly, found without either.

Names, pointers and structure are read from the words of a source; types are the emulator's part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from orchard.backends.metal.limits import GROUP_THREADS, THREADGROUP_BYTES
from orchard.backends.metal.source import MASK_TYPES, TYPES, Specialisation, Storage
from orchard.testing.metal.preprocessor import (
    Macro,
    Preprocessed,
    UnknownValueError,
    Word,
    evaluate,
    expand,
)
from orchard.testing.metal.structure import Buffer, Finding, Structure, structure_of

_SCALARS = {
    "bool": 1,
    "char": 1,
    "uchar": 1,
    "short": 2,
    "ushort": 2,
    "half": 2,
    "bfloat": 2,
    "int": 4,
    "uint": 4,
    "float": 4,
    "long": 8,
    "ulong": 8,
}
_PLACES = {"2": 2, "3": 4, "4": 4}  # a vector of three takes the place of four
BOUND = {"long": int, "ulong": int, "float": float}  # what torch makes of Python's numbers
_MATRIX_HEADER = "<metal_simdgroup_matrix>"
_METAL_HEADER = re.compile(r"<metal(?:_\w+)?(?:/\w+)*>")
_TORCH_HEADER = re.compile(r"<(?:c10/metal|ATen/native/mps)/[\w/]+\.h>")


Signature = Mapping[int, str | None]  # by buffer: the scalars of a constant one, None of others


def check(source: str) -> list[Finding]:
    """Everything that is wrong with a source, as far as its words show it."""
    found = []
    for line, text in enumerate(source.split("\n"), 1):
        if not text.isascii():
            found.append(Finding("ascii", line, "torch passes Metal source on as ASCII"))
    read = Preprocessed(source)
    for name, line in read.includes:
        if not _METAL_HEADER.fullmatch(name) and not _TORCH_HEADER.fullmatch(name):
            found.append(Finding("include", line, f"neither Metal nor torch has {name}"))
    structure = _structure(read)
    if structure.matrices and all(name != _MATRIX_HEADER for name, _ in read.includes):
        found.append(Finding("include", structure.matrices, f"matrices need {_MATRIX_HEADER}"))
    types = _types(structure, read.macros)
    found += structure.findings
    found += _memory(structure, read.macros, types)
    found += _groups(structure, read.macros)
    found += _inline(structure, read.macros, types)
    return found


def signatures(source: str) -> dict[str, Signature]:
    """The buffers of each kernel of a source."""
    read = Preprocessed(source)
    structure = _structure(read)
    types = _types(structure, read.macros)

    def scalar(buffer: Buffer) -> str | None:
        known = _type_of(buffer.kind, read.macros, types)
        return known.scalar if known and buffer.space == "constant" else None

    return {
        name: {buffer.number: scalar(buffer) for buffer in buffers}
        for name, buffers in structure.kernels.items()
    }


def _structure(read: Preprocessed) -> Structure:
    # A macro for a number or a scalar type matters to sizes and types alone.
    macros = {name: macro for name, macro in read.macros.items() if not _is_plain(macro)}
    return structure_of(read.words, tuple(macros.items()))


def _is_plain(macro: Macro) -> bool:
    if macro.parameters is not None or len(macro.body) != 1:
        return False
    return macro.body[0] in _SCALARS or re.fullmatch(r"\d{1,9}", macro.body[0]) is not None


class Type(NamedTuple):
    """A scalar, or a vector of so many places."""

    scalar: str
    places: int

    @property
    def size(self) -> int:
        return _SCALARS[self.scalar] * self.places


_METAL_TYPES = {name: Type(name, 1) for name in _SCALARS} | {
    name + size: Type(name, places) for name, (size, places) in product(_SCALARS, _PLACES.items())
}


def _memory(
    structure: Structure, macros: Mapping[str, Macro], types: Mapping[str, Type]
) -> Iterator[Finding]:
    """Kernels with more threadgroup memory than there is, or with how much cannot be told."""
    sizes = {name: type_.size for name, type_ in types.items()}
    used: dict[str, int] = {}
    for kernel, kind, extents, line in structure.arrays:
        try:
            type_ = _type_of(kind, macros, types)
            if type_ is None:
                raise UnknownValueError(" ".join(kind))
            size = type_.size
            for extent in extents:
                size *= evaluate([word.text for word in expand(extent, macros)], sizes)
        except UnknownValueError as error:
            yield Finding("memory", line, f"its size cannot be told: {error}")
            continue
        used[kernel] = used.get(kernel, 0) + -(-size // 16) * 16
        if used[kernel] > THREADGROUP_BYTES:
            sentence = f"{kernel} has {used[kernel]} bytes of threadgroup memory"
            yield Finding("memory", line, f"{sentence}; there are {THREADGROUP_BYTES}")


def _groups(structure: Structure, macros: Mapping[str, Macro]) -> Iterator[Finding]:
    """Kernels that promise larger threadgroups than there are."""
    for words in structure.group_sizes:
        try:
            size = evaluate([word.text for word in expand(words, macros)], {})
        except UnknownValueError:
            continue  # it depends on a template's parameter
        if not 0 < size <= GROUP_THREADS:
            sentence = f"a group of {size} threads, of {GROUP_THREADS} at most"
            yield Finding("group size", words[0].line, sentence)


def _inline(
    structure: Structure, macros: Mapping[str, Macro], types: Mapping[str, Type]
) -> Iterator[Finding]:
    """Kernels that read Python's numbers as something else than torch makes of them."""
    for kernel, buffers in structure.kernels.items():
        for buffer in buffers:
            if buffer.space != "constant":
                continue
            type_ = _type_of(buffer.kind, macros, types)
            if type_ is not None and type_.scalar not in BOUND:
                sentence = f"{kernel} reads {type_.scalar}; torch binds long and float"
                yield Finding("inline argument", buffer.line, sentence)


def _types(structure: Structure, macros: Mapping[str, Macro]) -> dict[str, Type]:
    """Scalars, vectors and the source's own names for them."""
    types = dict(_METAL_TYPES)
    for name, kind in structure.types.items():
        known = _type_of(kind, macros, types)
        if known is not None:
            types[name] = known
    return types


def _type_of(
    words: Sequence[str], macros: Mapping[str, Macro], types: Mapping[str, Type]
) -> Type | None:
    """A type, where it is a scalar, a vector or a name for one."""
    kind = [word.text for word in expand([Word(word, 0) for word in words], macros)]
    if len(kind) == 1:
        return types.get(kind[0])
    if len(kind) == 6 and kind[0] == "vec" and kind[2] in types and kind[4] in _PLACES:
        return Type(types[kind[2]].scalar, _PLACES[kind[4]])
    return None


FLAGS = {
    "forward.metal": ("band", "softcap", "dropout", "lse", "packed"),
    "decode.metal": ("band", "softcap", "dropout", "lse"),
    "backward.metal": ("band", "softcap", "dropout", "packed", "grad_lse", "grad_mask"),
}


def specialisations(
    head_dim: int = 64, value_dim: int = 64
) -> Iterator[tuple[str, Specialisation]]:
    """Each kind that the launcher can ask for, of each file, with one pair of head dimensions."""
    for file, flags in FLAGS.items():
        rows = range(1, 9) if file == "decode.metal" else (0,)
        for dtype, mask, count in product(TYPES, (None, *MASK_TYPES), rows):
            for chosen in product((False, True), repeat=len(flags)):
                options: dict[str, Any] = dict(zip(flags, chosen, strict=True))
                if options.get("grad_mask") and mask in (None, torch.bool):
                    continue
                yield (
                    file,
                    Specialisation(dtype, head_dim, value_dim, mask, decode_rows=count, **options),
                )


STORAGE = (
    *(Storage(dtype) for dtype in TYPES),
    *(Storage(dtype, parts) for dtype in (torch.int8, torch.uint8) for parts in (1, 2)),
)


def stored_specialisations(
    head_dim: int = 64, value_dim: int = 64
) -> Iterator[tuple[str, Specialisation]]:
    """Operands in few bits: each storage, and one of them with all else that may be asked for."""
    levels = Storage(torch.int8, 2)
    for file, made in specialisations(head_dim, value_dim):
        asked = made.lse and made.dtype == torch.float32 and made.decode_rows in (0, 8)
        if asked and file != "backward.metal":
            for smoothed in (False, True):
                yield file, made._replace(stored=(levels, levels, levels), smoothed=smoothed)
    for storage in STORAGE:
        bare = Specialisation(torch.float32, head_dim, value_dim, lse=True)
        bare = bare._replace(stored=(storage, storage, storage), smoothed=storage.parts > 0)
        yield "forward.metal", bare
        yield "decode.metal", bare._replace(decode_rows=2)


def sizes(step: int = 8) -> Iterator[tuple[str, Specialisation]]:
    """Every use of threadgroup memory: by dtype, head dimensions (multiples of 8) and dropout."""
    dims = range(0, 257, step)
    for file, dtype, dropout in product(FLAGS, TYPES, (False, True)):
        rows = 1 if file == "decode.metal" else 0
        for head_dim, value_dim in product(dims, dims):
            made = Specialisation(dtype, head_dim, value_dim, dropout=dropout, decode_rows=rows)
            yield file, made
