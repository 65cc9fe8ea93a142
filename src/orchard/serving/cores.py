"""How many cores torch's operators, and Orchard's kernels with them, use in one thread.

torch.set_num_threads sets three things: the count of the calling thread (OpenMP's, MKL's and the
plans oneDNN keeps for it), and the count with which threads that have not used torch yet will
begin. A share is for one thread, so the last is set to what it was, and the first to the share.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def _setters() -> tuple[Callable[[int], object], ...]:
    """OpenMP's and MKL's own functions for the calling thread; none where torch has no OpenMP."""
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
        openmp = library.omp_set_num_threads
    except (OSError, AttributeError):
        return ()
    try:
        return openmp, library.MKL_Set_Num_Threads_Local
    except AttributeError:
        return (openmp,)


def usable() -> int:
    """How many the calling thread may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class _Own(threading.local):
    """The thread's count outside every share."""

    count: int | None = None


_own = _Own()
_set_in_this_thread = _setters()
_forked = False


def share(users: int) -> int:
    """This thread's part of its cores when so many use them at once, at least one."""
    # The team of OpenMP threads that a thread had before a fork is not there after it.
    return 1 if _forked else max(1, torch.get_num_threads() // users)


@contextmanager
def limited_to(count: int) -> Iterator[None]:
    """Operators of this thread use so many threads; other threads and later ones are as before."""
    before = torch.get_num_threads()
    if count == before or not _set_in_this_thread:
        yield
        return
    outermost = _own.count is None
    own = _own.count = _own.count or before
    _set(own, count)
    try:
        yield
    finally:
        _set(own, before)
        if outermost:
            _own.count = None


def _set(own: int, count: int) -> None:
    torch.set_num_threads(own)
    if count != own:
        for setter in _set_in_this_thread:
            setter(count)


def _after_fork_in_child() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
