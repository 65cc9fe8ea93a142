"""The call: layouts, ranks, outputs, autocast, explanation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import orchard
from orchard.attention import reference
from orchard.attention.memory import strides_following
from orchard.attention.problem import make_band
from orchard.attention.strides import axis_order
from orchard.testing.inputs import VIEWS, View, guarded
from orchard.testing.memory import peak_memory


def triple(*lead: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(*lead, n, d, dtype=dtype) for n, d in ((5, 8), (7, 8), (7, 6)))
    return query, key, value


@pytest.mark.layout
def test_bshd_is_a_view() -> None:
    """layout="bshd" computes the same as transposing, and returns [B, S, H, D] without a copy."""
    query, key, value = (t.transpose(1, 2).contiguous() for t in triple(2, 4))
    out, lse = orchard.attention(query, key, value, layout="bshd", return_lse=True)
    swapped = (t.transpose(1, 2) for t in (query, key, value))
    expected, expected_lse = orchard.attention(*swapped, return_lse=True)
    assert out.shape == (2, 5, 4, 6)
    assert out.is_contiguous()
    assert torch.equal(out, expected.transpose(1, 2))
    assert torch.equal(lse, expected_lse)
    assert lse.shape == (2, 4, 5)


@pytest.mark.layout
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_fewer_axes(layout: Any) -> None:
    """Three axes are one batch entry, two are one head; lse loses the same axes."""
    four = triple(1, 4)
    expected, expected_lse = orchard.attention(*four, causal=True, return_lse=True)
    three = tuple(t[0].transpose(0, 1) if layout == "bshd" else t[0] for t in four)
    out, lse = orchard.attention(*three, causal=True, layout=layout, return_lse=True)
    if layout == "bshd":
        out = out.transpose(0, 1)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected_lse[0])

    one = tuple(t[:, :1] for t in four)
    expected, expected_lse = orchard.attention(*one, return_lse=True)
    out, lse = orchard.attention(*(t[0, 0] for t in one), layout=layout, return_lse=True)
    assert torch.equal(out, expected[0, 0])
    assert torch.equal(lse, expected_lse[0, 0])


def test_masks_of_every_rank() -> None:
    """A mask of fewer axes is aligned at the last one, as torch broadcasts."""
    query, key, value = triple(2, 4)
    for shape in ((), (7,), (5, 7), (1, 7), (4, 1, 7), (2, 1, 1, 7), (2, 4, 5, 1)):
        mask = torch.randn(shape)
        out = orchard.attention(query, key, value, mask=mask)
        full = mask.expand(2, 4, 5, 7).contiguous()
        assert torch.equal(out, orchard.attention(query, key, value, mask=full))


@pytest.mark.layout
@pytest.mark.parametrize("backend", ["reference", "aten", "cpu"])
def test_output_lies_in_memory_as_query_does(backend: str) -> None:
    """A [B, S, H, D] model reads its output back without a copy."""
    query, key, value = (torch.randn(2, n, 4, 8).transpose(1, 2) for n in (5, 7, 7))
    out = orchard.attention(query, key, value, backend=backend)
    assert out.transpose(1, 2).is_contiguous()
    out = orchard.attention(*(t.contiguous() for t in (query, key, value)), backend=backend)
    assert out.is_contiguous()


@pytest.mark.layout
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_memory_order(view: View) -> None:
    """Outputs are dense, in the order of the axes of what they follow."""
    tensor = guarded((3, 4, 5, 6), view).tensor
    strides = strides_following(tensor, (3, 4, 5, 2))
    dense = torch.empty_strided((3, 4, 5, 2), strides)
    assert dense.permute(sorted(range(4), key=lambda axis: -strides[axis])).is_contiguous()
    if not view.expanded and not view.overlapping:
        assert axis_order(tensor.shape, tensor.stride()) == list(view.order)


def test_lse_is_fp32_and_natural() -> None:
    """lse is the natural logarithm of the sum of exponentials of the scores."""
    query, key, value = triple(2, 4, dtype=torch.bfloat16)
    _, lse = orchard.attention(query, key, value, scale=1.0, return_lse=True)
    assert lse.dtype == torch.float32
    exact = torch.logsumexp(query.double() @ key.double().mT, -1)
    again = orchard.attention(
        query.double(), key.double(), value.double(), scale=1.0, return_lse=True
    )[1]
    assert again.dtype == torch.float64
    torch.testing.assert_close(again, exact, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("left", "right", "bottom_right", "rows", "keys", "band"),
    [
        (-1, -1, False, 5, 9, None),
        (-1, 0, False, 5, 9, (None, 0)),
        (-1, 0, True, 5, 9, (None, 4)),
        (-1, 0, True, 1, 9, None),
        (-1, 0, False, 5, 1, None),
        (4, -1, False, 5, 9, None),
        (3, -1, False, 5, 9, (-3, None)),
        (2, 0, True, 9, 5, (-6, -4)),
        (100, 100, False, 5, 9, None),
    ],
)
def test_bands_are_normalised(
    left: int, right: int, bottom_right: bool, rows: int, keys: int, band: Any
) -> None:
    """Bounds that exclude nothing vanish, so equal problems share a plan."""
    assert make_band(left, right, bottom_right, rows, keys) == band


def test_band_normalisation_excludes_nothing() -> None:
    """A normalised band sees exactly the keys that its window and diagonal describe."""
    for rows, keys in ((1, 1), (1, 6), (6, 1), (4, 7), (7, 4)):
        i, j = torch.arange(rows)[:, None], torch.arange(keys)
        for left in (-1, 0, 1, 3, 9):
            for right in (-1, 0, 2, 9):
                for bottom_right in (False, True):
                    diagonal = keys - rows if bottom_right else 0
                    seen = torch.ones(rows, keys, dtype=torch.bool)
                    if left >= 0:
                        seen &= j >= i + diagonal - left
                    if right >= 0:
                        seen &= j <= i + diagonal + right
                    band = make_band(left, right, bottom_right, rows, keys)
                    low, high = band or (None, None)
                    kept = torch.ones(rows, keys, dtype=torch.bool)
                    if low is not None:
                        kept &= j - i >= low
                    if high is not None:
                        kept &= j - i <= high
                    assert torch.equal(seen, kept)


@pytest.mark.dtype
def test_autocast_is_torchs() -> None:
    """Under autocast the operands, and a floating mask, are cast as torch casts its own."""
    query, key, value = triple(2, 4)
    value = torch.randn(2, 4, 7, 8)
    mask = torch.randn(5, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = orchard.attention(query, key, value, mask=mask)
        theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
        double = orchard.attention(query.double(), key.double(), value.double())
    low = (t.bfloat16() for t in (query, key, value))
    assert mine.dtype == theirs.dtype == torch.bfloat16
    assert double.dtype == torch.float64
    assert torch.equal(mine, orchard.attention(*low, mask=mask.bfloat16()))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_autocast_ends_with_the_operands(backend: str) -> None:
    """What is computed from them has the bits that it has without autocast."""
    given = [torch.randn(1, 2, 24, 16).bfloat16().requires_grad_() for _ in range(3)]
    grad_out, grad_lse = torch.randn(1, 2, 24, 16).bfloat16(), torch.randn(1, 2, 24)

    def solve() -> list[Tensor]:
        out, lse = orchard.attention(*given, softcap=3.0, return_lse=True, backend=backend)
        return [out, lse, *torch.autograd.grad((out, lse), given, (grad_out, grad_lse))]

    expected = solve()
    with torch.autocast("cpu", torch.bfloat16):
        found = solve()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_autocast_of_an_apple_gpu_is_seen() -> None:
    with FakeTensorMode():
        query = torch.empty(1, 2, 8, 16, device="mps")
        with torch.autocast("mps", torch.float16):
            assert orchard.attention(query, query, query).dtype == torch.float16


@pytest.mark.grad
def test_autocast_gradients_reach_the_fp32_leaves() -> None:
    """Parameters keep their dtype and get gradients in it."""
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = orchard.attention(query, query, query)
    out.float().sum().backward()
    assert query.grad is not None
    assert query.grad.dtype == torch.float32


@pytest.mark.grad
def test_gradients_only_where_wanted() -> None:
    """Operands that need no gradient get none, and no graph is made under no_grad."""
    query, key, value = triple(2, 4)
    query.requires_grad_()
    out = orchard.attention(query, key, value)
    out.sum().backward()
    assert query.grad is not None
    assert key.grad is None
    with torch.no_grad():
        assert not orchard.attention(query, key, value).requires_grad
    with torch.inference_mode():
        assert orchard.attention(query, key, value).is_inference()


@pytest.mark.grad
def test_unused_outputs() -> None:
    """A gradient through lse alone, or through nothing, is handled."""
    query, key, value = (t.double().requires_grad_() for t in triple(1, 2))
    _, lse = orchard.attention(query, key, value, return_lse=True)
    by_query, by_value = torch.autograd.grad(lse.sum(), [query, value])
    weights = torch.softmax(query @ key.mT / 8**0.5, -1)
    torch.testing.assert_close(by_query, weights @ key / 8**0.5, atol=1e-10, rtol=0)
    assert not bool(by_value.any())


@pytest.mark.grad
def test_gradients_match_their_operands() -> None:
    """Gradients have the dtype and memory order of what they belong to."""
    query, key, value = (
        torch.randn(2, n, 4, 8, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for n in (5, 7, 7)
    )
    mask = torch.randn(7, 5).T.requires_grad_()
    out = orchard.attention(query, key, value, mask=mask)
    leaves = (query, key, value, mask)
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.dtype == leaf.dtype
        assert grad.stride() == leaf.stride()


def test_explain_computes_nothing() -> None:
    """explain() returns the plan, leaves the counters alone and draws no random number."""
    query, key, value = (t.requires_grad_() for t in triple(2, 4))
    state = torch.get_rng_state()
    plan = orchard.explain(query, key, value, dropout_p=0.5, causal=True)
    assert plan.backend == "cpu"
    assert plan.backward is not None
    assert plan.backward.problem.stage == "backward"
    assert [reason.code for reason in plan.why_not("aten")] == ["value_dim", "dropout"]
    assert orchard.stats()["calls"] == {}
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.stress
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_scores_are_never_whole(dropout_p: float) -> None:
    """The reference needs a few chunks beside its output, far below the full score matrix."""
    query = torch.randn(1, 2, 4000, 4, dtype=torch.bfloat16)
    key = torch.randn(1, 2, 20_000, 4, dtype=torch.bfloat16)

    def call() -> None:
        orchard.attention(query, key, key, dropout_p=dropout_p, backend="reference")

    peak = peak_memory(call, torch.device("cpu"))
    assert peak is not None
    assert peak < 12 * reference.CPU_CHUNK_BYTES
    assert 12 * (12 * reference.CPU_CHUNK_BYTES) < 2 * 4000 * 20_000 * 4
