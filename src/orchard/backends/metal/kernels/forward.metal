// Attention, 32 rows of one head by a threadgroup: 8 rows by a simdgroup, whose queries and
// outputs stay in registers while blocks of keys and values pass through threadgroup memory.
#include "common.h"

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attention_forward(
    const device QUERY_TYPE* query [[buffer(0)]], const device KEY_TYPE* key [[buffer(1)]],
    const device VALUE_TYPE* value [[buffer(2)]], device T* out [[buffer(3)]],
    device float* lse [[buffer(4)]], const device MASK_TYPE* mask [[buffer(5)]],
    const device int* seed [[buffer(6)]], constant long* p [[buffer(7)]],
    constant float* f [[buffer(8)]],
#if QUANTISED
    constant long* g [[buffer(9)]], const device float* query_scales [[buffer(10)]],
    const device char* query_zeros [[buffer(11)]], const device float* key_scales [[buffer(12)]],
    const device char* key_zeros [[buffer(13)]], const device float* value_scales [[buffer(14)]],
    const device char* value_zeros [[buffer(15)]], const device float* key_mean [[buffer(16)]],
#endif
    uint3 group [[threadgroup_position_in_grid]],
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
  const int batch = int(group.z), head = int(group.y), rows = int(p[ROWS]);
  const int block_row = row_block_of(group.x, p) * RESIDENT;
  const int first_row = block_row + int(simdgroup) * 8;
  const short2 at = place_of(lane);
  const int row = first_row + at.y;
  const int kv_head = head / int(p[GROUP]);
  const auto query_row = row_at(QUERY_HEAD(batch, head), min(row, rows - 1), p[QUERY_STRIDES + 2]);
  const auto keys = KEY_HEAD(batch, kv_head);
  const auto values = VALUE_HEAD(batch, kv_head);
#if MASK
  mask += plane(p + MASK_STRIDES, batch, head);
#endif

  T2 q[HEAD_FRAGMENTS];
  UNROLL
  for (int d = 0; d < HEAD_FRAGMENTS; d++) {
    q[d] = load_pair<HEAD_DIM>(query_row, 8 * d + at.x, p[QUERY_STRIDES + 3], row < rows);
  }
  float common = 0.0f;
#if SMOOTHED
  key_mean += plane(g + MEAN_STRIDES, batch, kv_head);
  UNROLL
  for (int d = 0; d < HEAD_FRAGMENTS; d++) {
    const T2 mean = load_pair<HEAD_DIM>(key_mean, 8 * d + at.x, g[MEAN_STRIDES + 2], true);
    common += q[d].x * mean.x + q[d].y * mean.y;
  }
  common = row_sum(common);
#endif
  float2 o[VALUE_FRAGMENTS];
  UNROLL
  for (int d = 0; d < VALUE_FRAGMENTS; d++) o[d] = float2(0.0f);
  Softmax softmax;
  softmax.top = -INFINITY;
  softmax.total = 0.0f;

  const int2 range = keys_of(block_row, min(block_row + RESIDENT, rows) - 1, p);
  const int2 own = keys_of(first_row, min(first_row + 8, rows) - 1, p);
  const int begin = range.x / BLOCK * BLOCK;
  for (int start = begin; start < range.y; start += BLOCK) {
    if (start > begin) threadgroup_barrier(mem_flags::mem_threadgroup);
    load_keys(key_tile, value_tile, keys, values, start, p, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (first_row >= rows || start >= own.y || start + BLOCK <= own.x) continue;

    const bool edge =
        !all_seen(int2(first_row, first_row + 7), int2(start, start + BLOCK - 1), p);
    float2 s[BLOCK_FRAGMENTS];
    scores_of(s, q, key_tile, common, first_row, start, at, edge, mask, p, f);
    const float shrink = weigh(s, softmax);
#if DROPOUT
    draw_rows(words, lane, start, first_row, batch * int(p[HEADS]) + head, seed);
    UNROLL
    for (int j = 0; j < BLOCK_FRAGMENTS; j++) {
      const uint word = words[(8 * j + at.y) * 4 + at.x / 2];
      if ((word & 0xFFFFu) < uint(p[THRESHOLD])) s[j].x = 0.0f;
      if ((word >> 16) < uint(p[THRESHOLD])) s[j].y = 0.0f;
    }
#endif

    UNROLL
    for (int d = 0; d < VALUE_FRAGMENTS; d++) o[d] *= shrink;
    UNROLL
    for (int j = 0; j < BLOCK_FRAGMENTS; j++) {
      if (edge && none_seen(first_row, start + 8 * j, p)) continue;
      UNROLL
      for (int d = 0; d < VALUE_FRAGMENTS; d++) {
        o[d] = multiply(s[j], along(value_tile + (8 * j + at.y) * VALUE_LD + 8 * d + at.x), o[d]);
      }
    }
  }

  const float total = row_sum(softmax.total);
  if (row >= rows) return;
  const bool empty = total == 0.0f;
  const float share = f[KEEP_SCALE] / total;
  out += plane(p + OUT_STRIDES, batch, head) + row * p[OUT_STRIDES + 2];
  UNROLL
  for (int d = 0; d < VALUE_FRAGMENTS; d++) {
    store_pair<VALUE_DIM>(out, 8 * d + at.x, p[OUT_STRIDES + 3],
                          empty ? float2(0.0f) : o[d] * share);
  }
#if LSE
  if (at.x == 0) lse[(batch * p[HEADS] + head) * p[ROWS] + row] = lse_of(softmax.top, total);
#endif
}
