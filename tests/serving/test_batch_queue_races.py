"""BatchQueue under load, in forked processes, at the end of the interpreter, and by chance."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchard.errors import DeadlineExceeded, QueueFull
from orchard.serving.batch_queue import BatchQueue
from orchard.serving.requests import AGEING
from orchard.testing.serving_load import ManualClock, RefusedError, answer, close_under_load
from orchard.testing.serving_programs import QUEUE_EXITS, QUEUE_FORKS, queue_program

PATIENCE = 60.0
needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="needs os.fork")


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(3))
def test_closed_at_a_random_moment(seed: int) -> None:
    """Every future has an outcome that its request can have, and the queue counts the same."""
    report = close_under_load(10, seed)
    assert report.results > 0
    assert report.closed > 0
    assert report.submitted + report.refused == 10 * 4 * 40


@pytest.mark.stress
@pytest.mark.parametrize("threads", [2, 16, 64])
def test_many_threads_get_their_own_rows(threads: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()).double().eval()
    wrong: list[str] = []
    with BatchQueue(model, workers=2, max_pending=8) as queue:
        begin = threading.Barrier(threads)

        def client(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            begin.wait(PATIENCE)
            for rows in (1, 3, 2, 1, 1):
                # Small integers: products and sums are exact in any order.
                x = torch.randint(-8, 8, (rows, 8), generator=generator).double()
                got = queue.submit(x).result(PATIENCE)
                if not torch.equal(got, exact(x)):
                    wrong.append(f"{x} gave {got}")

        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randint(-8, 8, parameter.shape))

        def exact(x: Tensor) -> Tensor:
            linear = model[0]
            return (x @ linear.weight.detach().T + linear.bias.detach()).clamp(min=0)

        workers = [threading.Thread(target=client, args=(n,)) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(PATIENCE)
            assert not worker.is_alive()
        stats = queue.stats()
    assert wrong == []
    assert stats.completed == 5 * threads
    assert stats.rows == 8 * threads


@dataclass(eq=False)
class Asked:
    x: Tensor
    priority: int
    arrival: float
    deadline: float | None
    future: Future[Any]


steps = st.one_of(
    st.tuples(
        st.just("submit"),
        st.integers(1, 3),  # rows
        st.integers(0, 1),  # kind
        st.booleans(),  # guilty
        st.integers(-3, 3),  # priority
        st.sampled_from([None, None, 0.05, 0.2, -1.0]),  # deadline
    ),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("advance"), st.sampled_from([0.03, 0.1])),
)


@pytest.mark.property
@settings(max_examples=150, deadline=None)
@given(
    plan=st.lists(steps, max_size=20),
    max_batch=st.integers(1, 5),
    max_pending=st.integers(1, 6),
    on_full=st.sampled_from(["raise", "drop-oldest"]),
)
def test_every_request_has_the_one_right_outcome(
    plan: list[tuple[Any, ...]], max_batch: int, max_pending: int, on_full: Any
) -> None:
    """Against a model in a few lines: nothing runs before the plan is done, so all is known."""
    clock = ManualClock()
    go, began = threading.Event(), threading.Event()
    order: list[float] = []

    def function(x: Tensor) -> Tensor:
        began.set()
        assert go.wait(PATIENCE)
        result = answer(x)
        order.extend(dict.fromkeys(x[:, 0].tolist()))
        return result

    now = 0.0
    line: list[Asked] = []  # what should be pending, in order of arrival
    expected: dict[Future[Any], Any] = {}
    asked: list[Asked] = []
    with (
        BatchQueue(
            function,
            max_batch=max_batch,
            max_delay=0.0,
            max_pending=max_pending,
            on_full=on_full,
            clock=clock,
        ) as queue,
        ExitStack() as at_the_end,
    ):
        at_the_end.callback(go.set)
        queue.submit(torch.zeros(1, 1))
        assert began.wait(PATIENCE)

        def expire() -> None:
            for each in [a for a in line if a.deadline is not None and a.deadline <= now]:
                line.remove(each)
                expected[each.future] = DeadlineExceeded
                assert isinstance(each.future.exception(PATIENCE), DeadlineExceeded)

        for step in plan:
            match step:
                case ("advance", seconds):
                    clock.advance(seconds)
                    now = clock.now()
                    expire()
                case ("cancel", n) if n < len(asked):
                    pending = asked[n] in line
                    assert asked[n].future.cancel() == (pending or asked[n].future.cancelled())
                    if pending:
                        line.remove(asked[n])
                        expected[asked[n].future] = "cancelled"
                case ("submit", rows, kind, guilty, priority, deadline):
                    number = float(len(asked) + 1)
                    x = torch.full((rows, 1 + kind), -number if guilty else number)
                    full = len(line) >= max_pending
                    if full and on_full == "raise":
                        with pytest.raises(QueueFull):
                            queue.submit(x, priority=priority, deadline=deadline)
                        continue
                    future = queue.submit(x, priority=priority, deadline=deadline)
                    moment = None if deadline is None else now + deadline
                    new = Asked(x, priority, now, moment, future)
                    asked.append(new)
                    line.append(new)
                    if full:
                        least = min(line, key=lambda a: a.priority)
                        line.remove(least)
                        expected[least.future] = QueueFull
                    expire()
        ranks = [(a.arrival - AGEING * a.priority, asked.index(a)) for a in line]
        for each in line:
            expected[each.future] = RefusedError if (each.x < 0).any() else answer(each.x)
        go.set()
        queue.flush()
        stats = queue.stats()
    for each in asked:
        want = expected[each.future]
        if isinstance(want, Tensor):
            assert torch.equal(each.future.result(0), want)
        elif want == "cancelled":
            assert each.future.cancelled()
        else:
            assert type(each.future.exception(0)) is want
    by_rank = [a for _, a in sorted(zip(ranks, line, strict=True), key=lambda pair: pair[0])]
    for kind in (1, 2):  # within a kind the order is that of the ranks
        innocent = [a.x[0, 0].item() for a in by_rank if a.x.size(1) == kind and a.x[0, 0] > 0]
        assert [value for value in order if value in innocent] == innocent
    outcomes = stats.completed + stats.failed + stats.cancelled + stats.expired + stats.dropped
    assert outcomes == stats.submitted == len(asked) + 1


def test_cancelling_races_with_running() -> None:
    """Whoever wins, the future says so, and the account agrees."""
    with BatchQueue(answer, max_delay=0) as queue:
        futures: list[Future[Any]] = []
        won = 0
        for n in range(300):
            future = queue.submit(torch.full((1, 1), float(n)))
            futures.append(future)
            won += future.cancel()
        done, not_done = wait(futures, PATIENCE)
        assert not not_done
        queue.flush()
        stats = queue.stats()
    assert sum(future.cancelled() for future in done) == won
    for n, future in enumerate(futures):
        if not future.cancelled():
            assert future.result().item() == 3 * n + 1
    assert (stats.cancelled, stats.completed) == (won, 300 - won)


def python(program: str) -> str:
    """What a fresh process prints; it must end by itself, with 0, and say nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@needs_fork
@pytest.mark.stress
@pytest.mark.parametrize("name", QUEUE_FORKS)
def test_fork(name: str) -> None:
    """The child's futures end with ForkedProcessError and no lock hangs it; the parent goes on."""
    body, printed = QUEUE_FORKS[name]
    assert python(queue_program(body)) == printed


@pytest.mark.stress
@pytest.mark.parametrize("name", QUEUE_EXITS)
def test_interpreter_exit_is_clean(name: str) -> None:
    """What runs is waited for, what never ran gets QueueClosed before the end, silently."""
    body, printed = QUEUE_EXITS[name]
    assert python(queue_program(body)) == printed
