"""Which probabilities are dropped: Philox4x32-10, the same bits on every backend.

Probability (b, h, i, j) has the 16-bit value u in half j % 2 (low first) of word (j % 8) // 2 of
Philox with key = the call's seed and counter (j // 8, i, b * Hq + h, 0). It is kept iff u >= t.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_seed(device: torch.device, generator: Generator | None = None) -> Tensor:
    """A call's 64-bit seed as two int32 words, low word first, on `device`."""
    return torch.randint(
        -(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=device, generator=generator
    )


def _multiply(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    # The product wraps to a signed 64-bit value; both halves are right after masking.
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10 on int64 tensors that hold 32-bit words; the four counters broadcast."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], x0)
        high1, low1 = _multiply(_MULTIPLIERS[1], x2)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return x0, x1, x2, x3


def random_bits(seed: Tensor, planes: Tensor, rows: Tensor, keys: range) -> Tensor:
    """The 16-bit values of every probability: [*planes.shape, rows, keys], int64.

    `planes` holds b * Hq + h and `rows` holds i, both int64.
    """
    words = seed.to(torch.int64) & _WORD
    groups = torch.arange(keys.start // 8, (keys.stop + 7) // 8, device=seed.device)
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    drawn = philox((groups, rows[:, None], planes[..., None, None], zero), (words[0], words[1]))
    halves = [half for word in drawn for half in (word & 0xFFFF, word >> 16)]
    bits = torch.stack(torch.broadcast_tensors(*halves), dim=-1).flatten(-2)
    return bits.narrow(-1, keys.start % 8, len(keys))


def keep_mask(seed: Tensor, threshold: int, planes: Tensor, rows: Tensor, keys: range) -> Tensor:
    """True where a probability survives dropout: [*planes.shape, rows, keys]."""
    return random_bits(seed, planes, rows, keys) >= threshold


def keep_scale(threshold: int) -> float:
    """What a kept probability is multiplied by, so that the mean stays."""
    return 65536.0 / (65536 - threshold)
