"""Pages are generated from stored results as they say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from orchard.testing.benchmark import Case, Row, Side, Spread
from orchard.testing.targets import Finding, Point, Target

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    path = Path(__file__).parents[2] / "docs/generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_targets_from_stored_lines(generate: ModuleType, tmp_path: Path) -> None:
    """Only the lines of whole targets are rows; the machine and the date stand above."""
    row = Row(Case("a case"), Side("ok"), Side("ok"), None, 0, {}, ())
    points = tuple(Point(row, Spread(value, value, value)) for value in (2.0, 8.0))
    machine = {"cpu": "Some CPU", "threads": 2, "torch": "2.13.0", "date": "2026-01-02T03:04:05"}
    summary = Finding(Target("bf16 forward", 1.8, 5.0, (row.case,)), points).summary()
    lines = [{"case": "a case", "machine": machine}, {**summary, "machine": machine}]
    (tmp_path / "cpu.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert generate.targets_table("cpu", tmp_path).splitlines() == [
        "Some CPU, 2 threads, torch 2.13.0, 2026-01-02:",
        "",
        "| work | found | worst to best | must | aim | met |",
        "|---|---|---|---|---|---|",
        "| bf16 forward | 4.00x | 2.00x to 8.00x | 1.8x | 5x | must |",
    ]


def test_targets_that_were_not_measured(generate: ModuleType, tmp_path: Path) -> None:
    said = generate.targets_table("cpu", tmp_path)
    assert said.startswith("Not measured yet: `orchard bench --preset cpu")


def test_serving_from_stored_lines(generate: ModuleType, tmp_path: Path) -> None:
    """Tables without a row are left out; the machine and the date stand above."""
    machine = {
        "cpu": "Some CPU",
        "gpu": None,
        "threads": 2,
        "torch": "2.13.0",
        "date": "2026-01-02",
    }
    goal = {"goal": "cheap", "found": 50.0, "limit": 60.0, "at_least": False, "unit": "us"}
    line = {
        "case": "queue overhead",
        "overhead": {"p20": 4e-5, "p50": 5e-5, "p80": 6e-5},
        "goals": [{**goal, "held": True}],
        "machine": machine,
    }
    (tmp_path / "serving-cpu.jsonl").write_text(json.dumps(line))
    assert generate.serving_table("serving-cpu", tmp_path).splitlines() == [
        "Some CPU, 2 threads, torch 2.13.0, 2026-01-02:",
        "",
        "**A queue whose function does nothing**",
        "",
        "| what | found |",
        "|---|---|",
        "| queue overhead | 50.0 us (40.0-60.0) for each request |",
        "",
        "**Goals**",
        "",
        "| goal | found | must | held |",
        "|---|---|---|---|",
        "| cheap | 50 us | at most 60 us | yes |",
    ]


def test_serving_that_was_not_measured(generate: ModuleType, tmp_path: Path) -> None:
    said = generate.serving_table("serving-h200", tmp_path)
    assert said == "Not measured yet: `orchard bench --preset serving --device cuda`."
