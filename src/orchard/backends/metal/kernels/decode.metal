// Attention of a few rows to many keys. A simdgroup takes a run of keys for all rows of all query
// heads that share them, its lanes side by side along the head; a second kernel joins the runs.
#include "common.h"

#define HEAD_LANES ((HEAD_DIM + 31) / 32 > 0 ? (HEAD_DIM + 31) / 32 : 1)
#define VALUE_LANES ((VALUE_DIM + 31) / 32 > 0 ? (VALUE_DIM + 31) / 32 : 1)
#define TOGETHER (HEAD_LANES + VALUE_LANES > 8 ? 1 : 4)  // keys, so that their loads overlap

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attention_runs(
    const device QUERY_TYPE* query [[buffer(0)]], const device KEY_TYPE* key [[buffer(1)]],
    const device VALUE_TYPE* value [[buffer(2)]], device float* sums [[buffer(3)]],
    device float* tops [[buffer(4)]], device float* totals [[buffer(5)]],
    const device MASK_TYPE* mask [[buffer(6)]], const device int* seed [[buffer(7)]],
    constant long* p [[buffer(8)]], constant float* f [[buffer(9)]],
#if QUANTISED
    constant long* g [[buffer(10)]], const device float* query_scales [[buffer(11)]],
    const device char* query_zeros [[buffer(12)]], const device float* key_scales [[buffer(13)]],
    const device char* key_zeros [[buffer(14)]], const device float* value_scales [[buffer(15)]],
    const device char* value_zeros [[buffer(16)]], const device float* key_mean [[buffer(17)]],
#endif
    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int batch = int(group.z), kv_head = int(group.y), length = int(p[ROWS]);
  const int run = int(group.x) * SIMDGROUPS + int(simdgroup);
  if (run >= p[RUNS]) return;
  const int first_head = kv_head * int(p[GROUP]);
  const auto keys = KEY_HEAD(batch, kv_head);
  const auto values = VALUE_HEAD(batch, kv_head);
#if SMOOTHED
  key_mean += plane(g + MEAN_STRIDES, batch, kv_head);
#endif

  float q[DECODE_ROWS][HEAD_LANES], o[DECODE_ROWS][VALUE_LANES];
  float top[DECODE_ROWS], total[DECODE_ROWS];
  float common[DECODE_ROWS];  // this lane's part of what a row's product with every key has
  UNROLL
  for (int r = 0; r < DECODE_ROWS; r++) {
    const auto row = row_at(QUERY_HEAD(batch, first_head + r / length), r % length,
                            p[QUERY_STRIDES + 2]);
    common[r] = 0.0f;
    UNROLL
    for (int e = 0; e < HEAD_LANES; e++) {
      const int d = 32 * e + int(lane);
      q[r][e] = d < HEAD_DIM ? float(value_at(row, d, p[QUERY_STRIDES + 3])) : 0.0f;
#if SMOOTHED
      if (d < HEAD_DIM) common[r] += q[r][e] * key_mean[d * g[MEAN_STRIDES + 2]];
#endif
    }
    UNROLL
    for (int e = 0; e < VALUE_LANES; e++) o[r][e] = 0.0f;
    top[r] = -INFINITY;
    total[r] = 0.0f;
  }

  const int2 range = keys_of(0, length - 1, p);
  const int begin = max(run * int(p[RUN_KEYS]), range.x);
  const int end = min((run + 1) * int(p[RUN_KEYS]), range.y);
  for (int start = begin; start < end; start += TOGETHER) {
    float k[TOGETHER][HEAD_LANES], v[TOGETHER][VALUE_LANES];
    UNROLL
    for (int i = 0; i < TOGETHER; i++) {
      const bool there = start + i < end;
      const int j = min(start + i, end - 1);
      const auto key_row = row_at(keys, j, p[KEY_STRIDES + 2]);
      UNROLL
      for (int e = 0; e < HEAD_LANES; e++) {
        const int d = 32 * e + int(lane);
        const bool inside = there && d < HEAD_DIM;
        k[i][e] = inside ? float(value_at(key_row, d, p[KEY_STRIDES + 3])) : 0.0f;
      }
      const auto value_row = row_at(values, j, p[VALUE_STRIDES + 2]);
      UNROLL
      for (int e = 0; e < VALUE_LANES; e++) {
        const int d = 32 * e + int(lane);
        const bool inside = there && d < VALUE_DIM;
        v[i][e] = inside ? float(value_at(value_row, d, p[VALUE_STRIDES + 3])) : 0.0f;
      }
    }
    UNROLL
    for (int r = 0; r < DECODE_ROWS; r++) {
      const int head = first_head + r / length, row = r % length;
#if MASK
      const device MASK_TYPE* head_mask = mask + plane(p + MASK_STRIDES, batch, head);
#else
      const device MASK_TYPE* head_mask = mask;
#endif
      float score[TOGETHER], next = top[r], slope;
      UNROLL
      for (int i = 0; i < TOGETHER; i++) {
        float product = common[r];
        UNROLL
        for (int e = 0; e < HEAD_LANES; e++) product += q[r][e] * k[i][e];
        score[i] = score_of(simd_sum(product), row, start + i, head_mask, p, f, slope);
        if (start + i >= end || is_hidden(row, start + i, p)) score[i] = -INFINITY;
        next = max(next, score[i]);
      }
      const float base = next == -INFINITY ? 0.0f : next;
      const float shrink = weight(top[r], base);
      top[r] = next;
      total[r] *= shrink;
      UNROLL
      for (int e = 0; e < VALUE_LANES; e++) o[r][e] *= shrink;
      UNROLL
      for (int i = 0; i < TOGETHER; i++) {
        float share = weight(score[i], base);
        total[r] += share;
#if DROPOUT
        const int j = start + i;
        const uint4 drawn = draw(j / 8, row, batch * int(p[HEADS]) + head, seed);
        const uint word = (drawn[j % 8 / 2] >> (16 * (j % 2))) & 0xFFFFu;
        if (word < uint(p[THRESHOLD])) share = 0.0f;
#endif
        UNROLL
        for (int e = 0; e < VALUE_LANES; e++) o[r][e] += share * v[i][e];
      }
    }
  }

  UNROLL
  for (int r = 0; r < DECODE_ROWS; r++) {
    const long row = (batch * p[HEADS] + first_head) * length + r;
    const long place = row * p[RUNS] + run;
    UNROLL
    for (int e = 0; e < VALUE_LANES; e++) {
      const int d = 32 * e + int(lane);
      if (d < VALUE_DIM) sums[place * VALUE_DIM + d] = o[r][e];
    }
    if (lane == 0) {
      tops[place] = top[r];
      totals[place] = total[r];
    }
  }
}

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attention_join(
    const device float* sums [[buffer(0)]], const device float* tops [[buffer(1)]],
    const device float* totals [[buffer(2)]], device T* out [[buffer(3)]],
    device float* lse [[buffer(4)]], constant long* p [[buffer(5)]],
    constant float* f [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int batch = int(group.z), head = int(group.y), runs = int(p[RUNS]);
  const int row = int(group.x) * SIMDGROUPS + int(simdgroup);
  if (row >= p[ROWS]) return;
  const long place = (batch * p[HEADS] + head) * p[ROWS] + row;
  sums += place * runs * VALUE_DIM;
  tops += place * runs;
  totals += place * runs;
  float top = -INFINITY, total = 0.0f;
  for (int i = int(lane); i < runs; i += 32) top = max(top, tops[i]);
  top = simd_max(top);
  const float base = top == -INFINITY ? 0.0f : top;
  for (int i = int(lane); i < runs; i += 32) total += totals[i] * weight(tops[i], base);
  total = simd_sum(total);
  float o[VALUE_LANES];
  UNROLL
  for (int e = 0; e < VALUE_LANES; e++) o[e] = 0.0f;
  for (int i = 0; i < runs; i++) {
    const float share = weight(tops[i], base);
    UNROLL
    for (int e = 0; e < VALUE_LANES; e++) {
      const int d = 32 * e + int(lane);
      if (d < VALUE_DIM) o[e] += share * sums[i * VALUE_DIM + d];
    }
  }
  const bool empty = total == 0.0f;
  out += plane(p + OUT_STRIDES, batch, head) + row * p[OUT_STRIDES + 2];
  UNROLL
  for (int e = 0; e < VALUE_LANES; e++) {
    const int d = 32 * e + int(lane);
    if (d < VALUE_DIM) {
      out[d * p[OUT_STRIDES + 3]] = T(empty ? 0.0f : o[e] * (f[KEEP_SCALE] / total));
    }
  }
#if LSE
  if (lane == 0) lse[place] = lse_of(top, total);
#endif
}
