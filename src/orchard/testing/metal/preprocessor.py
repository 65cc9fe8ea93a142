"""Metal source as words, its conditions decided and its macros expanded, without a compiler.

Enough of the C preprocessor for kernels: #if and its kin, object and function macros.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_WORD = re.compile(
    r"""\"(?:\\.|[^"\\\n])*\"|'(?:\\.|[^'\\\n])*'
    |\.?\d(?:[eEpP][+-]|[\w.])*
    |[A-Za-z_]\w*
    |::|->|<<=|<<|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|\S""",
    re.VERBOSE,
)
_DEFINE = re.compile(r"(\w+)(\(([\w\s,]*)\))?\s*(.*)", re.DOTALL)
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<",),
    ("+", "-"),
    ("*", "/", "%"),
)


class Word(NamedTuple):
    text: str
    line: int


class Macro(NamedTuple):
    parameters: tuple[str, ...] | None  # None: it takes none, and no parentheses
    body: tuple[str, ...]


class Include(NamedTuple):
    name: str  # with its brackets or quotes
    line: int


class UnknownValueError(ValueError):
    """An expression whose value cannot be told."""


class Preprocessed:
    """The lines of a source that count, as words; its macros, and what it includes."""

    def __init__(self, source: str) -> None:
        self.macros: dict[str, Macro] = {}
        self.includes: list[Include] = []
        self._taken: list[bool] = []  # of each open #if: whether its lines count
        self._done: list[bool] = []  # and whether one of its branches has been taken
        found: list[Word] = []
        for line, text in _lines(source):
            if text.lstrip().startswith("#"):
                self._directive(text.lstrip()[1:].strip(), line)
            elif all(self._taken):
                found += _numbered(text, line)
        self.words = tuple(found)

    def _directive(self, text: str, line: int) -> None:
        name, _, rest = text.partition(" ")
        if name in ("if", "ifdef", "ifndef"):
            outer = all(self._taken)
            self._taken.append(outer and self._decide(name, rest))
            self._done.append(not outer or self._taken[-1])
        elif name in ("elif", "else"):
            self._taken[-1] = not self._done[-1] and (name == "else" or self._decide("if", rest))
            self._done[-1] |= self._taken[-1]
        elif name == "endif":
            self._taken.pop()
            self._done.pop()
        elif not all(self._taken):
            return
        elif name == "include":
            self.includes.append(Include(rest.strip(), line))
        elif name == "undef":
            self.macros.pop(rest.strip(), None)
        elif name == "define":
            self._define(rest)

    def _decide(self, kind: str, text: str) -> bool:
        if kind != "if":
            return (text.strip() in self.macros) == (kind == "ifdef")
        text = re.sub(r"defined\s*\(?\s*(\w+)\s*\)?", lambda m: str(int(m[1] in self.macros)), text)
        words = expand([Word(word, 0) for word in _split(text)], self.macros)
        return bool(evaluate([word.text for word in words], {}, unknown=0))

    def _define(self, text: str) -> None:
        match = _DEFINE.match(text)
        if match is None:
            return
        name, parameters, names, body = match.groups()
        listed = None
        if parameters is not None:
            listed = tuple(each.strip() for each in names.split(",") if each.strip())
        self.macros[name] = Macro(listed, _split(body))


def expand(
    words: Sequence[Word], macros: Mapping[str, Macro], hidden: frozenset[str] = frozenset()
) -> list[Word]:
    """The words with every macro replaced, except those named in `hidden`."""
    out: list[Word] = []
    at = 0
    while at < len(words):
        text, line = words[at]
        macro = None if text in hidden else macros.get(text)
        at += 1
        called = at < len(words) and words[at].text == "("
        if macro is None or (macro.parameters is not None and not called):
            out.append(Word(text, line))
            continue
        body = macro.body
        if macro.parameters is not None:
            arguments, at = _arguments(words, at)
            given = dict(zip(macro.parameters, arguments, strict=False))
            body = tuple(part for word in body for part in given.get(word, (word,)))
        out += expand([Word(word, line) for word in body], macros, hidden | {text})
    return out


@lru_cache(maxsize=8192)
def _split(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text))


@lru_cache(maxsize=8192)
def _numbered(text: str, line: int) -> tuple[Word, ...]:
    return tuple(Word(word, line) for word in _split(text))


def _lines(source: str) -> Iterator[tuple[int, str]]:
    """Lines by number, without comments, with continued lines joined."""

    def blank(match: re.Match[str]) -> str:
        kept = match.group().startswith('"')
        return match.group() if kept else " " + "\n" * match.group().count("\n")

    lines = _COMMENT.sub(blank, source).split("\n")
    at = 0
    while at < len(lines):
        first, text = at, lines[at]
        while text.endswith("\\") and at + 1 < len(lines):
            at += 1
            text = text[:-1] + lines[at]
        at += 1
        yield first + 1, text


def _arguments(words: Sequence[Word], opening: int) -> tuple[list[tuple[str, ...]], int]:
    """The arguments of a macro, and where the words after it begin."""
    found: list[list[str]] = [[]]
    depth, at = 1, opening + 1
    while at < len(words):
        text = words[at].text
        depth += (text in "([{") - (text in ")]}")
        at += 1
        if depth == 0:
            break
        if depth == 1 and text == ",":
            found.append([])
        else:
            found[-1].append(text)
    return [tuple(each) for each in found], at


def evaluate(words: Sequence[str], sizes: Mapping[str, int], unknown: int | None = None) -> int:
    """An expression of integers. `sizes` are those of types; `unknown` stands for other names."""
    parser = _Expression(words, sizes, unknown)
    value = parser.choice()
    if parser.at != len(words):
        raise UnknownValueError(" ".join(words))
    return value


class _Expression:
    def __init__(self, words: Sequence[str], sizes: Mapping[str, int], unknown: int | None) -> None:
        self.words, self.sizes, self.unknown, self.at = words, sizes, unknown, 0

    def _next(self) -> str:
        return self.words[self.at] if self.at < len(self.words) else ""

    def _take(self, text: str) -> None:
        if self._next() != text:
            raise UnknownValueError(" ".join(self.words))
        self.at += 1

    def choice(self) -> int:
        value = self._binary(0)
        if self._next() != "?":
            return value
        self._take("?")
        first = self.choice()
        self._take(":")
        second = self.choice()
        return first if value else second

    def _binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._unary()
        value = self._binary(level + 1)
        while self._next() in _LEVELS[level]:
            sign = self._next()
            self.at += 1
            value = _apply(sign, value, self._binary(level + 1))
        return value

    def _unary(self) -> int:
        word = self._next()
        self.at += 1
        if word == "-":
            return -self._unary()
        if word == "!":
            return int(not self._unary())
        if word == "(":
            return self._closed()
        if word == "sizeof":
            self._take("(")
            kind = self._next()
            self.at += 1
            self._take(")")
            if kind in self.sizes:
                return self.sizes[kind]
        elif word in self.sizes and self._next() == "(":  # a conversion
            self.at += 1
            return self._closed()
        elif word[:1].isdigit():
            try:
                return int(word.rstrip("uUlL"), 0)
            except ValueError:
                pass
        elif self.unknown is not None and word.isidentifier():
            return self.unknown
        raise UnknownValueError(" ".join(self.words))

    def _closed(self) -> int:
        value = self.choice()
        self._take(")")
        return value


def _apply(sign: str, a: int, b: int) -> int:
    if sign in ("/", "%"):
        if b == 0:
            raise UnknownValueError("a division by zero")
        return a // b if sign == "/" else a % b
    results = {
        "||": lambda: int(bool(a or b)),
        "&&": lambda: int(bool(a and b)),
        "|": lambda: a | b,
        "^": lambda: a ^ b,
        "&": lambda: a & b,
        "==": lambda: int(a == b),
        "!=": lambda: int(a != b),
        "<": lambda: int(a < b),
        ">": lambda: int(a > b),
        "<=": lambda: int(a <= b),
        ">=": lambda: int(a >= b),
        "<<": lambda: a << b,
        "+": lambda: a + b,
        "-": lambda: a - b,
        "*": lambda: a * b,
    }
    return results[sign]()
