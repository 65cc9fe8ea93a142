// Backward attention from (out, lse, seed): one task owns a chunk of keys of one key head, adds up
// its gradients of key and value, and hands its part of the gradient of the query on in turn.
#pragma once

#include "decode.h"

namespace orchard::ORCHARD_ISA {

constexpr int64_t kBlockRows = 128;  // query rows at a time; a multiple of kPanel
constexpr int64_t kBlockPanels = kBlockRows / kPanel;
constexpr int64_t kStepKeys = 64;  // keys whose scores are in flight at a time

ORCHARD_INLINE int64_t chunk_keys(int64_t dim, int64_t value_dim) {
  const int64_t wide = larger_of(dim, value_dim);
  return wide <= 64 ? 256 : wide <= 256 ? 128 : 64;
}

// A range of blocks or chunks.
struct Range {
  int64_t begin, end;
  int64_t size() const { return larger_of(0, end - begin); }
};

// The whole call. Sums are made in an order that depends on the problem alone: chunks of keys add
// to a block of rows one after the other, and a task waits for its turn.
struct Backward {
  const Problem &p;
  Scoring how;
  int64_t chunk, chunks, blocks, units;
  int64_t query_wide, slot_size, slots;
  bool few;  // rows that the forward takes without panels
  bool mask_over_batch, mask_over_heads, mask_over_rows, mask_over_keys;  // summed axes
  bool mask_once;  // no axis is summed, so each gradient of the mask is stored as it is found
  float *shift;    // [b * Hq + h][row]: what a score is taken from; inf for an empty row
  float *norm;     // [b * Hq + h][row]: what a probability is then multiplied by
  float *delta;    // [b * Hq + h][row]: grad_out . out - grad_lse
  Turn *turns;     // [b * Hq + h][block]
  Turn *mask_turns;
  uint32_t *slot_of;    // [unit]: 1 + the slot that holds its sums
  uint32_t *remaining;  // [unit]: chunks not done
  uint32_t *slot_taken;
  float *sums;  // [slot][group][panel][dim][kPanel]: gradients of the queries of one unit
  size_t bytes;

  Backward(const Problem &problem, bool pairs) : p(problem), how(problem, pairs) {
    chunk = chunk_keys(p.dim, p.value_dim);
    chunks = (p.keys + chunk - 1) / chunk;
    blocks = (p.rows + kBlockRows - 1) / kBlockRows;
    units = p.batch * p.kv_heads;
    query_wide = round_up(p.dim, kTileRows);
    slot_size = p.group * blocks * kBlockRows * query_wide;
    // No more units are in progress than threads, but for one between two of its chunks.
    slots = smaller_of(units, p.threads + 1);
    few = p.rows * p.group <= kDecodeRows;
    const bool masked = p.grad_mask.data != nullptr;
    mask_over_batch = masked && p.mask.sizes[0] == 1 && p.batch > 1;
    mask_over_heads = masked && p.mask.sizes[1] == 1 && p.heads > 1;
    mask_over_rows = masked && p.mask.sizes[2] == 1 && p.rows > 1;
    mask_over_keys = masked && p.mask.sizes[3] == 1 && p.keys > 1;
    const int64_t whole[4] = {p.batch, p.heads, p.rows, p.keys};
    mask_once = masked && memcmp(p.mask.sizes, whole, sizeof whole) == 0;
  }

  int64_t padded_rows() const { return blocks * kBlockRows; }
  int64_t mask_turn_count() const {
    return p.grad_mask.data == nullptr
               ? 0
               : p.mask.sizes[0] * p.mask.sizes[1] * (mask_over_rows ? 1 : blocks) *
                     (mask_over_keys ? 1 : chunks);
  }

  // Places everything in `base`; with none it only counts. The first `zeroed` bytes start as 0.
  size_t carve(void *base) {
    Carver carver{base};
    turns = carver.take<Turn>(p.batch * p.heads * blocks);
    mask_turns = carver.take<Turn>(mask_turn_count());
    slot_of = carver.take<uint32_t>(units);
    slot_taken = carver.take<uint32_t>(slots);
    const size_t zeroed = carver.used;
    remaining = carver.take<uint32_t>(units);
    shift = carver.take<float>(p.batch * p.heads * padded_rows());
    norm = carver.take<float>(p.batch * p.heads * padded_rows());
    delta = carver.take<float>(p.batch * p.heads * padded_rows());
    sums = carver.take<float>(slots * slot_size);
    bytes = carver.used;
    return zeroed;
  }

  // Keys that the panel of a row goes through: those that some row of it sees, in groups of 8.
  Range panel_keys(int64_t row) const {
    const int64_t first = row / kPanel * kPanel, last = smaller_of(first + kPanel, p.rows) - 1;
    const int64_t begin = how.first_key(first), end = how.end_key(last, p.keys);
    if (begin >= end) return {0, 0};
    return {begin / 8 * 8, round_up(end, 8)};
  }
  // Chunks that some row of a block sees, and blocks that see some key of a chunk.
  Range chunks_of(int64_t block) const {
    const int64_t first = block * kBlockRows, last = smaller_of(first + kBlockRows, p.rows) - 1;
    const int64_t begin = how.first_key(first), end = how.end_key(last, p.keys);
    if (begin >= end) return {0, 0};
    return {begin / chunk, (end + chunk - 1) / chunk};
  }
  Range blocks_of(int64_t c) const {
    const int64_t first = c * chunk, last = smaller_of(first + chunk, p.keys) - 1;
    const int64_t begin = larger_of(0, first - how.high);
    const int64_t end = smaller_of(p.rows, last - how.low + 1);
    if (begin >= end) return {0, 0};
    return {begin / kBlockRows, (end + kBlockRows - 1) / kBlockRows};
  }

  float *sums_of(int64_t unit, int64_t member, int64_t block) const {
    const int64_t slot = __atomic_load_n(&slot_of[unit], __ATOMIC_ACQUIRE) - 1;
    return sums + slot * slot_size + (member * blocks + block) * kBlockRows * query_wide;
  }

  // A slot for the unit's sums, given by whichever of its tasks comes first.
  void take_slot(int64_t unit) const {
    if (__atomic_load_n(&slot_of[unit], __ATOMIC_ACQUIRE) != 0) return;
    for (int64_t slot = 0;; slot = (slot + 1) % slots) {
      if (__atomic_exchange_n(&slot_taken[slot], 1, __ATOMIC_ACQ_REL) != 0) {
        if (__atomic_load_n(&slot_of[unit], __ATOMIC_ACQUIRE) != 0) return;
        continue;
      }
      uint32_t none = 0;
      if (!__atomic_compare_exchange_n(&slot_of[unit], &none, (uint32_t)slot + 1, false,
                                       __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        __atomic_store_n(&slot_taken[slot], 0, __ATOMIC_RELEASE);
      return;
    }
  }
  void leave_slot(int64_t unit) const {
    if (__atomic_sub_fetch(&remaining[unit], 1, __ATOMIC_ACQ_REL) == 0)
      __atomic_store_n(&slot_taken[slot_of[unit] - 1], 0, __ATOMIC_RELEASE);
  }
};

// Scratch of one thread.
struct BackwardScratch {
  int64_t words, value_words;         // 32-bit elements of a row along its columns
  int64_t query_wide, value_wide;     // columns up to whole register tiles
  int64_t query_lanes, value_lanes;   // columns up to whole vectors
  uint32_t *key, *key_pairs, *value;  // rows of the chunk; keys also in pairs of rows
  float *grad_key, *grad_value;
  uint32_t *query_columns, *query_rows;  // of the block, panel by panel and row by row
  uint32_t *grad_columns, *grad_rows;
  float *few_rows, *lines;     // where rows are few: those of the query, and room for keys
  uint32_t *packed;            // rows as they come
  float *scores, *products;    // [kStepKeys][kPanel]: q . k and grad_out . v
  uint32_t *weights, *slopes;  // [key][kBlockRows]: what value and key are summed with
  uint32_t *slope_pairs;       // the same in pairs of keys
  int64_t weight_words;        // 32-bit elements of kBlockRows weights
  float *mask, *mask_rows;
  float *rows;
  float *row_sums, *key_sums;  // of the gradient of a mask that is broadcast
  size_t bytes;

  template <bool kPairs>
  static BackwardScratch carve(const Backward &w, void *base) {
    const Problem &p = w.p;
    BackwardScratch s;
    Carver carve{base};
    const int64_t chunk = w.chunk;
    s.query_wide = w.query_wide;
    s.value_wide = round_up(p.value_dim, kTileRows);
    s.words = kPairs ? words_of<true>(p.dim) : s.query_wide;
    s.value_words = kPairs ? words_of<true>(p.value_dim) : s.value_wide;
    s.query_lanes = round_up(p.dim, larger_of(kLanes, kTileRows));
    s.value_lanes = round_up(p.value_dim, larger_of(kLanes, kTileRows));
    s.weight_words = kPairs ? kBlockRows / 2 : kBlockRows;
    s.key = carve.take<uint32_t>(chunk * s.words);
    s.key_pairs = kPairs ? carve.take<uint32_t>(chunk / 2 * s.query_wide) : s.key;
    s.value = carve.take<uint32_t>(chunk * s.value_words);
    s.grad_key = carve.take<float>(chunk * s.query_lanes);
    s.grad_value = carve.take<float>(chunk * s.value_lanes);
    s.query_columns = carve.take<uint32_t>(kBlockRows * s.words);
    s.grad_columns = carve.take<uint32_t>(kBlockRows * s.value_words);
    s.query_rows = carve.take<uint32_t>(kBlockRows / (kPairs ? 2 : 1) * s.query_lanes);
    s.grad_rows = carve.take<uint32_t>(kBlockRows / (kPairs ? 2 : 1) * s.value_lanes);
    const int64_t line = round_up(p.dim, kLanes);
    s.few_rows = carve.take<float>(w.few ? kDecodeRows * line : 0);
    s.lines = carve.take<float>(w.few ? kStepKeys * line : 0);
    s.packed = carve.take<uint32_t>(kPairs ? kLanes * larger_of(s.query_lanes, s.value_lanes) : 0);
    s.scores = carve.take<float>(kStepKeys * kPanel);
    s.products = carve.take<float>(kStepKeys * kPanel);
    s.weights = carve.take<uint32_t>(chunk * s.weight_words);
    s.slopes = carve.take<uint32_t>(chunk * s.weight_words);
    s.slope_pairs = kPairs ? carve.take<uint32_t>(chunk / 2 * kBlockRows) : s.slopes;
    const int64_t masked = p.mask.data != nullptr ? kStepKeys : 0;
    s.mask = carve.take<float>(masked * kPanel);
    s.mask_rows = carve.take<float>(masked * kLanes);
    s.rows =
        carve.take<float>(kLanes * larger_of(larger_of(s.query_lanes, s.value_lanes), kStepKeys));
    s.row_sums = carve.take<float>(kBlockRows);
    s.key_sums = carve.take<float>(chunk);
    s.bytes = carve.used;
    return s;
  }
};

// Past this size lse has too few digits left to rebuild a probability from: a row whose every mask
// is -1e9 has lse -1e9, whatever the number of its keys. Such a row is rebuilt from its scores.
constexpr float kCoarseLse = 128.0f;

ORCHARD_INLINE bool is_coarse(float lse) { return lse > kCoarseLse || lse < -kCoarseLse; }

// lse and delta of one block of rows of one head, and zeros where no key is seen. `rows` has room
// for two. True where some row has to be rebuilt.
static bool prepare_block(const Backward &w, float *rows, int64_t plane, int64_t block) {
  const Problem &p = w.p;
  const int64_t b = plane / p.heads, h = plane % p.heads;
  const bool unseen = w.chunks_of(block).size() == 0;
  float *grad = rows, *out = rows + larger_of(p.dim, p.value_dim);
  bool coarse = false;
  for (int64_t r = 0; r < kBlockRows; ++r) {
    const int64_t i = block * kBlockRows + r;
    float &shift = w.shift[plane * w.padded_rows() + i];
    float &delta = w.delta[plane * w.padded_rows() + i];
    w.norm[plane * w.padded_rows() + i] = 1.0f;
    shift = kInfinity;
    delta = 0.0f;
    if (i >= p.rows) continue;
    const float lse = *(const float *)row_at(p.lse, b, h, i);
    if (lse != -kInfinity) {
      read_row(row_at(p.grad_out, b, h, i), p.grad_out.strides[3], p.dtype, p.value_dim, grad);
      read_row(row_at(p.out, b, h, i), p.out.strides[3], p.dtype, p.value_dim, out);
      Floats sum = splat(0.0f);
      int64_t d = 0;
      for (; d + kLanes <= p.value_dim; d += kLanes) sum += load(grad + d) * load(out + d);
      delta = sum_of_lanes(sum);
      for (; d < p.value_dim; ++d) delta += grad[d] * out[d];
      if (p.grad_lse.data != nullptr) delta -= *(const float *)row_at(p.grad_lse, b, h, i);
      shift = lse;
      coarse = coarse || is_coarse(lse);
    }
    if (unseen) {
      for (int64_t d = 0; d < p.dim; ++d) grad[d] = 0.0f;
      write_row(grad, (char *)row_at(p.grad_query, b, h, i), p.grad_query.strides[3], p.dtype,
                p.dim);
    }
  }
  return coarse;
}

// Keys and values of a chunk; keys past the end, up to a multiple of 8, are zeros.
template <bool kPairs>
static void pack_chunk(const Backward &w, const BackwardScratch &s, int64_t b, int64_t kv_head,
                       int64_t key, int64_t count) {
  const Problem &p = w.p;
  const int64_t padded = round_up(count, 8);
  for (int64_t j = 0; j < count; ++j) {
    pack_row<kPairs>(row_at(p.key, b, kv_head, key + j), p.key.strides[3], p.dtype, p.dim, s.words,
                     s.key + j * s.words);
    pack_row<kPairs>(row_at(p.value, b, kv_head, key + j), p.value.strides[3], p.dtype, p.value_dim,
                     s.value_words, s.value + j * s.value_words);
  }
  memset(s.key + count * s.words, 0, (size_t)((padded - count) * s.words) * 4);
  memset(s.value + count * s.value_words, 0, (size_t)((padded - count) * s.value_words) * 4);
  if constexpr (kPairs) {
    for (int64_t j = 0; j < padded; j += 2) {
      const uint16_t *low = (const uint16_t *)(s.key + j * s.words);
      uint32_t *to = s.key_pairs + j / 2 * s.query_wide;
      interleave(low, low + 2 * s.words, p.dim, to);
      memset(to + p.dim, 0, (size_t)(s.query_wide - p.dim) * 4);
    }
  }
}

// The rows of a block twice: as columns, panel by panel, and row by row (kPairs: in pairs of rows).
// Rows without a key count as zeros.
template <bool kPairs>
static void pack_block(const orchard_tensor &t, int32_t dtype, int64_t b, int64_t h, int64_t row,
                       int64_t rows, const float *shift, uint32_t sign, int64_t dim, int64_t words,
                       int64_t lanes, uint32_t *packed, uint32_t *columns, uint32_t *by_row) {
  for (int64_t r = 0; r < kBlockRows; r += kLanes) {
    uint32_t *to = kPairs ? packed : by_row + r * lanes;
    const int64_t ld = kPairs ? lanes / 2 : lanes;
    if (r >= round_up(rows, kPanel)) break;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      if (r + lane < rows && shift[r + lane] != kInfinity)
        pack_row<kPairs>(row_at(t, b, h, row + r + lane), t.strides[3], dtype, dim, ld,
                         to + lane * ld);
      else
        memset(to + lane * ld, 0, (size_t)ld * 4);
    }
    uint32_t *panel = columns + r / kPanel * kPanel * words + r % kPanel;
    transpose_rows(to, ld, words, panel);
    if (sign != 0)
      for (int64_t i = 0; i < words; ++i)
        for (int64_t lane = 0; lane < kLanes; ++lane) panel[i * kPanel + lane] ^= sign;
    if constexpr (kPairs) {
      for (int64_t lane = 0; lane < kLanes; lane += 2) {
        const uint16_t *low = (const uint16_t *)(packed + lane * ld);
        interleave(low, low + 2 * ld, lanes, by_row + (r + lane) / 2 * lanes);
      }
    }
  }
}

// The query's rows of a block, in every way in which scores are made of them.
template <bool kPairs>
static void pack_query(const Backward &w, const BackwardScratch &s, int64_t b, int64_t h,
                       int64_t row, int64_t rows, const float *shift) {
  const Problem &p = w.p;
  pack_block<kPairs>(p.query, p.dtype, b, h, row, rows, shift, w.how.sign, p.dim, s.words,
                     s.query_lanes, s.packed, s.query_columns, s.query_rows);
  for (int64_t r = 0; w.few && r < rows; ++r)
    read_query(p, w.how, b, h, row + r, s.few_rows + r * round_up(p.dim, kLanes));
}

static Panel panel_of(const Backward &w, int64_t plane, int64_t first) {
  Panel panel;
  panel.count = smaller_of(kPanel, w.p.rows - first);
  panel.first = first;
  panel.last = first + panel.count - 1;
  for (int64_t lane = 0; lane < kPanel; ++lane) {
    panel.row[lane] = (int32_t)(first + smaller_of(lane, panel.count - 1));
    panel.plane[lane] = (uint32_t)plane;
    panel.head[lane] = (int32_t)(plane % w.p.heads);
  }
  return panel;
}

// Products of few rows, added up as decode_rows() does it: lse is of these, to the last bit. What
// has no row or key is 0.
static void multiply_few_rows(const Backward &w, const BackwardScratch &s, int64_t b,
                              int64_t kv_head, int64_t key, int64_t count) {
  const Problem &p = w.p;
  const Lines keys = lines_of(p.key, p.key_levels, p.dim, b, kv_head, key, count, true, s.lines);
  memset(s.scores, 0, kStepKeys * kPanel * 4);
  const auto score = p.rows == 1   ? decode_scores<1>
                     : p.rows == 2 ? decode_scores<2>
                     : p.rows == 3 ? decode_scores<3>
                                   : decode_scores<4>;
  score(keys, nullptr, count, s.few_rows, kPanel, s.scores);
}

// Products of panel `n` of the packed block with `count` packed keys, from `j` of the chunk on,
// into s.scores; the mask that goes with them, or none.
template <bool kPairs>
static const float *multiply_scores(const Backward &w, const BackwardScratch &s, const Panel &panel,
                                    int64_t b, int64_t key, int64_t j, int64_t count, int64_t n) {
  const Problem &p = w.p;
  const int64_t inside = smaller_of(count, p.keys - key - j);
  if (w.few)
    multiply_few_rows(w, s, b, panel.head[0] / p.group, key + j, inside);
  else
    multiply<kPairs, false, Into::store>(count, 2, s.words, s.key + j * s.words, s.words,
                                         s.query_columns + n * kPanel * s.words, kPanel, s.scores,
                                         kPanel, nullptr, chain_for(p.keys));
  if (p.mask.data == nullptr) return nullptr;
  // The mask ends with the keys; what stands past them is cut as out of the band.
  read_mask(p, w.how, panel, b, key + j, inside, s.mask, s.mask_rows);
  memset(s.mask + inside * kPanel, 0, (size_t)((count - inside) * kPanel) * 4);
  return s.mask;
}

template <bool kGeneral>
ORCHARD_INLINE Floats score_of(const Problem &p, const Scoring &how, Floats product,
                               const float *mask, int64_t at, Floats *slope) {
  if constexpr (kGeneral) return shape(p, how, product, mask ? mask + at : nullptr, slope);
  return rounded(product * how.scale);
}

// The largest score of each lane, and the sum of its exponentials, with `count` keys more.
template <bool kGeneral>
static void add_scores(const Backward &w, const BackwardScratch &s, const Panel &panel, int64_t key,
                       int64_t count, const float *mask, Floats (&top)[2], Floats (&total)[2]) {
  const Problem &p = w.p;
  for (int v = 0; v < 2; ++v) {
    const Ints rows = load_as<Ints>(panel.row + v * kLanes);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t at = j * kPanel + v * kLanes;
      Floats slope;
      const Floats score = score_of<kGeneral>(p, w.how, load(s.scores + at), mask, at, &slope);
      const Ints seen = in_band(w.how, rows, key + j) & splat_int(key + j < p.keys ? -1 : 0);
      const Floats before = top[v];
      top[v] = select(seen & (score > before), score, before);
      // Of the two exponents one is 0; a score that is not seen, or -inf, adds nothing.
      const Floats kept = select(before == splat(-kInfinity), splat(0.0f),
                                 total[v] * exp2((before - top[v]) * kLog2e));
      total[v] = kept + select(seen & (score > splat(-kInfinity)), exp2((score - top[v]) * kLog2e),
                               splat(0.0f));
    }
  }
}

// Shift and norm of the coarse rows of a block, from the scores that differentiate() will see: to
// the last bit, for where scores are large their last bits decide.
template <bool kPairs>
static void rebuild_block(const Backward &w, const BackwardScratch &s, int64_t plane,
                          int64_t block) {
  const Problem &p = w.p;
  const int64_t b = plane / p.heads, h = plane % p.heads, row = block * kBlockRows;
  const int64_t rows = smaller_of(kBlockRows, p.rows - row), panels = (rows + kPanel - 1) / kPanel;
  float *shift = w.shift + plane * w.padded_rows() + row;
  float *norm = w.norm + plane * w.padded_rows() + row;
  pack_query<kPairs>(w, s, b, h, row, rows, shift);
  Floats top[kBlockPanels][2], total[kBlockPanels][2];
  for (int64_t n = 0; n < panels; ++n)
    for (int v = 0; v < 2; ++v) {
      top[n][v] = splat(-kInfinity);
      total[n][v] = splat(0.0f);
    }
  const Range chunks = w.chunks_of(block);
  for (int64_t c = chunks.begin; c < chunks.end; ++c) {
    const int64_t key = c * w.chunk, count = smaller_of(w.chunk, p.keys - key);
    pack_chunk<kPairs>(w, s, b, h / p.group, key, count);
    for (int64_t n = 0; n < panels; ++n) {
      const Panel panel = panel_of(w, plane, row + n * kPanel);
      for (int64_t j = 0; j < round_up(count, 8); j += kStepKeys) {
        const int64_t here = smaller_of(kStepKeys, round_up(count, 8) - j);
        const float *mask = multiply_scores<kPairs>(w, s, panel, b, key, j, here, n);
        if (w.how.general)
          add_scores<true>(w, s, panel, key + j, here, mask, top[n], total[n]);
        else
          add_scores<false>(w, s, panel, key + j, here, mask, top[n], total[n]);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t n = r / kPanel, v = r % kPanel / kLanes, lane = r % kLanes;
    if (!is_coarse(shift[r]) || !(total[n][v][lane] > 0)) continue;
    shift[r] = top[n][v][lane];
    norm[r] = 1.0f / total[n][v][lane];
  }
}

// One panel of a block: scores and products of `count` keys into weights and slopes. `at` is the
// panel's first column of them. With `by_score` the gradient of each score stays in s.scores.
template <bool kPairs, bool kGeneral>
static void differentiate(const Backward &w, const BackwardScratch &s, const Panel &panel,
                          int64_t key, int64_t first, int64_t count, int64_t at, const float *shift,
                          const float *norm, const float *delta, const float *mask, bool by_score) {
  const Problem &p = w.p;
  const Scoring &how = w.how;
  const bool cut = cut_by_band(how, panel, key) || cut_by_band(how, panel, key + count - 1) ||
                   key + count > p.keys;
  for (int v = 0; v < 2; ++v) {
    const Floats row_shift = load(shift + v * kLanes), row_delta = load(delta + v * kLanes);
    const Floats row_norm = load(norm + v * kLanes);
    const Ints alive = row_shift != splat(kInfinity);
    const Ints rows = load_as<Ints>(panel.row + v * kLanes);
    const Words planes = load_as<Words>(panel.plane + v * kLanes);
    Words drawn[4];
    Floats even_slope = {};
#pragma GCC unroll 2
    for (int64_t j = 0; j < count; ++j) {
      float *score_at = s.scores + j * kPanel + v * kLanes;
      Floats slope = splat(1.0f);
      const Floats score =
          score_of<kGeneral>(p, how, load(score_at), mask, j * kPanel + v * kLanes, &slope);
      Floats weight = exp2((score - row_shift) * kLog2e) * row_norm;
      Ints seen = alive;
      if (cut) seen &= in_band(how, rows, key + j) & splat_int(key + j < p.keys ? -1 : 0);
      weight = select(seen, weight, splat(0.0f));
      Floats product = load(s.products + j * kPanel + v * kLanes), summed = weight;
      if (p.drop_threshold != 0) {
        if (j % 8 == 0) draw((uint32_t)((key + j) / 8), (Words)rows, planes, p.seed, drawn);
        const Ints keep = kept(drawn, j, p.drop_threshold);
        product = select(keep, product * how.keep_scale, splat(0.0f));
        summed = select(keep, weight, splat(0.0f));
      }
      Floats by = weight * (product - row_delta);
      by = select(seen, by, splat(0.0f));
      if (by_score) store(score_at, by);
      if constexpr (kGeneral) by *= slope;
      const int64_t to = (first + j) * kBlockRows + at + v * kLanes;
      if constexpr (kPairs) {
        store((uint16_t *)s.weights + to, narrow_bf16(summed));
        store((uint16_t *)s.slopes + to, narrow_bf16(by));
        if (j % 2 == 0)
          even_slope = by;
        else
          store(s.slope_pairs + (first + j) / 2 * kBlockRows + at + v * kLanes,
                pair_bf16(even_slope, by));
      } else {
        store((float *)s.weights + to, summed);
        store((float *)s.slopes + to, by);
      }
    }
  }
}

// Gradients of the scores of one panel and `count` keys into that of the mask, or into sums over
// the axes along which the mask is broadcast.
static void add_mask_gradient(const Backward &w, const BackwardScratch &s, const Panel &panel,
                              int64_t b, int64_t h, int64_t key, int64_t in_chunk, int64_t in_block,
                              int64_t count) {
  const orchard_tensor &to = w.p.grad_mask;
  if (w.mask_over_keys) {
    for (int64_t lane = 0; lane < panel.count; ++lane)
      for (int64_t j = 0; j < count; ++j)
        s.row_sums[in_block + lane] += s.scores[j * kPanel + lane];
    return;
  }
  if (w.mask_over_rows) {
    for (int64_t j = 0; j < count; ++j)
      s.key_sums[in_chunk + j] += sum_of_lanes(load(s.scores + j * kPanel)) +
                                  sum_of_lanes(load(s.scores + j * kPanel + kLanes));
    return;
  }
  const int64_t mask_b = w.p.mask.sizes[0] == 1 ? 0 : b, mask_h = w.p.mask.sizes[1] == 1 ? 0 : h;
  for (int64_t r = 0; r < panel.count; r += kLanes) {
    transpose_columns(s.scores + r, kPanel, count, s.rows, kStepKeys);
    for (int64_t lane = 0; lane < smaller_of(kLanes, panel.count - r); ++lane) {
      float *row = (float *)row_at(to, mask_b, mask_h, panel.row[r + lane]);
      const float *from = s.rows + lane * kStepKeys;
      if (w.mask_once)
        write_row(from, (char *)row + key * to.strides[3] * element_size(to.dtype), to.strides[3],
                  to.dtype, count);
      else if (to.strides[3] == 1)
        for (int64_t j = 0; j < count; ++j) row[key + j] += from[j];
      else
        for (int64_t j = 0; j < count; ++j) row[(key + j) * to.strides[3]] += from[j];
    }
  }
}

// Which turn at the gradient of the mask a task has, and whether it has to wait for one.
struct MaskTurn {
  Turn *turn = nullptr;
  uint32_t value = 0;

  void begin() const {
    if (turn != nullptr) wait_for_turn(*turn, value);
  }
  void end() const {
    if (turn != nullptr) end_turn(*turn);
  }
};

static MaskTurn mask_turn(const Backward &w, int64_t b, int64_t kv_head, int64_t member,
                          int64_t block, int64_t c) {
  const Problem &p = w.p;
  if (!(w.mask_over_batch || w.mask_over_heads || (w.mask_over_keys && w.chunks > 1))) return {};
  const int64_t h = kv_head * p.group + member;
  const int64_t mask_b = p.mask.sizes[0] == 1 ? 0 : b, mask_h = p.mask.sizes[1] == 1 ? 0 : h;
  int64_t index = mask_b * p.mask.sizes[1] + mask_h;
  if (!w.mask_over_rows) index = index * w.blocks + block;
  if (!w.mask_over_keys) index = index * w.chunks + c;
  int64_t order = w.mask_over_batch ? b : 0;
  if (w.mask_over_keys) {
    // Tasks are claimed chunk by chunk within a key head, so chunks come before its members.
    const Range chunks = w.mask_over_rows ? Range{0, w.chunks} : w.chunks_of(block);
    if (w.mask_over_heads) order = order * p.kv_heads + kv_head;
    order = order * chunks.size() + c - chunks.begin;
    if (w.mask_over_heads) order = order * p.group + member;
  } else if (w.mask_over_heads) {
    order = order * p.heads + h;
  }
  return {w.mask_turns + index, (uint32_t)order};
}

// A finished block of the gradient of the query.
static void write_query_block(const Backward &w, const BackwardScratch &s, int64_t b, int64_t h,
                              int64_t block, const float *sums) {
  const Problem &p = w.p;
  const int64_t row = block * kBlockRows, rows = smaller_of(kBlockRows, p.rows - row);
  for (int64_t r = 0; r < rows; r += kLanes) {
    const float *panel = sums + r / kPanel * kPanel * w.query_wide + r % kPanel;
    transpose_columns(panel, kPanel, p.dim, s.rows, s.query_lanes);
    for (int64_t lane = 0; lane < smaller_of(kLanes, rows - r); ++lane) {
      float *from = s.rows + lane * s.query_lanes;
      for (int64_t d = 0; d < p.dim; ++d) from[d] *= p.scale;
      write_row(from, (char *)row_at(p.grad_query, b, h, row + r + lane), p.grad_query.strides[3],
                p.dtype, p.dim);
    }
  }
}

template <bool kPairs>
static void backward_block(const Backward &w, const BackwardScratch &s, int64_t unit,
                           int64_t member, int64_t block, int64_t c) {
  const Problem &p = w.p;
  const int64_t b = unit / p.kv_heads, kv_head = unit % p.kv_heads, h = kv_head * p.group + member;
  const int64_t plane = b * p.heads + h, row = block * kBlockRows;
  const int64_t rows = smaller_of(kBlockRows, p.rows - row), panels = (rows + kPanel - 1) / kPanel;
  const int64_t key = c * w.chunk, count = smaller_of(w.chunk, p.keys - key);
  const int64_t padded = round_up(count, 8);
  const float *shift = w.shift + plane * w.padded_rows() + row;
  const float *norm = w.norm + plane * w.padded_rows() + row;
  const float *delta = w.delta + plane * w.padded_rows() + row;
  pack_query<kPairs>(w, s, b, h, row, rows, shift);
  pack_block<kPairs>(p.grad_out, p.dtype, b, h, row, rows, shift, 0, p.value_dim, s.value_words,
                     s.value_lanes, s.packed, s.grad_columns, s.grad_rows);

  const bool mask_gradient = p.grad_mask.data != nullptr;
  MaskTurn turn;
  if (mask_gradient) {
    if (w.mask_over_keys && !w.mask_over_rows) memset(s.row_sums, 0, kBlockRows * 4);
    if (!w.mask_over_rows) turn = mask_turn(w, b, kv_head, member, block, c);
    if (!w.mask_over_rows && !w.mask_over_keys) turn.begin();
  }

  // Keys of the chunk that each panel sees, in whole groups of 8.
  Range seen[kBlockPanels];
  for (int64_t n = 0; n < panels; ++n) {
    const Panel panel = panel_of(w, plane, row + n * kPanel);
    const Range keys = w.panel_keys(panel.first);
    const int64_t begin = larger_of(0, keys.begin - key), end = smaller_of(padded, keys.end - key);
    seen[n] = begin < end ? Range{begin, end} : Range{0, 0};
    for (int64_t j = begin; j < end; j += kStepKeys) {
      const int64_t here = smaller_of(kStepKeys, end - j);
      const float *mask = multiply_scores<kPairs>(w, s, panel, b, key, j, here, n);
      multiply<kPairs, false, Into::store>(
          here, 2, s.value_words, s.value + j * s.value_words, s.value_words,
          s.grad_columns + n * kPanel * s.value_words, kPanel, s.products, kPanel);
      if (w.how.general)
        differentiate<kPairs, true>(w, s, panel, key + j, j, here, n * kPanel, shift + n * kPanel,
                                    norm + n * kPanel, delta + n * kPanel, mask, mask_gradient);
      else
        differentiate<kPairs, false>(w, s, panel, key + j, j, here, n * kPanel, shift + n * kPanel,
                                     norm + n * kPanel, delta + n * kPanel, mask, mask_gradient);
      if (mask_gradient)
        add_mask_gradient(w, s, panel, b, h, key + j, j, n * kPanel,
                          smaller_of(here, p.keys - key - j));
    }
  }
  if (mask_gradient && !w.mask_over_rows) {
    if (w.mask_over_keys) {
      turn.begin();
      const int64_t mask_b = p.mask.sizes[0] == 1 ? 0 : b, mask_h = p.mask.sizes[1] == 1 ? 0 : h;
      for (int64_t r = 0; r < rows; ++r)
        *(float *)row_at(p.grad_mask, mask_b, mask_h, row + r) += s.row_sums[r];
    }
    turn.end();
  }

  // Gradients of key and value: runs of keys that the same panels see.
  constexpr int64_t kPart = kPairs ? 2 : 1;
  for (int64_t j = 0; j < padded;) {
    Range run{panels, 0};
    int64_t end = padded;
    for (int64_t n = 0; n < panels; ++n) {
      if (seen[n].begin <= j && j < seen[n].end) {
        run.begin = smaller_of(run.begin, n);
        run.end = n + 1;
        end = smaller_of(end, seen[n].end);
      } else if (seen[n].begin > j && seen[n].begin < seen[n].end) {
        end = smaller_of(end, seen[n].begin);
      }
    }
    if (run.begin < run.end) {
      const int64_t r = run.begin * kPanel / kPart, steps = run.size() * kPanel / kPart;
      multiply<kPairs, false, Into::add>(end - j, s.value_lanes / kLanes, steps,
                                         s.weights + j * s.weight_words + r, s.weight_words,
                                         s.grad_rows + r * s.value_lanes, s.value_lanes,
                                         s.grad_value + j * s.value_lanes, s.value_lanes);
      multiply<kPairs, false, Into::add>(end - j, s.query_lanes / kLanes, steps,
                                         s.slopes + j * s.weight_words + r, s.weight_words,
                                         s.query_rows + r * s.query_lanes, s.query_lanes,
                                         s.grad_key + j * s.query_lanes, s.query_lanes);
    }
    j = end;
  }

  // The gradient of the query, in the order of the chunks.
  const Range order = w.chunks_of(block);
  Turn &query_turn = w.turns[plane * w.blocks + block];
  wait_for_turn(query_turn, (uint32_t)(c - order.begin));
  float *sums = w.sums_of(unit, member, block);
  for (int64_t n = 0; n < panels; ++n) {
    float *panel = sums + n * kPanel * w.query_wide;
    if (c == order.begin) memset(panel, 0, (size_t)(kPanel * w.query_wide) * 4);
    if (seen[n].size() == 0) continue;
    multiply<kPairs, true, Into::add>(
        w.query_wide, 2, seen[n].size() / kPart, s.key_pairs + seen[n].begin / kPart * s.query_wide,
        s.query_wide, s.slope_pairs + seen[n].begin / kPart * kBlockRows + n * kPanel, kBlockRows,
        panel, kPanel);
  }
  if (c + 1 == order.end) write_query_block(w, s, b, h, block, sums);
  end_turn(query_turn);
}

template <bool kPairs>
static void backward_chunk(const Backward &w, const BackwardScratch &s, int64_t unit, int64_t c) {
  const Problem &p = w.p;
  const int64_t b = unit / p.kv_heads, kv_head = unit % p.kv_heads;
  const int64_t key = c * w.chunk, count = smaller_of(w.chunk, p.keys - key);
  w.take_slot(unit);
  pack_chunk<kPairs>(w, s, b, kv_head, key, count);
  memset(s.grad_key, 0, (size_t)(round_up(count, 8) * s.query_lanes) * 4);
  memset(s.grad_value, 0, (size_t)(round_up(count, 8) * s.value_lanes) * 4);
  const Range blocks = w.blocks_of(c);
  for (int64_t member = 0; member < p.group; ++member) {
    const bool sum_keys = p.grad_mask.data != nullptr && w.mask_over_rows;
    if (sum_keys) {
      memset(s.key_sums, 0, (size_t)w.chunk * 4);
      memset(s.row_sums, 0, kBlockRows * 4);
    }
    for (int64_t block = blocks.begin; block < blocks.end; ++block)
      backward_block<kPairs>(w, s, unit, member, block, c);
    if (sum_keys) {
      const int64_t h = kv_head * p.group + member;
      const MaskTurn turn = mask_turn(w, b, kv_head, member, 0, c);
      turn.begin();
      const int64_t mask_b = p.mask.sizes[0] == 1 ? 0 : b, mask_h = p.mask.sizes[1] == 1 ? 0 : h;
      float *row = (float *)row_at(p.grad_mask, mask_b, mask_h, 0);
      if (w.mask_over_keys)
        for (int64_t r = 0; r < kBlockRows; ++r) row[0] += s.row_sums[r];
      else
        for (int64_t j = 0; j < count; ++j)
          row[(key + j) * p.grad_mask.strides[3]] += s.key_sums[j];
      turn.end();
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    float *grad_key = s.grad_key + j * s.query_lanes,
          *grad_value = s.grad_value + j * s.value_lanes;
    for (int64_t d = 0; d < p.dim; ++d) grad_key[d] *= p.scale;
    write_row(grad_key, (char *)row_at(p.grad_key, b, kv_head, key + j), p.grad_key.strides[3],
              p.dtype, p.dim);
    if (p.drop_threshold != 0)
      for (int64_t d = 0; d < p.value_dim; ++d) grad_value[d] *= w.how.keep_scale;
    write_row(grad_value, (char *)row_at(p.grad_value, b, kv_head, key + j),
              p.grad_value.strides[3], p.dtype, p.value_dim);
  }
  w.leave_slot(unit);
}

}  // namespace orchard::ORCHARD_ISA
