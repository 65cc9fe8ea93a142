"""Run the conformance suite: layouts, dtypes, masks, gradients, guard buffers and dropout.

Every result is held to the fp64 definition. On MPS it also compiles each Metal kernel and times
attention beside torch's. Exits 0 if all that is served is right, 1 if not, 2 if nothing could be
run. With --stress or --soak pools and queues are verified instead.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.cli import record
from orchard.cli.bench import SPEED_HEADERS, positive_seconds, speed_cells
from orchard.cli.console import print_table, progress

if TYPE_CHECKING:
    import torch

    from orchard.testing.benchmark import Row
    from orchard.testing.conformance import Case, Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", help="the backend to verify (default: auto)")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda or mps (default: the best one visible)"
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of the cases")
    parser.add_argument(
        "--stress",
        action="store_true",
        help="instead: pools and queues in fresh processes that end, fork and spawn under load",
    )
    parser.add_argument(
        "--repeats",
        type=_count,
        default=50,
        help="how often --stress runs each of its programs (default: %(default)s)",
    )
    parser.add_argument(
        "--soak",
        type=positive_seconds,
        metavar="SECONDS",
        help="instead, or after --stress: a queue at full load, its answers and memory checked",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("orchard-verify.json"),
        help="where to write the report, to attach to a bug (default: %(default)s)",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer above 0")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from orchard.cli import stress
    from orchard.cli.doctor import collect
    from orchard.dispatch.planner import AUTO, planner
    from orchard.dispatch.report import visible_devices
    from orchard.testing.conformance import CASES, QUICK

    if args.backend != AUTO and args.backend not in planner().backends:
        known = ", ".join(planner().backends)
        print(f"backend {args.backend!r} is unknown; there is {known}", file=sys.stderr)
        return 2
    devices = {device.type: device for device in visible_devices()}
    name = _best(args.backend, list(devices.values())) if args.device == "auto" else args.device
    device = next((d for d in visible_devices() if name in (d.type, str(d))), None)
    if device is None:
        print(f"device {name!r} is not visible; there is {', '.join(devices)}", file=sys.stderr)
        return 2
    if args.stress or args.soak is not None:
        return stress.run(args, device.type)

    args.report.touch()  # a place that cannot be written is said before the work
    cases = QUICK if args.quick else CASES
    outcomes = []
    with progress(f"verify {args.backend} on {device}", len(cases)) as step:
        for case in cases:
            outcomes.append(_outcome(case, str(device), args.backend))
            step(case.name)
    served = [outcome for outcome in outcomes if outcome.status != "not served"]
    failed = [outcome for outcome in served if outcome.status == "failed"]
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": args.backend,
        "device": str(device),
        "quick": args.quick,
        "counts": _counts(outcomes),
        "cases": [_as_data(outcome) for outcome in outcomes],
        "machine": collect(),
    }
    metal = _metal(args, device) if device.type == "mps" else None
    if metal is not None:
        report["metal"] = metal.data()
    args.report.write_text(json.dumps(report, indent=1))
    if args.json:
        print(json.dumps(report))
    else:
        if metal is not None:
            _print_metal(metal)
        _print(outcomes, failed, args.report)
    if failed or (metal is not None and not metal.ok):
        return 1
    return 0 if served else 2


def _best(backend: str, devices: Sequence[torch.device]) -> str:
    """The last visible device that the backend is for."""
    from orchard.dispatch.planner import AUTO, planner

    if backend != AUTO:
        devices = [d for d in devices if planner().backends[backend].serves_device(d)] or devices
    return devices[-1].type


@dataclass(frozen=True)
class Metal:
    """What a Mac says of the Metal kernels."""

    facts: dict[str, Any]
    problem: str  # why the backend is not available here, if so
    kernels: list[dict[str, Any]]
    rows: list[Row]

    @property
    def ok(self) -> bool:
        compiled = all(kernel["ok"] for kernel in self.kernels)
        return not self.problem and compiled and all(row.right for row in self.rows)

    def data(self) -> dict[str, Any]:
        times = [record.as_data("quick", row, self.facts) for row in self.rows]
        return {**self.facts, "problem": self.problem, "kernels": self.kernels, "times": times}


def _metal(args: argparse.Namespace, device: torch.device) -> Metal:
    from orchard.backends.metal import MetalBackend
    from orchard.dispatch.planner import planner
    from orchard.testing import metal_report

    backend = planner().backends["metal"]
    assert isinstance(backend, MetalBackend)
    reason = backend.unavailable(backend.capabilities[0], device)
    with progress("compile", len(metal_report.samples(quick=args.quick))) as step:
        kernels = metal_report.compile_all(backend.runtime, quick=args.quick, step=step)
    seconds = 0.1 if args.quick else 0.5
    with progress("time", len(metal_report.cases(device))) as step:
        rows = metal_report.time_all(device, args.backend, seconds=seconds, step=step)
    return Metal(metal_report.facts(), reason.sentence if reason else "", kernels, rows)


def _print_metal(metal: Metal) -> None:
    facts = metal.facts
    print(f"{facts['gpu']}, macOS {facts['macos']}, torch {facts['torch']}")
    if metal.problem:
        print(f"metal does not serve: {metal.problem}")
    rows = []
    for name in dict.fromkeys(kernel["kernel"] for kernel in metal.kernels):
        group = [kernel for kernel in metal.kernels if kernel["kernel"] == name]
        refused = dict.fromkeys(kernel["words"] for kernel in group if not kernel["ok"])
        threads = [kernel["max_threads"] for kernel in group if kernel["max_threads"] is not None]
        compiled = sum(kernel["ok"] for kernel in group)
        fewest = str(min(threads, default="-"))
        rows.append([name, f"{compiled} of {len(group)}", fewest, "; ".join(refused)])
    headers = ["kernel", "compiled", "fewest threads it can run", "what the compiler says"]
    print_table("Metal kernels", headers, rows)
    title = "quick: torch's time / ours, medians (p20-p80)"
    print_table(title, SPEED_HEADERS, [speed_cells(row) for row in metal.rows])


def _outcome(case: Case, device: str, backend: str) -> Outcome:
    from orchard.testing.conformance import Outcome, check

    try:
        return check(case, device, backend)
    except Exception as error:  # a crash of one case is a result of the suite
        return Outcome(case, "failed", complaints=[f"raised {type(error).__name__}: {error}"])


def _counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    counts = {"passed": 0, "failed": 0, "not served": 0}
    for outcome in outcomes:
        counts[outcome.status] += 1
    return counts


def _as_data(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.case.name,
        "subject": outcome.case.subject,
        "status": outcome.status,
        "served": outcome.served,
        "share_of_budget": _number(round(outcome.worst, 4)),
        "results": {
            c.name: {"error": _number(c.error), "budget": _number(c.budget)}
            for c in outcome.comparisons
        },
        "complaints": outcome.complaints,
    }


def _number(value: float) -> float | None:
    """JSON has no infinity: None is a result that is not finite."""
    return value if math.isfinite(value) else None


def _print(outcomes: Sequence[Outcome], failed: Sequence[Outcome], report: Path) -> None:
    rows = []
    for subject in dict.fromkeys(outcome.case.subject for outcome in outcomes):
        group = [outcome for outcome in outcomes if outcome.case.subject == subject]
        counts = _counts(group)
        servers = dict.fromkeys(outcome.served for outcome in group if outcome.served)
        rows.append(
            [
                subject,
                *(str(counts[status]) for status in ("passed", "failed", "not served")),
                f"{max(outcome.worst for outcome in group):.2f}",
                ", ".join(servers),
            ]
        )
    headers = ["subject", "passed", "failed", "not served", "worst share of budget", "served by"]
    print_table("conformance (forward / backward)", headers, rows)
    if failed:
        details = [[o.case.name, o.served, "; ".join(o.complaints)] for o in failed]
        print_table("failures", ["case", "served by", "what is wrong"], details)
    counts = _counts(outcomes)
    print(
        f"{counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['not served']} not served. Report: {report}"
    )
