"""`orchard verify`: what it counts, writes and exits with."""

from __future__ import annotations

import json
import platform
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from orchard.attention.problem import Saved
from orchard.backends.cpu import CpuBackend
from orchard.backends.metal import MetalBackend
from orchard.backends.metal.source import KERNELS
from orchard.cli import main, verify
from orchard.dispatch import report as dispatch_report
from orchard.dispatch.backend import Reason
from orchard.dispatch.planner import planner
from orchard.testing import benchmark, conformance, presets

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
        out, lse = right(self, *call)
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


def test_a_backend_on_request(
    few: None, tmp_path: Path, fresh_planner: None, metal_compiler: None
) -> None:
    """A backend that runs only by name is verified by name, on the device it is for."""
    report = tmp_path / "report.json"
    assert main(["verify", "--backend", "metal-emulated", "--report", str(report)]) == 0
    data = json.loads(report.read_text())
    assert data["device"] == "cpu"
    assert data["counts"] == {"passed": 3, "failed": 0, "not served": 0}
    assert {case["served"] for case in data["cases"]} == {"metal-emulated / metal-emulated"}


# A Mac that is not there


class Compiled:
    """A library whose kernels have limits and are never launched."""

    max_threads_per_threadgroup = 640
    static_thread_group_memory_length = 20480

    def __getattr__(self, name: str) -> Compiled:
        return self


class Apple:
    """In the place of torch.mps: it compiles what does not hold `refused`."""

    def __init__(self, refused: str = "nothing at all") -> None:
        self.lock: AbstractContextManager[Any] = nullcontext()
        self.refused = refused

    def compile(self, source: str) -> Compiled:
        if self.refused in source:
            raise SyntaxError("program_source:7:1: error: no such type")
        return Compiled()


class OnMac(MetalBackend):
    problem: Reason | None = None

    def unavailable(self, *_: object) -> Reason | None:
        return self.problem


@pytest.fixture
def mac(few: None, fresh_planner: None, monkeypatch: pytest.MonkeyPatch) -> OnMac:
    """Orchard as on a Mac: `mps` is visible, and the CPU computes in its place."""
    monkeypatch.setattr(conformance, "QUICK", conformance.CASES)
    backend = OnMac(Apple())
    monkeypatch.setitem(planner().backends, "metal", backend)
    here = torch.device("mps", 0)
    monkeypatch.setattr(dispatch_report, "visible_devices", lambda: (torch.device("cpu"), here))
    for name, value in (("get_name", "Apple M9"), ("get_core_count", 10)):
        monkeypatch.setattr(torch.backends.mps, name, lambda value=value: value)
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    right, timed = conformance.check, benchmark.measure
    cpu = torch.device("cpu")
    monkeypatch.setattr(conformance, "check", lambda case, _, name: right(case, cpu, name))
    monkeypatch.setattr(benchmark, "measure", lambda case, _, *rest: timed(case, cpu, *rest))
    tiny = benchmark.Case("tiny", 1, 2, 2, 8, 8, 8, 8)
    monkeypatch.setattr(presets, "quick", lambda *_: [tiny])
    return backend


def on_mac(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    report = tmp_path / "report.json"
    status = main(["verify", "--device", "mps", *options, "--report", str(report)])
    return status, json.loads(report.read_text())


def test_a_mac(
    mac: OnMac,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The report names the GPU, macOS and torch, every kernel's compile, and times."""
    monkeypatch.setenv("COLUMNS", "200")  # tables are not folded
    status, data = on_mac(tmp_path)
    assert status == 0
    metal = data["metal"]
    assert (metal["gpu"], metal["gpu_cores"], metal["macos"]) == ("Apple M9", 10, "26.1")
    assert metal["torch"] == torch.__version__
    assert metal["problem"] == ""
    names = {kernel["kernel"] for kernel in metal["kernels"]}
    defined = "".join(path.read_text() for path in KERNELS.glob("*.metal"))
    assert names == set(re.findall(r"void (attention_\w+)\(", defined))
    assert {kernel["dtype"] for kernel in metal["kernels"]} == {"float32", "float16", "bfloat16"}
    assert all(kernel["ok"] and kernel["max_threads"] == 640 for kernel in metal["kernels"])
    (timed,) = metal["times"]
    assert timed["status"] == "ok"
    assert timed["ratio"]["p50"] > 0
    assert data["counts"] == {"passed": 3, "failed": 0, "not served": 0}
    out = capsys.readouterr().out
    assert f"Apple M9, macOS 26.1, torch {torch.__version__}" in out
    assert re.search(r"attention_grad_key_value +30 of 30 +640", out)
    assert re.search(r" +tiny ", out)


def test_a_mac_that_refuses_a_kernel(
    mac: OnMac, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compiler's words are in the report, and the exit status is 1."""
    mac.runtime = Apple(refused="#define TYPE bfloat")
    status, data = on_mac(tmp_path, "--quick")
    assert status == 1
    refused = [kernel for kernel in data["metal"]["kernels"] if not kernel["ok"]]
    assert {kernel["dtype"] for kernel in refused} == {"bfloat16"}
    halves = [kernel for kernel in data["metal"]["kernels"] if kernel["dtype"] == "bfloat16"]
    assert refused == halves
    assert "error: no such type" in refused[0]["words"]
    assert "error: no such" in capsys.readouterr().out


def test_a_mac_whose_kernels_take_too_many_registers(
    mac: OnMac, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that cannot run a whole threadgroup is no success."""
    monkeypatch.setattr(Compiled, "max_threads_per_threadgroup", 96)
    status, data = on_mac(tmp_path, "--quick")
    assert status == 1
    assert "runs 96 threads at most" in data["metal"]["kernels"][0]["words"]


def test_a_mac_where_metal_does_not_serve(
    mac: OnMac, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That other backends pass the suite does not hide it."""
    mac.problem = Reason("unavailable", "its probe computed wrong values")
    status, data = on_mac(tmp_path, "--quick")
    assert status == 1
    assert data["metal"]["problem"] == "its probe computed wrong values"
    assert "metal does not serve: its probe computed" in capsys.readouterr().out


def test_mps_has_no_float64() -> None:
    """Such a case is not served there, rather than a failure of the suite."""
    case = next(case for case in conformance.CASES if case.dtype == torch.float64)
    assert conformance.check(case, "mps").status == "not served"


def test_not_finite_is_none() -> None:
    """JSON has no infinity."""
    assert verify._number(float("inf")) is None
    assert verify._number(0.5) == 0.5
