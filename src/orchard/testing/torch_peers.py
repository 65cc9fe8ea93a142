"""torch's attention in the forms that Orchard is measured against."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from orchard.testing.benchmark import Case, NoPeerError, Operands, Peer, for_torch, torch_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Each of torch's fused kernels, forced: it serves a case or raises.
FUSED = {
    name: Peer(torch_attention, for_torch, partial(sdpa_kernel, backend))
    for name, backend in (
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
    )
}


def flex(case: Case, device: torch.device) -> Peer:
    """torch's compiled flex_attention with the band and the softcap of `case`."""
    import torch._dynamo
    import torch._functorch.config as compiler
    from torch.nn.attention.flex_attention import flex_attention

    if case.mask is not None or case.dropout_p:
        raise NoPeerError("flex_attention is given bands and softcaps only")
    torch._dynamo.reset()  # a compiled function remembers few shapes
    compiled = torch.compile(flex_attention, dynamic=False)
    blocks = _blocks(case, device)

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        cap = case.softcap or 1.0
        return cap * torch.tanh(score / cap)

    def attend(case: Case, operands: Operands) -> Tensor:
        out: Tensor = compiled(
            operands.query,
            operands.key,
            operands.value,
            score_mod=None if case.softcap is None else capped,
            block_mask=blocks,
            enable_gqa=case.heads != case.kv_heads,
        )
        return out

    # A backward that is to run again must not write over what it was given.
    lasting = partial(compiler.patch, donated_buffer=False)
    return Peer(attend, setting=lasting)


def _blocks(case: Case, device: torch.device) -> BlockMask | None:
    """The band of `case` as flex_attention takes it."""
    from torch.nn.attention.flex_attention import create_block_mask

    band = case.band
    if band is None:
        return None
    low = -case.rows if band.low is None else band.low
    high = case.keys if band.high is None else band.high

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j - i >= low) & (j - i <= high)

    return create_block_mask(seen, None, None, case.rows, case.keys, device=str(device))
