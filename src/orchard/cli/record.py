"""Measured rows as JSON objects: what `orchard bench` stores, one to a line."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from orchard.testing.benchmark import Case, Check, Row, Side, Spread


def write(data: dict[str, Any], file: TextIO, *, shown: bool) -> None:
    """A line into `file`, and on standard output where it is to be `shown`."""
    line = json.dumps(data)
    print(line, file=file, flush=True)
    if shown:
        print(line, file=sys.stdout, flush=True)


def read(stored: Path) -> list[dict[str, Any]]:
    """The lines of a file that `write` made; a last one that was cut short is left out."""
    lines = []
    for line in stored.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def as_data(preset: str, row: Row, facts: dict[str, Any]) -> dict[str, Any]:
    """A row as one JSON object: the case, both sides, the ratio and the machine."""
    from orchard.dispatch.backend import dtype_name
    from orchard.testing.benchmark import flops

    case = row.case
    return {
        "preset": preset,
        "case": case.name,
        "step": case.step,
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
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
        "deterministic": case.deterministic,
        "grad_rows": case.grad_rows,
        "flops": flops(case),
        "status": row.ours.status,
        "ratio": _spread_data(row.ratio),
        "rounds": row.rounds,
        "ours": _side_data(row.ours, case),
        "torch": _side_data(row.torch, case),
        "peer": row.peer,
        "peers": {
            name: {**_side_data(side, case), "ratio": _spread_data(row.ratios.get(name))}
            for name, side in row.peers.items()
        },
        "beside": {
            name: {"seconds": other.seconds._asdict(), "ratio": other.ratio._asdict()}
            for name, other in row.beside.items()
        },
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
