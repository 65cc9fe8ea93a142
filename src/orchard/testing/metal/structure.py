"""The structure of Metal source, read from its words, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from orchard.backends.metal.limits import BUFFERS
from orchard.testing.metal.preprocessor import Macro, Word, expand

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
_EITHER_WAY = frozenset(("exp", "exp2", "exp10", "tanh"))  # fast:: or precise::, which differ
_MATRICES = re.compile(r"(?:make_filled_)?simdgroup_(?:matrix|\w+8x8|load|store|multiply\w*)")
_NOT_FUNCTIONS = frozenset(("__attribute__", "decltype", "alignas", "sizeof", "_Pragma", "if"))
_KEYWORDS = frozenset(("return", "else", "case", "do", "break", "continue", "using", "enum"))
_NO_VARIABLE = frozenset(
    ("using", "typedef", "struct", "class", "union", "enum", "friend", "extern")
)
_VECTOR_OF_THREE = re.compile("(?:u?char|u?short|u?int|u?long|half|bfloat|float)3")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Finding(NamedTuple):
    rule: str
    line: int  # 0: of a launch
    sentence: str

    def __str__(self) -> str:
        return f"{self.line}: {self.rule}: {self.sentence}" if self.line else self.sentence


class Array(NamedTuple):
    """A threadgroup variable: its kernel, the words of its type, and those of its sizes."""

    kernel: str
    kind: tuple[str, ...]
    sizes: tuple[tuple[Word, ...], ...]
    line: int


class Buffer(NamedTuple):
    """A parameter of a kernel that an argument is bound to."""

    number: int
    space: str
    kind: tuple[str, ...]
    line: int


class Structure(NamedTuple):
    findings: tuple[Finding, ...]
    arrays: tuple[Array, ...]
    types: dict[str, tuple[str, ...]]  # by typedef
    kernels: dict[str, tuple[Buffer, ...]]
    group_sizes: tuple[tuple[Word, ...], ...]  # what max_total_threads_per_threadgroup says
    matrices: int  # the first line with a simdgroup matrix; 0: there is none


@lru_cache(maxsize=2048)
def structure_of(words: tuple[Word, ...], macros: tuple[tuple[str, Macro], ...]) -> Structure:
    reader = _Reader(expand(words, dict(macros)))
    reader.read()
    return Structure(
        tuple(reader.findings),
        tuple(reader.arrays),
        reader.types,
        reader.kernels,
        tuple(reader.group_sizes),
        reader.matrices,
    )


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
        self.kernels: dict[str, tuple[Buffer, ...]] = {}
        self.group_sizes: list[tuple[Word, ...]] = []
        self.matrices = 0
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
            elif text in _EITHER_WAY and after == "(":
                self._chosen(at)
            elif text == "max_total_threads_per_threadgroup" and after == "(":
                self.group_sizes.append(tuple(self.words[at + 2 : self._closing[at + 1]]))
            elif not self.matrices and _MATRICES.fullmatch(text):
                self.matrices = self.words[at].line

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

    def _chosen(self, at: int) -> None:
        """Fast math is off in torch, so a function without its variant is the slow one."""
        if self._texts(at - 2, at) not in (["fast", "::"], ["precise", "::"]):
            self._say("fast or precise", at, f"{self._text(at)} does not say which it is")

    def _cast(self, at: int) -> None:
        self._qualified(at, self._angle(at + 1), "what it converts to")

    def _angle(self, at: int) -> int:
        """Where the < at `at` is closed."""
        depth, stop = 0, at
        while stop < len(self.words):
            depth += (self._text(stop) == "<") - (self._text(stop) == ">")
            if depth == 0:
                break
            stop += 1
        return stop

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
        assigned = False
        while at < stop:
            text = self._text(at)
            if text == "template" and self._text(at + 1) == "<":
                at = self._angle(at + 1) + 1
                continue
            if text == "(" and named is None and not assigned and self._names_function(at):
                named = at
            if text in ("(", "[") or (text == "{" and assigned):
                at = self._closing[at] + 1
                continue
            if text == "{":
                at = self._block(begin, at, named, structure) + 1
                begin, named = at, None
                continue
            if text == "=" and self._text(at - 1) != "operator":
                assigned = True
            elif text == ";":
                if named is not None:
                    self._signature(begin, named, at, structure)
                else:
                    self._variable(begin, at, structure)
                begin, named, assigned = at + 1, None, False
            elif text == ":" and at == begin + 1:  # public:
                begin = at + 1
            at += 1

    def _variable(self, begin: int, stop: int, structure: str) -> None:
        """One outside of functions: of a structure, or for the whole program."""
        self._declared(begin, stop)
        if self._text(begin) == "template":
            begin = self._angle(begin + 1) + 1
        head = self._texts(begin, stop)
        if not head or _NO_VARIABLE.intersection(head) or (structure and "static" not in head):
            return
        if "constant" not in head:
            self._say("program scope", begin, "a variable outside of functions has to be constant")

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
        if named is not None:
            self._signature(begin, named, opening, structure)
            name, is_kernel = self._text(named - 1), "kernel" in self._texts(begin, named)
            self._functions.append(_Function(name, named, opening, is_kernel))
            if is_kernel:
                self.kernels[name] = tuple(self._buffers(named))
        elif kind and "enum" not in head:
            name = self._text(begin + head.index(kind) + 1)
            self._scope(opening + 1, closing, name if name != "{" else "a structure")
        elif "namespace" in head:
            self._scope(opening + 1, closing, "")
        else:
            self._variable(begin, opening, structure)
        return closing

    def _buffers(self, opening: int) -> Iterator[Buffer]:
        """Parameters that are no built-in values; without an attribute they count by themselves."""
        given, free = [], []
        for start, stop in self._split(opening + 1, self._closing[opening]):
            texts = self._texts(start, stop)
            attribute = texts.index("[") if "[" in texts else len(texts)
            space = next((word for word in texts if word in SPACES), "")
            kind = [
                word
                for word in texts[: attribute - 1]
                if word not in SPACES and word not in ("const", "volatile", "*", "&")
            ]
            buffer = Buffer(-1, space, tuple(kind), self.words[start].line)
            if attribute == len(texts):
                free.append(buffer)
            elif texts[attribute + 2] == "buffer":
                given.append(buffer._replace(number=int(texts[attribute + 4])))
        yield from given
        taken = {buffer.number for buffer in given}
        numbers = (number for number in count() if number not in taken)
        for buffer in free:
            yield buffer._replace(number=next(numbers))

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
        if self._text(start) == "alignas":
            start = self._closing[start + 1] + 1
        at = start
        while at < stop and self._text(at) not in ("=", ";", "{", "}", "(", ")", "[", ":"):
            at += 1
        head = self._texts(start, at)
        if "static" in head and "constant" not in head:
            self._say("static variable", start, "what outlives its function has to be constant")
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
