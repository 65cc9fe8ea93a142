"""Time Orchard and torch's attention in turn on the same inputs, and check both.

A speed is shown only beside a passed check. The ratio is torch's time over Orchard's: above 1
Orchard is faster. Exit status 1: a result of Orchard's was wrong.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from orchard.cli import record
from orchard.cli.chart import draw, draw_targets, why_no_chart
from orchard.cli.console import print_table, progress
from orchard.cli.rate_chart import draw_rates, rated_cases
from orchard.errors import ArgumentValueError
from orchard.text import one_line

if TYPE_CHECKING:  # `orchard doctor` has to start without a working torch
    import torch

    from orchard.testing.benchmark import Case, Row, Side, Spread
    from orchard.testing.targets import Point, Target

T = TypeVar("T")
Say = Callable[[str], None]
DTYPES = ("float32", "float16", "bfloat16")
DEVICES = ("cpu", "cuda", "mps")
COUNTED = "metal-emulated"
SERVING = "serving"
SPEED_HEADERS = ("ratio", "case", "ours, ms", "torch, ms", "served by")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("preset", nargs="?", type=_preset, help="which cases (default: quick)")
    parser.add_argument(
        "--preset", dest="preset_option", metavar="PRESET", type=_preset, help="the same"
    )
    parser.add_argument("--list", action="store_true", help="list the presets and stop")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="the row of this name, or else those that have it in their name; may be repeated",
    )
    parser.add_argument(
        "--device",
        type=_device,
        help="auto, cpu, cuda or mps (default: auto, with a table of targets: its own)",
    )
    parser.add_argument(
        "--backend",
        type=_backend,
        help="who must serve Orchard's calls (default: auto, with a table of targets: its own)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="instead of the preset's own dtypes")
    parser.add_argument(
        "--seconds", type=positive_seconds, default=0.5, help="time for each row (default: 0.5)"
    )
    parser.add_argument(
        "--details", action="store_true", help="of a table of targets, the cases as well"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("orchard-bench"), help="folder for the results"
    )
    parser.add_argument(
        "--json", action="store_true", help="JSON lines on standard output instead of tables"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="of a table of targets, keep the rows that are stored, and measure the others",
    )
    plot = parser.add_mutually_exclusive_group()
    plot.add_argument("--plot", choices=("png", "svg"), help="svg: an .svg beside the .png")
    plot.add_argument("--no-plot", action="store_true", help="draw no plot")


def _preset(name: str) -> str:
    return _one_of(name, tuple(_presets()))


def _presets() -> dict[str, str]:
    """Every preset's name and what it measures."""
    from orchard.testing.presets import PRESETS
    from orchard.testing.tables import TABLES

    timed = {name: preset.__doc__ or "" for name, preset in PRESETS.items()}
    timed |= {name: table.summary for name, table in TABLES.items()}
    return timed | {
        COUNTED: "what the Metal kernels do, counted by the emulator, in minutes",
        SERVING: "BatchQueue and StreamPool under many threads, in three minutes",
    }


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


def positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return seconds


def run(args: argparse.Namespace) -> int:
    from orchard.testing.tables import TABLES

    if args.list:
        listing = [[name, what] for name, what in _presets().items()]
        print_table("Presets", ["preset", "what it measures"], listing)
        return 0
    if args.preset and args.preset_option not in (None, args.preset):
        raise ArgumentValueError(f"two presets: {args.preset} and {args.preset_option}")
    args.preset = args.preset_option or args.preset or "quick"
    if args.preset == COUNTED:
        return _run_counts(args)
    if args.preset == SERVING:
        return _run_serving(args)
    if args.preset in TABLES:
        return _run_table(args)
    if args.resume:
        raise ArgumentValueError(f"--resume is for tables of targets: {', '.join(TABLES)}")
    return _say_what_is_wrong(args, _run_cases(args))


def _say_what_is_wrong(args: argparse.Namespace, rows: Sequence[Row]) -> int:
    wrong = [row for row in rows if not row.right]
    for row in wrong:
        _say(args)(f"{row.case.name}: {row.ours.status}: {row.ours.note}")
    return 1 if wrong else 0


def _say(args: argparse.Namespace) -> Say:
    return _on_standard_error if args.json else print


def _on_standard_error(text: str) -> None:
    print(text, file=sys.stderr)


def _picked(items: Sequence[T], wanted: Sequence[str] | None, name: Callable[[T], str]) -> list[T]:
    """The items of each wanted name, or else those that contain it, in their own order."""
    if not wanted:
        return list(items)
    names = [name(item) for item in items]
    kept: set[str] = set()
    for text in wanted:
        found = [each for each in names if each.casefold() == text.casefold()]
        found = found or [each for each in names if text.casefold() in each.casefold()]
        if not found:
            raise ArgumentValueError(f"no row has {text!r} in its name: {'; '.join(names)}")
        kept.update(found)
    return [item for item in items if name(item) in kept]


def _run_cases(args: argparse.Namespace) -> list[Row]:
    import torch

    from orchard.dispatch.planner import AUTO
    from orchard.testing.presets import PRESETS

    args.device = args.device or _device("auto")
    args.backend = args.backend or AUTO
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    cases = _picked(PRESETS[args.preset](args.device, dtype), args.only, lambda case: case.name)
    stored = _stored(args)
    rows, facts = _measure_all(args, cases, stored)
    if not args.json:
        _print_rows(args.preset, rows, facts)
    _say(args)(f"Data: {stored}")
    _plot(args, partial(draw, args.preset, rows, facts))
    return rows


def _run_counts(args: argparse.Namespace) -> int:
    """Counts instead of times; 1 where a limit is not held, 2 where there is no compiler."""
    import torch

    from orchard.testing.metal import Emulator, toolchain
    from orchard.testing.metal_counters import EXERCISES, TABLES, Workbench, count

    if args.device not in (None, torch.device("cpu")) or args.backend not in (None, COUNTED):
        raise ArgumentValueError(f"the preset {COUNTED} counts what it is named after, on the CPU")
    if args.dtype is not None:
        raise ArgumentValueError(f"the preset {COUNTED} has its own dtype; --only picks rows")
    try:
        toolchain.find()
    except toolchain.NoCompilerError as error:
        _on_standard_error(f"orchard bench: {error}")
        return 2
    bench = Workbench(Emulator(workers=2))
    exercises = _picked(EXERCISES, args.only, str)
    found = _run_exercises(args, exercises, lambda each: count(bench, each).data(), TABLES)
    wrong = [words for data in found for words in data["complaints"]]
    for words in wrong:
        _say(args)(words)
    held = all(limit["held"] for data in found for limit in data["limits"])
    return 0 if held and not wrong else 1


def _run_serving(args: argparse.Namespace) -> int:
    """Queues and lanes under load; 1 where an answer is wrong."""
    from orchard.cli.serving_bench import TABLES, Exercise, exercises, goals
    from orchard.cli.serving_chart import draw_serving

    if args.backend is not None or args.dtype is not None:
        raise ArgumentValueError(
            f"the preset {SERVING} has its own calls: no --backend, no --dtype"
        )
    args.device = args.device or _device("auto")

    def measure(exercise: Exercise) -> dict[str, Any]:
        line = {"case": str(exercise), **exercise.measure(args.device, args.seconds)}
        return {**line, "goals": goals(line, args.device)}

    rows = _picked(exercises(args.device), args.only, str)
    found = _run_exercises(args, rows, measure, TABLES)
    if any("clients" in line for line in found):
        _plot(args, partial(draw_serving, found))
    return 1 if any(line["wrong"] for line in found) else 0


def _run_exercises(
    args: argparse.Namespace,
    exercises: Sequence[T],
    measure: Callable[[T], dict[str, Any]],
    tables: Mapping[str, tuple[Sequence[str], Callable[[dict[str, Any]], list[list[str]]]]],
) -> list[dict[str, Any]]:
    """A line for each, written down as soon as it is there; then what `tables` makes of them."""
    import torch

    from orchard.testing.machine import machine

    stored, facts = _stored(args), machine(args.device or torch.device("cpu"))
    found = []
    with stored.open("w") as file, progress(f"bench {args.preset}", len(exercises)) as step:
        for exercise in exercises:
            found.append({"preset": args.preset, **measure(exercise), "machine": facts})
            record.write(found[-1], file, shown=args.json)
            step(str(exercise))
    if not args.json:
        for title, (headers, rows) in tables.items():
            print_table(title, headers, [row for data in found for row in rows(data)])
    _say(args)(f"Data: {stored}")
    return found


def _stored(args: argparse.Namespace) -> Path:
    args.out.mkdir(parents=True, exist_ok=True)
    return Path(args.out / f"{args.preset}.jsonl")


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
            record.write(record.as_data(args.preset, row, facts), file, shown=args.json)
            step(case.name)
    return rows, facts


def _run_table(args: argparse.Namespace) -> int:
    """Measure targets; 1 where one is wrong or failed."""
    from orchard.testing.machine import machine
    from orchard.testing.tables import TABLES

    table = TABLES[args.preset]
    if args.device is not None and args.device.type != table.device:
        where = "the CPU" if table.device == "cpu" else table.device
        raise ArgumentValueError(f"the preset {args.preset} is for {where}, not {args.device}")
    if args.dtype is not None:
        raise ArgumentValueError(f"the preset {args.preset} has its own dtypes; --only picks rows")
    args.backend = args.backend or table.backend
    targets = _picked(table.targets(), args.only, lambda target: target.work)
    kept = _finished(args.out / f"{args.preset}.jsonl") if args.resume else []
    done = {line["target"] for line in kept}
    targets = [target for target in targets if target.work not in done]
    if targets:
        args.device = args.device or _table_device(args.preset, table.device)
    facts = machine(args.device) if targets else kept[-1]["machine"]
    stored = _stored(args)
    with stored.open("w") as file:
        for line in kept:
            record.write(line, file, shown=args.json)
        rows, lost = _measure_targets(args, targets, file, facts)
    if lost:
        return _go_on_in_a_new_process(args)
    return _show_table(args, stored, rows, facts)


def _show_table(
    args: argparse.Namespace, stored: Path, rows: Sequence[Row], facts: dict[str, Any]
) -> int:
    """The stored table and its plots; of `rows`, which are new, what is to be said."""
    from orchard.testing.tables import TABLES
    from orchard.testing.targets import HEADERS, cells

    lines, table = record.read(stored), TABLES[args.preset]
    summaries = [line for line in lines if "found" in line]
    if not args.json:
        place = facts["gpu"] or f"{facts['cpu']}, {facts['threads']} threads"
        print_table(
            f"{args.preset} on {place}: {table.found},"
            " geometric mean of the cases (of one case: p20 to p80 of its rounds)",
            HEADERS,
            [cells(line) for line in summaries],
        )
        if args.details:
            _print_rows(args.preset, rows, facts, table.rows)
    notes = Counter(row.ours.note for row in rows if row.ours.status == "not served")
    for note, count in notes.items():
        _say(args)(f"Not served, {count} of {len(rows)} cases: {note}")
    _say(args)(f"Data: {stored}")
    _plot(args, partial(draw_targets, args.preset, summaries, facts, table.axes))
    if rated := rated_cases(lines):
        _plot(args, partial(draw_rates, args.preset, rated, facts), "-rates")
    _say_what_is_wrong(args, rows)
    return 1 if any(line["status"] in ("WRONG", "failed") for line in summaries) else 0


def _table_device(preset: str, kind: str) -> torch.device:
    try:
        return _device(kind)
    except argparse.ArgumentTypeError as error:
        raise ArgumentValueError(f"the preset {preset} needs one: {error}") from None


def _finished(stored: Path) -> list[dict[str, Any]]:
    """Lines of an earlier run that belong to targets it came to the end of."""
    lines = record.read(stored) if stored.exists() else []
    done = {line["target"] for line in lines if "found" in line}
    return [line for line in lines if line["target"] in done]


def _measure_targets(
    args: argparse.Namespace, targets: Sequence[Target], file: TextIO, facts: dict[str, Any]
) -> tuple[list[Row], bool]:
    """Every row of every target, and whether the device was lost on the way.

    A line is written for each case as soon as it is there, then one for the whole.
    """
    from orchard.testing.targets import Finding

    rows: list[Row] = []
    total = sum(len(target.cases) for target in targets)
    with progress(f"bench {args.preset}", total) as step:
        for target in targets:
            points, lost = [], False
            for case in target.cases:
                point = _measure_case(args, target, case, lost)
                lost = lost or (point.status == "failed" and _is_lost(args.device))
                points.append(point)
                data = record.as_data(args.preset, point.row, facts)
                data |= {"target": target.work, "unit": target.unit, "value": point.data()}
                record.write(data, file, shown=args.json)
                step(case.name)
            rows += [point.row for point in points]
            summary = Finding(target, tuple(points)).summary()
            record.write(
                {"preset": args.preset, **summary, "machine": facts}, file, shown=args.json
            )
            if lost:
                return rows, True
    return rows, False


def _measure_case(args: argparse.Namespace, target: Target, case: Case, lost: bool) -> Point:
    """A case that fails in whatever way is a result, and the table goes on."""
    from orchard.testing import targets

    if lost:
        return targets.failed(case, "not run: a case before it lost the device")
    try:
        return targets.measure_case(target, case, args.backend, args.seconds, args.device)
    except Exception as error:  # compilers and drivers raise what they like
        return targets.failed(case, one_line(error))


def _is_lost(device: torch.device) -> bool:
    """Whether a kernel has broken the CUDA context: every later call would fail too."""
    import torch

    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _go_on_in_a_new_process(args: argparse.Namespace) -> int:
    """The rest of the table, for what this process has of the device is of no use any more."""
    _say(args)("A kernel broke the CUDA context; a new process goes on with the next row.")
    sys.stdout.flush()
    words = [word for word in args.words if word != "--resume"]
    return subprocess.call([sys.executable, "-m", "orchard", *words, "--resume"])


def _print_rows(
    preset: str, rows: Sequence[Row], facts: dict[str, Any], what: str = "torch's time / ours"
) -> None:
    print_table(
        f"{preset} on {facts['gpu'] or facts['cpu']}: {what}, medians (p20-p80)",
        SPEED_HEADERS,
        [speed_cells(row) for row in rows],
    )
    unit, divisor = ("TFLOP/s", 1000.0) if facts["gpu"] else ("GFLOP/s", 1.0)
    print_table(
        "The same rows: rate, peak memory, and error as a share of its budget, ours / torch's",
        ["case", "sizes", unit, "peak, MiB", "error", "checked"],
        [_other_cells(row, divisor) for row in rows],
    )


def speed_cells(row: Row) -> list[str]:
    """A row of speeds, in the order of SPEED_HEADERS."""
    ratio = _shown(row.ratio) if row.ratio else "-"
    if row.ours.status != "ok":
        ratio = row.ours.status
    theirs = _time(row.torch) + (f" {row.peer}" if row.ratio and row.peer != "torch" else "")
    return [ratio, row.case.name, _time(row.ours), theirs, _served(row)]


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
    args: argparse.Namespace, picture: Callable[[list[Path]], None], suffix: str = ""
) -> None:
    if args.no_plot:
        return
    reason = why_no_chart()
    if reason is not None:
        _say(args)(f"Plot left out: {reason}")
        return
    kinds = ("png", "svg") if args.plot == "svg" else ("png",)
    paths = [args.out / f"{args.preset}{suffix}.{kind}" for kind in kinds]
    picture(paths)
    _say(args)(f"Plot: {', '.join(map(str, paths))}")
