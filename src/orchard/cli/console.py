"""Tables and progress bars: with rich where it is installed, in plain text otherwise."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from orchard.text import table


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A titled table on standard output; cells are strings."""
    if _has_rich() and sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        grid = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
        for header in headers:
            grid.add_column(header, overflow="fold")
        for row in rows:
            grid.add_row(*(Text(cell) for cell in row))
        Console().print(grid)
        return
    width = shutil.get_terminal_size((100, 24)).columns
    print(f"{title}\n{table(headers, rows, width)}\n", flush=True)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error; call the yielded function with a note after each step."""
    if _has_rich() and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        # No refresh thread: it would run while something is being timed.
        screen = Console(stderr=True)
        with Progress(*columns, console=screen, transient=True, auto_refresh=False) as bar:
            task = bar.add_task(label, total=total, note="")
            yield lambda note: bar.update(task, advance=1, note=note, refresh=True)
        return
    done, shown = 0, time.monotonic()

    def step(note: str) -> None:
        nonlocal done, shown
        done += 1
        if done == total or time.monotonic() - shown > 5:
            shown = time.monotonic()
            print(f"{label}: {done}/{total} {note}", file=sys.stderr, flush=True)

    yield step
