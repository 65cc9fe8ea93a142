"""The plot of `orchard bench --preset serving`: throughput and p99 against client threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchard.cli.chart import FASTER, INK, LINES, PALE, SLOWER, title

Line = dict[str, Any]
SIDES = {"naive": (SLOWER, "threads call the model"), "queue": (FASTER, "through a BatchQueue")}
MEASURES: dict[str, Callable[[Line], float]] = {
    "requests per second": lambda side: float(side["throughput"]["p50"]),
    "p99, ms": lambda side: float(side["p99"]) * 1e3,
}


def draw_serving(found: Sequence[Line], paths: Sequence[Path]) -> None:
    """A column for each model, into each of `paths`; the suffix decides the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    asked = [line for line in found if {"clients", "mean_batch"} <= line.keys()]
    lines = [line for line in asked if not line["wrong"]]
    counts = Counter(line["model"] for line in lines)
    models = [model for model, count in counts.items() if count > 1] or list(counts)
    figure = Figure(figsize=(1.5 + 4.5 * max(len(models), 1), 7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(MEASURES), max(len(models), 1), squeeze=False)
    for column, model in enumerate(models):
        mine = [line for line in lines if line["model"] == model]
        for row, measure in enumerate(MEASURES):
            _panel(grid[row, column], measure, mine)
        grid[0, column].set_title(model, fontsize=10, color=INK)
    grid[0, 0].legend(frameon=False, fontsize=9)
    machine = found[0]["machine"]
    figure.suptitle(title("serving", machine), x=0.01, ha="left", fontsize=11)
    for path in paths:
        figure.savefig(path, dpi=150)


def _panel(axes: Any, measure: str, lines: Sequence[Line]) -> None:
    from matplotlib.ticker import NullLocator

    clients = [line["clients"] for line in lines]
    for side, (colour, words) in SIDES.items():
        values = [MEASURES[measure](line[side]) for line in lines]
        axes.plot(clients, values, color=colour, marker="o", markersize=4, label=words)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(clients, [str(count) for count in clients])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("client threads", fontsize=9, color=INK)
    axes.set_ylabel(measure, fontsize=9, color=INK)
    axes.grid(color=LINES, linewidth=0.8)
    axes.tick_params(labelsize=9, colors=PALE)
    axes.spines[["top", "right"]].set_visible(False)
