// Operands in few bits and a call on them, in guarded memory, beside what the header defines.
#pragma once

#include "problem.h"

namespace orchard_test {

// How an operand is stored; a floating type is stored as it is.
struct Storage {
  int32_t dtype = ORCHARD_INT8;
  std::array<int64_t, 3> group{1, 1, 16};
  bool zeros = false, mean = false;
  std::string layout = "bhsd";  // its last axis is the last one, without a mark

  bool levels() const { return dtype == ORCHARD_INT8 || dtype == ORCHARD_INT4; }
};

class StoredTensor {
 public:
  StoredTensor() = default;
  // Takes over a tensor of [B, H, S, dim] that is filled.
  StoredTensor(Tensor source, const Storage &how, Edge edge, Random &random);

  // Runs on poisoned outputs, then compares with the definition, bit by bit. "" or what went wrong.
  std::string quantize(int threads);
  std::string compare_sums(int threads) const;  // the same of the sums over its rows
  orchard_sum_args sum_of_source(const Tensor &into, int threads) const;
  std::vector<double> values() const;  // what the levels stand for, every one an fp32
  void forbid_writing();

  orchard_operand operand{};
  orchard_quantize_args args{};

 private:
  int level(int64_t b, int64_t h, int64_t i, int64_t d) const;
  std::string compare_group(const Sizes &group) const;

  Tensor source_, mean_, data_, scales_, zeros_;
};

// The forward of a case whose operands are stored; bf16_accuracy is asked for where out is bf16.
class QuantizedCall {
 public:
  QuantizedCall(const Case &what, const std::array<Storage, 3> &how, int32_t out_dtype, Edge edge,
                uint64_t seed);
  std::string quantize(int threads);
  std::string compare_sums(int threads) const;  // of the operands that are levels
  // Values are compared where out is fp32; else they must not be larger than those of the operand.
  std::string forward_and_compare(int threads);

  std::array<StoredTensor, 3> operands;  // query, key, value
  Call plain;                            // what there is beside them
  Tensor out;
  orchard_quantized_args args{};
};

}  // namespace orchard_test
