"""The attention kernels that torch ships as Metal source, launched as torch launches them."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from orchard.attention.problem import Tensors
from orchard.testing.metal.emulator import ShaderLibrary
from orchard.testing.metal.toolchain import TORCH_HEADERS

HEADERS = TORCH_HEADERS / "ATen/native/mps/kernels"
PREFILL = "PrefillAttention.h"
DECODE = "DecodeAttention.h"
_ROWS = 32  # of a threadgroup of four simdgroups


def source(header: str) -> str:
    """Everything that compile_shader needs to have the kernels of a header."""
    return "\n".join(
        (
            "#include <metal_stdlib>",
            "using namespace metal;",
            "#include <c10/metal/utils.h>",
            f"#include <ATen/native/mps/kernels/{header}>",
        )
    )


def prefill_name(dtype: torch.dtype, dim: int, *, causal: bool, mask: torch.dtype | None) -> str:
    """The kernel's host name."""
    name = str(dtype).removeprefix("torch.")
    keys = 16 if dim == 128 else 32
    kind = "bool_" if mask == torch.bool else name
    return (
        f"prefill_attention_{name}_bq{_ROWS}_bk{keys}_bd{dim}_wm4_wn1"
        f"_hm{int(mask is not None)}_dc{int(causal)}_mask{kind}"
    )


def prefill(library: ShaderLibrary, tensors: Tensors, *, causal: bool = False) -> Tensor:
    """Attention by the kernel for many rows; what it does not write stays NaN."""
    query, key, value, mask, _ = tensors
    batch, heads, rows, dim = query.shape
    out = torch.full_like(query, torch.nan)
    scale, softcap = struct.unpack("<2i", struct.pack("<2f", 1 / math.sqrt(dim), 1.0))
    params = [batch, heads, dim, rows, key.shape[2], heads // key.shape[1], scale, softcap]
    for tensor in (query, key, value, out):
        params += tensor.stride()[:3]
    shown = query if mask is None else mask.expand(batch, heads, rows, key.shape[2])
    kind = None if mask is None else mask.dtype
    getattr(library, prefill_name(query.dtype, dim, causal=causal, mask=kind))(
        *(query, key, value, out, params, [*shown.stride()], shown),
        threads=(-(-rows // _ROWS) * 128, heads, batch),
        group_size=(128, 1, 1),
        arg_casts="int32",
    )
    return out
