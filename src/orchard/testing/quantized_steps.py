"""Quantised attention on the cases of a benchmark: what is called, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from orchard.attention.problem import Options, Tensors, default_scale
from orchard.quantization import KVCache, QuantizationConfig, explain, quantized_attention
from orchard.quantization.attention import Given
from orchard.testing import budget
from orchard.testing.benchmark import Case, Check, affordable_part, build, most_scores
from orchard.testing.budget import Results


@dataclass(frozen=True)
class Quantised:
    """How a case's operands are stored; `cached`: key and value were, before the call."""

    config: QuantizationConfig
    cached: bool = False


@dataclass(frozen=True)
class QuantisedStep:
    """The call of one case, checked, and its keys' and values' bytes beside those they had."""

    step: Callable[[], Tensor]
    check: Check
    share_of_bytes: float


def quantised_step(case: Case, how: Quantised) -> QuantisedStep:
    """A case without mask, band and dropout on the CPU; it is held to the budget of its dtype."""
    operands = build(case, torch.device("cpu"))
    query, key, value = operands.query, operands.key, operands.value
    given: tuple[Given, Given, Given] = query, key, value
    if how.cached:
        cache = KVCache(how.config)
        cache.append(key, value)
        given = query, cache.key, cache.value
    call = explain(*given, config=how.config).call
    step = partial(quantized_attention, *given, config=how.config)
    part = affordable_part(case, most_scores(query.device))
    exact = [operand.stored.dequantize(torch.float32) for operand in call[:3]]
    tensors = Tensors(part.of_query(exact[0]), part.of_key(exact[1]), part.of_key(exact[2]))
    options = Options(default_scale(case.dim))
    standard = budget.standard(tensors, options)._replace(
        yardstick=budget.define(tensors, options, case.dtype), dtype=case.dtype
    )
    found = Results(part.of_query(step()), None)
    held = call.key.stored.nbytes + call.value.stored.nbytes
    return QuantisedStep(
        step,
        Check(part, tuple(budget.compare(found, standard))),
        held / (key.nbytes + value.nbytes),
    )
