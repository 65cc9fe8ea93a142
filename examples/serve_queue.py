"""Eight clients send single sequences of different lengths; one model answers them in batches."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

import orchard
from orchard import BatchQueue

CLIENTS, REQUESTS, WIDTH, HEADS = 8, 25, 32, 4


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        packed = self.project(x).unflatten(-1, (3, HEADS, -1))
        query, key, value = packed.unbind(2)
        out = orchard.attention(query, key, value, layout="bshd", mask=mask[:, None, None])
        return out.flatten(2)


def main() -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    worst = [0.0] * CLIENTS

    with BatchQueue(model, collate="pad", max_batch=16) as queue:

        def client(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            for _ in range(REQUESTS):
                length = int(torch.randint(1, 40, (), generator=generator))
                x = torch.randn(1, length, WIDTH, generator=generator)
                batched = queue.submit(x).result()
                with torch.no_grad():
                    alone = model(x, torch.ones(1, length, dtype=torch.bool))
                worst[number] = max(worst[number], float((batched - alone).abs().max()))

        threads = [threading.Thread(target=client, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = queue.stats()

    print(stats)
    print(f"{stats.completed} answers, the farthest {max(worst):.1e} from a call of its own")


if __name__ == "__main__":
    main()
