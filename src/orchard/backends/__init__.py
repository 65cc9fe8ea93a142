"""The backends, in order of preference. A backend is one folder here and one line below."""

from __future__ import annotations

import importlib

from orchard.dispatch.backend import Backend

REGISTRY = (
    "orchard.backends.cpu:CpuBackend",
    "orchard.backends.metal:MetalBackend",
    "orchard.backends.cuda:CudaBackend",
    "orchard.backends.aten:AtenBackend",
    "orchard.backends.reference:ReferenceBackend",
    "orchard.backends.metal.emulated:MetalEmulatedBackend",
)


def load() -> tuple[Backend, ...]:
    """One instance of each. Importing a backend needs torch only; the rest it probes for."""
    backends = []
    for entry in REGISTRY:
        module, _, name = entry.partition(":")
        backends.append(getattr(importlib.import_module(module), name)())
    return tuple(backends)
