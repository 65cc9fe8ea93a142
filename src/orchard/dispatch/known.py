"""What was made once for a kind of call and serves every call of that kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
KNOWN_CALLS = 4096


class Known(dict[K, V]):
    """Values by what they are made from; it begins anew when it is full.

    Threads that ask for the same at once may each make it. The values have to be interchangeable.
    """

    def __init__(self, make: Callable[[K], V], most: int = KNOWN_CALLS) -> None:
        super().__init__()
        self._make = make
        self._most = most

    def __missing__(self, key: K) -> V:
        made = self._make(key)
        if len(self) >= self._most:
            self.clear()
        self[key] = made
        return made
