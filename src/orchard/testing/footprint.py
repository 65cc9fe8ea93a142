"""What a step needs in memory beyond its operands and results.

On a CPU it is measured in a process of its own, which has done nothing larger before, so that its
peak is this step's. Run as a module it is that process: a case comes in as JSON on standard input,
a report goes out on standard output. On a GPU torch's allocator keeps the account.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator

from orchard.attention.api import explain
from orchard.attention.dropout import draw_seed
from orchard.dispatch.backend import dtype_name
from orchard.errors import NotServedError
from orchard.testing.benchmark import (
    SEED,
    Case,
    Check,
    Operands,
    Part,
    Row,
    Served,
    Side,
    build,
    check,
    deterministic,
    options_of,
    oracle,
    our_step,
)
from orchard.testing.budget import Comparison
from orchard.testing.memory import peak_memory, resident_growth
from orchard.testing.poison import poisoned
from orchard.text import one_line

CPU = torch.device("cpu")
_WARM_UP = Case("", batch=1, heads=1, kv_heads=1, rows=4, keys=4, dim=4, value_dim=4, backward=True)
_NOTHING: dict[str, Any] = {
    "growth": None,
    "extra": None,
    "check": None,
    "served": {},
    "kernels": [],
}


@dataclass(frozen=True)
class Footprint:
    """A step's memory: `extra` is what it needed beyond what it was given and what it gave."""

    row: Row
    extra: int | None  # bytes


def footprint(case: Case, backend: str, device: torch.device = CPU) -> Footprint:
    """Measure `case`, on the CPU in a new process with as many threads as this one."""
    if device.type == "cuda":
        return _told(case, _measured(case, build(case, device), backend))
    question = {
        "case": {**asdict(case), "dtype": dtype_name(case.dtype)},
        "backend": backend,
        "threads": torch.get_num_threads(),
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=json.dumps(question), capture_output=True, text=True
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing was said"]
        note = f"its process ended with {done.returncode}: {said[-1]}"
        return Footprint(_row(case, Side("failed", note)), None)
    return _told(case, json.loads(done.stdout))


def _told(case: Case, told: dict[str, Any]) -> Footprint:
    found = told["check"] and Check(
        Part(**told["check"]["part"]),
        tuple(Comparison(*each) for each in told["check"]["comparisons"]),
        told["check"]["complaint"],
    )
    side = Side(told["status"], told["note"], found, peak_bytes=told["growth"])
    return Footprint(_row(case, side, told["served"], tuple(told["kernels"])), told["extra"])


def _row(
    case: Case, ours: Side, served: dict[str, str] | None = None, kernels: tuple[str, ...] = ()
) -> Row:
    return Row(case, ours, Side("not measured"), None, 0, served or {}, kernels)


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Measure in this process. The baseline is before the first call of the backend itself."""
    torch.set_num_threads(question["threads"])
    described = question["case"]
    described = {**described, "dtype": getattr(torch, described["dtype"])}
    case = Case(**{name: _tuples(value) for name, value in described.items()})
    our_step(_WARM_UP, build(_WARM_UP, CPU), "reference")  # torch's code and its threads
    return _measured(case, build(case, CPU), question["backend"])


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _measured(case: Case, operands: Operands, backend: str) -> dict[str, Any]:
    device = operands.query.device
    seed = draw_seed(device, Generator(device).manual_seed(SEED)) if case.dropout_p else None
    source = Generator(device).manual_seed(SEED)
    grow = resident_growth if device.type == "cpu" else partial(peak_memory, device=device)
    setting = deterministic if case.deterministic else nullcontext
    results: tuple[torch.Tensor, ...] = ()

    def step() -> None:
        nonlocal results
        with setting(), poisoned():
            results = our_step(case, operands, backend, source)

    before = Served.so_far()
    try:
        growth = grow(step)
    except RuntimeError as error:
        status = "not served" if isinstance(error, NotServedError) else "failed"
        return {**_NOTHING, "status": status, "note": one_line(error)}
    served = Served.so_far().since(before)
    plan = explain(
        operands.query,
        operands.key,
        operands.value,
        backend=backend,
        **options_of(case, operands),
    )
    found = check(oracle(case, operands, plan.problem.options, seed), operands, results)
    given = sum(result.numel() * result.element_size() for result in results)
    return {
        "status": "ok" if found.ok else "WRONG",
        "note": str(found),
        "growth": growth,
        "extra": None if growth is None else growth - given,
        "check": {
            "part": asdict(found.part),
            "comparisons": [(c.name, c.error, c.budget) for c in found.comparisons],
            "complaint": found.complaint,
        },
        "served": served.by_stage(),
        "kernels": list(served.kernels),
    }


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
