"""StreamPools and BatchQueues under many threads, each answer held to that of one thread alone.

Each function raises AssertionError where an answer or an account is wrong. Equal bits need equal
thread counts, so on a CPU they are for processes of their own, which they leave with one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from orchard.attention.api import attention
from orchard.serving import StreamPool
from orchard.serving.batch_queue import BatchQueue
from orchard.serving.batch_runner import is_out_of_memory

_PATIENCE = 120.0
_TOO_MUCH = 2**60  # bytes


class _Started:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._future: Future[Any] = Future()
        self._thread = threading.Thread(target=self._work, args=(call,))
        self._thread.start()

    def _work(self, call: Callable[[], Any]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:  # raised again by who asks for the result
            self._future.set_exception(error)

    def result(self) -> Any:
        """What it gave, once its thread has ended."""
        self._thread.join(_PATIENCE)
        return self._future.result(0)


def _alone(call: Callable[[], Any]) -> Any:
    return _Started(call).result()


def _inputs(count: int, *shape: int, device: str) -> list[Tensor]:
    source = torch.Generator().manual_seed(count)
    return [torch.randn(*shape, generator=source).to(device) for _ in range(count)]


def _attend(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (4, 16)).transpose(1, 2)
    return attention(heads, heads, heads, causal=True)


def _solve(x: Tensor) -> Tensor:
    eye = torch.eye(24, device=x.device)
    solution: Tensor = torch.linalg.solve(x @ x.mT + 64 * eye, x)
    return solution


def _multiply(x: Tensor) -> Tensor:
    return x @ x.mT


def _stride(x: Tensor) -> Tensor:
    return x.mT[:, ::2] @ x[:, :, ::3]


def _functions(device: str) -> list[Callable[[Tensor], Tensor]]:
    """Linear algebra and layers of many kinds, of a [2, 24, 64] tensor."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    layers = (
        nn.Linear(64, 32),
        nn.Conv1d(24, 8, 5),
        nn.LayerNorm(64),
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
    )
    return [*(each.eval().to(device) for each in layers), _solve, _attend, _multiply, _stride]


@torch.no_grad()
def threads(device: str, count: int) -> None:
    """`count` threads, each with a function and an input of its own, three times."""
    torch.set_num_threads(1)
    functions = list(islice(cycle(_functions(device)), count))
    inputs = _inputs(count, 2, 24, 64, device=device)
    expected = [function(x) for function, x in zip(functions, inputs, strict=True)]
    together = threading.Barrier(count)
    with StreamPool(device) as pool:

        def work(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
            together.wait(_PATIENCE)
            with torch.no_grad(), pool.stream() as lane:
                answers = [function(x) for _ in range(3)]
                lane.synchronize()
            return answers

        found = [
            _Started(partial(work, function, x))
            for function, x in zip(functions, inputs, strict=True)
        ]
        for answer, future in zip(expected, found, strict=True):
            for each in future.result():
                assert torch.equal(each, answer), f"{each} for {answer}"
        assert pool.stats().leases == count, f"{pool.stats()}"


def every_lane(device: str, lanes: int, iterations: int) -> None:
    """As many threads as lanes; each keeps its own through all its blocks."""
    torch.set_num_threads(1)
    inputs = _inputs(lanes, 16, 16, device=device)
    expected = [_repeated(x, iterations) for x in inputs]
    together = threading.Barrier(lanes)
    with StreamPool(device, size=lanes, on_exhausted="raise") as pool:

        def work(x: Tensor) -> tuple[set[int], Tensor]:
            seen = set()
            for _ in range(iterations):
                with pool.stream() as lane:
                    seen.add(lane.index)
                    x = _repeated(x, 1)
                    lane.synchronize()
            together.wait(_PATIENCE)
            return seen, x

        found = [_Started(partial(work, x)) for x in inputs]
        used = []
        for answer, future in zip(expected, found, strict=True):
            seen, x = future.result()
            used += seen
            assert torch.equal(x, answer), f"{x} for {answer}"
        assert pool.stats().peak == lanes, f"{pool.stats()}"
    assert sorted(used) == list(range(1, lanes + 1)), f"lanes {used}"


def _repeated(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = torch.tanh(x @ x)
    return x


def in_turn(device: str, count: int) -> None:
    """Threads one after the other, all in the one lane there is."""
    torch.set_num_threads(1)
    with StreamPool(device, size=1, on_exhausted="raise") as pool:
        for x in _inputs(count, 8, 8, device=device):

            def work(x: Tensor = x) -> Tensor:
                with pool.stream() as lane:
                    assert lane.index == 1, f"lane {lane.index}"
                    answer = x @ x
                    lane.synchronize()
                    return answer

            assert torch.equal(_alone(work), x @ x)
        stats = pool.stats()
    assert stats.leases == count, f"{stats}"


def churn(device: str, count: int) -> None:
    """Short threads, two at a time, in two lanes, under a policy that would raise."""
    with StreamPool(device, size=2, on_exhausted="raise") as pool:

        def work(number: int, answers: list[int]) -> None:
            with pool.stream():
                answers.append(int(torch.tensor(number, device=device) * 2))

        def many(first: int) -> list[int]:
            answers: list[int] = []
            for number in range(first, count, 2):
                thread = threading.Thread(target=work, args=(number, answers))
                thread.start()
                thread.join()
            return answers

        both = [_Started(partial(many, first)) for first in (0, 1)]
        answers = sorted(answer for each in both for answer in each.result())
        stats = pool.stats()
    assert answers == list(range(0, 2 * count, 2)), "an answer is missing or wrong"
    assert (stats.leases, stats.exhausted) == (count, 0), f"{stats}"


def hand_over(device: str, count: int) -> None:
    """One lane makes tensors, another uses them: by event, without a wait of the whole device."""
    torch.set_num_threads(1)
    inputs = _inputs(count, 64, 64, device=device)
    expected = [(x @ x).sin() @ x for x in inputs]
    with StreamPool(device, size=2) as pool:

        def make(x: Tensor) -> Any:
            with pool.stream() as lane:
                return (x @ x).sin(), lane.record()

        def use(made: Tensor, event: Any, x: Tensor) -> Tensor:
            with pool.stream() as lane:
                lane.wait(event)
                lane.keep_alive(made)
                answer = made @ x
                lane.synchronize()
                return answer

        for x, answer in zip(inputs, expected, strict=True):
            made, event = _alone(partial(make, x))
            found = _alone(partial(use, made, event, x))
            assert torch.equal(found, answer)


def _fill(x: Tensor) -> Tensor:
    """Doubles; a negative number asks for more memory than there is."""
    if (x < 0).any():
        torch.empty(_TOO_MUCH, dtype=torch.uint8, device=x.device)
    return x * 2


def out_of_memory(device: str) -> None:
    """One of eight runs out of memory; the seven others have their answers, and later ones too."""
    requests = [torch.full((1, 4), float(n), device=device) for n in range(8)]
    requests[3] = -requests[3]
    with StreamPool(device, size=8) as pool:
        _check_seven([pool.submit(_fill, x) for x in requests], requests)
        _check_seven([pool.submit(_fill, x) for x in requests], requests)
    with BatchQueue(_fill, max_batch=8, max_delay=60.0) as queue:
        _check_seven([queue.submit(x) for x in requests], requests)
        assert torch.equal(
            queue.submit(torch.ones(8, 4, device=device)).result(_PATIENCE).cpu(),
            torch.full((8, 4), 2.0),
        )


def _check_seven(futures: Sequence[Future[Tensor]], requests: Sequence[Tensor]) -> None:
    for x, future in zip(requests, futures, strict=True):
        error = future.exception(_PATIENCE)
        if (x < 0).any():
            assert error is not None, "memory without end"
            assert is_out_of_memory(error), repr(error)
        else:
            assert torch.equal(future.result(), x * 2)
