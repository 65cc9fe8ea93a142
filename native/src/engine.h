// A validated call, and the table of functions that one instruction set offers for it.
#pragma once

#include "orchard.h"
#include "pool.h"

namespace orchard {

// What makes values of an operand's levels: (level - zero) * scale + mean.
struct Levels {
  orchard_tensor scales, zeros, mean;  // data is NULL where they are absent
  int64_t group[3];                    // batch entries, heads and rows that share a scale
};

struct Problem {
  orchard_tensor query, key, value, mask, out, lse;
  orchard_tensor grad_out, grad_lse, grad_query, grad_key, grad_value, grad_mask;
  int64_t batch, heads, kv_heads, group, rows, keys, dim, value_dim;
  int64_t band_low, band_high;  // clamped to +-(2^40)
  float scale, softcap;
  uint32_t drop_threshold, seed[2];
  int threads;
  int32_t dtype;  // of every operand; where they are levels, what the second product may round to
  Levels query_levels, key_levels, value_levels;
};

// A tensor to be stored in few bits, or whose rows are to be added up, into levels.mean.
struct Quantization {
  orchard_tensor source, data;
  Levels levels;
  int threads;
};

struct Kernels {
  const char *name;
  int (*forward)(const Problem &problem) noexcept;                  // a status
  int (*backward)(const Problem &problem) noexcept;                 // a status
  int (*quantize)(const Quantization &quantization) noexcept;       // a status
  int (*sum_over_rows)(const Quantization &quantization) noexcept;  // a status
  void (*exp2)(const float *x, float *y, size_t count) noexcept;
};

// One for each compiled instruction set; src/isa.cpp chooses among them.
const Kernels &kernels_avx512_bf16() noexcept;
const Kernels &kernels_avx512() noexcept;
const Kernels &kernels_avx2() noexcept;
const Kernels &kernels_neon_bf16() noexcept;
const Kernels &kernels_neon() noexcept;
const Kernels &kernels_portable() noexcept;

const Kernels &current_kernels() noexcept;

}  // namespace orchard
