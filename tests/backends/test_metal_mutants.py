"""The emulator notices: each mistake put into a Metal kernel is caught, and it is said by what."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
from orchard.backends.metal.source import KERNELS, MetalCompileError
from orchard.backends.metal_emulated import EmulatedRuntime, MetalEmulatedBackend
from orchard.testing.budget import Results, judge
from orchard.testing.metal import EmulationError, Emulator, toolchain

try:
    toolchain.find()
    _without_compiler = ""
except toolchain.NoCompilerError as error:
    _without_compiler = str(error)

pytestmark = [
    pytest.mark.metal,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_without_compiler), reason=_without_compiler),
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


def barriers() -> Iterator[Mutant]:
    """Every barrier of every kernel, removed."""
    for path in sorted(KERNELS.iterdir()):
        text = path.read_text()
        for kind in ("threadgroup_barrier", "simdgroup_barrier"):
            call = f"{kind}(mem_flags::mem_threadgroup);"
            for place in range(text.count(call)):
                yield Mutant(path.name, call, ";", place)


def places(file: str, old: str, new: str, only: int | None = None) -> Iterator[Mutant]:
    count = (KERNELS / file).read_text().count(old)
    assert count, f"{old} is not in {file}"
    for place in range(count) if only is None else [only]:
        yield Mutant(file, old, new, place)


SHIFTED = (
    *places("common.h", "tile[row * LD + column] =", "tile[row * LD + column + 1] ="),
    *places("common.h", "row * row_stride + column * column_stride", "(row + 1) * row_stride"),
    *places("common.h", "row[(column + 1) * stride];", "row[(column + 2) * stride];"),
    *places("forward.metal", "(8 * j + at.x) * HEAD_LD", "(8 * j + at.x + 1) * HEAD_LD"),
    *places("forward.metal", "(8 * j + at.y) * VALUE_LD", "(8 * j + at.y + 1) * VALUE_LD"),
    *places("backward.metal", "(8 * j + at.x) * VALUE_LD", "(8 * j + at.x + 1) * VALUE_LD"),
    *places("backward.metal", "(8 * j + at.y) * HEAD_LD", "(8 * j + at.y + 1) * HEAD_LD"),
    *places("backward.metal", "delta_tile[column]", "delta_tile[column + 1]"),
    *places("forward.metal", "words[(8 * j + at.y) * 4", "words[(8 * j + at.y) * 4 + 1"),
    *places("decode.metal", "key + (start + i)", "key + (start + i + 1)"),
    *places("decode.metal", "sums[i * VALUE_DIM + d]", "sums[i * VALUE_DIM + d + 1]"),
)
UNCHECKED = (
    *places("common.h", "row < rows && column < WIDTH", "column < WIDTH"),
    *places("common.h", "row < rows && column < WIDTH", "row < rows"),
    *places("common.h", "valid && column < WIDTH", "column < WIDTH"),
    *places("common.h", "valid && column + 1 < WIDTH", "valid"),
    *places("common.h", "if (column + 1 < WIDTH)", "if (true)"),
    *places("common.h", "row < int(p[ROWS]) && key < int(p[KEYS])", "true"),
    *places("common.h", "return key >= int(p[KEYS]);", "return false;"),
    *places("forward.metal", "if (row >= rows) return;", ""),
    *places("backward.metal", "if (!valid) return;", ""),
    *places("backward.metal", "there ? row_lse[place] : INFINITY", "row_lse[place]"),
    *places("backward.metal", "valid ? row_lse[place] : INFINITY", "row_lse[place]"),
    *places("backward.metal", "if (row >= p[ROWS]) return;", ""),
    *places("decode.metal", "if (run >= p[RUNS]) return;", ""),
    *places("decode.metal", "there && d < HEAD_DIM", "there"),
    *places("decode.metal", "if (d < VALUE_DIM)", "if (true)"),
)
SPACES = (
    *places("common.h", "load_tile(threadgroup T* tile", "load_tile(device T* tile"),
    *places("common.h", "across(const threadgroup T*", "across(const device T*"),
    *places("common.h", "plane(constant long*", "plane(device long*"),
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
MUTANTS = (*barriers(), *SHIFTED, *UNCHECKED, *SPACES, *SHORTENED)


class MutatingRuntime(EmulatedRuntime):
    """Changes a kernel's file before the emulator gets the source."""

    def __init__(self, mutant: Mutant | None) -> None:
        super().__init__(Emulator(bounds="view"))
        self._mutant = mutant

    def compile(self, text: str) -> Any:
        if self._mutant is not None:
            original = (KERNELS / self._mutant.file).read_text()
            own, changed = (
                whole.split('#include "common.h"\n')[-1]
                for whole in (original, self._mutant.apply(original))
            )
            assert own != changed
            text = text.replace(own, changed)
        return super().compile(text)


def problems() -> Iterator[tuple[Tensors, Options, bool]]:
    """Odd sizes with everything on: tiles of several kinds, empty rows, a decode."""
    source = torch.Generator().manual_seed(1)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source)

    seed = torch.tensor([5, 6], dtype=torch.int32)
    mask = make(1, 1, 45, 77)
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
def test_mutants(mutant: Mutant) -> None:
    how = caught_by(mutant)
    print(f"{mutant}: {how or 'not caught'}")
    assert how
