"""`orchard.explain`: who would serve a call, of attention or of quantised attention."""

from __future__ import annotations

from typing import Unpack, overload

from torch import Tensor

from orchard.attention import api
from orchard.dispatch.planner import Plan
from orchard.quantization import attention as quantized
from orchard.quantization.attention import Given
from orchard.quantization.config import QuantizationConfig
from orchard.quantization.engines import AttentionOptions, QuantizedPlan
from orchard.quantization.formats import QuantizedTensor


@overload
def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Plan: ...


@overload
def explain(
    query: Given,
    key: Given,
    value: Given,
    *,
    config: QuantizationConfig | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Plan | QuantizedPlan: ...


def explain(
    query: Given,
    key: Given,
    value: Given,
    *,
    config: QuantizationConfig | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Plan | QuantizedPlan:
    """Who would serve a call with these arguments, and why each other would not; print it.

    It is a call of `quantized_attention` where there is a `config` or an operand is a
    QuantizedTensor, else one of `attention`. No attention is computed, apart from the probe of a
    backend that has not been used yet; tensors of a quantised call are quantised, because hybrid
    looks at their values. A backend that was asked for and cannot serve `attention` gives a plan
    whose `backend` is None.
    """
    if (
        config is not None
        or isinstance(query, QuantizedTensor)
        or isinstance(key, QuantizedTensor)
        or isinstance(value, QuantizedTensor)
    ):
        return quantized.explain(query, key, value, config=config, return_lse=return_lse, **options)
    return api.explain(query, key, value, return_lse=return_lse, **options)
