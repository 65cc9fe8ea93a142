"""The Metal kernels as engines: levels become values where a tile of them is loaded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchard.attention.problem import Saved
from orchard.backends.metal import MetalBackend
from orchard.backends.metal.quantized import StoredOperands
from orchard.dispatch.backend import Reason
from orchard.dispatch.planner import planner
from orchard.quantization import kernel_calls

if TYPE_CHECKING:
    from orchard.quantization.engines import QuantizedCall


def reasons(name: str, call: QuantizedCall) -> tuple[Reason, ...]:
    """Why the kernels of this backend do not serve the call, all of them."""
    found = kernel_calls.reasons(call, name)
    if found:
        return found
    options = call.plain.problem.options
    return _backend(name).stored_reasons(_operands(call), kernel_calls.mask_of(call), options)


def serve(name: str, call: QuantizedCall) -> tuple[Tensor, Tensor | None]:
    """The output in fp32 and, where asked for, lse, on the graph of the operands' sources."""
    return kernel_calls.serve_by(partial(_attend, name), call)


def _attend(name: str, call: QuantizedCall, mask: Tensor | None, dtype: torch.dtype) -> Saved:
    """In fp32, whatever `dtype` is."""
    options = call.plain.problem.options
    return _backend(name).forward_stored(_operands(call), mask, call.seed, options)


def _backend(name: str) -> MetalBackend:
    found = planner().backends[name]
    assert isinstance(found, MetalBackend)
    return found


def _operands(call: QuantizedCall) -> StoredOperands:
    return StoredOperands(call.query.stored, call.key.stored, call.value.stored)
