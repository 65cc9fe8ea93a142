"""The lint: every rule catches a minimal mistake, and our kernels make none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from orchard.attention.problem import Band, Options, Tensors, Upstream, describe
from orchard.backends.metal import MetalBackend, capability
from orchard.backends.metal.source import source
from orchard.testing.metal.launch_lint import Recorder, check_launch
from orchard.testing.metal.lint import (
    check,
    signatures,
    sizes,
    specialisations,
    stored_specialisations,
)

pytestmark = pytest.mark.metal

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"


def rules(text: str) -> list[str]:
    return [finding.rule for finding in check(HEADER + text)]


def kernel(parameters: str, body: str = "") -> str:
    return f"[[kernel]] void f({parameters}) {{ {body} }}"


SOUND = """
#define SIZE(n) ((n) > 4 ? (n) / 2 * 2 : 4)
#include <metal_simdgroup_matrix>
#include <c10/metal/utils.h>
typedef half T;
enum Places { FIRST, SECOND };
struct Later;
constant float HALVES[] = {0.5f, 1.5f};
constexpr constant int COUNT = SIZE(3), MORE{2};
template <typename U, int N = 2> constexpr constant bool is_wide = sizeof(U) > N;
struct Pair {
  static constexpr constant int size = 2;
  float a, b;
  Pair(float x) : a(x), b(x) {}
  float sum() const thread { return a * b + a; }
  static float zero() { return 0.0f; }
};
template <int N>
METAL_FUNC float scaled(const threadgroup T* tile, thread float& x, constant long* p) {
  return float(*reinterpret_cast<const threadgroup T*>(tile)) * x * p[FIRST] * N;
}
[[kernel, max_total_threads_per_threadgroup(4 * 32)]] void f(
    device float* y [[buffer(0)]], constant long* p [[buffer(30)]],
    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  alignas(16) threadgroup T tile[SIZE(64) * (64 + 16 / int(sizeof(T)))];
  static constant float table[2] = {fast::exp2(1.0f), metal::precise::tanh(2.0f)};
  threadgroup T* corner = tile + lane * 2;
  const device float* from = y + (group.x & 3u) * 0xFFFFFFFFu;
  for (int i = 0; i < int(p[SECOND]) * 2; i++) {
    float x = from[i] * y[lane];
    y[i] = x * scaled<2>(corner, x, p);
    if (i > 3 && lane < 4) return;
  }
}
"""


def test_sound_source_is_left_alone() -> None:
    assert check(HEADER + SOUND) == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("// caf\xe9", "ascii"),
        ("constant int n [[function_constant(0)]];", "function_constant"),
        (kernel("uint i", "if constexpr (true) return;"), "if constexpr"),
        (kernel("uint i", "auto g = [&](int x) { return x; };"), "lambda"),
        (kernel("uint i", "g([=] { });"), "lambda"),
        (kernel("uint i", "return [i] { };"), "lambda"),
        (kernel("float* x"), "address space"),
        (kernel("const float& x"), "address space"),
        ("float g(float* x);", "address space"),
        ("float* g(device float* x) { return 0; }", "address space"),
        ("template <typename U> void g(U&& x) {}", "address space"),
        (kernel("device float* x", "float* y = x;"), "address space"),
        (kernel("device float* x", "if (x) { auto& y = x[0]; }"), "address space"),
        (kernel("device float* x", "for (const float* y = x;;) {}"), "address space"),
        (kernel("device float* x", "x = (float*)x;"), "address space"),
        (kernel("device float* x", "x = reinterpret_cast<float2*>(x);"), "address space"),
        ("#define PLACE float*\n" + kernel("device float* x", "PLACE y = x;"), "address space"),
        ("struct S { float* x; };", "address space"),
        ("struct S { float g() { return 0.0f; } };", "member"),
        ("struct S { float g() const; };", "member"),
        ("struct S { float operator*(float x) { return x; } };", "member"),
        (kernel("device float* x [[buffer(31)]]"), "buffers"),
        (kernel("threadgroup float* x [[threadgroup(0)]]"), "threadgroup argument"),
        (kernel("constant uint3& x"), "vector of 3"),
        (kernel("constant int3* x"), "vector of 3"),
        (kernel("constant float3& x"), "vector of 3"),
        (kernel("uint i", "threadgroup float x[8193];"), "memory"),
        (kernel("uint i", "threadgroup float x[64][64]; threadgroup half2 y[4097];"), "memory"),
        (kernel("uint i", "threadgroup float x[UNKNOWN];"), "memory"),
        (
            "#define N 96\ntypedef vec<half, 4> V;" + kernel("", "threadgroup V x[N * N];"),
            "memory",
        ),
        ("void g() { threadgroup float x[4]; }", "threadgroup variable"),
        ("typedef bfloat bfloat16;", "bfloat16"),
        (kernel("uint i", "long x = 1L;"), "64-bit literal"),
        (kernel("uint i", "ulong x = 0x100000000;"), "64-bit literal"),
        (kernel("uint i", "long long x = 1;"), "long long"),
        (kernel("uint i", "double x = 1;"), "double"),
        ("int g(int n) { return n ? g(n - 1) : 0; }", "recursion"),
        ("int h(int); int g(int n) { return h(n); } int h(int n) { return g(n); }", "recursion"),
        (kernel("uint i", "uint j = std::min(i, 2u);"), "std"),
        ("using namespace std;", "std"),
        (kernel("uint i", "throw i;"), "throw"),
        (kernel("uint i", "try { } catch (int e) { }"), "try"),
        ("struct S { virtual void g() thread; };", "virtual"),
        (kernel("device atomic_float* x"), "atomic_float"),
        (kernel("device atomic<float>* x"), "atomic_float"),
        (kernel("constant int& n"), "inline argument"),
        (kernel("device float* y, constant uint* n [[buffer(1)]]"), "inline argument"),
        (kernel("constant const vec<half, 4>& n"), "inline argument"),
        ("#define KIND short\ntypedef KIND K;" + kernel("constant K* n"), "inline argument"),
        (kernel("device float* y", "y[0] = exp2(y[0]);"), "fast or precise"),
        (kernel("device float* y", "y[0] = metal::tanh(y[0]);"), "fast or precise"),
        ("int counter = 0;", "program scope"),
        ("const float half_of_it = 0.5f;", "program scope"),
        ("constexpr float third{0.3f};", "program scope"),
        ("float table[2] = {1.0f, 2.0f};", "program scope"),
        ("float given = metal::max(1.0f, 2.0f);", "program scope"),
        ("namespace n { static int counter; }", "program scope"),
        ("template <int N> constexpr int twice = 2 * N;", "program scope"),
        ("struct S { static constexpr int size = 2; };", "program scope"),
        (kernel("uint i", "static int n = 0;"), "static variable"),
        (kernel("uint i", "if (i) { static const float n[2] = {}; }"), "static variable"),
        ("[[kernel, max_total_threads_per_threadgroup(2048)]] void f() {}", "group size"),
        (
            "#define N 64\n[[max_total_threads_per_threadgroup(32 * N)]] kernel void f() {}",
            "group size",
        ),
        (kernel("uint i", "simdgroup_float8x8 m;"), "include"),
        (kernel("uint i", "simdgroup_matrix<half, 8, 8> m;"), "include"),
        (kernel("uint i", "alignas(16) threadgroup float x[8193];"), "memory"),
        ("#include <vector>", "include"),
        ('#include "common.h"', "include"),
        ("void g() { (", "brackets"),
    ],
)
def test_each_rule_catches(text: str, rule: str) -> None:
    """A minimal mistake is found, by the rule it is meant for."""
    assert rule in rules(text)


def test_signatures() -> None:
    """By buffer, what a constant one is read as; built-in values are none."""
    text = "#define KIND long\ntypedef KIND K;" + kernel(
        "const device half* x [[buffer(3)]], constant K* p, uint i [[thread_index_in_simdgroup]],"
        " constant vec<float, 2>& f [[buffer(0)]], constant Pair& pair"
    )
    assert signatures(HEADER + text) == {"f": {3: None, 1: "long", 0: "float", 2: None}}


def test_a_finding_names_its_line() -> None:
    (finding,) = check(f"{HEADER}\n\n{kernel('uint i', 'throw 1;')}")
    assert str(finding) == "5: throw: Metal has no exceptions"


def test_what_is_left_out_does_not_count() -> None:
    """Comments, strings and branches that are not taken are no mistakes; those taken are."""
    text = "// throw\n/* std:: */\n#define N 2\n#if N == {} && !defined(X)\n{}\n#else\n{}\n#endif"
    good, bad = kernel("uint i"), kernel("float* x")
    assert rules(text.format(2, good, bad)) == []
    assert rules(text.format(3, good, bad)) == ["address space"]


def test_every_specialisation() -> None:
    """Nothing is wrong with any source that the launcher can have compiled."""
    found, count = set(), 0
    for file, made in specialisations():
        count += 1
        found.update((file, str(finding)) for finding in check(source(file, made)))
    assert found == set()
    assert count == 480 + 1920 + 768


def test_every_specialisation_in_few_bits() -> None:
    """Each storage of an operand, and each option with one of them."""
    found, count = set(), 0
    for file, made in stored_specialisations():
        count += 1
        found.update((file, str(finding)) for finding in check(source(file, made)))
    assert found == set()
    assert count == 160 + 80 + 2 * 7


@pytest.mark.parametrize("step", [64, pytest.param(16, marks=pytest.mark.slow)])
def test_threadgroup_memory_of_every_size(step: int) -> None:
    for file, made in sizes(step):
        assert check(source(file, made)) == [], made


@pytest.mark.parametrize(
    ("args", "rule"),
    [
        ([None], "argument"),
        (["text"], "argument"),
        ([[1, 2.5]], "mixed list"),
        ([[]], "empty list"),
        ([[1, 2, 3]], "list of 3"),
        ([[0.5] * 3], "list of 3"),
        ([[1] * 513], "inline bytes"),
        ([[0.5] * 1025], "inline bytes"),
        ([[torch.zeros(2)]], "tensor list"),
        ([torch.zeros(0)], "empty tensor"),
        ([torch.zeros(2, dtype=torch.float64)], "dtype"),
        ([1] * 32, "buffers"),
    ],
)
def test_each_argument_rule_catches(args: Sequence[Any], rule: str) -> None:
    assert rule in [finding.rule for finding in check_launch(args, (128,), (128,))]


@pytest.mark.parametrize(
    ("threads", "group_size", "rule"),
    [
        ((0, 1, 1), (128, 1, 1), "zero-size launch"),
        ((2048,), (2048,), "group size"),
        ((128, 16, 1), (128, 16, 1), "group size"),
        ((128,), (0,), "group size"),
        ((128, 1, 1), (128,), "grid"),
        ((4, 2, 1), (128, 1, 1), "grid"),
        ((256, 3, 1), (128, 2, 1), "grid"),
    ],
)
def test_each_grid_rule_catches(
    threads: Sequence[int], group_size: Sequence[int], rule: str
) -> None:
    assert rule in [finding.rule for finding in check_launch([1], threads, group_size)]


SIGNATURE = {0: None, 1: "long", 2: "float"}


@pytest.mark.parametrize(
    ("args", "rule"),
    [
        ([torch.zeros(4), 3], "arguments"),
        ([torch.zeros(4), 3, 0.5, 1], "arguments"),
        ([torch.zeros(4), 3.0, 0.5], "inline argument"),
        ([torch.zeros(4), [1, 2], [1, 2]], "inline argument"),
    ],
)
def test_each_rule_of_a_signature_catches(args: Sequence[Any], rule: str) -> None:
    found = check_launch(args, (128,), (128,), SIGNATURE)
    assert [finding.rule for finding in found] == [rule]


def test_sound_launch_is_left_alone() -> None:
    args = [torch.zeros(4), 3, 0.5, [1] * 512, [0.5] * 1024, [True, 2]]
    assert check_launch(args, (256, 2, 1), (128, 1, 1)) == []
    assert check_launch([torch.zeros(4), [3, 4], 0.5], (256,), (128,), SIGNATURE) == []


class Recorded(MetalBackend):
    """metal on CPU tensors, which nothing touches."""

    capabilities = (capability("cpu"),)


PLAIN = Options(0.2)
EVERYTHING = Options(0.2, 3.0, Band(-5, 9), 6000)


@pytest.mark.parametrize("value_dim", [0, 1, 24])
@pytest.mark.parametrize("masked", [None, torch.bool, torch.float16])
@pytest.mark.parametrize("options", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize(("rows", "keys"), [(40, 50), (1, 900), (2, 1), (0, 9), (9, 0)])
def test_every_launch(
    rows: int, keys: int, options: Options, masked: torch.dtype | None, value_dim: int
) -> None:
    """Forward, backward and decode are launched as torch takes it; nothing for nothing."""
    recorder = Recorder()
    backend = Recorded(recorder)
    query, key = torch.empty(2, 4, rows, 16), torch.empty(2, 2, keys, 16)
    mask = None if masked is None else torch.zeros(1, 4, rows, 1, dtype=masked)
    seed = torch.zeros(2, dtype=torch.int32)
    tensors = Tensors(query, key, torch.empty(2, 2, keys, value_dim), mask, seed)
    trained = masked == torch.float16
    ahead = describe(tensors, options, grad=True, lse=True, mask_grad=trained)
    saved = backend.forward(ahead, "simdgroup", tensors)
    upstream = Upstream(torch.empty_like(saved.out), torch.empty_like(saved.lse))
    back = describe(
        tensors,
        options,
        stage="backward",
        grad_out=upstream.out,
        grad=True,
        lse=True,
        mask_grad=trained,
    )
    backend.backward(back, "simdgroup", tensors, saved, upstream)
    assert [str(finding) for finding in recorder.findings] == []
    assert bool(recorder.launches) == (rows * keys > 0)
    assert recorder.sources == (2 if recorder.launches else 0)
