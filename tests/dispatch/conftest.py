from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator

import pytest

from orchard.backends.aten import AtenBackend
from orchard.backends.reference import ReferenceBackend
from orchard.dispatch import planner, settings
from orchard.dispatch.backend import Backend
from orchard.dispatch.planner import Planner


@pytest.fixture(autouse=True)
def use_backends() -> Iterator[Callable[..., Planner]]:
    """Register these classes instead of Orchard's own; aten and reference to begin with."""
    with pytest.MonkeyPatch.context() as patch:

        def use(*classes: type[Backend]) -> Planner:
            entries = tuple(f"{kind.__module__}:{kind.__name__}" for kind in classes)
            patch.setattr(importlib.import_module("orchard.backends"), "REGISTRY", entries)
            return planner.reset()

        use(AtenBackend, ReferenceBackend)
        yield use
    planner.reset()


@pytest.fixture
def environment() -> Iterator[Callable[..., Planner]]:
    """Set exactly these ORCHARD_* variables and read them again."""
    level, handlers = settings.logger.level, list(settings.logger.handlers)
    with pytest.MonkeyPatch.context() as patch:

        def use(**variables: str) -> Planner:
            for name in [name for name in os.environ if name.startswith("ORCHARD_")]:
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            return planner.reset()

        yield use
    planner.reset()
    settings.logger.setLevel(level)
    settings.logger.handlers[:] = handlers
