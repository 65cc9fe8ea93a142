"""What users ask of the dispatcher: who is there, what happened, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from orchard.dispatch.backend import Reason
from orchard.dispatch.journal import advise, journal
from orchard.dispatch.planner import planner


@dataclass(frozen=True)
class BackendReport:
    """One kernel of a backend on one device of this machine."""

    backend: str
    kernel: str
    device: str
    available: bool
    reason: Reason | None
    summary: str


def visible_devices() -> tuple[torch.device, ...]:
    """The devices of this machine that torch can see."""
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps", 0))
    return tuple(devices)


def backends() -> tuple[BackendReport, ...]:
    """Every kernel on every visible device, each proved by running it, in order of preference.

    Those that run only when they are asked for are listed, not run.
    """
    return tuple(
        BackendReport(
            backend.name, capability.kernel, str(device), reason is None, reason, backend.summary
        )
        for device in visible_devices()
        for backend in planner().backends.values()
        for capability in backend.capabilities
        if capability.on(device)
        for reason in [planner().unavailable(backend, capability, device)]
    )


def stats(*, reset: bool = False) -> dict[str, Any]:
    """Counters of this process: calls by stage and backend, fall-backs, failures, torch's SDPA."""
    return journal.stats(reset=reset)


def advice() -> list[str]:
    """What the counters suggest doing, in sentences; empty when nothing fell back."""
    return advise(journal.stats())
