"""The plot of rates: FLOP/s against sequence length, Orchard and every peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchard.cli.chart import FASTER, INK, LINES, PALE, title

COLOURS = {"ours": FASTER, "cudnn": "#3d6db5", "flash": "#c98b2b", "efficient": "#8b6fb0"}
OTHER = "#888888"
Series = dict[str, list[tuple[int, float]]]  # by who it is: (length, TFLOP/s)


def rated_cases(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the stored lines, the cases that the plot is made of."""
    from orchard.testing.cuda_targets import RATES

    return [line for line in lines if "case" in line and line.get("target", "").startswith(RATES)]


def series(cases: Sequence[dict[str, Any]]) -> dict[tuple[str, int, bool], Series]:
    """Rates by (step, head dimension, causal), and there by who reached them."""
    panels: dict[tuple[str, int, bool], Series] = {}
    for case in cases:
        panel = panels.setdefault((case["step"], case["dim"], bool(case["causal"])), {})
        for name, side in {"ours": case["ours"], **case["peers"]}.items():
            if side["gflops"] is not None:
                panel.setdefault(name, []).append((case["rows"], side["gflops"] / 1e3))
    return panels


def draw_rates(
    preset: str, cases: Sequence[dict[str, Any]], facts: dict[str, Any], paths: Sequence[Path]
) -> None:
    """A panel for each step, head dimension and mask; a line for each who computes it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = series(cases)
    columns = min(4, max(len(panels), 1))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.6 * columns + 0.6, 3.0 * rows + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, ((step, dim, causal), lines) in zip(grid, panels.items(), strict=False):
        _panel(axes, f"{step}, D {dim}, {'causal' if causal else 'full'}", lines)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    handles = {name: line for axes in grid for line, name in zip(*_named(axes), strict=True)}
    figure.legend(
        list(handles.values()),
        ["Orchard" if name == "ours" else name for name in handles],
        loc="outside lower left",
        ncols=5,
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(title(preset, facts), x=0.01, ha="left", fontsize=11)
    for path in paths:
        figure.savefig(path, dpi=150)


def _named(axes: Any) -> tuple[list[Any], list[str]]:
    handles, names = axes.get_legend_handles_labels()
    return handles, names


def _panel(axes: Any, name: str, lines: Series) -> None:
    lengths = sorted({length for points in lines.values() for length, _ in points})
    for who, points in lines.items():
        width = 2.2 if who == "ours" else 1.4
        colour = COLOURS.get(who, OTHER)
        axes.plot(
            *zip(*sorted(points), strict=True),
            marker="o",
            markersize=3.5,
            linewidth=width,
            color=colour,
            label=who,
            zorder=3 if who == "ours" else 2,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths], rotation=45)
    axes.set_ylim(bottom=0)
    axes.set_title(name, loc="left", fontsize=10, color=INK)
    axes.set_xlabel("sequence length, as many tokens in all", fontsize=8, color=PALE)
    axes.set_ylabel("TFLOP/s", fontsize=8, color=PALE)
    axes.grid(color=LINES, linewidth=0.8, zorder=0)
    axes.tick_params(labelsize=8, colors=PALE)
    axes.spines[["top", "right"]].set_visible(False)
