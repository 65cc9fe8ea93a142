"""`orchard doctor` tells the truth about this machine and survives a broken one."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import orchard
from orchard.backends.cpu import location, native
from orchard.cli import doctor, main
from orchard.dispatch import report as report_module
from orchard.dispatch import settings
from orchard.dispatch.backend import Reason
from orchard.serving import express

pytestmark = pytest.mark.cli

has_cuda = torch.cuda.is_available()
has_mps = torch.backends.mps.is_available()
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ORCHARD_* variable, wide tables, and the planner made before a test sets variables."""
    for name in [name for name in os.environ if name.startswith("ORCHARD_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("COLUMNS", "400")
    report_module.backends()


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, Any]]:
    """A function that runs `doctor --json` here and returns what it printed, and the status."""

    def run() -> dict[str, Any]:
        status = main(["doctor", "--json"])
        printed = capsys.readouterr()
        assert printed.err == ""
        found: dict[str, Any] = json.loads(printed.out)
        assert status == (0 if found["ok"] else 1)
        return found

    return run


@pytest.fixture
def fresh(tmp_path: Path) -> Run:
    """A function that runs a new interpreter, in which `import torch` may execute other code."""

    def run(
        *arguments: str, torch_code: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = dict(os.environ) | variables
        if torch_code is not None:
            package = tmp_path / "first" / "torch"
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").write_text(torch_code)
            environment["PYTHONPATH"] = str(package.parent)
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def row(text: str, *cells: str) -> bool:
    """Whether a line of `text` holds exactly these cells, apart from trailing ones."""
    pattern = r"\s{2,}".join(re.escape(cell) for cell in cells)
    return re.search(rf"^\s*(\w+\s{{2,}})?{pattern}(\s{{2,}}|$)", text, re.MULTILINE) is not None


def test_text_report(capsys: pytest.CaptureFixture[str]) -> None:
    """The text form names python, torch, packages, devices and every kernel."""
    assert main(["doctor"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert row(printed.out, "orchard", "version", orchard.__version__)
    assert row(printed.out, "python", "version", platform.python_version())
    assert row(printed.out, "torch", "version", torch.__version__)
    assert row(printed.out, "numpy", metadata.version("numpy"))
    assert row(printed.out, "logical cores", str(os.cpu_count()))
    for found in report_module.backends():
        verdict = "yes" if found.available else "no"
        assert row(printed.out, found.backend, found.kernel, found.device, verdict)
    assert "No ORCHARD_* variable is set." in printed.out
    assert re.fullmatch(r"cpu works: .* served by \w+ \(.+\)", printed.out.splitlines()[-1])


def test_json_report(report: Callable[[], dict[str, Any]]) -> None:
    """The JSON form holds the same facts as the modules it asks."""
    found = report()
    assert found["ok"] is True
    assert found["orchard"] == {"version": orchard.__version__}
    assert found["python"]["version"] == platform.python_version()
    assert found["python"]["executable"] == Path(sys.executable).name
    assert found["cpu"]["logical_cores"] == os.cpu_count()
    assert found["memory"]["total_bytes"] > 2**28
    assert found["torch"]["version"] == torch.__version__
    assert found["torch"]["threads"] == torch.get_num_threads()
    assert found["torch"]["cuda"] == torch.version.cuda
    assert found["torch"]["mps"] is torch.backends.mps.is_built()
    assert found["packages"]["torch"] == metadata.version("torch")
    assert found["devices"][0]["device"] == "cpu"
    assert found["devices"][0]["memory_bytes"] == found["memory"]["total_bytes"]
    assert found["environment"] == []
    assert found["check"]["status"] == 0


def test_backends_are_those_of_orchard(report: Callable[[], dict[str, Any]]) -> None:
    """The backend list agrees with orchard.backends(), field by field."""
    expected = [
        {
            "backend": b.backend,
            "kernel": b.kernel,
            "device": b.device,
            "available": b.available,
            "reason": b.reason and b.reason._asdict(),
            "summary": b.summary,
        }
        for b in report_module.backends()
    ]
    assert any(entry["backend"] == "reference" and entry["available"] for entry in expected)
    assert report()["backends"] == expected


def test_json_keys_are_the_documented_ones(report: Callable[[], dict[str, Any]]) -> None:
    """The module's docstring lists every key of the report, and no other."""
    documented = dict(re.findall(r"^  (\w+) +(.+)$", doctor.__doc__ or "", re.MULTILINE))
    found = report()
    assert list(found) == list(documented)
    sections = ("orchard", "python", "platform", "cpu", "memory", "torch", "tools", "native")
    for section in (*sections, "serving", "check"):
        named = set(re.findall(r"\w+", documented[section].partition(":")[0]))
        assert set(found[section]) <= named, section
    for section in ("devices", "backends"):
        assert set(found[section][0]) <= set(re.findall(r"\w+", documented[section])), section


def test_unavailable_kernel_says_why(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    report: Callable[[], dict[str, Any]],
) -> None:
    """A kernel that is not available is listed with its reason and what would change it."""
    reason = Reason("unavailable", "it has no library", "build it")
    kernel = orchard.BackendReport("cpu", "avx9", "cpu", False, reason, "our kernels")
    monkeypatch.setattr(report_module, "backends", lambda: (kernel,))
    assert report()["backends"][0]["reason"] == reason._asdict()
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert row(out, "cpu", "avx9", "cpu", "no", "it has no library; build it")


@pytest.mark.skipif(location.find_library() is None, reason="the native library is not built")
def test_native_library(
    capsys: pytest.CaptureFixture[str], report: Callable[[], dict[str, Any]]
) -> None:
    """Where the library is, what it was compiled for, and what of that is in use."""
    library = native.loaded()
    found = report()["native"]
    assert found == {
        "library": doctor._without_home(library.path),
        "abi_version": native.ABI_VERSION,
        "compiled": library.isa_compiled,
        "available": library.isa_available,
        "in_use": library.isa_available[0],
        "pool_threads": found["pool_threads"],
    }
    assert Path(found["library"]).expanduser().is_file()
    assert found["pool_threads"] >= 0
    main(["doctor"])
    out = capsys.readouterr().out
    assert row(out, "native", "library", found["library"])
    assert row(out, "available", ", ".join(library.isa_available))
    assert row(out, "in use", library.isa)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_whether_the_batch_queue_is_compiled(
    is_compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    report: Callable[[], dict[str, Any]],
) -> None:
    monkeypatch.setattr(express, "IS_COMPILED", is_compiled)
    found = report()["serving"]
    assert found["batch_queue"] == ("compiled" if is_compiled else "python")
    assert ("fix" in found) is not is_compiled
    assert main(["doctor"]) == 0
    assert row(capsys.readouterr().out, "serving", "batch queue", found["batch_queue"])


def test_missing_native_library(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    report: Callable[[], dict[str, Any]],
) -> None:
    """Without the library the report says so and what to install and run; the CPU still works."""
    monkeypatch.setattr(location, "find_library", lambda: None)
    monkeypatch.setattr(native, "_library", None)
    found = report()["native"]
    assert list(found) == ["library", "problem", "fix"]
    assert found["library"] is None
    assert "native library is missing" in found["problem"]
    for what in ("C++20 compiler", "CMake", "pip install --force-reinstall --no-deps"):
        assert what in found["fix"]
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert row(out, "native", "library", "absent")
    assert row(out, "problem", found["problem"])
    assert row(out, "fix", found["fix"])


def test_unusable_native_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Callable[[], dict[str, Any]]
) -> None:
    """A file that does not load is named, with the loader's words."""
    path = tmp_path / "liborchard.so"
    path.write_text("no library")
    monkeypatch.setattr(location, "find_library", lambda: path)
    monkeypatch.setattr(native, "_library", None)
    found = report()["native"]
    assert found["library"] == doctor._without_home(path)
    assert "does not load" in found["problem"]


@pytest.mark.parametrize("name", doctor.PROBES)
def test_failed_probe_is_a_value(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever probe raises, the report comes out and says so in its place."""

    def broken() -> None:
        raise RuntimeError("the cable\nis out")

    monkeypatch.setitem(doctor.PROBES, name, broken)
    expected = "a probe failed: RuntimeError: the cable is out"
    status = 1 if name == "check" else 0
    assert main(["doctor", "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    failed = [section for section in doctor.PROBES if found[section] == {"error": expected}]
    assert failed == [name]
    assert main(["doctor"]) == status
    assert expected in capsys.readouterr().out


def test_warnings_are_collected(
    monkeypatch: pytest.MonkeyPatch, report: Callable[[], dict[str, Any]]
) -> None:
    """A warning of a probe is part of the report, once, and not on standard error."""

    def warns() -> dict[str, int]:
        for _ in range(2):
            warnings.warn("the driver is too old", UserWarning, stacklevel=1)
        return {"total_bytes": 1}

    monkeypatch.setitem(doctor.PROBES, "memory", warns)
    found = report()
    assert found["memory"] == {"total_bytes": 1}
    assert found["warnings"] == ["the driver is too old"]


BROKEN = {
    "missing": ("""raise ModuleNotFoundError("No module named 'torch'")""", "No module named"),
    "no-library": ("raise ImportError('libcudart.so.12: cannot open')", "libcudart.so.12"),
    "bad-symbol": ("raise OSError('undefined symbol: _ZN3c10')", "undefined symbol: _ZN3c10"),
}


@pytest.mark.parametrize(("code", "cause"), BROKEN.values(), ids=BROKEN)
def test_without_torch(code: str, cause: str, fresh: Run) -> None:
    """Without a working torch both forms exit with 1, say why and still tell the rest."""
    text = fresh("-m", "orchard", "doctor", torch_code=code)
    assert (text.returncode, text.stderr) == (1, "")
    assert "Traceback" not in text.stdout
    assert re.search(rf"^torch +a probe failed: \w+: {cause}", text.stdout, re.MULTILINE)
    assert row(text.stdout, "python", "version", platform.python_version())
    assert text.stdout.splitlines()[-1].startswith("cannot tell: torch does not work:")

    done = fresh("-m", "orchard", "doctor", "--json", torch_code=code)
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["ok"] is False
    for section in ("torch", "devices", "backends", "native"):
        assert cause in found[section]["error"]
    assert found["check"]["status"] == 2
    assert found["packages"]["torch"] == metadata.version("torch")


@pytest.mark.parametrize(("code", "cause"), BROKEN.values(), ids=BROKEN)
def test_check_without_torch(code: str, cause: str, fresh: Run) -> None:
    """--check cannot tell without a working torch: one line, status 2."""
    done = fresh("-m", "orchard", "doctor", "--check", "cpu", torch_code=code)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("cannot tell: torch does not work:")
    assert cause in done.stdout


def test_torch_is_imported_once(fresh: Run) -> None:
    """A failed import of torch is not tried again: the first error is the one to report."""
    code = """
import sys
sys.tries = getattr(sys, "tries", 0) + 1
raise ImportError(f"this was try {sys.tries}")
"""
    script = (
        "from orchard.cli.doctor import check, collect; collect(); print(check('cpu').sentence)"
    )
    done = fresh("-c", script, torch_code=code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().endswith("ImportError: this was try 1")


def test_invalid_variable_is_reported(fresh: Run) -> None:
    """A variable that Orchard refuses is a row, and the reason why the CPU is not served."""
    done = fresh("-m", "orchard", "doctor", "--json", ORCHARD_ON_ERROR="sometimes")
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    problem = "ORCHARD_ON_ERROR is 'sometimes'; it must be 'fallback' or 'raise'"
    assert found["environment"] == [
        {"name": "ORCHARD_ON_ERROR", "value": "sometimes", "valid": False, "problem": problem}
    ]
    assert found["backends"] == {"error": f"a probe failed: SettingError: {problem}"}
    assert found["check"]["status"] == 1
    assert problem in found["check"]["sentence"]
    assert found["torch"]["version"] == torch.__version__


def test_each_variable_is_judged_alone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    report: Callable[[], dict[str, Any]],
) -> None:
    """Every ORCHARD_* variable that is set has its own verdict."""
    values = {
        "ORCHARD_BACKEND": ("reference", None),
        "ORCHARD_CPU_ISA": ("avx9", "it must be one of avx512_bf16"),
        "ORCHARD_DISABLE": ("aten, nonsense", "'nonsense'; the backends are"),
        "ORCHARD_LOG": ("loud", "ORCHARD_LOG is 'loud'"),
        "ORCHARD_NUM_THREADS": ("0", "it must be a positive integer"),
        "ORCHARD_ON_ERROR": ("raise", None),
        "ORCHARD_THREADS": ("4", "Orchard reads no variable of this name"),
    }
    for name, (value, _) in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NOT_ORCHARD_SECRET", "hunter2")
    rows = report()["environment"]
    assert [entry["name"] for entry in rows] == list(values)
    for entry, (value, problem) in zip(rows, values.values(), strict=True):
        assert entry["value"] == value
        assert entry["valid"] is (problem is None)
        assert entry["problem"] is None if problem is None else problem in entry["problem"]
    main(["doctor"])
    out = capsys.readouterr().out
    assert row(out, "ORCHARD_BACKEND", "reference", "yes")
    assert row(out, "ORCHARD_THREADS", "4", "no", "Orchard reads no variable of this name")
    assert "hunter2" not in out


class Recorder(Mapping[str, str]):
    """An empty environment that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_variables_are_those_that_settings_reads() -> None:
    """A variable that is read is not called unknown."""
    environment = Recorder()
    settings.read(environment)
    assert environment.asked == set(settings.VARIABLES)


def test_names_cannot_be_judged_without_torch(fresh: Run) -> None:
    """Without torch the backends' names are not known, and the report says so."""
    code, cause = BROKEN["no-library"]
    done = fresh("-m", "orchard", "doctor", "--json", torch_code=code, ORCHARD_BACKEND="aten")
    (entry,) = json.loads(done.stdout)["environment"]
    assert entry["valid"] is None
    assert cause in entry["problem"]["error"]


def test_odd_bytes_are_escaped(fresh: Run) -> None:
    """A variable with bytes that standard output cannot show does not stop the report."""
    code, _ = BROKEN["missing"]
    odd = os.fsdecode(b"\xff\x1b[31m") + "\N{LATIN SMALL LETTER E WITH ACUTE}"
    done = fresh(
        "-m", "orchard", "doctor", torch_code=code, PYTHONIOENCODING="ascii", ORCHARD_ODD=odd
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert row(done.stdout, "ORCHARD_ODD", r"\udcff\x1b[31m\xe9", "no")


def test_check_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """The CPU works: one line, status 0, and the same in JSON."""
    assert main(["doctor", "--check", "cpu"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("cpu works: orchard.attention is right, served by ")
    assert line.count("\n") == 1
    assert main(["doctor", "--check", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"device": "cpu", "status": 0, "sentence": line.strip()}


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda", marks=pytest.mark.skipif(has_cuda, reason="CUDA is here")),
        pytest.param("mps", marks=pytest.mark.skipif(has_mps, reason="MPS is here")),
        "cuda:99",
        "mps:1",
    ],
)
def test_check_of_a_device_that_is_not_there(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device that torch does not see is status 1."""
    assert main(["doctor", "--check", device]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{device} is not visible to torch; it sees cpu")
    assert main(["doctor", "--check", device, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == 1


@pytest.mark.cuda
@pytest.mark.skipif(not has_cuda, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_check_cuda(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An NVIDIA GPU that is there works."""
    assert main(["doctor", "--check", device]) == 0
    assert capsys.readouterr().out.startswith(f"{device} works: ")


@pytest.mark.parametrize("device", ["banana", "", "CPU", "cpu:0", "cuda:", "cuda:01", "cpu\n"])
def test_check_of_no_device(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A string that names no device is status 2, in one line."""
    assert main(["doctor", "--check", device]) == 2
    out = capsys.readouterr().out
    assert out == f"cannot tell: {device!r} is no device; use cpu, cuda, cuda:1 or mps\n"
    assert main(["doctor", "--check", device, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["device"] == device


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_check_compares_values(
    wrong: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An attention that runs and is wrong is status 1, and the whole report's too."""
    monkeypatch.setattr(orchard, "attention", lambda q, k, v: torch.full_like(v, wrong))
    assert main(["doctor", "--check", "cpu"]) == 1
    pattern = r"cpu does not work: ArithmeticError: orchard.attention is off by \S+\n"
    assert re.fullmatch(pattern, capsys.readouterr().out)
    assert main(["doctor"]) == 1
    assert re.fullmatch(pattern, capsys.readouterr().out.splitlines()[-1] + "\n")


@pytest.mark.skipif(has_cuda, reason="pretends that there is a GPU")
def test_visible_device_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU that torch lists but cannot use is described, and its check is status 1."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = SimpleNamespace(name="NVIDIA H300", total_memory=2**37, major=11, minor=2)

    def properties(index: int) -> SimpleNamespace:
        if index == 1:
            raise RuntimeError("the bus is gone")
        return gpu

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    _, first, second = doctor.PROBES["devices"]()[:3]
    assert first == {
        "device": "cuda:0",
        "name": "NVIDIA H300",
        "memory_bytes": 2**37,
        "compute_capability": "11.2",
    }
    assert second["device"] == "cuda:1"
    assert str(second["name"]) == "a probe failed: RuntimeError: the bus is gone"
    assert main(["doctor", "--check", "cuda"]) == 1
    assert capsys.readouterr().out.startswith("cuda does not work: ")


@pytest.mark.parametrize(
    ("text", "model", "features"),
    [
        pytest.param(
            "processor\t: 0\nmodel name\t: Intel Xeon\ncpu cores\t: 1\n"
            "flags\t\t: fpu f16c avx2 avx512f avx512_vnni amx_bf16 amx_tile\n\n"
            "processor\t: 1\nmodel name\t: another\nflags\t: fpu avx512_bf16\n",
            "Intel Xeon",
            ["f16c", "avx2", "avx512f", "avx512_vnni", "amx"],
            id="linux-x86",
        ),
        pytest.param(
            "processor\t: 0\nFeatures\t: fp asimd bf16\n"
            "CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n",
            "CPU implementer 0x41, CPU part 0xd4f",
            ["neon", "bf16"],
            id="linux-arm",
        ),
        pytest.param(
            "machdep.cpu.brand_string: Apple M2\nhw.optional.neon: 1\n"
            "hw.optional.arm.FEAT_BF16: 1\nhw.optional.avx2_0: 0\n",
            "Apple M2",
            ["neon", "bf16"],
            id="macos-arm",
        ),
        pytest.param("", platform.machine(), [], id="empty"),
    ],
)
def test_cpu_description(
    text: str,
    model: str,
    features: list[str],
    monkeypatch: pytest.MonkeyPatch,
    report: Callable[[], dict[str, Any]],
) -> None:
    """Model and features are read from what Linux and macOS print."""
    monkeypatch.setattr(doctor, "_cpu_text", lambda: text)
    found = report()
    assert found["cpu"]["model"] == model
    assert found["cpu"]["features"] == features
    assert found["devices"][0]["name"] == model


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Callable[[], dict[str, Any]]
) -> None:
    """CXX names the compiler, with its arguments; cmake is looked up; absent is a value."""
    compiler = script(tmp_path / "my-c++", 'echo "my-c++ $*"; echo more')
    monkeypatch.setenv("CXX", f"{compiler} -v")
    script(tmp_path / "cmake", "echo cmake version 9; exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert report()["tools"] == {"compiler": "my-c++ -v --version", "cmake": "cmake version 9"}
    monkeypatch.delenv("CXX")
    (tmp_path / "cmake").unlink()
    assert report()["tools"] == {"compiler": None, "cmake": None}


def test_tool_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Callable[[], dict[str, Any]]
) -> None:
    """A compiler that does not answer is given up, and the report says so."""
    monkeypatch.setattr(doctor, "_TOOL_SECONDS", 0.2)
    monkeypatch.setenv("CXX", script(tmp_path / "slow", "exec sleep 60"))
    error = report()["tools"]["compiler"]["error"]
    assert re.match(r"a probe failed: TimeoutExpired: .*slow.* timed out", error)


def test_absent_package_is_a_value(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    report: Callable[[], dict[str, Any]],
) -> None:
    """A package that is not installed is null in JSON and "absent" in text."""
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    assert report()["packages"] == {"torch": metadata.version("torch"), "no-such-package": None}
    main(["doctor"])
    assert row(capsys.readouterr().out, "no-such-package", "absent")


def test_home_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, report: Callable[[], dict[str, Any]]
) -> None:
    """torch's path does not give away the user's home."""
    package = Path(torch.__file__).parent
    monkeypatch.setenv("HOME", str(package.parent))
    assert report()["torch"]["path"] == str(Path("~") / package.name)


def test_check_compares_torch_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's own arithmetic is compared before Orchard's: fp32 is not exact."""
    monkeypatch.setattr(doctor, "_TOLERANCE", 0.0)
    assert main(["doctor", "--check", "cpu"]) == 1
    expected = "cpu does not work: ArithmeticError: torch's matrix product is off by "
    assert capsys.readouterr().out.startswith(expected)
