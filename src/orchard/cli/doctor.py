"""Say what is here: python, CPU, torch, devices, backends, tools and settings.

Exit status: 0 when torch works and Orchard serves on the CPU, else 1. With --check: 0 when the
device works, 1 when it does not, 2 when that cannot be told.

--json prints one object with these keys:
  ok           whether the exit status is 0
  orchard      version
  python       version, implementation, free_threaded, gil_enabled, executable
  platform     system, machine
  cpu          model, logical_cores, usable_cores, features (a list)
  memory       total_bytes
  torch        version, path, cuda, hip, mps, threads, interop_threads, cpu_capability
  packages     name: version, or null where absent
  tools        compiler, cmake: first line of --version, or null where absent
  devices      list of device, name, memory_bytes, compute_capability
  backends     list of backend, kernel, device, available, reason (code, sentence, fix), summary
  native       library, abi_version, compiled, available, in_use, pool_threads, or problem and fix
  serving      batch_queue (compiled, or python, which is slower), and then the fix
  environment  list of name, value, valid, problem: the ORCHARD_* variables that are set
  check        device, status, sentence: what --check cpu says
  warnings     list of the warnings that came up meanwhile
With --check it prints device, status and sentence. A value that could not be found out is
{"error": "a probe failed: ..."}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import orchard
from orchard.cli.console import print_table
from orchard.dispatch import settings
from orchard.errors import OrchardError
from orchard.text import one_line

T = TypeVar("T")

PACKAGES = ("torch", "numpy", "triton", "rich", "matplotlib", "transformers", "diffusers")
WORKS, FAILS, CANNOT_TELL = 0, 1, 2

_TABLED = (
    "orchard",
    "python",
    "platform",
    "cpu",
    "memory",
    "torch",
    "packages",
    "tools",
    "native",
    "serving",
)
_NAMES_BACKENDS = ("ORCHARD_BACKEND", "ORCHARD_DISABLE")
_TOOL_SECONDS = 10
_TOLERANCE = 0.01  # far below a wrong answer's error, above what TF32 loses
_DEVICE = re.compile(r"cpu|(cuda|mps)(:(0|[1-9][0-9]*))?")
_FEATURES = {  # as /proc/cpuinfo and macOS's sysctl spell them
    "f16c": ("f16c", "hw.optional.f16c"),
    "avx2": ("avx2", "hw.optional.avx2_0"),
    "avx512f": ("avx512f", "hw.optional.avx512f"),
    "avx512_bf16": ("avx512_bf16",),
    "avx512_vnni": ("avx512_vnni",),
    "amx": ("amx_tile",),
    "neon": ("neon", "asimd", "hw.optional.neon", "hw.optional.AdvSIMD"),
    "bf16": ("bf16", "hw.optional.arm.FEAT_BF16"),
}


class Failed(dict[str, str]):
    """What stands in the report where a probe raised; a dict, so that the report is JSON."""

    def __init__(self, cause: str) -> None:
        super().__init__(error=f"a probe failed: {cause}")
        self.cause = cause

    def __str__(self) -> str:
        return self["error"]


class Check(NamedTuple):
    """Whether a device works, and the sentence that says so."""

    device: str
    status: int
    sentence: str


def _guarded(probe: Callable[[], T]) -> T | Failed:
    """What `probe` returns, or how it failed."""
    try:
        return probe()
    except Exception as error:  # a report has to come out of any broken machine
        return Failed(one_line(error, 500))


def _torch() -> ModuleType:
    """torch, or the error that `import orchard` met: a second import may fail differently."""
    error = vars(orchard).get("_import_error")
    if error is not None:
        raise error
    import torch

    return torch


def _orchard_facts() -> dict[str, str]:
    return {"version": orchard.__version__}


def _python_facts() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        "gil_enabled": getattr(sys, "_is_gil_enabled", lambda: True)(),
        "executable": Path(sys.executable).name,
    }


def _platform_facts() -> dict[str, str]:
    return {"system": platform.platform(), "machine": platform.machine()}


def _cpu_facts() -> dict[str, Any]:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = os.cpu_count()
    facts = _guarded(lambda: _describe_cpu(_cpu_text()))
    return {
        "model": facts if isinstance(facts, Failed) else facts[0],
        "logical_cores": cores,
        "usable_cores": len(affinity(0)) if affinity else cores,
        "features": facts if isinstance(facts, Failed) else facts[1],
    }


def _cpu_text() -> str:
    """Lines of "key: value" that describe the CPU."""
    if platform.system() == "Darwin":
        return _output("sysctl", "machdep.cpu", "hw.optional")
    return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")


def _describe_cpu(text: str) -> tuple[str, list[str]]:
    """The model and those of its features that matter here."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    present = {key for key, value in fields.items() if value == "1"}
    present.update(fields.get("flags", "").split(), fields.get("Features", "").split())
    parts = [f"{key} {fields[key]}" for key in ("CPU implementer", "CPU part") if key in fields]
    model = fields.get("model name") or fields.get("machdep.cpu.brand_string")
    features = [name for name, spellings in _FEATURES.items() if present & set(spellings)]
    return model or ", ".join(parts) or platform.machine(), features


def _memory_facts() -> dict[str, int]:
    return {"total_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}


def _torch_facts() -> dict[str, Any]:
    torch = _torch()
    return {
        "version": str(torch.__version__),
        "path": _guarded(lambda: _without_home(Path(torch.__file__ or "").parent)),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "mps": torch.backends.mps.is_built(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _without_home(path: Path) -> str:
    home = Path.home()
    return str("~" / path.relative_to(home) if path.is_relative_to(home) else path)


def _package_facts() -> dict[str, Any]:
    return {name: _guarded(partial(_version, name)) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _tool_facts() -> dict[str, Any]:
    named = shlex.split(os.environ.get("CXX", ""))
    return {
        "compiler": _guarded(lambda: _tool(named or _first("c++", "g++", "clang++"))),
        "cmake": _guarded(lambda: _tool(_first("cmake"))),
    }


def _first(*names: str) -> list[str]:
    """The first of these commands that is installed, as a list of one or none."""
    return [name for name in names if shutil.which(name)][:1]


def _tool(command: Sequence[str]) -> str | None:
    return _output(*command, "--version").splitlines()[0] if command else None


def _output(*command: str) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TOOL_SECONDS,
        check=True,
    )
    return done.stdout


def _visible_devices() -> list[str]:
    _torch()
    from orchard.dispatch import report

    return [str(device) for device in report.visible_devices()]


def _device_facts() -> list[dict[str, Any]]:
    return [_device(name) for name in _visible_devices()]


def _device(name: str) -> dict[str, Any]:
    facts = _guarded(lambda: _properties(name))
    label, memory, capability = (facts, None, None) if isinstance(facts, Failed) else facts
    return {
        "device": name,
        "name": label,
        "memory_bytes": memory,
        "compute_capability": capability,
    }


def _properties(name: str) -> tuple[str, int, str | None]:
    """Name, memory and compute capability of a device."""
    torch = _torch()
    kind, _, index = name.partition(":")
    if kind == "cuda":
        found = torch.cuda.get_device_properties(int(index))
        return found.name, found.total_memory, f"{found.major}.{found.minor}"
    if kind == "mps":
        return torch.backends.mps.get_name(), torch.mps.recommended_max_memory(), None
    return _describe_cpu(_cpu_text())[0], _memory_facts()["total_bytes"], None


def _backend_facts() -> list[dict[str, Any]]:
    _torch()
    from orchard.dispatch import report

    return [
        asdict(found) | {"reason": found.reason._asdict() if found.reason else None}
        for found in report.backends()
    ]


def _native_facts() -> dict[str, Any]:
    _torch()
    from orchard.backends.cpu import location, native

    path = location.find_library()
    shown = None if path is None else _without_home(path)
    try:
        library = native.use_isa(settings.current().cpu_isa)
    except native.UnavailableError as error:
        problem = error.reason.sentence.replace(str(Path.home()), "~")
        return {"library": shown, "problem": problem, "fix": error.reason.fix}
    return {
        "library": _without_home(library.path),
        "abi_version": library.abi_version(),
        "compiled": library.isa_compiled,
        "available": library.isa_available,
        "in_use": library.isa,
        "pool_threads": library.pool_threads(),
    }


def _serving_facts() -> dict[str, str]:
    _torch()
    from orchard.serving.express import IS_COMPILED

    if IS_COMPILED:
        return {"batch_queue": "compiled"}
    fix = "install a C++20 compiler and Python's headers, then install this package again"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        fix = "none: it is compiled only for interpreters with a global lock"
    return {"batch_queue": "python", "fix": fix}


def _environment_facts() -> list[dict[str, Any]]:
    return [
        _setting(name, value)
        for name, value in sorted(os.environ.items())
        if name.startswith("ORCHARD_")
    ]


def _setting(name: str, value: str) -> dict[str, Any]:
    problem = _guarded(lambda: _problem(name, value))
    valid = None if isinstance(problem, Failed) else problem is None
    return {"name": name, "value": value, "valid": valid, "problem": problem}


def _problem(name: str, value: str) -> str | None:
    """What is wrong with one variable, taken alone."""
    if name not in settings.VARIABLES:
        return "Orchard reads no variable of this name"
    try:
        config = settings.read({name: value})
        if name in _NAMES_BACKENDS:
            _check_backend_names(config)
    except OrchardError as error:
        return str(error)
    return None


def _check_backend_names(config: settings.Settings) -> None:
    _torch()
    from orchard.backends import load
    from orchard.dispatch.journal import Journal
    from orchard.dispatch.planner import Planner

    Planner(load(), config, Journal())


def check(device: str) -> Check:
    """Whether `device` is visible to torch and computes attention right."""
    if _DEVICE.fullmatch(device) is None:
        sentence = f"cannot tell: {device!r} is no device; use cpu, cuda, cuda:1 or mps"
        return Check(device, CANNOT_TELL, sentence)
    visible = _guarded(_visible_devices)
    if isinstance(visible, Failed):
        return Check(device, CANNOT_TELL, f"cannot tell: torch does not work: {visible.cause}")
    name = device if device == "cpu" or ":" in device else f"{device}:0"
    if name not in visible:
        sentence = f"{device} is not visible to torch; it sees {', '.join(visible)}"
        return Check(device, FAILS, sentence)
    served = _guarded(lambda: _compute(name))
    if isinstance(served, Failed):
        return Check(device, FAILS, f"{device} does not work: {served.cause}")
    return Check(device, WORKS, f"{device} works: orchard.attention is right, served by {served}")


def _compute(device: str) -> str:
    """Who served a small case on `device`; raises unless torch and Orchard compute it right."""
    torch = _torch()
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(3, 1, 2, 16, 64, generator=generator, dtype=torch.float64)
    scores = exact[0] @ exact[1].mT / exact.shape[-1] ** 0.5
    query, key, value = exact.to(torch.float32).to(device)
    _compare("torch's matrix product", query @ key.mT / exact.shape[-1] ** 0.5, scores)
    out = orchard.attention(query, key, value)
    _compare("orchard.attention", out, scores.softmax(-1) @ exact[2])
    plan = orchard.explain(query, key, value)
    return f"{plan.backend} ({plan.kernel})"


def _compare(what: str, actual: Any, expected: Any) -> None:
    error = (actual.cpu().double() - expected).abs().max().item()
    if not error <= _TOLERANCE:
        raise ArithmeticError(f"{what} is off by {error:.3g}")


def _cpu_check() -> dict[str, Any]:
    return check("cpu")._asdict()


PROBES: dict[str, Callable[[], Any]] = {
    "orchard": _orchard_facts,
    "python": _python_facts,
    "platform": _platform_facts,
    "cpu": _cpu_facts,
    "memory": _memory_facts,
    "torch": _torch_facts,
    "packages": _package_facts,
    "tools": _tool_facts,
    "devices": _device_facts,
    "backends": _backend_facts,
    "native": _native_facts,
    "serving": _serving_facts,
    "environment": _environment_facts,
    "check": _cpu_check,
}


def collect() -> dict[str, Any]:
    """The whole report, as `--json` prints it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        report = {section: _guarded(probe) for section, probe in PROBES.items()}
    checked = report["check"]
    return {
        "ok": not isinstance(checked, Failed) and checked["status"] == WORKS,
        **report,
        "warnings": list(dict.fromkeys(str(warning.message) for warning in caught)),
    }


def _print_report(report: Mapping[str, Any]) -> None:
    facts = [row for section in _TABLED for row in _fact_rows(section, report[section])]
    _table("What is here", ["part", "what", "value"], facts)
    _list("Devices", ["device", "name", "memory_bytes", "compute_capability"], report["devices"])
    _list("Backends", ["backend", "kernel", "device", "available", "reason"], report["backends"])
    if report["environment"]:
        _list("Environment", ["name", "value", "valid", "problem"], report["environment"])
    else:
        print("No ORCHARD_* variable is set.\n")
    if report["warnings"]:
        _table("Warnings", ["message"], [[message] for message in report["warnings"]])
    checked = report["check"]
    print(_printable(str(checked) if isinstance(checked, Failed) else checked["sentence"]))


def _fact_rows(section: str, facts: Mapping[str, Any] | Failed) -> list[list[str]]:
    if isinstance(facts, Failed):
        return [[section, "", str(facts)]]
    return [
        [section if n == 0 else "", _label(key), _text(key, value)]
        for n, (key, value) in enumerate(facts.items())
    ]


def _list(title: str, keys: Sequence[str], found: Sequence[Mapping[str, Any]] | Failed) -> None:
    if isinstance(found, Failed):
        _table(title, ["why not"], [[str(found)]])
        return
    rows = [[_text(key, entry[key]) for key in keys] for entry in found]
    _table(title, [_label(key) for key in keys], rows)


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_table(title, headers, [[_printable(cell) for cell in row] for row in rows])


def _label(key: str) -> str:
    return key.removesuffix("_bytes").replace("_", " ")


def _text(key: str, value: Any) -> str:
    """A value of the report in words."""
    if value is None:
        return {"reason": "", "problem": "", "valid": "unknown"}.get(key, "absent")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if key == "reason":
        return "; ".join(filter(None, (value["sentence"], value["fix"])))
    if key.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB"
    return str(value)


def _printable(text: str) -> str:
    """`text` in characters that standard output can show; a variable may hold any bytes."""
    encoding = sys.stdout.encoding or "utf-8"
    escaped = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def _print_json(found: Mapping[str, Any]) -> None:
    print(json.dumps(found, indent=2))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `orchard doctor`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--check", metavar="DEVICE", help="only say whether cpu, cuda, cuda:1 or mps works"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report, or the answer to --check; the result is the exit status."""
    if args.check is not None:
        checked = check(args.check)
        if args.json:
            _print_json(checked._asdict())
        else:
            print(_printable(checked.sentence))
        return checked.status
    report = collect()
    if args.json:
        _print_json(report)
    else:
        _print_report(report)
    return 0 if report["ok"] else 1
