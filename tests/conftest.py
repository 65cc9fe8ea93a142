from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import orchard
from orchard.dispatch import planner
from orchard.dispatch.journal import journal

for name in [name for name in os.environ if name.startswith("ORCHARD_")]:
    del os.environ[name]  # the developer's settings are not the tests'
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that name no device run on the CPU."""
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("cuda", "mps")):
            item.add_marker(pytest.mark.cpu)


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    """Every test begins with torch's own attention and an empty journal, and leaves it so."""
    journal.stats(reset=True)
    torch.manual_seed(0)
    yield
    while orchard.integrations.torch_sdpa._state.depth:
        orchard.disable()


@pytest.fixture
def fresh_planner() -> Iterator[None]:
    """A planner of the test's own, and the usual one afterwards."""
    planner.reset()
    yield
    planner.reset()
