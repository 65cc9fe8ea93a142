"""From preprocessed Metal source to C++ that clang compiles against shim.h.

The text is taken as tokens; lines stay where they are, so that the compiler's words and the
reports of a run name the lines of the source. What is changed:

- explicit instantiations with a host_name go, and the kernel asked for gets an entry point;
- threadgroup variables become references into memory that the runtime provides;
- vector constructors and casts become calls, for clang's vectors have none of Metal's;
- literals: 1.0h is half, 1.0 is float; strings are in the constant address space.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# In the order of the built-in values in runtime.c.
BUILTINS = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "thread_index_in_threadgroup",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "threads_per_grid",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "threads_per_simdgroup",
)
ALIASES = {"thread_execution_width": "threads_per_simdgroup"}
ARRAYS = 64  # threadgroup variables that a kernel may have

_VECTOR = re.compile("(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234]")
_UNSEEN = re.compile("u?long[34]")  # 32 bytes, for which clang announces no access
_TOKEN = re.compile(
    r"""(?P<space>[^\S\n]+|\n)
    |(?P<line>^\#[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark>::|->|<=|>=|==|!=|&&|\|\||.)""",
    re.VERBOSE | re.MULTILINE,
)
_FLOATING = re.compile(r"(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")
_MARKER = re.compile(r'#\s*(?:line\s+)?(\d+)\s+"((?:\\.|[^"\\])*)"')
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class RewriteError(Exception):
    """Source that Metal would not take, or that the emulator cannot."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(f"{where}: error: {message}")


@dataclass(frozen=True)
class Variable:
    """A threadgroup variable."""

    slot: int  # among those of its kernel
    number: int  # among those of the source
    name: str
    where: str


@dataclass(frozen=True)
class Kernel:
    """A kernel function as launched: by its host name."""

    name: str
    call: str  # the function, with template arguments
    codes: tuple[int, ...]  # by parameter: buffer index, or -1 - index of a built-in value
    limit: str  # an expression for max_total_threads_per_threadgroup; may be empty
    at: int  # token that the entry point follows
    variables: tuple[Variable, ...] = ()

    @property
    def buffers(self) -> frozenset[int]:
        return frozenset(code for code in self.codes if code >= 0)

    def entry(self) -> str:
        codes = ", ".join(map(str, self.codes))
        limit = self.limit or "1024"
        return (
            ' extern "C" __attribute__((visibility("default"))) void emu_entry('
            "void* const* buffers, const emu_u32 (*builtins)[3]) {"
            f" ::emu::invoke<{codes}>(&{self.call}, {{buffers, builtins}}); }}"
            ' extern "C" __attribute__((visibility("default"))) emu_u32 emu_limit() {'
            f" return {limit}; }}"
            ' extern "C" __attribute__((visibility("default"))) int emu_scalar(int buffer) {'
            f" return ::emu::scalar<{codes}>(&{self.call}, buffer); }}"
        )


@dataclass
class _Definition:
    codes: tuple[int, ...]
    limit: str
    variables: list[Variable] = field(default_factory=list)


class Source:
    """A preprocessed source, understood as far as needed."""

    def __init__(self, text: str) -> None:
        self.tokens = [(str(m.lastgroup), m.group()) for m in _TOKEN.finditer(text)]
        self.code = [i for i, (kind, _) in enumerate(self.tokens) if kind not in ("space", "line")]
        self.words = [self.tokens[i][1] for i in self.code]
        self.places = list(self._places())
        self.before: dict[int, str] = {}
        self.replaced: dict[int, str] = {}
        self.kernels: dict[str, Kernel] = {}
        self._functions: dict[str, _Definition] = {}
        self._bodies: list[tuple[int, int, str]] = []
        self._matching = self._match()
        self._find_kernels()
        self._move_variables()
        self._rewrite_values()

    def text(self, kernel: str | None) -> str:
        """The C++ source, with an entry point for one kernel."""
        out = []
        chosen = self.kernels[kernel] if kernel is not None else None
        position = {index: number for number, index in enumerate(self.code)}
        for index, (_, text) in enumerate(self.tokens):
            number = position.get(index)
            if number is None:
                out.append(text)
                continue
            out.append(self.before.get(number, ""))
            out.append(self.replaced.get(number, text))
            if chosen is not None and chosen.at == number:
                out.append(chosen.entry())
        return "".join(out)

    def where(self, number: int) -> str:
        file, line = self.places[number]
        return f"{file}:{line}"

    # ---- Structure

    def _places(self) -> Iterator[tuple[str, int]]:
        file, line = "program_source", 1
        for kind, text in self.tokens:
            if kind == "line":
                marker = _MARKER.match(text)
                if marker:
                    file, line = marker[2], int(marker[1]) - 1
            elif text == "\n":
                line += 1
            elif kind != "space":
                yield file, line

    def _match(self) -> dict[int, int]:
        """Where each bracket closes, and back."""
        stack: list[int] = []
        pairs: dict[int, int] = {}
        for number, word in enumerate(self.words):
            if word in _CLOSING:
                stack.append(number)
            elif word in ")]}" and stack:
                opened = stack.pop()
                pairs[opened], pairs[number] = number, opened
        return pairs

    def _word(self, number: int) -> str:
        return self.words[number] if 0 <= number < len(self.words) else ""

    def _is_name(self, number: int) -> bool:
        word = self._word(number)
        return bool(word) and (word[0].isalpha() or word[0] == "_")

    def _joined(self, start: int, stop: int) -> str:
        return " ".join(self.words[start:stop])

    def _angle(self, start: int) -> int | None:
        """The number of the > that closes the < at `start`."""
        depth, number = 0, start
        while number < len(self.words):
            word = self.words[number]
            if word in _CLOSING:
                number = self._matching.get(number, number)
            elif word == "<":
                depth += 1
            elif word == ">":
                depth -= 1
                if depth == 0:
                    return number
            elif word in ";})]":
                return None
            number += 1
        return None

    def _angle_back(self, stop: int) -> int | None:
        """The number of the < that the > at `stop` closes."""
        depth, number = 0, stop
        while number >= 0:
            word = self.words[number]
            if word in ")]}":
                number = self._matching.get(number, number)
            elif word == ">":
                depth += 1
            elif word == "<":
                depth -= 1
                if depth == 0:
                    return number
            elif word in ";{([":
                return None
            number -= 1
        return None

    def _attribute_end(self, number: int) -> int:
        """The number after [[...]] that starts at `number`, or `number` itself."""
        if self._word(number) == "[" and self._word(number + 1) == "[":
            return self._matching[number] + 1
        return number

    # ---- Kernels

    def _find_kernels(self) -> None:
        instantiations = []
        for number, word in enumerate(self.words):
            if word != "kernel" or number in self.replaced:
                continue
            start = number
            while start and self.words[start - 1] not in (";", "{", "}"):
                start -= 1
            if self.words[start] == "template" and self._word(start + 1) != "<":
                instantiations.append(start)
                self._remove_statement(start)
            else:
                self._define(start, number)
        for start in instantiations:
            self._instantiate(start)

    def _remove_statement(self, start: int) -> int:
        number = start
        while self.words[number] != ";":
            self.replaced[number] = ""
            number += 1
        self.replaced[number] = ""
        return number

    def _define(self, start: int, keyword: int) -> None:
        header, host, limit = "", None, ""
        number = start
        if self._word(number) == "template":
            closing = self._angle(number + 1)
            if closing is None:
                return
            header = self._joined(start, closing + 1)
            number = closing + 1
        # The name follows `void`, perhaps after attributes; it is followed by the parameters.
        while self._word(number) not in ("void", ";", "{", ""):
            end = self._attribute_end(number)
            if end > number:
                host = self._host_name(number, end) or host
                limit = self._limit(number, end) or limit
                if number < keyword < end:
                    self.replaced[end - 1] = "] static"
                number = end
            else:
                number += 1
        if self._word(number) != "void":
            raise RewriteError("a kernel must return void", self.where(keyword))
        number += 1
        while (end := self._attribute_end(number)) > number:
            host = self._host_name(number, end) or host
            limit = self._limit(number, end) or limit
            number = end
        name, opening = self.words[number], number + 1
        if self._word(opening) != "(":
            raise RewriteError(
                "a kernel's name must be followed by its parameters", self.where(number)
            )
        closing = self._matching[opening]
        if self._word(closing + 1) != "{":
            return  # a declaration
        body = self._matching[closing + 1]
        definition = _Definition(self._parameters(opening, closing), "")
        if limit:
            definition.limit = f"emu_limit_{name}"
            constant_ = f"{header} constexpr unsigned emu_limit_{name} = ({limit}); "
            self.before[start] = constant_ + self.before.get(start, "")
        self._functions[name] = definition
        self._bodies.append((closing + 1, body, name))
        if not header:
            shown = host or name
            self.kernels[shown] = Kernel(shown, name, definition.codes, definition.limit, body)

    def _instantiate(self, start: int) -> None:
        number, host = start + 1, None
        while self._word(number) != ";":
            end = self._attribute_end(number)
            if end > number:
                host = self._host_name(number, end) or host
                number = end
                continue
            if self._word(number) == "decltype":
                number = self._matching[number + 1] + 1
                continue
            if self._is_name(number) and self._word(number + 1) == "<":
                closing = self._angle(number + 1)
                if closing is not None and self._word(closing + 1) in ("(", ";"):
                    break
            number += 1
        name = self._word(number)
        closing = self._angle(number + 1) if name != ";" else None
        if host is None or closing is None or name not in self._functions:
            raise RewriteError("cannot read this instantiation of a kernel", self.where(start))
        arguments = self._joined(number + 1, closing + 1)
        definition = self._functions[name]
        limit = definition.limit + arguments if definition.limit else ""
        end = start
        while self.words[end] != ";":
            end += 1
        self.kernels[host] = Kernel(host, name + arguments, definition.codes, limit, end)

    def _host_name(self, start: int, stop: int) -> str | None:
        for number in range(start, stop):
            if self.words[number] == "host_name":
                closing = self._matching[number + 1]
                return "".join(word[1:-1] for word in self.words[number + 2 : closing])
        return None

    def _limit(self, start: int, stop: int) -> str:
        for number in range(start, stop):
            if self.words[number] == "max_total_threads_per_threadgroup":
                return self._joined(number + 2, self._matching[number + 1])
        return ""

    def _parameters(self, opening: int, closing: int) -> tuple[int, ...]:
        codes: list[int | None] = []
        start = opening + 1
        while start < closing:
            stop = start
            while stop < closing and self.words[stop] != ",":
                if self.words[stop] in _CLOSING:
                    stop = self._matching[stop]
                elif self.words[stop] == "<":
                    stop = self._angle(stop) or stop
                stop += 1
            codes.append(self._parameter(start, stop))
            start = stop + 1
        free = (index for index in range(len(codes)) if index not in codes)
        return tuple(next(free) if code is None else code for code in codes)

    def _parameter(self, start: int, stop: int) -> int | None:
        for number in range(start, stop - 1):
            if self.words[number] != "[" or self.words[number + 1] != "[":
                continue
            name = self.words[number + 2]
            name = ALIASES.get(name, name)
            if name in BUILTINS:
                return -1 - BUILTINS.index(name)
            if name == "buffer":
                return int(self.words[number + 4])
            raise RewriteError(f"[[{name}]] is not emulated", self.where(number))
        return None

    # ---- Threadgroup variables

    def _move_variables(self) -> None:
        order = {name: number for number, (_, _, name) in enumerate(self._bodies)}
        for number, word in enumerate(self.words):
            first = self._aligned(number)
            if word != "threadgroup" or self._word(first - 1) not in ("{", "}", ";", ")", ":"):
                continue
            stop = number
            while self.words[stop] != ";":
                stop = self._matching.get(stop, stop) if self.words[stop] in _CLOSING else stop
                stop += 1
            if {"*", "&", "="} & set(self.words[number:stop]) - self._inside(number, stop):
                continue  # a pointer or reference
            owner = next((name for a, b, name in self._bodies if a < number < b), None)
            if owner is None:
                raise RewriteError(
                    "threadgroup variables belong in a kernel's body", self.where(number)
                )
            alignment = self._joined(first + 1, number)
            for index in range(first, number):
                self.replaced[index] = ""
            self._move(number, stop, alignment, self._functions[owner], order[owner])
        for name, kernel in self.kernels.items():
            function = kernel.call.split("<")[0].strip()
            variables = tuple(self._functions[function].variables)
            self.kernels[name] = Kernel(
                name, kernel.call, kernel.codes, kernel.limit, kernel.at, variables
            )

    def _aligned(self, number: int) -> int:
        """Where the alignas(...) in front of `number` begins, or `number` itself."""
        if self._word(number - 1) == ")":
            opening = self._matching.get(number - 1, 0)
            if self._word(opening - 1) == "alignas":
                return opening - 1
        return number

    def _inside(self, start: int, stop: int) -> set[str]:
        """Marks that only stand within brackets of a declaration: sizes, template arguments."""
        outside: set[str] = set()
        number = start
        while number < stop:
            word = self.words[number]
            if word in _CLOSING:
                number = self._matching[number]
            elif word == "<":
                number = self._angle(number) or number
            else:
                outside.add(word)
            number += 1
        return {"*", "&", "="} - outside

    def _move(
        self, start: int, stop: int, alignment: str, owner: _Definition, ordinal: int
    ) -> None:
        # `threadgroup T a[N][M], b;`: the name of a declarator is the last word before [ , or ;
        number, names = start + 1, []
        while number < stop:
            word = self.words[number]
            if word == "<":
                number = (self._angle(number) or number) + 1
                continue
            if self._is_name(number) and self._word(number + 1) in ("[", ",", ";"):
                end = number + 1
                while self._word(end) == "[":
                    end = self._matching[end] + 1
                names.append((number, end))
                number = end
            number += 1
        if not names:
            raise RewriteError("cannot read this threadgroup variable", self.where(start))
        kind = self._joined(start + 1, names[0][0])
        out = []
        for name, end in names:
            slot = len(owner.variables)
            if slot == ARRAYS:
                raise RewriteError("too many threadgroup variables", self.where(name))
            word, sizes = self.words[name], self._joined(name + 1, end)
            number = ordinal * ARRAYS + slot
            owner.variables.append(Variable(slot, number, word, self.where(name)))
            alias = f"emu_type_{word}_{slot}"
            out.append(
                f"using {alias} = {kind} {sizes}; threadgroup {alias}& {word}"
                f" = ::emu::array<{alias}, {number}, {alignment or '1'}>()"
            )
        for number in range(start, stop):
            self.replaced[number] = ""
        self.replaced[start] = "; ".join(out)

    # ---- Values

    def _rewrite_values(self) -> None:
        types = self._type_names()
        quiet = self._literal_spans()
        for number, word in enumerate(self.words):
            if number in self.replaced:
                continue
            kind = self.tokens[self.code[number]][0]
            if kind == "number":
                self.replaced[number] = _literal(word)
            elif kind == "string" and word[0] == '"' and number not in quiet:
                self.replaced[number] = f"((constant const char*){word})"
            elif word == "__func__":
                self.replaced[number] = "((constant const char*)__func__)"
            elif word == "static_cast":
                closing = self._angle(number + 1)
                if closing and not {"*", "&"} & set(self.words[number:closing]):
                    self.replaced[number] = "::emu::mk"
            elif _UNSEEN.fullmatch(word) and "*" in self.words[number + 1 : number + 3]:
                raise RewriteError(
                    f"accesses to {word} in memory are not watched; use a scalar pointer",
                    self.where(number),
                )
            elif word in types or word == "vec" or _VECTOR.fullmatch(word):
                self._construct(number)

    def _construct(self, number: int) -> None:
        """T(...) and (T)x, where T may be a vector."""
        last = number
        if self.words[number] == "vec":
            closing = self._angle(number + 1) if self._word(number + 1) == "<" else None
            if closing is None:
                return
            last = closing
        first = self._qualified(number)
        previous, following = self._word(first - 1), self._word(last + 1)
        if following == "(":
            close = self._matching.get(last + 1, last)
            inner, after = self._word(last + 2), self._word(close + 1)
            declarator = inner in ("*", "&") and after in ("(", "[")
            if previous == "operator" or declarator:
                return
            self.before[first] = "::emu::mk<" + self.before.get(first, "")
            self.before[last + 1] = ">" + self.before.get(last + 1, "")
        elif following == ")" and previous == "(":
            self._cast(first - 1, last + 1)

    def _cast(self, opening: int, closing: int) -> None:
        previous, operand = self._word(opening - 1), self._word(closing + 1)
        called = self._is_name(opening - 1) and previous not in ("return", "case", "else")
        if called or previous in (")", "]", ">"):
            return
        if not operand or not (operand[0].isalnum() or operand[0] in "_.(-~!*&+\"'"):
            return
        self.replaced[opening] = "::emu::cast<"
        self.replaced[closing] = ">()->*"

    def _qualified(self, number: int) -> int:
        """Where the qualified name that ends at `number` begins."""
        while self._word(number - 1) == "::":
            number -= 1
            if self._word(number - 1) == ">":
                opening = self._angle_back(number - 1)
                if opening is None:
                    return number
                number = opening - 1
            elif self._is_name(number - 1) and self._word(number - 1) != "return":
                number -= 1
        return number - 1 if self._word(number - 1) == "typename" else number

    def _type_names(self) -> set[str]:
        """Names that may stand for a vector: template parameters and aliases."""
        names = set()
        for number, word in enumerate(self.words):
            following = self._word(number + 1)
            if word == "using" and self._word(number + 2) == "=":
                names.add(following)
            elif word == "typedef":
                stop = number
                while self._word(stop + 1) not in (";", ""):
                    stop += 1
                if self._is_name(stop):
                    names.add(self.words[stop])
            elif word == "template" and following == "<":
                closing = self._angle(number + 1) or number
                for inner in range(number, closing):
                    if self.words[inner] in ("typename", "class") and self._is_name(inner + 1):
                        names.add(self.words[inner + 1])
        return names

    def _literal_spans(self) -> set[int]:
        """Strings that must stay literals: in attributes, assertions and linkage."""
        quiet: set[int] = set()
        for number, word in enumerate(self.words):
            if word in ("static_assert", "_Static_assert", "asm", "__asm", "__asm__"):
                quiet.update(range(number, self._matching.get(number + 1, number)))
            elif word == "extern":
                quiet.add(number + 1)
            elif word == "[" and self._word(number + 1) == "[":
                quiet.update(range(number, self._matching.get(number, number)))
        return quiet


def _literal(text: str) -> str:
    floating = _FLOATING.match(text)
    if text[:2].lower() == "0x" or not (floating or text[-1] in "hH"):
        return text
    digits = floating.group() if floating else text[:-1]
    suffix = text[len(digits) :].lower()
    if suffix == "h":
        return f"half({digits}{'' if floating else '.0'}f)"
    if suffix == "bf":
        return f"bfloat({digits}f)"
    return digits + "f" if suffix == "" else text
