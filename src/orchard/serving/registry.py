"""The living objects of a kind, for what must reach all of them at a fork or at exit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T")


class Registry(Generic[T]):
    """A set that keeps nothing alive, safe from any thread and after a fork."""

    def __init__(self) -> None:
        self._items: WeakSet[T] = WeakSet()
        self._new_lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._new_lock)

    def _new_lock(self) -> None:
        self._lock = threading.Lock()

    def add(self, item: T) -> None:
        with self._lock:
            self._items.add(item)

    def __iter__(self) -> Iterator[T]:
        with self._lock:
            return iter(list(self._items))
