"""A small character-level GPT written as model code usually is, and its training step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SPREAD = 0.05  # of the initial weights
TEMPERATURE = 0.5  # of drawing characters; below 1 the likely ones are drawn more often


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of the batches it is trained on."""

    vocabulary: int
    context: int = 128
    width: int = 128
    heads: int = 4
    layers: int = 2
    dropout: float = 0.1
    batch: int = 16


class Rotation(nn.Module):
    """Turns pairs of the elements of [B, S, H, D] by angles that grow with the position."""

    sine: Tensor  # [context, 1, D / 2]
    cosine: Tensor

    def __init__(self, context: int, dim: int) -> None:
        super().__init__()
        rates = 1000.0 ** -torch.linspace(0, 1, dim // 2)
        angles = torch.arange(context)[:, None, None] * rates
        self.register_buffer("sine", angles.sin())
        self.register_buffer("cosine", angles.cos())

    def forward(self, x: Tensor) -> Tensor:
        sine, cosine = self.sine[: x.shape[1]], self.cosine[: x.shape[1]]
        one, other = x.chunk(2, dim=-1)
        return torch.cat([one * cosine - other * sine, one * sine + other * cosine], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with dropout, through torch's own call."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.rotation = Rotation(shape.context, shape.width // shape.heads)
        self.packed = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as [B, H, S, D] views of what is [B, S, H, D] in memory."""
        query, key, value = self.packed(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key = self.rotation(query), self.rotation(key)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*self.project(x), dropout_p=dropout, is_causal=True)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a normalisation and around a skip."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.before_mlp = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        out: Tensor = x + self.mlp(self.before_mlp(x))
        return out


class MiniGPT(nn.Module):
    """Logits of the next character at every position."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.characters = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.logits = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_initialise)

    def first_operands(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the first attention call on these tokens."""
        block = cast("Block", self.blocks[0])
        return block.attention.project(block.before_attention(self.characters(tokens)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.characters(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.logits(self.norm(x))
        return out


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_SPREAD)


class Text:
    """A text as numbers, its last tenth held out."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        tokens = self.encode(text)
        split = len(text) * 9 // 10
        self.training, self.held_out = tokens[:split], tokens[split:]

    def encode(self, text: str) -> Tensor:
        number = {character: n for n, character in enumerate(self.alphabet)}
        return torch.tensor([number[character] for character in text])

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.alphabet[token] for token in tokens.tolist())


def windows(tokens: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    """A batch of random places in `tokens`, each one longer than the context: [B, S + 1]."""
    starts = torch.randint(len(tokens) - shape.context, (shape.batch,), generator=generator)
    return tokens[starts[:, None] + torch.arange(shape.context + 1)]


def batches(tokens: Tensor, shape: Shape, number: int, seed: int) -> Iterator[Tensor]:
    """The same `number` of batches for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        yield windows(tokens, shape, generator)


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross entropy of every character after the first of each window, in nats: [B, S]."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")


class Trainer:
    """A model with its optimiser; the rate rises for some steps, then falls to 0 at the last."""

    def __init__(self, model: MiniGPT, steps: int) -> None:
        self.model = model
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        warm_up = max(1, steps // 15)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda done: min((done + 1) / warm_up, 1 - done / steps)
        )

    def step(self, batch: Tensor) -> float:
        """One update; the loss before it. Leaves no gradients behind."""
        self.model.train()
        loss = losses(self.model, batch).mean()
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.schedule.step()
        return loss.item()

    def evaluate(self, batch: Tensor) -> float:
        """The loss without dropout."""
        self.model.eval()
        with torch.no_grad():
            return losses(self.model, batch).mean().item()


def generate(model: MiniGPT, start: Tensor, length: int, seed: int) -> Tensor:
    """`start`, [S], continued by `length` characters drawn from the model."""
    generator = torch.Generator().manual_seed(seed)
    tokens = start.cpu()
    model.eval()
    with torch.no_grad():
        for _ in range(length):
            context = tokens[-model.shape.context :].to(start.device)
            odds = (model(context[None])[0, -1] / TEMPERATURE).softmax(-1).cpu()
            tokens = torch.cat([tokens, torch.multinomial(odds, 1, generator=generator)])
    return tokens
