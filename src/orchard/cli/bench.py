"""Time Orchard and torch's attention in turn on the same inputs, and check both.

A speed is shown only beside a passed check. The ratio is torch's time over Orchard's: above 1
Orchard is faster. Exit status 1: a result of Orchard's was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from orchard.cli.chart import draw, why_no_chart
from orchard.cli.console import print_table, progress

if TYPE_CHECKING:  # `orchard doctor` has to start without a working torch
    import torch

    from orchard.testing.benchmark import Case, Check, Row, Side, Spread

DTYPES = ("float32", "float16", "bfloat16")
DEVICES = ("cpu", "cuda", "mps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "preset", nargs="?", default="quick", type=_preset, help="which cases (default: quick)"
    )
    parser.add_argument("--list", action="store_true", help="list the presets and stop")
    parser.add_argument(
        "--device", default="auto", type=_device, help="auto, cpu, cuda or mps (default: auto)"
    )
    parser.add_argument(
        "--backend", default="auto", type=_backend, help="who must serve Orchard's calls"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="instead of the preset's own dtypes")
    parser.add_argument(
        "--seconds", type=_seconds, default=0.5, help="time for each row (default: 0.5)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("orchard-bench"), help="folder for the results"
    )
    parser.add_argument(
        "--json", action="store_true", help="JSON lines on standard output instead of tables"
    )
    plot = parser.add_mutually_exclusive_group()
    plot.add_argument("--plot", choices=("png", "svg"), help="svg: an .svg beside the .png")
    plot.add_argument("--no-plot", action="store_true", help="draw no plot")


def _preset(name: str) -> str:
    from orchard.testing.presets import PRESETS

    return _one_of(name, tuple(PRESETS))


def _backend(name: str) -> str:
    from orchard.dispatch.planner import AUTO, planner

    return _one_of(name, (AUTO, *planner().backends))


def _device(name: str) -> torch.device:
    import torch

    from orchard.dispatch.report import visible_devices

    seen = {device.type: device for device in reversed(visible_devices())}  # the first of each
    if _one_of(name, ("auto", *DEVICES)) == "auto":
        return next(seen[kind] for kind in ("cuda", "mps", "cpu") if kind in seen)
    if name not in seen:
        raise argparse.ArgumentTypeError(f"torch {torch.__version__} sees no {name} device here")
    return seen[name]


def _one_of(name: str, names: tuple[str, ...]) -> str:
    if name not in names:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(names)}")
    return name


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return seconds


def run(args: argparse.Namespace) -> int:
    from orchard.testing.presets import PRESETS

    if args.list:
        listing = [[name, preset.__doc__ or ""] for name, preset in PRESETS.items()]
        print_table("Presets", ["preset", "what it measures"], listing)
        return 0

    import torch

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    cases = PRESETS[args.preset](args.device, dtype)
    say = _on_standard_error if args.json else print
    args.out.mkdir(parents=True, exist_ok=True)
    stored = args.out / f"{args.preset}.jsonl"
    rows, facts = _measure_all(args, cases, stored)
    if not args.json:
        _print_rows(args.preset, rows, facts)
    say(f"Data: {stored}")
    _plot(args, rows, facts, say)
    wrong = [row for row in rows if not row.right]
    for row in wrong:
        say(f"{row.case.name}: {row.ours.status}: {row.ours.note}")
    return 1 if wrong else 0


def _on_standard_error(text: str) -> None:
    print(text, file=sys.stderr)


def _measure_all(
    args: argparse.Namespace, cases: list[Case], stored: Path
) -> tuple[list[Row], dict[str, Any]]:
    """Every row, each written down as soon as it is there."""
    from orchard.testing.benchmark import measure
    from orchard.testing.machine import machine

    facts = machine(args.device)
    rows = []
    with stored.open("w") as file, progress(f"bench {args.preset}", len(cases)) as step:
        for case in cases:
            row = measure(case, args.device, args.backend, args.seconds)
            rows.append(row)
            line = json.dumps(as_data(args.preset, row, facts))
            _write(line, file)
            if args.json:
                _write(line, sys.stdout)
            step(case.name)
    return rows, facts


def _write(line: str, file: TextIO) -> None:
    print(line, file=file, flush=True)


def as_data(preset: str, row: Row, facts: dict[str, Any]) -> dict[str, Any]:
    """A row as one JSON object: the case, both sides, the ratio and the machine."""
    from orchard.dispatch.backend import dtype_name
    from orchard.testing.benchmark import flops

    case = row.case
    return {
        "preset": preset,
        "case": case.name,
        "step": "forward+backward" if case.backward else "forward",
        "batch": case.batch,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "rows": case.rows,
        "keys": case.keys,
        "dim": case.dim,
        "value_dim": case.value_dim,
        "dtype": dtype_name(case.dtype),
        "views": list(case.views),
        "mask": case.mask,
        "mask_grad": case.mask_grad,
        "causal": case.causal,
        "window": case.window,
        "dropout_p": case.dropout_p,
        "flops": flops(case),
        "status": row.ours.status,
        "ratio": _spread_data(row.ratio),
        "rounds": row.rounds,
        "ours": _side_data(row.ours, case),
        "torch": _side_data(row.torch, case),
        "served": row.served,
        "kernels": list(row.kernels),
        "machine": facts,
    }


def _spread_data(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else spread._asdict()


def _side_data(side: Side, case: Case) -> dict[str, Any]:
    return {
        "status": side.status,
        "note": side.note,
        "check": None if side.check is None else _check_data(side.check, case),
        "seconds": _spread_data(side.seconds),
        "gflops": side.gflops,
        "peak_bytes": side.peak_bytes,
    }


def _check_data(check: Check, case: Case) -> dict[str, Any]:
    part = check.part
    return {
        "ok": check.ok,
        "whole": part.covers(case),
        "first_batches": part.batch,
        "first_heads": part.heads,
        "last_rows": part.rows,
        "results": {
            c.name: {"error": _number(c.error), "budget": c.budget} for c in check.comparisons
        },
    }


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if value < math.inf else "inf"


def _print_rows(preset: str, rows: list[Row], facts: dict[str, Any]) -> None:
    print_table(
        f"{preset} on {facts['gpu'] or facts['cpu']}: torch's time / ours, medians (p20-p80)",
        ["ratio", "case", "ours, ms", "torch, ms", "served by"],
        [_speed_cells(row) for row in rows],
    )
    unit, divisor = ("TFLOP/s", 1000.0) if facts["gpu"] else ("GFLOP/s", 1.0)
    print_table(
        "The same rows: rate, peak memory, and error as a share of its budget, ours / torch's",
        ["case", "sizes", unit, "peak, MiB", "error", "checked"],
        [_other_cells(row, divisor) for row in rows],
    )


def _speed_cells(row: Row) -> list[str]:
    ratio = _shown(row.ratio) if row.ratio else "-"
    if row.ours.status != "ok":
        ratio = row.ours.status
    return [ratio, row.case.name, _time(row.ours), _time(row.torch), _served(row)]


def _other_cells(row: Row, divisor: float) -> list[str]:
    sides = (row.ours, row.torch)
    rates = [None if side.gflops is None else side.gflops / divisor for side in sides]
    peaks = [None if side.peak_bytes is None else side.peak_bytes / 2**20 for side in sides]
    errors = ["-" if side.check is None else f"{side.check.share:.0%}" for side in sides]
    return [
        row.case.name,
        row.case.sizes,
        " / ".join(_digits(rate) for rate in rates),
        " / ".join(_digits(peak) for peak in peaks),
        " / ".join(errors),
        _checked(row),
    ]


def _checked(row: Row) -> str:
    if row.ours.check is None:
        return "-"
    part = row.ours.check.part
    if part.covers(row.case):
        return "whole"
    rows = "" if part.rows == row.case.rows else f" S{part.rows}"
    return f"B{part.batch} H{part.heads}{rows}"


def _time(side: Side) -> str:
    if side.seconds is None:
        return side.status if side.status != "ok" else "-"
    return _shown(side.seconds, 1000.0)


def _shown(spread: Spread, factor: float = 1.0) -> str:
    low, middle, high = (_digits(value * factor) for value in spread)
    return f"{middle} ({low}-{high})"


def _digits(value: float | None) -> str:
    """About three significant digits, never in powers of ten."""
    if value is None:
        return "-"
    places = next((n for n, least in enumerate((100, 10, 0.1, 0.01)) if value >= least), 4)
    return f"{value:.{places}f}"


def _served(row: Row) -> str:
    return ", ".join(dict.fromkeys(row.served.values())) or "-"


def _plot(
    args: argparse.Namespace, rows: list[Row], facts: dict[str, Any], say: Callable[[str], None]
) -> None:
    if args.no_plot:
        return
    reason = why_no_chart()
    if reason is not None:
        say(f"Plot left out: {reason}")
        return
    paths = [args.out / f"{args.preset}.png"]
    if args.plot == "svg":
        paths.append(args.out / f"{args.preset}.svg")
    draw(args.preset, rows, facts, paths)
    say(f"Plot: {', '.join(map(str, paths))}")
