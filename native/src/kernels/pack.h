// Operands into scratch in the order that the product wants, and results back, by any strides.
#pragma once

#include "../engine.h"
#include "product.h"

namespace orchard::ORCHARD_ISA {

ORCHARD_INLINE int64_t element_size(int32_t dtype) {
  switch (dtype) {
    case ORCHARD_FLOAT32:
      return 4;
    case ORCHARD_FLOAT64:
      return 8;
    case ORCHARD_BOOL:
    case ORCHARD_INT8:
    case ORCHARD_INT4:
      return 1;
    default:
      return 2;
  }
}

ORCHARD_INLINE const char *row_at(const orchard_tensor &t, int64_t b, int64_t h, int64_t i) {
  const int64_t offset = b * t.strides[0] + h * t.strides[1] + i * t.strides[2];
  return (const char *)((uintptr_t)t.data + (uintptr_t)(offset * element_size(t.dtype)));
}

// `count` elements from `from` on as fp32; bool ones as what they add to a score.
static void read_row(const char *from, int64_t stride, int32_t dtype, int64_t count, float *to) {
  if (count == 0) return;
  const uint16_t *halves = (const uint16_t *)from;
  int64_t i = 0;
  switch (dtype) {
    case ORCHARD_FLOAT32:
      if (stride == 1) {
        memcpy(to, from, (size_t)count * 4);
      } else {
        for (; i < count; ++i) to[i] = ((const float *)from)[i * stride];
      }
      break;
    case ORCHARD_FLOAT16:
      if (stride == 1)
        for (; i + kLanes <= count; i += kLanes) store(to + i, widen_fp16(halves + i));
      for (; i < count; ++i) to[i] = from_fp16(halves[i * stride]);
      break;
    case ORCHARD_BFLOAT16:
      if (stride == 1)
        for (; i + kLanes <= count; i += kLanes) store(to + i, widen_bf16(halves + i));
      for (; i < count; ++i) to[i] = from_bf16(halves[i * stride]);
      break;
    case ORCHARD_FLOAT64:
      for (; i < count; ++i) to[i] = (float)((const double *)from)[i * stride];
      break;
    case ORCHARD_BOOL:
      for (; i < count; ++i) to[i] = ((const uint8_t *)from)[i * stride] ? 0.0f : -__builtin_inff();
      break;
  }
}

static void write_row(const float *from, char *to, int64_t stride, int32_t dtype, int64_t count) {
  if (count == 0) return;
  uint16_t *halves = (uint16_t *)to;
  int64_t i = 0;
  switch (dtype) {
    case ORCHARD_FLOAT32:
      if (stride == 1) {
        memcpy(to, from, (size_t)count * 4);
      } else {
        for (; i < count; ++i) ((float *)to)[i * stride] = from[i];
      }
      break;
    case ORCHARD_FLOAT16:
      for (; i < count; ++i) halves[i * stride] = to_fp16(from[i]);
      break;
    case ORCHARD_BFLOAT16:
      if (stride == 1)
        for (; i < count; ++i) halves[i] = to_bf16(from[i]);
      for (; i < count; ++i) halves[i * stride] = to_bf16(from[i]);
      break;
  }
}

// `count` elements as they are, zeros up to `padded`; for bf16 operands of pair products.
static inline void copy_halves(const char *from, int64_t stride, int64_t count, int64_t padded,
                               uint16_t *to) {
  const uint16_t *halves = (const uint16_t *)from;
  if (stride == 1 && count > 0) {
    memcpy(to, from, (size_t)count * 2);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = halves[i * stride];
  }
  memset(to + count, 0, (size_t)(padded - count) * 2);
}

// 32-bit elements that `count` columns take: fp32, or pairs along the row.
template <bool kPairs>
ORCHARD_INLINE int64_t words_of(int64_t count) {
  return kPairs ? (count + 1) / 2 : count;
}

// One row in the order of its columns: words_of(count) elements and zeros up to `padded` words.
template <bool kPairs>
static void pack_row(const char *from, int64_t stride, int32_t dtype, int64_t count, int64_t padded,
                     uint32_t *to) {
  if constexpr (kPairs) {
    copy_halves(from, stride, count, padded * 2, (uint16_t *)to);
  } else {
    read_row(from, stride, dtype, count, (float *)to);
    memset(to + count, 0, (size_t)(padded - count) * 4);
  }
}

// Rows in pairs, element by element, as a product along the rows wants its bf16.
static inline void interleave(const uint16_t *low, const uint16_t *high, int64_t count,
                              uint32_t *to) {
  for (int64_t i = 0; i < count; ++i) to[i] = (uint32_t)low[i] | (uint32_t)high[i] << 16;
}

// kLanes rows of `words` elements, `ld` apart, into columns: to[w * kPanel + lane].
static void transpose_rows(const uint32_t *from, int64_t ld, int64_t words, uint32_t *to) {
  int64_t w = 0;
  for (; w + kLanes <= words; w += kLanes) {
    Words block[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) block[r] = load_as<Words>(from + r * ld + w);
    transpose(block);
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) store(to + (w + r) * kPanel, block[r]);
  }
  for (; w < words; ++w)
    for (int r = 0; r < kLanes; ++r) to[w * kPanel + r] = from[r * ld + w];
}

// The reverse: `count` columns of kLanes rows, `ld` elements apart, into rows `to_ld` apart.
static void transpose_columns(const float *from, int64_t ld, int64_t count, float *to,
                              int64_t to_ld) {
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    Words block[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) block[r] = load_as<Words>(from + (c + r) * ld);
    transpose(block);
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) store(to + r * to_ld + c, block[r]);
  }
  for (; c < count; ++c)
    for (int r = 0; r < kLanes; ++r) to[r * to_ld + c] = from[c * ld + r];
}

// Scratch handed out piece by piece, each on a 64-byte boundary; with no base it only counts.
struct Carver {
  void *base;
  size_t used = 0;

  template <class T>
  T *take(int64_t count) {
    T *piece = (T *)((uintptr_t)base + used);
    used += ((size_t)count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
};

}  // namespace orchard::ORCHARD_ISA
