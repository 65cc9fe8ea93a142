"""Plain text for people, without a dependency."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int = 100) -> str:
    """Aligned columns under `headers`; the widest column is wrapped to keep within `width`."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    gaps = 2 * (len(headers) - 1)
    while sum(widths) + gaps > width and max(widths) > 20:
        widths[widths.index(max(widths))] -= 1
    lines = [_line(cells[0], widths), "  ".join("-" * w for w in widths)]
    for row in cells[1:]:
        wrapped = [textwrap.wrap(cell, w) or [""] for cell, w in zip(row, widths, strict=True)]
        for n in range(max(len(part) for part in wrapped)):
            lines.append(_line([part[n] if n < len(part) else "" for part in wrapped], widths))
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip()


def one_line(error: BaseException, limit: int = 200) -> str:
    """An exception as one line of at most `limit` characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
