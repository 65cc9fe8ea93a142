"""What a call costs the GPU alone, and what it costs the host alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from orchard.testing.benchmark import Step, sampler

RECORDED_CALLS = 20  # of a graph; its own launch is shared among them
QUEUED_CALLS = 50  # few enough that no queue of the driver fills up


def replayed(step: Step, device: torch.device, known: float = 0.0) -> Callable[[], float]:
    """Samples of the GPU's time: calls recorded in a CUDA graph, which is played again."""
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(2):
            step()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RECORDED_CALLS):
            step()
    sample = sampler(graph.replay, device)
    return lambda: sample() / RECORDED_CALLS


def enqueued(step: Step, device: torch.device, known: float = 0.0) -> Callable[[], float]:
    """Samples of the host's time: from the call until it returns, while the GPU is at work."""
    for _ in range(QUEUED_CALLS):
        step()
    return partial(_enqueue, step, device)


def _enqueue(step: Step, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(QUEUED_CALLS):
        step()
    took = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return took / QUEUED_CALLS
