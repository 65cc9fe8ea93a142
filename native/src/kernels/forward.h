// Forward attention: tiles of keys against panels of rows, with an online softmax.
//
// A panel holds its rows in the lanes of vectors: scores are [key][row], so a row's maximum and
// sum need no step across lanes, and what a row computes never depends on its neighbours.
#pragma once

#include "scores.h"

namespace orchard::ORCHARD_ISA {

constexpr int64_t kSplitKeys = 1024;    // keys of one task where few rows meet many keys
constexpr int64_t kSplitRows = kPanel;  // the most rows for which keys are split
constexpr int64_t kDecodeRows = 4;      // the most rows that go without panels
constexpr int64_t kMaxBlockPanels = 8;
constexpr int64_t kSumKeys = 16;  // probabilities summed in one go: a longer chain loses precision

// What a product, of query and key or of probabilities and values, is made of.
enum class Product {
  fp32,
  pairs,   // of bf16
  levels,  // quads of 8-bit ones
};

ORCHARD_INLINE Product scores_of(const Problem &p) {
  if (kHasQuads && is_levels(p.query) && is_levels(p.key)) return Product::levels;
  const bool halves = p.query.dtype == ORCHARD_BFLOAT16 && p.key.dtype == ORCHARD_BFLOAT16;
  return kHasPairs && halves && p.dtype == ORCHARD_BFLOAT16 ? Product::pairs : Product::fp32;
}

// Probabilities stay bf16 at least: as levels of 8 bits they would lose what many small ones add up
// to beside a large one.
ORCHARD_INLINE Product values_of(const Problem &p) {
  return kHasPairs && p.dtype == ORCHARD_BFLOAT16 ? Product::pairs : Product::fp32;
}

// Elements in one of 32 bits.
template <Product kProduct>
constexpr int kInWord = kProduct == Product::levels  ? 4
                        : kProduct == Product::pairs ? 2
                                                     : 1;

// 32-bit elements that `count` elements take.
template <Product kProduct>
ORCHARD_INLINE int64_t words_in(int64_t count) {
  return (count + kInWord<kProduct> - 1) / kInWord<kProduct>;
}

ORCHARD_INLINE int64_t forward_tile(int64_t dim, int64_t value_dim) {
  const int64_t wide = larger_of(dim, value_dim);
  return wide <= 128 ? kMostTile : kMostTile / 2;
}

// How a call is cut into tasks. Nothing here changes a row's bits but `split_keys`, which depends
// on the rows and keys of one head alone.
struct Forward {
  const Problem &p;
  Scoring how;
  bool by_group;  // short rows of all query heads of a key head form one unit
  int64_t units, unit_rows, block_rows, blocks, splits, split_keys, tile;
  float *partial = nullptr;  // [unit][split][row]: top, total, value_dim sums

  Forward(const Problem &problem, Product scores)
      : p(problem), how(problem, scores == Product::pairs) {
    by_group = p.group > 1 && p.rows < kPanel;
    units = p.batch * (by_group ? p.kv_heads : p.heads);
    unit_rows = by_group ? p.rows * p.group : p.rows;
    tile = forward_tile(p.dim, p.value_dim);
    const bool split = unit_rows <= kSplitRows && p.keys > kSplitKeys;
    split_keys = split ? kSplitKeys : larger_of(p.keys, 1);
    splits = larger_of(1, (p.keys + split_keys - 1) / split_keys);
    // Enough tasks to go round, each large enough to make packing the keys worth it.
    const int64_t wanted = 4 * larger_of(p.threads, 1);
    int64_t panels = kMaxBlockPanels;
    while (panels > 2 && units * ((unit_rows + panels * kPanel - 1) / (panels * kPanel)) < wanted)
      --panels;
    block_rows = panels * kPanel;
    blocks = (unit_rows + block_rows - 1) / block_rows;
  }

  int64_t tasks() const { return units * blocks * splits; }
  bool decode() const { return unit_rows <= kDecodeRows; }
  int64_t partial_row() const { return 2 + p.value_dim; }
  float *partial_at(int64_t unit, int64_t split, int64_t row) const {
    return partial + ((unit * splits + split) * unit_rows + row) * partial_row();
  }
};

// Scratch of one thread.
struct ForwardScratch {
  uint32_t *query;        // [panel][word][kPanel]; decode: [row][dim] fp32
  float *sums;            // [panel][value_dim][kPanel]; decode: [row][value_dim]
  float *top, *total;     // [panel][kPanel]
  float *factor;          // [kPanel]: what sums so far are multiplied by
  uint32_t *key, *value;  // one tile of each
  float *scores;          // [key][kPanel]
  float *mask, *mask_rows;
  float *rows;  // kLanes rows of the widest kind
  Panel *panels;
  QueryTerms *query_terms;  // of each panel; these and the next where the scores are of levels
  KeyTerms *key_terms;
  size_t bytes;

  ForwardScratch(const Forward &f, void *base) {
    const Problem &p = f.p;
    Carver carve{base};
    const int64_t panels_here = (smaller_of(f.block_rows, f.unit_rows) + kPanel - 1) / kPanel;
    const int64_t wide = round_up(p.dim, 16), value_wide = round_up(p.value_dim, 16);
    query = carve.take<uint32_t>(panels_here * wide * kPanel);
    sums = carve.take<float>(panels_here * value_wide * kPanel);
    top = carve.take<float>(panels_here * kPanel);
    total = carve.take<float>(panels_here * kPanel);
    factor = carve.take<float>(kPanel);
    key = carve.take<uint32_t>(f.tile * wide);
    value = carve.take<uint32_t>(f.tile * value_wide);
    scores = carve.take<float>(f.tile * kPanel);
    const int64_t masked = p.mask.data != nullptr ? f.tile : 0;
    mask = carve.take<float>(masked * kPanel);
    mask_rows = carve.take<float>(masked * kLanes);
    rows = carve.take<float>(kLanes * larger_of(wide, value_wide));
    panels = carve.take<Panel>(panels_here);
    const bool levels = is_levels(p.key);
    query_terms = carve.take<QueryTerms>(levels ? panels_here : 0);
    key_terms = carve.take<KeyTerms>(levels ? 1 : 0);
    bytes = carve.used;
  }
};

// Where a unit's row lies: its batch entry, head and row.
struct Place {
  int64_t batch, head, row;

  Place(const Forward &f, int64_t unit, int64_t r) {
    if (f.by_group) {
      batch = unit / f.p.kv_heads;
      head = unit % f.p.kv_heads * f.p.group + r / f.p.rows;
      row = r % f.p.rows;
    } else {
      batch = unit / f.p.heads;
      head = unit % f.p.heads;
      row = r;
    }
  }
};

static void lay_out_panel(const Forward &f, int64_t unit, int64_t r0, int64_t count, Panel &panel) {
  panel.count = count;
  panel.first = INT64_MAX;
  panel.last = 0;
  for (int64_t lane = 0; lane < kPanel; ++lane) {
    const Place at(f, unit, r0 + smaller_of(lane, count - 1));
    panel.row[lane] = (int32_t)at.row;
    panel.head[lane] = (int32_t)at.head;
    panel.plane[lane] = (uint32_t)(at.batch * f.p.heads + at.head);
    panel.first = smaller_of(panel.first, at.row);
    panel.last = larger_of(panel.last, at.row);
  }
}

// The query's rows of one panel as columns, rows past its count as zeros.
template <Product kScores>
static void pack_panel(const Forward &f, int64_t batch, const Panel &panel, uint32_t *rows,
                       uint32_t *to, QueryTerms *terms) {
  const Problem &p = f.p;
  const int64_t words = words_in<kScores>(p.dim), ld = round_up(words, kLanes);
  if (kScores == Product::levels) memset(terms, 0, sizeof(*terms));
  for (int v = 0; v < panel.vectors(); ++v) {
    for (int r = 0; r < kLanes; ++r) {
      const int64_t lane = v * kLanes + r, head = panel.head[lane], row = panel.row[lane];
      uint32_t *here = rows + r * ld;
      if (lane >= panel.count)
        memset(here, 0, (size_t)words * 4);
      else if constexpr (kScores == Product::levels)
        pack_query_levels(p, f.how.sign != 0 ? -1.0f : 1.0f, batch, head, row, lane, here, *terms);
      else if constexpr (kScores == Product::pairs)
        pack_row<true>(row_at(p.query, batch, head, row), p.query.strides[3], p.query.dtype, p.dim,
                       words, here);
      else
        read_values(p.query, p.query_levels, batch, head, row, 1, p.dim, words, (float *)here);
    }
    if (kScores != Product::levels && f.how.sign != 0)
      for (int64_t i = 0; i < kLanes * ld; ++i) rows[i] ^= f.how.sign;
    transpose_rows(rows, ld, words, to + v * kLanes);
  }
}

// Probabilities of keys that follow each other as one element of 32 bits.
template <Product kProduct>
ORCHARD_INLINE Words join_weights(const Floats (&weights)[kInWord<kProduct>]) {
  if constexpr (kProduct == Product::fp32) return bits_as<Words>(weights[0]);
  if constexpr (kProduct == Product::pairs) return pair_bf16(weights[0], weights[1]);
}

// Scores of `count` keys from `key` on into probabilities relative to the rows' new maximum, in
// place, in elements as the product with the values wants them. Updates top and total, and says in
// `factor` what the sums so far have to be multiplied by.
template <Product kProduct, int kVectors>
static void softmax(const Problem &p, const Scoring &how, const Panel &panel, int64_t key,
                    int64_t count, float *scores, const float *mask, float *top, float *total,
                    float *factor) {
  constexpr int kKeys = kInWord<kProduct>;
  if (how.general) {
    for (int64_t j = 0; j < count; ++j) {
      for (int v = 0; v < kVectors; ++v) {
        float *at = scores + j * kPanel + v * kLanes;
        Floats slope;
        store(at, shape(p, how, load(at), mask ? mask + j * kPanel + v * kLanes : nullptr, &slope));
      }
    }
  }
  if (cut_by_band(how, panel, key) || cut_by_band(how, panel, key + count - 1)) {
    for (int64_t j = 0; j < count; ++j) {
      if (!cut_by_band(how, panel, key + j)) continue;
      for (int v = 0; v < kVectors; ++v) {
        float *at = scores + j * kPanel + v * kLanes;
        const Ints seen = in_band(how, load_as<Ints>(panel.row + v * kLanes), key + j);
        store(at, select(seen, load(at), splat(-kInfinity)));
      }
    }
  }

  Floats best[kVectors], shift[kVectors], sum[kVectors];
  for (int v = 0; v < kVectors; ++v) best[v] = splat(-kInfinity);
  for (int64_t j = 0; j < count; ++j)
    for (int v = 0; v < kVectors; ++v)
      best[v] = larger(load(scores + j * kPanel + v * kLanes), best[v]);
  for (int v = 0; v < kVectors; ++v) {
    const Floats before = load(top + v * kLanes);
    const Floats now = larger(best[v], before);
    shift[v] = select(now == splat(-kInfinity), splat(0.0f), now);
    store(top + v * kLanes, now);
    store(factor + v * kLanes, exp2((before - shift[v]) * how.factor));
    sum[v] = splat(0.0f);
  }

  const auto probability = [&](int64_t j, int v) __attribute__((always_inline)) {
    return exp2((load(scores + j * kPanel + v * kLanes) - shift[v]) * how.factor);
  };
  if (p.drop_threshold != 0) {
    for (int64_t group = 0; group < count; group += 8) {
      for (int v = 0; v < kVectors; ++v) {
        Words drawn[4];
        draw((uint32_t)((key + group) / 8), load_as<Words>(panel.row + v * kLanes),
             load_as<Words>(panel.plane + v * kLanes), p.seed, drawn);
        Floats held[8 / kKeys][kKeys] = {}, part = splat(0.0f);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
          if (group + j >= count) break;
          const Floats e = probability(group + j, v);
          part += e;
          held[j / kKeys][j % kKeys] = select(kept(drawn, j, p.drop_threshold), e, splat(0.0f));
        }
        sum[v] += part;
        // Elements shrink towards the front, where this group's scores have been read already.
#pragma GCC unroll 8
        for (int j = 0; j < 8; j += kKeys)
          if (group + j < count)
            store(scores + (group + j) / kKeys * kPanel + v * kLanes,
                  join_weights<kProduct>(held[j / kKeys]));
      }
    }
  } else {
    for (int64_t group = 0; group < count; group += kSumKeys) {
      Floats part[kVectors] = {};
      const int64_t end = smaller_of(group + kSumKeys, count);
      for (int64_t j = group; j < end; j += kKeys) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          Floats joined[kKeys] = {};
#pragma GCC unroll 4
          for (int n = 0; n < kKeys; ++n) {
            if (j + n >= count) break;
            const Floats e = probability(j + n, v);
            part[v] += e;
            joined[n] = e;
          }
          store(scores + j / kKeys * kPanel + v * kLanes, join_weights<kProduct>(joined));
        }
      }
      for (int v = 0; v < kVectors; ++v) sum[v] += part[v];
    }
  }
  for (int v = 0; v < kVectors; ++v)
    store(total + v * kLanes, load(total + v * kLanes) * load(factor + v * kLanes) + sum[v]);
}

// Keys of one tile; those past its end up to a multiple of 8 are zeros.
template <Product kScores>
static void pack_keys(const Forward &f, const ForwardScratch &s, int64_t batch, int64_t kv_head,
                      int64_t key, int64_t count) {
  const Problem &p = f.p;
  if constexpr (kScores == Product::levels) {
    pack_key_levels(p, batch, kv_head, key, count, s.key, *s.key_terms);
  } else {
    const int64_t words = words_in<kScores>(p.dim);
    if constexpr (kScores == Product::fp32)
      read_values(p.key, p.key_levels, batch, kv_head, key, count, p.dim, words, (float *)s.key);
    else
      for (int64_t j = 0; j < count; ++j)
        pack_row<true>(row_at(p.key, batch, kv_head, key + j), p.key.strides[3], p.key.dtype, p.dim,
                       words, s.key + j * words);
    memset(s.key + count * words, 0, (size_t)((round_up(count, 8) - count) * words) * 4);
  }
}

// Values of one tile that are bf16 as they lie, in pairs of rows.
static void pair_halves(const Forward &f, const ForwardScratch &s, int64_t batch, int64_t kv_head,
                        int64_t key, int64_t count, int64_t wide) {
  const Problem &p = f.p;
  const auto value_row = [&](int64_t j) { return row_at(p.value, batch, kv_head, key + j); };
  uint16_t *low = (uint16_t *)s.rows, *high = low + wide;
  const bool plain = p.value.strides[3] == 1 && p.value_dim == wide;
  for (int64_t j = 0; j < count; j += 2) {
    const uint16_t *a = (const uint16_t *)value_row(j), *b = high;
    if (plain) {
      if (j + 1 < count) b = (const uint16_t *)value_row(j + 1);
    } else {
      copy_halves((const char *)a, p.value.strides[3], p.value_dim, wide, low);
      if (j + 1 < count) copy_halves(value_row(j + 1), p.value.strides[3], p.value_dim, wide, high);
      a = low;
    }
    if (j + 1 == count) memset(high, 0, (size_t)wide * 2);
    interleave(a, b, wide, s.value + j / 2 * wide);
  }
}

// Levels of one tile as values, in bf16 pairs of rows of whole vectors.
template <Floats (*kWiden)(const char *), int64_t kBytes>
static void pair_levels(const Forward &f, const ForwardScratch &s, int64_t batch, int64_t kv_head,
                        int64_t key, int64_t count) {
  const Problem &p = f.p;
  Steps steps;
  steps.read(p.value_levels, batch, kv_head, key, count);
  for (int64_t j = 0; j < count; j += 2) {
    const char *low = row_at(p.value, batch, kv_head, key + j);
    const bool paired = j + 1 < count;
    const char *high = paired ? row_at(p.value, batch, kv_head, key + j + 1) : low;
    const float scale = paired ? steps.scale[j + 1] : 0.0f,
                zero = paired ? steps.zero[j + 1] : 0.0f;
    uint32_t *to = s.value + j / 2 * p.value_dim;
    for (int64_t d = 0; d < p.value_dim; d += kLanes, low += kBytes, high += kBytes)
      store(to + d, pair_bf16((kWiden(low) - steps.zero[j]) * steps.scale[j],
                              (kWiden(high) - zero) * scale));
  }
}

// Values of one tile: as fp32 or in bf16 pairs of rows.
template <Product kProduct>
static void pack_values(const Forward &f, const ForwardScratch &s, int64_t batch, int64_t kv_head,
                        int64_t key, int64_t count) {
  const Problem &p = f.p;
  const int64_t wide = round_up(p.value_dim, kTileRows);
  if constexpr (kProduct == Product::fp32) {
    read_values(p.value, p.value_levels, batch, kv_head, key, count, p.value_dim, wide,
                (float *)s.value);
  } else if (p.value.dtype == ORCHARD_BFLOAT16) {
    pair_halves(f, s, batch, kv_head, key, count, wide);
  } else if (is_levels(p.value) && p.value_levels.mean.data == nullptr &&
             p.value_dim % kLanes == 0 && p.value_dim == wide) {
    const auto pair = p.value.dtype == ORCHARD_INT4 ? pair_levels<widen_int4, kLanes / 2>
                                                    : pair_levels<widen_int8, kLanes>;
    pair(f, s, batch, kv_head, key, count);
  } else {
    const int64_t ld = round_up(wide, kLanes), at_once = kLanes;
    for (int64_t first = 0; first < count; first += at_once) {
      const int64_t rows = smaller_of(at_once, count - first);
      read_values(p.value, p.value_levels, batch, kv_head, key + first, rows, p.value_dim, ld,
                  s.rows);
      if (rows % 2 != 0) memset(s.rows + rows * ld, 0, (size_t)ld * 4);
      for (int64_t j = 0; j < rows; j += 2) {
        const float *low = s.rows + j * ld, *high = low + ld;
        // The last vector may reach into the next row, which is written after it.
        for (int64_t d = 0; d < wide; d += kLanes)
          store(s.value + (first + j) / 2 * wide + d, pair_bf16(load(low + d), load(high + d)));
      }
    }
  }
}

static void write_finished(const Forward &f, int64_t unit, int64_t r, float top, float total,
                           float *sums) {
  const Problem &p = f.p;
  const Place at(f, unit, r);
  const float factor = f.how.keep_scale / total;
  for (int64_t d = 0; d < p.value_dim; ++d) sums[d] = total == 0 ? 0.0f : sums[d] * factor;
  write_row(sums, (char *)row_at(p.out, at.batch, at.head, at.row), p.out.strides[3], p.out.dtype,
            p.value_dim);
  if (p.lse.data != nullptr)
    *(float *)row_at(p.lse, at.batch, at.head, at.row) =
        total == 0 ? -kInfinity : top * f.how.scale + __builtin_logf(total);
}

// A row whose keys are done: out and lse, or a partial result where the keys are split.
static void finish_row(const Forward &f, int64_t unit, int64_t split, int64_t r, float top,
                       float total, float *sums) {
  if (f.splits == 1) return write_finished(f, unit, r, top, total, sums);
  float *to = f.partial_at(unit, split, r);
  to[0] = top;
  to[1] = total;
  memcpy(to + 2, sums, (size_t)f.p.value_dim * 4);
}

// The keys of one split that a run of rows sees.
struct Span {
  int64_t begin, end;

  Span(const Forward &f, int64_t split, int64_t first_row, int64_t last_row) {
    begin = larger_of(f.how.first_key(first_row), split * f.split_keys);
    end = smaller_of(f.how.end_key(last_row, f.p.keys), (split + 1) * f.split_keys);
  }
};

template <Product kScores>
static void score_panel(const Forward &f, const ForwardScratch &s, int64_t n, int64_t begin,
                        int64_t count) {
  const Problem &p = f.p;
  const int64_t words = words_in<kScores>(p.dim), rows = round_up(count, kTileRows);
  const uint32_t *query = s.query + n * words * kPanel;
  const int vectors = s.panels[n].vectors();
#if defined(__AVX512VNNI__)
  if constexpr (kScores == Product::levels) {
    const bool zeros = p.query_levels.zeros.data != nullptr || p.key_levels.zeros.data != nullptr;
    const auto score = zeros ? score_levels<true> : score_levels<false>;
    return score(rows, vectors, p.dim, s.key, *s.key_terms, begin, query, s.query_terms[n],
                 s.scores);
  }
#endif
  multiply<kScores == Product::pairs, false, Into::store>(
      rows, vectors, words, s.key + begin * words, words, query, kPanel, s.scores, kPanel, nullptr,
      chain_for(p.keys));
}

// sums = sums * factor + weights . values, for `count` keys of the tile from `begin` on.
template <Product kProduct>
static void add_values(const Forward &f, const ForwardScratch &s, int64_t n, int64_t begin,
                       int64_t count) {
  const int64_t wide = round_up(f.p.value_dim, kTileRows), words = words_in<kProduct>(count);
  const int vectors = s.panels[n].vectors();
  const uint32_t *values = s.value + words_in<kProduct>(begin) * wide;
  const uint32_t *weights = (const uint32_t *)s.scores;
  float *sums = s.sums + n * wide * kPanel;
  multiply<kProduct == Product::pairs, true, Into::scale_add>(wide, vectors, words, values, wide,
                                                              weights, kPanel, sums, kPanel,
                                                              s.factor, chain_for(f.p.value_dim));
}

// The keys and values of one tile, the keys packed, for every panel of a block.
template <Product kScores, Product kValues>
static void attend_tile(const Forward &f, const ForwardScratch &s, const Place &origin,
                        int64_t panels, int64_t split, int64_t key, int64_t count) {
  const Problem &p = f.p;
  pack_values<kValues>(f, s, origin.batch, origin.head / p.group, key, count);
  for (int64_t n = 0; n < panels; ++n) {
    const Panel &panel = s.panels[n];
    const Span seen(f, split, panel.first, panel.last);
    const int64_t begin = larger_of(0, seen.begin - key) / kRun * kRun;
    const int64_t here = smaller_of(count, seen.end - key) - begin;
    if (here <= 0) continue;
    const float *mask = nullptr;
    if (p.mask.data != nullptr) {
      if (!read_mask(p, f.how, panel, origin.batch, key + begin, here, s.mask, s.mask_rows))
        continue;
      mask = s.mask;
    }
    score_panel<kScores>(f, s, n, begin, here);
    const auto apply = panel.vectors() == 2 ? softmax<kValues, 2> : softmax<kValues, 1>;
    apply(p, f.how, panel, key + begin, here, s.scores, mask, s.top + n * kPanel,
          s.total + n * kPanel, s.factor);
    add_values<kValues>(f, s, n, begin, here);
  }
}

template <Product kScores, Product kValues>
static void forward_block(const Forward &f, int64_t unit, int64_t block, int64_t split,
                          const ForwardScratch &s) {
  const Problem &p = f.p;
  const int64_t r0 = block * f.block_rows, rows = smaller_of(f.block_rows, f.unit_rows - r0);
  const int64_t panels = (rows + kPanel - 1) / kPanel;
  const int64_t query_panel = words_in<kScores>(p.dim) * kPanel;
  const int64_t wide = round_up(p.value_dim, kTileRows), sums_panel = wide * kPanel;
  const Place origin(f, unit, r0);
  const int64_t batch = origin.batch, kv_head = origin.head / p.group;

  int64_t first_row = INT64_MAX, last_row = 0;
  for (int64_t n = 0; n < panels; ++n) {
    Panel &panel = s.panels[n];
    lay_out_panel(f, unit, r0 + n * kPanel, smaller_of(kPanel, rows - n * kPanel), panel);
    pack_panel<kScores>(f, batch, panel, (uint32_t *)s.rows, s.query + n * query_panel,
                        s.query_terms + n);
    first_row = smaller_of(first_row, panel.first);
    last_row = larger_of(last_row, panel.last);
  }
  memset(s.sums, 0, (size_t)(panels * sums_panel) * 4);
  memset(s.total, 0, (size_t)(panels * kPanel) * 4);
  for (int64_t i = 0; i < panels * kPanel; ++i) s.top[i] = -kInfinity;

  const Span all(f, split, first_row, last_row);
  for (int64_t key = all.begin / f.tile * f.tile; key < all.end; key += f.tile) {
    const int64_t count = smaller_of(f.tile, smaller_of(p.keys, (split + 1) * f.split_keys) - key);
    pack_keys<kScores>(f, s, batch, kv_head, key, count);
    attend_tile<kScores, kValues>(f, s, origin, panels, split, key, count);
  }

  const int64_t ld = round_up(p.value_dim, kLanes);
  for (int64_t r = 0; r < rows; r += kLanes) {
    const int64_t n = r / kPanel, lane = r % kPanel;
    transpose_columns(s.sums + n * sums_panel + lane, kPanel, p.value_dim, s.rows, ld);
    for (int64_t i = 0; i < smaller_of(kLanes, rows - r); ++i)
      finish_row(f, unit, split, r0 + r + i, s.top[r + i], s.total[r + i], s.rows + i * ld);
  }
}

}  // namespace orchard::ORCHARD_ISA
