"""What is particular to torch's own operators."""

from __future__ import annotations

import pytest
import torch

import orchard
from orchard.testing.memory import peak_memory


@pytest.mark.mask
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_expanded_mask_stays_compact(kind: str) -> None:
    """A mask that torch expanded by stride 0 is converted once, not once per batch and head."""
    query = torch.randn(8, 16, 64, 8, dtype=torch.bfloat16)
    mask = torch.rand(1, 1, 64, 64) > 0.3 if kind == "bool" else torch.randn(1, 1, 64, 64).double()
    whole = mask.expand(8, 16, 64, 64)

    def call() -> None:
        orchard.attention(query, query, query, mask=whole, return_lse=True, backend="aten")

    peak = peak_memory(call, torch.device("cpu"))
    expected = orchard.attention(query, query, query, mask=mask, backend="aten")
    assert torch.equal(orchard.attention(query, query, query, mask=whole, backend="aten"), expected)
    assert peak is not None
    assert peak < whole.numel() * 2


@pytest.mark.mask
def test_empty_rows_under_mask_and_causal_together() -> None:
    """A row whose only open keys lie above the diagonal has lse -inf and output 0."""
    query = torch.randn(1, 2, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2, :3] = False  # row 2 sees keys 0..2 by causality
    out, lse = orchard.attention(
        query, query, query, mask=mask, causal=True, return_lse=True, backend="aten"
    )
    empty = torch.arange(6) == 2
    assert torch.equal(lse == -torch.inf, empty.expand(1, 2, 6))
    assert not bool(out[:, :, 2].any())


@pytest.mark.dispatch
def test_plans_on_devices_that_are_not_here() -> None:
    """Reasons are data, so they are given for a device that this machine does not have."""
    from orchard.backends.aten import AtenBackend

    backend = AtenBackend()
    query = torch.randn(1, 2, 8, 40, requires_grad=True)
    problem = orchard.explain(query, query, query).problem._replace(device=torch.device("mps"))
    _, reasons = backend.select(problem)
    assert {reason.code for reason in reasons} == {"lse", "head_dim"}


@pytest.mark.mask
@pytest.mark.dtype
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_mask_is_not_rounded(dtype: torch.dtype) -> None:
    """A mask of fp32 keeps its range and precision beside half operands."""
    query = torch.zeros(1, 2, 6, 8, dtype=dtype)
    value = torch.randn(1, 2, 6, 8, dtype=dtype)
    bias = -300 + torch.arange(6.0).expand(6, 6).clone()
    bias[3] = torch.finfo(torch.float32).min
    exact = torch.softmax(bias.double(), -1) @ value.double()
    yardstick = (torch.softmax(bias, -1).to(dtype) @ value).double()
    budget = 2 * (yardstick - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    for backend in ("cpu", "aten", "reference"):
        out = orchard.attention(query, query, value, mask=bias, backend=backend)
        assert float((out.double() - exact).abs().max()) <= float(budget)
