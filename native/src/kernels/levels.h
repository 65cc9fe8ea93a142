// Operands in few bits: rows of levels, the values they stand for, and the product of levels.
#pragma once

#include "pack.h"

namespace orchard::ORCHARD_ISA {

#if defined(__AVX512VNNI__)
constexpr bool kHasQuads = true;  // a product of four 8-bit levels, summed into 32 bits
#else
constexpr bool kHasQuads = false;
#endif

ORCHARD_INLINE bool is_levels(const orchard_tensor &t) {
  return t.dtype == ORCHARD_INT8 || t.dtype == ORCHARD_INT4;
}

constexpr int64_t kMostTile = 128;  // keys of a tile
constexpr int64_t kRun = 8;         // the keys that a panel sees begin at a multiple of it
// Up to it a sum of products with levels is finite; larger ones are multiplied as fp32 values.
constexpr float kLargeFactor = 0x1p100f;

// Scales and zeros of some rows of one head, one after the other, and 0 up to a whole vector.
struct Steps {
  float scale[kMostTile], zero[kMostTile];

  void read(const Levels &levels, int64_t b, int64_t h, int64_t first, int64_t count) {
    b /= levels.group[0];
    h /= levels.group[1];
    const float *scales = (const float *)row_at(levels.scales, b, h, 0);
    const int8_t *zeros = (const int8_t *)row_at(levels.zeros, b, h, 0);
    const int64_t ld = levels.scales.strides[2], zero_ld = levels.zeros.strides[2];
    if (levels.group[2] == 1 && ld == 1) {
      memcpy(scale, scales + first, (size_t)count * 4);
    } else {
      spread(levels.group[2], first, count,
             [&](int64_t j, int64_t n) { scale[j] = scales[n * ld]; });
    }
    if (levels.zeros.data == nullptr)
      memset(zero, 0, (size_t)count * 4);
    else
      spread(levels.group[2], first, count,
             [&](int64_t j, int64_t n) { zero[j] = (float)zeros[n * zero_ld]; });
    for (int64_t j = count; j < round_up(count, kLanes); ++j) scale[j] = zero[j] = 0.0f;
  }

  // set(j, the group of row first + j), without a division for each row, which takes too long.
  template <class Set>
  static void spread(int64_t rows_in_group, int64_t first, int64_t count, Set set) {
    int64_t group = first / rows_in_group, left = rows_in_group - first % rows_in_group;
    for (int64_t j = 0; j < count; ++j) {
      set(j, group);
      if (--left == 0) ++group, left = rows_in_group;
    }
  }

  bool any_large(int64_t count) const {
    Floats most = splat(0.0f);
    for (int64_t j = 0; j < count; j += kLanes) most = larger(load(scale + j), most);
    for (int i = 0; i < kLanes; ++i)
      if (most[i] > kLargeFactor) return true;
    return false;
  }
};

// Whether a head has a scale that its levels' products must not be multiplied by.
static bool any_large_scale(const Levels &levels, int64_t b, int64_t h) {
  const float *scales =
      (const float *)row_at(levels.scales, b / levels.group[0], h / levels.group[1], 0);
  for (int64_t n = 0; n < levels.scales.sizes[2]; ++n)
    if (scales[n * levels.scales.strides[2]] > kLargeFactor) return true;
  return false;
}

// kLanes levels as they are stored, as fp32.
ORCHARD_INLINE Floats widen_int8(const char *from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(from)));
#elif defined(__AVX2__)
  int64_t bytes;
  memcpy(&bytes, from, sizeof bytes);
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes)));
#else
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = ((const int8_t *)from)[i];
  return v;
#endif
}

#if defined(__AVX512F__)
// What the low four bits of each lane stand for.
ORCHARD_INLINE Floats int4_values(__m512i lanes) {
  const __m512 values = _mm512_set_ps(-1, -2, -3, -4, -5, -6, -7, -8, 7, 6, 5, 4, 3, 2, 1, 0);
  return (Floats)_mm512_permutexvar_ps(lanes, values);
}
#endif

ORCHARD_INLINE Floats widen_int4(const char *from) {
#if defined(__AVX512F__)
  int64_t bytes;
  memcpy(&bytes, from, sizeof bytes);
  // Each lane has the byte of its level in front, shifts it there, and looks its value up.
  const __m512i spread = _mm512_shuffle_epi8(
      _mm512_set1_epi64(bytes), _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0));
  const __m512i shifts = _mm512_set1_epi64(int64_t{4} << 32);
  return int4_values(_mm512_srlv_epi32(spread, shifts));
#elif defined(__AVX2__)
  int32_t bytes;
  memcpy(&bytes, from, sizeof bytes);
  const __m256i up =
      _mm256_sllv_epi32(_mm256_set1_epi32(bytes), _mm256_set_epi32(0, 4, 8, 12, 16, 20, 24, 28));
  return (Floats)_mm256_cvtepi32_ps(_mm256_srai_epi32(up, 28));
#else
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = (int8_t)((uint8_t)from[i / 2] << (i % 2 ? 0 : 4)) >> 4;
  return v;
#endif
}

static void read_levels(const char *from, int32_t dtype, int64_t dim, int8_t *to) {
  if (dtype == ORCHARD_INT8) {
    memcpy(to, from, (size_t)dim);
    return;
  }
  for (int64_t n = 0; n < dim / 2; ++n) {
    to[2 * n] = (int8_t)((int8_t)((uint8_t)from[n] << 4) >> 4);
    to[2 * n + 1] = (int8_t)((int8_t)from[n] >> 4);
  }
  if (dim % 2 != 0) to[dim - 1] = (int8_t)((int8_t)((uint8_t)from[dim / 2] << 4) >> 4);
}

static int32_t sum_of(const int8_t *levels, int64_t dim) {
  int32_t sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += levels[d];
  return sum;
}

// One row of levels as fp32 values.
static void read_scaled(const char *from, int32_t dtype, int64_t dim, float scale, float zero,
                        float *to) {
  int64_t d = 0;
  if (dtype == ORCHARD_INT8)
    for (; d + kLanes <= dim; d += kLanes) store(to + d, (widen_int8(from + d) - zero) * scale);
  else
    for (; d + kLanes <= dim; d += kLanes) store(to + d, (widen_int4(from + d / 2) - zero) * scale);
  if (d == dim) return;
  int8_t level[ORCHARD_MAX_HEAD_DIM];
  read_levels(from, dtype, dim, level);
  for (; d < dim; ++d) to[d] = ((float)level[d] - zero) * scale;
}

// to += sign * the mean of a head.
static void add_mean(const orchard_tensor &mean, int64_t b, int64_t h, float sign, int64_t dim,
                     float *to) {
  const float *from = (const float *)row_at(mean, b, h, 0);
  int64_t d = 0;
  if (mean.strides[3] == 1)
    for (; d + kLanes <= dim; d += kLanes) store(to + d, load(to + d) + load(from + d) * sign);
  for (; d < dim; ++d) to[d] += sign * from[d * mean.strides[3]];
}

// row . the mean of a head; 0 where there is none.
static float dot_mean(const orchard_tensor &mean, int64_t b, int64_t h, const float *row,
                      int64_t dim) {
  if (mean.data == nullptr) return 0.0f;
  const float *from = (const float *)row_at(mean, b, h, 0);
  Floats sums = splat(0.0f);
  float sum = 0;
  int64_t d = 0;
  if (mean.strides[3] == 1)
    for (; d + kLanes <= dim; d += kLanes) sums += load(row + d) * load(from + d);
  for (; d < dim; ++d) sum += row[d] * from[d * mean.strides[3]];
  return sum + sum_of_lanes(sums);
}

// `count` rows of an operand as fp32, `ld` apart, whatever they are stored as; zeros fill them up.
static void read_values(const orchard_tensor &t, const Levels &levels, int64_t b, int64_t h,
                        int64_t first, int64_t count, int64_t dim, int64_t ld, float *to) {
  Steps steps;
  if (is_levels(t)) steps.read(levels, b, h, first, count);
  for (int64_t j = 0; j < count; ++j, to += ld) {
    const char *row = row_at(t, b, h, first + j);
    if (is_levels(t))
      read_scaled(row, t.dtype, dim, steps.scale[j], steps.zero[j], to);
    else
      read_row(row, t.strides[3], t.dtype, dim, to);
    memset(to + dim, 0, (size_t)(ld - dim) * 4);
    if (levels.mean.data != nullptr) add_mean(levels.mean, b, h, 1.0f, dim, to);
  }
}

// What a row of the query brings to its scores: score = products * scale + bias, by lane.
struct QueryTerms {
  float scale[kPanel];
  float bias[kPanel];     // of the key's mean
  int32_t start[kPanel];  // takes out what the keys' levels have too much, being unsigned
  int32_t sum[kPanel];    // of level - zero
  int32_t zero[kPanel];
};

// The same of the keys of one tile.
struct KeyTerms {
  Steps steps;
  int32_t sum[kMostTile];  // of levels; where the query has zeros
};

ORCHARD_INLINE int64_t quads_of(int64_t dim) { return (dim + 3) / 4; }

// One row's levels into `to`, zeros up to whole quads, and its terms into their `lane`.
static void pack_query_levels(const Problem &p, float sign, int64_t batch, int64_t head,
                              int64_t row, int64_t lane, uint32_t *to, QueryTerms &terms) {
  int8_t *level = (int8_t *)to;
  read_levels(row_at(p.query, batch, head, row), p.query.dtype, p.dim, level);
  memset(level + p.dim, 0, (size_t)(quads_of(p.dim) * 4 - p.dim));
  Steps step;
  step.read(p.query_levels, batch, head, row, 1);
  const int32_t sum = sum_of(level, p.dim);
  terms.scale[lane] = sign * step.scale[0];
  terms.start[lane] = -128 * sum;
  terms.zero[lane] = (int32_t)step.zero[0];
  terms.sum[lane] = sum - terms.zero[lane] * (int32_t)p.dim;
  float values[ORCHARD_MAX_HEAD_DIM];
  read_scaled((const char *)level, ORCHARD_INT8, p.dim, terms.scale[lane], step.zero[0], values);
  terms.bias[lane] = dot_mean(p.key_levels.mean, batch, head / p.group, values, p.dim);
}

// Keys [key, key + count) as unsigned levels, rows of whole quads, up to a multiple of 8 of them.
static void pack_key_levels(const Problem &p, int64_t batch, int64_t kv_head, int64_t key,
                            int64_t count, uint32_t *to, KeyTerms &terms) {
  const int64_t dim = p.dim, quads = quads_of(dim), past = round_up(count, 8) - count;
  const bool sums = p.query_levels.zeros.data != nullptr;
  const bool in_vectors = p.key.dtype == ORCHARD_INT8 && dim % (4 * kLanes) == 0;
  terms.steps.read(p.key_levels, batch, kv_head, key, count);
  for (int64_t j = 0; j < count; ++j) {
    uint32_t *row = to + j * quads;
    const char *from = row_at(p.key, batch, kv_head, key + j);
    if (in_vectors) {
      for (int64_t n = 0; n < quads; n += kLanes)
        store(row + n, load_as<Words>(from + n * 4) ^ 0x80808080u);
      if (sums) terms.sum[j] = sum_of((const int8_t *)from, dim);
      continue;
    }
    read_levels(from, p.key.dtype, dim, (int8_t *)row);
    memset((int8_t *)row + dim, 0, (size_t)(quads * 4 - dim));
    if (sums) terms.sum[j] = sum_of((const int8_t *)row, dim);
    for (int64_t n = 0; n < quads; ++n) row[n] ^= 0x80808080u;
  }
  memset(to + count * quads, 0, (size_t)(past * quads) * 4);
  memset(terms.steps.scale + count, 0, (size_t)past * 4);
  memset(terms.steps.zero + count, 0, (size_t)past * 4);
  memset(terms.sum + count, 0, (size_t)past * 4);
}

#if defined(__AVX512VNNI__)

// acc[m][n] += sums of four products: of unsigned element m of A, broadcast, and lane n of B.
template <int kVectors>
ORCHARD_INLINE void multiply_levels(int64_t quads, const uint32_t *a, const uint32_t *b,
                                    Ints (&acc)[kTileRows][kVectors]) {
  for (int64_t k = 0; k < quads; ++k) {
    __m512i columns[kVectors];
#pragma GCC unroll 2
    for (int n = 0; n < kVectors; ++n) columns[n] = load_as<__m512i>(b + k * kPanel + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kTileRows; ++m) {
      const __m512i element = _mm512_set1_epi32((int)a[m * quads + k]);
#pragma GCC unroll 2
      for (int n = 0; n < kVectors; ++n)
        acc[m][n] = (Ints)_mm512_dpbusd_epi32((__m512i)acc[m][n], element, columns[n]);
    }
  }
}

// Scores [key][lane] of kTileRows keys: exact products of levels, then scales and bias.
template <bool kZeros, int kVectors>
ORCHARD_INLINE void score_tile(int64_t quads, const uint32_t *keys, const KeyTerms &by_key,
                               int64_t first, const uint32_t *rows, const QueryTerms &by_row,
                               float *scores) {
  Ints acc[kTileRows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kTileRows; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < kVectors; ++n) acc[m][n] = load_as<Ints>(by_row.start + n * kLanes);
  multiply_levels(quads, keys, rows, acc);
#pragma GCC unroll 8
  for (int m = 0; m < kTileRows; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < kVectors; ++n) {
      Ints exact = acc[m][n];
      if constexpr (kZeros)
        exact -= (int32_t)by_key.steps.zero[first + m] * load_as<Ints>(by_row.sum + n * kLanes) +
                 by_key.sum[first + m] * load_as<Ints>(by_row.zero + n * kLanes);
      const Floats product = __builtin_convertvector(exact, Floats) * by_key.steps.scale[first + m];
      store(scores + m * kPanel + n * kLanes,
            product * load(by_row.scale + n * kLanes) + load(by_row.bias + n * kLanes));
    }
  }
}

// Scores of `count` keys, a multiple of kTileRows, from the tile's key `first` on.
template <bool kZeros>
static void score_levels(int64_t count, int64_t vectors, int64_t dim, const uint32_t *keys,
                         const KeyTerms &by_key, int64_t first, const uint32_t *rows,
                         const QueryTerms &by_row, float *scores) {
  const int64_t quads = quads_of(dim);
  for (int64_t m = 0; m < count; m += kTileRows) {
    const uint32_t *tile = keys + (first + m) * quads;
    if (vectors > 1)
      score_tile<kZeros, 2>(quads, tile, by_key, first + m, rows, by_row, scores + m * kPanel);
    else
      score_tile<kZeros, 1>(quads, tile, by_key, first + m, rows, by_row, scores + m * kPanel);
  }
}

#endif

}  // namespace orchard::ORCHARD_ISA
