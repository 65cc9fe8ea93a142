"""A runtime in the place of torch.mps, which records what it is asked to do and does nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from orchard.attention.problem import Tensors
from orchard.backends.metal import MetalBackend, capability


class Call(NamedTuple):
    """A launch of a kernel."""

    name: str
    args: tuple[Any, ...]
    threads: Any
    group_size: Any


class FakeKernel:
    def __init__(self, runtime: FakeRuntime, name: str) -> None:
        self.runtime, self.name = runtime, name

    def __call__(self, *args: Any, threads: Any, group_size: Any) -> None:
        self.runtime.check_lock()
        self.runtime.calls.append(Call(self.name, args, threads, group_size))


class FakeLibrary:
    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> FakeKernel:
        self._runtime.looked_up.append(name)
        return FakeKernel(self._runtime, name)


class FakeRuntime:
    """`error`: what its compiler says; `free`: it needs no lock, as torch from 2.15 on."""

    def __init__(self, error: str = "", *, free: bool = False) -> None:
        self.error, self.free = error, free
        self.holder: int | None = None  # the thread that has the lock
        self.sources: list[str] = []
        self.calls: list[Call] = []
        self.looked_up: list[str] = []
        self._mutex = threading.RLock()

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.free else self._hold()

    @contextmanager
    def _hold(self) -> Iterator[None]:
        with self._mutex:
            before, self.holder = self.holder, threading.get_ident()
            try:
                yield
            finally:
                self.holder = before

    def check_lock(self) -> None:
        """The lock is held, and by this very thread."""
        assert self.free or self.holder == threading.get_ident(), "without the lock"

    def compile(self, text: str) -> FakeLibrary:
        self.check_lock()
        self.sources.append(text)
        if self.error:
            raise SyntaxError(self.error)
        return FakeLibrary(self)


class FakeMetal(MetalBackend):
    """The metal backend on CPU tensors, which its fake runtime does not touch."""

    capabilities = (capability("cpu"),)

    def unavailable(self, *_: Any) -> None:
        return None


def operands(rows: int = 40, keys: int = 50, **kind: Any) -> Tensors:
    query = torch.randn(2, 4, rows, 24, **kind)
    key, value = torch.randn(2, 2, keys, 24, **kind), torch.randn(2, 2, keys, 12, **kind)
    return Tensors(query, key, value)
