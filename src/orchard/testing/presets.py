"""The benchmark's cases, by preset, in sizes that suit the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from orchard.dispatch.backend import dtype_name
from orchard.testing.benchmark import Case

Preset = Callable[[torch.device, torch.dtype | None], list[Case]]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _base(device: torch.device, dtype: torch.dtype | None) -> Case:
    """A call of middling size: about ten milliseconds on two cores, about one on a large GPU."""
    if device.type == "cuda":
        return _sized(Case("", dtype=dtype or torch.bfloat16), batch=4, heads=16, s=4096, d=128)
    if device.type == "mps":
        return _sized(Case("", dtype=dtype or torch.float16), batch=1, heads=16, s=2048, d=64)
    return _sized(Case("", dtype=dtype or torch.float32), batch=2, heads=8, s=512, d=64)


def _sized(case: Case, *, batch: int, heads: int, s: int, d: int) -> Case:
    return replace(
        case, batch=batch, heads=heads, kv_heads=heads, rows=s, keys=s, dim=d, value_dim=d
    )


def _decoding(case: Case, *, rows: int, keys: int, batch: int = 1) -> Case:
    """Few rows against many keys, four query heads to a key head, as a served model has it."""
    return replace(
        case, batch=batch, heads=32, kv_heads=8, rows=rows, keys=keys, dim=128, value_dim=128
    )


def quick(device: torch.device, dtype: torch.dtype | None) -> list[Case]:
    """one of everything, in under a minute on two cores"""
    base = _base(device, dtype)
    keys = 32768 if device.type == "cuda" else 4096
    other = torch.float16 if base.dtype == torch.bfloat16 else torch.bfloat16
    cases = [
        replace(base, name="full"),
        replace(base, name="causal", causal=True),
        replace(base, name="grouped heads, causal", kv_heads=base.heads // 4, causal=True),
        replace(base, name="bshd views", views=("bshd", "bshd", "bshd")),
        replace(base, name="last axis strided", views=("last_strided",) * 3),
        replace(base, name="padding mask", mask="padding"),
        replace(base, name="window of 64, causal", window=(63, 0), causal=True),
        replace(_decoding(base, rows=1, keys=keys), name="decode"),
        replace(base, name="train, causal", causal=True, backward=True),
        replace(base, name="train, dropout 0.1", dropout_p=0.1, backward=True),
        replace(base, name="train, Dv half of D", value_dim=base.dim // 2, backward=True),
    ]
    if dtype is None:
        cases.append(replace(base, name=f"{dtype_name(other)}, causal", dtype=other, causal=True))
    return cases


def layouts(device: torch.device, dtype: torch.dtype | None) -> list[Case]:
    """the same problem laid out in memory in different ways"""
    base = _base(device, dtype)
    shared = ("contiguous", "heads_expanded", "heads_expanded")
    batched = ("contiguous", "batch_expanded", "batch_expanded")
    cases = [
        replace(base, name=name, views=(view, view, view))
        for name, view in (
            ("contiguous", "contiguous"),
            ("[B, S, H, D]", "bshd"),
            ("[S, B, H, D]", "sbhd"),
            ("slices of a QKV tensor", "qkv_slice"),
            ("rows padded", "rows_padded"),
            ("odd offset", "odd_offset"),
            ("last axis strided", "last_strided"),
            ("last axis outermost", "last_outermost"),
        )
    ]
    cases += [
        replace(base, name="key transposed", views=("contiguous", "last_outermost", "contiguous")),
        replace(base, name="expanded heads (k, v)", views=shared),
        replace(base, name="expanded batch (k, v)", views=batched),
    ]
    trained = ("bshd", "qkv_slice", "last_strided")
    named = {case.views[0]: case for case in cases}
    cases += [
        replace(named[view], name=f"train, {named[view].name}", backward=True) for view in trained
    ]
    return cases


def dtypes(device: torch.device, dtype: torch.dtype | None) -> list[Case]:
    """every dtype, forward and trained"""
    cases = []
    for each in _DTYPES if dtype is None else (dtype,):
        base, name = _base(device, each), dtype_name(each)
        cases += [
            replace(base, name=name),
            replace(base, name=f"{name}, causal", causal=True),
            replace(base, name=f"{name}, train", backward=True),
            replace(base, name=f"{name}, train, causal", causal=True, backward=True),
        ]
    return cases


def train(device: torch.device, dtype: torch.dtype | None) -> list[Case]:
    """forward and backward: dropout, masks with a gradient, other value dimensions"""
    base = replace(_base(device, dtype), backward=True)
    short = replace(base, rows=min(base.rows, 1024), keys=min(base.keys, 1024))
    return [
        replace(base, name="full"),
        replace(base, name="causal", causal=True),
        replace(base, name="grouped heads, causal", kv_heads=base.heads // 4, causal=True),
        replace(base, name="dropout 0.1", dropout_p=0.1),
        replace(base, name="dropout 0.1, causal", dropout_p=0.1, causal=True),
        replace(base, name="padding mask", mask="padding"),
        replace(short, name="additive mask", mask="bias"),
        replace(short, name="trained additive mask", mask="bias", mask_grad=True),
        replace(base, name="Dv half of D", value_dim=base.dim // 2),
        replace(base, name="Dv twice D", value_dim=base.dim * 2),
        replace(base, name="window of 128, causal", window=(127, 0), causal=True),
    ]


def long(device: torch.device, dtype: torch.dtype | None) -> list[Case]:
    """long keys, and decoding: few rows against many keys"""
    base = _base(device, dtype)
    large = device.type == "cuda"
    s = 16384 if large else 4096
    keys = 131072 if large else 16384
    prompt = replace(base, batch=1, heads=8, kv_heads=8, rows=s, keys=s)
    chunk = _decoding(base, rows=s // 16, keys=s)
    return [
        replace(prompt, name="prompt, full"),
        replace(prompt, name="prompt, causal", causal=True),
        replace(prompt, name="prompt, window of 256", window=(255, 0), causal=True),
        replace(chunk, name="prompt in chunks", causal="bottom_right"),
        replace(_decoding(base, rows=1, keys=s), name="decode"),
        replace(_decoding(base, rows=1, keys=keys), name="decode, many keys"),
        replace(_decoding(base, rows=1, keys=s, batch=8), name="decode, batch of 8"),
        replace(_decoding(base, rows=8, keys=s), name="decode, 8 rows", causal="bottom_right"),
    ]


PRESETS: dict[str, Preset] = {
    preset.__name__: preset for preset in (quick, layouts, dtypes, train, long)
}
