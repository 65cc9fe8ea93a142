"""Unit kernels: each intrinsic beside what the Metal Shading Language Specification says of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from orchard.testing.metal import Emulator, compile_shader

HEADER = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
FLOATS = {"float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16}
INTEGERS = {"int": torch.int32, "long": torch.int64, "short": torch.int16, "uchar": torch.uint8}
DTYPES = FLOATS | INTEGERS


def elementwise(
    expression: str, *operands: Tensor, result: str = "float", kinds: str = "float"
) -> Tensor:
    """`expression` of a, b, c at each element; `kinds` are their types, or one for all."""
    types = kinds.split() * (len(operands) if " " not in kinds else 1)
    pairs = list(zip("abc", types, strict=False))[: len(operands)]
    parameters = "".join(f", const device {kind}* {name}_" for name, kind in pairs)
    loads = "".join(f"{kind} {name} = {name}_[i]; " for name, kind in pairs)
    lib = compile_shader(
        f"{HEADER}kernel void f(device {result}* y{parameters},"
        f" uint i [[thread_position_in_grid]]) {{ {loads} y[i] = {expression}; }}"
    )
    y = torch.zeros(operands[0].shape, dtype=DTYPES[result])
    lib.f(y, *operands)
    return y


def over_lanes(expression: str, x: Tensor, result: str = "float", kind: str = "float") -> Tensor:
    """`expression` of x and lane in one simdgroup."""
    lib = compile_shader(
        f"{HEADER}kernel void f(device {result}* y, const device {kind}* x_,"
        f" ushort lane [[thread_index_in_simdgroup]]) {{ {kind} x = x_[lane];"
        f" y[lane] = {expression}; }}"
    )
    y = torch.zeros(32, dtype=DTYPES[result])
    lib.f(y, x, threads=32, group_size=32)
    return y


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "exp10": lambda x: 10.0**x,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "atan": torch.atan,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "rint": torch.round,
    "round": lambda x: x.sign() * (x.abs() + 0.5).floor(),
    "trunc": torch.trunc,
    "fract": lambda x: x - x.floor(),
    "fabs": torch.abs,
    "abs": torch.abs,
    "sign": lambda x: x.sign().nan_to_num(0.0),
    "saturate": lambda x: x.nan_to_num(0.0, 1.0, 0.0).clamp(0, 1),
}
# Errors that the specification allows without fast math, in units of the last place of float.
# Other types are rounded correctly from float, which makes one unit at most.
EXPONENTIAL = ("exp", "exp2", "exp10", "log", "log2", "log10", "sinh", "cosh")
APPROXIMATE = dict.fromkeys((*EXPONENTIAL, "sin", "cos"), 4.0)
APPROXIMATE |= {"atan": 5.0, "tanh": 5.0, "tan": 6.0}
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan)


def last_place(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of the numbers of a type around these."""
    info = torch.finfo(dtype)
    below = torch.exp2(torch.frexp(exact).exponent.double() - 1)  # the power of two
    return (info.eps * below).clamp(min=info.tiny * info.eps)


@pytest.mark.parametrize("kind", FLOATS)
def test_unary_math(kind: str) -> None:
    """All in one kernel, with fast:: and precise:: beside them; tanh(10), exp2(-inf), log(0)."""
    x = torch.cat((torch.linspace(-10, 10, 83), torch.tensor(SPECIAL))).to(FLOATS[kind])
    spaces = ("", "fast::", "precise::")
    calls = [f"{space}{name}" for name in UNARY for space in spaces]
    stores = "\n".join(f"y[{n} * {len(x)} + i] = {call}(x[i]);" for n, call in enumerate(calls))
    lib = compile_shader(
        f"{HEADER}kernel void f(device {kind}* y, const device {kind}* x,"
        f" uint i [[thread_position_in_grid]]) {{\n{stores}\n}}"
    )
    y = torch.zeros(len(calls), len(x), dtype=x.dtype)
    lib.f(y, x, threads=len(x))
    for call, found in zip(calls, y, strict=True):
        name = call.split("::")[-1]
        exact = UNARY[name](x.double())
        allowed = APPROXIMATE.get(name, 0.5) if kind == "float" else 1.0
        nearest = exact.to(x.dtype)
        same = (found == nearest) | (found.isnan() & nearest.isnan())
        near = (found.double() - exact).abs() <= allowed * last_place(exact, x.dtype)
        wrong = ~(same | (near & nearest.isfinite()))
        assert not wrong.any(), f"{call} of {x[wrong].tolist()} is {found[wrong].tolist()}"


@pytest.mark.parametrize(
    ("expression", "kind", "a", "b", "expected"),
    [
        ("max(a, b)", "float", [1, math.nan, 3], [2, 5, math.nan], [2, 5, 3]),
        ("min(a, b)", "float", [1, math.nan, 3], [2, 5, math.nan], [1, 5, 3]),
        ("max(a, b)", "int", [-1, 7], [2, -9], [2, 7]),
        ("max(a, b)", "half", [-1, 7], [2, -9], [2, 7]),
        ("min(a, b)", "bfloat", [-1, 7], [2, -9], [-1, -9]),
        ("pow(a, b)", "float", [2, 3], [10, 2], [1024, 9]),
        ("fmod(a, b)", "float", [7, -7], [4, 4], [3, -3]),
        ("copysign(a, b)", "float", [1, 2], [-3, 3], [-1, 2]),
        ("a % b", "long", [2**40 + 3, -7], [2**20, 4], [3, -3]),
        ("a / b", "long", [2**40 + 3, -7], [2**20, 4], [2**20, -1]),
        ("absdiff(a, b)", "int", [3, 9], [5, 2], [2, 7]),
        ("select(a, b, a < b)", "float", [1, 5], [2, 4], [2, 5]),
        ("clamp(a, -b, b)", "float", [-9, 1], [2, 2], [-2, 1]),
        ("mix(a, b, 0.25f)", "float", [0, 4], [4, 0], [1, 3]),
    ],
)
def test_binary(
    expression: str, kind: str, a: list[float], b: list[float], expected: list[float]
) -> None:
    operands = (torch.tensor(values, dtype=DTYPES[kind]) for values in (a, b))
    assert elementwise(expression, *operands, result=kind, kinds=kind).tolist() == expected


def test_integer_functions() -> None:
    values = [0, 1, 0x80000000, 0xFFFFFFFF, 0xD2511F53, 0x12345678]
    a = torch.tensor(values).to(torch.int32)
    kinds = "uint uint"
    b = a.flip(0)
    high = [x * y >> 32 for x, y in zip(values, values[::-1], strict=True)]
    assert (elementwise("mulhi(a, b)", a, b, result="long", kinds=kinds)).tolist() == high
    ones = [value.bit_count() for value in values]
    assert elementwise("popcount(a)", a, result="int", kinds="uint").tolist() == ones
    zeros = [32 - value.bit_length() for value in values]
    assert elementwise("clz(a)", a, result="int", kinds="uint").tolist() == zeros
    low = [(value & -value).bit_length() - 1 if value else 32 for value in values]
    assert elementwise("ctz(a)", a, result="int", kinds="uint").tolist() == low
    turned = [(value << 8 | value >> 24) & 0xFFFFFFFF for value in values]
    assert elementwise("rotate(a, 8u)", a, result="long", kinds="uint").tolist() == turned
    mirrored = [int(f"{value:032b}"[::-1], 2) for value in values]
    assert elementwise("reverse_bits(a)", a, result="long", kinds="uint").tolist() == mirrored


def test_classification() -> None:
    x = torch.tensor([0.0, -1.0, math.inf, -math.inf, math.nan])
    for name, expected in (
        ("isnan", [0, 0, 0, 0, 1]),
        ("isinf", [0, 0, 1, 1, 0]),
        ("isfinite", [1, 1, 0, 0, 0]),
        ("signbit", [0, 1, 0, 1, 0]),
    ):
        assert elementwise(f"{name}(a)", x, result="int").tolist() == expected
    assert elementwise("isunordered(a, 1.0f)", x, result="int").tolist() == [0, 0, 0, 0, 1]


def test_as_type() -> None:
    x = torch.tensor([1.0, -2.5, math.inf])
    assert elementwise("as_type<int>(a)", x, result="int").tolist() == x.view(torch.int32).tolist()
    halves = x.view(torch.int16).view(3, 2)[:, 1].tolist()
    assert elementwise("as_type<short2>(a).y", x, result="short").tolist() == halves
    assert elementwise("as_type<float>(as_type<uint>(a))", x).tolist() == x.tolist()


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_each_operation_rounds(kind: str) -> None:
    dtype = FLOATS[kind]
    a, b, c = (torch.randn(3, 1000) * 10).to(dtype).unbind()
    assert torch.equal(elementwise("a * b + c", a, b, c, result=kind, kinds=kind), a * b + c)
    assert torch.equal(elementwise("a / b - c", a, b, c, result=kind, kinds=kind), a / b - c)
    once = (a.double() * b.double() + c.double()).to(dtype)
    assert torch.equal(elementwise("fma(a, b, c)", a, b, c, result=kind, kinds=kind), once)
    wide = torch.randn(1000) * 1e4
    assert torch.equal(elementwise(f"{kind}(a)", wide, result=kind), wide.to(dtype))
    assert torch.equal(elementwise("float(a)", a, kinds=kind), a.float())


def test_bfloat_rounding_of_special_values() -> None:
    bits = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00000001, 0x3F808000, 0x3F818000, 0x80000000]
    x = torch.tensor(bits).to(torch.int32).view(torch.float32)
    assert torch.equal(elementwise("bfloat(a)", x, result="bfloat"), x.to(torch.bfloat16))
    assert elementwise("bfloat(a)", torch.tensor([math.nan]), result="bfloat").isnan().all()


def test_literals() -> None:
    x = torch.ones(1)
    assert elementwise("sizeof(1.0) + sizeof(1.5h) * 10 + sizeof(1e3) * 100", x).item() == 424
    assert elementwise("0.1h == half(0.1f) && 0x10 == 16 && 1.e1 == 10 && .5 == 0.5f", x).item()
    assert elementwise("a * 0.1", torch.tensor([3.0])).item() == (torch.tensor(3.0) * 0.1).item()


VECTORS = """
template <typename T> T twice(T x) { return T(x) + (T)x; }
template <typename T> struct Pair {
  using two = vec<T, 2>;
  static two of(T a) { return two(a, 2); }
};
kernel void f(device float* y, device float4* v, constant int3& c) {
  float4 a = float4(1, 2, 3, 4), b = float4(float2(5, 6), 7, 8), s = float4(9);
  int4 i = int4(a + 0.75f);
  y[0] = a.x + b.w; y[1] = s.y; y[2] = i.z; y[3] = ((float2)(1)).y + float3(b.xy, 1).z;
  y[4] = dot(a, b); y[5] = any(a > 3.5f); y[6] = all(a > 3.5f);
  y[7] = select(a, b, a < 2.5f).y; y[8] = twice(float3(1, 2, 3)).z; y[9] = twice(2);
  y[10] = Pair<float>::of(3).y; y[11] = static_cast<float2>(int2(3, 4)).y;
  y[12] = max(a, b.wzyx).x; y[13] = clamp(a, 1.5f, 2.5f).w; y[14] = fma(a, b, s).x;
  y[15] = exp2(a).z; y[16] = c.z; y[17] = vec<half, 2>(half2(1.5h)).y; y[18] = sizeof(float3);
  y[19] = Pair<half>::two(1, 2).y; uint4 z = 0; z.zw = uint2(7, 8); y[20] = z.w + z.x;
  a.xy += 1.0f; y[21] = a.x; y[22] = metal::vec<int, 3>(1, 2, 3).z; y[23] = bool(a.x) ? 1 : 0;
  v[1] = v[0].wzyx; y[24] = fabs(-a).w; y[25] = length(float2(3, 4)); y[26] = isnan(a)[0];
  y[27] = mulhi(uint4(0xffffffff), uint4(2)).x; y[28] = as_type<uint2>(ushort4(1, 0, 2, 0)).y;
}
"""


def test_vectors() -> None:
    lib = compile_shader(HEADER + VECTORS)
    y, v = torch.zeros(29), torch.arange(8.0)
    lib.f(y, v, [1, 2, 5, 0], threads=1, arg_casts="int32")
    expected = [9, 9, 3, 2, 70, 1, 0, 6, 6, 4, 2, 4, 8, 2.5, 14, 8, 5, 1.5, 16, 2, 8, 2, 3, 1]
    assert y.tolist() == [*expected, 4, 5, 0, 1, 2]
    assert v.tolist() == [0, 1, 2, 3, 3, 2, 1, 0]


LANES = torch.arange(32.0)
ODD = 2 * LANES + 1


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("simd_sum(x)", torch.full((32,), 1024.0)),
        ("simd_max(x)", torch.full((32,), 63.0)),
        ("simd_min(-x)", torch.full((32,), -63.0)),
        ("simd_product(x < 7.0f ? x : 1.0f)", torch.full((32,), 15.0)),
        ("simd_shuffle(x, 31 - lane)", ODD.flip(0)),
        ("simd_shuffle_xor(x, 5)", ODD[torch.arange(32) ^ 5]),
        ("simd_shuffle_down(x, 3)", torch.cat([ODD[3:], ODD[29:]])),
        ("simd_shuffle_up(x, 3)", torch.cat([ODD[:3], ODD[:29]])),
        ("simd_shuffle_rotate_down(x, 3)", ODD.roll(-3)),
        ("simd_shuffle_rotate_up(x, 3)", ODD.roll(3)),
        ("simd_broadcast(x, 9)", torch.full((32,), 19.0)),
        ("simd_broadcast_first(x)", torch.ones(32)),
        ("simd_prefix_inclusive_sum(x)", ODD.cumsum(0)),
        ("simd_prefix_exclusive_sum(x)", ODD.cumsum(0) - ODD),
        ("simd_any(x == 9.0f)", torch.ones(32)),
        ("simd_any(x == 8.0f)", torch.zeros(32)),
        ("simd_all(x > 0.0f)", torch.ones(32)),
        ("simd_all(x > 1.0f)", torch.zeros(32)),
        ("ulong(simd_ballot(x < 6.0f))", torch.full((32,), 7.0)),
        ("simd_is_first()", (LANES == 0).float()),
        ("simd_or(1u << (lane % 8))", torch.full((32,), 255.0)),
        ("simd_xor(uint(lane))", torch.zeros(32)),
        ("simd_sum(float2(x, 1.0f)).y", torch.full((32,), 32.0)),
        ("simd_shuffle_xor(half4(x), 1).w", ODD[torch.arange(32) ^ 1]),
    ],
)
def test_lanes_together(expression: str, expected: Tensor) -> None:
    assert torch.equal(over_lanes(expression, ODD), expected)


def test_reductions_of_narrow_types() -> None:
    for kind, dtype in (("half", torch.float16), ("bfloat", torch.bfloat16)):
        assert over_lanes("simd_sum(x)", torch.ones(32, dtype=dtype), kind=kind)[5] == 32
    long = torch.full((32,), 2**40)
    assert over_lanes("simd_sum(x)", long, "long", "long")[0] == 2**45


def test_collectives_in_a_loop_read_no_later_value() -> None:
    body = "float s = 0; for (int n = 0; n < 50; n++) {{ s += {}; x = x + 1.0f; }} y[lane] = s;"
    for call, one in (("simd_sum(x)", 32.0), ("simd_shuffle_xor(x, 1)", 1.0)):
        emulator = Emulator(schedule="random")
        lib = emulator.compile_shader(
            f"{HEADER}kernel void f(device float* y, ushort lane [[thread_index_in_simdgroup]])"
            f" {{ float x = 0; {body.format(call)} }}"
        )
        for seed in range(5):
            emulator.seed = seed
            y = torch.zeros(32)
            lib.f(y)
            assert (y == one * 1225).all()


MATRICES = """
template <typename T, typename A>
kernel void product(device A* y, const device T* a, const device T* b, const device A* c) {{
  threadgroup T memory[8 * 11];
  simdgroup_matrix<T, 8, 8> left, right;
  simdgroup_matrix<A, 8, 8> sum;
  simdgroup_load(left, a, 10, ulong2(2, 1));
  simdgroup_store(left, memory, 11, ulong2(3, 0), true);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(left, memory, 11, ulong2(3, 0), true);
  simdgroup_load(right, b, 8, ulong2(0, 0), true);
  simdgroup_load(sum, c);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_store(sum, y);
}}
template [[host_name("product")]] kernel void product<{0}, {1}>(
    device {1}*, const device {0}*, const device {0}*, const device {1}*);
"""


@pytest.mark.parametrize("accumulator", ["float", "same"])
@pytest.mark.parametrize("kind", FLOATS)
def test_matrix_product(kind: str, accumulator: str) -> None:
    summed = kind if accumulator == "same" else "float"
    lib = compile_shader(HEADER + MATRICES.format(kind, summed))
    a, b = torch.randn(9, 10).to(FLOATS[kind]), torch.randn(8, 8).to(FLOATS[kind])
    c = torch.randn(8, 8).to(FLOATS[summed])
    y = torch.full_like(c, math.nan)
    lib.product(y, a, b, c, threads=32)
    exact = a[1:, 2:].double() @ b.T.double() + c.double()
    eps = torch.finfo(y.dtype).eps
    torch.testing.assert_close(y.double(), exact, rtol=eps, atol=8 * torch.finfo(torch.float32).eps)
    assert lib.product.last_counters.multiplies == 1
    assert lib.product.last_counters.device_read == 2 * 64 * a.element_size() + c.nbytes


def test_matrix_layout() -> None:
    """Lane bits b4..b0 hold row 4*b4 + 2*b2 + b1, columns 4*b3 + 2*b0 and the next."""
    lib = compile_shader(
        HEADER
        + """kernel void f(device float* y, const device float* x, device float* filled,
            ushort lane [[thread_index_in_simdgroup]]) {
          simdgroup_float8x8 m, ones = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
          simdgroup_load(m, x);
          y[2 * lane] = m.thread_elements()[0];
          y[2 * lane + 1] = m.thread_elements()[1];
          simdgroup_multiply(m, simdgroup_float8x8(2.0f), ones);
          simdgroup_store(m, filled);
        }"""
    )
    y, filled = torch.zeros(64), torch.zeros(64)
    lib.f(y, torch.arange(64.0), filled, threads=32)
    for lane in range(32):
        b4, b3, b2, b1, b0 = (lane >> n & 1 for n in (4, 3, 2, 1, 0))
        first = 8 * (4 * b4 + 2 * b2 + b1) + 4 * b3 + 2 * b0
        assert y[2 * lane : 2 * lane + 2].tolist() == [first, first + 1]
    assert (filled == 2).all()


def test_atomics() -> None:
    lib = compile_shader(
        HEADER
        + """kernel void f(device atomic_uint* count, device atomic<float>* sum,
            device atomic_int* top, uint i [[thread_position_in_grid]],
            uint local [[thread_index_in_threadgroup]]) {
          threadgroup atomic_uint shared;
          if (local == 0) atomic_store_explicit(&shared, 0u, memory_order_relaxed);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          atomic_fetch_add_explicit(&shared, 1u, memory_order_relaxed);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          if (local == 0)
            atomic_fetch_add_explicit(
                count, atomic_load_explicit(&shared, memory_order_relaxed), memory_order_relaxed);
          atomic_fetch_add_explicit(sum, 0.5f, memory_order_relaxed);
          atomic_fetch_max_explicit(top, int(i), memory_order_relaxed);
        }"""
    )
    count, total, top = torch.zeros(1, dtype=torch.int32), torch.zeros(1), torch.zeros(1)
    top = top.int()
    lib.f(count, total, top, threads=500, group_size=100)
    assert (count.item(), total.item(), top.item()) == (500, 250.0, 499)


def test_workers_share_the_threadgroups() -> None:
    emulator = Emulator(workers=3)
    lib = emulator.compile_shader(
        f"{HEADER}kernel void f(device float* y, uint i [[thread_position_in_grid]],"
        " uint group [[threadgroup_position_in_grid]]) { threadgroup float a[64];"
        " a[i % 64] = i; threadgroup_barrier(mem_flags::mem_threadgroup);"
        " y[i] = a[63 - i % 64] + group; }"
    )
    y = torch.zeros(640)
    lib.f(y, group_size=64, threads=640)
    groups = torch.arange(10.0).view(10, 1)
    assert torch.equal(y.view(10, 64), torch.arange(640.0).view(10, 64).flip(1) + groups)
    assert lib.f.last_counters.threadgroups == lib.f.last_counters.threadgroup_barriers == 10
