from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from orchard import backends
from orchard.dispatch import planner, settings
from orchard.dispatch.backend import Backend
from orchard.dispatch.planner import Planner


@pytest.fixture
def use_backends() -> Iterator[Callable[..., Planner]]:
    """Register these backend classes, in this order, instead of Orchard's own."""
    with pytest.MonkeyPatch.context() as patch:

        def use(*classes: type[Backend]) -> Planner:
            entries = tuple(f"{kind.__module__}:{kind.__name__}" for kind in classes)
            patch.setattr(backends, "REGISTRY", entries)
            return planner.reset()

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
