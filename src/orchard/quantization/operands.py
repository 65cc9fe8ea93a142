"""Tensors made into quantised operands: checks, smoothing, hybrid choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from orchard.attention.api import Layout
from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.quantization.analysis import Choice, analyse, choose, finest
from orchard.quantization.formats import (
    LAYOUTS,
    PASS_THROUGH,
    Format,
    Granularity,
    Precision,
    QuantizedTensor,
    Strategy,
    check_choice,
    encode,
    mean_over_sequence,
)

_DTYPES = tuple(PASS_THROUGH.values())


def quantize(
    tensor: Tensor,
    precision: Precision = "int8",
    granularity: Granularity = "block",
    block_size: int = 16,
    symmetric: bool = True,
    *,
    head_block_size: int = 1,
    smooth: bool = False,
    adaptive_blocks: bool = False,
    strategy: Strategy = "balanced",
    layout: Layout = "bhsd",
) -> QuantizedTensor:
    """A tensor [B, H, S, D] (or [H, S, D], [S, D]) stored in fewer bits, in memory of its own.

    Args:
        tensor: fp32, fp16 or bf16, of any strides; it must be finite.
        precision: "int8", "int4", "fp8", or "fp32", "fp16", "bf16", which have no scales.
        granularity: what shares a scale: "tensor", "block", "row", or "hybrid" to have it chosen.
        block_size: rows of a block.
        symmetric: False adds a zero point to each scale, for values on one side of 0.
        head_block_size: heads of a block.
        smooth: take the mean over the sequence out first, as for keys whose channels are offset.
        adaptive_blocks: let short sequences and int4 have smaller blocks.
        strategy: of "hybrid".
        layout: "bhsd", or "bshd" for [B, S, H, D].

    Raises:
        ArgumentValueError, ArgumentTypeError: an argument is not allowed.
    """
    form = Format(
        precision,
        granularity,
        block_size,
        head_block_size,
        symmetric,
        smooth,
        adaptive_blocks,
        strategy,
    )
    stored = quantize_together({"tensor": tensor}, {"tensor": form}, layout)["tensor"]
    if stored.mean is None and PASS_THROUGH.get(precision) == tensor.dtype:
        stored = replace(stored, data=stored.data.clone(), trusted=True)  # it was a view of tensor
    return stored


def quantize_together(
    tensors: Mapping[str, Tensor],
    forms: Mapping[str, Format],
    layout: Layout,
    *,
    one_choice: bool = False,
    means: Mapping[str, Tensor] | None = None,
) -> dict[str, QuantizedTensor]:
    """Every tensor in its form; with `one_choice` hybrid settles on one granularity for them all.

    `means` are taken out instead of those of the tensors.
    """
    check_choice("layout", layout, LAYOUTS)
    views = {name: four_axes(name, tensor, layout) for name, tensor in tensors.items()}
    found = dict(means or {})
    choices: dict[str, Choice] = {}
    for name, view in views.items():
        form = forms[name]
        if form.smooth and name not in found:
            found[name] = mean_over_sequence(view)
        if form.granularity == "hybrid" and form.quantizes:
            centred = view - found[name] if name in found else view
            choices[name] = choose(analyse(centred, form), form.precision, form.strategy)
    if one_choice and choices:
        shared = finest([choice.granularity for choice in choices.values()])
        choices = {
            name: Choice(shared, f"{shared} for every operand; alone {choice.reasoning}")
            for name, choice in choices.items()
        }
    stored = {}
    for name, view in views.items():
        settled, choice = forms[name], choices.get(name)
        if settled.granularity == "hybrid":
            settled = replace(settled, granularity=choice.granularity if choice else "tensor")
        stored[name] = replace(
            encode(view, settled, name, found.get(name)),
            layout=layout,
            ndim=tensors[name].ndim,
            reasoning=choice.reasoning if choice else "",
            trusted=True,
        )
    return stored


def four_axes(name: str, tensor: Tensor, layout: Layout = "bhsd") -> Tensor:
    """A checked tensor as a [B, H, S, D] view, off the graph."""
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(f"{name} is {tensor!r}; it must be a torch.Tensor")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ArgumentTypeError(f"{name} is sparse or nested; it must be a dense, strided tensor")
    if tensor.dtype not in _DTYPES:
        raise ArgumentTypeError(
            f"{name} has dtype {tensor.dtype}; it must be float32, float16 or bfloat16"
        )
    if tensor.ndim not in (2, 3, 4):
        raise ArgumentValueError(f"{name} has shape {list(tensor.shape)}; it must have 2 to 4 axes")
    view = tensor.detach().resolve_neg()
    if layout == "bshd" and view.ndim > 2:
        view = view.transpose(-3, -2)
    return view[(None,) * (4 - view.ndim)]
