"""Write the table by which `auto` leaves a problem to torch's own kernel on NVIDIA GPUs.

It is made from a stored run of `orchard bench --preset cuda`: of the rows "rate by length" and of
those in fp32, what each kernel of torch's took beside ours. No GPU is needed. A family of GPUs that
is in the table already gets the newer measurements in the place of the old ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchard.cli.rate_chart import rated_cases
from orchard.cli.record import read
from orchard.testing.cuda_targets import SINGLE
from orchard.text import table

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src" / "orchard" / "backends" / "cuda" / "measured.json"
BACKEND = "cuda"
HEADERS = ("stage", "heads x rows x D", "dtype", "", "ours", *("cudnn", "flash", "efficient"))


def measurement(line: dict[str, Any]) -> dict[str, Any] | None:
    """A stored case as an entry of the table; None where it has no speed, or no one kernel's."""
    ours = [name for name in line["kernels"] if name.startswith(f"{BACKEND}/")]
    timed = {name: side["ratio"] for name, side in line["peers"].items() if side["ratio"]}
    if line["status"] != "ok" or len(ours) != 1 or not timed:
        return None
    return {
        "stage": line["step"],
        "dtype": line["dtype"],
        "head_dim": line["dim"],
        "causal": bool(line["causal"]),
        "planes": line["batch"] * line["heads"],
        "length": line["rows"],
        "kernel": ours[0].removeprefix(f"{BACKEND}/"),
        "torch": {
            name: [round(ratio[level], 4) for level in ("p20", "p50", "p80")]
            for name, ratio in timed.items()
        },
    }


def entry(lines: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The family of GPUs that `lines` were measured on, and what the table has of it."""
    single = [line for line in lines if "case" in line and line.get("target") == SINGLE]
    cases = rated_cases(lines) + single
    found = [known for case in cases if (known := measurement(case)) is not None]
    if not found:
        raise SystemExit(f'no row "rate by length" or "{SINGLE}" of a GPU with a speed in it')
    facts = cases[0]["machine"]
    dates = sorted({case["machine"]["date"][:10] for case in cases})
    place = f"{facts['gpu']}, torch {facts['torch']}, {' and '.join(dates)}"
    return facts["gpu_family"], {"place": place, "measurements": found}


def write(path: Path, family: str, data: dict[str, Any]) -> None:
    """One measurement to a line, so that a difference can be read."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known[family] = data
    parts = []
    for name, each in known.items():
        rows = ",\n".join(f"   {json.dumps(row)}" for row in each["measurements"])
        place = json.dumps(each["place"])
        parts.append(f' "{name}": {{\n  "place": {place},\n  "measurements": [\n{rows}\n  ]\n }}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def cells(known: dict[str, Any]) -> list[str]:
    size = f"{known['planes']} x {known['length']} x {known['head_dim']}"
    times = (known["torch"].get(name) for name in HEADERS[5:])
    return [
        known["stage"],
        size,
        known["dtype"],
        "causal" if known["causal"] else "full",
        known["kernel"],
        *("-" if ratio is None else f"{ratio[1]:.2f}" for ratio in times),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stored", type=Path, help="cuda.jsonl of orchard bench --preset cuda")
    parser.add_argument("--table", type=Path, default=TABLE, help="the table (default: Orchard's)")
    args = parser.parse_args()
    family, data = entry(read(args.stored))
    print(f"{family}: {data['place']}; time of torch's kernels / ours")
    print(table(HEADERS, [cells(known) for known in data["measurements"]]))
    write(args.table, family, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
