"""The emulator notices: mistakes that leave the result right are found all the same."""

from __future__ import annotations

import pytest
import torch

from orchard.testing.metal import (
    SCHEDULES,
    DivergenceError,
    Emulator,
    MetalKernel,
    OutOfBoundsError,
    RaceError,
    UndefinedBehaviourError,
    compile_shader,
)
from orchard.testing.metal.emulator import Schedule
from orchard.testing.metal.toolchain import Mode

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
ARGUMENTS = """(device float* x, device float* y, uint i [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]])"""


def compiled(body: str, mode: Mode = "checked") -> tuple[Emulator, MetalKernel]:
    """A kernel of x, y, i, lane and simd; its body begins at line 5."""
    emulator = Emulator(mode)
    lib = emulator.compile_shader(f"{HEADER}kernel void f{ARGUMENTS} {{\n{body}\n}}")
    return emulator, lib.f


def launch(body: str, threads: int = 64, mode: Mode = "checked", size: int = 64) -> torch.Tensor:
    _, kernel = compiled(body, mode)
    x, y = torch.arange(float(size)), torch.zeros(size)
    kernel(x, y, threads=threads, group_size=threads)
    return y


def test_read_out_of_bounds() -> None:
    with pytest.raises(OutOfBoundsError, match=r"f: read 4 bytes at element 64 of buffer 0, of 64"):
        launch("float seen = x[i + 1]; y[i] = i == 63 ? 0.0f : seen;")


@pytest.mark.parametrize("mode", ["checked", "flat"])
def test_write_out_of_bounds(mode: Mode) -> None:
    with pytest.raises(OutOfBoundsError) as caught:
        launch("y[i] = x[i]; if (i == 3) y[-1] = 0.0f;", mode=mode)
    assert (caught.value.buffer, caught.value.index) == (1, -1)
    assert "thread 3 of threadgroup (0, 0, 0)" in str(caught.value)


def test_far_out_of_bounds() -> None:
    with pytest.raises(OutOfBoundsError, match=r"element 50000000 of buffer 0"):
        launch("y[i] = x[i * 50000000];")


def test_null_pointer() -> None:
    with pytest.raises(OutOfBoundsError, match="in no buffer"):
        launch("device float* nothing = (device float*)0; y[i] = nothing[i];")


def test_nothing_is_written_by_a_failed_launch() -> None:
    _, kernel = compiled("y[i] = 1.0f; if (i == 63) y[64] = 1.0f;")
    y = torch.zeros(64)
    with pytest.raises(OutOfBoundsError):
        kernel(y.clone(), y, threads=64)
    assert not y.any()


def test_bounds_of_a_view() -> None:
    """A tensor's storage goes on after the view; what counts is a setting."""
    emulator, kernel = compiled("y[i] = x[i + 1];")
    storage = torch.arange(100.0)
    y = torch.zeros(64)
    kernel(storage[10:74], y, threads=64)
    assert torch.equal(y, storage[11:75])
    emulator.bounds = "view"
    with pytest.raises(OutOfBoundsError, match="element 64 of buffer 0, of 64"):
        kernel(storage[10:74], y, threads=64)


def test_inline_arguments_are_bounded_and_read_only() -> None:
    source = HEADER + "kernel void f(device int* y, device int* p) { y[0] = p[3]; }"
    lib = compile_shader(source)
    y = torch.zeros(1, dtype=torch.int32)
    lib.f(y, [1, 2, 3, 4], arg_casts="int32")
    assert y.item() == 4
    with pytest.raises(OutOfBoundsError, match="element 3 of buffer 1, of 3"):
        lib.f(y, [1, 2, 3], arg_casts="int32")
    lib = compile_shader(HEADER + "kernel void f(device int* y, device int* p) { p[0] = y[0]; }")
    with pytest.raises(OutOfBoundsError, match="buffer 1, which is read-only"):
        lib.f(y, [1, 2, 3], arg_casts="int32")


def test_references_bind_the_whole_object() -> None:
    source = HEADER + "kernel void f(device long* y, constant long4& p) { y[0] = p.w; }"
    lib, y = compile_shader(source), torch.zeros(1, dtype=torch.int64)
    lib.f(y, [1, 2, 3, 4])
    assert y.item() == 4
    with pytest.raises(OutOfBoundsError, match="read 32 bytes at element 0 of buffer 1, of 3"):
        lib.f(y, [1, 2, 3])
    with pytest.raises(SyntaxError, match="not watched"):
        compile_shader(HEADER + "kernel void f(device long4* y) { y[0] = 1; }")


@pytest.mark.parametrize("index", [-1, 64, 70])
def test_threadgroup_array_out_of_bounds(index: int) -> None:
    with pytest.raises(OutOfBoundsError) as caught:
        launch(f"threadgroup float a[64], b[64]; a[i] = b[i] = 0.0f; y[i] = a[{index}] * 0.0f;")
    assert (caught.value.variable, caught.value.index) == ("a", index)


def test_threadgroup_memory_is_poisoned() -> None:
    assert launch("threadgroup float a[64]; y[i] = a[i];").isnan().all()


def test_registers_are_poisoned() -> None:
    """A variable that is read before anything was written to it shows."""
    assert launch("float a[4]; if (x[0] > 0.0f) a[i % 4] = 1.0f; y[i] = a[i % 4];").isnan().all()


def test_threadgroup_memory_is_limited() -> None:
    body = "threadgroup float a[{}]; a[i] = x[i]; y[i] = a[i];"
    _, kernel = compiled(body.format(8192))
    assert kernel.static_thread_group_memory_length == 32768
    assert torch.equal(launch(body.format(8192)), torch.arange(64.0))
    with pytest.raises(RuntimeError, match="32784 bytes of threadgroup memory"):
        launch(body.format(8193))


def test_misaligned_access() -> None:
    with pytest.raises(UndefinedBehaviourError, match="misaligned"):
        launch("if (i == 0) y[0] = ((device float4*)(x + 1))[0].x;")


@pytest.mark.parametrize(
    ("kind", "declaration", "enough"),
    [
        ("half4", "threadgroup half a[64];", False),
        ("half2", "threadgroup half a[64];", False),
        ("float4", "threadgroup float a[64];", False),
        ("half4", "alignas(4) threadgroup half a[64];", False),
        ("half4", "alignas(2 * 4) threadgroup half a[64], b[2];", True),
        ("float4", "alignas(16) threadgroup float a[64];", True),
        ("half4", "threadgroup half4 a[16];", True),
    ],
)
def test_threadgroup_arrays_are_aligned_as_declared(
    kind: str, declaration: str, enough: bool
) -> None:
    """As their elements are, and no more: a wider access needs alignas, or a wider element."""
    place = f"((threadgroup {kind}*)a)[0]"
    body = f"{declaration} if (i == 0) {{ {place} = {kind}(3); y[0] = {place}.y; }}"
    if enough:
        assert launch(body)[0] == 3
        return
    with pytest.raises(UndefinedBehaviourError, match="misaligned"):
        launch(body)


REVERSED_COPY = """threadgroup float a[64];
a[i] = x[i];
{barrier}
y[i] = a[63 - i];"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "barrier",
    [
        "",
        "threadgroup_barrier(mem_flags::mem_none);",
        "threadgroup_barrier(mem_flags::mem_device);",
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
    ],
)
def test_missing_barrier(barrier: str, schedule: Schedule) -> None:
    """Found whatever the order of the threads, so also where the result is right."""
    emulator, kernel = compiled(REVERSED_COPY.format(barrier=barrier))
    emulator.schedule = schedule
    with pytest.raises(RaceError, match=r"f: race on a\[\d+\]"):
        kernel(torch.arange(64.0), torch.zeros(64), threads=64)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_write_after_read(schedule: Schedule) -> None:
    emulator, kernel = compiled(
        """threadgroup float a[64];
        a[i] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = a[63 - i];
        a[i] = y[i];"""
    )
    emulator.schedule = schedule
    with pytest.raises(RaceError, match="race on a"):
        kernel(torch.arange(64.0), torch.zeros(64), threads=64)


def test_race_within_a_simdgroup() -> None:
    body = "threadgroup float a[32]; a[lane] = x[i]; {} y[i] = a[31 - lane];"
    with pytest.raises(RaceError):
        launch(body.format(""), 32)
    with pytest.raises(RaceError):
        launch(body.format("simdgroup_barrier(mem_flags::mem_none);"), 32)
    right = launch(body.format("simdgroup_barrier(mem_flags::mem_threadgroup);"), 32)
    assert torch.equal(right[:32], torch.arange(32.0).flip(0))


def test_ordered_accesses_are_no_race() -> None:
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    for schedule in SCHEDULES:
        emulator, kernel = compiled(REVERSED_COPY.format(barrier=barrier))
        emulator.schedule = schedule
        y = torch.zeros(64)
        kernel(torch.arange(64.0), y, threads=64)
        assert torch.equal(y, torch.arange(64.0).flip(0))


def test_writing_the_same_value_is_no_race() -> None:
    body = "threadgroup float a[1]; a[0] = {}; threadgroup_barrier(mem_flags::mem_threadgroup);"
    assert (launch(body.format("3.0f") + "y[i] = a[0];") == 3).all()
    with pytest.raises(RaceError):
        launch(body.format("x[i]") + "y[i] = a[0];")


def test_small_elements_are_apart() -> None:
    body = "threadgroup {} a[64]; a[i] = x[i] > 3.0f; y[i] = a[i];"
    for kind in ("bool", "uchar", "half", "ushort"):
        assert launch(body.format(kind)).sum() == 60


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("if (i < 40) threadgroup_barrier(mem_flags::mem_threadgroup);", "40 of 64 threads"),
        ("if (i < 40) return;\nthreadgroup_barrier(mem_flags::mem_none);", "24 of 64 threads"),
        (
            "if (simd == 0)\nthreadgroup_barrier(mem_flags::mem_none);\n"
            "else\nthreadgroup_barrier(mem_flags::mem_none);",
            "64 of 64 threads .* program_source:6; others are at program_source:8",
        ),
    ],
)
def test_divergent_barrier(body: str, found: str) -> None:
    with pytest.raises(DivergenceError, match=found) as caught:
        launch(body)
    assert "program_source:" in str(caught.value)


@pytest.mark.parametrize(
    "collective",
    [
        "y[i] = simd_sum(x[i]);",
        "y[i] = simd_shuffle_xor(x[i], 1);",
        "y[i] = simd_any(true);",
        "simdgroup_barrier(mem_flags::mem_none);",
        "simdgroup_float8x8 m(1.0f); simdgroup_multiply(m, m, m);",
    ],
)
@pytest.mark.parametrize("condition", ["lane < 16", "i != 40"])
def test_divergent_collective(collective: str, condition: str) -> None:
    with pytest.raises(DivergenceError, match="collective at program_source:5"):
        launch(f"if ({condition}) {{ {collective} }}")


def test_divergence_allowed() -> None:
    """Reductions then see the lanes that are there; barriers and matrices still need all."""
    emulator, kernel = compiled("y[i] = lane % 2 ? simd_sum(1.0f) : simd_max(x[i]);")
    emulator.divergence = True
    y = torch.zeros(64)
    kernel(torch.arange(64.0), y, threads=64, group_size=64)
    assert y.view(2, 16, 2).unique(dim=1).flatten().tolist() == [30, 16, 62, 16]
    emulator, kernel = compiled("if (lane < 3) simdgroup_barrier(mem_flags::mem_none);")
    emulator.divergence = True
    with pytest.raises(DivergenceError):
        kernel(y, y, threads=64, group_size=64)


def test_matrices_need_a_full_simdgroup() -> None:
    body = "simdgroup_float8x8 m(1.0f); simdgroup_multiply(m, m, m);"
    with pytest.raises(DivergenceError):
        launch(body, 40)


def test_too_much_thread_memory() -> None:
    body = "volatile float a[80000]; for (int j = 0; j < 80000; j++) a[j] = x[i]; y[i] = a[i];"
    with pytest.raises(SyntaxError, match="stack frame size"):
        launch(body)


@pytest.mark.parametrize(
    "line",
    [
        "device float* p = a;",
        "threadgroup float* p = x;",
        "thread float* p = x;",
        "thread float* p = a;",
        "takes(a);",
        "constant float* p = x;",
    ],
)
def test_address_spaces_do_not_mix(line: str) -> None:
    source = (
        f"{HEADER}void takes(device float*) {{}}\nkernel void f{ARGUMENTS} {{\n"
        f"threadgroup float a[4];\n{line}\n}}"
    )
    with pytest.raises(SyntaxError, match=r"(?s)program_source:7:\d+: error: .*'(device|thr)"):
        compile_shader(source)
    if "constant" not in line:
        compile_shader(source, mode="flat")


def test_undefined_behaviour() -> None:
    body = "uint shift = uint(x[0]) + 32 + i; y[i] = float(1 << shift);"
    launch(body)
    with pytest.raises(UndefinedBehaviourError, match="shift out of bounds"):
        launch(body, mode="flat")
    with pytest.raises(UndefinedBehaviourError, match="out of bounds"):
        launch("float a[4]; for (uint j = 0; j < i; j++) a[j] = x[j]; y[i] = a[0];", mode="flat")
