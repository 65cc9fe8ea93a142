// Gradients of attention. Nothing is added to memory by two threads, so the same inputs always
// give the same bits: one kernel holds rows and passes over keys, another does the reverse.
#include "common.h"

// What the gradients of a row are made from. The probability of a score is exp2(score - shift) *
// norm; delta is the sum of grad_out * out, less grad_lse.
struct Row {
  float shift;  // infinite in a row with nothing to attend to: every probability is zero
  float norm;
  float delta;
};

// For each row its lse in the units of scores as the shift, and its delta.
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attention_rows(
    const device T* out [[buffer(0)]], const device float* lse [[buffer(1)]],
    const device T* grad_out [[buffer(2)]], const device float* grad_lse [[buffer(3)]],
    device Row* rows [[buffer(4)]], constant long* p [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int batch = int(group.z), head = int(group.y);
  const int row = int(group.x) * SIMDGROUPS + int(simdgroup);
  if (row >= p[ROWS]) return;
  out += plane(p + OUT_STRIDES, batch, head) + row * p[OUT_STRIDES + 2];
  grad_out += plane(p + GRAD_OUT_STRIDES, batch, head) + row * p[GRAD_OUT_STRIDES + 2];
  float delta = 0.0f;
  for (int d = int(lane); d < VALUE_DIM; d += 32) {
    delta += float(out[d * p[OUT_STRIDES + 3]]) * float(grad_out[d * p[GRAD_OUT_STRIDES + 3]]);
  }
  delta = simd_sum(delta);
  if (lane != 0) return;
  const float total = lse[plane(p + LSE_STRIDES, batch, head) + row * p[LSE_STRIDES + 2]];
#if GRAD_LSE
  delta -= grad_lse[plane(p + GRAD_LSE_STRIDES, batch, head) + row * p[GRAD_LSE_STRIDES + 2]];
#endif
  const bool empty = total == -INFINITY;
#if NATURAL
  const float in_units = total;
#else
  const float in_units = total * LOG2_E;
#endif
  const long place = (batch * p[HEADS] + head) * p[ROWS] + row;
  rows[place].shift = empty ? INFINITY : in_units;
  rows[place].norm = 1.0f;
  rows[place].delta = empty ? 0.0f : delta;
}

// Past this size lse has too few digits left to rebuild a probability from: a row whose every mask
// is -1e9 has lse -1e9, whatever the number of its keys. Such a row goes through its keys again.
#define COARSE (NATURAL ? 128.0f : 128.0f * LOG2_E)

METAL_FUNC bool is_coarse(float shift) {
  return abs(shift) > COARSE && shift != INFINITY;
}

// The shift and the norm of coarse rows, from the scores that the gradients will be made from: to
// the last bit, for where scores are large their last bits decide.
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attention_coarse_rows(
    const device T* query [[buffer(0)]], const device T* key [[buffer(1)]],
    const device MASK_TYPE* mask [[buffer(2)]], device Row* rows [[buffer(3)]],
    constant long* p [[buffer(4)]], constant float* f [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup T4 key_memory[TILE(HEAD_LD)];
  threadgroup T* key_tile = tile_in(key_memory);
  const int batch = int(group.z), head = int(group.y), length = int(p[ROWS]);
  const int block_row = row_block_of(group.x, p) * RESIDENT;
  rows += (batch * p[HEADS] + head) * p[ROWS];
  // Every simdgroup looks at every row of the threadgroup, so that all of them leave or stay.
  bool needed = false;
  for (int i = block_row + int(lane); i < min(block_row + RESIDENT, length); i += 32) {
    needed = needed || is_coarse(rows[i].shift);
  }
  if (!simd_any(needed)) return;

  const int first_row = block_row + int(simdgroup) * 8;
  const short2 at = place_of(lane);
  const int row = first_row + at.y;
  const bool coarse = row < length && is_coarse(rows[row].shift);
  const bool idle = !simd_any(coarse);
  query += plane(p + QUERY_STRIDES, batch, head) + row * p[QUERY_STRIDES + 2];
  key += plane(p + KEY_STRIDES, batch, head / int(p[GROUP]));
#if MASK
  mask += plane(p + MASK_STRIDES, batch, head);
#endif
  T2 q[HEAD_FRAGMENTS];
  UNROLL
  for (int d = 0; d < HEAD_FRAGMENTS; d++) {
    q[d] = load_pair<HEAD_DIM>(query, 8 * d + at.x, p[QUERY_STRIDES + 3], row < length);
  }
  Softmax softmax;
  softmax.top = -INFINITY;
  softmax.total = 0.0f;

  const int2 range = keys_of(block_row, min(block_row + RESIDENT, length) - 1, p);
  const int begin = range.x / BLOCK * BLOCK;
  for (int start = begin; start < range.y; start += BLOCK) {
    if (start > begin) threadgroup_barrier(mem_flags::mem_threadgroup);
    load_block<HEAD_DIM, HEAD_LD>(key_tile, key, p + KEY_STRIDES, start, int(p[KEYS]),
                                  thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (idle) continue;
    const bool edge =
        !all_seen(int2(first_row, first_row + 7), int2(start, start + BLOCK - 1), p);
    float2 scores[BLOCK_FRAGMENTS];
    scores_of(scores, q, key_tile, 0.0f, first_row, start, at, edge, mask, p, f);
    weigh(scores, softmax);
  }

  const float total = row_sum(softmax.total);
  if (at.x != 0 || !coarse || !(total > 0.0f)) return;
  rows[row].shift = softmax.top;
  rows[row].norm = 1.0f / total;
}

// No score is above its row's highest one, whatever the last bits of an lse; NaN stays NaN.
METAL_FUNC float probability_of(float score, float shift, float norm) {
  return weight(score > shift ? shift : score, shift) * norm;
}

// A row of a head; one past its end is empty.
METAL_FUNC Row row_of(const device Row* rows, int batch, int head, int row, constant long* p) {
  const bool valid = row < int(p[ROWS]);
  rows += (batch * p[HEADS] + head) * p[ROWS];
  Row found;
  found.shift = valid ? rows[row].shift : INFINITY;
  found.norm = valid ? rows[row].norm : 1.0f;
  found.delta = valid ? rows[row].delta : 0.0f;
  return found;
}

// The gradient of eight rows' scores by eight keys, from the products q k and grad_out v.
// `slope` is the derivative of softcap, which the mask's gradient does without.
METAL_FUNC float2 grad_of_scores(float2 product, float2 by_p, uint word, thread const Row& held,
                                 int row, int column, bool edge, const device MASK_TYPE* mask,
                                 constant long* p, constant float* f, thread float2& slope) {
  float bent_x = 1.0f, bent_y = 1.0f;
  float2 score = float2(score_of(product.x, row, column, mask, p, f, bent_x),
                        score_of(product.y, row, column + 1, mask, p, f, bent_y));
  if (edge) {
    if (is_hidden(row, column, p)) score.x = -INFINITY;
    if (is_hidden(row, column + 1, p)) score.y = -INFINITY;
  }
  slope = float2(bent_x, bent_y);
#if DROPOUT
  by_p.x = (word & 0xFFFFu) < uint(p[THRESHOLD]) ? 0.0f : by_p.x * f[KEEP_SCALE];
  by_p.y = (word >> 16) < uint(p[THRESHOLD]) ? 0.0f : by_p.y * f[KEEP_SCALE];
#endif
  const float2 probability = float2(probability_of(score.x, held.shift, held.norm),
                                    probability_of(score.y, held.shift, held.norm));
  const float2 grad = probability * (by_p - held.delta);
  return held.shift == INFINITY ? float2(0.0f) : grad;  // values that are not finite, too
}

// q k and grad_out v for eight rows in registers and the j-th eight keys of the tiles.
METAL_FUNC void two_products(thread const T2* q, thread const T2* g, const threadgroup T* key_tile,
                             const threadgroup T* value_tile, int j, short2 at,
                             thread float2& product, thread float2& by_p) {
  product = float2(0.0f);
  by_p = float2(0.0f);
  const threadgroup T* corner = key_tile + (8 * j + at.x) * HEAD_LD + at.y;
  UNROLL
  for (int d = 0; d < HEAD_FRAGMENTS; d++) {
    product = multiply(float2(q[d]), across<HEAD_LD>(corner + 8 * d), product);
  }
  corner = value_tile + (8 * j + at.x) * VALUE_LD + at.y;
  UNROLL
  for (int d = 0; d < VALUE_FRAGMENTS; d++) {
    by_p = multiply(float2(g[d]), across<VALUE_LD>(corner + 8 * d), by_p);
  }
}

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attention_grad_query(
    const device T* query [[buffer(0)]], const device T* key [[buffer(1)]],
    const device T* value [[buffer(2)]], const device T* grad_out [[buffer(3)]],
    const device Row* rows [[buffer(4)]], device T* grad_query [[buffer(5)]],
    const device MASK_TYPE* mask [[buffer(6)]], device MASK_TYPE* grad_mask [[buffer(7)]],
    const device int* seed [[buffer(8)]], constant long* p [[buffer(9)]],
    constant float* f [[buffer(10)]], uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup T4 key_memory[TILE(HEAD_LD)];
  threadgroup T4 value_memory[TILE(VALUE_LD)];
  threadgroup T* key_tile = tile_in(key_memory);
  threadgroup T* value_tile = tile_in(value_memory);
#if DROPOUT
  threadgroup uint drawn[SIMDGROUPS * 32 * 4];
  threadgroup uint* words = drawn + simdgroup * 32 * 4;
#endif
  const int batch = int(group.z), head = int(group.y), length = int(p[ROWS]);
  const int block_row = row_block_of(group.x, p) * RESIDENT;
  const short2 at = place_of(lane);
  const int first_row = block_row + int(simdgroup) * 8, row = first_row + at.y;
  const bool valid = row < length;
  const Row held = row_of(rows, batch, head, row, p);
  const int kv_head = head / int(p[GROUP]);
  query += plane(p + QUERY_STRIDES, batch, head) + row * p[QUERY_STRIDES + 2];
  grad_out += plane(p + GRAD_OUT_STRIDES, batch, head) + row * p[GRAD_OUT_STRIDES + 2];
  key += plane(p + KEY_STRIDES, batch, kv_head);
  value += plane(p + VALUE_STRIDES, batch, kv_head);
#if MASK
  mask += plane(p + MASK_STRIDES, batch, head);
#endif
#if GRAD_MASK
  grad_mask += plane(p + GRAD_MASK_STRIDES, batch, head) + row * p[GRAD_MASK_STRIDES + 2];
#endif

  T2 q[HEAD_FRAGMENTS], g[VALUE_FRAGMENTS];
  float2 sum[HEAD_FRAGMENTS];
  UNROLL
  for (int d = 0; d < HEAD_FRAGMENTS; d++) {
    q[d] = load_pair<HEAD_DIM>(query, 8 * d + at.x, p[QUERY_STRIDES + 3], valid);
    sum[d] = float2(0.0f);
  }
  UNROLL
  for (int d = 0; d < VALUE_FRAGMENTS; d++) {
    g[d] = load_pair<VALUE_DIM>(grad_out, 8 * d + at.x, p[GRAD_OUT_STRIDES + 3], valid);
  }

  const int2 range = keys_of(block_row, min(block_row + RESIDENT, length) - 1, p);
  const int2 own = keys_of(first_row, min(first_row + 8, length) - 1, p);
  const int begin = range.x / BLOCK * BLOCK;
  for (int start = begin; start < range.y; start += BLOCK) {
    if (start > begin) threadgroup_barrier(mem_flags::mem_threadgroup);
    load_keys(key_tile, value_tile, key, value, start, p, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (first_row >= length || start >= own.y || start + BLOCK <= own.x) continue;
    const bool edge =
        !all_seen(int2(first_row, first_row + 7), int2(start, start + BLOCK - 1), p);
#if DROPOUT
    draw_rows(words, lane, start, first_row, batch * int(p[HEADS]) + head, seed);
#endif
    UNROLL
    for (int j = 0; j < BLOCK_FRAGMENTS; j++) {
      if (edge && none_seen(first_row, start + 8 * j, p)) continue;
      const int column = start + 8 * j + at.x;
      float2 product, by_p, slope;
      two_products(q, g, key_tile, value_tile, j, at, product, by_p);
      uint word = 0;
#if DROPOUT
      word = words[(8 * j + at.y) * 4 + at.x / 2];
#endif
      const float2 grad =
          grad_of_scores(product, by_p, word, held, row, column, edge, mask, p, f, slope);
#if GRAD_MASK
      if (valid && column < p[KEYS]) {
        grad_mask[column * p[GRAD_MASK_STRIDES + 3]] = MASK_TYPE(grad.x);
      }
      if (valid && column + 1 < p[KEYS]) {
        grad_mask[(column + 1) * p[GRAD_MASK_STRIDES + 3]] = MASK_TYPE(grad.y);
      }
#endif
      const float2 by_product = grad * slope;
      UNROLL
      for (int d = 0; d < HEAD_FRAGMENTS; d++) {
        sum[d] = multiply(by_product,
                          along(key_tile + (8 * j + at.y) * HEAD_LD + 8 * d + at.x), sum[d]);
      }
    }
  }

  if (!valid) return;
  grad_query += plane(p + GRAD_QUERY_STRIDES, batch, head) + row * p[GRAD_QUERY_STRIDES + 2];
  UNROLL
  for (int d = 0; d < HEAD_FRAGMENTS; d++) {
    store_pair<HEAD_DIM>(grad_query, 8 * d + at.x, p[GRAD_QUERY_STRIDES + 3],
                         sum[d] * f[GRAD_SCALE]);
  }
}

// Everything is transposed here: a simdgroup holds eight keys, and rows of every query head that
// shares them pass through threadgroup memory.
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attention_grad_key_value(
    const device T* query [[buffer(0)]], const device T* key [[buffer(1)]],
    const device T* value [[buffer(2)]], const device T* grad_out [[buffer(3)]],
    const device Row* rows [[buffer(4)]], device T* grad_key [[buffer(5)]],
    device T* grad_value [[buffer(6)]], const device MASK_TYPE* mask [[buffer(7)]],
    const device int* seed [[buffer(8)]], constant long* p [[buffer(9)]],
    constant float* f [[buffer(10)]], uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup T4 query_memory[TILE(HEAD_LD)];
  threadgroup T4 grad_memory[TILE(VALUE_LD)];
  threadgroup T* query_tile = tile_in(query_memory);
  threadgroup T* grad_tile = tile_in(grad_memory);
  threadgroup float shift_tile[BLOCK];
  threadgroup float norm_tile[BLOCK];
  threadgroup float delta_tile[BLOCK];
#if DROPOUT
  threadgroup uint drawn[SIMDGROUPS * 32 * 4];
  threadgroup uint* words = drawn + simdgroup * 32 * 4;
#endif
  const int batch = int(group.z), kv_head = int(group.y), length = int(p[KEYS]);
  const int block_key = int(group.x) * RESIDENT, first_key = block_key + int(simdgroup) * 8;
  const short2 at = place_of(lane);
  const int own_key = first_key + at.y;
  const bool valid = own_key < length;
  key += plane(p + KEY_STRIDES, batch, kv_head) + own_key * p[KEY_STRIDES + 2];
  value += plane(p + VALUE_STRIDES, batch, kv_head) + own_key * p[VALUE_STRIDES + 2];

  T2 k[HEAD_FRAGMENTS], v[VALUE_FRAGMENTS];
  float2 sum_k[HEAD_FRAGMENTS], sum_v[VALUE_FRAGMENTS];
  UNROLL
  for (int d = 0; d < HEAD_FRAGMENTS; d++) {
    k[d] = load_pair<HEAD_DIM>(key, 8 * d + at.x, p[KEY_STRIDES + 3], valid);
    sum_k[d] = float2(0.0f);
  }
  UNROLL
  for (int d = 0; d < VALUE_FRAGMENTS; d++) {
    v[d] = load_pair<VALUE_DIM>(value, 8 * d + at.x, p[VALUE_STRIDES + 3], valid);
    sum_v[d] = float2(0.0f);
  }

  const int2 range = rows_of(block_key, min(block_key + RESIDENT, length) - 1, p);
  const int2 own = rows_of(first_key, min(first_key + 8, length) - 1, p);
  const int begin = range.x / BLOCK * BLOCK;
  bool first = true;
  for (int head = kv_head * int(p[GROUP]); head < (kv_head + 1) * int(p[GROUP]); head++) {
    const long heads_before = batch * p[HEADS] + head;
    const device T* queries = query + plane(p + QUERY_STRIDES, batch, head);
    const device T* grads = grad_out + plane(p + GRAD_OUT_STRIDES, batch, head);
#if MASK
    const device MASK_TYPE* head_mask = mask + plane(p + MASK_STRIDES, batch, head);
#else
    const device MASK_TYPE* head_mask = mask;
#endif
    for (int start = begin; start < range.y; start += BLOCK) {
      if (!first) threadgroup_barrier(mem_flags::mem_threadgroup);
      first = false;
      const int left = int(p[ROWS]) - start;
      load_block<HEAD_DIM, HEAD_LD>(query_tile, queries, p + QUERY_STRIDES, start, int(p[ROWS]),
                                    thread_index);
      load_block<VALUE_DIM, VALUE_LD>(grad_tile, grads, p + GRAD_OUT_STRIDES, start, int(p[ROWS]),
                                      thread_index);
      if (int(thread_index) < BLOCK) {
        const Row row = row_of(rows, batch, head, start + int(thread_index), p);
        shift_tile[thread_index] = row.shift;
        norm_tile[thread_index] = row.norm;
        delta_tile[thread_index] = row.delta;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);

      // What arrives at a row that attends to nothing may be anything; it does not pass on.
      const bool empty = int(lane) < min(BLOCK, left) && shift_tile[lane % BLOCK] == INFINITY;
      if (simd_any(empty)) {
        for (int i = int(thread_index); i < BLOCK * VALUE_LD; i += THREADS) {
          if (shift_tile[i / VALUE_LD] == INFINITY) grad_tile[i] = T(0);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (first_key >= length || start >= own.y || start + BLOCK <= own.x) continue;
      const bool edge =
          !all_seen(int2(start, start + BLOCK - 1), int2(first_key, first_key + 7), p);
#if DROPOUT
      if (lane < BLOCK) {
        put(words, lane, draw(first_key / 8, start + int(lane), int(heads_before), seed));
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
#endif
      UNROLL
      for (int j = 0; j < BLOCK_FRAGMENTS; j++) {
        if ((edge || left < BLOCK) && none_seen(start + 8 * j, first_key, p)) continue;
        float2 product = float2(0.0f), by_p = float2(0.0f);
        const threadgroup T* corner = query_tile + (8 * j + at.x) * HEAD_LD + at.y;
        UNROLL
        for (int d = 0; d < HEAD_FRAGMENTS; d++) {
          product = multiply(float2(k[d]), across<HEAD_LD>(corner + 8 * d), product);
        }
        corner = grad_tile + (8 * j + at.x) * VALUE_LD + at.y;
        UNROLL
        for (int d = 0; d < VALUE_FRAGMENTS; d++) {
          by_p = multiply(float2(v[d]), across<VALUE_LD>(corner + 8 * d), by_p);
        }
        const int column = 8 * j + at.x, row = start + column;
        float bent_x = 1.0f, bent_y = 1.0f;
        float2 score = float2(score_of(product.x, row, own_key, head_mask, p, f, bent_x),
                              score_of(product.y, row + 1, own_key, head_mask, p, f, bent_y));
        if (edge) {
          if (is_hidden(row, own_key, p)) score.x = -INFINITY;
          if (is_hidden(row + 1, own_key, p)) score.y = -INFINITY;
        }
        const float2 probability =
            float2(probability_of(score.x, shift_tile[column], norm_tile[column]),
                   probability_of(score.y, shift_tile[column + 1], norm_tile[column + 1]));
        float2 kept = probability;
#if DROPOUT
        const uint shift = 16 * (at.y % 2);
        const uint bits_x = (words[4 * column + at.y / 2] >> shift) & 0xFFFFu;
        const uint bits_y = (words[4 * (column + 1) + at.y / 2] >> shift) & 0xFFFFu;
        const float factor_x = bits_x < uint(p[THRESHOLD]) ? 0.0f : f[KEEP_SCALE];
        const float factor_y = bits_y < uint(p[THRESHOLD]) ? 0.0f : f[KEEP_SCALE];
        kept *= float2(factor_x, factor_y);
        by_p *= float2(factor_x, factor_y);
#endif
        const float2 delta = float2(delta_tile[column], delta_tile[column + 1]);
        const float2 by_product = probability * (by_p - delta) * float2(bent_x, bent_y);
        UNROLL
        for (int d = 0; d < VALUE_FRAGMENTS; d++) {
          sum_v[d] = multiply(
              kept, along(grad_tile + (8 * j + at.y) * VALUE_LD + 8 * d + at.x), sum_v[d]);
        }
        UNROLL
        for (int d = 0; d < HEAD_FRAGMENTS; d++) {
          sum_k[d] = multiply(
              by_product, along(query_tile + (8 * j + at.y) * HEAD_LD + 8 * d + at.x), sum_k[d]);
        }
      }
    }
  }

  if (!valid) return;
  grad_key += plane(p + GRAD_KEY_STRIDES, batch, kv_head) + own_key * p[GRAD_KEY_STRIDES + 2];
  grad_value +=
      plane(p + GRAD_VALUE_STRIDES, batch, kv_head) + own_key * p[GRAD_VALUE_STRIDES + 2];
  UNROLL
  for (int d = 0; d < HEAD_FRAGMENTS; d++) {
    store_pair<HEAD_DIM>(grad_key, 8 * d + at.x, p[GRAD_KEY_STRIDES + 3],
                         sum_k[d] * f[GRAD_SCALE]);
  }
  UNROLL
  for (int d = 0; d < VALUE_FRAGMENTS; d++) {
    store_pair<VALUE_DIM>(grad_value, 8 * d + at.x, p[GRAD_VALUE_STRIDES + 3], sum_v[d]);
  }
}

// The gradient of a mask that is broadcast. A threadgroup owns a tile of sums, and goes through
// every tile of scores that is added to it: the axes along which its own grid has size one.
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attention_grad_mask(
    const device T* query [[buffer(0)]], const device T* key [[buffer(1)]],
    const device T* value [[buffer(2)]], const device T* grad_out [[buffer(3)]],
    const device Row* rows [[buffer(4)]], device float* sums [[buffer(5)]],
    const device MASK_TYPE* mask [[buffer(6)]], const device int* seed [[buffer(7)]],
    constant long* p [[buffer(8)]], constant float* f [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup T4 key_memory[TILE(HEAD_LD)];
  threadgroup T4 value_memory[TILE(VALUE_LD)];
  threadgroup T* key_tile = tile_in(key_memory);
  threadgroup T* value_tile = tile_in(value_memory);
  threadgroup float folded[SIMDGROUPS * BLOCK];
#if DROPOUT
  threadgroup uint drawn[SIMDGROUPS * 32 * 4];
  threadgroup uint* words = drawn + simdgroup * 32 * 4;
#endif
  const int length = int(p[ROWS]), keys = int(p[KEYS]);
  const int row_blocks = (length + RESIDENT - 1) / RESIDENT;
  const int key_blocks = (keys + BLOCK - 1) / BLOCK;
  const bool fold_rows = p[SUMS_ROWS] == 1, fold_keys = p[SUMS_KEYS] == 1;
  const int row_step = fold_rows ? 1 : row_blocks, key_step = fold_keys ? 1 : key_blocks;
  const int own_row_block = int(group.x) / key_step, own_key_block = int(group.x) % key_step;
  const short2 at = place_of(lane);

  float2 sum[BLOCK_FRAGMENTS];
  UNROLL
  for (int j = 0; j < BLOCK_FRAGMENTS; j++) sum[j] = float2(0.0f);
  bool begun = false;
  for (int batch = int(group.z); batch < p[BATCH]; batch += int(p[SUMS_BATCH])) {
    for (int head = int(group.y); head < p[HEADS]; head += int(p[SUMS_HEADS])) {
      const int kv_head = head / int(p[GROUP]);
      const device T* keys_here = key + plane(p + KEY_STRIDES, batch, kv_head);
      const device T* values_here = value + plane(p + VALUE_STRIDES, batch, kv_head);
      const device MASK_TYPE* head_mask = mask + plane(p + MASK_STRIDES, batch, head);
      for (int row_block = own_row_block; row_block < row_blocks; row_block += row_step) {
        const int first_row = row_block * RESIDENT + int(simdgroup) * 8, row = first_row + at.y;
        const bool valid = row < length;
        const Row held = row_of(rows, batch, head, row, p);
        const device T* queries =
            query + plane(p + QUERY_STRIDES, batch, head) + row * p[QUERY_STRIDES + 2];
        const device T* grads = grad_out + plane(p + GRAD_OUT_STRIDES, batch, head) +
                                row * p[GRAD_OUT_STRIDES + 2];
        T2 q[HEAD_FRAGMENTS], g[VALUE_FRAGMENTS];
        UNROLL
        for (int d = 0; d < HEAD_FRAGMENTS; d++) {
          q[d] = load_pair<HEAD_DIM>(queries, 8 * d + at.x, p[QUERY_STRIDES + 3], valid);
        }
        UNROLL
        for (int d = 0; d < VALUE_FRAGMENTS; d++) {
          g[d] = load_pair<VALUE_DIM>(grads, 8 * d + at.x, p[GRAD_OUT_STRIDES + 3], valid);
        }
        const int2 range =
            keys_of(row_block * RESIDENT, min((row_block + 1) * RESIDENT, length) - 1, p);
        for (int block = own_key_block; block < key_blocks; block += key_step) {
          const int start = block * BLOCK;
          if (start >= range.y || start + BLOCK <= range.x) continue;
          if (begun) threadgroup_barrier(mem_flags::mem_threadgroup);
          begun = true;
          load_keys(key_tile, value_tile, keys_here, values_here, start, p, thread_index);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          const bool edge =
              !all_seen(int2(first_row, first_row + 7), int2(start, start + BLOCK - 1), p);
#if DROPOUT
          draw_rows(words, lane, start, first_row, batch * int(p[HEADS]) + head, seed);
#endif
          UNROLL
          for (int j = 0; j < BLOCK_FRAGMENTS; j++) {
            if (edge && none_seen(first_row, start + 8 * j, p)) continue;
            float2 product, by_p, slope;
            two_products(q, g, key_tile, value_tile, j, at, product, by_p);
            uint word = 0;
#if DROPOUT
            word = words[(8 * j + at.y) * 4 + at.x / 2];
#endif
            sum[j] += grad_of_scores(product, by_p, word, held, row, start + 8 * j + at.x, edge,
                                     head_mask, p, f, slope);
          }
        }
      }
    }
  }

  sums += plane(p + SUMS_STRIDES, int(group.z), int(group.y));
  const long row_stride = p[SUMS_STRIDES + 2], key_stride = p[SUMS_STRIDES + 3];
  const int row = own_row_block * RESIDENT + int(simdgroup) * 8 + at.y;
  const int start = own_key_block * BLOCK;
  if (!fold_rows && !fold_keys) {
    UNROLL
    for (int j = 0; j < BLOCK_FRAGMENTS; j++) {
      const int column = start + 8 * j + at.x;
      if (row < length && column < keys) sums[row * row_stride + column * key_stride] = sum[j].x;
      if (row < length && column + 1 < keys) {
        sums[row * row_stride + (column + 1) * key_stride] = sum[j].y;
      }
    }
    return;
  }
  if (fold_keys) {
    float all = 0.0f;
    UNROLL
    for (int j = 0; j < BLOCK_FRAGMENTS; j++) all += sum[j].x + sum[j].y;
    all = row_sum(all);
    if (!fold_rows) {
      if (at.x == 0 && row < length) sums[row * row_stride] = all;
      return;
    }
    sum[0] = float2(all, 0.0f);
  }
  // Columns: first within the simdgroup, then over the four of them.
  UNROLL
  for (int j = 0; j < BLOCK_FRAGMENTS; j++) {
    sum[j] = float2(column_sum(sum[j].x), column_sum(sum[j].y));
    if (at.y == 0) {
      folded[int(simdgroup) * BLOCK + 8 * j + at.x] = sum[j].x;
      folded[int(simdgroup) * BLOCK + 8 * j + at.x + 1] = sum[j].y;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int column = int(thread_index);
  if (column >= (fold_keys ? 1 : min(BLOCK, keys - start))) return;
  float all = 0.0f;
  UNROLL
  for (int i = 0; i < SIMDGROUPS; i++) all += folded[i * BLOCK + column];
  sums[(start + column) * key_stride] = all;
}
