"""Every operand and every output against a forbidden page, on either side, case by case.

Prints each case before it runs, so that a crash can be told from its output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from typing import Literal

import torch
from programs.problems import DTYPES, differences, exercise

from orchard.attention.problem import Tensors, Upstream
from orchard.testing.conformance import CASES, Case
from orchard.testing.guard_pages import SIDES, Side, guarded_outputs, moved
from orchard.testing.inputs import VIEWS, Guarded

SIZES = ((33, 47), (1, 300), (5, 130), (70, 65), (129, 257), (8, 16), (200, 33))
DIMS = ((16, 16), (40, 40), (64, 64), (80, 24), (7, 13), (128, 128), (1, 65), (96, 200))
KINDS: tuple[Literal["bool", "additive"] | None, ...] = (None, "bool", "additive")
VARIATIONS: tuple[dict[str, object], ...] = (
    {},
    {"causal": True},
    {"dropout_p": 0.3, "lse_grad": True},
    {"window": (9, 5), "softcap": 3.0},
    {"causal": "bottom_right", "kv_heads": 1},
)


def cases() -> Iterator[Case]:
    """The conformance suite, and every view, type and kind of mask with sizes of all sorts."""
    yield from (case for case in CASES if case.dtype in DTYPES)
    sizes, dims, variations = cycle(SIZES), cycle(DIMS), cycle(VARIATIONS)
    for view in VIEWS:
        for dtype in DTYPES:
            for kind in KINDS:
                (rows, keys), (dim, value_dim) = next(sizes), next(dims)
                case = Case(
                    f"{view.name}, {dtype}, {kind or 'no'} mask, {rows} rows, {keys} keys, "
                    f"dimensions {dim} and {value_dim}",
                    "layout",
                    dtype=dtype,
                    rows=rows,
                    keys=keys,
                    dim=dim,
                    value_dim=value_dim,
                    views=(view.name,) * 3,
                    grad_view=view.name,
                    mask=kind,
                    mask_view=view.name,
                    mask_grad=kind == "additive",
                )
                yield replace(case, **next(variations))


def check(case: Case, side: Side, mask_dtype: torch.dtype | None) -> list[str]:
    """What is wrong when everything of this case lies against pages on one side."""
    free = exercise(case)
    guards: list[Guarded] = []

    def move(tensor: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        if tensor is None:
            return None
        guards.append(moved(tensor, side, dtype))
        return guards[-1].tensor

    mask = free.tensors.mask
    if mask is not None and mask_dtype is not None:
        mask = moved(mask, side, mask_dtype).tensor
        free = replace(free, tensors=free.tensors._replace(mask=mask))
    tensors = Tensors(*map(move, free.tensors))
    upstream = Upstream(*map(move, free.upstream))
    expected = free.solve()
    with guarded_outputs(side) as outputs:
        found = replace(free, tensors=tensors, upstream=upstream).solve()
    wrong = [f"{name} depends on where things lie" for name in differences(found, expected)]
    if not all(guard.intact() for guard in guards):
        wrong.append("an operand or the memory around it was written to")
    if not all(output.intact() for output in outputs):
        wrong.append("memory around an output was written to")
    if len(outputs) < 5:
        wrong.append(f"only {len(outputs)} outputs were allocated where this test can see it")
    return wrong


def main() -> int:
    failed = False
    widths = cycle((None, torch.float64, torch.float32, torch.bfloat16, torch.float16))
    chosen = cases()
    if len(sys.argv) > 1:  # every so many, for a quick look
        chosen = islice(chosen, 0, None, int(sys.argv[1]))
    for case in chosen:
        mask_dtype = next(widths) if case.mask == "additive" else None
        for side in SIDES:
            print(f"{case.name}, guarded at its {side}", flush=True)
            for complaint in check(case, side, mask_dtype):
                print(f"{case.name}, guarded at its {side}: {complaint}", file=sys.stderr)
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
