"""Run a group of cases on the Triton kernels, interpreted, and print what came of each as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from programs.triton_interpreter import InterpretedBackend, InterpretedRuntime
from torch import Tensor

from orchard.attention import reference
from orchard.attention.problem import Band, Options, Saved, Tensors, Upstream, describe
from orchard.backends.cuda import choice, configs
from orchard.dispatch.planner import planner
from orchard.testing.budget import Results, judge
from orchard.testing.conformance import Case, check

NAME = "cuda"
BRAIN, HALF = torch.bfloat16, torch.float16
PLAIN = Case("", "shape", batch=1, heads=2, kv_heads=2, rows=40, keys=52)
STRIDED = ("last_strided", "every_axis_strided", "last_strided")

SHAPES = (
    replace(PLAIN, name="plain"),
    replace(PLAIN, name="causal, fp16, D 40", dtype=HALF, causal=True, dim=40),
    replace(PLAIN, name="window, softcap", window=(9, 6), softcap=3.0, scale=1.0),
    replace(PLAIN, name="window, causal, bf16", dtype=BRAIN, window=(20, 0), causal=True, dim=64),
    replace(PLAIN, name="empty rows, lse", causal="bottom_right", rows=70, heads=4, lse_grad=True),
    replace(PLAIN, name="dropout", dropout_p=0.3, batch=2),
    replace(PLAIN, name="Dv 40", value_dim=40, views=("bshd", "rows_overlapping", "odd_offset")),
    replace(PLAIN, name="Dv 1, negative scale", dim=24, value_dim=1, scale=-0.3),
    replace(PLAIN, name="no columns", dim=0),
    replace(PLAIN, name="no value columns", value_dim=0),
    replace(
        PLAIN,
        name="transposed, grouped, dropout, bf16",
        dtype=BRAIN,
        dropout_p=0.5,
        kv_heads=1,
        views=("last_outermost", "last_outermost", "last_outermost"),
    ),
    replace(
        PLAIN,
        name="expanded",
        views=("every_axis_strided", "batch_expanded", "last_expanded"),
        grad_view="last_expanded",
    ),
)
MASKS = (
    replace(PLAIN, name="bool mask, causal", mask="bool", causal=True),
    replace(PLAIN, name="additive mask, fp16", mask="additive", dtype=HALF, kv_heads=1),
    *(
        replace(
            PLAIN,
            name=f"gradient of a mask over {axes or 'nothing'}",
            mask="additive",
            mask_axes=axes,
            mask_grad=True,
            batch=2,
            rows=20,
            keys=35,
            causal=axes in ("bhqk", "qk"),
            dropout_p=0.2 if axes == "hqk" else 0.0,
        )
        for axes in ("bhqk", "hqk", "qk", "bk", "hq", "")
    ),
)
DECODES = (
    replace(PLAIN, name="one row", rows=1, keys=210),
    replace(PLAIN, name="one row, whole blocks", rows=1, keys=208),
    replace(PLAIN, name="one whole block, bf16", rows=1, keys=16, dtype=BRAIN, dim=40),
    replace(
        PLAIN,
        name="whole blocks, grouped, dropout, mask",
        rows=3,
        keys=160,
        heads=4,
        dropout_p=0.3,
        mask="bool",
        softcap=2.0,
    ),
    replace(PLAIN, name="whole blocks, window", rows=5, keys=160, window=(3, 40)),
    replace(PLAIN, name="one row, few keys, bf16", rows=1, keys=7, dtype=BRAIN, dim=40),
    replace(
        PLAIN,
        name="grouped, dropout, mask by head",
        rows=3,
        keys=150,
        heads=4,
        dropout_p=0.3,
        mask="additive",
        mask_axes="hk",
    ),
    replace(PLAIN, name="window, softcap", rows=5, keys=150, window=(3, 40), softcap=2.0),
    replace(PLAIN, name="empty rows", rows=14, keys=9, dtype=HALF, causal="bottom_right"),
    replace(
        PLAIN,
        name="strided",
        rows=3,
        keys=100,
        heads=4,
        dim=24,
        value_dim=40,
        views=("last_strided", "bshd", "rows_padded"),
    ),
)
PACKED = (
    replace(PLAIN, name="strided", views=STRIDED, grad_view="last_strided"),
    replace(PLAIN, name="strided, bf16, dropout", views=STRIDED, dtype=BRAIN, dropout_p=0.2),
)
# What serves a group, and its cases.
GROUPS = {
    "shapes": (("tiled",), SHAPES),
    "masks": (("tiled",), MASKS),
    "decodes": (("decode", "tiled"), DECODES),
    "packed": (("packed", "tiled"), PACKED),
}


def small_blocks() -> None:
    """Blocks of 16, so that small problems have edges, inner blocks and several of each."""
    table: configs.Table = {"default": {}}
    for role in configs.shipped()["default"]:
        entry = [1, 2, 4, 1] if role == "join" else [16, 16, 4, 1]
        sizes = {str(2**n): entry for n in range(4, 9)}
        table["default"][role] = {"half": sizes, "single": sizes}
    configs.shipped, configs.of_the_user = lambda: table, dict
    choice.PACKED_ROWS = 1


def suite(group: str) -> dict[str, list[str]]:
    """Complaints by case."""
    kernels, cases = GROUPS[group]
    backend = InterpretedBackend(*kernels)
    planner().backends[NAME] = backend
    found = {}
    for case in cases:
        outcome = check(case, "cpu", NAME)
        found[case.name] = outcome.complaints
        if outcome.status == "not served":
            found[case.name] = [*outcome.complaints, "not served"]
    return found


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def solve(tensors: Tensors, options: Options, upstream: Upstream, saved: Saved | None) -> Results:
    """The kernels' forward, or a given one, and their backward."""
    backend = InterpretedBackend("tiled")
    if saved is None:
        saved = backend.forward(describe(tensors, options, lse=True, grad=True), "tiled", tensors)
    problem = describe(
        tensors,
        options,
        stage="backward",
        grad_out=upstream.out,
        lse=upstream.lse is not None,
        grad=True,
    )
    grads = backend.backward(problem, "tiled", tensors, saved, upstream)
    return Results(*saved, *grads[:3])


def large_masks() -> dict[str, list[str]]:
    """lse has no digits left for such a row: its probabilities come from somewhere else."""
    found = {}
    lowest = torch.finfo(torch.float32).min
    for hidden, dtype in ((lowest, torch.float32), (-1e9, BRAIN), (200.0, torch.float32)):
        query, grad_out = drawn(1, 2, 6, 24).to(dtype), drawn(1, 2, 6, 20).to(dtype)
        key, value = drawn(1, 1, 50, 24).to(dtype), drawn(1, 1, 50, 20).to(dtype)
        mask = torch.zeros(1, 1, 6, 50)
        mask[..., 2, :] = mask[..., 5, :] = hidden
        tensors, upstream = Tensors(query, key, value, mask), Upstream(grad_out, None)
        results = solve(tensors, Options(24**-0.5), upstream, None)
        verdicts = judge(results, tensors, Options(24**-0.5), upstream)
        found[f"{hidden:g}, {dtype}"] = [str(verdict) for verdict in verdicts if not verdict.ok]
    return found


def interchange() -> dict[str, list[str]]:
    """A backward after the forward of the reference, dropout included."""
    options = Options(0.3, 0.0, Band(-20, 4), 9000)
    seed = torch.tensor([5, -7], dtype=torch.int32)
    tensors = Tensors(drawn(2, 2, 33, 16), drawn(2, 1, 40, 16), drawn(2, 1, 40, 16), None, seed)
    upstream = Upstream(drawn(2, 2, 33, 16), drawn(2, 2, 33))
    results = solve(tensors, options, upstream, reference.forward(tensors, options))
    verdicts = judge(results, tensors, options, upstream)
    return {"after reference": [str(verdict) for verdict in verdicts if not verdict.ok]}


def nothing_through_empty_rows() -> dict[str, list[str]]:
    """What is not finite in a row that sees nothing, or in what it would see, stays there."""
    query, key, value, grad_out = (drawn(1, 1, 20, 16) for _ in range(4))
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    mask[..., 3, :] = False
    mask[..., 0] = False
    grad_out[..., 3, :], key[..., 0, :] = torch.nan, torch.inf
    tensors = Tensors(query, key, value, mask)
    results = solve(tensors, Options(0.25), Upstream(grad_out, None), None)
    finite = Results(*(None if r is None else r.isfinite() for r in results))
    assert finite.lse is not None
    assert finite.grad_query is not None
    return {
        "out": [] if finite.out.all() else ["out is not finite"],
        "lse": [] if finite.lse.logical_not().nonzero().tolist() == [[0, 0, 3]] else ["lse"],
        "grad_value": [] if finite.grad_value is None or finite.grad_value.all() else ["NaN"],
        "zero": [] if not results.out[0, 0, 3].any() else ["out of an empty row"],
    }


OTHERS = {
    "large masks": large_masks,
    "interchange": interchange,
    "empty rows": nothing_through_empty_rows,
}


if __name__ == "__main__":
    small_blocks()
    names = sys.argv[1:]
    found = {name: OTHERS[name]() if name in OTHERS else suite(name) for name in names}
    print(json.dumps({"found": found, "kernels": sorted(InterpretedRuntime.launched)}))
