"""The dropout bits: published answers, rates, and independence of how tensors are stored."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import orchard
from orchard.attention import reference
from orchard.attention.dropout import draw_seed, keep_mask, keep_scale, philox, random_bits
from orchard.attention.problem import Options, Tensors, drop_threshold
from orchard.testing.inputs import VIEWS, View, guarded

pytestmark = pytest.mark.dropout

# Known answers of Philox4x32-10 published with Random123 (kat_vectors): counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Philox4x32-10 gives the published words."""
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    k0, k1 = (torch.tensor(word) for word in key)
    words = philox((c0, c1, c2, c3), (k0, k1))
    assert tuple(int(word) for word in words) == expected


def philox_in_integers(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers, from its description."""
    x, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [
            (second >> 32) ^ x[1] ^ k[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ x[3] ^ k[1],
            first & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (1, 2, 5, 7), (1, 0, 6, 8), (0, 2, 3, 20)])
def test_bits_follow_the_definition(place: tuple[int, int, int, int]) -> None:
    """Probability (b, h, i, j) has half j % 2 of word (j % 8) // 2 of its counter's block."""
    b, h, i, j = place
    heads, rows, keys = 3, 7, 21
    seed = torch.tensor([-123456789, 987654321], dtype=torch.int32)
    planes = torch.arange(2 * heads).reshape(2, heads)
    bits = random_bits(seed, planes, torch.arange(rows), range(keys))
    assert bits.shape == (2, heads, rows, keys)
    key = [-123456789 % 2**32, 987654321]
    word = philox_in_integers([j // 8, i, b * heads + h, 0], key)[(j % 8) // 2]
    assert int(bits[place]) == (word >> 16 if j % 2 else word & 0xFFFF)


def test_bits_of_some_keys_are_those_of_all() -> None:
    """Bits of a range of keys do not depend on where the range begins."""
    seed = torch.tensor([1, 2], dtype=torch.int32)
    planes, rows = torch.arange(3), torch.arange(4)
    whole = random_bits(seed, planes, rows, range(50))
    for part in (range(8), range(3, 4), range(7, 33), range(16, 50), range(20, 20)):
        bits = random_bits(seed, planes, rows, part)
        assert torch.equal(bits, whole[..., part.start : part.stop])


def dropped(query: Tensor, key: Tensor, p: float, seed: int, **options: object) -> Tensor:
    """Which probabilities a call drops, read off its output with an identity as value."""
    keys = key.shape[-2]
    value = torch.eye(keys, dtype=query.dtype).expand(*key.shape[:-1], keys)
    out = orchard.attention(
        query,
        key,
        value,
        dropout_p=p,
        generator=torch.Generator().manual_seed(seed),
        **options,  # type: ignore[arg-type]
    )
    return out == 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_by_chi_square(p: float) -> None:
    """Counts of kept probabilities per row and per column are binomial (chi-square, 5 sigma)."""
    rows, keys = 512, 512
    seed = torch.tensor([11, 12], dtype=torch.int32)
    threshold = drop_threshold(p)
    planes = torch.arange(4)
    keep = keep_mask(seed, threshold, planes, torch.arange(rows), range(keys)).double()
    rate = 1 - threshold / 65536
    for axis, n in ((2, keys), (1, rows)):
        counts = keep.sum(axis).flatten()
        statistic = float(((counts - n * rate) ** 2 / (n * rate * (1 - rate))).sum())
        freedom = counts.numel()
        assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


def test_neighbouring_bits_are_independent() -> None:
    """Neighbours along keys, rows and heads agree as often as independent bits do (5 sigma)."""
    seed = torch.tensor([3, 4], dtype=torch.int32)
    keep = keep_mask(seed, 32768, torch.arange(8), torch.arange(256), range(256))
    for axis in range(3):
        size = keep.shape[axis]
        same = (keep.narrow(axis, 0, size - 1) == keep.narrow(axis, 1, size - 1)).double()
        assert abs(float(same.mean()) - 0.5) < 5 * 0.5 / math.sqrt(same.numel())


@pytest.mark.layout
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_same_bits_for_any_strides(view: View) -> None:
    """The dropped set depends on the seed and the place, not on how an operand is stored."""
    shape = (2, 3, 20, 8)
    expected = dropped(torch.randn(shape), torch.randn(2, 3, 30, 8), 0.4, 6)
    got = dropped(guarded(shape, view).tensor, guarded((2, 3, 30, 8), view).tensor, 0.4, 6)
    assert torch.equal(got, expected)
    assert 0.35 < float(expected.double().mean()) < 0.45


def test_same_bits_for_both_layouts_and_any_chunking() -> None:
    """Layout and chunk size leave the bits alone."""
    query, key = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 30, 8)
    seed = torch.tensor([1, 2], dtype=torch.int32)
    tensors = Tensors(query, key, torch.eye(30).expand(2, 2, 30, 30), None, seed)
    options = Options(0.3, threshold=20000)
    whole = reference.forward(tensors, options).out == 0
    for chunk_bytes in (1, 500, 3000, 50_000):
        part = reference.forward(tensors, options, chunk_bytes=chunk_bytes).out == 0
        assert torch.equal(part, whole)
    straight = dropped(query, key, 0.3, 8)
    value = torch.eye(30).expand(2, 2, 30, 30)
    bshd = orchard.attention(
        *(t.transpose(1, 2) for t in (query, key, value)),
        dropout_p=0.3,
        layout="bshd",
        generator=torch.Generator().manual_seed(8),
    )
    assert torch.equal(bshd.transpose(1, 2) == 0, straight)


def test_kept_values_are_scaled_by_the_exact_rate() -> None:
    """What is kept is divided by 1 - t/65536, so the mean output stays."""
    assert keep_scale(drop_threshold(0.25)) == 1 / 0.75
    value = torch.ones(1, 1, 4000, 1)
    query, key = torch.zeros(1, 1, 64, 1), torch.zeros(1, 1, 4000, 1)
    out = orchard.attention(query, key, value, dropout_p=0.3)
    deviation = math.sqrt(0.3 / 0.7 / 4000 / 64)
    assert abs(float(out.mean()) - 1) < 5 * deviation


@pytest.mark.parametrize(
    ("p", "threshold"),
    [(0.0, 0), (1e-9, 0), (0.5, 32768), (0.99999, 65535), (1 - 2**-53, 65535)],
)
def test_threshold(p: float, threshold: int) -> None:
    """t = round(65536 p), at most 65535."""
    assert drop_threshold(p) == threshold


def test_seed_comes_from_torch() -> None:
    """torch.manual_seed and a generator each reproduce a call; calls differ from one another."""
    query = torch.randn(1, 2, 16, 8)

    def call(generator: torch.Generator | None = None) -> Tensor:
        return orchard.attention(query, query, query, dropout_p=0.5, generator=generator)

    torch.manual_seed(5)
    first, second = call(), call()
    torch.manual_seed(5)
    assert torch.equal(call(), first)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    mine = call(torch.Generator().manual_seed(5))
    assert torch.equal(mine, call(torch.Generator().manual_seed(5)))
    assert torch.equal(torch.get_rng_state(), state)


def test_no_dropout_draws_nothing() -> None:
    """Without dropout, and with a rate that rounds to zero, torch's generator is not touched."""
    query = torch.randn(1, 2, 16, 8)
    state = torch.get_rng_state()
    plain = orchard.attention(query, query, query, dropout_p=0.0)
    assert torch.equal(orchard.attention(query, query, query, dropout_p=1e-9), plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_use_both_words() -> None:
    """Seeds are 64 bits: both words vary, and each changes the bits."""
    seeds = torch.stack([draw_seed(torch.device("cpu")) for _ in range(64)])
    assert seeds.dtype == torch.int32
    assert all(len(set(column.tolist())) > 60 for column in seeds.T)
    rows, planes = torch.arange(4), torch.arange(2)
    base = random_bits(torch.tensor([1, 2], dtype=torch.int32), planes, rows, range(16))
    for other in ([1, 3], [2, 2]):
        changed = random_bits(torch.tensor(other, dtype=torch.int32), planes, rows, range(16))
        assert not torch.equal(base, changed)


@pytest.mark.grad
def test_backward_replays_the_bits() -> None:
    """Gradients are those of the dropped function: value rows that no row kept get none."""
    query = torch.randn(1, 1, 3, 8)
    value = torch.eye(40)[None, None].requires_grad_()
    key = torch.randn(1, 1, 40, 8)
    out = orchard.attention(
        query, key, value, dropout_p=0.8, generator=torch.Generator().manual_seed(2)
    )
    (grad,) = torch.autograd.grad(out.sum(), value)
    kept = (out != 0).any(2)
    assert torch.equal(grad[0, 0, :, 0] != 0, kept[0, 0])
    assert bool(kept.any())
    assert not bool(kept.all())
