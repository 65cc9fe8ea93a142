// Vectors of one instruction set, by the compilers' vector extensions.
//
// Neither this nor a file that includes it calls an inline function of the C++ library: compiled
// for one instruction set, it could be linked into code for another. Types are harmless.
#pragma once

#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define ORCHARD_INLINE static inline __attribute__((always_inline))

namespace orchard::ORCHARD_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileRows = 8;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kTileRows = 4;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kTileRows = 8;
#else
constexpr int kLanes = 4;
constexpr int kTileRows = 4;
#endif

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kHasPairs = true;  // a product of bf16 pairs, summed into fp32
#else
constexpr bool kHasPairs = false;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

template <class Vector, class T>
ORCHARD_INLINE Vector load_as(const T *from) {
  Vector v;
  memcpy(&v, from, sizeof v);
  return v;
}
ORCHARD_INLINE Floats load(const float *from) { return load_as<Floats>(from); }
template <class Vector, class T>
ORCHARD_INLINE void store(T *to, Vector v) {
  memcpy(to, &v, sizeof v);
}

ORCHARD_INLINE Floats splat(float x) { return x - Floats{}; }
ORCHARD_INLINE Ints splat_int(int32_t x) { return x - Ints{}; }
ORCHARD_INLINE Words splat_word(uint32_t x) { return x - Words{}; }

template <class To, class From>
ORCHARD_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// x as a value of its own: the compiler may not fuse the multiplication that made it.
ORCHARD_INLINE Floats rounded(Floats x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__x86_64__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

ORCHARD_INLINE Floats select(Ints condition, Floats yes, Floats no) { return condition ? yes : no; }

// a where a > b, else b: of two of which one is NaN, b.
ORCHARD_INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// acc + a * b: fp32 lanes, or pairs of bf16 in each 32-bit lane.
template <bool kPairs>
ORCHARD_INLINE Floats multiply_add(uint32_t a, Floats b, Floats acc) {
  if constexpr (!kPairs) {
    return acc + bits_as<float>(a) * b;
  } else {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (Floats)vbfdotq_f32((float32x4_t)acc, vreinterpretq_bf16_u32(vdupq_n_u32(a)),
                               vreinterpretq_bf16_f32((float32x4_t)b));
#else
    return acc;
#endif
  }
}

ORCHARD_INLINE float sum_of_lanes(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  const __m128 half =
      _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// bf16 and fp16, one element at a time; both round to nearest even and keep NaN.
ORCHARD_INLINE float from_bf16(uint16_t x) { return bits_as<float>((uint32_t)x << 16); }

ORCHARD_INLINE uint16_t to_bf16(float x) {
  const uint32_t u = bits_as<uint32_t>(x);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

ORCHARD_INLINE float from_fp16(uint16_t x) {
#if defined(__F16C__)
  return _cvtsh_ss(x);
#elif defined(__aarch64__)
  return (float)bits_as<__fp16>(x);
#else
  const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = (uint32_t)(x & 0x7fff) << 13;
  if (rest >= 0x0f800000) return bits_as<float>(sign | (rest + 0x70000000));  // inf and NaN
  return bits_as<float>(sign | bits_as<uint32_t>(bits_as<float>(rest) * 0x1p112f));
#endif
}

ORCHARD_INLINE uint16_t to_fp16(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return bits_as<uint16_t>((__fp16)x);
#else
  const uint32_t u = bits_as<uint32_t>(x), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (rest < 0x38800000) {  // subnormal: the addition rounds at its last place
    const float y = bits_as<float>(rest) + 0.5f;
    return (uint16_t)(sign | (bits_as<uint32_t>(y) - 0x3f000000));
  }
  return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13));
#endif
}

ORCHARD_INLINE Floats widen_bf16(const uint16_t *from) {
  return bits_as<Floats>(__builtin_convertvector(load_as<Halves>(from), Words) << 16);
}

ORCHARD_INLINE Floats widen_fp16(const uint16_t *from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(load_as<__m128i>(from));
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = from_fp16(from[i]);
  return v;
#endif
}

ORCHARD_INLINE Halves narrow_bf16(Floats x) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
  const Words u = bits_as<Words>(x);
  return __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, Halves);
#endif
}

// bf16 of `low` and `high` in the halves of each lane.
ORCHARD_INLINE Words pair_bf16(Floats low, Floats high) {
#if defined(__AVX512BF16__)
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Words)_mm512_permutexvar_epi16(order, both);
#else
  // NaN keeps its high bits, which stay a NaN where the payload begins there; ours always do.
  const Words a = bits_as<Words>(low), b = bits_as<Words>(high);
  const Words ra = (a + 0x7fff + ((a >> 16) & 1)) >> 16;
  const Words rb = (b + 0x7fff + ((b >> 16) & 1)) & 0xffff0000;
  return ra | rb;
#endif
}

// Of two rows: the even runs of kStep elements, and the odd ones.
template <int kStep, size_t... kIndex>
ORCHARD_INLINE void exchange(Words &a, Words &b, std::index_sequence<kIndex...>) {
  const Words even = __builtin_shufflevector(
      a, b, (kIndex / kStep % 2 ? (int)kIndex - kStep + kLanes : (int)kIndex)...);
  const Words odd = __builtin_shufflevector(
      a, b, (kIndex / kStep % 2 ? (int)kIndex + kLanes : (int)kIndex + kStep)...);
  a = even;
  b = odd;
}

// kLanes rows of kLanes 32-bit elements, turned over in registers.
template <int kStep = 1>
ORCHARD_INLINE void transpose(Words (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes / 2; ++i) {
    const int low = i / kStep * 2 * kStep + i % kStep;
    exchange<kStep>(rows[low], rows[low + kStep], std::make_index_sequence<kLanes>{});
  }
  if constexpr (2 * kStep < kLanes) transpose<2 * kStep>(rows);
}

ORCHARD_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
ORCHARD_INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
ORCHARD_INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace orchard::ORCHARD_ISA
