"""The benchmark's plots: a bar for each ratio, from the line where both are equally fast."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchard.testing.benchmark import Row
    from orchard.testing.targets import Unit

FASTER, SLOWER, EQUAL = "#2f7d4f", "#b5533c", "#9a9a9a"
MET = {"aim": FASTER, "must": "#8fbf9f", "no": SLOWER, "-": EQUAL}
INK, PALE, LINES = "#222222", "#777777", "#dddddd"
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
AXES: dict[Unit, str] = {
    "x": "torch's time / Orchard's, log scale: right of 1 Orchard is faster",
    "share": "Orchard's rate / that of torch's matrix product, or of contiguous operands",
    "us": "microseconds of the host for a call: less is better",
    "MB": "MB beyond operands and results: less is better",
}
AIM: dict[str, Any] = {
    "marker": "D",
    "markersize": 6,
    "markerfacecolor": "white",
    "markeredgecolor": INK,
    "linestyle": "none",
    "zorder": 6,
}
DOT: dict[str, Any] = {"marker": "o", "color": INK, "alpha": 0.55, "linestyle": "none"}
TICK: dict[str, Any] = {"marker": "|", "markeredgewidth": 2.2, "color": INK, "linestyle": "none"}


def why_no_chart() -> str | None:
    """Why nothing can be drawn here; None where it can."""
    if importlib.util.find_spec("matplotlib") is not None:
        return None
    return "matplotlib is not installed; pip install 'orchard-attention[plot]' brings it"


def draw(preset: str, rows: Sequence[Row], facts: dict[str, Any], paths: Sequence[Path]) -> None:
    """Draw the ratios of `rows` into each of `paths`; the suffix decides the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 1.8 + 0.45 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_xlim(_limits(rows))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for place, row in enumerate(rows):
        _bar(axes, place, row)
        _label(axes, place, row)
    _decorate(axes, preset, facts)
    for path in paths:
        figure.savefig(path, dpi=150)


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    ends = [end for row in rows if row.ratio for end in (row.ratio.p20, row.ratio.p80)]
    return min([0.5, *(end / 1.6 for end in ends)]), max([2.0, *(end * 1.6 for end in ends)])


def _bar(axes: Any, place: int, row: Row) -> None:
    """A bar from 1 to the ratio with its whiskers and number, or the word that stands for it."""
    beside = {"textcoords": "offset points", "va": "center"}
    if row.ratio is None:
        word = row.ours.status if row.ours.status != "ok" else f"torch: {row.torch.status}"
        axes.annotate(word, (1.0, place), (6, 0), color=SLOWER, weight="bold", **beside)
        return
    low, middle, high = row.ratio
    colour = FASTER if low > 1 else SLOWER if high < 1 else EQUAL
    axes.barh(place, middle - 1, left=1.0, height=0.55, color=colour, zorder=2)
    reach = [[middle - low], [high - middle]]
    axes.errorbar(middle, place, xerr=reach, color=INK, capsize=3, linewidth=1, zorder=4)
    right = middle >= 1
    axes.annotate(
        f"{middle:.2f}" if middle < 10 else f"{middle:.1f}",
        (max(high, 1.0) if right else min(low, 1.0), place),
        (6 if right else -6, 0),
        ha="left" if right else "right",
        color=INK,
        fontsize=9,
        **beside,
    )


def _label(axes: Any, place: int, row: Row) -> None:
    """The case left of the axis, with its sizes and its backend below."""
    served = ", ".join(dict.fromkeys(row.served.values()))
    below = f"{row.case.sizes}, {served}" if served else row.case.sizes
    beside = {"textcoords": "offset points", "ha": "right", "va": "center"}
    at_axis = {"xy": (0, place), "xycoords": axes.get_yaxis_transform()}
    axes.annotate(row.case.name, **at_axis, xytext=(-8, 6), fontsize=10, color=INK, **beside)
    axes.annotate(below, **at_axis, xytext=(-8, -7), fontsize=8, color=PALE, **beside)


def _decorate(axes: Any, preset: str, facts: dict[str, Any]) -> None:
    _ratio_axis(axes)
    axes.set_xlabel(
        "torch's time / Orchard's, log scale: right of 1 Orchard is faster\n"
        "whiskers: p20 to p80 of the rounds; grey where they include 1",
        color=INK,
        fontsize=9,
    )
    axes.set_title(title(preset, facts), loc="left", fontsize=11)


def _ratio_axis(axes: Any) -> None:
    from matplotlib.ticker import NullLocator

    low, high = axes.get_xlim()
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvline(1.0, color=INK, linewidth=1.2, zorder=3)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.set_yticks([])
    axes.grid(axis="x", color=LINES, linewidth=0.8, zorder=0)
    axes.tick_params(axis="x", labelsize=9, colors=PALE)
    axes.spines[["top", "right", "left"]].set_visible(False)


def title(preset: str, facts: dict[str, Any]) -> str:
    threads = "" if facts["gpu"] else f", {facts['threads']} threads"
    versions = f"torch {facts['torch']}, orchard {facts['orchard']}, {facts['date'][:10]}"
    return f"orchard bench {preset}\n{facts['gpu'] or facts['cpu']}{threads}, {versions}"


def draw_targets(
    preset: str,
    summaries: Sequence[dict[str, Any]],
    facts: dict[str, Any],
    labels: Mapping[Unit, str],
    paths: Sequence[Path],
) -> None:
    """A bar for each stored target with its cases, what it must reach and what it aims at.

    `labels` are of axes that do not show what is usual.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [
        (unit, found)
        for unit in AXES
        if (found := [summary for summary in summaries if summary["unit"] == unit])
    ]
    heights = [len(found) + 1.2 for _, found in panels]
    figure = Figure(figsize=(11, 1.4 + 0.42 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), squeeze=False, height_ratios=heights)
    for axes, (unit, found) in zip(grid[:, 0], panels, strict=True):
        _panel(axes, unit, found)
        axes.set_xlabel(labels.get(unit, AXES[unit]), color=INK, fontsize=9)
    figure.suptitle(title(preset, facts), x=0.01, ha="left", fontsize=11)
    figure.legend(handles=_legend(), loc="outside lower left", ncols=6, frameon=False, fontsize=9)
    for path in paths:
        figure.savefig(path, dpi=150)


def _panel(axes: Any, unit: Unit, summaries: Sequence[dict[str, Any]]) -> None:
    """The targets of one unit, on one axis."""
    numbers = [number for summary in summaries for number in _numbers(summary)] or [1.0]
    axes.set_ylim(len(summaries) - 0.4, -0.6)
    if unit == "x":
        axes.set_xscale("log")
        axes.set_xlim(min(0.8, min(numbers) / 1.2), max(2.0, max(numbers) * 1.7))
        _ratio_axis(axes)
    else:
        axes.set_xlim(0.0, max(numbers) * 1.2)
        _plain(axes)
    for place, summary in enumerate(summaries):
        _target_bar(axes, place, summary, start=1.0 if unit == "x" else 0.0)


def _numbers(summary: dict[str, Any]) -> list[float]:
    """What was found and what it is held to."""
    limits = (summary["must"], summary["aim"])
    return [*summary["values"], *(limit for limit in limits if limit is not None)]


def _target_bar(axes: Any, place: int, summary: dict[str, Any], start: float) -> None:
    from orchard.testing.targets import cells

    name, shown, *_ = cells(summary)
    at_axis = {"xy": (0, place), "xycoords": axes.get_yaxis_transform()}
    beside = {"textcoords": "offset points", "va": "center"}
    axes.annotate(name, **at_axis, xytext=(-8, 0), ha="right", fontsize=10, color=INK, **beside)
    found, values = summary["found"], summary["values"]
    if found is not None:
        bar = {"height": 0.55, "color": MET[summary["met"]], "zorder": 2}
        axes.barh(place, found - start, left=start, **bar)
        if len(values) > 1:
            axes.plot(values, [place] * len(values), **DOT, markersize=3.5, zorder=4)
    if summary["must"] is not None:
        axes.plot(summary["must"], place, **TICK, markersize=18, zorder=5)
    if summary["aim"] is not None:
        axes.plot(summary["aim"], place, **AIM)
    axes.annotate(
        shown,
        (max([start, *_numbers(summary)]), place),
        (8, 0),
        color=INK if found is not None else SLOWER,
        fontsize=9,
        weight="normal" if found is not None else "bold",
        **beside,
    )


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(color=MET["aim"], label="reaches its aim"),
        Patch(color=MET["must"], label="reaches what it must"),
        Patch(color=MET["no"], label="does not"),
        Line2D([], [], **TICK, markersize=11, label="must"),
        Line2D([], [], **AIM, label="aim"),
        Line2D([], [], **DOT, markersize=3.5, label="a case"),
    ]
