"""Same inputs, same bits: for any number of threads, and whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from programs.problems import differences, exercise

from orchard.testing.budget import Results
from orchard.testing.conformance import Case

pytestmark = pytest.mark.grad

BASE = Case("full", "shape", batch=2, heads=4, kv_heads=2, rows=200, keys=330, dim=64, value_dim=64)
DECODE = replace(BASE, name="one row, 3000 keys", rows=1, keys=3000)
CASES = (
    BASE,
    replace(BASE, name="causal, bf16", dtype=torch.bfloat16, causal=True),
    replace(BASE, name="window, softcap, fp16", dtype=torch.float16, window=(90, 7), softcap=5.0),
    replace(BASE, name="bottom-right with empty rows", rows=300, keys=100, causal="bottom_right"),
    replace(BASE, name="value dimension, lse gradient", dim=40, value_dim=200, lse_grad=True),
    replace(BASE, name="bool mask, bf16", dtype=torch.bfloat16, mask="bool", mask_axes="bhqk"),
    replace(BASE, name="strided, few heads", batch=1, heads=1, kv_heads=1, views=("bshd",) * 3),
    DECODE,
    replace(DECODE, name="one row, 3000 keys, bf16", dtype=torch.bfloat16, dim=128),
    replace(DECODE, name="three rows, 1 of 6 heads, fp16", dtype=torch.float16, rows=3, heads=6),
)
WHOLE = (  # what has to be solved in one piece
    replace(BASE, name="dropout, bf16", dtype=torch.bfloat16, dropout_p=0.3),
    replace(DECODE, name="one row, dropout", dropout_p=0.3),
    *(
        replace(
            BASE,
            name=f"gradient of a mask over {axes or 'nothing'}",
            mask="additive",
            mask_axes=axes,
            mask_grad=True,
        )
        for axes in ("bhqk", "qk", "bk", "hq", "")
    ),
)


@pytest.mark.parametrize("case", [*CASES, *WHOLE], ids=lambda case: case.name)
def test_any_number_of_threads(case: Case, isa: str, torch_threads: None) -> None:
    """Outputs, lse and every gradient, the mask's too."""
    problem = exercise(case)
    torch.set_num_threads(1)
    alone = problem.solve()
    assert problem.complaints(alone) == []
    for number in (1, 2, 3, 8, 8, 2):
        torch.set_num_threads(number)
        assert differences(problem.solve(), alone) == [], f"with {number} threads"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whatever_else_is_in_the_batch(case: Case, isa: str) -> None:
    """A batch entry, and in it a group of heads, by itself: the bits it has among the others."""
    problem = exercise(case)
    whole = problem.solve()
    share = case.heads // case.kv_heads
    for b in range(case.batch):
        entry = slice(b, b + 1)
        for groups in (slice(0, case.kv_heads), *(slice(g, g + 1) for g in range(case.kv_heads))):
            heads = slice(groups.start * share, groups.stop * share)
            by_query = entry, heads
            by_key = entry, groups
            cuts = (by_query, by_query, by_query, by_key, by_key)
            among = Results(*(found[cut] for found, cut in zip(whole, cuts, strict=False)))
            assert differences(problem.part(entry, groups).solve(), among) == []
