"""Threads that are kept on one core of the machine, while a queue that they serve is open.

Only one of them runs Python at a time. On a machine with many cores each wakes on another one;
on virtual machines a queue was measured to be several times as fast on one core as on sixteen.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from orchard.errors import ArgumentValueError

_GRAIN = 1 << 15  # elements for each of torch's threads; with fewer it starts none


@dataclass
class _Kept:
    """A thread that is kept on a core: where it may run otherwise, and who keeps it."""

    native: int  # the system's number of the thread
    before: set[int]
    core: int
    keepers: set[OneCore]

    def release(self) -> None:
        """Let it go, unless it has ended, or has chosen its cores itself meanwhile."""
        if Path(f"/proc/self/task/{self.native}").exists():  # not another process's by now
            with suppress(OSError):  # it has ended just here
                if os.sched_getaffinity(self.native) == {self.core}:
                    os.sched_setaffinity(self.native, self.before)


_kept: WeakKeyDictionary[threading.Thread, _Kept] = WeakKeyDictionary()
_lock = threading.RLock()  # a queue may be collected, or closed by a signal handler, in the middle


class _Here(threading.local):
    has_joined = False


class OneCore:
    """Keeps each thread that joins on the core, until this is left.

    Not the main thread: a thread that one of these starts begins on the core, and stays there.
    """

    def __init__(self, core: int) -> None:
        if not hasattr(os, "sched_setaffinity"):
            raise ArgumentValueError(
                f"core is {core!r}; this system does not let a thread be kept on a core"
            )
        cores = os.sched_getaffinity(0)
        if isinstance(core, bool) or not isinstance(core, int) or core not in cores:
            raise ArgumentValueError(
                f"core is {core!r}; it must be one of those that this thread may use: "
                f"{', '.join(map(str, sorted(cores)))}"
            )
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            raise ArgumentValueError(
                f"core is {core!r}; the system refuses to keep a thread on a core: {error}"
            ) from error
        self.core = core
        self._cores = cores
        self._here = _Here()
        self._is_over = False

    def join(self) -> None:
        """Keep the calling thread here, unless its own choice of cores is another."""
        if self._here.has_joined:
            return
        self._here.has_joined = True
        thread = threading.current_thread()
        with _lock:
            if self._is_over:
                return
            native = threading.get_native_id()
            kept = _kept.get(thread)
            if kept is not None and kept.native == native:
                if kept.core == self.core:
                    kept.keepers.add(self)
                return
            before = os.sched_getaffinity(0)
            if self.core in before and len(before) > 1 and thread is not threading.main_thread():
                with suppress(OSError):  # refused since the queue was made: it runs anywhere
                    os.sched_setaffinity(0, {self.core})
                    _kept[thread] = _Kept(native, before, self.core, {self})

    def join_as_worker(self) -> None:
        """Keep the calling thread here, and not the threads that torch has for it: on one core they
        spin for one another, and what they do together takes ten times as long.
        """
        if not self._here.has_joined:
            if os.sched_getaffinity(0) == {self.core}:  # it was started by one that is kept
                with suppress(OSError):  # refused since: they stay with it
                    os.sched_setaffinity(0, self._cores)
            torch.empty(torch.get_num_threads() * _GRAIN, dtype=torch.uint8).fill_(0)
            self.join()

    def leave(self) -> None:
        """Let those go that nobody else keeps."""
        with _lock:
            self._is_over = True
            for thread, kept in list(_kept.items()):
                if self in kept.keepers:
                    kept.keepers.remove(self)
                    if not kept.keepers:
                        del _kept[thread]
                        if thread.is_alive():
                            kept.release()


def _after_fork_in_child() -> None:
    """Queues are closed here, and the forking thread is the only one."""
    global _lock
    _lock = threading.RLock()
    kept = _kept.get(threading.current_thread())
    _kept.clear()
    if kept is not None:
        os.sched_setaffinity(0, kept.before)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
