"""What the Metal kernels do, counted by the emulator, beside torch's own kernel."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from orchard.attention.problem import (
    Band,
    Options,
    Saved,
    Tensors,
    Upstream,
    default_scale,
    describe,
)
from orchard.backends.metal_emulated import EmulatedRuntime, MetalEmulatedBackend
from orchard.testing.metal import Counters, Emulator, ShaderLibrary
from orchard.text import table

_TORCH_SOURCE = """
#include <metal_stdlib>
using namespace metal;
#include <c10/metal/utils.h>
#include <ATen/native/mps/kernels/PrefillAttention.h>
"""
BACKWARD = ("attention_rows", "attention_grad_query", "attention_grad_key_value")


@dataclass(frozen=True)
class Exercise:
    """A problem that torch's kernel serves too."""

    dim: int
    causal: bool
    permuted: bool = False
    dtype: torch.dtype = torch.float32
    length: int = 512
    heads: int = 2

    def __str__(self) -> str:
        words = [f"S {self.length}", f"D {self.dim}", "causal" if self.causal else "full"]
        return ", ".join((*words, "permuted" if self.permuted else "contiguous"))

    @property
    def options(self) -> Options:
        return Options(default_scale(self.dim), band=Band(None, 0) if self.causal else None)

    def operands(self) -> Tensors:
        source = torch.Generator().manual_seed(3)
        shape = (1, self.heads, self.length, self.dim)
        if self.permuted:
            shape = (1, self.length, self.heads, self.dim)
        made = [torch.randn(shape, generator=source).to(self.dtype) for _ in range(3)]
        return Tensors(*(t.transpose(1, 2) if self.permuted else t for t in made))


EXERCISES = tuple(
    Exercise(dim, causal, permuted)
    for dim, causal, permuted in product((64, 128), (False, True), (False, True))
)


@dataclass
class Workbench:
    """Both kernels on one emulator, which counts for them."""

    emulator: Emulator

    def __post_init__(self) -> None:
        self._backend = MetalEmulatedBackend(EmulatedRuntime(self.emulator))
        self._torch: ShaderLibrary | None = None

    def forward(self, exercise: Exercise, *, lse: bool = False) -> tuple[Saved, Counters]:
        """Our forward."""
        tensors = exercise.operands()
        self.emulator.counters.clear()
        problem = describe(tensors, exercise.options, lse=lse)
        saved = self._backend.forward(problem, "simdgroup", tensors)
        return saved, self.emulator.counters["attention_forward"]

    def backward(self, exercise: Exercise) -> dict[str, Counters]:
        """Our backward, kernel by kernel."""
        tensors = exercise.operands()
        saved, _ = self.forward(exercise, lse=True)
        grad_out = torch.ones_like(saved.out)
        problem = describe(
            tensors, exercise.options, stage="backward", grad_out=grad_out, grad=True
        )
        self.emulator.counters.clear()
        self._backend.backward(problem, "simdgroup", tensors, saved, Upstream(grad_out, None))
        return {name: self.emulator.counters[name] for name in BACKWARD}

    def torch_forward(self, exercise: Exercise) -> tuple[Tensor, Counters]:
        """The kernel that torch ships, launched as torch does."""
        if self._torch is None:
            self._torch = self.emulator.compile_shader(_TORCH_SOURCE)
        query, key, value, *_ = exercise.operands()
        batch, heads, rows, dim = query.shape
        out = torch.empty_like(query)
        scale, softcap = struct.unpack("<2i", struct.pack("<2f", 1 / math.sqrt(dim), 1.0))
        params = [batch, heads, dim, rows, rows, 1, scale, softcap]
        for tensor in (query, key, value, out):
            params += tensor.stride()[:3]
        dtype = str(exercise.dtype).removeprefix("torch.")
        name = (
            f"prefill_attention_{dtype}_bq32_bk{16 if dim == 128 else 32}_bd{dim}_wm4_wn1"
            f"_hm0_dc{int(exercise.causal)}_mask{dtype}"
        )
        self.emulator.counters.clear()
        getattr(self._torch, name)(
            *(query, key, value, out, params, [*query.stride()], query),
            threads=(-(-rows // 32) * 128, heads, batch),
            group_size=(128, 1, 1),
            arg_casts="int32",
        )
        return out, self.emulator.counters[name]


def report(exercises: tuple[Exercise, ...] = EXERCISES) -> str:
    """The forward beside torch's, and the backward beside the forward, as two tables."""
    bench = Workbench(Emulator(workers=2))
    forwards, backwards = [], []
    for exercise in exercises:
        ours = bench.forward(exercise)[1]
        theirs = bench.torch_forward(exercise)[1]
        for who, counted in (("orchard", ours), ("torch", theirs)):
            forwards.append([str(exercise) if who == "orchard" else "", who, *_cells(counted)])
        parts = bench.backward(exercise)
        whole = sum(parts.values(), Counters())
        share = f"{whole.multiplies / ours.multiplies:.2f}x"
        for name, counted in parts.items():
            backwards.append([str(exercise), name, *_cells(counted)])
        backwards.append(["", f"all, {share} the forward's multiplies", *_cells(whole)])
    columns = ["multiplies", "bytes read", "bytes written", "barriers"]
    return "\n\n".join(
        (
            table(["forward", "", *columns], forwards, width=120),
            table(["backward", "", *columns], backwards, width=120),
        )
    )


def _cells(counted: Counters) -> list[str]:
    numbers = (
        counted.multiplies,
        counted.device_read,
        counted.device_written,
        counted.threadgroup_barriers,
    )
    return [f"{number:,}" for number in numbers]
