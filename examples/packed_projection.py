"""A layer that attends over strided views of one packed projection, with dropout, and learns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import orchard


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # [B, S, 3, H, D]: the three operands are views, and the output comes back as [B, S, H, D].
        packed = self.project(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = packed.unbind(2)
        p = 0.1 if self.training else 0.0
        out = orchard.attention(query, key, value, layout="bshd", causal=True, dropout_p=p)
        return self.merge(out.flatten(2))


def main() -> None:
    torch.manual_seed(0)
    layer = SelfAttention(width=64, heads=4)
    optimiser = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x = torch.randn(8, 32, 64)
    target = x.cumsum(1) / torch.arange(1, 33)[:, None]  # the mean of what came before
    for step in range(41):
        loss = (layer(x) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 10 == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")
    print(orchard.stats()["calls"])
    for line in orchard.advice():  # nothing, where the first choice served every call
        print(line)


if __name__ == "__main__":
    main()
