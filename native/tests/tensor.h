// Tensors in memory that ends, or begins, where access ends.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "orchard.h"

namespace orchard_test {

using Sizes = std::array<int64_t, 4>;
using Random = std::mt19937_64;

size_t item_size(int32_t dtype);
const char *dtype_name(int32_t dtype);
double unit_roundoff(int32_t dtype);  // half a step at 1
double least_step(int32_t dtype);     // between the numbers around 0

double load_item(const void *item, int32_t dtype);
void store_item(void *item, int32_t dtype, double value);  // to nearest, ties to even

// The address of element (b, h, i, j); an axis of size one is broadcast.
void *address(const orchard_tensor &tensor, int64_t b, int64_t h, int64_t i, int64_t j);

// Every element, the last axis innermost.
std::vector<double> dense(const orchard_tensor &tensor);
int64_t count(const orchard_tensor &tensor);

// Bytes between two pages that may not be touched, right against the one named.
enum class Edge { kEnd, kBegin };

class Memory {
 public:
  Memory(size_t bytes, Edge edge);
  ~Memory();
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  uint8_t *data() const { return data_; }
  size_t size() const { return size_; }
  void forbid_writing();

 private:
  uint8_t *map_, *data_;
  size_t map_bytes_, size_;
};

// A tensor in memory of its own, whose gaps and elements begin as NaN.
//
// A layout names the axes b, h, s, d from the outermost to the innermost, each with a mark:
//   +  a gap of three elements after it      2  every second element
//   -  backwards                             0  stride zero
//   ~  stride one whatever lies inside it, so that rows overlap
class Tensor {
 public:
  Tensor() = default;
  Tensor(const Sizes &sizes, int32_t dtype, const std::string &layout, Edge edge);
  const orchard_tensor &view() const { return view_; }
  void poison();
  void fill(Random &random, double deviation);  // normal numbers, 0 or 1 for bool
  void assign(const std::vector<double> &values);
  void forbid_writing() { memory_->forbid_writing(); }
  bool gaps_untouched() const;
  uint8_t *data() const { return memory_->data(); }  // the first byte, gaps counted
  std::vector<uint8_t> bytes() const { return {data(), data() + memory_->size()}; }

 private:
  orchard_tensor view_{};
  std::unique_ptr<Memory> memory_;
};

}  // namespace orchard_test
