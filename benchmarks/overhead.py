"""What a call costs apart from the attention: the smallest problem, ours and torch's in turn.

Prints a table, and writes it to docs/overhead.md and benchmarks/results/overhead.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import orchard
from orchard.attention.problem import Options, Problem, Tensors, default_scale, describe
from orchard.dispatch.planner import planner
from orchard.testing.benchmark import Spread, interleave, sampler, spread
from orchard.testing.machine import machine
from orchard.text import table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "overhead.md"
RESULTS = ROOT / "benchmarks" / "results" / "overhead.jsonl"
BEGIN, END = "<!-- overhead:begin -->", "<!-- overhead:end -->"
CPU = torch.device("cpu")
SHAPE = (1, 1, 8, 8)
HEADERS = ("", "call", "p20, us", "p50, us", "p80, us", "over torch, us")


@dataclass(frozen=True)
class Entry:
    """One thing to time, and the context that its samples are taken in."""

    group: str
    name: str
    step: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def entries() -> list[Entry]:
    plain = [torch.randn(SHAPE) for _ in range(3)]
    leaves = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]
    grad_out = torch.ones(SHAPE)
    tensors = Tensors(*plain)
    options = Options(default_scale(SHAPE[3]))
    problem = describe(tensors, options)
    planner().plan(problem)
    anew = _never_seen(problem)

    def trained(function: Callable[..., torch.Tensor]) -> object:
        return torch.autograd.grad(function(*leaves), leaves, grad_out)

    torch_sdpa, our_sdpa = F.scaled_dot_product_attention, orchard.scaled_dot_product_attention
    no_grad, forward, both = "no grad", "grad, forward", "grad, forward and backward"
    return [
        Entry(no_grad, "torch", lambda: torch_sdpa(*plain), torch.no_grad),
        Entry(no_grad, "attention", lambda: orchard.attention(*plain), torch.no_grad),
        Entry(no_grad, "orchard's SDPA", lambda: our_sdpa(*plain), torch.no_grad),
        Entry(no_grad, "torch, enabled", lambda: torch_sdpa(*plain), _enabled_without_grad),
        Entry(forward, "torch", lambda: torch_sdpa(*leaves)),
        Entry(forward, "attention", lambda: orchard.attention(*leaves)),
        Entry(forward, "orchard's SDPA", lambda: our_sdpa(*leaves)),
        Entry(forward, "torch, enabled", lambda: torch_sdpa(*leaves), orchard.enabled),
        Entry(both, "torch", lambda: trained(torch_sdpa)),
        Entry(both, "attention", lambda: trained(orchard.attention)),
        Entry("inside a call", "describe", lambda: describe(tensors, options)),
        Entry("inside a call", "plan, known", lambda: planner().plan(problem)),
        Entry("inside a call", "plan, made anew", lambda: planner().plan(next(anew))),
    ]


def _never_seen(problem: Problem) -> itertools.cycle[Problem]:
    """Problems that the cache of plans has forgotten by the time they come round again."""
    return itertools.cycle(problem._replace(options=Options(scale=1.0 + n)) for n in range(10_000))


@contextmanager
def _enabled_without_grad() -> Iterator[None]:
    with orchard.enabled(), torch.no_grad():
        yield


def measure(seconds: float) -> list[tuple[Entry, Spread]]:
    """Seconds per call of every entry, all of them interleaved."""
    found = entries()
    samples = interleave([_within(entry) for entry in found], seconds)
    return [(entry, spread(each)) for entry, each in zip(found, samples, strict=True)]


def _within(entry: Entry) -> Callable[[], float]:
    with entry.around():
        sample = sampler(entry.step, CPU)

    def within() -> float:
        with entry.around():
            return sample()

    return within


def cells(measured: Sequence[tuple[Entry, Spread]]) -> list[list[str]]:
    """Rows for people: microseconds, and how much more than torch's call in the same group."""
    peers = {entry.group: time.p50 for entry, time in measured if entry.name == "torch"}
    rows = []
    for entry, time in measured:
        peer = peers.get(entry.group)
        extra = "" if peer is None or entry.name == "torch" else f"{1e6 * (time.p50 - peer):+.1f}"
        rows.append([entry.group, entry.name, *(f"{1e6 * each:.1f}" for each in time), extra])
    return rows


def markdown(rows: Sequence[Sequence[str]], facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores; python {facts['python']}, torch "
        f"{facts['torch']}, orchard {facts['orchard']} ({facts['commit']}); {facts['date']}.",
        "",
        f"| {' | '.join(HEADERS)} |",
        "|---|---|---:|---:|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines)


def write(measured: Sequence[tuple[Entry, Spread]], facts: dict[str, Any]) -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{markdown(cells(measured), facts)}\n{END}{after}")
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w") as file:
        for entry, time in measured:
            row = {"group": entry.group, "call": entry.name, "seconds": time._asdict()}
            print(json.dumps({**row, "machine": facts}), file=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="for everything together")
    parser.add_argument("--dry-run", action="store_true", help="print, and write nothing")
    args = parser.parse_args()
    facts = machine(CPU)
    measured = measure(args.seconds)
    print(table(HEADERS, cells(measured)))
    if not args.dry_run:
        write(measured, facts)


if __name__ == "__main__":
    main()
