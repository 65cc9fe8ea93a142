// How operands are read: a head has rows, a row has values. Of a tensor of T both are pointers. An
// operand in few bits has a scale, and perhaps a zero point, for each group of its rows.

// Where head `head` of batch entry `batch` begins in a tensor with these strides.
METAL_FUNC long plane(constant long* strides, int batch, int head) {
  return batch * strides[0] + head * strides[1];
}

METAL_FUNC const device T* row_at(const device T* head, int row, long stride) {
  return head + row * stride;
}

METAL_FUNC T value_at(const device T* row, int column, long stride) {
  return row[column * stride];
}

// N neighbours, which begin on a multiple of N.
template <int N>
METAL_FUNC vec<T, N> values_at(const device T* row, int column) {
  return *reinterpret_cast<const device vec<T, N>*>(row + column);
}

#if QUANTISED

// One head as it is stored. PARTS: 0 is values of E, 1 levels with scales, 2 with zero points too.
template <typename E, int PARTS>
struct StoredHead {
  const device E* data;
  const device float* scales;
  const device char* zeros;
  int group_rows;  // that share a scale
  long scale_stride;
  long zero_stride;
};

template <typename E>
struct StoredRow {
  const device E* data;
  float scale;
  float zero;
};

METAL_FUNC long group_of(constant long* strides, constant long* sizes, int batch, int head) {
  return batch / int(sizes[0]) * strides[0] + head / int(sizes[1]) * strides[1];
}

template <int PARTS, typename E>
METAL_FUNC StoredHead<E, PARTS> stored_head(const device E* data, const device float* scales,
                                            const device char* zeros, constant long* strides,
                                            constant long* groups, int batch, int head) {
  StoredHead<E, PARTS> found;
  found.data = data + plane(strides, batch, head);
  found.scales = scales + group_of(groups + SCALE_STRIDES, groups + GROUP_SIZES, batch, head);
  found.zeros = zeros + group_of(groups + ZERO_STRIDES, groups + GROUP_SIZES, batch, head);
  found.group_rows = int(groups[GROUP_SIZES + 2]);
  found.scale_stride = groups[SCALE_STRIDES + 2];
  found.zero_stride = groups[ZERO_STRIDES + 2];
  return found;
}

template <typename E, int PARTS>
METAL_FUNC StoredRow<E> row_at(StoredHead<E, PARTS> head, int row, long stride) {
  StoredRow<E> found;
  found.data = head.data + row * stride;
  found.scale = PARTS > 0 ? head.scales[row / head.group_rows * head.scale_stride] : 1.0f;
  found.zero = PARTS > 1 ? float(head.zeros[row / head.group_rows * head.zero_stride]) : 0.0f;
  return found;
}

template <typename E>
METAL_FUNC T level_at(const device E* row, int column, long stride) {
  return T(row[column * stride]);
}

template <int N, typename E>
METAL_FUNC vec<T, N> levels_at(const device E* row, int column) {
  return vec<T, N>(*reinterpret_cast<const device vec<E, N>*>(row + column));
}

// int4: two levels in a byte, the even one in the low half.
METAL_FUNC T half_of(uchar byte, int column) {
  const int bits = column % 2 == 0 ? byte & 15 : byte >> 4;
  return T((bits ^ 8) - 8);
}

METAL_FUNC T level_at(const device uchar* row, int column, long stride) {
  return half_of(row[column / 2 * stride], column);
}

template <int N>
METAL_FUNC vec<T, N> levels_at(const device uchar* row, int column) {
  vec<T, N> found;
  UNROLL
  for (int i = 0; i < N; i += 2) {
    const uchar byte = row[(column + i) / 2];
    found[i] = half_of(byte, 0);
    found[i + 1] = half_of(byte, 1);
  }
  return found;
}

template <typename E>
METAL_FUNC T value_at(StoredRow<E> row, int column, long stride) {
  return (level_at(row.data, column, stride) - row.zero) * row.scale;
}

template <int N, typename E>
METAL_FUNC vec<T, N> values_at(StoredRow<E> row, int column) {
  return (levels_at<N>(row.data, column) - row.zero) * row.scale;
}

#define QUERY_HEAD(batch, head)                                                                   \
  stored_head<QUERY_PARTS>(query, query_scales, query_zeros, p + QUERY_STRIDES, g + QUERY_GROUPS, \
                           batch, head)
#define KEY_HEAD(batch, head) \
  stored_head<KEY_PARTS>(key, key_scales, key_zeros, p + KEY_STRIDES, g + KEY_GROUPS, batch, head)
#define VALUE_HEAD(batch, head)                                                                   \
  stored_head<VALUE_PARTS>(value, value_scales, value_zeros, p + VALUE_STRIDES, g + VALUE_GROUPS, \
                           batch, head)

#else

#define QUERY_HEAD(batch, head) (query + plane(p + QUERY_STRIDES, batch, head))
#define KEY_HEAD(batch, head) (key + plane(p + KEY_STRIDES, batch, head))
#define VALUE_HEAD(batch, head) (value + plane(p + VALUE_STRIDES, batch, head))

#endif
