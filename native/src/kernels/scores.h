// From products of query and key to scores, and which of them count.
#pragma once

#include "exp2.h"
#include "levels.h"
#include "philox.h"

namespace orchard::ORCHARD_ISA {

constexpr float kInfinity = __builtin_inff();

// Rows that are computed together, one in each lane. Lanes past `count` repeat the last row.
struct Panel {
  int64_t count;
  int64_t first, last;  // smallest and largest row
  int32_t row[kPanel];
  uint32_t plane[kPanel];  // b * Hq + h
  int32_t head[kPanel];

  int vectors() const { return count > kLanes ? 2 : 1; }
};

// What turns a product into a score, worked out once for a call.
struct Scoring {
  bool general;   // softcap, a mask, or a scale of 0: scores are shaped before the softmax
  float scale;    // what is left to multiply before the softmax's exponent; never negative
  float factor;   // the same in the exponent of 2
  uint32_t sign;  // flips the query's sign bits where the scale is negative
  float into_tanh;
  int32_t low, high;  // of the band
  int64_t mask_strides[4];
  bool mask_by_row;  // differs from row to row or from head to head
  float keep_scale;

  explicit Scoring(const Problem &p, bool pairs) {
    const bool masked = p.mask.data != nullptr;
    general = masked || p.softcap > 0 || p.scale == 0;
    scale = general ? 1.0f : (p.scale < 0 ? -p.scale : p.scale);
    factor = scale * kLog2e;
    sign = general || p.scale >= 0 ? 0 : (pairs ? 0x80008000u : 0x80000000u);
    into_tanh = p.softcap > 0 ? p.scale / p.softcap : 0.0f;
    low = (int32_t)smaller_of(larger_of(p.band_low, -INT32_MAX), INT32_MAX);
    high = (int32_t)smaller_of(larger_of(p.band_high, -INT32_MAX), INT32_MAX);
    for (int axis = 0; axis < 4; ++axis)
      mask_strides[axis] = masked && p.mask.sizes[axis] > 1 ? p.mask.strides[axis] : 0;
    mask_by_row = mask_strides[1] != 0 || mask_strides[2] != 0;
    keep_scale = 65536.0f / (float)(65536 - p.drop_threshold);
  }

  // Keys that any row of [first, last] sees.
  int64_t first_key(int64_t first_row) const { return larger_of(0, first_row + low); }
  int64_t end_key(int64_t last_row, int64_t keys) const {
    return smaller_of(keys, last_row + high + 1);
  }
};

// The mask of `count` keys from `key` on as fp32 columns, one row in each lane: -inf hides. False
// where it is a bool mask that hides everything.
static bool read_mask(const Problem &p, const Scoring &how, const Panel &panel, int64_t batch,
                      int64_t key, int64_t count, float *columns, float *rows) {
  const int64_t ld = round_up(count, kLanes), size = element_size(p.mask.dtype);
  const char *base =
      (const char *)p.mask.data + (batch * how.mask_strides[0] + key * how.mask_strides[3]) * size;
  const int vectors = panel.vectors();
  Floats any = splat(-kInfinity);
  for (int v = 0; v < vectors; ++v) {
    if (!how.mask_by_row) {
      if (v == 0) read_row(base, how.mask_strides[3], p.mask.dtype, count, rows);
      for (int64_t j = 0; j < count; ++j) store(columns + j * kPanel + v * kLanes, splat(rows[j]));
    } else {
      for (int r = 0; r < kLanes; ++r) {
        const int64_t lane = v * kLanes + r;
        const int64_t offset =
            panel.head[lane] * how.mask_strides[1] + panel.row[lane] * how.mask_strides[2];
        read_row(base + offset * size, how.mask_strides[3], p.mask.dtype, count, rows + r * ld);
      }
      transpose_rows((const uint32_t *)rows, ld, count, (uint32_t *)(columns + v * kLanes));
    }
    if (p.mask.dtype != ORCHARD_BOOL) continue;
    for (int64_t j = 0; j < count; ++j) any = larger(load(columns + j * kPanel + v * kLanes), any);
  }
  if (p.mask.dtype != ORCHARD_BOOL) return true;
  for (int i = 0; i < kLanes; ++i)
    if (any[i] == 0.0f) return true;
  return false;
}

// A product as a score: scale, softcap, mask. `slope` is the derivative of the softcap. Rounded as
// it stands, not fused with what follows, so that forward and backward see the same score.
ORCHARD_INLINE Floats shape(const Problem &p, const Scoring &how, Floats product, const float *mask,
                            Floats *slope) {
  Floats score;
  if (p.softcap > 0) {
    const Floats t = tanh(product * how.into_tanh);
    score = rounded(t * p.softcap);
    *slope = 1.0f - t * t;
  } else {
    score = rounded(product * p.scale);
  }
  if (mask == nullptr) return score;
  const Floats m = load(mask);
  if (p.mask.dtype == ORCHARD_BOOL) return select(m == splat(0.0f), score, m);
  return score + m;
}

// Whether some row of the panel does not see `key`.
ORCHARD_INLINE bool cut_by_band(const Scoring &how, const Panel &panel, int64_t key) {
  return key - panel.first > how.high || key - panel.last < how.low;
}

// Lanes of rows that see `key`.
ORCHARD_INLINE Ints in_band(const Scoring &how, Ints rows, int64_t key) {
  const Ints distance = (int32_t)key - rows;
  return (distance <= how.high) & (distance >= how.low);
}

}  // namespace orchard::ORCHARD_ISA
