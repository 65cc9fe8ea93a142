// Few rows against many keys: bound by reading keys and values once, so nothing is packed and
// vectors run along the head dimension.
#pragma once

#include "forward.h"

namespace orchard::ORCHARD_ISA {

// Bytes of kLanes elements.
template <int32_t kDtype>
constexpr int64_t kVectorBytes = kDtype == ORCHARD_FLOAT32 ? kLanes * 4
                                 : kDtype == ORCHARD_INT8  ? kLanes
                                 : kDtype == ORCHARD_INT4  ? kLanes / 2
                                                           : kLanes * 2;

template <int32_t kDtype>
ORCHARD_INLINE Floats widen(const char *from) {
  if constexpr (kDtype == ORCHARD_INT8) return widen_int8(from);
  if constexpr (kDtype == ORCHARD_INT4) return widen_int4(from);
  if constexpr (kDtype == ORCHARD_FLOAT32) return load((const float *)from);
  if constexpr (kDtype == ORCHARD_FLOAT16) return widen_fp16((const uint16_t *)from);
  if constexpr (kDtype == ORCHARD_BFLOAT16) return widen_bf16((const uint16_t *)from);
}

constexpr int kAbreast = 4;  // vectors of a line that are widened together

// kAbreast vectors of a line. Those of int4 are not in the order of the line, which would take half
// as long again: sums of them are put in order in the end.
template <int32_t kDtype>
ORCHARD_INLINE void widen_abreast(const char *from, Floats (&to)[kAbreast]) {
#if defined(__AVX512F__)
  if constexpr (kDtype == ORCHARD_INT4) {
    const __m512i words = _mm512_broadcast_i64x4(load_as<__m256i>(from));
#pragma GCC unroll 4
    for (int n = 0; n < kAbreast; ++n) {
      const __m512i shifts =
          _mm512_inserti64x4(_mm512_set1_epi32(4 * n + 16), _mm256_set1_epi32(4 * n), 0);
      to[n] = int4_values(_mm512_srlv_epi32(words, shifts));
    }
    return;
  }
#endif
#pragma GCC unroll 4
  for (int n = 0; n < kAbreast; ++n) to[n] = widen<kDtype>(from + n * kVectorBytes<kDtype>);
}

// Sums of what `widen_abreast` gives, in the order of the line.
template <int32_t kDtype>
ORCHARD_INLINE void put_in_order([[maybe_unused]] Floats *sums) {
#if defined(__AVX512F__)
  if constexpr (kDtype == ORCHARD_INT4) {
    // Lane k of vector n holds element 8 * (k % 8) + 4 * (k / 8) + n.
    const __m512 a = sums[0], b = sums[1], c = sums[2], d = sums[3];
    const __m512d ab = (__m512d)_mm512_unpacklo_ps(a, b), cd = (__m512d)_mm512_unpacklo_ps(c, d);
    const __m512d AB = (__m512d)_mm512_unpackhi_ps(a, b), CD = (__m512d)_mm512_unpackhi_ps(c, d);
    const __m512 fours[4] = {(__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd),
                             (__m512)_mm512_unpacklo_pd(AB, CD),
                             (__m512)_mm512_unpackhi_pd(AB, CD)};
    sums[0] = (Floats)_mm512_shuffle_f32x4(fours[0], fours[1], 0x88);
    sums[1] = (Floats)_mm512_shuffle_f32x4(fours[2], fours[3], 0x88);
    sums[2] = (Floats)_mm512_shuffle_f32x4(fours[0], fours[1], 0xdd);
    sums[3] = (Floats)_mm512_shuffle_f32x4(fours[2], fours[3], 0xdd);
  }
#endif
}

// `count` rows in memory whose elements lie side by side, in whole vectors.
struct Lines {
  const char *data;
  int64_t step;  // bytes from row to row
  int64_t vectors;
  int32_t dtype;
  bool scaled;  // levels: their steps are still to be applied
};

// Asks for the line that has this one's place in the next tile: runs of few bits are too short for
// the machine to foresee them.
template <int32_t kDtype>
ORCHARD_INLINE void foresee(const Lines &lines, const char *line, int64_t count) {
  if constexpr (kDtype == ORCHARD_INT8 || kDtype == ORCHARD_INT4)
    for (int64_t at = 0; at < lines.vectors * kVectorBytes<kDtype>; at += 64)
      __builtin_prefetch(line + count * lines.step + at, 0, 2);
}

// scores[j][r] = query[r] . (line[j] - zeros[j]), where scores of a key lie `step` from those of
// the next. Zeros are taken out of each level: from the whole product they would take its digits
// too.
template <int32_t kDtype, int kRows, bool kZeros>
static void decode_scores(const Lines &lines, const float *zeros, int64_t count, const float *query,
                          int64_t step, float *scores) {
  constexpr int kAtOnce = kRows > 2 ? 2 : 4;
  constexpr int64_t kBytes = kVectorBytes<kDtype>;
  const int64_t ld = lines.vectors * kLanes;
  for (int64_t j = 0; j < count; j += kAtOnce) {
    const char *line[kAtOnce];
    for (int n = 0; n < kAtOnce; ++n) {
      line[n] = lines.data + smaller_of(j + n, count - 1) * lines.step;
      foresee<kDtype>(lines, line[n], count);
    }
    Floats acc[kAtOnce][kRows] = {};
    for (int64_t v = 0; v < lines.vectors; ++v) {
#pragma GCC unroll 4
      for (int n = 0; n < kAtOnce; ++n) {
        Floats x = widen<kDtype>(line[n] + v * kBytes);
        if constexpr (kZeros) x -= zeros[smaller_of(j + n, count - 1)];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[n][r] += x * load(query + r * ld + v * kLanes);
      }
    }
    for (int n = 0; n < kAtOnce && j + n < count; ++n)
      for (int r = 0; r < kRows; ++r) scores[(j + n) * step + r] = sum_of_lanes(acc[n][r]);
  }
}

// sums[r] = sums[r] * factor[r] + sum over j of weights[j][r] * line[j]
template <int32_t kDtype, int kRows>
static void decode_values(const Lines &lines, int64_t count, int64_t step, const float *weights,
                          const float *factor, float *sums) {
  constexpr int kStrip = kRows > 2 ? 4 : 8;
  constexpr int64_t kBytes = kVectorBytes<kDtype>;
  const int64_t ld = lines.vectors * kLanes;
  int64_t v = 0;
  for (; v + kStrip <= lines.vectors; v += kStrip) {
    Floats acc[kRows][kStrip] = {};
    for (int64_t j = 0; j < count; ++j) {
      const char *line = lines.data + j * lines.step + v * kBytes;
      if (v == 0) foresee<kDtype>(lines, line, count);
#pragma GCC unroll 2
      for (int n = 0; n < kStrip; n += kAbreast) {
        Floats x[kAbreast];
        widen_abreast<kDtype>(line + n * kBytes, x);
#pragma GCC unroll 4
        for (int i = 0; i < kAbreast; ++i)
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) acc[r][n + i] += x[i] * weights[j * step + r];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int n = 0; n < kStrip; n += kAbreast) put_in_order<kDtype>(acc[r] + n);
      for (int n = 0; n < kStrip; ++n) {
        float *to = sums + r * ld + (v + n) * kLanes;
        store(to, load(to) * factor[r] + acc[r][n]);
      }
    }
  }
  for (; v < lines.vectors; ++v) {
    Floats acc[kRows] = {};
    for (int64_t j = 0; j < count; ++j) {
      const Floats x = widen<kDtype>(lines.data + j * lines.step + v * kBytes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[r] += x * weights[j * step + r];
    }
    for (int r = 0; r < kRows; ++r) {
      float *to = sums + r * ld + v * kLanes;
      store(to, load(to) * factor[r] + acc[r]);
    }
  }
}

// Rows [key, key + count) of an operand as lines: where they may, in place, or else as fp32 copies
// in `scratch`.
static Lines lines_of(const orchard_tensor &t, const Levels &levels, int64_t dim, int64_t batch,
                      int64_t kv_head, int64_t key, int64_t count, bool in_place, float *scratch) {
  const int64_t vectors = (dim + kLanes - 1) / kLanes, ld = vectors * kLanes;
  if (in_place && t.strides[3] == 1 && dim % kLanes == 0)
    return {row_at(t, batch, kv_head, key), t.strides[2] * element_size(t.dtype), vectors, t.dtype,
            is_levels(t)};
  read_values(t, levels, batch, kv_head, key, count, dim, ld, scratch);
  return {(const char *)scratch, ld * 4, vectors, ORCHARD_FLOAT32, false};
}

// A row of the query as fp32 in whole vectors, so that its scores are to be multiplied by a scale
// that is not negative.
static void read_query(const Problem &p, const Scoring &how, int64_t batch, int64_t head,
                       int64_t row, float *to) {
  const int64_t wide = round_up(p.dim, kLanes);
  read_values(p.query, p.query_levels, batch, head, row, 1, p.dim, wide, to);
  if (how.sign != 0)
    for (int64_t d = 0; d < wide; ++d) to[d] = -to[d];
}

// What the steps of the keys and of the query make of the products of levels.
struct DecodeTerms {
  float scale[kLanes];  // of the query's levels, by row; 1 where it is fp32
  float sum[kLanes];    // of the query's levels; 0 where it is fp32, and zeros are taken out before
  float bias[kLanes];   // query . mean of the key
  bool large;           // the query is not to be multiplied by levels
};

template <int kRows>
static DecodeTerms decode_terms(const Problem &p, int64_t batch, int64_t kv_head,
                                const float *query, int64_t wide) {
  DecodeTerms terms{};
  if (!is_levels(p.key)) return terms;
  store(terms.scale, splat(1.0f));
  for (int r = 0; r < kRows; ++r) {
    const float *row = query + r * wide;
    for (int64_t d = 0; d < p.dim; ++d) terms.large |= __builtin_fabsf(row[d]) > kLargeFactor;
    terms.bias[r] = dot_mean(p.key_levels.mean, batch, kv_head, row, p.dim);
  }
  return terms;
}

#if defined(__AVX512VNNI__)

constexpr int64_t kChunk = 64;  // bytes of levels that a vector holds

// The query as levels too, in the order in which chunks of a key meet it.
struct DecodeLevels {
  int8_t rows[kDecodeRows][ORCHARD_MAX_HEAD_DIM];  // int4: of each chunk the even ones, the odd
  int32_t start[kDecodeRows];  // takes out what the keys' levels have too much, being unsigned

  void read(const Problem &p, const Panel &panel, int64_t batch, float sign, int r,
            DecodeTerms &terms) {
    const bool halves = p.key.dtype == ORCHARD_INT4;
    const int64_t head = panel.head[r], row = panel.row[r];
    int8_t level[ORCHARD_MAX_HEAD_DIM];
    read_levels(row_at(p.query, batch, head, row), p.query.dtype, p.dim, level);
    memset(rows[r], 0, sizeof(rows[r]));
    for (int64_t d = 0; d < p.dim; ++d)
      rows[r][halves ? d / (2 * kChunk) * 2 * kChunk + d % 2 * kChunk + d / 2 % kChunk : d] =
          level[d];
    const int32_t sum = sum_of(level, p.dim);
    start[r] = (halves ? -8 : -128) * sum;
    Steps step;
    step.read(p.query_levels, batch, head, row, 1);
    terms.scale[r] = sign * step.scale[0];
    terms.sum[r] = (float)sum;
  }
};

// The sums of four vectors' lanes.
ORCHARD_INLINE __m128i sums_of_four(const __m512i (&v)[4]) {
  const __m512i low =
      _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
  const __m512i high =
      _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  const __m512i four =
      _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
  const __m256i half =
      _mm256_add_epi32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64(four, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// scores[j][r] = sum of the products of levels, exact; of up to 3 keys past the last one too where
// the scores of a row lie side by side.
template <bool kHalves, int kRows>
static void decode_level_scores(const DecodeLevels &query, const Lines &keys, int64_t bytes,
                                int64_t count, int64_t step, float *scores) {
  constexpr int kAtOnce = 4;
  const __m512i signs = _mm512_set1_epi8((char)(kHalves ? 0x88 : 0x80)),
                half = _mm512_set1_epi8(15);
  for (int64_t j = 0; j < count; j += kAtOnce) {
    __m512i acc[kRows][kAtOnce] = {};
    for (int64_t at = 0; at < bytes; at += kChunk) {
      const int64_t left = bytes - at;
      const __mmask64 there = left < kChunk ? (__mmask64{1} << left) - 1 : ~__mmask64{0};
#pragma GCC unroll 4
      for (int n = 0; n < kAtOnce; ++n) {
        const char *from = keys.data + smaller_of(j + n, count - 1) * keys.step + at;
        __builtin_prefetch(from + count * keys.step, 0, 2);
        const __m512i levels = _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, from), signs);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const int8_t *with = query.rows[r] + (kHalves ? 2 * at : at);
          if constexpr (kHalves) {
            const __m512i low = _mm512_and_si512(levels, half);
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(levels, 4), half);
            acc[r][n] = _mm512_dpbusd_epi32(acc[r][n], low, load_as<__m512i>(with));
            acc[r][n] = _mm512_dpbusd_epi32(acc[r][n], high, load_as<__m512i>(with + kChunk));
          } else {
            acc[r][n] = _mm512_dpbusd_epi32(acc[r][n], levels, load_as<__m512i>(with));
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m128i exact = _mm_add_epi32(sums_of_four(acc[r]), _mm_set1_epi32(query.start[r]));
      const __m128 found = _mm_cvtepi32_ps(exact);
      if (step == 1) {
        _mm_storeu_ps(scores + j, found);
      } else {
        for (int n = 0; n < kAtOnce && j + n < count; ++n) scores[(j + n) * step + r] = found[n];
      }
    }
  }
}

#endif

// Products of levels as scores: of all rows for one key after another, or of one row along its
// keys.
static void apply_key_steps(const Steps &steps, const DecodeTerms &terms, int64_t count,
                            bool along_keys, float *scores) {
  if (along_keys) {
    const float scale = terms.scale[0], sum = terms.sum[0], bias = terms.bias[0];
    for (int64_t j = 0; j < count; j += kLanes)
      store(scores + j,
            (load(scores + j) - load(steps.zero + j) * sum) * load(steps.scale + j) * scale + bias);
    return;
  }
  const Floats scale = load(terms.scale), sum = load(terms.sum), bias = load(terms.bias);
  for (int64_t j = 0; j < count; ++j) {
    float *at = scores + j * kPanel;
    store(at, (load(at) - sum * steps.zero[j]) * steps.scale[j] * scale + bias);
  }
}

// Weights of the values' levels from those of the values; `offset` gathers what zeros take away.
static void apply_value_steps(const Steps &steps, int64_t count, bool along_keys,
                              const float *factor, float *weights, float *offset) {
  Floats added = splat(0.0f);
  if (along_keys) {
    for (int64_t j = 0; j < count; j += kLanes) {
      const Floats weight = load(weights + j) * load(steps.scale + j);
      added += weight * load(steps.zero + j);
      store(weights + j, weight);
    }
    offset[0] = offset[0] * factor[0] + sum_of_lanes(added);
    return;
  }
  for (int64_t j = 0; j < count; ++j) {
    float *at = weights + j * kPanel;
    const Floats weight = load(at) * steps.scale[j];
    added += weight * steps.zero[j];
    store(at, weight);
  }
  store(offset, load(offset) * load(factor) + added);
}

// `softmax` of one row whose scores lie side by side and all count; zeros up to a whole vector.
static void softmax_along_keys(const Scoring &how, int64_t count, float *scores, float *top,
                               float *total, float *factor) {
  const int64_t padded = round_up(count, kLanes);
  for (int64_t j = count; j < padded; ++j) scores[j] = -kInfinity;
  Floats best = splat(-kInfinity), sum = splat(0.0f);
  for (int64_t j = 0; j < padded; j += kLanes) best = larger(load(scores + j), best);
  float now = *top;
  for (int n = 0; n < kLanes; ++n) now = best[n] > now ? best[n] : now;
  const float shift = now == -kInfinity ? 0.0f : now;
  *factor = exp2(splat((*top - shift) * how.factor))[0];
  *top = now;
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Floats e = exp2((load(scores + j) - shift) * how.factor);
    sum += e;
    store(scores + j, e);
  }
  *total = *total * *factor + sum_of_lanes(sum);
}

// `zeros` are of levels, one for each key; NULL where there are none.
template <int kRows>
static void decode_scores(const Lines &keys, const float *zeros, int64_t count, const float *query,
                          int64_t step, float *scores) {
  const auto score = [&] {
    switch (keys.dtype) {
      case ORCHARD_FLOAT32:
        return decode_scores<ORCHARD_FLOAT32, kRows, false>;
      case ORCHARD_FLOAT16:
        return decode_scores<ORCHARD_FLOAT16, kRows, false>;
      case ORCHARD_BFLOAT16:
        return decode_scores<ORCHARD_BFLOAT16, kRows, false>;
      case ORCHARD_INT8:
        return zeros == nullptr ? decode_scores<ORCHARD_INT8, kRows, false>
                                : decode_scores<ORCHARD_INT8, kRows, true>;
      default:
        return zeros == nullptr ? decode_scores<ORCHARD_INT4, kRows, false>
                                : decode_scores<ORCHARD_INT4, kRows, true>;
    }
  }();
  score(keys, zeros, count, query, step, scores);
}

template <int kRows>
static void decode_values(const Lines &values, int64_t count, int64_t step, const float *weights,
                          const float *factor, float *sums) {
  switch (values.dtype) {
    case ORCHARD_FLOAT32:
      return decode_values<ORCHARD_FLOAT32, kRows>(values, count, step, weights, factor, sums);
    case ORCHARD_FLOAT16:
      return decode_values<ORCHARD_FLOAT16, kRows>(values, count, step, weights, factor, sums);
    case ORCHARD_BFLOAT16:
      return decode_values<ORCHARD_BFLOAT16, kRows>(values, count, step, weights, factor, sums);
    case ORCHARD_INT8:
      return decode_values<ORCHARD_INT8, kRows>(values, count, step, weights, factor, sums);
    default:
      return decode_values<ORCHARD_INT4, kRows>(values, count, step, weights, factor, sums);
  }
}

template <int kRows>
static void decode_rows(const Forward &f, int64_t unit, int64_t split, const ForwardScratch &s) {
  const Problem &p = f.p;
  const Place origin(f, unit, 0);
  const int64_t batch = origin.batch, kv_head = origin.head / p.group;
  const int64_t wide = round_up(p.dim, kLanes), value_wide = round_up(p.value_dim, kLanes);
  float *query = (float *)s.query;
  Panel &panel = s.panels[0];
  lay_out_panel(f, unit, 0, kRows, panel);
  for (int r = 0; r < kRows; ++r)
    read_query(p, f.how, batch, panel.head[r], panel.row[r], query + r * wide);
  DecodeTerms terms = decode_terms<kRows>(p, batch, kv_head, query, wide);
#if defined(__AVX512VNNI__)
  DecodeLevels levels;
  const bool by_levels =
      is_levels(p.key) && is_levels(p.query) && p.query_levels.zeros.data == nullptr;
  if (by_levels)
    for (int r = 0; r < kRows; ++r)
      levels.read(p, panel, batch, f.how.sign != 0 ? -1.0f : 1.0f, r, terms);
#endif
  float offset[kLanes] = {};
  Steps steps;
  memset(s.sums, 0, (size_t)(kRows * value_wide) * 4);
  memset(s.scores, 0, (size_t)(f.tile * kPanel) * 4);
  for (int i = 0; i < kLanes; ++i) s.total[i] = 0.0f, s.top[i] = -kInfinity;

  const Span seen(f, split, panel.first, panel.last);
  for (int64_t key = seen.begin / 8 * 8; key < seen.end; key += f.tile) {
    const int64_t count = smaller_of(f.tile, seen.end - key);
    const float *mask = nullptr;
    if (p.mask.data != nullptr) {
      if (!read_mask(p, f.how, panel, batch, key, count, s.mask, s.mask_rows)) continue;
      mask = s.mask;
    }
    // One row alone would leave all but one lane of a vector without work.
    const bool along_keys = kRows == 1 && is_levels(p.key) && !f.how.general &&
                            p.drop_threshold == 0 && !cut_by_band(f.how, panel, key) &&
                            !cut_by_band(f.how, panel, key + count - 1);
    const int64_t step = along_keys ? 1 : kPanel;
    bool scaled = false, by_values = false;
    if (is_levels(p.key)) {
      steps.read(p.key_levels, batch, kv_head, key, count);
      by_values = terms.large || steps.any_large(count);
    }
#if defined(__AVX512VNNI__)
    if (by_levels && !by_values) {
      const Lines keys{row_at(p.key, batch, kv_head, key), p.key.strides[2], p.dim / kLanes,
                       p.key.dtype, true};
      const auto score = p.key.dtype == ORCHARD_INT4 ? decode_level_scores<true, kRows>
                                                     : decode_level_scores<false, kRows>;
      score(levels, keys, p.key.sizes[3], count, step, s.scores);
      scaled = true;
    }
#endif
    if (!scaled) {
      const Lines keys = lines_of(p.key, p.key_levels, p.dim, batch, kv_head, key, count,
                                  !by_values, (float *)s.key);
      const float *zeros = p.key_levels.zeros.data == nullptr ? nullptr : steps.zero;
      decode_scores<kRows>(keys, zeros, count, query, step, s.scores);
      scaled = keys.scaled;
    }
    if (scaled) apply_key_steps(steps, terms, count, along_keys, s.scores);
    if (along_keys)
      softmax_along_keys(f.how, count, s.scores, s.top, s.total, s.factor);
    else
      softmax<Product::fp32, 1>(p, f.how, panel, key, count, s.scores, mask, s.top, s.total,
                                s.factor);
    const Lines values = lines_of(p.value, p.value_levels, p.value_dim, batch, kv_head, key, count,
                                  true, (float *)s.value);
    if (values.scaled) {
      steps.read(p.value_levels, batch, kv_head, key, count);
      apply_value_steps(steps, count, along_keys, s.factor, s.scores, offset);
    }
    decode_values<kRows>(values, count, step, s.scores, s.factor, s.sums);
  }
  for (int r = 0; r < kRows; ++r)
    for (int64_t d = 0; d < p.value_dim; ++d) s.sums[r * value_wide + d] -= offset[r];
  for (int r = 0; r < kRows; ++r)
    finish_row(f, unit, split, r, s.top[r], s.total[r], s.sums + r * value_wide);
}

static void decode_unit(const Forward &f, int64_t unit, int64_t split, const ForwardScratch &s) {
  switch (f.unit_rows) {
    case 1:
      return decode_rows<1>(f, unit, split, s);
    case 2:
      return decode_rows<2>(f, unit, split, s);
    case 3:
      return decode_rows<3>(f, unit, split, s);
    default:
      return decode_rows<4>(f, unit, split, s);
  }
}

// One row from the partial results of its splits, in their order.
static void combine_row(const Forward &f, int64_t unit, int64_t r, float *sums) {
  const Problem &p = f.p;
  float top = -kInfinity;
  for (int64_t split = 0; split < f.splits; ++split) {
    const float here = f.partial_at(unit, split, r)[0];
    top = here > top ? here : top;
  }
  const float shift = top == -kInfinity ? 0.0f : top;
  float total = 0;
  memset(sums, 0, (size_t)p.value_dim * 4);
  for (int64_t split = 0; split < f.splits; ++split) {
    const float *from = f.partial_at(unit, split, r);
    const float weight = exp2(splat((from[0] - shift) * f.how.factor))[0];
    total += from[1] * weight;
    for (int64_t d = 0; d < p.value_dim; ++d) sums[d] += from[2 + d] * weight;
  }
  write_finished(f, unit, r, top, total, sums);
}

}  // namespace orchard::ORCHARD_ISA
