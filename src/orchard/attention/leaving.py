"""The end of the interpreter while other threads are in the middle of calls.

A thread that returns from a kernel to an interpreter that is going away is ended there, and
torch's C++ frames above it do not survive that: the process aborts. torch also unregisters its
operators meanwhile. So at exit calls in progress are waited for, and their threads held back for
a while.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from _thread import allocate_lock, get_ident

_PATIENCE = 60.0  # seconds; then the process ends as it can
_STAY = 5.0  # seconds for the process to end; a handler that joins the thread gets it back then
_inside: list[int] = []  # the thread of each call in progress, once for each level of nesting
_stayed: set[int] = set()  # threads that have been held back
_leaver = 0  # the thread in which the interpreter ends, once it does


class Inside:
    """A context in which a thread counts as being in a call."""

    __slots__ = ()

    def __enter__(self) -> None:
        thread = get_ident()
        if _leaver and _leaver != thread:
            _stay(thread)
        else:
            _inside.append(thread)

    def __exit__(self, *_: object) -> None:
        thread = get_ident()
        if _leaver and _leaver != thread:
            _stay(thread)
        elif thread in _inside:
            _inside.remove(thread)


def _stay(thread: int) -> None:
    """Keep a thread, once, out of an interpreter that is about to end."""
    if thread in _stayed:
        return
    _stayed.add(thread)
    while thread in _inside:
        _inside.remove(thread)
    nobody = allocate_lock()
    nobody.acquire()
    nobody.acquire(timeout=_STAY)


def _leave() -> None:
    global _leaver
    _leaver = get_ident()
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        running = sys._current_frames()
        if not any(thread in running for thread in _inside if thread != _leaver):
            break
        time.sleep(0.001)


def _forget_others() -> None:
    _inside[:] = [thread for thread in _inside if thread == get_ident()]


atexit.register(_leave)  # later than torch's own, so it runs before them
if hasattr(os, "register_at_fork"):  # the other threads are the parent's
    os.register_at_fork(after_in_child=_forget_others)
inside = Inside()
