"""Many threads, forks, signals and the end of the interpreter, in the middle of calls."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from programs.problems import ASSORTED, differences, exercise

pytestmark = pytest.mark.stress

Run = Callable[..., subprocess.CompletedProcess[str]]
CALLERS = 64
ROUNDS = 3


def test_many_threads_at_once(isa: str, torch_threads: None) -> None:
    """Each gets, to the bit, what it gets alone, whatever its thread budget."""
    cases = [
        replace(case, rows=case.rows + 5 * n if case.rows > 1 else 1, keys=case.keys + 7 * n)
        for n, case in (
            (at // len(ASSORTED), ASSORTED[at % len(ASSORTED)]) for at in range(CALLERS)
        )
    ]
    problems = [exercise(case) for case in cases]
    torch.set_num_threads(1)
    alone = [problem.solve() for problem in problems]
    wrong = [problem.complaints(found) for problem, found in zip(problems, alone, strict=True)]
    assert [each for each in wrong if each] == []
    together = threading.Barrier(CALLERS, timeout=60)

    def call(number: int) -> list[str]:
        torch.set_num_threads(1 + number % 4)
        found: list[str] = []
        for _ in range(ROUNDS):
            together.wait()
            found += differences(problems[number].solve(), alone[number])
        return found

    with ThreadPoolExecutor(CALLERS) as pool:
        found = list(pool.map(call, range(CALLERS)))
    assert found == [[]] * CALLERS


def test_fork_in_flight(best_isa: None, run_program: Run) -> None:
    """Forks while three threads call: children, a child's child and the parent compute right."""
    done = run_program("fork_in_flight", ORCHARD_NUM_THREADS="3")
    assert done.stderr == ""
    assert done.stdout == "[]\n"
    assert done.returncode == 0


def test_pool_of_forked_processes(best_isa: None, run_program: Run) -> None:
    """multiprocessing by fork after the parent has used its threads."""
    done = run_program("fork_pool", ORCHARD_NUM_THREADS="3")
    assert done.stderr == ""
    assert done.stdout == f"{[[]] * 4 * len(ASSORTED)}\n"


def test_interrupt_in_flight(best_isa: None, run_program: Run) -> None:
    """Ctrl-C during a long call raises KeyboardInterrupt there, and the process computes on."""
    done = run_program("interrupt", ORCHARD_NUM_THREADS="2")
    assert done.stderr == ""
    assert done.stdout == "inside\n[] True\n" * 2
    assert done.returncode == 0


@pytest.mark.parametrize(("calls", "times"), [("long", 6), ("short", 6), ("waiting", 2)])
def test_exit_in_flight(calls: str, times: int, best_isa: None, run_program: Run) -> None:
    """The interpreter ends in the middle of calls, again and again: status 0 and not a word.

    Daemon threads in long calls, forward and backward; anywhere in short ones; and a thread that
    the interpreter waits for.
    """
    done = run_program("exit_in_flight", calls, str(times), ORCHARD_NUM_THREADS="2")
    assert done.stderr == ""
    said, statuses = done.stdout.splitlines()[:-1], done.stdout.splitlines()[-1]
    assert statuses == str([0] * times)
    assert said == ["its result is right"] * (times if calls == "waiting" else 0)


def test_other_threads_run_meanwhile(best_isa: None, run_program: Run) -> None:
    """The interpreter's lock is free during a call: another thread looks in on it many times."""
    done = run_program("released_lock")
    assert done.stderr == ""
    assert int(done.stdout) >= 20


@pytest.mark.skipif(sys.platform != "linux", reason="the program asks Linux for its threads")
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_thread_budget(budget: int, best_isa: None, run_program: Run) -> None:
    """No thread before the first call, and never more than the budget with the caller in it."""
    done = run_program("pool_size", ORCHARD_NUM_THREADS=str(budget))
    assert done.stderr == ""
    assert done.stdout == f"0 0\n{budget - 1} {budget - 1}\n"
