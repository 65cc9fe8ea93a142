"""Two replicas of one model on Ray Serve; each answers its requests in batches of its own."""

from __future__ import annotations

import asyncio

import ray
import torch
from ray import serve
from ray.serve.handle import DeploymentHandle
from torch import Tensor, nn

from orchard.serving.ray import asubmit, deployment

REQUESTS = 64


def make_model() -> nn.Module:
    """Called once in each replica: the same weights everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).double().eval()


async def ask(handle: DeploymentHandle, requests: list[Tensor]) -> list[Tensor]:
    return await asyncio.gather(*(asubmit(handle, x) for x in requests))


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    application = deployment(
        make_model,
        queue={"max_batch": 16, "max_delay": 0.01},  # as BatchQueue has them
        num_replicas=2,
        ray_actor_options={"num_cpus": 0.5},
    )
    handle = serve.run(application, route_prefix=None)
    requests = list(torch.randn(REQUESTS, 1, 16, dtype=torch.float64))
    answers = asyncio.run(ask(handle, requests))
    model = make_model()
    with torch.no_grad():
        worst = max(
            float((answer - model(x)).abs().max())
            for x, answer in zip(requests, answers, strict=True)
        )
    serve.shutdown()
    ray.shutdown()
    print(f"{len(answers)} answers, the farthest {worst:.0e} from a call of its own")


if __name__ == "__main__":
    main()
