"""What Apple's compiler would refuse, or torch bind wrongly, found without either.

Names, pointers and structure are read from the words of a source; types are the emulator's part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchard.backends.metal.source import MASK_TYPES, TYPES, Specialisation
from orchard.testing.metal.preprocessor import (
    Macro,
    Preprocessed,
    UnknownValueError,
    Word,
    evaluate,
    expand,
)

BUFFERS = 31
THREADS = 1024
INLINE_BYTES = 4096
THREADGROUP_BYTES = 32768
SPACES = frozenset(("device", "constant", "threadgroup", "thread"))

_REFUSED = {  # words that have no place in a kernel
    "function_constant": "compile_shader sets no function constants",
    "virtual": "Metal has no virtual functions",
    "try": "Metal has no exceptions",
    "catch": "Metal has no exceptions",
    "throw": "Metal has no exceptions",
    "new": "Metal allocates nothing",
    "delete": "Metal allocates nothing",
    "goto": "Metal has no goto",
    "dynamic_cast": "Metal has no run-time types",
    "typeid": "Metal has no run-time types",
    "double": "Metal has no double",
    "atomic_float": "float atomics are emulated on Apple GPUs, and not deterministic",
    "bfloat16": "Metal 4.1 has a name bfloat16 of its own",
}
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
_SIZES = _SCALARS | {  # a vector of three takes the place of four
    f"{name}{count}": size * (2 if count == 2 else 4)
    for name, size in _SCALARS.items()
    for count in (2, 3, 4)
}
_NOT_FUNCTIONS = frozenset(("__attribute__", "decltype", "alignas", "sizeof", "_Pragma", "if"))
_KEYWORDS = frozenset(("return", "else", "case", "do", "break", "continue", "using", "enum"))
_VECTOR_OF_THREE = re.compile("(?:u?char|u?short|u?int|u?long|half|bfloat|float)3")
_METAL_HEADER = re.compile(r"<metal(?:_\w+)?(?:/\w+)*>")
_TORCH_HEADER = re.compile(r"<(?:c10/metal|ATen/native/mps)/[\w/]+\.h>")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Finding(NamedTuple):
    rule: str
    line: int  # 0: of a launch
    sentence: str

    def __str__(self) -> str:
        return f"{self.line}: {self.rule}: {self.sentence}" if self.line else self.sentence


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
    # A macro for a number or a scalar type matters to the use of memory alone.
    macros = {name: macro for name, macro in read.macros.items() if not _is_plain(macro)}
    structure = _structure(read.words, tuple(macros.items()))
    return [*found, *structure.findings, *_memory(structure, read.macros)]


def _is_plain(macro: Macro) -> bool:
    if macro.parameters is not None or len(macro.body) != 1:
        return False
    return macro.body[0] in _SCALARS or re.fullmatch(r"\d{1,9}", macro.body[0]) is not None


class Array(NamedTuple):
    """A threadgroup variable: its kernel, the words of its type, and those of its sizes."""

    kernel: str
    kind: tuple[str, ...]
    sizes: tuple[tuple[Word, ...], ...]
    line: int


class Structure(NamedTuple):
    findings: tuple[Finding, ...]
    arrays: tuple[Array, ...]
    types: dict[str, tuple[str, ...]]  # by typedef


@lru_cache(maxsize=2048)
def _structure(words: tuple[Word, ...], macros: tuple[tuple[str, Macro], ...]) -> Structure:
    reader = _Reader(expand(words, dict(macros)))
    reader.read()
    return Structure(tuple(reader.findings), tuple(reader.arrays), reader.types)


def _memory(structure: Structure, macros: dict[str, Macro]) -> Iterator[Finding]:
    """Kernels with more threadgroup memory than there is, or with how much cannot be told."""
    sizes = dict(_SIZES)
    for name, kind in structure.types.items():
        size = _size_of(kind, macros, sizes)
        if size is not None:
            sizes[name] = size
    used: dict[str, int] = {}
    for kernel, kind, extents, line in structure.arrays:
        try:
            size = _size_of(kind, macros, sizes)
            if size is None:
                raise UnknownValueError(" ".join(kind))
            for extent in extents:
                size *= evaluate([word.text for word in expand(extent, macros)], sizes)
        except UnknownValueError as error:
            yield Finding("memory", line, f"its size cannot be told: {error}")
            continue
        used[kernel] = used.get(kernel, 0) + -(-size // 16) * 16
        if used[kernel] > THREADGROUP_BYTES:
            sentence = f"{kernel} has {used[kernel]} bytes of threadgroup memory"
            yield Finding("memory", line, f"{sentence}; there are {THREADGROUP_BYTES}")


def _size_of(words: Sequence[str], macros: dict[str, Macro], sizes: dict[str, int]) -> int | None:
    """Bytes of a type, where it is a scalar, a vector or a name for one."""
    kind = [word.text for word in expand([Word(word, 0) for word in words], macros)]
    if len(kind) == 1:
        return sizes.get(kind[0])
    if len(kind) == 6 and kind[0] == "vec" and kind[2] in sizes and kind[4].isdigit():
        return sizes[kind[2]] * (2 if kind[4] == "2" else 4)
    return None


class _Function(NamedTuple):
    name: str
    opening: int  # of its parameters
    body: int  # its {
    is_kernel: bool


class _Reader:
    """Finds functions, members and declarations in words, and what is wrong with them."""

    def __init__(self, words: list[Word]) -> None:
        self.words = words
        self.findings: list[Finding] = []
        self.arrays: list[Array] = []
        self.types: dict[str, tuple[str, ...]] = {}
        self._functions: list[_Function] = []
        self._closing: dict[int, int] = {}
        stack: list[int] = []
        for at, (text, _) in enumerate(words):
            if text in _CLOSING:
                stack.append(at)
            elif text in _CLOSING.values() and stack:
                self._closing[stack.pop()] = at
        self._unclosed = stack

    def read(self) -> None:
        if self._unclosed:
            self._say("brackets", self._unclosed[0], "a bracket that is not closed")
            return
        self._words()
        self._scope(0, len(self.words), "")
        for function in self._functions:
            self._body(function)
        self._calls()

    def _say(self, rule: str, at: int, sentence: str) -> None:
        self.findings.append(Finding(rule, self.words[at].line, sentence))

    def _text(self, at: int) -> str:
        return self.words[at].text if 0 <= at < len(self.words) else ""

    def _texts(self, start: int, stop: int) -> list[str]:
        return [word.text for word in self.words[start:stop]]

    # ---- Words that may stand anywhere

    def _words(self) -> None:
        for at, (text, _) in enumerate(self.words):
            after = self._text(at + 1)
            if text in _REFUSED:
                self._say(text, at, _REFUSED[text])
            elif text == "if" and after == "constexpr":
                self._say("if constexpr", at, "Metal has it from 4.0 on only")
            elif text == "std" and (after == "::" or self._text(at - 1) == "namespace"):
                self._say("std", at, "Metal has no standard library")
            elif text == "long" and after == "long":
                self._say("long long", at, "Metal has no long long")
            elif text == "atomic" and self._texts(at + 1, at + 3) == ["<", "float"]:
                self._say("atomic_float", at, _REFUSED["atomic_float"])
            elif text[:1].isdigit():
                self._number(at, text)
            elif text == "[":
                self._bracket(at)
            elif text.endswith("_cast") and after == "<":
                self._cast(at)
            elif text == "(":
                self._old_cast(at)
            elif text in ("typedef", "using"):
                self._alias(at)

    def _number(self, at: int, text: str) -> None:
        whole = re.fullmatch(r"(0[xX][0-9a-fA-F]+|\d+)([uUlL]*)", text)
        if whole and ("l" in whole[2].lower() or int(whole[1], 0) >= 2**32):
            self._say("64-bit literal", at, f"{text} has more than 32 bits")

    def _bracket(self, at: int) -> None:
        before, after = self._text(at - 1), self._text(at + 1)
        if before == "[" or after == "[":
            if after == "threadgroup" and self._text(at + 2) == "(":
                self._say("threadgroup argument", at, "compile_shader cannot give it a size")
            if after == "buffer" and self._text(at + 2) == "(":
                index = self._text(at + 3)
                if index.isdigit() and int(index) >= BUFFERS:
                    self._say("buffers", at, f"buffer {index}: there are {BUFFERS}")
        elif before == "return" or not (before in (")", "]") or before.isidentifier()):
            self._say("lambda", at, "Metal has lambdas from 3.2 on only")

    def _cast(self, at: int) -> None:
        depth, stop = 0, at + 1
        while stop < len(self.words):
            depth += (self._text(stop) == "<") - (self._text(stop) == ">")
            if depth == 0:
                break
            stop += 1
        self._qualified(at, stop, "what it converts to")

    def _old_cast(self, at: int) -> None:
        stop = self._closing[at]
        inner = self._texts(at + 1, stop)
        if len(inner) > 1 and inner[-1] in ("*", "&") and _is_type(inner[:-1]):
            self._qualified(at, stop, "what it converts to")

    def _alias(self, at: int) -> None:
        stop = at
        while self._text(stop) not in (";", ""):
            stop += 1
        if self._text(at) == "typedef":
            self.types[self._text(stop - 1)] = tuple(self._texts(at + 1, stop - 1))
        elif self._text(at + 2) == "=":
            self.types[self._text(at + 1)] = tuple(self._texts(at + 3, stop))

    def _qualified(self, start: int, stop: int, what: str) -> None:
        """A pointer or reference among these words has to say what it points into."""
        texts: list[str] = []
        at = start
        while at < stop and self._text(at) != "=":
            if self._text(at) == "[":  # an attribute, or a size
                at = self._closing[at]
            else:
                texts.append(self._text(at))
            at += 1
        if ("*" in texts or "&" in texts or "&&" in texts) and not SPACES.intersection(texts):
            self._say("address space", start, f"{what} names no address space")

    # ---- Scopes

    def _scope(self, start: int, stop: int, structure: str) -> None:
        """Declarations between `start` and `stop`, inside a structure if it has a name."""
        begin = at = start
        named: int | None = None  # where the parameters of what looks like a function begin
        while at < stop:
            text = self._text(at)
            if text == "(" and named is None and self._names_function(at):
                named = at
            if text in ("(", "["):
                at = self._closing[at] + 1
                continue
            if text == "{":
                at = self._block(begin, at, named, structure) + 1
                begin, named = at, None
                continue
            if text == ";":
                if named is not None:
                    self._signature(begin, named, at, structure)
                else:
                    self._declared(begin, at)
                begin, named = at + 1, None
            elif text == ":" and at == begin + 1:  # public:
                begin = at + 1
            at += 1

    def _names_function(self, at: int) -> bool:
        name = self._text(at - 1)
        if self._text(at - 2) == "operator":
            return True
        return name.isidentifier() and name not in _NOT_FUNCTIONS

    def _block(self, begin: int, opening: int, named: int | None, structure: str) -> int:
        """What a { at the level of declarations begins; where it ends."""
        closing = self._closing[opening]
        head = self._texts(begin, opening)
        kind = next((word for word in head if word in ("struct", "class", "union")), "")
        if named is not None and "=" not in self._texts(self._closing[named], opening):
            self._signature(begin, named, opening, structure)
            is_kernel = "kernel" in self._texts(begin, named)
            self._functions.append(_Function(self._text(named - 1), named, opening, is_kernel))
        elif kind and "enum" not in head:
            name = self._text(begin + head.index(kind) + 1)
            self._scope(opening + 1, closing, name if name != "{" else "a structure")
        elif "namespace" in head:
            self._scope(opening + 1, closing, "")
        return closing

    def _signature(self, begin: int, opening: int, stop: int, structure: str) -> None:
        closing = self._closing[opening]
        name = self._text(opening - 1)
        self._qualified(begin, opening, f"what {name} returns")
        for start, end in self._split(opening + 1, closing):
            texts = self._texts(start, end)
            self._qualified(start, end, f"a parameter of {name}")
            by_three = any(map(_VECTOR_OF_THREE.fullmatch, texts))
            if "constant" in texts and by_three and ("*" in texts or "&" in texts):
                self._say("vector of 3", start, "fills the place of 4, a list does not")
        member = structure and name != structure and "static" not in self._texts(begin, opening)
        if member and not SPACES.intersection(self._texts(closing, stop)):
            self._say("member", opening, f"{structure}::{name} does not say where `this` lies")

    def _split(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts between commas, brackets taken as wholes."""
        at = begin = start
        depth = 0
        while at < stop:
            text = self._text(at)
            depth += (text == "<") - (text == ">")
            if text in _CLOSING:
                at = self._closing[at]
            elif text == "," and depth <= 0:
                yield begin, at
                begin = at + 1
            at += 1
        if begin < stop:
            yield begin, stop

    # ---- Bodies

    def _body(self, function: _Function) -> None:
        closing = self._closing[function.body]
        for at in range(function.body, closing):
            text = self._text(at)
            if text in (";", "{", "}") or (text == "(" and self._text(at - 1) == "for"):
                self._statement(at + 1, closing, function)

    def _statement(self, start: int, stop: int, function: _Function) -> None:
        at = start
        while at < stop and self._text(at) not in ("=", ";", "{", "}", "(", ")", "[", ":"):
            at += 1
        head = self._texts(start, at)
        plain = "threadgroup" in head and "*" not in head and "&" not in head
        if plain and self._text(at) in ("[", ";", "="):
            self._array(start, at, function)
        if self._text(at) in ("=", ";", "[", "{"):
            self._declared(start, at)

    def _declared(self, start: int, stop: int) -> None:
        """`type* name`: a product of the same look would be a statement without effect."""
        head = self._texts(start, stop)
        marks = [n for n, word in enumerate(head) if word in ("*", "&", "&&")]
        if marks and marks[0] > 0 and _is_type(head[: marks[0]]):
            rest = [word for word in head[marks[0] :] if word not in ("*", "&", "&&", "const")]
            if rest and rest[0].isidentifier():
                self._qualified(start, stop, rest[0])

    def _array(self, start: int, at: int, function: _Function) -> None:
        head = self._texts(start, at)
        if not function.is_kernel:
            self._say("threadgroup variable", start, f"{function.name} is no kernel")
        sizes = []
        while self._text(at) == "[":
            closing = self._closing[at]
            sizes.append(tuple(self.words[at + 1 : closing]))
            at = closing + 1
        kind = [word for word in head[:-1] if word not in ("threadgroup", "const")]
        line = self.words[start].line
        self.arrays.append(Array(function.name, tuple(kind), tuple(sizes), line))

    def _calls(self) -> None:
        """Functions that lead back to themselves."""
        names = {function.name for function in self._functions}
        calls: dict[str, set[str]] = {name: set() for name in names}
        for function in self._functions:
            for at in range(function.body, self._closing[function.body]):
                if self._text(at) in names and self._text(at + 1) in ("(", "<"):
                    calls[function.name].add(self._text(at))
        for function in self._functions:
            seen: set[str] = set()
            ahead = set(calls[function.name])
            while ahead:
                name = ahead.pop()
                seen.add(name)
                ahead |= calls[name] - seen
            if function.name in seen:
                self._say("recursion", function.opening, f"{function.name} leads back to itself")


def _is_type(words: Sequence[str]) -> bool:
    """Whether these words can be the name of a type."""
    possible = all(word.isidentifier() or word in ("::", "<", ">", ",") for word in words)
    closed = words.count("<") == words.count(">")
    return bool(words) and possible and closed and not _KEYWORDS.intersection(words)


# ---- Launches


def check_launch(
    args: Sequence[Any], threads: Sequence[int], group_size: Sequence[int]
) -> list[Finding]:
    """What torch would refuse or bind otherwise than meant, and what a GPU would not forgive."""
    found = [finding for arg in args for finding in _argument(arg)]
    if len(args) > BUFFERS:
        found.append(Finding("buffers", 0, f"{len(args)} arguments: there are {BUFFERS} buffers"))
    if min(threads, default=0) < 1:
        found.append(Finding("zero-size launch", 0, f"a grid of {tuple(threads)} threads"))
    size = 1
    for extent in group_size:
        size *= extent
    if not 0 < size <= THREADS:
        found.append(Finding("group size", 0, f"a group of {size} threads, of {THREADS} at most"))
    if len(threads) != len(group_size):
        found.append(Finding("grid", 0, "threads and group_size differ in length"))
    return found


def _argument(arg: Any) -> Iterator[Finding]:
    if isinstance(arg, Tensor):
        if arg.numel() == 0:
            yield Finding("empty tensor", 0, "has no memory to bind")
        if arg.dtype in (torch.float64, torch.complex128):
            yield Finding("dtype", 0, f"MPS has no {arg.dtype}")
    elif isinstance(arg, (list, tuple)):
        yield from _numbers(arg)
    elif not isinstance(arg, (int, float)):
        yield Finding("argument", 0, f"torch takes no {type(arg).__name__}")


def _numbers(values: Sequence[Any]) -> Iterator[Finding]:
    kinds = {int if isinstance(value, int) else type(value) for value in values}
    if not values:
        yield Finding("empty list", 0, "torch takes no empty list")
    elif any(issubclass(kind, Tensor) for kind in kinds):
        yield Finding("tensor list", 0, "torch does not make the tensors of a list resident")
    elif not kinds <= {int, float}:
        yield Finding("argument", 0, "torch takes lists of int or float")
    elif len(kinds) > 1:
        yield Finding("mixed list", 0, "the first element decides the type of all")
    if len(values) == 3:
        yield Finding("list of 3", 0, "a vector of three takes the place of four")
    if len(values) * (4 if kinds == {float} else 8) > INLINE_BYTES:
        yield Finding("inline bytes", 0, f"{len(values)} numbers are above {INLINE_BYTES} bytes")


class Recorder:
    """A MetalRuntime that compiles and launches nothing, and checks what it is asked to."""

    def __init__(self) -> None:
        self.lock: AbstractContextManager[Any] = nullcontext()
        self.findings: list[Finding] = []
        self.sources = 0
        self.launches: list[str] = []

    def compile(self, source: str) -> Any:
        self.sources += 1
        self.findings += check(source)
        return _Library(self)


class _Library:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        def launch(*args: Any, threads: Sequence[int], group_size: Sequence[int]) -> None:
            self._recorder.launches.append(name)
            self._recorder.findings += check_launch(args, threads, group_size)

        return launch


# ---- Every specialisation


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
                options = dict(zip(flags, chosen, strict=True))
                if options.get("grad_mask") and mask in (None, torch.bool):
                    continue
                yield (
                    file,
                    Specialisation(dtype, head_dim, value_dim, mask, decode_rows=count, **options),
                )


def sizes(step: int = 8) -> Iterator[tuple[str, Specialisation]]:
    """Every use of threadgroup memory: by dtype, head dimensions (multiples of 8) and dropout."""
    dims = range(0, 257, step)
    for file, dtype, dropout in product(FLAGS, TYPES, (False, True)):
        rows = 1 if file == "decode.metal" else 0
        for head_dim, value_dim in product(dims, dims):
            made = Specialisation(dtype, head_dim, value_dim, dropout=dropout, decode_rows=rows)
            yield file, made
