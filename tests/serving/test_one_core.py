"""Threads that a queue keeps on one core, and that they are let go again."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.errors import ArgumentValueError, WorkerDied
from orchard.serving.batch_queue import BatchQueue

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="threads cannot be kept on a core here, or there is one only",
)

ONE = torch.ones(1, 1)
Client = Callable[[Callable[[], Any]], Any]


@pytest.fixture(autouse=True)
def everywhere() -> Iterator[set[int]]:
    """The cores that this thread may use before and after each test."""
    before = os.sched_getaffinity(0)
    yield before
    assert os.sched_getaffinity(0) == before


@pytest.fixture
def core(everywhere: set[int]) -> int:
    return max(everywhere)


def where() -> set[int]:
    return os.sched_getaffinity(0)


@pytest.fixture
def client() -> Iterator[Client]:
    """Runs functions in a thread of its own, always the same."""
    with ThreadPoolExecutor(1) as threads:
        yield lambda function: threads.submit(function).result()


def asked(queue: BatchQueue) -> set[int]:
    """Where the thread is after it has submitted."""
    assert float(queue.submit(ONE).result()) == -1.0
    return where()


def test_workers_and_submitters_are_kept_until_the_queue_is_closed(
    core: int, everywhere: set[int], client: Client
) -> None:
    workers: list[set[int]] = []

    def function(x: Tensor) -> Tensor:
        workers.append(where())
        return -x

    with BatchQueue(function, core=core, workers=2) as queue:
        assert client(where) == everywhere
        for _ in range(8):
            assert client(lambda: asked(queue)) == {core}
        assert asked(queue) == everywhere  # the main thread
    assert workers == [{core}] * 9
    assert client(where) == everywhere


TEAMS = """
import os, threading
from pathlib import Path
import torch
from orchard.errors import WorkerDied
from orchard.serving.batch_queue import BatchQueue

torch.set_num_threads(2)
everywhere = os.sched_getaffinity(0)
weights = torch.ones(512, 512)

def strangers():
    known = {thread.native_id for thread in threading.enumerate()}
    return {int(task.name) for task in Path("/proc/self/task").iterdir()} - known

def cores_of(task):
    try:
        return os.sched_getaffinity(task)
    except ProcessLookupError:  # it has ended, as those of a worker that died do
        return None

others = strangers()
found = []

def function(x):
    others.add(threading.get_native_id())  # Python forgets it before it has ended
    if len(x) == 3:
        raise SystemExit
    y = x @ weights
    found.append([cores for cores in map(cores_of, strangers() - others) if cores])
    return y

def ask():
    for rows in (1, 64, 3, 64):
        try:
            y = queue.submit(torch.ones(rows, 512)).result(60)
        except WorkerDied:
            continue
        assert y.eq(512).all()

with BatchQueue(function, core=max(everywhere)) as queue:
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
assert len(found) == 3 and all(found), found
assert all(cores == everywhere for each in found for cores in each), found
"""


def test_threads_of_torch_are_not_kept_with_their_worker() -> None:
    """Also where its first batch is too small for them, and of a worker that replaces another."""
    done = subprocess.run([sys.executable, "-c", TEAMS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_worker_that_replaces_another_is_kept(core: int, client: Client) -> None:
    workers: list[set[int]] = []

    def function(x: Tensor) -> Tensor:
        workers.append(where())
        if len(workers) == 1:
            raise SystemExit
        return -x

    with BatchQueue(function, core=core) as queue:
        with pytest.raises(WorkerDied):
            client(lambda: asked(queue))
        client(lambda: asked(queue))
    assert workers == [{core}] * 2


def test_a_thread_that_chose_its_cores_is_left_there(
    core: int, everywhere: set[int], client: Client
) -> None:
    others = everywhere - {core}
    client(lambda: os.sched_setaffinity(0, others))
    with BatchQueue(torch.neg, core=core) as queue:
        assert client(lambda: asked(queue)) == others
    assert client(where) == others


def test_a_choice_made_meanwhile_stays(core: int, everywhere: set[int], client: Client) -> None:
    others = everywhere - {core}
    with BatchQueue(torch.neg, core=core) as queue:
        assert client(lambda: asked(queue)) == {core}
        client(lambda: os.sched_setaffinity(0, others))
        assert client(lambda: asked(queue)) == others
    assert client(where) == others


def test_a_system_that_refuses(
    core: int, everywhere: set[int], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the queue is made it is an error; later its threads run anywhere."""
    queue = BatchQueue(torch.neg, core=core)

    def refuse(number: int, cores: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with queue:
        assert client(lambda: asked(queue)) == everywhere
        assert queue.stats().workers_replaced == 0
    with pytest.raises(ArgumentValueError, match=r"refuses .* Operation not permitted"):
        BatchQueue(torch.neg, core=core)
    monkeypatch.undo()


@pytest.mark.parametrize("first", [0, 1])
def test_two_queues_let_go_after_the_second(
    first: int, core: int, everywhere: set[int], client: Client
) -> None:
    queues = [BatchQueue(torch.neg, core=core) for _ in range(2)]
    for queue in queues:
        assert client(lambda queue=queue: asked(queue)) == {core}
    queues[first].close()
    assert client(where) == {core}
    queues[1 - first].close()
    assert client(where) == everywhere


def test_of_two_cores_the_first_counts(core: int, everywhere: set[int], client: Client) -> None:
    other = min(everywhere)
    with BatchQueue(torch.neg, core=core) as queue:
        with BatchQueue(torch.neg, core=other) as second:
            assert client(lambda: asked(queue)) == {core}
            assert client(lambda: asked(second)) == {core}
        assert client(where) == {core}
    assert client(where) == everywhere


def test_a_queue_that_is_dropped_lets_go(core: int, everywhere: set[int], client: Client) -> None:
    queue = BatchQueue(torch.neg, core=core)
    assert client(partial(asked, queue)) == {core}
    del queue
    client(gc.collect)
    assert client(where) == everywhere


def test_a_thread_that_has_ended_is_no_trouble(core: int) -> None:
    found: list[set[int]] = []
    with BatchQueue(torch.neg, core=core) as queue:
        thread = threading.Thread(target=lambda: found.append(asked(queue)))
        thread.start()
        thread.join()
    assert found == [{core}]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_let_go(core: int, everywhere: set[int], client: Client) -> None:
    def forked() -> int:
        child = os.fork()
        if child == 0:
            os._exit(0 if where() == everywhere else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    with BatchQueue(torch.neg, core=core) as queue:
        assert client(lambda: asked(queue)) == {core}
        assert client(forked) == 0
        assert client(where) == {core}


@pytest.mark.parametrize("core", [-1, 10**6, True, "0", 1.0])
def test_a_core_that_is_none(core: Any) -> None:
    with pytest.raises(ArgumentValueError, match="core is"):
        BatchQueue(torch.neg, core=core)


def test_a_system_that_keeps_no_threads(core: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ArgumentValueError, match="does not let a thread be kept"):
        BatchQueue(torch.neg, core=core)
    monkeypatch.undo()
