#include "tensor.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace orchard_test {
namespace {

constexpr uint16_t kPoison = 0x7fff;  // NaN in each type, alone or repeated

struct Format {
  const char *name;
  size_t bytes;
  int digits;        // of the significand, the hidden one counted
  int min_exponent;  // of the least normal number
};

const Format &format(int32_t dtype) {
  static constexpr Format kFormats[] = {
      {"fp32", 4, 24, -126}, {"fp16", 2, 11, -14}, {"bf16", 2, 8, -126}, {"fp64", 8, 53, -1022},
      {"bool", 1, 1, 0},     {"int8", 1, 7, 0},    {"int4", 1, 7, 0}};
  return kFormats[dtype];
}

double half_to_double(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31  ? (fraction ? std::numeric_limits<double>::quiet_NaN()
                                                  : std::numeric_limits<double>::infinity())
                      : exponent == 0 ? std::ldexp(fraction, -24)
                                      : std::ldexp(fraction + 1024, exponent - 25);
  return bits & 0x8000 ? -size : size;
}

// Rounds to the digits and range of a type; past its largest number lies infinity.
double rounded(double value, const Format &to) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), to.min_exponent);
  const double step = std::ldexp(1.0, exponent - to.digits + 1);
  const double nearest = std::nearbyint(value / step) * step;
  const bool beyond = std::fabs(nearest) >= std::ldexp(1.0, 2 - to.min_exponent);
  return beyond ? std::copysign(std::numeric_limits<double>::infinity(), value) : nearest;
}

uint16_t double_to_half(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(rounded(value, format(ORCHARD_FLOAT16)));
  if (std::isnan(size)) return 0x7e00;
  if (std::isinf(size)) return sign | 0x7c00;
  if (size < std::ldexp(1.0, -14)) return sign | static_cast<uint16_t>(std::ldexp(size, 24));
  const int exponent = std::ilogb(size);
  return sign | static_cast<uint16_t>((exponent + 14) * 1024 + std::ldexp(size, 10 - exponent));
}

template <class T>
T read(const void *from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void write(void *to, T value) {
  std::memcpy(to, &value, sizeof value);
}

template <class Visit>
void for_each(const Sizes &sizes, Visit visit) {
  for (int64_t b = 0; b < sizes[0]; ++b)
    for (int64_t h = 0; h < sizes[1]; ++h)
      for (int64_t i = 0; i < sizes[2]; ++i)
        for (int64_t j = 0; j < sizes[3]; ++j) visit(b, h, i, j);
}

Sizes sizes_of(const orchard_tensor &tensor) { return std::to_array(tensor.sizes); }

}  // namespace

size_t item_size(int32_t dtype) { return format(dtype).bytes; }
const char *dtype_name(int32_t dtype) { return format(dtype).name; }
double unit_roundoff(int32_t dtype) { return std::ldexp(1.0, -format(dtype).digits); }
double least_step(int32_t dtype) {
  return std::ldexp(1.0, format(dtype).min_exponent - format(dtype).digits + 1);
}

double load_item(const void *item, int32_t dtype) {
  switch (dtype) {
    case ORCHARD_FLOAT32:
      return read<float>(item);
    case ORCHARD_FLOAT16:
      return half_to_double(read<uint16_t>(item));
    case ORCHARD_BFLOAT16:
      return std::bit_cast<float>(uint32_t{read<uint16_t>(item)} << 16);
    case ORCHARD_FLOAT64:
      return read<double>(item);
    case ORCHARD_INT8:
      return read<int8_t>(item);
    default:
      return read<uint8_t>(item) != 0;
  }
}

void store_item(void *item, int32_t dtype, double value) {
  switch (dtype) {
    case ORCHARD_FLOAT32:
      return write(item, static_cast<float>(value));
    case ORCHARD_FLOAT16:
      return write(item, double_to_half(value));
    case ORCHARD_BFLOAT16: {
      const float exact = static_cast<float>(rounded(value, format(dtype)));
      return write(item, static_cast<uint16_t>(std::bit_cast<uint32_t>(exact) >> 16));
    }
    case ORCHARD_FLOAT64:
      return write(item, value);
    default:
      return write(item, static_cast<uint8_t>(value != 0));
  }
}

void *address(const orchard_tensor &tensor, int64_t b, int64_t h, int64_t i, int64_t j) {
  const Sizes index{b, h, i, j};
  int64_t offset = 0;
  for (int axis = 0; axis < 4; ++axis)
    if (tensor.sizes[axis] != 1) offset += index[axis] * tensor.strides[axis];
  return static_cast<uint8_t *>(tensor.data) +
         offset * static_cast<int64_t>(item_size(tensor.dtype));
}

std::vector<double> dense(const orchard_tensor &tensor) {
  std::vector<double> values;
  values.reserve(count(tensor));
  for_each(sizes_of(tensor),
           [&](auto... at) { values.push_back(load_item(address(tensor, at...), tensor.dtype)); });
  return values;
}

int64_t count(const orchard_tensor &tensor) {
  return tensor.sizes[0] * tensor.sizes[1] * tensor.sizes[2] * tensor.sizes[3];
}

Memory::Memory(size_t bytes, Edge edge) : size_(bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t inside = (bytes + page - 1) / page * page;
  map_bytes_ = inside + 2 * page;
  void *map = mmap(nullptr, map_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  map_ = static_cast<uint8_t *>(map);
  if (map == MAP_FAILED ||
      (inside != 0 && mprotect(map_ + page, inside, PROT_READ | PROT_WRITE) != 0)) {
    std::perror("guarded memory");
    std::abort();
  }
  data_ = edge == Edge::kBegin ? map_ + page : map_ + page + inside - bytes;
}

Memory::~Memory() { munmap(map_, map_bytes_); }

void Memory::forbid_writing() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (map_bytes_ > 2 * page) mprotect(map_ + page, map_bytes_ - 2 * page, PROT_READ);
}

Tensor::Tensor(const Sizes &sizes, int32_t dtype, const std::string &layout, Edge edge) {
  std::copy(sizes.begin(), sizes.end(), view_.sizes);
  view_.dtype = dtype;
  int64_t stride = 1;
  char mark = ' ';
  for (auto letter = layout.rbegin(); letter != layout.rend(); ++letter) {
    const size_t axis = std::string("bhsd").find(*letter);
    if (axis == std::string::npos) {
      mark = *letter;
      continue;
    }
    const int64_t span = std::max<int64_t>(sizes[axis], 1);
    view_.strides[axis] = mark == '-'   ? -stride
                          : mark == '2' ? 2 * stride
                          : mark == '0' ? 0
                          : mark == '~' ? 1
                                        : stride;
    stride = mark == '0' ? stride : stride * span * (mark == '2' ? 2 : 1) + (mark == '+' ? 3 : 0);
    mark = ' ';
  }
  int64_t first = 0, last = 0;
  for (int axis = 0; axis < 4; ++axis) {
    const int64_t reach = (sizes[axis] - 1) * view_.strides[axis];
    (reach < 0 ? first : last) += reach;
  }
  const bool none = std::ranges::any_of(sizes, [](int64_t size) { return size == 0; });
  const size_t items = none ? 0 : static_cast<size_t>(last - first + 1);
  memory_ = std::make_unique<Memory>(items * item_size(dtype), edge);
  view_.data = memory_->data() + (none ? 0 : static_cast<size_t>(-first) * item_size(dtype));
  poison();
}

void Tensor::poison() {
  for (size_t at = 0; at < memory_->size(); ++at)
    memory_->data()[at] = static_cast<uint8_t>(at % 2 ? kPoison >> 8 : kPoison & 255);
}

void Tensor::fill(Random &random, double deviation) {
  std::normal_distribution<double> normal(0.0, deviation);
  for_each(sizes_of(view_), [&](auto... at) {
    const double value = normal(random);
    store_item(address(view_, at...), view_.dtype, view_.dtype == ORCHARD_BOOL ? value > 0 : value);
  });
}

void Tensor::assign(const std::vector<double> &values) {
  size_t next = 0;
  for_each(sizes_of(view_),
           [&](auto... at) { store_item(address(view_, at...), view_.dtype, values[next++]); });
}

bool Tensor::gaps_untouched() const {
  std::vector<bool> owned(memory_->size());
  for_each(sizes_of(view_), [&](auto... at) {
    const auto offset = static_cast<uint8_t *>(address(view_, at...)) - data();
    std::fill_n(owned.begin() + offset, item_size(view_.dtype), true);
  });
  for (size_t at = 0; at < owned.size(); ++at)
    if (!owned[at] && data()[at] != (at % 2 ? kPoison >> 8 : kPoison & 255)) return false;
  return true;
}

}  // namespace orchard_test
