"""What the Metal kernels do, counted by the emulator, beside torch's own kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

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
from orchard.backends.metal.emulated import EmulatedRuntime, MetalEmulatedBackend
from orchard.testing.budget import Results, judge
from orchard.testing.metal import Counters, Emulator, ShaderLibrary, torch_kernels

COLUMNS = {  # of the tables, by counter
    "multiplies": "multiplies",
    "device_read": "bytes read",
    "device_written": "bytes written",
    "threadgroup_barriers": "barriers",
}
BACKWARD = (
    "attention_rows",
    "attention_coarse_rows",
    "attention_grad_query",
    "attention_grad_key_value",
)


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
            source = torch_kernels.source(torch_kernels.PREFILL)
            self._torch = self.emulator.compile_shader(source)
        self.emulator.counters.clear()
        out = torch_kernels.prefill(self._torch, exercise.operands(), causal=exercise.causal)
        (counted,) = self.emulator.counters.values()
        return out, counted


@dataclass(frozen=True)
class Limit:
    """A number that may not be above another."""

    what: str
    found: float
    most: float

    @property
    def held(self) -> bool:
        return self.found <= self.most


@dataclass(frozen=True)
class Count:
    """What one problem took: our forward, torch's, and our backward by kernel."""

    exercise: Exercise
    ours: Counters
    torch: Counters
    backward: dict[str, Counters]
    complaints: tuple[str, ...] = ()  # what is wrong with the results

    @property
    def whole_backward(self) -> Counters:
        return sum(self.backward.values(), Counters())

    @property
    def limits(self) -> list[Limit]:
        """What the kernels are held to; bytes of a backward are held in the tests."""
        found = [
            Limit(f"{label} / torch's", _share(self.ours, self.torch, name), 1.02)
            for name, label in COLUMNS.items()
        ]
        exercise, multiplies = self.exercise, self.ours.multiplies
        if exercise.causal:
            full = 2 * exercise.heads * (exercise.length // 8) ** 2 * (exercise.dim // 8)
            found.append(Limit("causal multiplies / full's", multiplies / full, 0.6))
        share = _share(self.whole_backward, self.ours, "multiplies")
        return [*found, Limit("backward's multiplies / forward's", share, 3.5)]

    def data(self) -> dict[str, Any]:
        """As one JSON object."""
        exercise = self.exercise
        return {
            "case": str(exercise),
            "batch": 1,
            "heads": exercise.heads,
            "rows": exercise.length,
            "dim": exercise.dim,
            "dtype": str(exercise.dtype).removeprefix("torch."),
            "causal": exercise.causal,
            "permuted": exercise.permuted,
            "ours": asdict(self.ours),
            "torch": asdict(self.torch),
            "backward": {name: asdict(part) for name, part in self.backward.items()},
            "complaints": list(self.complaints),
            "limits": [{**asdict(limit), "held": limit.held} for limit in self.limits],
        }


def _share(ours: Counters, others: Counters, name: str) -> float:
    return float(getattr(ours, name) / getattr(others, name))


def count(bench: Workbench, exercise: Exercise) -> Count:
    """Both kernels on one problem, their outputs held to the budget."""
    saved, ours = bench.forward(exercise)
    out, theirs = bench.torch_forward(exercise)
    tensors, options = exercise.operands(), exercise.options
    complaints = tuple(
        f"{exercise}, {who}: {verdict}"
        for who, result in (("Orchard", saved.out), ("torch", out))
        for verdict in judge(Results(result, None), tensors, options)
        if not verdict.ok
    )
    return Count(exercise, ours, theirs, bench.backward(exercise), complaints)


def forward_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """A stored count as rows of a table, ours and torch's."""
    return [
        [data["case"], "Orchard", *_cells(data["ours"])],
        ["", "torch", *_cells(data["torch"])],
    ]


def backward_rows(data: Mapping[str, Any]) -> list[list[str]]:
    parts = data["backward"]
    whole = {name: sum(part[name] for part in parts.values()) for name in COLUMNS}
    share = whole["multiplies"] / data["ours"]["multiplies"]
    rows = [["", name, *_cells(part)] for name, part in parts.items()]
    rows[0][0] = data["case"]
    return [*rows, ["", f"all: {share:.2f} of the forward's multiplies", *_cells(whole)]]


def limit_rows(data: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        ["", limit["what"], f"{limit['found']:.3f}", f"{limit['most']:g}", _yes(limit["held"])]
        for limit in data["limits"]
    ]
    rows[0][0] = data["case"]
    return rows


TABLES = {  # title: headers and what makes the rows of a stored count
    "Forward, Orchard's kernel and the one that torch ships": (
        ("case", "", *COLUMNS.values()),
        forward_rows,
    ),
    "Backward": (("case", "kernel", *COLUMNS.values()), backward_rows),
    "Limits": (("case", "what", "found", "at most", "held"), limit_rows),
}


def _cells(counted: Mapping[str, int]) -> list[str]:
    return [f"{counted[name]:,}" for name in COLUMNS]


def _yes(held: bool) -> str:
    return "yes" if held else "NO"
