"""Eight client threads, one model: each thread computes in a lane of its own."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

import orchard
from orchard import StreamPool


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.project(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = packed.unbind(2)
        out = orchard.attention(query, key, value, layout="bshd", causal=True)
        return x + self.merge(out.flatten(2))


def request(seed: int, device: torch.device) -> Tensor:
    return torch.randn(1, 48, 64, generator=torch.Generator().manual_seed(seed)).to(device)


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the clients are the parallelism; equal counts give equal bits
    answers: dict[int, Tensor] = {}

    with StreamPool() as pool:
        model = Block(width=64, heads=4).eval().to(pool.device)

        @torch.inference_mode()
        def client(number: int) -> None:
            for seed in range(number, 64, 8):
                with pool.stream() as lane:
                    answer = model(request(seed, pool.device))
                    lane.synchronize()  # this lane, not the device
                answers[seed] = answer

        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        # Or let the pool have the threads: inference_mode is carried over to them.
        futures = [pool.submit(model, request(seed, pool.device)) for seed in range(64)]
        for seed, future in enumerate(futures):
            assert torch.equal(future.result(), answers[seed])
        stats = pool.stats()

    right = sum(torch.equal(model(request(seed, pool.device)), answers[seed]) for seed in range(64))
    print(f"{right} of 64 answers are those of one thread alone")
    print(f"{stats.completed} of {stats.submitted} submitted, {stats.in_use} lanes in use")


if __name__ == "__main__":
    main()
