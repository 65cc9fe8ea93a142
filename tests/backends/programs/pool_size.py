"""How many threads the pool holds: after the import, then after calls that could use many."""

from __future__ import annotations

from pathlib import Path

from programs.problems import ASSORTED, exercise, forward, normal

from orchard.backends.cpu import native


def named_threads() -> int:
    """Those that the system knows under the pool's name."""
    tasks = Path("/proc/self/task").glob("*/comm")
    return sum(task.read_text().strip() == "orchard" for task in tasks)


def main() -> None:
    library = native.loaded()
    print(library.pool_threads(), named_threads())
    for case in ASSORTED:
        exercise(case).solve()
    forward(normal(4, 8, 256, 64))
    print(library.pool_threads(), named_threads())


if __name__ == "__main__":
    main()
