"""The drop-in for the training side's flash-attention function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import orchard
from orchard.attention.ops import Settings
from orchard.attention.problem import Tensors, Upstream
from orchard.errors import ArgumentTypeError
from orchard.integrations.flash_attn_function import (
    FlashAttnFunction,
    flash_attn,
    is_metal_flash_attn_available,
)
from orchard.testing.budget import Results, judge

pytestmark = pytest.mark.integration


def operands(**options: torch.dtype) -> list[Tensor]:
    shapes = (2, 4, 13, 12), (2, 2, 29, 12), (2, 2, 29, 20)
    return [torch.randn(shape, **options) for shape in shapes]


@pytest.mark.errors
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_what_is_no_tensor(dropout_p: float, name: str) -> None:
    given = dict(zip("qkv", operands(), strict=True)) | {name: None}
    with pytest.raises(ArgumentTypeError, match=f"^{name} is None; it must be a torch.Tensor"):
        flash_attn(**given, scale=0.3, dropout_p=dropout_p)


@pytest.mark.grad
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_true_gradients(dropout_p: float, causal: bool) -> None:
    """Output and gradients are attention's, with dropout on the probabilities."""
    leaves = [t.requires_grad_() for t in operands()]
    out, mask = FlashAttnFunction.apply(*leaves, 0.3, dropout_p, causal)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, upstream)
    settings = Settings(0.3, 0.0, dropout_p, -1, 0 if causal else -1, False, "auto")
    tensors = Tensors(*(leaf.detach() for leaf in leaves), None, mask.seed)
    results = Results(out.detach(), None, *grads)
    options = settings.options(*tensors[:2])
    for comparison in judge(results, tensors, options, Upstream(upstream, None)):
        assert comparison.ok, comparison


@pytest.mark.dropout
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_the_mask_is_the_one_that_was_used(rank: int) -> None:
    """With it, dropout done by hand gives the output in fp64."""
    query, key, value = (
        torch.randn(2, 4, n, 8, dtype=torch.float64)[(0,) * (4 - rank)] for n in (7, 11, 11)
    )
    out, lazy = flash_attn(query, key, value, 0.5, 0.25)
    mask = lazy.tensor()
    assert mask.dtype == torch.bool
    assert mask.shape == lazy.shape == (2 if rank == 4 else 1, 1 if rank == 2 else 4, 7, 11)
    assert lazy.nbytes == mask.numel()
    assert 0 < mask.sum() < mask.numel()
    kept = torch.softmax(0.5 * query @ key.transpose(-2, -1), -1) * mask[(0,) * (4 - rank)] / 0.75
    torch.testing.assert_close(out, kept @ value, atol=1e-10, rtol=0)


@pytest.mark.dropout
def test_reproduced_by_the_seed() -> None:
    """torch.manual_seed gives the same mask again; two calls have different ones."""
    given = operands()
    torch.manual_seed(3)
    first, mask = flash_attn(*given, 0.3, 0.5)
    _, other = flash_attn(*given, 0.3, 0.5)
    torch.manual_seed(3)
    again, same = flash_attn(*given, 0.3, 0.5)
    assert torch.equal(first, again)
    assert torch.equal(mask.tensor(), same.tensor())
    assert not torch.equal(mask.tensor(), other.tensor())


def test_without_dropout() -> None:
    """Everything is kept, nothing is drawn, and nothing is held for the mask."""
    before = torch.get_rng_state()
    _, mask = flash_attn(*operands_of_state(), 0.3)
    assert mask.seed is None
    assert mask.tensor().all()
    assert torch.equal(torch.get_rng_state(), before)


def operands_of_state() -> list[Tensor]:
    """Operands that leave torch's generator alone."""
    source = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 5, 8, generator=source) for _ in range(3)]


@pytest.mark.errors
def test_wrong_probability() -> None:
    """dropout_p is in [0, 1), as it was there."""
    for wrong in (1.0, -0.1):
        with pytest.raises(ValueError, match="dropout_p is"):
            flash_attn(*operands(), 0.3, wrong)


def test_availability_is_proved() -> None:
    """Metal is there when its kernels have run."""
    metal = [entry for entry in orchard.backends() if entry.backend == "metal"]
    assert is_metal_flash_attn_available() == any(entry.available for entry in metal)
