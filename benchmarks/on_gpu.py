"""Everything that needs an NVIDIA GPU, in order: tests, conformance, sanitizers, benchmarks.

    PYTHONPATH=src python benchmarks/on_gpu.py --out DIR            # all of it
    PYTHONPATH=src python benchmarks/on_gpu.py --list               # the command lines
    PYTHONPATH=src python benchmarks/on_gpu.py --out DIR tests conformance --limit 570

A step that fails or takes too long does not stop the others. What each said is in DIR/log.txt.
Tests need pytest (a folder that has it may be on PYTHONPATH); with pytest-xdist they run in eight
processes, which is mostly to compile kernels at once. Exit status 1: a step failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from orchard.text import table

ROOT = Path(__file__).resolve().parent.parent
# Warnings of a torch that the tests were not written with are no failures here.
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-m", "cuda")
TESTED = (
    "tests/backends/test_cuda.py",
    "tests/backends/test_cuda_calls.py",
    "tests/backends/test_conformance.py",
    "tests/serving/test_stream_pool_devices.py",
    "tests/testing/test_cuda_targets.py",
    "tests/testing/test_memory.py",
)
# Few problems, of several blocks each, by every kernel; and the one that crashed once.
SANITIZED = (
    "tests/backends/test_cuda_calls.py::test_values",
    "tests/backends/test_cuda.py::test_conformance[decode, strided]",
)
PROCESSES = 8
TAIL = 15  # lines of a step that are shown


class Step(NamedTuple):
    """A command, and the seconds after which it is given up."""

    name: str
    what: str
    limit: int
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def line(self) -> str:
        """As it would be typed."""
        command = ("python" if word == sys.executable else word for word in self.command)
        words = [*(f"{name}={value}" for name, value in self.environment), *command]
        return " ".join(f"'{word}'" if set(word) & set(" []") else word for word in words)


class Outcome(NamedTuple):
    step: Step
    status: str
    seconds: float


def steps(out: Path) -> list[Step]:
    python = sys.executable
    spread = ("-n", str(PROCESSES)) if importlib.util.find_spec("xdist") else ()
    return [
        Step(
            "tests",
            "tests marked cuda; they also compile the kernels that the other steps use",
            540,
            (python, *PYTEST, *spread, *TESTED),
        ),
        Step(
            "conformance",
            "the conformance suite on the backend, with a report",
            300,
            (
                *(python, "-m", "orchard", "verify", "--backend", "cuda", "--device", "cuda"),
                *("--report", str(out / "verify-cuda.json")),
            ),
        ),
        Step(
            "bench",
            "the table of targets and the plot of rates",
            540,
            (python, "-m", "orchard", "bench", "--preset", "cuda", "--resume", "--out", str(out)),
        ),
        *(
            Step(
                tool,
                f"compute-sanitizer {tool} on a problem or two of each kernel",
                180,
                (
                    *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
                    *(python, *PYTEST, *SANITIZED),
                ),
                (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
            )
            for tool in ("memcheck", "racecheck")
        ),
        Step(
            "serving",
            "BatchQueue and StreamPool under many threads",
            240,
            (
                *(python, "-m", "orchard", "bench", "--preset", "serving", "--device", "cuda"),
                *("--out", str(out)),
            ),
        ),
    ]


def run(step: Step, seconds: float, log: TextIO) -> Outcome:
    """Run a step for at most so long; it and what it started are ended then."""
    if shutil.which(step.command[0]) is None:
        return Outcome(step, f"{step.command[0]} is not here", 0.0)
    print(f"\n$ {step.line}", file=log, flush=True)
    start = time.monotonic()
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=os.environ | dict(step.environment),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        status = process.wait(seconds)
        said = "ok" if status == 0 else f"exit status {status}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        said = f"ended after {seconds:.0f} s"
    return Outcome(step, said, time.monotonic() - start)


def run_all(chosen: Sequence[Step], limit: float, out: Path) -> list[Outcome]:
    """Every step that there is time for."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + limit
    found = []
    with (out / "log.txt").open("a+") as log:
        for step in chosen:
            left = end - time.monotonic()
            place = log.seek(0, os.SEEK_END)
            outcome = Outcome(step, "no time left", 0.0)
            if left > 0:
                outcome = run(step, min(step.limit, left), log)
            found.append(outcome)
            log.seek(place)
            tail = log.read().splitlines()[-TAIL:]
            print(f"{step.name}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)
            print("".join(f"  {line}\n" for line in tail), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", nargs="*", help="only these (default: all)")
    parser.add_argument("--list", action="store_true", help="show the command lines and stop")
    parser.add_argument("--out", type=Path, default=Path("on-gpu"), help="where results go")
    parser.add_argument("--limit", type=float, default=1700.0, help="seconds for all of them")
    args = parser.parse_args()
    known = {step.name: step for step in steps(args.out.resolve())}
    for name in args.step:
        if name not in known:
            parser.error(f"{name!r} is not one of {', '.join(known)}")
    chosen = [step for step in known.values() if not args.step or step.name in args.step]
    if args.list:
        for step in chosen:
            print(f"# {step.name}: {step.what}; at most {step.limit} s\n{step.line}\n")
        return 0
    found = run_all(chosen, args.limit, args.out)
    rows = [[each.step.name, each.status, f"{each.seconds:.0f} s"] for each in found]
    print(table(["step", "status", "took"], rows))
    return 0 if all(each.status == "ok" for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
