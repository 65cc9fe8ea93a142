from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.cli

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overhead.py"


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("overhead", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "overhead", module)
    spec.loader.exec_module(module)
    return module


def test_the_page_changes_between_its_markers_only(
    overhead: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, results = tmp_path / "overhead.md", tmp_path / "results" / "overhead.jsonl"
    page.write_text(f"above\n{overhead.BEGIN}\nold\n{overhead.END}\nbelow\n")
    monkeypatch.setattr(overhead, "PAGE", page)
    monkeypatch.setattr(overhead, "RESULTS", results)
    monkeypatch.setattr(sys, "argv", ["overhead.py", "--seconds=0.001"])
    overhead.main()
    text = page.read_text()
    assert text.startswith(f"above\n{overhead.BEGIN}\n")
    assert text.endswith(f"\n{overhead.END}\nbelow\n")
    assert "old" not in text
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert text.count("\n| ") == len(rows) + 1
    assert all(row["seconds"]["p20"] <= row["seconds"]["p80"] for row in rows)
    assert {"no grad", "grad, forward", "grad, forward and backward"} < {r["group"] for r in rows}


def test_what_a_call_costs_over_torch(overhead: ModuleType) -> None:
    def entry(name: str) -> object:
        return overhead.Entry("some", name, lambda: None)

    times = [overhead.Spread(1e-6, 2e-6, 3e-6), overhead.Spread(4e-6, 6.5e-6, 9e-6)]
    rows = overhead.cells([(entry("torch"), times[0]), (entry("attention"), times[1])])
    assert rows == [
        ["some", "torch", "1.0", "2.0", "3.0", ""],
        ["some", "attention", "4.0", "6.5", "9.0", "+4.5"],
    ]


def test_a_problem_comes_round_again_only_after_the_cache_forgot_it(overhead: ModuleType) -> None:
    from orchard.dispatch import planner

    problem = overhead.describe(
        overhead.Tensors(*(overhead.torch.zeros(1, 1, 8, 8) for _ in range(3))),
        overhead.Options(1.0),
    )
    problems = overhead._never_seen(problem)
    seen = {next(problems) for _ in range(2 * planner._CACHED_PLANS)}
    assert len(seen) == 2 * planner._CACHED_PLANS
