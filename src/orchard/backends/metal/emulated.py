"""The Metal kernels and their launch code on a CPU, executed by the emulator: a test tool."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from orchard.backends.metal import MetalBackend, capability

if TYPE_CHECKING:
    from orchard.testing.metal import Emulator


class EmulatedRuntime:
    """The emulator in the place of torch.mps; it is loaded, and needs clang, when first used."""

    def __init__(self, emulator: Emulator | None = None) -> None:
        self.lock: AbstractContextManager[Any] = nullcontext()
        self._emulator = emulator

    @property
    def emulator(self) -> Emulator:
        if self._emulator is None:
            from orchard.testing.metal import Emulator

            self._emulator = Emulator()
        return self._emulator

    def compile(self, source: str) -> Any:
        return self.emulator.compile_shader(source)


class MetalEmulatedBackend(MetalBackend):
    name = "metal-emulated"
    summary = "the Metal kernels executed on the CPU, to test them without a Mac"
    capabilities = (capability("cpu"),)
    on_request = True

    def __init__(self, runtime: EmulatedRuntime | None = None) -> None:
        super().__init__(runtime or EmulatedRuntime())
