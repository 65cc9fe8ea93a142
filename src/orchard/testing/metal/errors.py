"""What the emulator reports about a kernel."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """A launch did what a GPU would not forgive. Nothing was written to its tensors."""


class OutOfBoundsError(EmulationError):
    """An access outside a buffer or a threadgroup variable.

    `buffer` is the index of the buffer, or None for threadgroup memory; `variable` the name of the
    threadgroup variable; `index` counts elements from the beginning of either.
    """

    def __init__(
        self, message: str, buffer: int | None = None, variable: str = "", index: int | None = None
    ) -> None:
        super().__init__(message)
        self.buffer = buffer
        self.variable = variable
        self.index = index


class BindingError(EmulationError):
    """An argument that the kernel reads as numbers of another type, or that it does not have."""


class RaceError(EmulationError):
    """Two threads touched the same threadgroup memory, one wrote, and no barrier was between."""


class DivergenceError(EmulationError):
    """A barrier or a collective that not all of its threads reached."""


class UndefinedBehaviourError(EmulationError):
    """Found by the compiler's checks (mode "flat"), or a misaligned access."""
