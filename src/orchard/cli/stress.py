"""`orchard verify --stress` and `--soak`: what they show, write and exit with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from orchard.cli.console import print_table, progress

if TYPE_CHECKING:
    from orchard.testing.soak import SoakReport
    from orchard.testing.stress import Finding


def run(args: argparse.Namespace, device: str) -> int:
    """1 where a process ended badly, or a soak lost, changed or kept something."""
    from orchard.cli.doctor import collect

    args.report.touch()  # a place that cannot be written is said before the work
    findings = _stress(args, device) if args.stress else []
    soaked = _soak(args.soak) if args.soak is not None else None
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "repeats": args.repeats,
        "programs": [finding.data() for finding in findings],
        "soak": None if soaked is None else soaked.data(),
        "machine": collect(),
    }
    args.report.write_text(json.dumps(report, indent=1))
    if args.json:
        print(json.dumps(report))
    else:
        _print(findings, soaked)
        print(f"Report: {args.report}")
    bad = any(finding.bad for finding in findings)
    return 1 if bad or (soaked is not None and not soaked.ok) else 0


def _stress(args: argparse.Namespace, device: str) -> list[Finding]:
    from orchard.testing.stress import count_runs, programs, run_all

    chosen = programs(device)
    with progress("stress", count_runs(chosen, args.repeats)) as step:
        return run_all(chosen, args.repeats, step)


def _soak(seconds: float) -> SoakReport:
    from orchard.testing.soak import looks, soak

    with progress("soak", looks(seconds)) as step:
        return soak(seconds, step)


def _print(findings: Sequence[Finding], soaked: SoakReport | None) -> None:
    if findings:
        rows = [
            [each.program.subject, each.program.name, str(each.runs), str(each.bad)]
            for each in findings
        ]
        print_table("stress, in fresh processes", ["subject", "program", "runs", "bad"], rows)
    details = [[each.program.name, words] for each in findings for words in each.complaints]
    if details:
        print_table("failures", ["program", "what is wrong"], details)
    if findings:
        runs, bad = sum(each.runs for each in findings), sum(each.bad for each in findings)
        print(f"{runs} runs of {len(findings)} programs, {bad} bad.")
    if soaked is not None:
        print(soaked)
