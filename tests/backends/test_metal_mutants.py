"""The emulator notices: each mistake put into a Metal kernel is caught, and it is said by what."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from orchard.attention.problem import (
    Band,
    Options,
    Tensors,
    Upstream,
    describe,
)
from orchard.backends.metal.emulated import EmulatedRuntime, MetalEmulatedBackend
from orchard.backends.metal.source import KERNELS, MetalCompileError
from orchard.testing.budget import Results, judge
from orchard.testing.metal import EmulationError, Emulator

pytestmark = [
    pytest.mark.metal,
    pytest.mark.slow,
    pytest.mark.usefixtures("metal_compiler"),
]

KERNEL = "simdgroup"


@dataclass(frozen=True)
class Mutant:
    """One change to the n-th place where `old` stands in a file."""

    file: str
    old: str
    new: str
    place: int = 0

    def __str__(self) -> str:
        return f"{self.file}: {self.old} -> {self.new or 'nothing'} ({self.place + 1})"

    def apply(self, text: str) -> str:
        parts = text.split(self.old)
        head, tail = self.old.join(parts[: self.place + 1]), self.old.join(parts[self.place + 1 :])
        return head + self.new + tail


def places(file: str, old: str, new: str, only: int | None = None) -> Iterator[Mutant]:
    count = (KERNELS / file).read_text().count(old)
    assert count, f"{old} is not in {file}"
    for place in range(count) if only is None else [only]:
        yield Mutant(file, old, new, place)


def barriers() -> Iterator[Mutant]:
    """Every barrier of every kernel, removed."""
    for path in sorted(KERNELS.iterdir()):
        text = path.read_text()
        calls = re.findall(r"\b\w+_barrier\([^;]*\);", text)
        assert len(calls) == text.count("_barrier("), f"a barrier of another look in {path.name}"
        for call in dict.fromkeys(calls):
            yield from places(path.name, call, ";")


SHIFTED = (
    *places("common.h", "tile[row * LD + column] =", "tile[row * LD + column + 1] ="),
    *places("operands.h", "return head + row * stride;", "return head + (row + 1) * stride;"),
    *places("common.h", "value_at(row, column + 1, stride)", "value_at(row, column + 2, stride)"),
    *places("common.h", "(8 * j + at.x) * HEAD_LD", "(8 * j + at.x + 1) * HEAD_LD"),
    *places("forward.metal", "(8 * j + at.y) * VALUE_LD", "(8 * j + at.y + 1) * VALUE_LD"),
    *places("backward.metal", "(8 * j + at.x) * VALUE_LD", "(8 * j + at.x + 1) * VALUE_LD"),
    *places("backward.metal", "(8 * j + at.y) * HEAD_LD", "(8 * j + at.y + 1) * HEAD_LD"),
    *places("backward.metal", "delta_tile[column]", "delta_tile[column + 1]"),
    *places("backward.metal", "norm_tile[column]", "norm_tile[column + 1]"),
    *places("forward.metal", "words[(8 * j + at.y) * 4", "words[(8 * j + at.y) * 4 + 1"),
    *places("decode.metal", "row_at(keys, j, ", "row_at(keys, j + 1, "),
    *places("decode.metal", "sums[i * VALUE_DIM + d]", "sums[i * VALUE_DIM + d + 1]"),
)
UNCHECKED = (
    *places("common.h", "start + row < length && column < WIDTH", "column < WIDTH"),
    *places("common.h", "start + row < length && column < WIDTH", "start + row < length"),
    *places("common.h", "valid && column < WIDTH", "column < WIDTH"),
    *places("common.h", "valid && column + 1 < WIDTH", "valid"),
    *places("common.h", "if (column + 1 < WIDTH)", "if (true)"),
    *places("common.h", "row < int(p[ROWS]) && key < int(p[KEYS])", "true"),
    *places("common.h", "return key >= int(p[KEYS]);", "return false;"),
    *places("forward.metal", "if (row >= rows) return;", ""),
    *places("backward.metal", "if (!valid) return;", ""),
    *places("backward.metal", "valid ? rows[row].shift : INFINITY", "rows[row].shift"),
    *places("backward.metal", "row < length && is_coarse(", "is_coarse("),
    *places("backward.metal", "min(block_row + RESIDENT, length); i", "block_row + RESIDENT; i"),
    *places("backward.metal", "if (row >= p[ROWS]) return;", ""),
    *places("decode.metal", "if (run >= p[RUNS]) return;", ""),
    *places("decode.metal", "there && d < HEAD_DIM", "there"),
    *places("decode.metal", "if (d < VALUE_DIM)", "if (true)"),
)
FORGOTTEN = (
    *places("common.h", "next == -INFINITY ? 0.0f : next", "next"),
    *places("decode.metal", "next == -INFINITY ? 0.0f : next", "next"),
    *places("decode.metal", "top == -INFINITY ? 0.0f : top", "top"),
    *places("backward.metal", "held.shift == INFINITY ? float2(0.0f) : grad", "grad"),
    *places("backward.metal", "rows[row].shift = softmax.top;", ""),
    *places("backward.metal", "rows[row].norm = 1.0f / total;", ""),
    *places("backward.metal", "bool idle = !simd_any(coarse)", "bool idle = !coarse"),
)
SPACES = (
    *places("common.h", "load_block(threadgroup T* tile", "load_block(device T* tile"),
    *places("common.h", "across(const threadgroup T*", "across(const device T*"),
    *places("operands.h", "plane(constant long*", "plane(device long*"),
    *places("backward.metal", "threadgroup uint* words", "thread uint* words"),
)
SHORTENED = tuple(
    Mutant(path.name, f"{array[1]}[{array[2]}]", f"{array[1]}[{array[2]} - 8]", place)
    for path in sorted(KERNELS.glob("*.metal"))
    for array in {
        found[0]: found
        for found in re.finditer(r"threadgroup \w+ (\w+)\[([^\]]+)\];", path.read_text())
    }.values()
    for place in range(path.read_text().count(array[0]))
)
MUTANTS = (*barriers(), *SHIFTED, *UNCHECKED, *FORGOTTEN, *SPACES, *SHORTENED)


class MutatingRuntime(EmulatedRuntime):
    """Changes a kernel's file before the emulator gets the source."""

    def __init__(self, mutant: Mutant | None) -> None:
        super().__init__(Emulator(bounds="view"))
        self._mutant = mutant

    def compile(self, text: str) -> Any:
        if self._mutant is not None:
            original = (KERNELS / self._mutant.file).read_text()
            pieces = [
                re.split(r'#include ".*"\n', whole)
                for whole in (original, self._mutant.apply(original))
            ]
            (changed,) = [pair for pair in zip(*pieces, strict=True) if pair[0] != pair[1]]
            text = text.replace(*changed)
        return super().compile(text)


def problems() -> Iterator[tuple[Tensors, Options, bool]]:
    """Odd sizes with everything on: tiles of several kinds, empty and coarse rows, decodes."""
    source = torch.Generator().manual_seed(1)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source)

    seed = torch.tensor([5, 6], dtype=torch.int32)
    mask = make(1, 1, 45, 77)
    mask[:, :, 5::9] -= 300.0
    yield (
        Tensors(make(1, 2, 45, 21), make(1, 1, 77, 21), make(1, 1, 77, 11), mask, seed),
        Options(0.3, 3.0, Band(-9, 40), 20000),
        True,
    )
    yield (
        Tensors(make(1, 2, 33, 21), make(1, 1, 67, 21), make(1, 1, 67, 11), make(1, 2, 1, 67)),
        Options(0.3),
        True,
    )
    shut = torch.ones(1, 1, 70, 40, dtype=torch.bool)
    shut[:, :, ::5] = False
    plain = Options(0.3)
    yield Tensors(make(1, 1, 70, 21), make(1, 1, 40, 21), make(1, 1, 40, 11), shut), plain, False
    yield Tensors(make(1, 2, 2, 21), make(1, 1, 300, 21), make(1, 1, 300, 11)), plain, False
    few = torch.ones(1, 1, 2, 300, dtype=torch.bool)
    few[:, :, 0] = few[:, :, 1, :130] = False
    yield (
        Tensors(make(1, 2, 2, 21), make(1, 1, 300, 21), make(1, 1, 300, 11), few, seed),
        Options(0.3, 0.0, Band(-2, 290), 20000),
        False,
    )
    # Whole groups of four: the loads that are not made one by one.
    yield Tensors(make(1, 1, 45, 20), make(1, 1, 37, 20), make(1, 1, 37, 20)), plain, False


def caught_by(mutant: Mutant | None) -> str:
    """What noticed the mutant; empty if nothing did."""
    backend = MetalEmulatedBackend(MutatingRuntime(mutant))
    for tensors, options, mask_grad in problems():
        grad_out = torch.randn(
            (*tensors.query.shape[:3], tensors.value.shape[3]),
            generator=torch.Generator().manual_seed(2),
        )
        upstream = Upstream(grad_out, None)
        ahead = describe(tensors, options, lse=True, grad=True, mask_grad=mask_grad)
        back = describe(
            tensors, options, stage="backward", grad_out=grad_out, grad=True, mask_grad=mask_grad
        )
        try:
            saved = backend.forward(ahead, KERNEL, tensors)
            if mask_grad or tensors.mask is not None:
                grad_out = grad_out.masked_fill(saved.lse[..., None].isneginf(), torch.nan)
                upstream = Upstream(grad_out, None)
            grads = backend.backward(back, KERNEL, tensors, saved, upstream)
        except (EmulationError, MetalCompileError) as error:
            return type(error).__name__
        clean = Upstream(grad_out.nan_to_num(0.0), None)
        for verdict in judge(Results(*saved, *grads), tensors, options, clean, mask_grad=mask_grad):
            if not verdict.ok:
                return f"wrong {verdict.name}"
    return ""


def test_the_kernels_as_they_are() -> None:
    """Nothing is found where nothing was changed."""
    assert caught_by(None) == ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants(mutant: Mutant, record_property: Callable[[str, object], None]) -> None:
    """Every one is caught; the list is printed at the end of the run."""
    how = caught_by(mutant)
    record_property("mutant", f"{mutant}: {how or 'not caught'}")
    assert how
