// Orchard's dropout bits: Philox4x32-10, one row of the scores in each lane.
#pragma once

#include "vector.h"

namespace orchard::ORCHARD_ISA {

// The high and the low words of x * multiplier.
ORCHARD_INLINE void multiply_wide(Words x, uint32_t multiplier, Words &high, Words &low) {
#if defined(__AVX512F__)
  const __m512i m = _mm512_set1_epi32((int)multiplier);
  const __m512i even = _mm512_mul_epu32((__m512i)x, m);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), m);
  high = (Words)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  low = (Words)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
#elif defined(__AVX2__)
  const __m256i m = _mm256_set1_epi32((int)multiplier);
  const __m256i even = _mm256_mul_epu32((__m256i)x, m);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), m);
  high = (Words)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  low = (Words)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#else
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t product = (uint64_t)x[i] * multiplier;
    high[i] = (uint32_t)(product >> 32);
    low[i] = (uint32_t)product;
  }
#endif
}

// 8 keys' draws for each lane: keys 8 * group and on, rows and planes by lane.
ORCHARD_INLINE void draw(uint32_t group, Words rows, Words planes, const uint32_t seed[2],
                         Words out[4]) {
  Words x0 = splat_word(group), x1 = rows, x2 = planes, x3 = splat_word(0);
  uint32_t k0 = seed[0], k1 = seed[1];
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    Words high0, low0, high1, low1;
    multiply_wide(x0, 0xD2511F53u, high0, low0);
    multiply_wide(x2, 0xCD9E8D57u, high1, low1);
    x0 = high1 ^ x1 ^ k0;
    x1 = low1;
    x2 = high0 ^ x3 ^ k1;
    x3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = x0, out[1] = x1, out[2] = x2, out[3] = x3;
}

// Lanes in which key j (of the group that was drawn) survives.
ORCHARD_INLINE Ints kept(const Words drawn[4], int64_t j, uint32_t threshold) {
  const Words word = drawn[(j % 8) / 2];
  const Words bits = j % 2 ? word >> 16 : word & 0xffff;
  return (Ints)bits >= (int32_t)threshold;
}

}  // namespace orchard::ORCHARD_ISA
