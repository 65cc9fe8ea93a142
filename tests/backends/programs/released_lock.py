"""How often another Python thread runs while one long call lasts."""

from __future__ import annotations

import threading
import time

from programs.problems import forward, is_inside, long_operand


def main() -> None:
    operand = long_operand(0.2)
    caller = threading.get_ident()
    over = threading.Event()
    seen = 0

    def watch() -> None:
        nonlocal seen
        while not over.is_set():
            seen += is_inside(caller)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    forward(operand)
    over.set()
    watcher.join()
    print(seen)


if __name__ == "__main__":
    main()
