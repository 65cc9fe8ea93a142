"""The tables of targets, by the preset that measures them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from orchard.testing.cpu_targets import cpu
from orchard.testing.cuda_targets import cuda
from orchard.testing.quantized_targets import quantized
from orchard.testing.targets import Target


class Table(NamedTuple):
    """Its targets, and whose they are."""

    targets: Callable[[], list[Target]]
    device: str = "cpu"
    backend: str = "cpu"

    @property
    def summary(self) -> str:
        return self.targets.__doc__ or ""


TABLES = {
    "cpu": Table(cpu),
    "cuda": Table(cuda, "cuda", "cuda"),
    "quantized": Table(quantized),
}
