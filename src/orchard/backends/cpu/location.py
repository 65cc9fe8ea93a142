"""Where the installer put the native library."""

from __future__ import annotations

import sys
from pathlib import Path

import orchard

FOLDER = "_native"
NAME = "liborchard.dylib" if sys.platform == "darwin" else "liborchard.so"
NOTE = "not-built.txt"  # left by an install whose compilation failed


def find_library() -> Path | None:
    """The library, or None where the package was installed without it."""
    return _find(NAME)


def expected() -> str:
    """For messages: what was looked for, where, and why it may be missing."""
    folders = " or ".join(str(Path(folder, FOLDER)) for folder in orchard.__path__)
    note = _find(NOTE)
    why = f" ({note.read_text(encoding='utf-8').strip()})" if note is not None else ""
    return f"{NAME} in {folders}{why}"


def _find(name: str) -> Path | None:
    # An editable install has two folders: the sources, and what the build installed.
    candidates = (Path(folder, FOLDER, name) for folder in orchard.__path__)
    return next((path for path in candidates if path.is_file()), None)
