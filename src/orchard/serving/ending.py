"""The end of the interpreter while threads are at work in lanes.

A thread that comes back from torch to an interpreter that is going away is ended there, and the
C++ frames above it do not survive that: the process aborts. So at exit what pool threads run is
waited for, other threads are asked to leave their lanes, and nobody goes on from there.

A fork beside threads in torch is another end: locks that they hold inside of torch's libraries
stay locked in the child for ever. So a fork waits a while until no thread is in a lane, and for
threads that Python does not know, OpenMP's and those that end: MKL locks as they go.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from orchard.dispatch.settings import logger
from orchard.serving.registry import Registry
from orchard.text import one_line

_PATIENCE = 60.0  # seconds for work in progress; then the process ends as it can
_STAY = 5.0  # seconds for the process to end; a handler that joins the thread gets it back then
_LOOK = 0.02  # seconds between looks at threads that were asked to leave
_FORK_PATIENCE = 10.0  # seconds that a fork waits for lanes to be left
_FORK_LOOK = 0.001
_QUIET = 0.5  # seconds in which no thread has used a processor: they wait, and not in torch
_PARTING = 1.0  # seconds for daemon threads that were told of the end, to end themselves
_PARTED = 0.05  # seconds in which none of them has used a processor
_STRANGERS_PATIENCE = 1.0  # seconds that a fork waits for threads that Python does not know


class Employer(Protocol):
    """Something with threads of its own, which run work for others."""

    def dismiss(self) -> bool:
        """Cancel what has not begun; whether somebody may have been told of it."""

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait for what has begun."""


class _Visit:
    """A thread's stay in lanes."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.native_id = threading.get_native_id()
        self.depth = 0
        self.forks = False
        self.held_back = False


class _Here(threading.local):
    def __init__(self) -> None:
        global _several
        self.visit = _Visit()
        _several |= bool(list(_visits))
        _visits.add(self.visit)


_employers: Registry[Employer] = Registry()
_visits: Registry[_Visit] = Registry()  # one for each thread that lives
_several = False  # more than one thread has been here
_here = _Here()
_ender = 0  # the thread in which the interpreter ends, once it does
_forks = 0  # threads that are about to fork; others do not enter lanes meanwhile
_fork_ended = threading.Condition()
_restless: frozenset[int] = frozenset()  # threads that ran on while a fork waited for them


def watch(employer: Employer) -> None:
    """Let its work in progress end before the interpreter does."""
    _employers.add(employer)


def enter() -> None:
    """The calling thread is about to work in a lane."""
    visit = _here.visit
    _hold_back(visit)
    visit.depth += 1
    # Depth first and then the look: whoever is about to fork sets and looks the other way round.
    while _forks and visit.depth == 1 and not visit.forks:
        visit.depth = 0
        with _fork_ended:
            _fork_ended.wait_for(lambda: not _forks)
        visit.depth = 1


def leave() -> None:
    """The calling thread has left a lane."""
    visit = _here.visit
    visit.depth -= 1
    _hold_back(visit)


class Stay(AbstractContextManager[None]):
    """A block in which the calling thread works as in a lane."""

    def __enter__(self) -> None:
        enter()

    def __exit__(self, *_: object) -> None:
        leave()


def _hold_back(visit: _Visit) -> None:
    """Keep a thread, once, out of an interpreter that is about to end."""
    if not _ender or visit.thread == _ender or visit.held_back:
        return
    visit.held_back = True
    nobody = threading.Lock()
    nobody.acquire()
    nobody.acquire(timeout=_STAY)


def _end() -> None:
    global _ender
    employers = list(_employers)
    is_told = False
    for employer in employers:
        try:
            is_told |= employer.dismiss()
        except BaseException as error:  # of a callback; the others are dismissed all the same
            logger.error("at the end of the interpreter %s", one_line(error))
    end = time.monotonic() + _PATIENCE
    for employer in employers:
        employer.wait_until_idle(max(0.0, end - time.monotonic()))
    if is_told:
        _await(_daemons, min(end, time.monotonic() + _PARTING), _FORK_LOOK, _PARTED)
    _ender = threading.get_ident()
    _clear_lanes(end)


def _clear_lanes(end: float) -> None:
    """Ask the threads in lanes to leave, and wait for those that are at work."""
    for visit in _inside():
        _interrupt(visit.thread)
    _await(lambda: [visit.native_id for visit in _inside()], end, _LOOK)


def _daemons() -> list[int]:
    """Daemon threads: who was told that there will be no answer drops its tensors and ends, and to
    drop a tensor is to be in torch for a moment.
    """
    others = (thread for thread in threading.enumerate() if thread.daemon)
    return [thread.native_id for thread in others if thread.native_id is not None]


def _await(
    threads: Callable[[], list[int]], end: float, look: float, patience: float = _QUIET
) -> None:
    """Wait until there are no such threads, or none of them has been at work for so long."""
    before: list[list[str]] = []
    quiet = time.monotonic() + patience
    while (found := threads()) and time.monotonic() < min(end, quiet):
        doing = [_doing(native_id) for native_id in found]
        if doing != before or ["R"] in (each[:1] for each in doing):
            quiet = time.monotonic() + patience
        before = doing
        time.sleep(look)


def _inside() -> list[_Visit]:
    running = sys._current_frames()
    return [
        visit
        for visit in _visits
        if visit.depth and visit.thread in running and visit.thread != _ender
        if not visit.held_back
    ]


def _interrupt(thread: int) -> None:
    """Raise SystemExit in a thread, once it runs Python code; threading passes over it silently."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


def _doing(native_id: int) -> list[str]:
    """A thread's state and what it has used of processors so far, where the system tells."""
    try:
        stat = Path(f"/proc/self/task/{native_id}/stat").read_text()
    except OSError:
        return []
    fields = stat.rpartition(")")[2].split()
    return [fields[0], *fields[11:13]]  # utime and stime


def _strangers_at_work() -> list[int]:
    """Threads that Python does not know and that run."""
    known = {thread.native_id for thread in threading.enumerate()}
    try:
        tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    except OSError:
        return []
    return [task for task in tasks if task not in known and _doing(task)[:1] == ["R"]]


def _await_strangers() -> None:
    """Wait for threads that Python does not know, but not again for one that was in vain."""
    global _restless
    fresh = [n for n in _strangers_at_work() if n not in _restless]
    _await(
        lambda: [n for n in _strangers_at_work() if n in fresh],
        time.monotonic() + _STRANGERS_PATIENCE,
        _FORK_LOOK,
    )
    _restless = frozenset(_strangers_at_work())


def _before_fork() -> None:
    """Let the threads that are in lanes leave them, for a while, and nobody in."""
    global _forks
    with _fork_ended:
        _forks += 1
    own = _here.visit
    own.forks = True

    if not _several:
        return

    def others() -> list[int]:
        inside = (visit for visit in _visits if visit.depth)
        return [visit.native_id for visit in inside if visit is not own and not visit.forks]

    _await(others, time.monotonic() + _FORK_PATIENCE, _FORK_LOOK)
    _await_strangers()


def _after_fork_in_parent() -> None:
    global _forks
    _here.visit.forks = False
    with _fork_ended:
        _forks -= 1
        _fork_ended.notify_all()


def _after_fork_in_child() -> None:
    """The thread that forked has another number for the system here, and is the only one."""
    global _forks, _fork_ended
    _forks, _fork_ended = 0, threading.Condition()
    _here.visit.forks = False
    _here.visit.native_id = threading.get_native_id()


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
