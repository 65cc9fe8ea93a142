"""Rows whose every score is a large number, as padding that is masked by a finite one."""

from __future__ import annotations

import pytest
import torch

import orchard
from orchard.attention.problem import Options, Tensors, Upstream
from orchard.testing.budget import Results, judge

pytestmark = [pytest.mark.mask, pytest.mark.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys", [50, 1500])
@pytest.mark.parametrize(
    ("hidden", "heads"), [(torch.finfo(torch.float32).min, 2), (-1e9, 2), (-1e4, 1), (200.0, 2)]
)
def test_large_masks_keep_their_gradients(
    isa: str, hidden: float, heads: int, keys: int, dtype: torch.dtype
) -> None:
    """lse has no digits left for such a row: its probabilities come from somewhere else."""
    source = torch.Generator().manual_seed(0)
    shapes = ((1, 2, 6, 24), (1, heads, keys, 24), (1, heads, keys, 24), (1, 2, 6, 24))
    query, key, value, grad_out = (
        torch.randn(shape, generator=source).to(dtype) for shape in shapes
    )
    mask = torch.zeros(6, keys)
    mask[2] = mask[5] = hidden
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    out, lse = orchard.attention(*leaves, mask=mask, return_lse=True, backend="cpu")
    grads = torch.autograd.grad(out, leaves, grad_out)
    found = judge(
        Results(out.detach(), lse.detach(), *grads),
        Tensors(query, key, value, mask[None, None]),
        Options(24**-0.5),
        Upstream(grad_out, None),
    )
    assert [str(comparison) for comparison in found if not comparison.ok] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("scale", [-50.0, 1e4, 1e8])
def test_large_scores_keep_their_gradients(
    isa: str, scale: float, rows: int, causal: bool, dtype: torch.dtype
) -> None:
    """The last bits of such a score decide, so forward and backward have to see the same one."""
    source = torch.Generator().manual_seed(0)
    shapes = ((1, 4, rows, 40), (1, 2, 90, 40), (1, 2, 90, 24), (1, 4, rows, 24))
    query, key, value, grad_out = (
        torch.randn(shape, generator=source).to(dtype) for shape in shapes
    )
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    out, lse = orchard.attention(
        *leaves, scale=scale, causal=causal, return_lse=True, backend="cpu"
    )
    grads = torch.autograd.grad(out, leaves, grad_out)
    found = judge(
        Results(out.detach(), lse.detach(), *grads),
        Tensors(query, key, value),
        Options(scale, band=(None, 0) if causal else None),
        Upstream(grad_out, None),
    )
    assert [str(one) for one in found if one.name.startswith("grad") and not one.ok] == []
