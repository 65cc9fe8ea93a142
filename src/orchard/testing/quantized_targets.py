"""What attention on operands in few bits is to reach on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from orchard.quantization import QuantizationConfig
from orchard.testing.benchmark import Case
from orchard.testing.quantized_steps import Quantised
from orchard.testing.targets import Kind, Target


def quantized() -> list[Target]:
    """int8 and int4 against our own bf16 and torch on the CPU, and what they take in memory"""
    forward = Case("", 1, 8, 8, 2048, 2048, 128, 128, torch.bfloat16)
    decode = Case("", 1, 32, 32, 1, 4096, 128, 128, torch.bfloat16)
    int8, int4 = (
        QuantizationConfig(key_precision=name, value_precision=name) for name in ("int8", "int4")
    )
    at = "S 2048, D 128, quantisation included"
    with_cache = "Sq 1, Sk 4096, 32 heads, D 128, quantised cache"
    lines: list[tuple[str, float, float, Case, Kind, Quantised]] = [
        (f"int8 forward over bf16: {at}", 1.15, 1.5, forward, "quantised", Quantised(int8)),
        (f"int8 forward over torch: {at}", 2.0, 3.0, forward, "quantised-torch", Quantised(int8)),
        (
            f"int8 decode over bf16: {with_cache}",
            1.6,
            2.0,
            decode,
            "quantised",
            Quantised(int8, cached=True),
        ),
        (
            f"int4 decode over bf16: {with_cache}",
            2.4,
            3.0,
            decode,
            "quantised",
            Quantised(int4, cached=True),
        ),
        ("int8 key and value, bytes of bf16's", 0.55, 0.51, forward, "bytes", Quantised(int8)),
    ]
    return [
        Target(work, must, aim, (replace(case, name=work),), kind, quantised=quantised)
        for work, must, aim, case, kind, quantised in lines
    ]
