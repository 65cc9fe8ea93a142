"""Pools and queues in fresh processes, many times over: each has to end cleanly and silently.

A process is bad if a signal ends it, if its status is not 0, if it writes to standard error, if
it prints anything but what it should, or if it, or a process that it started, leaves a crash
report: also where Python itself ends with 0.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from orchard.testing.serving_programs import (
    CUDA_PROGRAMS,
    POOL_EXITS,
    POOL_FORKS,
    QUEUE_EXITS,
    QUEUE_FORKS,
    SPAWN_PRINTS,
    pool_program,
    queue_program,
    spawn_program,
)

REPEATS = 50
CLOSINGS = 20  # queues closed at a random moment, in each of the repeats
DEADLINE = 600.0  # seconds for one process
_CORE_BYTES = 2**20  # of a core file: enough to see that there was one
_SAID = 300  # characters of what a process said, in a complaint
_MAC_REPORTS = Path.home() / "Library/Logs/DiagnosticReports"
_NAMED = "orchard.testing"


@dataclass(frozen=True)
class Program:
    """Python source, and what it prints when all is well. Its argument is the number of the run."""

    name: str
    subject: str
    code: str
    prints: str = ""
    repeated: bool = True  # else it is long by itself, and runs once


@dataclass
class Finding:
    """A program and what was wrong with its runs."""

    program: Program
    runs: int = 0
    bad: int = 0
    complaints: list[str] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        return {
            "name": self.program.name,
            "subject": self.program.subject,
            "runs": self.runs,
            "bad": self.bad,
            "complaints": self.complaints,
        }


def programs(device: str) -> list[Program]:
    """What is run for a device; the CPU's are run for all."""
    found = [
        *(_all("end of the interpreter: pool", POOL_EXITS, pool_program)),
        *(_all("end of the interpreter: queue", QUEUE_EXITS, queue_program)),
        Program("spawned processes compute", "processes", spawn_program(), SPAWN_PRINTS),
        *_loads("cpu"),
    ]
    if hasattr(os, "fork"):
        found += _all("processes", POOL_FORKS, pool_program)
        found += _all("processes", QUEUE_FORKS, queue_program)
    if device == "cuda":
        found += [*_all("processes", CUDA_PROGRAMS, pool_program), *_loads(device)]
    return found


def _all(
    subject: str, texts: dict[str, tuple[str, str]], program: Callable[[str], str]
) -> list[Program]:
    return [Program(name, subject, program(body), said) for name, (body, said) in texts.items()]


def _loads(device: str) -> list[Program]:
    """Many threads in one process, each answer compared."""
    calls = {
        **{f"{count} threads": f"threads({device!r}, {count})" for count in (2, 4, 8, 16, 31, 64)},
        "31 lanes, 100 times": f"every_lane({device!r}, 31, 100)",
        "200 threads in turn": f"in_turn({device!r}, 200)",
        "churn of 2000 threads": f"churn({device!r}, 2000)",
        "producer and consumer": f"hand_over({device!r}, 100)",
        "out of memory in one of eight": f"out_of_memory({device!r})",
    }
    loads = [
        Program(
            name,
            f"load: {device}",
            f"from {_NAMED} import pool_load\npool_load.{call}\n",
            repeated=False,
        )
        for name, call in calls.items()
    ]
    if device == "cpu":
        code = (
            f"import sys\nfrom {_NAMED}.serving_load import close_under_load\n"
            f"close_under_load({CLOSINGS}, int(sys.argv[1]))\n"
        )
        loads.append(Program("queues closed at a random moment", "load: cpu", code))
    return loads


class CrashReports:
    """Files that the system leaves where a process has died."""

    def __init__(self, folder: Path = _MAC_REPORTS) -> None:
        self._folder = folder
        self._seen = set(self._files())

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.ips")) if self._folder.is_dir() else []

    def new(self) -> list[str]:
        """Those that have come since the last time."""
        came = [path for path in self._files() if path not in self._seen]
        self._seen.update(came)
        return [f"left the crash report {path.name}" for path in came]


def run_all(
    chosen: Sequence[Program],
    repeats: int,
    step: Callable[[str], None],
    reports: CrashReports | None = None,
) -> list[Finding]:
    """Every program, `repeats` times or once, as many processes at a time as there are cores."""
    reports = reports or CrashReports()
    found = []
    with _core_files(), ThreadPoolExecutor(os.cpu_count()) as threads:
        for program in chosen:
            finding = Finding(program)
            found.append(finding)
            for complaints in threads.map(partial(run, program), range(_runs(program, repeats))):
                finding.runs += 1
                finding.bad += bool(complaints)
                finding.complaints += complaints
                step(program.name)
            came = reports.new()
            finding.bad += len(came)
            finding.complaints += came
    return found


def count_runs(chosen: Sequence[Program], repeats: int) -> int:
    return sum(_runs(program, repeats) for program in chosen)


def _runs(program: Program, repeats: int) -> int:
    return repeats if program.repeated else 1


def run(program: Program, number: int) -> list[str]:
    """Run it once, in a process and a folder of its own; what is wrong with how it ended."""
    with tempfile.TemporaryDirectory() as name:
        script = Path(name, "program.py")
        script.write_text(program.code)
        folder = Path(name, "here")
        folder.mkdir()
        command = [sys.executable, str(script), str(number)]
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=DEADLINE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [f"did not end within {DEADLINE:g} s"]
        left = [f"left the file {path.name}" for path in sorted(folder.iterdir())]
    return [*_complaints(program, done), *left]


def _complaints(program: Program, done: subprocess.CompletedProcess[str]) -> list[str]:
    found = []
    if done.returncode < 0:
        found.append(f"died by {signal.Signals(-done.returncode).name}")
    elif done.returncode:
        found.append(f"ended with status {done.returncode}")
    if done.stderr:
        found.append(f"wrote to standard error: {done.stderr[-_SAID:]!r}")
    if done.stdout != program.prints:
        found.append(f"printed {done.stdout[-_SAID:]!r} instead of {program.prints!r}")
    return found


@contextmanager
def _core_files() -> Iterator[None]:
    """Let processes that die leave a core file, where the system has such things."""
    if importlib.util.find_spec("resource") is None:
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_CORE)
    most = before[1]
    wanted = _CORE_BYTES if most == resource.RLIM_INFINITY else min(_CORE_BYTES, most)
    resource.setrlimit(resource.RLIMIT_CORE, (wanted, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
