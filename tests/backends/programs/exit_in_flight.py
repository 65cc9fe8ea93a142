"""Leave the interpreter while other threads are in the middle of calls, several times.

Each time is a fork of this process, which has called no kernel yet, and leaves by the whole of
Python's shutdown. Prints the exit statuses in the end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import torch
from programs.problems import ASSORTED, PLAIN, exercise, forward, normal, wait_until_inside

from orchard.attention.ops import forward_op
from orchard.attention.problem import Tensors

OPERAND = normal(1, 1, 1024, 64).expand(1, 8, 1024, 64)
SHORT = [exercise(case).tensors.query for case in ASSORTED[:4]]


def call_forever(call: Callable[[], object]) -> threading.Thread:
    def work() -> None:
        while True:
            call()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def leave_during_long_calls() -> None:
    """Every thread is seen inside a forward or a backward before the main thread ends."""
    leaf = OPERAND.detach().requires_grad_()
    tensors = Tensors(leaf, leaf, leaf, None, None)
    out, _ = forward_op(tensors, PLAIN, return_lse=False, grad=True, mask_grad=False)

    def backward() -> None:
        torch.autograd.grad(out, leaf, OPERAND, retain_graph=True)

    calls = (lambda: forward(OPERAND), backward, lambda: forward(OPERAND), backward)
    threads = [call_forever(call) for call in calls]
    wait_until_inside(*(thread.ident or 0 for thread in threads))


def leave_during_short_calls() -> None:
    """Kernel, planning, allocation: the threads are anywhere in a call when the main one ends."""
    begun = [threading.Event() for _ in SHORT]
    for query, event in zip(SHORT, begun, strict=True):
        call_forever(lambda query=query, event=event: (forward(query), event.set()))
    for event in begun:
        event.wait()
    time.sleep(0.001 * (os.getpid() % 7))


def leave_with_a_thread_to_wait_for() -> None:
    """A thread that is no daemon ends its call before the interpreter goes."""
    expected = forward(OPERAND)

    def work() -> None:
        right = torch.equal(forward(OPERAND), expected)
        os.write(1, b"its result is right\n" if right else b"its result is wrong\n")

    thread = threading.Thread(target=work)
    thread.start()
    wait_until_inside(thread.ident or 0)


def main(leave: Callable[[], None], times: int) -> None:
    one = torch.ones((), requires_grad=True)
    torch.autograd.grad(one, one)  # imports much, once instead of in every fork
    statuses = []
    for _ in range(times):
        child = os.fork()
        if child == 0:
            leave()
            return
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os.write(1, f"{sorted(statuses)}\n".encode())


if __name__ == "__main__":
    ways = {
        "long": leave_during_long_calls,
        "short": leave_during_short_calls,
        "waiting": leave_with_a_thread_to_wait_for,
    }
    main(ways[sys.argv[1]], int(sys.argv[2]))
