"""Arbitrary strided views: hypothesis looks for a layout that goes wrong."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import orchard
from orchard.attention.ops import Settings
from orchard.attention.problem import Tensors, Upstream
from orchard.testing.budget import Results, judge
from orchard.testing.inputs import Guarded, View, guarded
from orchard.testing.poison import poisoned

pytestmark = [pytest.mark.property, pytest.mark.layout]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
search = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@st.composite
def views(draw: st.DrawFn) -> View:
    """Any order of axes, steps, gaps, offset, expansion or overlap."""
    expanded = draw(st.sets(st.integers(0, 3), max_size=2))
    return View(
        "drawn",
        order=tuple(draw(st.permutations(range(4)))),
        step=tuple(draw(st.tuples(*[st.integers(1, 3)] * 4))),
        pad=tuple(draw(st.tuples(*[st.integers(0, 5)] * 4))),
        offset=draw(st.integers(0, 9)),
        expanded=tuple(expanded),
        overlapping=not expanded and draw(st.booleans()),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Guarded], dict[str, object]]:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    batch, rows, keys = draw(st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 20)))
    dim, value_dim = draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    if draw(st.booleans()):
        value_dim = dim
    dtype = draw(st.sampled_from(DTYPES))
    shapes = (
        (batch, kv_heads * group, rows, dim),
        (batch, kv_heads, keys, dim),
        (batch, kv_heads, keys, value_dim),
        (batch, kv_heads * group, rows, value_dim),
    )
    source = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    operands = [guarded(s, draw(views()), dtype=dtype, generator=source) for s in shapes]
    options: dict[str, object] = {
        "causal": draw(st.sampled_from([False, True, "bottom_right"])),
        "window": draw(st.none() | st.tuples(st.integers(-1, 6), st.integers(-1, 6))),
        "softcap": draw(st.none() | st.floats(0.5, 5.0)),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.3])),
    }
    return operands, options


@search
@given(problems())
def test_any_view_is_right_and_untouched(
    problem: tuple[list[Guarded], dict[str, object]],
) -> None:
    """Forward and gradients within budget, inputs bit-identical, guards intact."""
    operands, chosen = problem
    query, key, value = (operand.tensor.requires_grad_() for operand in operands[:3])
    grad_out = operands[3].tensor
    seed_source = torch.Generator().manual_seed(1)
    with poisoned():
        out, lse = orchard.attention(
            query,
            key,
            value,
            return_lse=True,
            generator=seed_source,
            **chosen,  # type: ignore[call-overload]
        )
        grads = torch.autograd.grad(out, [query, key, value], grad_out)
    left, right = chosen["window"] or (-1, -1)  # type: ignore[misc]
    call = Settings(
        None,
        chosen["softcap"] or 0.0,  # type: ignore[arg-type]
        chosen["dropout_p"],  # type: ignore[arg-type]
        left,
        0 if chosen["causal"] else right,
        chosen["causal"] == "bottom_right",
        "auto",
    )
    from orchard.attention.dropout import draw_seed

    seed = draw_seed(torch.device("cpu"), torch.Generator().manual_seed(1))
    tensors = Tensors(query.detach(), key.detach(), value.detach(), None, seed)
    verdict = judge(
        Results(out.detach(), lse.detach(), *grads),
        tensors,
        call.options(query, key),
        Upstream(grad_out, None),
    )
    assert [str(item) for item in verdict if not item.ok] == []
    assert all(operand.intact() for operand in operands)
