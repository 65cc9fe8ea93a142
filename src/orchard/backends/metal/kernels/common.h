// What all kernels share. The launcher puts Metal's headers in front of it, the specialisation
// (TYPE, HEAD_DIM, BLOCK, MASK, ...) and the layout of the argument lists p (integers) and f.

typedef TYPE T;
typedef vec<T, 2> T2;
typedef vec<T, 4> T4;

#define UNROLL _Pragma("clang loop unroll(full)")
#include "operands.h"

#define THREADS (32 * SIMDGROUPS)
#define RESIDENT (8 * SIMDGROUPS)  // rows (or keys) that a threadgroup holds in registers
#define FRAGMENTS(size) ((size) > 0 ? ((size) + 7) / 8 : 1)
#define HEAD_FRAGMENTS FRAGMENTS(HEAD_DIM)
#define VALUE_FRAGMENTS FRAGMENTS(VALUE_DIM)
#define BLOCK_FRAGMENTS (BLOCK / 8)
#define PADDING (16 / int(sizeof(T)))  // spreads the rows of a tile over the memory banks
#define HEAD_LD (8 * HEAD_FRAGMENTS + PADDING)
#define VALUE_LD (8 * VALUE_FRAGMENTS + PADDING)
#define TILE(LD) (BLOCK * (LD) / 4)  // in T4: a tile is written four at a time, and aligned for it

// Scores are kept in units of log 2, so that exp2 needs no factor. Not so where a mask is added:
// the lowest number of fp32 is a usual mask, and times log2(e) it would be infinite.
#define LOG2_E 1.44269504088896f
#define LN_2 0.693147180559945f
#define NATURAL (MASK == 2)

// Relative errors of fast::exp2 grow with its argument, as its results shrink: it serves here.
METAL_FUNC float weight(float score, float base) {
#if NATURAL
  return fast::exp2((score - base) * LOG2_E);
#else
  return fast::exp2(score - base);
#endif
}

// Which elements of an 8x8 fragment a lane holds: (y, x) and (y, x + 1).
METAL_FUNC short2 place_of(uint lane) {
  const short row = short(((lane >> 4) & 1) * 4 + ((lane >> 2) & 1) * 2 + ((lane >> 1) & 1));
  const short column = short(((lane >> 3) & 1) * 4 + (lane & 1) * 2);
  return short2(column, row);
}

// a b + c on 8x8 fragments.
METAL_FUNC float2 multiply(float2 a, float2 b, float2 c) {
  simdgroup_matrix<float, 8, 8> left, right, sum;
  reinterpret_cast<thread float2&>(left.thread_elements()) = a;
  reinterpret_cast<thread float2&>(right.thread_elements()) = b;
  reinterpret_cast<thread float2&>(sum.thread_elements()) = c;
  simdgroup_multiply_accumulate(sum, left, right, sum);
  return reinterpret_cast<thread float2&>(sum.thread_elements());
}

// A fragment of a tile as it lies, and its transpose. `corner` points at the lane's own element.
METAL_FUNC float2 along(const threadgroup T* corner) {
  return float2(*reinterpret_cast<const threadgroup T2*>(corner));
}

template <int LD>
METAL_FUNC float2 across(const threadgroup T* corner) {
  return float2(float(corner[0]), float(corner[LD]));
}

// Reductions over the lanes that share a row of a fragment, and over those that share a column.
METAL_FUNC float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  return max(x, simd_shuffle_xor(x, ushort(8)));
}

METAL_FUNC float row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

METAL_FUNC float column_sum(float x) {
  x += simd_shuffle_xor(x, ushort(2));
  x += simd_shuffle_xor(x, ushort(4));
  return x + simd_shuffle_xor(x, ushort(16));
}

METAL_FUNC threadgroup T* tile_in(threadgroup T4* memory) {
  return reinterpret_cast<threadgroup T*>(memory);
}

// The block of a head's rows from `start` on, of `length` in all; past the last there are zeros.
template <int WIDTH, int LD, typename Head>
METAL_FUNC void load_block(threadgroup T* tile, Head source, constant long* strides, int start,
                           int length, uint thread_index) {
  constexpr int COLUMNS = 8 * FRAGMENTS(WIDTH);
#if PACKED
  constexpr int STEP = 4;
#else
  constexpr int STEP = 1;
#endif
  constexpr int PER_ROW = COLUMNS / STEP;
  UNROLL
  for (int first = 0; first < BLOCK * PER_ROW; first += THREADS) {
    const int i = first + int(thread_index);
    if (BLOCK * PER_ROW % THREADS != 0 && i >= BLOCK * PER_ROW) break;
    const int row = i / PER_ROW, column = i % PER_ROW * STEP;
    const bool inside = start + row < length && column < WIDTH;
#if PACKED
    T4 values = T4(T(0));
    if (inside) values = values_at<4>(row_at(source, start + row, strides[2]), column);
    *reinterpret_cast<threadgroup T4*>(tile + row * LD + column) = values;
#else
    T value = T(0);
    if (inside) value = value_at(row_at(source, start + row, strides[2]), column, strides[3]);
    tile[row * LD + column] = value;
#endif
  }
}

// The block of keys from `start` on, and their values.
template <typename Keys, typename Values>
METAL_FUNC void load_keys(threadgroup T* key_tile, threadgroup T* value_tile, Keys key,
                          Values value, int start, constant long* p, uint thread_index) {
  const int keys = int(p[KEYS]);
  load_block<HEAD_DIM, HEAD_LD>(key_tile, key, p + KEY_STRIDES, start, keys, thread_index);
  load_block<VALUE_DIM, VALUE_LD>(value_tile, value, p + VALUE_STRIDES, start, keys, thread_index);
}

// Two neighbours of a row, zero where there are none.
template <int WIDTH, typename Row>
METAL_FUNC T2 load_pair(Row row, int column, long stride, bool valid) {
  T2 pair = T2(T(0));
#if PACKED
  if (valid && column < WIDTH) pair = values_at<2>(row, column);
#else
  if (valid && column < WIDTH) pair.x = value_at(row, column, stride);
  if (valid && column + 1 < WIDTH) pair.y = value_at(row, column + 1, stride);
#endif
  return pair;
}

template <int WIDTH>
METAL_FUNC void store_pair(device T* row, int column, long stride, float2 pair) {
  if (column < WIDTH) row[column * stride] = T(pair.x);
  if (column + 1 < WIDTH) row[(column + 1) * stride] = T(pair.y);
}

// The block of rows of a threadgroup. Under a band the last come first: they tend to see the most
// keys, and what takes longest should not begin last.
METAL_FUNC int row_block_of(uint index, constant long* p) {
#if BAND
  return (int(p[ROWS]) + RESIDENT - 1) / RESIDENT - 1 - int(index);
#else
  return int(index);
#endif
}

METAL_FUNC int clipped(long x, long end) {
  return int(x < 0 ? 0 : x > end ? end : x);
}

// The keys that rows [first, last] may see, as [x, y).
METAL_FUNC int2 keys_of(int first, int last, constant long* p) {
#if BAND
  return int2(clipped(first + p[LOW], p[KEYS]), clipped(last + p[HIGH] + 1, p[KEYS]));
#else
  return int2(0, int(p[KEYS]));
#endif
}

// The rows that may see keys [first, last], as [x, y).
METAL_FUNC int2 rows_of(int first, int last, constant long* p) {
#if BAND
  return int2(clipped(first - p[HIGH], p[ROWS]), clipped(last - p[LOW] + 1, p[ROWS]));
#else
  return int2(0, int(p[ROWS]));
#endif
}

// Whether all of these rows see all of these keys, masks aside.
METAL_FUNC bool all_seen(int2 rows, int2 keys, constant long* p) {
#if BAND
  if (keys.x - rows.y < p[LOW] || keys.y - rows.x > p[HIGH]) return false;
#endif
  return keys.y < p[KEYS];
}

// Whether none of eight rows sees any of eight keys, which begin here.
METAL_FUNC bool none_seen(int row, int key, constant long* p) {
#if BAND
  if (key - (row + 7) > p[HIGH] || key + 7 - row < p[LOW]) return true;
#endif
  return key >= p[KEYS] || row >= p[ROWS];
}

// The score of a product with its softcap and mask.
METAL_FUNC float score_of(float product, int row, int key, const device MASK_TYPE* mask,
                          constant long* p, constant float* f, thread float& slope) {
  float score = product * f[SCALE];
#if SOFTCAP
  // Beyond 10 the hyperbolic tangent is 1 in fp32; large arguments are kept from the library.
  float ratio = score / f[CAP];
  ratio = ratio > 10.0f ? 10.0f : ratio < -10.0f ? -10.0f : ratio;
  const float bent = precise::tanh(ratio);
  slope = 1.0f - bent * bent;
  score = bent * f[CAP_IN_UNITS];
#endif
#if MASK
  if (row < int(p[ROWS]) && key < int(p[KEYS])) {
    const MASK_TYPE entry = mask[row * p[MASK_STRIDES + 2] + key * p[MASK_STRIDES + 3]];
#if MASK == 1
    score = entry != 0 ? score : -INFINITY;
#else
    score += float(entry);
#endif
  }
#endif
  return score;
}

// Whether a key lies past the last one or outside the band of a row.
METAL_FUNC bool is_hidden(int row, int key, constant long* p) {
#if BAND
  if (key - row < int(p[LOW]) || key - row > int(p[HIGH])) return true;
#endif
  return key >= int(p[KEYS]);
}

// The scores of eight rows in registers, from `first_row` on, and the keys of a tile. `common` is
// the part of a row's products that is the same for every key and that the tile does not have.
METAL_FUNC void scores_of(thread float2* scores, thread const T2* q, const threadgroup T* key_tile,
                          float common, int first_row, int start, short2 at, bool edge,
                          const device MASK_TYPE* mask, constant long* p, constant float* f) {
  UNROLL
  for (int j = 0; j < BLOCK_FRAGMENTS; j++) scores[j] = float2(common);
  UNROLL
  for (int d = 0; d < HEAD_FRAGMENTS; d++) {
    const float2 left = float2(q[d]);
    UNROLL
    for (int j = 0; j < BLOCK_FRAGMENTS; j++) {
      const threadgroup T* corner = key_tile + (8 * j + at.x) * HEAD_LD + 8 * d + at.y;
      scores[j] = multiply(left, across<HEAD_LD>(corner), scores[j]);
    }
  }
  const int row = first_row + at.y;
  float slope;
  UNROLL
  for (int j = 0; j < BLOCK_FRAGMENTS; j++) {
    const int column = start + 8 * j + at.x;
    scores[j].x = score_of(scores[j].x, row, column, mask, p, f, slope);
    scores[j].y = score_of(scores[j].y, row, column + 1, mask, p, f, slope);
  }
  if (!edge) return;
  UNROLL
  for (int j = 0; j < BLOCK_FRAGMENTS; j++) {
    const int column = start + 8 * j + at.x;
    if (is_hidden(row, column, p)) scores[j].x = -INFINITY;
    if (is_hidden(row, column + 1, p)) scores[j].y = -INFINITY;
  }
}

// The highest score of a row so far, and the weights beside it of this lane's keys, added up.
struct Softmax {
  float top;
  float total;
};

// Makes weights of a row's next scores; what came before them shrinks by what is returned.
METAL_FUNC float weigh(thread float2* scores, thread Softmax& row) {
  float next = row.top;
  UNROLL
  for (int j = 0; j < BLOCK_FRAGMENTS; j++) next = max(next, max(scores[j].x, scores[j].y));
  next = row_max(next);
  const float base = next == -INFINITY ? 0.0f : next;
  const float shrink = weight(row.top, base);
  row.top = next;
  row.total *= shrink;
  UNROLL
  for (int j = 0; j < BLOCK_FRAGMENTS; j++) {
    scores[j] = float2(weight(scores[j].x, base), weight(scores[j].y, base));
    row.total += scores[j].x + scores[j].y;
  }
  return shrink;
}

#if DROPOUT
// Philox4x32-10: dropout's bits for eight keys of one row.
METAL_FUNC uint4 philox(uint4 counter, uint2 key) {
  UNROLL
  for (int round = 0; round < 10; round++) {
    const uint high0 = mulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
    const uint high1 = mulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
    counter = uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key += uint2(0x9E3779B9u, 0xBB67AE85u);
  }
  return counter;
}

METAL_FUNC uint4 draw(int key_block, int row, int head, const device int* seed) {
  return philox(uint4(uint(key_block), uint(row), uint(head), 0u),
                uint2(uint(seed[0]), uint(seed[1])));
}

// A lane draws for one row and eight keys; the simdgroup shares them all through its words.
METAL_FUNC void put(threadgroup uint* words, uint lane, uint4 drawn) {
  words[4 * lane] = drawn.x;
  words[4 * lane + 1] = drawn.y;
  words[4 * lane + 2] = drawn.z;
  words[4 * lane + 3] = drawn.w;
}

// For eight rows and a block of keys: word (8 j + y) * 4 + x / 2 is that of a lane's pair.
METAL_FUNC void draw_rows(threadgroup uint* words, uint lane, int start, int first_row, int head,
                          const device int* seed) {
  if (lane < 8 * BLOCK_FRAGMENTS) {
    put(words, lane, draw(start / 8 + int(lane) / 8, first_row + int(lane) % 8, head, seed));
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}
#endif

// The natural logarithm of the sum of a row, from its highest score and the total beside it.
METAL_FUNC float lse_of(float top, float total) {
#if NATURAL
  const float peak = top;
#else
  const float peak = top * LN_2;
#endif
  return total == 0.0f ? -INFINITY : peak + log(total);
}
