"""`orchard verify --stress` and `--soak`: what they count, write and exit with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from orchard.cli import main
from orchard.serving.batch_queue import BatchQueue
from orchard.testing import soak, stress
from orchard.testing.stress import CrashReports, Finding, Program, run_all

pytestmark = pytest.mark.cli


def found(code: str, prints: str = "", reports: CrashReports | None = None) -> Finding:
    """One run of a program."""
    program = Program("a program", "tests", code, prints)
    return run_all([program], 1, lambda _: None, reports)[0]


def stressed(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    report = tmp_path / "report.json"
    arguments = ["verify", "--device", "cpu", *options, "--report", str(report)]
    return main(arguments), json.loads(report.read_text())


def test_a_clean_program_is_not_complained_of() -> None:
    assert found("import sys\nprint(sys.argv[1])", "0\n").data() == {
        "name": "a program",
        "subject": "tests",
        "runs": 1,
        "bad": 0,
        "complaints": [],
    }


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("import os; os.abort()", "died by SIGABRT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died by SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "died by SIGKILL"),
        ("raise SystemExit(3)", "ended with status 3"),
        ("import sys; sys.stderr.write('a word')", "wrote to standard error: 'a word'"),
        ("assert False", "wrote to standard error: 'Traceback"),
        ("print(1)", "printed '1\\n' instead of ''"),
        ("open('core.123', 'w')", "left the file core.123"),
    ],
)
def test_every_bad_end_is_seen(code: str, complaint: str) -> None:
    """Also a word or a file of a process that ends with 0."""
    finding = found(code)
    assert finding.bad == 1
    assert any(words.startswith(complaint) for words in finding.complaints), finding.complaints


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_grandchild_that_dies_is_seen() -> None:
    """Python ends with 0; the one it forked has died, and faulthandler says so."""
    code = "import os\nchild = os.fork()\nif child == 0:\n    os.abort()\nos.waitpid(child, 0)\n"
    finding = found(code)
    assert finding.bad == 1
    assert any("Fatal Python error: Aborted" in words for words in finding.complaints)
    assert not any("status" in words or "died" in words for words in finding.complaints)


@pytest.mark.skipif(
    not Path("/proc/sys/kernel/core_pattern").exists()
    or Path("/proc/sys/kernel/core_pattern").read_text().startswith(("|", "/")),
    reason="core files are not left in the folder of the process here",
)
def test_a_core_file_is_seen_where_nothing_is_said() -> None:
    """The limit on core files is raised for the programs, and only for them."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_CORE)
    if before[1] == 0:
        pytest.skip("core files are not allowed here")
    code = "import os, subprocess\nsubprocess.run(['sh', '-c', 'kill -SEGV $$'])\n"
    assert [words[:18] for words in found(code).complaints] == ["left the file core"]
    assert resource.getrlimit(resource.RLIMIT_CORE) == before


def test_a_crash_report_of_macos_is_seen(tmp_path: Path) -> None:
    """Only what has come since; a process that ends with 0 does not hide it."""
    (tmp_path / "before.ips").touch()
    reports = CrashReports(tmp_path)
    code = f"open({str(tmp_path / 'python.ips')!r}, 'w')"
    assert found(code, reports=reports).complaints == ["left the crash report python.ips"]
    assert found("", reports=reports).complaints == []


def test_a_program_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress, "DEADLINE", 1.0)
    finding = found("import threading; threading.Event().wait()")
    assert finding.complaints == ["did not end within 1 s"]


@pytest.mark.slow
@pytest.mark.stress
def test_real_programs_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load and two ends of the interpreter; tests/serving runs the other ends and forks."""
    ends = ("an open block that computes", "a batch that runs")
    chosen = [p for p in stress.programs("cpu") if p.subject == "load: cpu" or p.name in ends]
    monkeypatch.setattr(stress, "programs", lambda device: chosen)
    status, data = stressed(tmp_path, "--stress", "--repeats", "1")
    assert [each for each in data["programs"] if each["bad"]] == []
    assert status == 0
    assert [each["runs"] for each in data["programs"]] == [1] * 14
    assert data["soak"] is None


def test_what_is_run_for_a_device() -> None:
    """The loads and the ends that are promised, each once by name."""
    cpu = stress.programs("cpu")
    names = [(each.subject, each.name) for each in cpu]
    assert len(set(names)) == len(names)
    assert {subject for subject, _ in names} == {
        "end of the interpreter: pool",
        "end of the interpreter: queue",
        "processes",
        "load: cpu",
    }
    for count in (2, 64):
        assert ("load: cpu", f"{count} threads") in names
    beside = [each for each in stress.programs("cuda") if each not in cpu]
    assert {each.subject for each in beside} == {"processes", "load: cuda"}
    assert all("cuda" in each.code for each in beside)
    by_name = {each.name: each for each in cpu}
    assert stress.count_runs([by_name["64 threads"], by_name["a batch that runs"]], 7) == 8


def test_a_bad_program_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = [
        Program("good", "tests", "print('yes')", "yes\n"),
        Program("bad", "tests", "import os; os.abort()"),
    ]
    monkeypatch.setattr(stress, "programs", lambda device: programs)
    status, data = stressed(tmp_path, "--stress", "--repeats", "2")
    assert status == 1
    assert [(p["name"], p["runs"], p["bad"]) for p in data["programs"]] == [
        ("good", 2, 0),
        ("bad", 2, 2),
    ]
    assert data["machine"]["torch"]["version"] == torch.__version__
    out = capsys.readouterr().out
    assert "4 runs of 2 programs, 2 bad." in out
    assert "died by SIGABRT" in out
    assert stressed(tmp_path, "--stress", "--repeats=1", "--json")[0] == 1
    printed = json.loads(capsys.readouterr().out)
    assert [p["bad"] for p in printed["programs"]] == [0, 1]


def test_a_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every answer is compared, the memory is looked at, and a line says it."""
    status, data = stressed(tmp_path, "--soak", "1")
    soaked = data["soak"]
    assert status == (0 if soaked["ok"] else 1)
    assert soaked["requests"] > 0
    assert (soaked["lost"], soaked["wrong"]) == (0, 0)
    assert len(soaked["resident"]) >= 40 or soaked["growth_bytes"] is None
    assert data["programs"] == []
    assert f"{soaked['requests']} requests, 0 lost, 0 wrong" in capsys.readouterr().out


def test_a_soak_sees_what_is_wrong_and_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(BatchQueue):
        """Rows that begin with -4 are answered wrongly, requests with a 4 there fail."""

        def __init__(self, model: Any, **options: Any) -> None:
            def faulty(x: torch.Tensor) -> torch.Tensor:
                if (x[:, 0] == 4).any():
                    raise ValueError("no")
                return model(x) + (x[:, :1] == -4)

            super().__init__(faulty, **options)

    monkeypatch.setattr(soak, "BatchQueue", Faulty)
    report = soak.soak(0.2, lambda _: None)
    assert 0 < report.wrong < report.requests
    assert 0 < report.lost < report.requests
    assert not report.ok
    assert f"{report.lost} lost, {report.wrong} wrong" in str(report)
    assert str(report).endswith("FAILED")


@pytest.mark.parametrize(
    ("slope", "ok"), [(0.0, True), (1500.0, True), (2000.0, False), (-1e4, True)]
)
def test_growth_is_what_remains_after_the_first_minute(slope: float, ok: bool) -> None:
    """A first minute that grows by 50 MB is forgiven; bytes for each later second are not."""
    samples = [
        soak.Sample(t, int(1e8 + min(t, 50.0) * 1e6 + max(t - 50.0, 0.0) * slope))
        for t in map(float, range(1, 601))
    ]
    report = soak.SoakReport(600.0, 1, 0, 0, tuple(samples), 60.0)
    assert report.growth is not None
    assert report.growth == pytest.approx(slope * 540, abs=abs(slope))
    assert report.ok == ok


@pytest.mark.errors
@pytest.mark.parametrize(
    "words", [["--stress", "--repeats", "0"], ["--repeats", "few"], ["--soak", "-1"]]
)
def test_bad_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", *words])
    assert "above 0" in capsys.readouterr().err
