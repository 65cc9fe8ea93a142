"""The tables of targets, by the preset that measures them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from orchard.testing.cpu_targets import cpu
from orchard.testing.cuda_targets import cuda
from orchard.testing.quantized_targets import quantized
from orchard.testing.targets import Target, Unit


class Table(NamedTuple):
    """Its targets, and whose they are."""

    targets: Callable[[], list[Target]]
    device: str = "cpu"
    backend: str = "cpu"
    found: str = "torch's time / ours"  # what its numbers are
    rows: str = "torch's time / ours"  # and the ratios of its cases
    axes: Mapping[Unit, str] = {}  # in a plot, where they are others than usual

    @property
    def summary(self) -> str:
        return self.targets.__doc__ or ""


TABLES = {
    "cpu": Table(cpu),
    "cuda": Table(cuda, "cuda", "cuda"),
    "quantized": Table(
        quantized,
        found="time of what the line names / ours in few bits, or bytes in few bits / in bf16",
        rows="torch's time / ours, neither in few bits",
        axes={
            "x": "time of what the line names / Orchard's in few bits, log scale: more is better",
            "share": "bytes in few bits / bytes in bf16: less is better",
        },
    ),
}
