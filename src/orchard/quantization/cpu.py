"""The native CPU kernels as an engine: levels and scales are read where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchard.attention.memory import Place, dense, following
from orchard.attention.problem import Saved
from orchard.backends.cpu import native, quantized
from orchard.dispatch.backend import Reason
from orchard.quantization import kernel_calls
from orchard.quantization.config import OPERANDS
from orchard.quantization.formats import QuantizedTensor

if TYPE_CHECKING:
    from orchard.quantization.engines import QuantizedCall

BACKEND = "cpu"


def reasons(call: QuantizedCall) -> tuple[Reason, ...]:
    """Why the native kernels do not serve this call, all of them."""
    found = list(kernel_calls.reasons(call, BACKEND))
    for name, operand in zip(OPERANDS, call[:3], strict=True):
        data = operand.stored.data
        if operand.stored.scales is not None and data.shape[3] > 1 and data.stride(3) != 1:
            sentence = f"reads levels whose last stride is 1; {name} has {data.stride(3)}"
            found.append(Reason("layout", sentence, "make its data contiguous"))
    return tuple(found)


def serve(call: QuantizedCall) -> tuple[Tensor, Tensor | None]:
    """The output and, where asked for, lse, on the graph of the operands' sources."""
    return kernel_calls.serve_by(_attend, call)


def _attend(call: QuantizedCall, mask: Tensor | None, dtype: torch.dtype) -> Saved:
    query, key, value = (operand.stored for operand in call[:3])
    return quantized.attend(
        native.loaded(),
        _operand(query),
        _operand(key),
        _operand(value),
        mask,
        call.seed,
        call.plain.problem.options,
        _place(call, dtype),
        bf16_accuracy=query.dtype == call.dtype == dtype == torch.bfloat16,
    )


def _place(call: QuantizedCall, dtype: torch.dtype) -> Place:
    """Memory for the output [B, H, S, Dv] in the order of the query, where that is a tensor."""
    query = kernel_calls.source_of(call.query)
    shape = (*call.query.stored.data.shape[:3], call.value.stored.head_dim)
    return dense(shape, dtype) if query is None else following(shape, query.stride(), dtype)


def _operand(held: QuantizedTensor) -> quantized.Operand:
    return quantized.Operand(
        held.data, held.scales, held.zero_points, held.mean, held.group, held.head_dim
    )
