#include "quantized.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace orchard_test {
namespace {

Sizes sizes_of(const orchard_tensor &tensor) { return std::to_array(tensor.sizes); }

Sizes groups_of(const Sizes &sizes, const std::array<int64_t, 3> &group) {
  Sizes groups{0, 0, 0, 1};
  for (int axis = 0; axis < 3; ++axis) groups[axis] = (sizes[axis] + group[axis] - 1) / group[axis];
  return groups;
}

float load_float(const orchard_tensor &tensor, int64_t b, int64_t h, int64_t i, int64_t d) {
  return static_cast<float>(load_item(address(tensor, b, h, i, d), tensor.dtype));
}

}  // namespace

StoredTensor::StoredTensor(Tensor source, const Storage &how, Edge edge, Random &random)
    : source_(std::move(source)) {
  const orchard_tensor &whole = source_.view();
  const Sizes sizes = sizes_of(whole);
  operand.dim = sizes[3];
  source_.forbid_writing();
  if (!how.levels()) {
    operand.data = whole;
    return;
  }
  Sizes stored = sizes;
  if (how.dtype == ORCHARD_INT4) stored[3] = (sizes[3] + 1) / 2;
  const Sizes groups = groups_of(sizes, how.group);
  data_ = Tensor(stored, how.dtype, how.layout, edge);
  scales_ = Tensor(groups, ORCHARD_FLOAT32, "bhsd", edge);
  operand.data = data_.view();
  operand.scales = scales_.view();
  if (how.zeros) {
    zeros_ = Tensor(groups, ORCHARD_INT8, "hbsd", edge);
    operand.zeros = zeros_.view();
  }
  if (how.mean) {
    mean_ = Tensor({sizes[0], sizes[1], 1, sizes[3]}, ORCHARD_FLOAT32, "bhsd2", edge);
    mean_.fill(random, 0.5);
    mean_.forbid_writing();
  }
  std::copy(how.group.begin(), how.group.end(), operand.group);
  args.struct_size = sizeof args;
  args.abi_version = ORCHARD_ABI_VERSION;
  args.source = whole;
  args.mean = mean_.view();
  args.result = operand;
  operand.mean = mean_.view();
}

std::string StoredTensor::quantize(int threads) {
  if (args.struct_size == 0) return "";
  for (Tensor *part : {&data_, &scales_, &zeros_})
    if (part->view().data != nullptr) part->poison();
  args.threads = threads;
  if (const int status = orchard_quantize(&args); status != ORCHARD_OK)
    return "quantize gave status " + std::to_string(status) + ": " + orchard_last_error() + "; ";
  for (const Tensor *part : {&data_, &scales_, &zeros_})
    if (part->view().data != nullptr && !part->gaps_untouched())
      return "quantize wrote between the elements of a result; ";
  const Sizes groups = sizes_of(scales_.view());
  for (int64_t b = 0; b < groups[0]; ++b)
    for (int64_t h = 0; h < groups[1]; ++h)
      for (int64_t i = 0; i < groups[2]; ++i)
        if (const std::string defect = compare_group({b, h, i, 0}); !defect.empty()) return defect;
  return "";
}

orchard_sum_args StoredTensor::sum_of_source(const Tensor &into, int threads) const {
  orchard_sum_args args{};
  args.struct_size = sizeof args;
  args.abi_version = ORCHARD_ABI_VERSION;
  args.source = source_.view();
  args.sums = into.view();
  args.threads = threads;
  return args;
}

std::string StoredTensor::compare_sums(int threads) const {
  constexpr int kLevels = 4, kInSum = 16;
  const orchard_tensor &source = source_.view();
  const auto [batch, heads, rows, dim] = sizes_of(source);
  Tensor found({batch, heads, 1, dim}, ORCHARD_FLOAT32, "hb+sd2", Edge::kEnd);
  found.poison();
  const orchard_sum_args args = sum_of_source(found, threads);
  if (const int status = orchard_sum_over_rows(&args); status != ORCHARD_OK)
    return "sum_over_rows gave status " + std::to_string(status) + ": " + orchard_last_error() +
           "; ";
  if (!found.gaps_untouched()) return "sum_over_rows wrote between the elements of its result; ";
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t d = 0; d < dim; ++d) {
        float sums[kLevels] = {};
        for (int64_t i = 0; i < rows; ++i) {
          sums[0] += load_float(source, b, h, i, d);
          int64_t whole = i + 1;
          for (int level = 1; level < kLevels && whole % kInSum == 0; ++level, whole /= kInSum) {
            sums[level] += sums[level - 1];
            sums[level - 1] = 0;
          }
        }
        for (int level = 1; level < kLevels; ++level) sums[0] += sums[level];
        if (load_float(found.view(), b, h, 0, d) != sums[0])
          return "the sum of channel " + std::to_string(d) + " differs; ";
      }
  return "";
}

void StoredTensor::forbid_writing() {
  for (Tensor *part : {&data_, &scales_, &zeros_})
    if (part->view().data != nullptr) part->forbid_writing();
}

int StoredTensor::level(int64_t b, int64_t h, int64_t i, int64_t d) const {
  const orchard_tensor &data = data_.view();
  const bool halves = data.dtype == ORCHARD_INT4;
  const void *item = address(data, b, h, i, halves ? d / 2 : d);
  const int byte = static_cast<int>(load_item(item, ORCHARD_INT8));
  if (!halves) return byte;
  return static_cast<int8_t>(d % 2 != 0 ? byte & 0xf0 : byte << 4) / 16;
}

// Scale, zero and levels of one group as orchard.h has them.
std::string StoredTensor::compare_group(const Sizes &group) const {
  const orchard_tensor &source = source_.view(), &mean = mean_.view();
  const float largest = data_.view().dtype == ORCHARD_INT8 ? 127.0f : 7.0f;
  const bool symmetric = zeros_.view().data == nullptr;
  Sizes begin{}, end{};
  for (int axis = 0; axis < 3; ++axis) {
    begin[axis] = group[axis] * operand.group[axis];
    end[axis] = std::min(begin[axis] + operand.group[axis], source.sizes[axis]);
  }
  const auto each = [&](auto visit) {
    for (int64_t b = begin[0]; b < end[0]; ++b)
      for (int64_t h = begin[1]; h < end[1]; ++h)
        for (int64_t i = begin[2]; i < end[2]; ++i)
          for (int64_t d = 0; d < operand.dim; ++d) {
            float x = load_float(source, b, h, i, d);
            if (mean.data != nullptr) x -= load_float(mean, b, h, 0, d);
            visit(x, b, h, i, d);
          }
  };
  float high = 0, low = 0;
  each([&](float x, auto...) {
    high = std::max(high, x);
    low = std::max(low, -x);
  });
  const float range = symmetric ? std::max(high, low) / largest : (high + low) / (2 * largest + 1);
  const float scale = std::max(range, 0x1p-126f);
  const float zero = symmetric ? 0.0f : std::nearbyint(low / scale) - largest - 1;
  const auto [b, h, i, _] = group;
  if (load_float(scales_.view(), b, h, i, 0) != scale) return "a scale is another; ";
  if (!symmetric && load_float(zeros_.view(), b, h, i, 0) != zero) return "a zero is another; ";
  bool same = true;
  each([&](float x, auto... at) {
    const float nearest = std::nearbyint(x / scale) + zero;
    same = same && std::clamp(nearest, symmetric ? -largest : -largest - 1, largest) ==
                       static_cast<float>(level(at...));
  });
  return same ? "" : "a level is another; ";
}

std::vector<double> StoredTensor::values() const {
  if (args.struct_size == 0) return dense(source_.view());
  std::vector<double> values;
  const auto [batch, heads, rows, _] = sizes_of(data_.view());
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < rows; ++i) {
        const Sizes at{b / operand.group[0], h / operand.group[1], i / operand.group[2], 0};
        const float scale = load_float(scales_.view(), at[0], at[1], at[2], 0);
        const bool zeros = zeros_.view().data != nullptr, mean = mean_.view().data != nullptr;
        const float zero = zeros ? load_float(zeros_.view(), at[0], at[1], at[2], 0) : 0.0f;
        for (int64_t d = 0; d < operand.dim; ++d) {
          volatile float value = (static_cast<float>(level(b, h, i, d)) - zero) * scale;
          values.push_back(mean ? value + load_float(mean_.view(), b, h, 0, d) : value);
        }
      }
  return values;
}

QuantizedCall::QuantizedCall(const Case &what, const std::array<Storage, 3> &how, int32_t out_dtype,
                             Edge edge, uint64_t seed)
    : plain(what, ORCHARD_FLOAT32, edge, seed) {
  Random random(seed + 1);
  Tensor *const sources[3] = {&plain.query, &plain.key, &plain.value};
  orchard_operand *const into[3] = {&args.query, &args.key, &args.value};
  for (int n = 0; n < 3; ++n) {
    const bool stored_as_is = !how[n].levels();
    Tensor source = std::move(*sources[n]);
    if (stored_as_is && how[n].dtype != ORCHARD_FLOAT32) {
      Tensor narrow(sizes_of(source.view()), how[n].dtype, how[n].layout, edge);
      narrow.assign(dense(source.view()));
      source = std::move(narrow);
    }
    operands[n] = StoredTensor(std::move(source), how[n], edge, random);
    *into[n] = operands[n].operand;
  }
  out = Tensor(sizes_of(plain.out.view()), out_dtype, what.out, edge);
  const orchard_forward_args &f = plain.forward_args;
  args.struct_size = sizeof args;
  args.abi_version = ORCHARD_ABI_VERSION;
  args.mask = f.mask;
  args.out = out.view();
  args.lse = f.lse;
  args.band_low = f.band_low;
  args.band_high = f.band_high;
  args.seed = f.seed;
  args.scale = f.scale;
  args.softcap = f.softcap;
  args.bf16_accuracy = out_dtype == ORCHARD_BFLOAT16;
  args.drop_threshold = f.drop_threshold;
}

std::string QuantizedCall::quantize(int threads) {
  std::string defects;
  for (StoredTensor &operand : operands) {
    defects += operand.quantize(threads);
    operand.forbid_writing();
  }
  return defects;
}

std::string QuantizedCall::compare_sums(int threads) const {
  std::string defects;
  for (const StoredTensor &operand : operands)
    if (operand.args.struct_size != 0) defects += operand.compare_sums(threads);
  return defects;
}

std::string QuantizedCall::forward_and_compare(int threads) {
  out.poison();
  plain.lse.poison();
  args.threads = threads;
  if (const int status = orchard_quantized_forward(&args); status != ORCHARD_OK)
    return "quantized_forward gave status " + std::to_string(status) + ": " + orchard_last_error() +
           "; ";
  if (!out.gaps_untouched() || !plain.lse.gaps_untouched())
    return "quantized_forward wrote between the elements of a result; ";

  Tensor exact[3];
  orchard_forward_args reference = plain.forward_args;
  orchard_tensor *const into[3] = {&reference.query, &reference.key, &reference.value};
  for (int n = 0; n < 3; ++n) {
    exact[n] = Tensor(sizes_of(*into[n]), ORCHARD_FLOAT32, "bhsd", Edge::kEnd);
    exact[n].assign(operands[n].values());
    *into[n] = exact[n].view();
  }
  const ForwardExpected expected = expect_forward(reference);
  const std::string defects = compare("lse", plain.lse.view(), expected.lse);
  if (out.view().dtype == ORCHARD_FLOAT32)
    return defects + compare("out", out.view(), expected.out);
  // A weighted mean of the values, by half precision: no larger than the largest of them.
  double largest = 0;
  for (const double x : operands[2].values()) largest = std::max(largest, std::fabs(x));
  largest *= 1.02 * 65536 / (65536 - args.drop_threshold);
  const bool possible = std::ranges::all_of(
      dense(out.view()), [largest](double x) { return std::fabs(x) <= largest; });
  return possible ? defects : defects + "out is larger than any value; ";
}

}  // namespace orchard_test
