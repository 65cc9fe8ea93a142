"""Write the generated parts of README.md and docs/: what stands between their markers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from orchard.backends import load
from orchard.cli import serving_bench
from orchard.dispatch.backend import ANY_DEVICE, Backend, Capability, dtype_name
from orchard.testing import metal_counters, quantization_accuracy
from orchard.testing.reason_codes import capability_codes
from orchard.testing.targets import HEADERS, cells

ROOT = Path(__file__).parent.parent
COLUMNS = (
    "backend / kernel",
    "device",
    "dtypes",
    "stages",
    "head dimension",
    "Dv != D",
    "grouped",
    "masks",
    "mask gradient",
    "causal and window",
    "softcap",
    "dropout",
    "lse / its gradient",
    "last stride != 1",
    "size 0",
    "deterministic",
)
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


def yes(flag: bool) -> str:
    return "yes" if flag else "-"


def row(backend: Backend, c: Capability) -> tuple[str, ...]:
    dims = "any" if c.max_head_dim is None else f"to {c.max_head_dim}"
    if c.head_dim_multiple > 1:
        dims += f", multiple of {c.head_dim_multiple}"
    return (
        f"`{backend.name}` / {c.kernel}",
        "any" if c.devices == ANY_DEVICE else ", ".join(c.devices),
        ", ".join(SHORT[dtype_name(dtype)] for dtype in c.dtypes),
        ", ".join(stage.replace("_", " ") for stage in c.stages),
        dims,
        yes(c.other_value_dim),
        yes(c.grouped_heads),
        ", ".join(c.masks) or "-",
        yes(c.mask_grad),
        ", ".join(band.replace("_", "-") for band in c.bands),
        yes(c.softcap),
        yes(c.dropout),
        f"{yes(c.lse)} / {yes(c.lse_grad)}",
        yes(c.strided_last_axis),
        yes(c.zero_sizes),
        yes(c.deterministic),
    )


def capability_table(columns: tuple[int, ...] = tuple(range(len(COLUMNS)))) -> str:
    lines = [
        "| " + " | ".join(COLUMNS[i] for i in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    for backend in load():
        for capability in backend.capabilities:
            cells = row(backend, capability)
            lines.append("| " + " | ".join(cells[i] for i in columns) + " |")
    return "\n".join(lines)


def reason_table() -> str:
    return ", ".join(f"`{code}`" for code in sorted(capability_codes()))


def results_table(name: str) -> str:
    """A stored run of `orchard bench`, with its machine and date."""
    lines = (ROOT / "benchmarks/results" / f"{name}.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    machine = runs[0]["machine"]
    table = [
        f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads, "
        f"torch {machine['torch']}, {machine['date'][:10]}:",
        "",
        "| case | sizes | torch / Orchard (p20-p80) | Orchard, ms | torch, ms | served by |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        heads = f"H{run['heads']}" + (
            f"/{run['kv_heads']}" if run["kv_heads"] != run["heads"] else ""
        )
        rows = run["rows"] if run["rows"] == run["keys"] else f"{run['rows']}x{run['keys']}"
        dtype = SHORT[run["dtype"]]
        ratio = run["ratio"]
        cells = (
            run["case"],
            f"B{run['batch']} {heads} S{rows} D{run['dim']} {dtype}",
            f"{ratio['p50']:.2g} ({ratio['p20']:.2g}-{ratio['p80']:.2g})" if ratio else "-",
            *(milliseconds(run[side]) for side in ("ours", "torch")),
            " / ".join(dict.fromkeys(run["served"].values())),
        )
        table.append("| " + " | ".join(cells) + " |")
    return "\n".join(table)


def targets_table(name: str, folder: Path = ROOT / "benchmarks/results") -> str:
    """A stored run of a table of targets: what was found, and what it had to be."""
    stored = folder / f"{name}.jsonl"
    if not stored.exists():
        return f"Not measured yet: `orchard bench --preset {name} --out benchmarks/results`."
    lines = [json.loads(line) for line in stored.read_text().splitlines()]
    machine = lines[0]["machine"]
    table = [
        f"{machine.get('gpu') or machine['cpu']}, {machine['threads']} threads, "
        f"torch {machine['torch']}, {machine['date'][:10]}:",
        "",
        f"| {' | '.join(HEADERS)} |",
        "|" + "---|" * len(HEADERS),
    ]
    table += [f"| {' | '.join(cells(line))} |" for line in lines if "found" in line]
    return "\n".join(table)


def counts_table(folder: Path = ROOT / "benchmarks/results") -> str:
    """A stored run of `orchard bench --preset metal-emulated`."""
    lines = stored_lines("metal-emulated", folder)
    machine = lines[0]["machine"]
    parts = [f"torch {machine['torch']}, {machine['date'][:10]}:"]
    return "\n".join([*parts, *titled_tables(metal_counters.TABLES, lines)])


def serving_table(name: str, folder: Path = ROOT / "benchmarks/results") -> str:
    """A stored run of `orchard bench --preset serving`."""
    if not (folder / f"{name}.jsonl").exists():
        device = "cpu" if name == "serving-cpu" else "cuda"
        return f"Not measured yet: `orchard bench --preset serving --device {device}`."
    lines = stored_lines(name, folder)
    machine = lines[0]["machine"]
    place = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    parts = [f"{place}, torch {machine['torch']}, {machine['date'][:10]}:"]
    return "\n".join([*parts, *titled_tables(serving_bench.TABLES, lines)])


def stored_lines(name: str, folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def titled_tables(tables: dict[str, Any], lines: list[dict[str, Any]]) -> list[str]:
    """Every table with its title; those without a row are left out."""
    parts = []
    for title, (headers, make_rows) in tables.items():
        if rows := [row for line in lines for row in make_rows(line)]:
            parts += ["", f"**{title}**", ""]
            parts += [f"| {' | '.join(headers)} |", "|" + "---|" * len(headers)]
            parts += [f"| {' | '.join(row)} |" for row in rows]
    return parts


def milliseconds(side: dict[str, Any]) -> str:
    return f"{side['seconds']['p50'] * 1e3:.3g}" if side["seconds"] else side["status"]


GENERATED = {
    "measured-cpu": lambda: results_table("cpu-quick"),
    "targets-cpu": lambda: targets_table("cpu"),
    "targets-cuda": lambda: targets_table("cuda"),
    "targets-quantized": lambda: targets_table("quantized"),
    "counts-metal": counts_table,
    "accuracy-quantization": quantization_accuracy.table,
    "serving-cpu": lambda: serving_table("serving-cpu"),
    "serving-h200": lambda: serving_table("serving-h200"),
    "capabilities": lambda: capability_table((0, 1, 2, 3, 7, 9, 11, 13)),
    "capabilities-full": capability_table,
    "reason-codes": reason_table,
}


def filled(text: str) -> str:
    """The text with every generated part written again."""
    for name, make in GENERATED.items():
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        text = re.sub(pattern, lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text, flags=re.S)
    return text


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> int:
    """Write every page; with --check, only say which are out of date."""
    stale = [page for page in pages() if filled(page.read_text()) != page.read_text()]
    for page in stale:
        if "--check" not in sys.argv:
            page.write_text(filled(page.read_text()))
        print(f"{'stale' if '--check' in sys.argv else 'written'}: {page.relative_to(ROOT)}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
