"""Metal kernels on a CPU: compiled with clang, run thread by thread, and watched.

lib = compile_shader(source)          # as torch.mps.compile_shader
lib.scale(x, 2.0, threads=x.numel())  # CPU tensors in the place of MPS tensors
lib.scale.last_counters
"""

from orchard.testing.metal.emulator import (
    SCHEDULES,
    Counters,
    Emulator,
    MetalKernel,
    ShaderLibrary,
    compile_shader,
)
from orchard.testing.metal.errors import (
    BindingError,
    DivergenceError,
    EmulationError,
    OutOfBoundsError,
    RaceError,
    UndefinedBehaviourError,
)

__all__ = [
    "SCHEDULES",
    "BindingError",
    "Counters",
    "DivergenceError",
    "EmulationError",
    "Emulator",
    "MetalKernel",
    "OutOfBoundsError",
    "RaceError",
    "ShaderLibrary",
    "UndefinedBehaviourError",
    "compile_shader",
]
