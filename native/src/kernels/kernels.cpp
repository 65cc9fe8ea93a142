// Everything that is compiled once for each instruction set.
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // inside the compiler's own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "backward.h"
#include "quantize.h"

namespace orchard::ORCHARD_ISA {

template <Product kScores, Product kValues>
static void forward_task(void *context, int64_t index, void *scratch) {
  const Forward &f = *(const Forward *)context;
  const ForwardScratch s(f, scratch);
  const int64_t split = index % f.splits, rest = index / f.splits;
  // Under a causal band the last rows have the most keys: they go first.
  const int64_t unit = rest / f.blocks, block = f.blocks - 1 - rest % f.blocks;
  if (f.decode()) return decode_unit(f, unit, split, s);
  if constexpr (kScores == Product::levels) {
    const Place at(f, unit, 0);
    if (any_large_scale(f.p.key_levels, at.batch, at.head / f.p.group))
      return forward_block<Product::fp32, kValues>(f, unit, block, split, s);
  }
  forward_block<kScores, kValues>(f, unit, block, split, s);
}

template <Product kValues>
static Task forward_task_of(Product scores) {
  if constexpr (kHasQuads)
    if (scores == Product::levels) return forward_task<Product::levels, kValues>;
  if constexpr (kValues == Product::pairs)
    if (scores == Product::pairs) return forward_task<Product::pairs, kValues>;
  return forward_task<Product::fp32, kValues>;
}

static Task forward_task_of(Product scores, Product values) {
  if constexpr (kHasPairs)
    if (values == Product::pairs) return forward_task_of<Product::pairs>(scores);
  return forward_task_of<Product::fp32>(scores);
}

static void combine_task(void *context, int64_t unit, void *scratch) {
  const Forward &f = *(const Forward *)context;
  for (int64_t r = 0; r < f.unit_rows; ++r) combine_row(f, unit, r, (float *)scratch);
}

// Overlapping views can pose more rows than there is memory for; sizes of scratch must not wrap.
static bool too_large(double elements) { return elements > 0x1p48; }

static int forward(const Problem &p) noexcept {
  if (p.batch == 0 || p.heads == 0 || p.rows == 0) return ORCHARD_OK;
  const Product scores = scores_of(p);
  Forward f(p, scores);
  if (f.splits > 1) {
    if (too_large((double)f.units * f.splits * f.unit_rows * f.partial_row()))
      return ORCHARD_OUT_OF_MEMORY;
    f.partial = (float *)allocate((size_t)(f.units * f.splits * f.unit_rows * f.partial_row()) * 4);
    if (f.partial == nullptr) return ORCHARD_OUT_OF_MEMORY;
  }
  const size_t bytes = ForwardScratch(f, nullptr).bytes;
  const Task task = forward_task_of(scores, values_of(p));
  bool done = parallel_for(f.tasks(), p.threads, bytes, task, &f);
  if (done && f.splits > 1)
    done = parallel_for(f.units, p.threads, (size_t)p.value_dim * 4 + 64, combine_task, &f);
  if (f.partial != nullptr) release(f.partial);
  return done ? ORCHARD_OK : ORCHARD_OUT_OF_MEMORY;
}

template <bool kPairs>
static void prepare_task(void *context, int64_t index, void *scratch) {
  const Backward &w = *(const Backward *)context;
  const BackwardScratch s = BackwardScratch::carve<kPairs>(w, scratch);
  const int64_t plane = index / w.blocks, block = index % w.blocks;
  if (prepare_block(w, s.rows, plane, block)) rebuild_block<kPairs>(w, s, plane, block);
}

// One row of the gradient of the mask, but for what tasks store rather than add to.
static void clear_mask_task(void *context, int64_t index, void *) {
  const Backward &w = *(const Backward *)context;
  const orchard_tensor &t = w.p.grad_mask;
  const int64_t rows = t.sizes[2], b = index / rows / t.sizes[1], h = index / rows % t.sizes[1];
  const int64_t i = index % rows, size = element_size(t.dtype), step = t.strides[3] * size;
  char *row = (char *)row_at(t, b, h, i);
  const Range stored = w.mask_once ? w.panel_keys(i) : Range{0, 0};
  const Range cleared[2] = {{0, stored.begin}, {stored.end, t.sizes[3]}};
  for (const Range &keys : cleared) {
    if (step == size && keys.size() > 0)
      memset(row + keys.begin * size, 0, (size_t)(keys.size() * size));
    else
      for (int64_t j = keys.begin; j < keys.end; ++j) memset(row + j * step, 0, (size_t)size);
  }
}

template <bool kPairs>
static void backward_task(void *context, int64_t index, void *scratch) {
  const Backward &w = *(const Backward *)context;
  const BackwardScratch s = BackwardScratch::carve<kPairs>(w, scratch);
  backward_chunk<kPairs>(w, s, index / w.chunks, index % w.chunks);
}

static int backward(const Problem &p) noexcept {
  const bool pairs = kHasPairs && p.dtype == ORCHARD_BFLOAT16;
  Backward w(p, pairs);
  if (too_large((double)p.batch * p.heads * w.padded_rows()) ||
      too_large((double)w.slots * w.slot_size) || too_large((double)w.mask_turn_count()))
    return ORCHARD_OUT_OF_MEMORY;
  w.carve(nullptr);
  void *memory = allocate(w.bytes);
  if (memory == nullptr) return ORCHARD_OUT_OF_MEMORY;
  memset(memory, 0, w.carve(memory));
  for (int64_t unit = 0; unit < w.units; ++unit) w.remaining[unit] = (uint32_t)w.chunks;

  const size_t bytes = pairs ? BackwardScratch::carve<kHasPairs>(w, nullptr).bytes
                             : BackwardScratch::carve<false>(w, nullptr).bytes;
  const Task prepare = pairs ? prepare_task<kHasPairs> : prepare_task<false>;
  bool done = parallel_for(p.batch * p.heads * w.blocks, p.threads, bytes, prepare, &w);
  if (p.grad_mask.data != nullptr)
    done = done && parallel_for(p.grad_mask.sizes[0] * p.grad_mask.sizes[1] * p.grad_mask.sizes[2],
                                p.threads, 0, clear_mask_task, &w);
  const Task task = pairs ? backward_task<kHasPairs> : backward_task<false>;
  done = done && parallel_for(w.units * w.chunks, p.threads, bytes, task, &w);
  release(memory);
  return done ? ORCHARD_OK : ORCHARD_OUT_OF_MEMORY;
}

static void exp2_all(const float *x, float *y, size_t count) noexcept {
  for (size_t i = 0; i < count; ++i) y[i] = exp2(splat(x[i]))[0];
}

}  // namespace orchard::ORCHARD_ISA

#define ORCHARD_JOIN_(a, b) a##b
#define ORCHARD_JOIN(a, b) ORCHARD_JOIN_(a, b)
#define ORCHARD_TEXT_(a) #a
#define ORCHARD_TEXT(a) ORCHARD_TEXT_(a)

const orchard::Kernels &orchard::ORCHARD_JOIN(kernels_, ORCHARD_ISA)() noexcept {
  namespace here = orchard::ORCHARD_ISA;
  static const Kernels table = {
      ORCHARD_TEXT(ORCHARD_ISA), here::forward, here::backward, here::quantize,
      here::sum_over_rows,       here::exp2_all};
  return table;
}
