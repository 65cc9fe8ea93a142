"""The threads behind StreamPool.submit, and the state of the submitter that they take over."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch

from orchard.dispatch.settings import logger
from orchard.serving import ending
from orchard.text import one_line

_IDLE = 2.0  # seconds without work after which a thread ends
_AUTOCAST_DEVICES = ("cpu", "cuda", "mps")


class Carried:
    """torch's modes of the thread that makes it, and its context variables."""

    def __init__(self) -> None:
        self._context = copy_context()
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
            if torch.is_autocast_enabled(device)
        ]

    def run(self, call: Callable[[], Any]) -> Any:
        """Call it in that state, once."""
        with ExitStack() as modes:
            modes.enter_context(torch.inference_mode(self._inference))
            modes.enter_context(torch.set_grad_enabled(self._grad))
            for device, dtype in self._autocast:
                modes.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=self._cache))
            return self._context.run(call)


@dataclass(frozen=True)
class TaskCounts:
    submitted: int
    completed: int
    failed: int
    cancelled: int


class Task:
    """A call and the future that it will fill."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.future: Future[Any] = Future()


class Workers:
    """Threads that run tasks in the order of their submission, as many as are needed at once.

    One lock guards the queue and the counts; it is never held while a task runs.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._counts = dict.fromkeys(("submitted", "completed", "failed", "cancelled"), 0)
        self._here = threading.local()
        self._begin()
        ending.watch(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._work_came = threading.Condition(self._lock)
        self._work_ended = threading.Condition(self._lock)
        self._tasks: deque[Task] = deque()
        self._threads = self._idle = self._running = 0

    def after_fork_in_child(self) -> None:
        """The tasks and the threads are the parent's; locks may be anyone's."""
        self._begin()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run it on one of the threads; at once where the caller is one of them."""
        task = Task(call)
        if self._is_worker():
            with self._lock:
                self._counts["submitted"] += 1
            self._fulfil(task)
            return task.future
        with self._lock:
            self._counts["submitted"] += 1
            self._tasks.append(task)
            self._work_came.notify()
        try:
            self._hire_if_needed()
        except RuntimeError:  # no more threads, or the interpreter ends
            with self._lock:
                if not self._threads and task in self._tasks:
                    self._tasks.remove(task)
                    self._counts["submitted"] -= 1
                    raise
        return task.future

    def _is_worker(self) -> bool:
        return getattr(self._here, "is_worker", False)

    def _hire_if_needed(self) -> None:
        with self._lock:
            if len(self._tasks) <= self._idle or self._threads >= self._most:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._threads -= 1
            raise

    def _work(self) -> None:
        self._here.is_worker = True
        try:
            while self._work_once():
                pass
        except BaseException:  # raised by a callback of a future
            with self._lock:
                self._threads -= 1
            self._hire_if_needed()
            raise

    def _work_once(self) -> bool:
        """Run the next task; False says that the thread is not needed any more."""
        task = self._next()
        if task is None:
            return False
        try:
            self._fulfil(task)
        finally:
            del task  # with its tensors, before this thread counts as one that is not in torch
            with self._lock:
                self._running -= 1
                self._work_ended.notify_all()
        return True

    def _next(self) -> Task | None:
        with self._lock:
            self._idle += 1
            self._work_came.wait_for(lambda: self._tasks, _IDLE)
            self._idle -= 1
            if not self._tasks:
                self._threads -= 1
                return None
            self._running += 1
            return self._tasks.popleft()

    def _fulfil(self, task: Task) -> None:
        future = task.future
        if not future.set_running_or_notify_cancel():
            self._count("cancelled")
            return
        try:
            result = task.call()
        except BaseException as error:
            self._count("failed")
            future.set_exception(error)
            del task, future  # the error's traceback refers to this frame
        else:
            self._count("completed")
            future.set_result(result)

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._counts[outcome] += 1

    def dismiss(self) -> bool:
        """Cancel what has not begun; whether somebody may have been told of it."""
        with self._lock:
            tasks, self._tasks = self._tasks, deque()
            self._counts["cancelled"] += len(tasks)
            is_told = bool(tasks or self._running)
            self._work_ended.notify_all()
        for task in tasks:
            try:
                task.future.cancel()
            except BaseException as error:  # of a callback; futures pass over mere Exceptions
                logger.error("a callback of a future raised %s", one_line(error))
            task.future.set_running_or_notify_cancel()  # tells those in futures.wait too
        return is_told

    def wait_until_idle(self, timeout: float | None = None) -> bool:
        """Wait for all tasks; a task that asks does not wait, since it is one of them."""
        if self._is_worker():
            return False
        with self._lock:
            return self._work_ended.wait_for(lambda: not self._tasks and not self._running, timeout)

    def counts(self) -> TaskCounts:
        with self._lock:
            return TaskCounts(**self._counts)
