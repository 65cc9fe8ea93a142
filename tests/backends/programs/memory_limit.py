"""Calls with ever more address space to spare: each is right or raises, and the next is right.

Prints, for each allowance in bytes, what came of a forward and backward of some size.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from programs.problems import SMALL, Exercise, differences, exercise, normal
from torch import Tensor

from orchard.attention import memory
from orchard.attention.problem import Tensors, Upstream
from orchard.testing.budget import Results

ALLOWANCES = tuple(1 << bits for bits in range(12, 28, 2))
M_MMAP_THRESHOLD = -3


@contextmanager
def limited(allowance: int) -> Iterator[None]:
    """No more address space than is in use now, and this."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + allowance, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Shelf:
    """Outputs made beforehand, so that nothing but the kernels' own memory can be missing."""

    def __init__(self) -> None:
        self.ready: list[Tensor] = []

    def allocate(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        for place, output in enumerate(self.ready):
            if output.shape == shape and output.stride() == strides and output.dtype == dtype:
                return self.ready.pop(place)
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)


def attempt(problem: Exercise, allowance: int) -> Results | str:
    try:
        with limited(allowance):
            return problem.solve()
    except (MemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def main() -> int:
    # What is freed goes back to the system at once, and is no reserve for the next call.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    shape = (1, 4, 300, 128)
    query, key, value, grad_out = normal(4, *shape)
    plain = exercise(SMALL)
    large = Exercise(Tensors(query, key, value), plain.settings, Upstream(grad_out, None))
    known = plain.solve()
    shelf = Shelf()
    memory.allocate = shelf.allocate
    outcomes: list[Results | str] = []
    for allowance in ALLOWANCES:
        shelf.ready = [*torch.full((4, *shape), torch.nan), torch.full(shape[:3], torch.nan)]
        outcomes.append(attempt(large, allowance))
        if wrong := differences(plain.solve(), known):
            print(f"after {allowance}: {wrong}", file=sys.stderr)
    expected = large.solve()
    print(large.complaints(expected))
    for allowance, outcome in zip(ALLOWANCES, outcomes, strict=True):
        if not isinstance(outcome, str):
            wrong = differences(outcome, expected)
            outcome = f"wrong {wrong}" if wrong else "right"
        print(allowance, outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
