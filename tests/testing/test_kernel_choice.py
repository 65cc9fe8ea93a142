"""The script that writes the table of measurements, fed with stored rows."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from orchard.backends.cuda.measured import Measured
from orchard.testing.cuda_targets import SINGLE

pytestmark = pytest.mark.cli

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernel_choice.py"
MACHINE = {
    "gpu": "Some GPU",
    "gpu_family": "sm_90",
    "torch": "2.11.0",
    "date": "2026-01-02T03:04:05",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_choice", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _line(rows: int = 1024, **more: Any) -> dict[str, Any]:
    ratio = {"p20": 0.9, "p50": 0.95, "p80": 0.98123456}
    return {
        "target": "rate by length, forward",
        "case": f"S{rows}",
        "status": "ok",
        "step": "forward",
        "dtype": "bfloat16",
        "batch": 2,
        "heads": 16,
        "rows": rows,
        "dim": 128,
        "causal": True,
        "kernels": ["cuda/hopper"],
        "peers": {"cudnn": {"ratio": ratio}, "flash": {"ratio": None}},
        "machine": MACHINE,
        **more,
    }


def test_stored_rows_become_the_table(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without a speed, other rows and summaries are left out; other families stay."""
    lines = [
        _line(),
        _line(2048, step="backward"),
        _line(4096, status="WRONG"),
        _line(8192, kernels=["cuda/hopper", "cuda/tiled"]),
        _line(16384, target="forward"),
        {"target": "rate by length, forward", "found": 1.0},
        _line(1024, target=SINGLE, dtype="float32", kernels=["cuda/tiled"]),
        {"target": SINGLE, "found": 0.95},
    ]
    stored, table = tmp_path / "cuda.jsonl", tmp_path / "measured.json"
    stored.write_text("\n".join(map(json.dumps, lines)))
    old = {"place": "old", "measurements": []}
    table.write_text(json.dumps({"sm_80": old, "sm_90": old}))
    monkeypatch.setattr(sys, "argv", ["kernel_choice.py", str(stored), f"--table={table}"])
    assert script.main() == 0
    written = json.loads(table.read_text())
    assert written["sm_80"] == old
    known = Measured.of(written["sm_90"])
    assert known.place == "Some GPU, torch 2.11.0, 2026-01-02"
    first, second, third = known.measurements
    assert first[:7] == ("forward", "bfloat16", 128, True, 32, 1024, "hopper")
    assert first.torch == {"cudnn": [0.9, 0.95, 0.9812]}
    assert (second.stage, second.length) == ("backward", 2048)
    assert (third.dtype, third.kernel) == ("float32", "tiled")


def test_nothing_to_write(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no row"):
        script.entry([_line(target="forward")])
