// Few rows against many keys: bound by reading keys and values once, so nothing is packed and
// vectors run along the head dimension.
#pragma once

#include "forward.h"

namespace orchard::ORCHARD_ISA {

template <int32_t kDtype>
ORCHARD_INLINE Floats widen(const char *from) {
  if constexpr (kDtype == ORCHARD_FLOAT32) return load((const float *)from);
  if constexpr (kDtype == ORCHARD_FLOAT16) return widen_fp16((const uint16_t *)from);
  if constexpr (kDtype == ORCHARD_BFLOAT16) return widen_bf16((const uint16_t *)from);
}

// `count` rows in memory whose elements lie side by side, in whole vectors.
struct Lines {
  const char *data;
  int64_t step;  // bytes from row to row
  int64_t vectors;
};

// scores[j][r] = query[r] . line[j]
template <int32_t kDtype, int kRows>
static void decode_scores(const Lines &lines, int64_t count, const float *query, float *scores) {
  constexpr int kAtOnce = kRows > 2 ? 2 : 4;
  constexpr int64_t kBytes = kLanes * (kDtype == ORCHARD_FLOAT32 ? 4 : 2);
  const int64_t ld = lines.vectors * kLanes;
  for (int64_t j = 0; j < count; j += kAtOnce) {
    const char *line[kAtOnce];
    for (int n = 0; n < kAtOnce; ++n)
      line[n] = lines.data + smaller_of(j + n, count - 1) * lines.step;
    Floats acc[kAtOnce][kRows] = {};
    for (int64_t v = 0; v < lines.vectors; ++v) {
#pragma GCC unroll 4
      for (int n = 0; n < kAtOnce; ++n) {
        const Floats x = widen<kDtype>(line[n] + v * kBytes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[n][r] += x * load(query + r * ld + v * kLanes);
      }
    }
    for (int n = 0; n < kAtOnce && j + n < count; ++n)
      for (int r = 0; r < kRows; ++r) scores[(j + n) * kPanel + r] = sum_of_lanes(acc[n][r]);
  }
}

// sums[r] = sums[r] * factor[r] + sum over j of weights[j][r] * line[j]
template <int32_t kDtype, int kRows>
static void decode_values(const Lines &lines, int64_t count, const float *weights,
                          const float *factor, float *sums) {
  constexpr int kStrip = kRows > 2 ? 4 : 8;
  constexpr int64_t kBytes = kLanes * (kDtype == ORCHARD_FLOAT32 ? 4 : 2);
  const int64_t ld = lines.vectors * kLanes;
  int64_t v = 0;
  for (; v + kStrip <= lines.vectors; v += kStrip) {
    Floats acc[kRows][kStrip] = {};
    for (int64_t j = 0; j < count; ++j) {
      const char *line = lines.data + j * lines.step + v * kBytes;
#pragma GCC unroll 8
      for (int n = 0; n < kStrip; ++n) {
        const Floats x = widen<kDtype>(line + n * kBytes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[r][n] += x * weights[j * kPanel + r];
      }
    }
    for (int r = 0; r < kRows; ++r) {
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
      for (int r = 0; r < kRows; ++r) acc[r] += x * weights[j * kPanel + r];
    }
    for (int r = 0; r < kRows; ++r) {
      float *to = sums + r * ld + v * kLanes;
      store(to, load(to) * factor[r] + acc[r]);
    }
  }
}

// Rows [key, key + count) of an operand as lines: in place, or as fp32 copies in `scratch`.
static Lines lines_of(const orchard_tensor &t, int64_t batch, int64_t kv_head, int64_t key,
                      int64_t count, float *scratch, int32_t &dtype) {
  const int64_t dim = t.sizes[3];
  const int64_t vectors = (dim + kLanes - 1) / kLanes;
  if (t.strides[3] == 1 && dim % kLanes == 0) {
    dtype = t.dtype;
    return {row_at(t, batch, kv_head, key), t.strides[2] * element_size(t.dtype), vectors};
  }
  dtype = ORCHARD_FLOAT32;
  for (int64_t j = 0; j < count; ++j)
    pack_row<false>(row_at(t, batch, kv_head, key + j), t.strides[3], t.dtype, dim,
                    vectors * kLanes, (uint32_t *)scratch + j * vectors * kLanes);
  return {(const char *)scratch, vectors * kLanes * 4, vectors};
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
  for (int r = 0; r < kRows; ++r) {
    pack_row<false>(row_at(p.query, batch, panel.head[r], panel.row[r]), p.query.strides[3],
                    p.dtype, p.dim, wide, (uint32_t *)query + r * wide);
    if (f.how.sign != 0)
      for (int64_t d = 0; d < wide; ++d) query[r * wide + d] = -query[r * wide + d];
  }
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
    int32_t dtype;
    const Lines keys = lines_of(p.key, batch, kv_head, key, count, (float *)s.key, dtype);
    if (dtype == ORCHARD_FLOAT32)
      decode_scores<ORCHARD_FLOAT32, kRows>(keys, count, query, s.scores);
    else if (dtype == ORCHARD_FLOAT16)
      decode_scores<ORCHARD_FLOAT16, kRows>(keys, count, query, s.scores);
    else
      decode_scores<ORCHARD_BFLOAT16, kRows>(keys, count, query, s.scores);
    softmax<false, 1>(p, f.how, panel, key, count, s.scores, mask, s.top, s.total, s.factor);
    const Lines values = lines_of(p.value, batch, kv_head, key, count, (float *)s.value, dtype);
    if (dtype == ORCHARD_FLOAT32)
      decode_values<ORCHARD_FLOAT32, kRows>(values, count, s.scores, s.factor, s.sums);
    else if (dtype == ORCHARD_FLOAT16)
      decode_values<ORCHARD_FLOAT16, kRows>(values, count, s.scores, s.factor, s.sums);
    else
      decode_values<ORCHARD_BFLOAT16, kRows>(values, count, s.scores, s.factor, s.sums);
  }
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
