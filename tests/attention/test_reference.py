"""The definition, against torch's own attention in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import orchard
from orchard.attention import reference
from orchard.attention.dropout import draw_seed, keep_mask
from orchard.attention.problem import Band, Gradients, Options, Tensors, Upstream

pytestmark = [pytest.mark.grad]

LIMIT = 1e-10
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.37},
    "causal": {"causal": True},
    "bottom_right": {"causal": "bottom_right"},
    "window": {"window": (3, 2)},
    "window_causal": {"window": (4, -1), "causal": True},
    "softcap": {"softcap": 2.5},
    "softcap_window": {"softcap": 1.5, "window": (-1, 3)},
    "dropout": {"dropout_p": 0.3},
    "dropout_bottom_right": {"dropout_p": 0.5, "causal": "bottom_right"},
}
MASKS: dict[str, tuple[str, tuple[int, ...]] | None] = {
    "no_mask": None,
    "bool_full": ("bool", (2, 4, 7, 9)),
    "bool_keys": ("bool", (2, 1, 1, 9)),
    "additive_full": ("additive", (2, 4, 7, 9)),
    "additive_heads": ("additive", (4, 1, 9)),
    "additive_2d": ("additive", (7, 9)),
}


def textbook(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keep: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attention written anew with torch's softmax and logsumexp, for rows that see a key."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = options.get("scale", query.shape[-1] ** -0.5)
    scores = query @ key.mT * scale
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = (
            torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    rows, keys = scores.shape[-2:]
    shift = keys - rows if options.get("causal") == "bottom_right" else 0
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if options.get("causal"):
        seen &= torch.ones(rows, keys, dtype=torch.bool).tril(shift)
    left, right = options.get("window", (-1, -1))
    if left >= 0:
        seen &= torch.ones(rows, keys, dtype=torch.bool).triu(shift - left)
    if right >= 0:
        seen &= torch.ones(rows, keys, dtype=torch.bool).tril(shift + right)
    scores = torch.where(seen, scores, -torch.inf)
    return (torch.softmax(scores, -1) * keep) @ value, torch.logsumexp(scores, -1)


def operands() -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(3)
    shapes = ((2, 4, 7, 6), (2, 2, 9, 6), (2, 2, 9, 5))
    return tuple(  # type: ignore[return-value]
        torch.randn(s, dtype=torch.float64, generator=make).requires_grad_() for s in shapes
    )


def make_mask(kind: str, shape: tuple[int, ...]) -> Tensor:
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    if kind == "bool":
        open_ = values > -0.5
        open_[..., :2] = True  # every row sees a key, whatever the band
        open_[..., -2:] = True
        return open_
    return values.requires_grad_()


def kept(p: float, generator: torch.Generator) -> Tensor:
    """The dropout factor of the call that draws its seed from `generator`."""
    threshold = round(p * 65536)
    seed = draw_seed(torch.device("cpu"), generator)
    planes = torch.arange(8).reshape(2, 4)
    keep = keep_mask(seed, threshold, planes, torch.arange(7), range(9))
    return keep.double() / (1 - threshold / 65536)


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("option_name", OPTIONS)
def test_against_torch_in_fp64(option_name: str, mask_name: str) -> None:
    """Output, lse, gradients and second gradients equal torch's to 1e-10."""
    options, spec = OPTIONS[option_name], MASKS[mask_name]
    mask = make_mask(*spec) if spec else None
    inputs = [*operands(), *([mask] if mask is not None and mask.requires_grad else [])]
    p = options.get("dropout_p", 0.0)
    keep = kept(p, torch.Generator().manual_seed(1)) if p else torch.ones(())

    got = orchard.attention(
        *inputs[:3],
        mask=mask,
        return_lse=True,
        generator=torch.Generator().manual_seed(1),
        backend="reference",
        **options,
    )
    want = textbook(*inputs[:3], mask, keep, **options)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=LIMIT, rtol=0)

    upstream = [torch.randn_like(t).requires_grad_() for t in want]
    first = torch.autograd.grad(got, inputs, upstream, create_graph=True)
    first_torch = torch.autograd.grad(want, inputs, upstream, create_graph=True)
    for mine, theirs in zip(first, first_torch, strict=True):
        torch.testing.assert_close(mine, theirs, atol=LIMIT, rtol=0)

    along = [torch.randn_like(t) for t in first]
    by = [*inputs, *upstream]
    second = torch.autograd.grad(first, by, along, materialize_grads=True)
    second_torch = torch.autograd.grad(first_torch, by, along, materialize_grads=True)
    for mine, theirs in zip(second, second_torch, strict=True):
        torch.testing.assert_close(mine, theirs, atol=LIMIT, rtol=0)


def test_against_torchs_math_operator() -> None:
    """The textbook used here is itself torch's math attention, dropout mask included."""
    query, key, value = operands()
    keep = torch.rand(2, 4, 7, 9, dtype=torch.float64) > 0.3
    theirs, _ = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, None, 0.3, False, keep, enable_gqa=True
    )
    mine, _ = textbook(query, key, value, None, keep.double() / 0.7)
    torch.testing.assert_close(mine, theirs, atol=LIMIT, rtol=0)


def test_gradcheck() -> None:
    """Finite differences confirm both derivatives, through out and lse."""
    make = torch.Generator().manual_seed(5)
    inputs = [
        torch.randn(s, dtype=torch.float64, generator=make).requires_grad_()
        for s in ((1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 3), (2, 1, 4))
    ]

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return orchard.attention(
            query, key, value, mask=mask, causal="bottom_right", softcap=3.0, return_lse=True
        )

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_third_gradients() -> None:
    """Gradients of second gradients are right too, on paths through other functions as well."""
    query, key, value = operands()

    def third(call: Any) -> Tensor:
        out = call()
        (first,) = torch.autograd.grad(out.sin().sum(), query, create_graph=True)
        (second,) = torch.autograd.grad((first * query).sum(), query, create_graph=True)
        (result,) = torch.autograd.grad(second.square().sum() + query.exp().sum(), query)
        return result

    mine = third(lambda: orchard.attention(query, key, value, causal=True))
    theirs = third(lambda: textbook(query, key, value, None, torch.ones(()), causal=True)[0])
    torch.testing.assert_close(mine, theirs, atol=LIMIT, rtol=0)


CHUNK_LIMITS = (1, 600, 5_000, 10**9)


@pytest.mark.parametrize("band", [None, Band(-5, 3), Band(None, -3), Band(1, None), Band(9, 20)])
@pytest.mark.parametrize("limit", CHUNK_LIMITS)
def test_chunking_changes_nothing(
    limit: int, band: Band | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any chunk size gives the values, gradients and second gradients of the plain form."""
    query, key, value = (t.detach() for t in operands())
    mask = make_mask("additive", (4, 1, 9)).detach()[None]
    seed = torch.tensor([5, -9], dtype=torch.int32)
    tensors = Tensors(query, key, value, mask, seed)
    options = Options(0.4, 2.0, band, 9000)
    plain = reference.attend(tensors, options)
    upstream = Upstream(torch.randn_like(plain.out), torch.randn_like(plain.lse))

    def run(chunk_bytes: int) -> list[Tensor]:
        out, lse = reference.forward(tensors, options, chunk_bytes=chunk_bytes)
        grads = reference.backward(
            tensors, options, upstream, mask_grad=True, chunk_bytes=chunk_bytes
        )
        directions = Gradients(*(torch.ones_like(g) for g in grads if g is not None))
        by_upstream, by_tensors = reference.double_backward(
            tensors, options, upstream, directions, chunk_bytes=chunk_bytes
        )
        found = [out, lse, *grads, *by_upstream, *by_tensors]
        return [tensor for tensor in found if tensor is not None]

    whole = run(10**9)
    monkeypatch.setattr(reference, "BAND_ROWS", 2)
    assert len(whole) == 12
    torch.testing.assert_close(whole[0], plain.out, atol=LIMIT, rtol=0)
    for part, expected in zip(run(limit), whole, strict=True):
        torch.testing.assert_close(part, expected, atol=LIMIT, rtol=0)


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 5000, 5000), (64, 32, 16, 4096), (2, 3, 7, 100), (9, 2, 3000, 10), (1, 32, 3, 20000)],
    ids=str,
)
@pytest.mark.parametrize("group", [1, 2, 32])
def test_chunks_cover_the_output_once_within_the_limit(shape: tuple[int, ...], group: int) -> None:
    """Chunks tile [B, H, S] exactly and hold at most the limit of scores."""
    batch, kv_heads, rows, keys = shape
    heads = kv_heads * group
    query = torch.empty(batch, heads, rows, 1, device="meta")
    key = torch.empty(batch, kv_heads, keys, 1, device="meta")
    limit = 1_000_000
    seen = torch.zeros(batch, heads, rows, dtype=torch.int8)
    for chunk in reference.chunks(Tensors(query, key, key), Options(1.0), limit):
        kv_heads_here = {head // group for head in range(chunk.heads.start, chunk.heads.stop)}
        assert kv_heads_here == set(range(chunk.kv_heads.start, chunk.kv_heads.stop))
        part = seen[chunk.output]
        part += 1
        assert part.numel() * keys * 4 <= limit
    assert bool((seen == 1).all())
    assert max(reference.CPU_CHUNK_BYTES, reference.GPU_CHUNK_BYTES) <= 256 * 2**20


def test_bands_skip_what_no_row_sees() -> None:
    """Under a window the chunks hold about the scores inside it, not all of them."""
    query = torch.empty(1, 1, 4096, 1, device="meta")
    tensors = Tensors(query, query, query)
    counts = {
        band: sum(
            (chunk.rows.stop - chunk.rows.start) * (chunk.keys.stop - chunk.keys.start)
            for chunk in reference.chunks(tensors, Options(1.0, band=band))
        )
        for band in (None, Band(None, 0), Band(-64, 0))
    }
    assert counts[None] == 4096**2
    assert counts[Band(None, 0)] < 0.54 * 4096**2
    assert counts[Band(-64, 0)] < 0.08 * 4096**2


@pytest.mark.parametrize("backend", ["reference", "aten", "cpu"])
@pytest.mark.parametrize("hole", ["value", "grad_out"])
def test_empty_rows_are_zero_even_next_to_nan(hole: str, backend: str) -> None:
    """A row with nothing to attend to gives 0, -inf and zero gradients, whatever is around it."""
    query, key, value = (torch.randn(1, 1, n, 4).requires_grad_() for n in (3, 2, 2))
    mask = torch.ones(3, 2, dtype=torch.bool)
    mask[1] = False
    grad_out = torch.randn(1, 1, 3, 4)
    if hole == "value":
        mask[:] = False
        value = torch.full_like(value, torch.nan).requires_grad_()
    else:
        grad_out[:, :, 1] = torch.nan
    out, lse = orchard.attention(query, key, value, mask=mask, return_lse=True, backend=backend)
    empty = ~mask.any(1)
    assert torch.equal(out[0, 0, empty], torch.zeros_like(out[0, 0, empty]))
    assert torch.equal(lse[0, 0] == -torch.inf, empty)
    if hole == "value" and backend == "aten":
        return  # torch's backward multiplies NaN of value by probabilities of 0
    by_query, by_key, by_value = torch.autograd.grad(out, [query, key, value], grad_out)
    assert not bool(by_query[0, 0, empty].any())
    for grad in (by_query, by_key, by_value):
        assert bool(torch.isfinite(grad).all())


def test_nan_in_lse_of_an_empty_row_stays_there() -> None:
    """A gradient of NaN at the lse of an empty row reaches nothing."""
    query, key, value = (t.requires_grad_() for t in operands())
    mask = torch.ones(7, 9, dtype=torch.bool)
    mask[2] = False
    _, lse = orchard.attention(query, key, value, mask=mask, return_lse=True)
    grads = torch.autograd.grad(torch.where(lse.isinf(), 0.0, lse.square()).sum(), [query, key])
    assert all(bool(torch.isfinite(grad).all()) and bool(grad.any()) for grad in grads)


def test_combinations_are_distinct() -> None:
    """Each option changes the result, so that the matrix above compares different things."""
    query, key, value = (t.detach() for t in operands())
    outs = {
        name: orchard.attention(
            query, key, value, generator=torch.Generator().manual_seed(1), **options
        )
        for name, options in OPTIONS.items()
    }
    for (a, first), (b, second) in itertools.combinations(outs.items(), 2):
        assert not torch.allclose(first, second), (a, b)
