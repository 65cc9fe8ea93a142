from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.metal)


@pytest.fixture(scope="session", autouse=True)
def _with_compiler(metal_compiler: None) -> None:
    """Every test of this folder executes Metal source."""
