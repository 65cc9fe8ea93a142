"""Fork while other threads are in the middle of calls: parent and children compute on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
from programs.problems import ASSORTED, differences, exercise, forward, long_operand

FORKS = 5
PATIENCE = 60.0  # seconds until a child counts as hanging


def finish(child: int) -> int:
    """The child's exit status; it is killed where it does not end."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    problems = [exercise(case) for case in ASSORTED]
    expected = [problem.solve() for problem in problems]
    wrong = [problem.complaints(found) for problem, found in zip(problems, expected, strict=True)]
    assert not any(wrong), wrong
    operand = long_operand(0.1)
    whole = forward(operand)

    def solve_all() -> bool:
        return all(
            not differences(problem.solve(), known)
            for problem, known in zip(problems, expected, strict=True)
        )

    def same_whole() -> bool:
        return torch.equal(forward(operand), whole)

    stop = threading.Event()
    counts: list[int] = []
    failures: list[str] = []

    def repeat(what: str, work: Callable[[], bool]) -> None:
        count = 0
        while not stop.is_set():
            if not work():
                failures.append(what)
            count += 1
        counts.append(count)

    threads = [
        threading.Thread(target=repeat, args=("a short call", solve_all)),
        threading.Thread(target=repeat, args=("a short call", solve_all)),
        threading.Thread(target=repeat, args=("a long call", same_whole)),
    ]
    for thread in threads:
        thread.start()
    for number in range(FORKS):
        time.sleep(0.03)
        child = os.fork()
        if child == 0:
            right = solve_all() and same_whole()
            if right and number == 0:  # and a fork of the fork, which has a pool of its own now
                grandchild = os.fork()
                if grandchild == 0:
                    os._exit(0 if solve_all() else 3)
                right = finish(grandchild) == 0
            os._exit(0 if right else 1)
        status = finish(child)
        if status:
            failures.append(f"fork {number} ended with {status}")
    stop.set()
    for thread in threads:
        thread.join()
    if not solve_all():
        failures.append("a call after the forks")
    if len(counts) < len(threads) or min(counts) < 1:
        failures.append(f"threads that did not work: {counts}")
    print(failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
