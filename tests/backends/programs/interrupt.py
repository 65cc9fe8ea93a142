"""Ctrl-C in the middle of a long call, and on."""

from __future__ import annotations

import os
import signal
import threading

import torch
from programs.problems import (
    SMALL,
    differences,
    exercise,
    files_of,
    forward,
    is_backends,
    long_operand,
    wait_until_inside,
)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    problem = exercise(SMALL)
    expected = problem.solve()
    operand = long_operand(0.2)
    whole = forward(operand)
    main_thread = threading.get_ident()

    def interrupt() -> None:
        wait_until_inside(main_thread)
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(2):
        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        try:
            forward(operand)
            print("nothing was interrupted")
        except KeyboardInterrupt as error:
            print("inside" if any(map(is_backends, files_of(error))) else "outside")
        interrupter.join()
        print(differences(problem.solve(), expected), torch.equal(forward(operand), whole))


if __name__ == "__main__":
    main()
