"""What runs Metal source: torch on an Apple GPU. Tests have others, which need no Mac."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

_LOCK_FREE = (2, 15)  # from this torch on, its caches of libraries and kernels have a lock
_one_at_a_time = threading.RLock()


class Kernel(Protocol):
    """A kernel that can be launched. `threads` counts threads of the whole grid, not groups."""

    def __call__(self, *args: Any, threads: Sequence[int], group_size: Sequence[int]) -> None: ...


class MetalRuntime(Protocol):
    """Compiles Metal source; the result has a kernel under each of their names."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while a call allocates, compiles and launches."""

    def compile(self, source: str) -> Any:
        """The library of kernels in `source`; a SyntaxError has the compiler's words."""


class TorchRuntime:
    """torch.mps.compile_shader, which launches in the order of torch's own operations."""

    def __init__(self) -> None:
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        self.lock: AbstractContextManager[Any] = (
            nullcontext() if version >= _LOCK_FREE else _one_at_a_time
        )

    def compile(self, source: str) -> Any:
        return torch.mps.compile_shader(source)
