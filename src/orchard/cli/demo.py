"""Train a small character GPT with attention dropout through Orchard, and through torch beside it.

Both runs start from the same weights and see the same batches, step by step in turn. Then: their
losses, a check that has to hold to rounding, a sample of text, who served the calls and why, the
time and the memory of a step. Exit status 1: a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.cli.console import print_table

if TYPE_CHECKING:  # `orchard doctor` has to start without a working torch
    from orchard.cli.comparison import Comparison, Deviation, Mark, Report

STEPS = 300
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda", "mps"),
        default="auto",
        help="where to train (default: auto, the best that torch can see)",
    )
    parser.add_argument(
        "--steps", type=_positive, default=STEPS, help=f"steps of each run (default: {STEPS})"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, batches and dropout (default: 0)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """0 where every check holds, 1 where one does not, 2 where the demo cannot run."""
    import torch

    from orchard.cli.comparison import Comparison
    from orchard.dispatch.report import visible_devices

    seen = [device.type for device in visible_devices()]
    kind = args.device
    if kind == "auto":
        kind = next(best for best in ("cuda", "mps", "cpu") if best in seen)
    if kind not in seen:
        return _refuse(f"torch {torch.__version__} sees no {kind} device here")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        return _refuse(f"there is no folder {args.json.parent} for --json")
    comparison = Comparison(torch.device(kind), args.steps, args.seed)
    _show_heading(comparison)
    report = comparison.measure()
    show(report)
    if args.json is not None:
        content = asdict(report) | {"passed": report.passed}
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if report.passed else 1


def _refuse(sentence: str) -> int:
    print(f"orchard demo: {sentence}", file=sys.stderr)
    return 2


def show(report: Report) -> None:
    """Print the report."""
    _show_losses(report.losses)
    _show_exactness(report.exactness, report.exactness_served_by)
    print("Text from the model trained through Orchard")
    _say(report.sample)
    print(f"The attention call of training\n{report.plan['text']}\n")
    _show_cost(report)
    _show_calls(report)
    verdicts = [[check.name, _yes(check.holds), check.sentence] for check in report.checks]
    print_table("Checks", ["check", "holds", ""], verdicts)
    print(_summary(report))


def _say(text: str) -> None:
    """Paragraphs of prose, and an empty line."""
    for line in text.splitlines():
        print(textwrap.fill(line, WIDTH))
    print(flush=True)


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


def _show_heading(comparison: Comparison) -> None:
    import torch

    import orchard

    model: dict[str, Any] = comparison.describe_model()
    text = model["training_characters"] + model["held_out_characters"]
    _say(
        f"Orchard {orchard.__version__} beside torch {torch.__version__} on "
        f"{comparison.device.type}. A character GPT of {model['parameters']:,} parameters: "
        f"{model['layers']} layers, {model['heads']} heads of {model['width'] // model['heads']}, "
        f"context {model['context']}, batch {model['batch']}, attention dropout "
        f"{model['dropout']:g}; {text:,} characters of text, a tenth of them held out."
    )


def _show_losses(marks: list[Mark]) -> None:
    rows = [
        [
            str(mark.step),
            *(["", ""] if mark.train is None else [f"{loss:.4f}" for loss in mark.train]),
            *(f"{loss:.4f}" for loss in mark.held_out),
        ]
        for mark in marks
    ]
    headers = ["step", "train, orchard", "train, torch", "held out, orchard", "held out, torch"]
    print_table("Losses, in nats per character", headers, rows)
    last = marks[-1].held_out
    _say(
        f"The held-out losses end at {last.orchard:.4f} through Orchard and {last.torch:.4f} "
        f"through torch, {abs(last.orchard - last.torch):.4f} apart. Weights and batches were the "
        "same, the bits of dropout differ by design: the curves should be close and cannot be "
        "equal."
    )


def _show_exactness(deviations: list[Deviation], served_by: str) -> None:
    from orchard.cli.comparison import tightest

    loss, *gradients = deviations
    rows = [
        [
            each.name,
            *(f"{n:.2e}" for n in (each.orchard, each.torch, each.budget, each.between)),
            _yes(each.holds),
        ]
        for each in (loss, tightest(gradients))
    ]
    headers = ["", "orchard's error", "torch's error", "budget", "between them", "holds"]
    print_table("Without dropout: same weights, same batch, beside fp64", headers, rows)
    _say(
        f"The largest error of any element. {len(gradients)} gradients were compared; the one "
        "nearest its budget is shown. The budget is twice torch's error, three times for "
        "gradients, and one rounding step. Orchard's calls for this check were served by "
        f"{served_by}."
    )


def _show_cost(report: Report) -> None:
    memory, ratio = report.peak_memory_bytes, report.time_ratio
    rows = [
        [name, *(f"{1e3 * seconds[p]:.1f}" for p in ("p50", "p20", "p80")), _mebibytes(peak)]
        for name, seconds, peak in zip(
            ("orchard", "torch"), report.seconds_per_step, memory, strict=True
        )
    ]
    less = f"{memory.torch / memory.orchard:.2f}" if memory.torch and memory.orchard else ""
    rows.append(["torch / orchard", *(f"{ratio[p]:.2f}" for p in ("p50", "p20", "p80")), less])
    headers = ["", "ms, median", "p20", "p80", "peak memory"]
    print_table("Cost of a training step", headers, rows)
    missing = report.peak_memory_missing
    about = f"is not measured: {missing}" if missing else "is on top of weights and optimiser"
    _say(f"Ratios are taken step by step; above 1 Orchard takes less. Peak memory {about}.")


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f} MiB"


def _show_calls(report: Report) -> None:
    rows = [
        [stage.replace("_", " "), backend, str(calls)]
        for stage, by_backend in report.stats["calls"].items()
        for backend, calls in by_backend.items()
    ]
    headers = ["stage", "backend", "calls"]
    print_table("Orchard's calls, for training and held-out losses", headers, rows)
    _say("\n".join(f"- {sentence}" for sentence in report.advice) or "No advice.")


def _summary(report: Report) -> str:
    last, seconds = report.losses[-1].held_out, report.seconds_per_step
    memory = report.peak_memory_bytes
    failed = ", ".join(check.name for check in report.checks if not check.holds)
    return (
        f"{f'FAILED: {failed};' if failed else 'Passed'} on {report.machine['device']} in "
        f"{report.seconds:.0f} s: held-out loss {last.orchard:.3f} (torch {last.torch:.3f}), "
        f"{1e3 * seconds.orchard['p50']:.0f} ms per step (torch {1e3 * seconds.torch['p50']:.0f})"
        f", peak memory {_mebibytes(memory.orchard)} (torch {_mebibytes(memory.torch)})"
    )
