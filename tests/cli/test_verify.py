"""`orchard verify`: what it counts, writes and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from orchard.attention.problem import Saved
from orchard.backends.cpu import CpuBackend
from orchard.cli import main, verify
from orchard.testing import conformance

pytestmark = pytest.mark.cli


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite of three cases, one of which aten does not serve."""
    names = ("all operands contiguous", "dropout 0.1", "torch.float32 causal")
    cases = tuple(case for case in conformance.CASES if case.name in names)
    monkeypatch.setattr(conformance, "CASES", cases)


def test_report_and_table(few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All cases pass, the table and the file say so, and the exit status is 0."""
    report = tmp_path / "report.json"
    assert main(["verify", "--device", "cpu", "--report", str(report)]) == 0
    data = json.loads(report.read_text())
    assert data["counts"] == {"passed": 3, "failed": 0, "not served": 0}
    assert {case["subject"] for case in data["cases"]} == {"layout", "dropout", "dtype"}
    assert all(0 < case["share_of_budget"] < 1 for case in data["cases"])
    assert data["machine"]["torch"]["version"] == torch.__version__
    assert "3 passed, 0 failed, 0 not served" in capsys.readouterr().out


def test_not_served_is_no_failure(few: None, tmp_path: Path) -> None:
    """What an insisted backend does not serve is counted with its reasons."""
    report = tmp_path / "report.json"
    arguments = ["verify", "--device", "cpu", "--backend", "aten", "--report", str(report)]
    assert main(arguments) == 0
    data = json.loads(report.read_text())
    assert data["counts"] == {"passed": 2, "failed": 0, "not served": 1}
    (refused,) = (case for case in data["cases"] if case["status"] == "not served")
    assert any("dropout" in line for line in refused["complaints"])


def test_wrong_results_fail(
    few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN in one output is a failure, named in the table, and the report stays valid JSON."""
    right = CpuBackend.forward

    def wrong(self: CpuBackend, *call: object) -> Saved:
        out, lse = right(self, *call)  # type: ignore[arg-type]
        return Saved(out.index_fill(-1, torch.tensor([0]), torch.nan), lse)

    monkeypatch.setattr(CpuBackend, "unavailable", lambda *_: None)
    monkeypatch.setattr(CpuBackend, "forward", wrong)
    report = tmp_path / "report.json"
    assert main(["verify", "--device", "cpu", "--report", str(report)]) == 1
    text = report.read_text()
    assert "Infinity" not in text
    assert json.loads(text)["counts"]["failed"] == 3
    assert "out: error inf" in capsys.readouterr().out


def test_fallback_fails(
    few: None, fresh_planner: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that raises is a failure, not a pass by the next backend."""

    def broken(*_: object) -> Saved:
        raise RuntimeError("kernel fell over")

    monkeypatch.setattr(CpuBackend, "unavailable", lambda *_: None)
    monkeypatch.setattr(CpuBackend, "forward", broken)
    report = tmp_path / "report.json"
    assert main(["verify", "--device", "cpu", "--report", str(report)]) == 1
    complaints = [case["complaints"] for case in json.loads(report.read_text())["cases"]]
    assert sum("kernel fell over" in str(lines) for lines in complaints) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "tpu"], "device 'tpu' is not visible"),
        (["--backend", "fastest"], "backend 'fastest' is unknown"),
        (["--report", "/nonexistent/report.json"], "No such file"),
    ],
)
def test_what_cannot_run(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A wrong device, backend or place for the report is said at once, with exit status 2."""
    places = [] if "--report" in arguments else ["--report", str(tmp_path / "report.json")]
    assert main(["verify", *arguments, *places]) == 2
    assert words in capsys.readouterr().err


def test_not_finite_is_none() -> None:
    """JSON has no infinity."""
    assert verify._number(float("inf")) is None
    assert verify._number(0.5) == 0.5
