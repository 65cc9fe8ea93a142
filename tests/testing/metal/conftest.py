from __future__ import annotations

from pathlib import Path

import pytest

from orchard.testing.metal import toolchain

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks = [pytest.mark.metal]
    try:
        toolchain.find()
    except toolchain.NoCompilerError as error:
        marks.append(pytest.mark.skip(reason=str(error)))
    for item in items:
        if item.path.parent == HERE:
            for mark in marks:
                item.add_marker(mark)
