from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import orchard
from orchard.dispatch import planner, settings
from orchard.dispatch.journal import journal
from orchard.testing.metal import toolchain

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
    """Every test begins with torch's own attention, an empty journal and the settings of the
    environment, and leaves it so."""
    journal.stats(reset=True)
    torch.manual_seed(0)
    yield
    while orchard.integrations.torch_sdpa._state.depth:
        orchard.disable()
    if settings.read(os.environ) != settings.current():  # of variables that the test had set
        planner.reset()


@pytest.fixture
def fresh_planner() -> Iterator[None]:
    """A planner of the test's own, and the usual one afterwards."""
    planner.reset()
    yield
    planner.reset()


@pytest.fixture(scope="session")
def metal_compiler() -> None:
    """For a test that executes Metal source: it needs a clang, and is skipped without one."""
    try:
        toolchain.find()
    except toolchain.NoCompilerError as error:
        pytest.skip(str(error))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The mutants of the Metal kernels that were tried, and what caught each."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    lines = [
        text for report in reports for name, text in report.user_properties if name == "mutant"
    ]
    if lines:
        terminalreporter.section("mutants")
        for line in lines:
            terminalreporter.write_line(line)
