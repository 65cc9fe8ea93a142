// The matrix product under everything: C[m][n] (op)= sum over k of A[m][k] * B[k][n].
//
// Elements of A and B are 32-bit: fp32, or pairs of bf16 that lie next to each other along k.
// Vectors run along n. A is read one broadcast element at a time, so either of its orders does.
#pragma once

#include "vector.h"

namespace orchard::ORCHARD_ISA {

constexpr int kPanel = 2 * kLanes;  // columns of one register tile
constexpr int64_t kChain = 128;     // steps summed in one go: a longer chain loses precision

// Where columns are few their errors do not even out, and a short chain costs little.
ORCHARD_INLINE int64_t chain_for(int64_t columns) { return columns < 16 ? 16 : kChain; }

enum class Into {
  store,      // C = AB
  add,        // C += AB
  scale_add,  // C = C * factor[n] + AB
};

// kColumnsOfA: A[m][k] lies at a[k * lda + m], else at a[m * lda + k].
template <bool kPairs, bool kColumnsOfA, Into kInto, int kVectors>
ORCHARD_INLINE void multiply_tile(int64_t steps, const uint32_t *a, int64_t lda, const uint32_t *b,
                                  int64_t ldb, float *c, int64_t ldc, const float *factor) {
  Floats acc[kTileRows][kVectors] = {};
  for (int64_t k = 0; k < steps; ++k) {
    Floats columns[kVectors];
#pragma GCC unroll 2
    for (int n = 0; n < kVectors; ++n) columns[n] = load_as<Floats>(b + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kTileRows; ++m) {
      const uint32_t element = kColumnsOfA ? a[m] : a[m * lda];
#pragma GCC unroll 2
      for (int n = 0; n < kVectors; ++n)
        acc[m][n] = multiply_add<kPairs>(element, columns[n], acc[m][n]);
    }
    a += kColumnsOfA ? lda : 1;
    b += ldb;
  }
#pragma GCC unroll 8
  for (int m = 0; m < kTileRows; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < kVectors; ++n) {
      float *to = c + m * ldc + n * kLanes;
      if constexpr (kInto == Into::store) store(to, acc[m][n]);
      if constexpr (kInto == Into::add) store(to, load(to) + acc[m][n]);
      if constexpr (kInto == Into::scale_add)
        store(to, load(to) * load(factor + n * kLanes) + acc[m][n]);
    }
  }
}

template <bool kPairs, bool kColumnsOfA, Into kInto>
static void multiply_chain(int64_t rows, int64_t vectors, int64_t steps, const uint32_t *a,
                           int64_t lda, const uint32_t *b, int64_t ldb, float *c, int64_t ldc,
                           const float *factor) {
  const int64_t a_step = kColumnsOfA ? kTileRows : kTileRows * lda;
  for (; vectors > 0; vectors -= 2, b += kPanel, c += kPanel) {
    for (int64_t m = 0; m < rows; m += kTileRows) {
      const uint32_t *tile = a + m / kTileRows * a_step;
      if (vectors > 1)
        multiply_tile<kPairs, kColumnsOfA, kInto, 2>(steps, tile, lda, b, ldb, c + m * ldc, ldc,
                                                     factor);
      else
        multiply_tile<kPairs, kColumnsOfA, kInto, 1>(steps, tile, lda, b, ldb, c + m * ldc, ldc,
                                                     factor);
    }
    if (kInto == Into::scale_add) factor += kPanel;
  }
}

// `rows` is a multiple of kTileRows; `vectors` counts vectors along n; `chain` steps are summed in
// one go.
template <bool kPairs, bool kColumnsOfA, Into kInto>
static void multiply(int64_t rows, int64_t vectors, int64_t steps, const uint32_t *a, int64_t lda,
                     const uint32_t *b, int64_t ldb, float *c, int64_t ldc,
                     const float *factor = nullptr, int64_t chain = kChain) {
  multiply_chain<kPairs, kColumnsOfA, kInto>(rows, vectors, steps < chain ? steps : chain, a, lda,
                                             b, ldb, c, ldc, factor);
  for (int64_t k = chain; k < steps; k += chain) {
    const int64_t left = steps - k < chain ? steps - k : chain;
    multiply_chain<kPairs, kColumnsOfA, Into::add>(rows, vectors, left,
                                                   a + (kColumnsOfA ? k * lda : k), lda,
                                                   b + k * ldb, ldb, c, ldc, nullptr);
  }
}

}  // namespace orchard::ORCHARD_ISA
