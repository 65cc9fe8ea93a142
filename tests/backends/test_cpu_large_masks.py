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
