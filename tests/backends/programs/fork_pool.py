"""A process that has computed already hands work to forked processes."""

from __future__ import annotations

import multiprocessing

from programs.problems import ASSORTED, differences, exercise

from orchard.testing.budget import Results

PROBLEMS = [exercise(case) for case in ASSORTED]
EXPECTED: list[Results] = []


def wrong(number: int) -> list[str]:
    return differences(PROBLEMS[number].solve(), EXPECTED[number])


def main() -> None:
    EXPECTED.extend(problem.solve() for problem in PROBLEMS)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        print(pool.map_async(wrong, list(range(len(PROBLEMS))) * 4, chunksize=1).get(timeout=120))


if __name__ == "__main__":
    main()
