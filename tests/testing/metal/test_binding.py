"""Arguments and launches are taken as torch.mps.compile_shader takes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from orchard.testing.metal import (
    BindingError,
    Emulator,
    OutOfBoundsError,
    ShaderLibrary,
    compile_shader,
)
from orchard.testing.metal.sparse import far_apart

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
FAR = 2**31 + 8


def reads(kind: str, count: int = 1) -> ShaderLibrary:
    return compile_shader(
        f"{HEADER}kernel void f(device {kind}* y, constant {kind}* v,"
        f" uint i [[thread_position_in_grid]]) {{ y[i] = v[i]; }}"
    )


@pytest.mark.parametrize(
    ("value", "kind", "dtype", "cast", "seen"),
    [
        (7, "long", torch.int64, None, [7]),
        (-(2**40), "long", torch.int64, None, [-(2**40)]),
        (True, "long", torch.int64, None, [1]),
        (1.5, "float", torch.float32, None, [1.5]),
        ([3, 2**40], "long", torch.int64, None, [3, 2**40]),
        ((0.5, 2), "float", torch.float32, None, [0.5, 2.0]),
        (7, "int", torch.int32, "int32", [7]),
        ([2**32 - 1, -1], "int", torch.int32, "int32", [-1, -1]),
        (300, "uchar", torch.uint8, {1: "uint8"}, [44]),
        (-3, "char", torch.int8, {1: "int8"}, [-3]),
        ([70000], "short", torch.int16, "int16", [4464]),
        (0.1, "half", torch.float16, "fp16", [0.0999755859375]),
        ([1, 2], "bfloat", torch.bfloat16, {1: "bf16"}, [1.0, 2.0]),
        (torch.tensor(2.5, dtype=torch.float64), "float", torch.float32, None, [2.5]),
    ],
)
def test_values(value: Any, kind: str, dtype: torch.dtype, cast: Any, seen: list[float]) -> None:
    y = torch.zeros(len(seen), dtype=dtype)
    reads(kind).f(y, value, arg_casts=cast)
    assert y.tolist() == seen


@pytest.mark.parametrize(
    ("value", "cast", "message"),
    [
        (None, None, "Unsupported argument type"),
        ("text", None, "Unsupported argument type"),
        (torch.float32, None, "Unsupported argument type"),
        ({}, None, "Unsupported argument type"),
        ([], None, "Empty list"),
        (["a"], None, "Unexpected argument types"),
        ([1, 2.5], None, "Unable to cast"),
        (2**63, None, "Unable to cast"),
        (1, "uint32", "Unsupported cast instruction"),
        (1, 3, "Unexpected caster arg type int"),
        ([0] * 513, None, "4104 bytes of inline arguments"),
        (torch.zeros(2, dtype=torch.float64), None, "float64"),
    ],
)
def test_refused_values(value: Any, cast: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        reads("long").f(torch.zeros(1, dtype=torch.int64), value, arg_casts=cast)


@pytest.mark.parametrize(
    ("kind", "value", "cast"),
    [
        ("int", 7, None),
        ("uint", [3, 4], None),
        ("float", 7, None),
        ("long", 1.5, None),
        ("half", 1.5, None),
        ("long", 7, "int32"),
        ("int2", [3, 4], None),
    ],
)
def test_numbers_are_read_as_what_they_are(kind: str, value: Any, cast: str | None) -> None:
    """Torch does not look at the kernel: 64-bit integers read as 32-bit ones are wrong numbers."""
    lib = compile_shader(
        f"{HEADER}kernel void f(device float* y, constant {kind}* v) {{ y[0] = float(v[0].x); }}"
        if kind[-1].isdigit()
        else f"{HEADER}kernel void f(device float* y, constant {kind}& v) {{ y[0] = float(v); }}"
    )
    y = torch.zeros(1)
    with pytest.raises(BindingError, match=r"f: \d\d-bit \w+ are bound to buffer 1, and .* reads"):
        lib.f(y, value, arg_casts=cast)
    assert not y.any()


def test_a_structure_takes_any_numbers() -> None:
    lib = compile_shader(
        f"{HEADER}struct Params {{ int n; float x; }};"
        "kernel void f(device float* y, constant Params& p) { y[0] = p.n * p.x; }"
    )
    y, half = torch.zeros(1), torch.tensor(0.5).view(torch.int32).item()
    lib.f(y, [6, half], arg_casts="int32")
    assert y.item() == 3


def test_an_argument_too_many() -> None:
    y = torch.zeros(1)
    with pytest.raises(BindingError, match="f: an argument for buffer 2, which it has not"):
        reads("float").f(y, y, y)


def test_storage_offset_is_applied_and_strides_are_not() -> None:
    storage = torch.arange(20.0)
    y = torch.zeros(4)
    reads("float").f(y, storage[3::2])
    assert y.tolist() == [3, 4, 5, 6]
    whole = torch.zeros(8)
    reads("float").f(whole[2:6], storage[3:])
    assert whole.tolist() == [0, 0, 3, 4, 5, 6, 0, 0]


def test_overlapping_arguments_keep_what_each_wrote() -> None:
    lib = compile_shader(
        f"{HEADER}kernel void f(device float* a, device float* b,"
        " uint i [[thread_position_in_grid]]) { a[2 * i] = 1.0f; b[2 * i] = 2.0f; }"
    )
    packed = torch.zeros(8)
    lib.f(packed, packed[1:], threads=4)
    assert packed.tolist() == [1, 2] * 4
    lib = compile_shader(
        f"{HEADER}kernel void f(device float* a, const device float* b,"
        " uint i [[thread_position_in_grid]]) { a[i] = 2.0f * b[i]; }"
    )
    lib.f(packed, packed)
    assert packed.tolist() == [2, 4] * 4


SCALED_ROWS = f"""{HEADER}kernel void f(device half* y, constant long* p,
    uint2 at [[thread_position_in_grid]]) {{ y[at.y * p[0] + at.x] *= at.y + 2; }}"""


def test_rows_further_apart_than_memory_reaches() -> None:
    """Beyond 2**31 and 2**32 elements; only the elements of the view are copied."""
    lib = Emulator(bounds="view").compile_shader(SCALED_ROWS)
    rows = far_apart(torch.ones(3, 5, dtype=torch.float16), 0, FAR)
    lib.f(rows, [FAR], threads=(5, 3))
    assert rows.tolist() == [[2] * 5, [3] * 5, [4] * 5]
    repeated = rows[:, None].expand(3, 4, 5)
    lib.f(repeated, [FAR], threads=(5, 3))
    assert rows.tolist() == [[4] * 5, [9] * 5, [16] * 5]
    with pytest.raises(OutOfBoundsError, match=f"element {2 * FAR + 5} of buffer 0"):
        lib.f(rows, [FAR], threads=(6, 3))


def test_large_storage_is_not_copied_whole() -> None:
    rows = far_apart(torch.ones(3, 5, dtype=torch.float16), 0, FAR)
    with pytest.raises(MemoryError, match="bounds='view'"):
        compile_shader(SCALED_ROWS).f(rows, [rows.stride(0)], threads=(5, 3))


def test_list_of_tensors_is_a_list_of_addresses() -> None:
    lib = compile_shader(
        f"{HEADER}kernel void f(device float* y, constant ulong* p,"
        " uint i [[thread_position_in_grid]]) { y[i] = ((device float*)p[i])[1]; }"
    )
    tensors = [torch.full((3,), float(n)) for n in range(40)]
    y = torch.zeros(40)
    lib.f(y, tensors)
    assert torch.equal(y, torch.arange(40.0))


POSITIONS = (
    HEADER
    + """
kernel void f(device uint* y, uint3 at [[thread_position_in_grid]],
    uint3 group [[threadgroup_position_in_grid]], uint3 size [[threads_per_threadgroup]],
    uint3 groups [[threadgroups_per_grid]], uint3 total [[threads_per_grid]],
    ushort3 local [[thread_position_in_threadgroup]], uint i [[thread_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]],
    uint simds [[simdgroups_per_threadgroup]], uint width [[threads_per_simdgroup]]) {
  uint n = (at.z * total.y + at.y) * total.x + at.x;
  device uint* r = y + 12 * n;
  r[0] = group.x; r[1] = group.y; r[2] = group.z; r[3] = size.x * 100 + size.y * 10 + size.z;
  r[4] = groups.x * 100 + groups.y * 10 + groups.z; r[5] = local.x; r[6] = local.y;
  r[7] = i; r[8] = lane; r[9] = simd; r[10] = simds; r[11] = width;
}"""
)


def test_threads_are_totals_and_the_last_group_is_smaller() -> None:
    y = torch.full((5 * 3 * 2 * 12,), -1, dtype=torch.int32)
    compile_shader(POSITIONS).f(y, threads=(5, 3, 2), group_size=(4, 2, 1))
    y = y.view(2, 3, 5, 12)
    assert y[1, 2, 4].tolist() == [1, 1, 1, 111, 222, 0, 0, 0, 0, 0, 1, 32]
    assert y[0, 1, 3].tolist() == [0, 0, 0, 421, 222, 3, 1, 7, 7, 0, 1, 32]
    assert y[0, 2, 2].tolist() == [0, 1, 0, 411, 222, 2, 0, 2, 2, 0, 1, 32]


def test_group_size_by_default() -> None:
    lib = compile_shader(
        f"{HEADER}kernel void f(device uint* y, uint i [[thread_position_in_grid]],"
        " uint size [[dispatch_threads_per_threadgroup]]) { y[i] = size; }"
    )
    y = torch.zeros(2000, dtype=torch.int32)
    lib.f(y)
    assert y.unique().tolist() == [1024]
    lib.f(y, threads=10)
    assert y[:10].unique().tolist() == [10]


def test_launch_shapes() -> None:
    lib, y = reads("float"), torch.zeros(4)
    with pytest.raises(ValueError, match="1024"):
        lib.f(y, y, threads=2000, group_size=1025)
    with pytest.raises(ValueError, match="1024"):
        lib.f(y, y, threads=(64, 64), group_size=(64, 32))
    with pytest.raises(RuntimeError, match="same length"):
        lib.f(y, y, threads=(2, 2), group_size=4)
    with pytest.raises(RuntimeError, match="1 to 3"):
        lib.f(y, y, threads=(1, 1, 1, 1))
    with pytest.raises(RuntimeError, match="skip it"):
        lib.f(torch.zeros(0), y)
    with pytest.raises(RuntimeError, match="skip it"):
        lib.f(y, y, threads=(4, 0))
    with pytest.raises(RuntimeError, match="undefined"):
        lib.f(1.0, 2.0)
    with pytest.raises(RuntimeError, match="nothing is bound to buffer 1"):
        lib.f(y)
    with pytest.raises(RuntimeError, match="31 buffers"):
        lib.f(*[y] * 32)


def test_a_kernels_own_limit() -> None:
    lib = compile_shader(
        f"{HEADER}template <int N> [[kernel, max_total_threads_per_threadgroup(N * 32)]]\n"
        "void f(device float* y, uint i [[thread_position_in_grid]]) { y[i] = N; }\n"
        'template [[host_name("f_" "2")]] [[kernel]] decltype(f<2>) f<2>;\n'
        'template [[host_name("f_3")]] kernel void f<3>(device float* y,'
        " uint i [[thread_position_in_grid]]);\n"
    )
    assert sorted(dir(lib)) == ["f_2", "f_3"]
    assert lib.f_2.max_threads_per_threadgroup == 64
    assert lib.f_3.max_threads_per_threadgroup == 96
    assert lib.f_3.thread_execution_width == 32
    y = torch.zeros(70)
    lib.f_3(y)
    assert (y == 3).all()
    with pytest.raises(ValueError, match="64"):
        lib.f_2(y, threads=70, group_size=70)


def test_unknown_kernel() -> None:
    with pytest.raises(RuntimeError, match="nothing"):
        _ = reads("float").nothing


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("kernel void f(device float* y) {\n  y[0] = missing;\n}", "program_source:2:.*missing"),
        ("\nkernel void f(device float* y) {\n\n  y[0] = 1.0f\n}", "program_source:4:.*';'"),
        ("// caf\u00e9", "program_source:1: .*ASCII"),
        ("\n#include <nowhere.h>", "program_source:2:.*nowhere.h"),
        ("#error stop\n", "program_source:1:.*stop"),
        ("\nkernel int f(device float* y) { return 1; }", "program_source:2: .*void"),
        ("void f() { threadgroup float a[4]; }", "program_source:1: .*kernel's body"),
        ("kernel void f(threadgroup float* a [[threadgroup(0)]]) {}", "threadgroup"),
        (
            "#include <metal_stdlib>\n\nkernel void f(device int* y) { *y = metal::max(1.f, 1); }",
            "program_source:3:.*ambiguous",
        ),
    ],
)
def test_compile_errors(source: str, message: str) -> None:
    with pytest.raises(SyntaxError, match=message):
        compile_shader(source)


def test_torch_headers_and_reported_errors() -> None:
    lib = compile_shader(
        """#include <c10/metal/error.h>
        #include <metal_stdlib>
        using namespace metal;
        kernel void f(device float* y, device c10::metal::ErrorMessages* errors,
                      uint i [[thread_position_in_grid]]) {
          if (i == 3) TORCH_REPORT_ERROR(errors, "index ", 3l, " is bad");
          y[i] = i;
        }"""
    )
    y = torch.zeros(3)
    lib.f(y, error_buf_idx=1)
    with pytest.raises(RuntimeError, match="index 3 is bad"):
        lib.f(torch.zeros(5), error_buf_idx=1)


def test_counters_by_kernel() -> None:
    emulator = Emulator()
    lib = emulator.compile_shader(
        f"{HEADER}kernel void f(device float* y, constant float& v,"
        " uint i [[thread_position_in_grid]]) { y[i] += v; }"
    )
    y = torch.zeros(10)
    lib.f(y, 1.0)
    lib.f(y, 1.0, threads=5)
    assert lib.f.last_counters.device_read == lib.f.last_counters.device_written == 20
    assert emulator.counters["f"].device_read == 60
    assert emulator.counters["f"].inline_read == 60


def test_loops_of_stores_are_counted_one_by_one() -> None:
    """The compiler must not make memset of them, which nobody would see."""
    lib = compile_shader(
        f"{HEADER}kernel void f(device float* y, constant long& n) {{"
        " for (int i = 0; i < n; i++) y[i] = 0.0f; }"
    )
    lib.f(torch.ones(100), 100, threads=1)
    assert lib.f.last_counters.device_written == 400


def test_builds_are_kept(tmp_path: Path) -> None:
    """In the user's cache folder; two processes may build the same at once."""
    code = (
        "from orchard.testing.metal import compile_shader; import torch;"
        "lib = compile_shader('kernel void f(device float* y) { y[0] = 1.0f; }');"
        "y = torch.zeros(1); lib.f(y); assert y.item() == 1"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    folder = tmp_path / "orchard" / "metal-emulator"
    kept = sorted(path.name for path in folder.iterdir())
    assert sum(name.startswith("kernel-") for name in kept) == 1
    assert len(kept) == 3  # with the runtime and the empty headers
