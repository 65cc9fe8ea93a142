"""A drop-in for `flash_attn_function`: the same call, with true gradients and a replayable mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from orchard.attention.api import attention
from orchard.attention.dropout import draw_seed, keep_mask
from orchard.attention.problem import drop_threshold
from orchard.dispatch.report import backends
from orchard.errors import ArgumentTypeError


@dataclass(frozen=True)
class DropoutMask:
    """Which attention probabilities of a call were kept, computed only when asked for."""

    shape: torch.Size  # [B, H, Sq, Sk]
    device: torch.device
    dropout_p: float
    seed: Tensor | None  # the call's; None without dropout

    @property
    def nbytes(self) -> int:
        """Bytes that `tensor()` takes."""
        return self.shape.numel()

    def tensor(self) -> Tensor:
        """The mask in memory, bool [B, H, Sq, Sk]: True where a probability was kept."""
        batch, heads, rows, keys = self.shape
        if self.seed is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.device)
        planes = torch.arange(batch * heads, device=self.device).view(batch, heads)
        threshold = drop_threshold(self.dropout_p)
        rows_ = torch.arange(rows, device=self.device)
        return keep_mask(self.seed, threshold, planes, rows_, range(keys))


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    dropout_p: float = 0.0,
    causal: bool = False,
) -> tuple[Tensor, DropoutMask]:
    """Attention on [B, H, S, D] tensors, with dropout on the probabilities: (output, mask).

    Row i sees keys 0..i under `causal`. The seed comes from torch's generator of the CPU, so
    `torch.manual_seed` reproduces output and mask.
    """
    for name, operand in (("q", q), ("k", k), ("v", v)):
        if not isinstance(operand, Tensor):
            raise ArgumentTypeError(f"{name} is {operand!r}; it must be a torch.Tensor")
    start = int(torch.randint(2**63 - 1, ())) if dropout_p else 0
    out = attention(
        q,
        k,
        v,
        scale=scale,
        dropout_p=dropout_p,
        causal=causal,
        generator=Generator(q.device).manual_seed(start) if dropout_p else None,
    )
    seed = None
    if dropout_p and drop_threshold(dropout_p):
        seed = draw_seed(q.device, Generator(q.device).manual_seed(start))
    shape = torch.Size((*((1,) * (4 - q.ndim)), *q.shape[:-1], k.shape[-2]))
    return out, DropoutMask(shape, q.device, dropout_p, seed)


class FlashAttnFunction:
    """`FlashAttnFunction.apply`, as it is called where the earlier autograd function was."""

    apply = staticmethod(flash_attn)


def is_metal_flash_attn_available() -> bool:
    """Whether Orchard's Metal kernels run here."""
    return any(entry.backend == "metal" and entry.available for entry in backends())
