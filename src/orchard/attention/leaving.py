"""The end of the interpreter while other threads are in the middle of calls.

A thread that returns from a kernel to an interpreter that is going away is ended there, and
torch's C++ frames above it do not survive that: the process aborts. torch also unregisters its
operators meanwhile. So at exit calls in progress are waited for, and their threads go no further.
"""

from __future__ import annotations

import atexit
import os
import time
from _thread import allocate_lock, get_ident

_PATIENCE = 60.0  # seconds; then the process ends as it can
_inside: list[int] = []  # the thread of each call in progress, once for each level of nesting
_leaver = 0  # the thread in which the interpreter ends, once it does


class Inside:
    """A context in which a thread counts as being in a call."""

    __slots__ = ()

    def __enter__(self) -> None:
        thread = get_ident()
        _inside.append(thread)
        if _leaver and _leaver != thread:
            _stay(thread)

    def __exit__(self, *_: object) -> None:
        thread = get_ident()
        if _leaver and _leaver != thread:
            _stay(thread)
        _inside.remove(thread)


def _stay(thread: int) -> None:
    """Never return. Only threads that the interpreter would not wait for come here."""
    while thread in _inside:
        _inside.remove(thread)
    forever = allocate_lock()
    forever.acquire()
    forever.acquire()


def _leave() -> None:
    global _leaver
    _leaver = get_ident()
    end = time.monotonic() + _PATIENCE
    while any(thread != _leaver for thread in _inside) and time.monotonic() < end:
        time.sleep(0.001)


def _forget_others() -> None:
    _inside[:] = [thread for thread in _inside if thread == get_ident()]


atexit.register(_leave)  # later than torch's own, so it runs before them
if hasattr(os, "register_at_fork"):  # the other threads are the parent's
    os.register_at_fork(after_in_child=_forget_others)
inside = Inside()
