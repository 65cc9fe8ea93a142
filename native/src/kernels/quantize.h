// Tensors into few bits, one group of rows after another.
#pragma once

#include "levels.h"

namespace orchard::ORCHARD_ISA {

constexpr float kSmallestScale = 0x1p-126f, kLargestMagnitude = 0x1p126f;
// Rows of a task: as many as are worth one, and more where all threads have some, for memory is
// read faster in long runs.
constexpr int64_t kLeastTaskRows = 64, kMostTaskRows = 512;
constexpr int64_t kHeldRows = 64;  // the most of a group that stay in scratch from pass to pass

// A group: where its scale lies, and its batch entries, heads and rows.
struct GroupRows {
  int64_t at[3], begin[3], end[3];

  GroupRows(const Quantization &q, int64_t index) {
    const int64_t *counts = q.levels.scales.sizes;
    at[0] = index / (counts[1] * counts[2]);
    at[1] = index / counts[2] % counts[1];
    at[2] = index % counts[2];
    for (int axis = 0; axis < 3; ++axis) {
      begin[axis] = at[axis] * q.levels.group[axis];
      end[axis] = smaller_of(begin[axis] + q.levels.group[axis], q.source.sizes[axis]);
    }
  }

  int64_t count() const { return (end[0] - begin[0]) * (end[1] - begin[1]) * (end[2] - begin[2]); }

  template <class Visit>
  void each(Visit visit) const {
    int64_t row = 0;
    for (int64_t b = begin[0]; b < end[0]; ++b)
      for (int64_t h = begin[1]; h < end[1]; ++h)
        for (int64_t i = begin[2]; i < end[2]; ++i) visit(row++, b, h, i);
  }
};

struct Quantizer {
  const Quantization &q;
  int64_t groups, groups_in_task, held_rows;
  uint32_t refused = 0;  // set by any thread that meets what cannot be stored

  explicit Quantizer(const Quantization &quantization) : q(quantization) {
    const int64_t *counts = q.levels.scales.sizes;
    groups = counts[0] * counts[1] * counts[2];
    int64_t rows = 1;
    for (int axis = 0; axis < 3; ++axis)
      rows *= larger_of(1, smaller_of(q.levels.group[axis], q.source.sizes[axis]));
    const int64_t *sizes = q.source.sizes;
    const int64_t share = sizes[0] * sizes[1] * sizes[2] / (8 * larger_of(q.threads, 1));
    groups_in_task =
        larger_of(1, smaller_of(larger_of(share, kLeastTaskRows), kMostTaskRows) / rows);
    held_rows = rows <= kHeldRows ? rows : 1;
  }

  int64_t tasks() const { return (groups + groups_in_task - 1) / groups_in_task; }
  int64_t padded() const { return round_up(q.source.sizes[3], kLanes); }
};

// One row as fp32 without its mean, zeros up to a whole vector.
static void read_centred(const Quantizer &z, int64_t b, int64_t h, int64_t i, float *to) {
  const orchard_tensor &source = z.q.source, &mean = z.q.levels.mean;
  const int64_t dim = source.sizes[3];
  read_row(row_at(source, b, h, i), source.strides[3], source.dtype, dim, to);
  memset(to + dim, 0, (size_t)(z.padded() - dim) * 4);
  if (mean.data != nullptr) add_mean(mean, b, h, -1.0f, dim, to);
}

// The nearest integer, halves to even, of |x| below 2^22: left in the low bits of the sum.
ORCHARD_INLINE Ints nearest(Floats x) { return bits_as<Ints>(x + 0x1.8p23f) - 0x4b400000; }

struct Step {
  float scale;
  int32_t zero;
};

// The step of a group from the largest value and the largest negated one.
static Step make_step(const Quantizer &z, float high, float low) {
  const float largest = z.q.data.dtype == ORCHARD_INT8 ? 127.0f : 7.0f;
  const bool symmetric = z.q.levels.zeros.data == nullptr;
  const float range =
      symmetric ? (high > low ? high : low) / largest : (high + low) / (2 * largest + 1);
  Step step{range > kSmallestScale ? range : kSmallestScale, 0};
  if (!symmetric) step.zero = nearest(splat(low / step.scale))[0] - (int32_t)largest - 1;
  return step;
}

// Levels of `count` values, which end in whole vectors, one to a byte.
static void round_levels(const Step &step, int32_t least, int32_t largest, const float *values,
                         int64_t count, int8_t *bytes) {
  const auto level = [&](int64_t d) __attribute__((always_inline)) {
    return nearest(load(values + d) / step.scale) + step.zero;
  };
  int64_t d = 0;
#if defined(__AVX512BW__)
  // Four vectors together: one alone takes as long to narrow as all of them.
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  for (; d + 4 * kLanes <= count; d += 4 * kLanes) {
    const __m512i low = _mm512_packs_epi32((__m512i)level(d), (__m512i)level(d + kLanes));
    const __m512i high =
        _mm512_packs_epi32((__m512i)level(d + 2 * kLanes), (__m512i)level(d + 3 * kLanes));
    __m512i all = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
    all = _mm512_max_epi8(all, _mm512_set1_epi8((char)least));
    store(bytes + d, _mm512_min_epi8(all, _mm512_set1_epi8((char)largest)));
  }
#endif
  for (; d < count; d += kLanes) {
    Ints one = level(d);
    one = one > largest ? splat_int(largest) : one;
    one = one < least ? splat_int(least) : one;
#if defined(__AVX512F__)
    store(bytes + d, _mm512_cvtepi32_epi8((__m512i)one));
#else
    for (int n = 0; n < kLanes; ++n) bytes[d + n] = (int8_t)one[n];
#endif
  }
}

// One row of fp32 in `values` as levels; `bytes` holds a row of them.
static void write_levels(const Quantizer &z, const Step &step, const float *values, int8_t *bytes,
                         char *to) {
  const int64_t dim = z.q.source.sizes[3];
  const int32_t largest = z.q.data.dtype == ORCHARD_INT8 ? 127 : 7;
  const int32_t least = z.q.levels.zeros.data == nullptr ? -largest : -largest - 1;
  if (z.q.data.dtype == ORCHARD_INT8 && dim % kLanes == 0)
    return round_levels(step, least, largest, values, dim, (int8_t *)to);
  round_levels(step, least, largest, values, dim, bytes);
  if (z.q.data.dtype == ORCHARD_INT8) {
    memcpy(to, bytes, (size_t)dim);
    return;
  }
  if (dim % 2 != 0) bytes[dim] = 0;
  for (int64_t n = 0; n < (dim + 1) / 2; ++n)
    to[n] = (char)((bytes[2 * n] & 15) | (uint8_t)bytes[2 * n + 1] << 4);
}

// A large group, which may be as large as the tensor, is read twice rather than held.
static void quantize_group(Quantizer &z, int64_t index, float *values, int8_t *bytes) {
  const GroupRows rows(z.q, index);
  const int64_t padded = z.padded();
  const bool held = rows.count() <= z.held_rows;
  Floats high = splat(0.0f), low = splat(0.0f), zero = splat(0.0f);
  rows.each([&](int64_t row, int64_t b, int64_t h, int64_t i) {
    float *at = values + (held ? row * padded : 0);
    read_centred(z, b, h, i, at);
    for (int64_t d = 0; d < padded; d += kLanes) {
      const Floats x = load(at + d);
      high = larger(x, high);
      low = larger(-x, low);
      zero += x * 0.0f;  // or NaN, where x is not finite
    }
  });
  float most = 0, least = 0;
  for (int n = 0; n < kLanes; ++n) {
    most = high[n] > most ? high[n] : most;
    least = low[n] > least ? low[n] : least;
  }
  if (!(sum_of_lanes(zero) == 0.0f) || most > kLargestMagnitude || least > kLargestMagnitude) {
    __atomic_store_n(&z.refused, 1u, __ATOMIC_RELAXED);
    return;
  }
  const Step step = make_step(z, most, least);
  const auto &[batch_group, head_group, row_group] = rows.at;
  *(float *)row_at(z.q.levels.scales, batch_group, head_group, row_group) = step.scale;
  if (z.q.levels.zeros.data != nullptr)
    *(int8_t *)row_at(z.q.levels.zeros, batch_group, head_group, row_group) = (int8_t)step.zero;
  rows.each([&](int64_t row, int64_t b, int64_t h, int64_t i) {
    float *at = values + (held ? row * padded : 0);
    if (!held) read_centred(z, b, h, i, at);
    write_levels(z, step, at, bytes, (char *)row_at(z.q.data, b, h, i));
  });
}

static void quantize_task(void *context, int64_t index, void *scratch) {
  Quantizer &z = *(Quantizer *)context;
  float *values = (float *)scratch;
  int8_t *bytes = (int8_t *)(values + z.held_rows * z.padded());
  const int64_t begin = index * z.groups_in_task;
  const int64_t end = smaller_of(begin + z.groups_in_task, z.groups);
  for (int64_t group = begin; group < end; ++group) quantize_group(z, group, values, bytes);
}

static int quantize(const Quantization &q) noexcept {
  Quantizer z(q);
  if (z.groups == 0) return ORCHARD_OK;
  const size_t bytes = (size_t)(z.padded() * (4 * z.held_rows + 1)) + 64;
  if (!parallel_for(z.tasks(), q.threads, bytes, quantize_task, &z)) return ORCHARD_OUT_OF_MEMORY;
  return z.refused != 0 ? ORCHARD_INVALID_ARGUMENT : ORCHARD_OK;
}

// Sums of a head's rows: 16 of them, 16 of those, and so on. One long sum would lose precision.
struct Cascade {
  static constexpr int kLevels = 4, kPower = 4;
  float *sums;  // [kLevels][padded]
  int64_t padded, rows = 0;

  Cascade(float *scratch, int64_t width) : sums(scratch), padded(width) {
    memset(sums, 0, (size_t)(kLevels * padded) * 4);
  }

  void add(const float *row) {
    fold(row, 0);
    ++rows;
    for (int level = 1; level < kLevels && rows % (int64_t{1} << level * kPower) == 0; ++level) {
      fold(sums + (level - 1) * padded, level);
      memset(sums + (level - 1) * padded, 0, (size_t)padded * 4);
    }
  }

  const float *total() {
    for (int level = 1; level < kLevels; ++level) fold(sums + level * padded, 0);
    return sums;
  }

 private:
  void fold(const float *from, int level) {
    float *to = sums + level * padded;
    for (int64_t d = 0; d < padded; d += kLanes) store(to + d, load(to + d) + load(from + d));
  }
};

static void sum_task(void *context, int64_t index, void *scratch) {
  const Quantization &q = *(const Quantization *)context;
  const orchard_tensor &source = q.source, &sums = q.levels.mean;
  const int64_t b = index / source.sizes[1], h = index % source.sizes[1];
  const int64_t rows = source.sizes[2], dim = source.sizes[3], padded = round_up(dim, kLanes);
  float *row = (float *)scratch;
  memset(row, 0, (size_t)padded * 4);
  Cascade cascade(row + padded, padded);
  for (int64_t i = 0; i < rows; ++i) {
    read_row(row_at(source, b, h, i), source.strides[3], source.dtype, dim, row);
    cascade.add(row);
  }
  write_row(cascade.total(), (char *)row_at(sums, b, h, 0), sums.strides[3], ORCHARD_FLOAT32, dim);
}

static int sum_over_rows(const Quantization &q) noexcept {
  const size_t bytes = (size_t)((1 + Cascade::kLevels) * round_up(q.source.sizes[3], kLanes)) * 4;
  const int64_t heads = q.source.sizes[0] * q.source.sizes[1];
  return parallel_for(heads, q.threads, bytes, sum_task, (void *)&q) ? ORCHARD_OK
                                                                     : ORCHARD_OUT_OF_MEMORY;
}

}  // namespace orchard::ORCHARD_ISA
