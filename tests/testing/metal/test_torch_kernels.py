"""The emulator is right: it runs the Metal attention kernels that torch ships, and they attend.

Nothing here is ours but the launches, which follow the parameters in torch's headers.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from orchard.attention.problem import Band, Options, Tensors
from orchard.testing.budget import Results, judge
from orchard.testing.metal import (
    SCHEDULES,
    Emulator,
    OutOfBoundsError,
    RaceError,
    ShaderLibrary,
    torch_kernels,
)
from orchard.testing.metal.torch_kernels import DECODE, HEADERS, PREFILL, source

NAMES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
DTYPES = list(NAMES)
MASKS = ["none", "causal", "bool", "additive"]

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        not (HEADERS / PREFILL).exists(),
        reason="this torch ships no Metal attention",
    ),
]


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator(bounds="view")


@pytest.fixture(scope="module")
def prefill_kernels(emulator: Emulator) -> ShaderLibrary:
    return emulator.compile_shader(source(PREFILL))


@pytest.fixture(scope="module")
def decode_kernels(emulator: Emulator) -> ShaderLibrary:
    return emulator.compile_shader(source(DECODE))


def prefill(library: ShaderLibrary, tensors: Tensors, kind: str) -> Tensor:
    return torch_kernels.prefill(library, tensors, causal=kind == "causal")


def decode(lib: ShaderLibrary, tensors: Tensors, kind: str, *, two_passes: bool) -> Tensor:
    query, key, value, mask, _ = tensors
    batch, heads, rows, dim = query.shape
    name = NAMES[query.dtype]
    mask_name = {"bool": "_maskbool", "additive": f"_mask{name}", "causal": "_masknone_causal"}
    suffix = f"{name}_{dim}_{dim}{mask_name.get(kind, '_masknone')}"
    operands = (query, key, value)
    shown = query if mask is None else mask.expand(batch, heads, rows, key.shape[2])
    batch_stride, head_stride, row_stride, key_stride = shown.stride()
    arguments = [
        heads // key.shape[1],
        key.shape[2],
        [*(t.stride(1) for t in operands), 0],  # uint3 takes 16 bytes
        [*(t.stride(2) for t in operands), 0],
        1 / math.sqrt(dim),
        shown,
        [key_stride, row_stride, head_stride, batch_stride],
        [*(t.stride(0) for t in operands), heads],
    ]
    out = torch.full((batch, heads, rows, dim), torch.nan, dtype=query.dtype)
    if not two_passes:
        casts = {index: "int32" for index in range(4, 12) if index != 8}
        getattr(lib, f"sdpa_vector_{suffix}")(
            *(*operands, out, *arguments),
            threads=(batch * heads * 1024, rows, 1),
            group_size=(1024, 1, 1),
            arg_casts=casts,
        )
        return out
    partials = torch.full((batch * heads * rows, 32, dim), torch.nan, dtype=query.dtype)
    sums, maxs = torch.full((2, batch * heads * rows, 32), torch.nan).unbind()
    casts = {index: "int32" for index in range(6, 14) if index != 10}
    getattr(lib, f"sdpa_vector_2pass_1_{suffix}")(
        *(*operands, partials, sums, maxs, *arguments),
        threads=(batch * heads * 256, rows, 32),
        group_size=(256, 1, 1),
        arg_casts=casts,
    )
    getattr(lib, f"sdpa_vector_2pass_2_{name}_{dim}")(
        *(partials, sums, maxs, out),
        threads=(batch * heads * 1024, rows, 1),
        group_size=(1024, 1, 1),
    )
    return out


def make(
    dtype: torch.dtype, dim: int, rows: int, keys: int, mask: str, *, batch: int = 1
) -> Tensors:
    """Four query heads on two; the query lies as [B, S, H, D]."""
    query = torch.randn(batch, rows, 4, dim).to(dtype).transpose(1, 2)
    key, value = (torch.randn(batch, 2, keys, dim).to(dtype) for _ in range(2))
    shown = None
    if mask == "bool":
        shown = torch.rand(batch, 1, rows, keys) < 0.6
        shown[..., 0] = True
    elif mask == "additive":
        shown = torch.randn(1, 4, rows, keys).to(dtype)
    return Tensors(query, key, value, shown)


def check(out: Tensor, tensors: Tensors, mask: str) -> None:
    scale = 1 / math.sqrt(tensors.query.shape[-1])
    options = Options(scale, band=Band(None, 0) if mask == "causal" else None)
    verdicts = judge(Results(out, None), tensors, options)
    assert [str(verdict) for verdict in verdicts if not verdict.ok] == []
    assert len(verdicts) == 1


@pytest.mark.dtype
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill(prefill_kernels: ShaderLibrary, dtype: torch.dtype, dim: int, mask: str) -> None:
    tensors = make(dtype, dim, 37, 45, mask)
    check(prefill(prefill_kernels, tensors, mask), tensors, mask)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(emulator: Emulator, prefill_kernels: ShaderLibrary, schedule: str) -> None:
    tensors = make(torch.float32, 64, 70, 70, "causal", batch=2)
    emulator.schedule, emulator.workers = schedule, 2
    try:
        out = prefill(prefill_kernels, tensors, "causal")
    finally:
        emulator.schedule, emulator.workers = "in-order", 1
    check(out, tensors, "causal")


@pytest.mark.dtype
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode(decode_kernels: ShaderLibrary, dtype: torch.dtype, dim: int, mask: str) -> None:
    tensors = make(dtype, dim, 5, 77, mask)
    check(decode(decode_kernels, tensors, mask, two_passes=False), tensors, mask)


@pytest.mark.dtype
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_in_two_passes(decode_kernels: ShaderLibrary, dtype: torch.dtype) -> None:
    tensors = make(dtype, 64, 1, 1029, "none")
    check(decode(decode_kernels, tensors, "none", two_passes=True), tensors, "none")


def test_counters(prefill_kernels: ShaderLibrary) -> None:
    """The work of a launch, as it follows from the kernel's tiles."""
    query, key, value = (torch.randn(1, 2, 128, 64) for _ in range(3))
    for mask, tiles in (("none", 16), ("causal", 10)):  # of 32 x 32, for each head
        prefill(prefill_kernels, Tensors(query, key, value), mask)
        name = torch_kernels.prefill_name(torch.float32, 64, causal=mask == "causal", mask=None)
        kernel = getattr(prefill_kernels, name)
        counted = kernel.last_counters
        tile = 32 * 64 * 4
        assert counted.multiplies == 2 * tiles * 2 * (4 * 4 * 8)
        assert counted.device_read == 2 * (4 + 2 * tiles) * tile
        assert counted.device_written == 2 * 4 * tile
        assert counted.threadgroup_barriers == 2 * (4 * 2 + 4 * tiles)
        assert counted.threadgroups == 8
        assert kernel.static_thread_group_memory_length == 17920
        assert kernel.max_threads_per_threadgroup == 128


def test_fast_mode_is_the_same_arithmetic(prefill_kernels: ShaderLibrary) -> None:
    tensors = make(torch.float16, 64, 37, 45, "bool")
    fast = Emulator("fast").compile_shader(source(PREFILL))
    expected = prefill(prefill_kernels, tensors, "bool")
    assert torch.equal(prefill(fast, tensors, "bool"), expected)


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def mutant(old: str, new: str, occurrence: int = 0) -> ShaderLibrary:
    """The prefill kernels with one place changed, in bounds of the tensors' own elements."""
    parts = (HEADERS / PREFILL).read_text().encode("ascii", "replace").decode().split(old)
    assert len(parts) > occurrence + 1, f"{old} is not in torch's header"
    changed = old.join(parts[: occurrence + 1]) + new + old.join(parts[occurrence + 1 :])
    before, include, after = source(PREFILL).partition(
        f"#include <ATen/native/mps/kernels/{PREFILL}>"
    )
    assert include
    return Emulator(bounds="view").compile_shader(before + changed + after)


@pytest.mark.parametrize("occurrence", range(5))
def test_a_missing_barrier_is_a_race(occurrence: int) -> None:
    """All but the first, which stands before anything is shared and is needed by nothing."""
    lib = mutant(BARRIER, "", occurrence)
    tensors = make(torch.float32, 64, 70, 70, "none")
    if occurrence == 0:
        check(prefill(lib, tensors, "none"), tensors, "none")
        return
    with pytest.raises(RaceError, match=r"race on (Q|KV)_smem"):
        prefill(lib, tensors, "none")


@pytest.mark.parametrize(
    ("old", "new", "buffer"),
    [
        ("loader_k.load_safe(short2(BD, k_block_size));", "loader_k.load_unsafe();", 1),
        ("loader_v.load_safe(short2(BD, k_block_size));", "loader_v.load_unsafe();", 2),
        ("(tm + sm) < q_block_size && sn < BD", "true", 3),
    ],
)
def test_a_missing_bounds_check_is_found(old: str, new: str, buffer: int) -> None:
    tensors = make(torch.float32, 64, 37, 45, "none")
    lib = mutant(old, new)
    if buffer == 3:  # what follows checks once more
        check(prefill(lib, tensors, "none"), tensors, "none")
        lib = mutant("if (q_block_size < BQ) {\n    if (", "if (false) {\n    if (")
    with pytest.raises(OutOfBoundsError) as caught:
        prefill(lib, tensors, "none")
    assert caught.value.buffer == buffer


def test_a_short_threadgroup_array_is_found() -> None:
    lib = mutant("KV_smem[tgp_mem_s]", "KV_smem[tgp_mem_s - 32]")
    with pytest.raises(OutOfBoundsError) as caught:
        prefill(lib, make(torch.float32, 64, 37, 45, "none"), "none")
    assert caught.value.variable == "KV_smem"
