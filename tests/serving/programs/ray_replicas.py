"""Two replicas on a local Ray, one of which is killed while both hold requests.

Prints what came of it as one JSON object.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve
from torch import Tensor

from orchard.errors import DeadlineExceeded
from orchard.serving.ray import asubmit, deployment

REQUESTS = 60


def make_model(folder: Path) -> Callable[[Tensor], Tensor]:
    """Answers 3 x + 1 beside its process; a positive x waits until the gate is unlocked."""
    gate, diary = (folder / "gate").open(), (folder / "diary").open("w", buffering=1)

    def model(x: Tensor) -> Tensor:
        if (x < 0).any():
            raise ValueError("negative")
        if x.any():
            print(os.getpid(), file=diary)
            fcntl.flock(gate, fcntl.LOCK_SH)
        return torch.cat([3 * x + 1, torch.full_like(x, os.getpid())], dim=1)

    return model


async def both_at_work(diary: int) -> set[int]:
    """The processes of the replicas, as soon as each runs a batch."""
    said: set[int] = set()
    while len(said) < 2:
        words = await asyncio.to_thread(os.read, diary, 4096)
        said.update(map(int, words.split()))
    return said


async def ask(handle: Any, gate: int, diary: int) -> dict[str, Any]:
    requests = [torch.full((1, 1), float(n), dtype=torch.float64) for n in range(1, REQUESTS + 1)]
    asked = [asyncio.create_task(asubmit(handle, x)) for x in requests]
    running = await both_at_work(diary)
    killed = min(running)
    os.kill(killed, signal.SIGKILL)
    fcntl.flock(gate, fcntl.LOCK_UN)
    answers = await asyncio.gather(*asked)
    pairs = zip(requests, answers, strict=True)
    return {
        "right": sum(answer[0, 0].item() == 3 * x.item() + 1 for x, answer in pairs),
        "by_killed": sum(answer[0, 1].item() == killed for answer in answers),
        "by_living": sum(answer[0, 1].item() in running - {killed} for answer in answers),
        "errors": [await error_of(handle, -1.0, None), await error_of(handle, 0.0, -1.0)],
        "limit": (await handle.stats.remote()).limit,
    }


async def error_of(handle: Any, value: float, deadline: float | None) -> str:
    try:
        await asubmit(handle, torch.full((1, 1), value), deadline=deadline)
    except (ValueError, DeadlineExceeded) as error:
        return next(
            kind.__name__ for kind in (DeadlineExceeded, ValueError) if isinstance(error, kind)
        )
    return "none"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.mkfifo(folder / "diary")
        (folder / "gate").touch()
        diary = os.open(folder / "diary", os.O_RDWR)
        gate = os.open(folder / "gate", os.O_RDWR)
        fcntl.flock(gate, fcntl.LOCK_EX)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        application = deployment(
            lambda: make_model(folder),
            queue={"max_batch": 8},
            num_replicas=2,
            ray_actor_options={"num_cpus": 0.1},
        )
        handle = serve.run(application, route_prefix=None)
        found = asyncio.run(ask(handle, gate, diary))
        serve.shutdown()
        ray.shutdown()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
