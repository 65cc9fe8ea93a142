// A problem described in a few words, and its call with every tensor in guarded memory.
#pragma once

#include <string>
#include <vector>

#include "reference.h"
#include "tensor.h"

namespace orchard_test {

inline constexpr int64_t kNoLow = INT64_MIN, kNoHigh = INT64_MAX;
inline constexpr int32_t kNoMask = -1;

struct Case {
  std::string name;
  int64_t batch = 1, heads = 2, kv_heads = 2, rows = 33, keys = 33, dim = 64, value_dim = 64;
  int64_t low = kNoLow, high = kNoHigh;
  double scale = 0;  // 0: 1 / sqrt(dim)
  double softcap = 0;
  uint32_t drop = 0;
  double deviation = 1;  // of query
  int32_t mask_dtype = kNoMask;
  std::string mask_axes = "bhsd";  // an axis that is not named has size one
  double hidden = 0.3;             // share of -inf in an additive mask
  int64_t empty_every = 0;         // each such row is wholly masked, and its grad_out NaN
  bool grad_lse = false, grad_mask = false, backward = true;
  bool narrow_mask_grad = false;  // of a 16-bit mask's own type, where that is allowed
  bool slow = false;              // left out of quick runs
  std::string query = "bhsd", key = "bhsd", value = "bhsd", mask = "bhsd", grad_out = "bhsd",
              arriving_lse = "bhsd";
  std::string out = "bhsd", lse = "bhsd", grad_query = "bhsd", grad_key = "bhsd",
              grad_value = "bhsd", mask_grad = "bhsd";
};

class Call {
 public:
  Call(const Case &what, int32_t dtype, Edge edge, uint64_t seed = 1);

  // Each runs on poisoned outputs. "" or what went wrong; values are not looked at.
  std::string forward(int threads);
  std::string backward(int threads);

  // The reference, its out and lse then given to backward in place of the kernel's own.
  void expect();
  void expect_as(const Call &other);  // of the same case and seed
  std::string forward_and_compare(int threads);
  std::string backward_and_compare(int threads);

  std::vector<std::vector<uint8_t>> forward_bytes() const { return {out.bytes(), lse.bytes()}; }
  std::vector<std::vector<uint8_t>> backward_bytes() const;

  Tensor query, key, value, mask, out, lse, saved_out, saved_lse, grad_out, grad_lse, grad_query,
      grad_key, grad_value, grad_mask;
  orchard_forward_args forward_args{};
  orchard_backward_args backward_args{};

 private:
  std::string compare_forward() const;
  std::string compare_backward() const;
  void save();

  uint32_t seed_[2];
  ForwardExpected forward_;
  BackwardExpected backward_;
};

// Names between commas.
std::vector<std::string> split(const std::string &list);

// From now on a fault, or an alarm, prints what was running; a guard page is otherwise silent.
void report_faults();
void now_running(const std::string &what);

}  // namespace orchard_test
