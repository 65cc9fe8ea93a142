"""NaN in every output before a kernel runs, so that an element it forgets shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from orchard.attention import memory


@contextmanager
def poisoned() -> Iterator[None]:
    """While this lasts, every output that Orchard allocates begins as NaN."""

    def allocate(*args: Any, **kwargs: Any) -> Tensor:
        return torch.empty_strided(*args, **kwargs).fill_(torch.nan)

    original = memory.allocate
    memory.allocate = allocate
    try:
        yield
    finally:
        memory.allocate = original
