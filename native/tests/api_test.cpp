// What the C ABI refuses: with which status, a sentence, and nothing written.
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>

#include "check.h"
#include "quantized.h"

namespace orchard_test {
namespace {

template <class Args>
struct Refusal {
  const char *name;
  int status;
  std::function<void(Args &)> change;
};

template <class Args>
std::vector<Refusal<Args>> refusals_of_both() {
  return {
      {"struct_size 0", ORCHARD_WRONG_ABI, [](Args &a) { a.struct_size = 0; }},
      {"struct_size + 8", ORCHARD_WRONG_ABI, [](Args &a) { a.struct_size += 8; }},
      {"another version", ORCHARD_WRONG_ABI, [](Args &a) { a.abi_version += 1; }},
      {"query.data NULL", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.query.data = nullptr; }},
      {"out.data NULL", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.out.data = nullptr; }},
      {"a negative size", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.key.sizes[2] = -1; }},
      {"the least size", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.query.sizes[0] = INT64_MIN; }},
      {"unknown dtype", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.query.dtype = 5; }},
      {"negative dtype", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.value.dtype = -1; }},
      {"fp64 query", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.query.dtype = ORCHARD_FLOAT64; }},
      {"key of another dtype", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.key.dtype = ORCHARD_BFLOAT16; }},
      {"lse not fp32", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.lse.dtype = ORCHARD_FLOAT16; }},
      {"reserved not 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.value.reserved = 1; }},
      {"3 heads on 2", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.query.sizes[1] = a.out.sizes[1] = a.lse.sizes[1] = 3; }},
      {"heads on none", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.key.sizes[1] = a.value.sizes[1] = 0; }},
      {"another batch", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.value.sizes[0] += 1; }},
      {"D of key", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.key.sizes[3] -= 1; }},
      {"Dv of out", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.out.sizes[3] -= 1; }},
      {"lse with a last size", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.lse.sizes[3] = 2; }},
      {"D 513", ORCHARD_UNSUPPORTED,
       [](Args &a) {
         a.query.sizes[3] = a.key.sizes[3] = 513;
         a.query.strides[3] = a.key.strides[3] = 0;
         if constexpr (requires { a.grad_query; }) {
           a.grad_query.sizes[3] = a.grad_key.sizes[3] = 513;
         }
       }},
      {"mask of another size", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.mask.sizes[3] = 2; }},
      {"mask without data", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.mask.data = nullptr; }},
      {"mask of no dtype", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.mask.dtype = 99; }},
      {"a stride that leaves 64 bits", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.key.strides[2] = INT64_MAX; }},
      {"a stride that leaves 64 bits below", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.key.strides[3] = INT64_MIN; }},
      {"strides that leave 64 bits together", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) {
         for (int axis = 0; axis < 4; ++axis)
           a.query.strides[axis] = (int64_t{1} << 61) / std::max<int64_t>(a.query.sizes[axis], 1);
       }},
      {"threshold 65536", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.drop_threshold = 65536; }},
      {"dropout without a seed", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) {
         a.drop_threshold = 1;
         a.seed = nullptr;
       }},
      {"scale NaN", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.scale = NAN; }},
      {"softcap below 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.softcap = -1; }},
      {"softcap NaN", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.softcap = NAN; }},
      {"threads below 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.threads = -1; }},
      {"data between elements", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.query.data = static_cast<uint8_t *>(a.query.data) + 1; }},
  };
}

std::vector<Refusal<orchard_forward_args>> forward_refusals() {
  using Args = orchard_forward_args;
  auto all = refusals_of_both<Args>();
  all.push_back(
      {"out with stride 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.out.strides[2] = 0; }});
  return all;
}

std::vector<Refusal<orchard_quantized_args>> quantized_refusals() {
  using Args = orchard_quantized_args;
  return {
      {"struct_size 0", ORCHARD_WRONG_ABI, [](Args &a) { a.struct_size = 0; }},
      {"another version", ORCHARD_WRONG_ABI, [](Args &a) { a.abi_version += 1; }},
      {"key.data NULL", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.key.data.data = nullptr; }},
      {"bool key", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.key.data.dtype = ORCHARD_BOOL; }},
      {"key.dim of other rows", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.key.dim += 1; }},
      {"key.dim below 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.key.dim = -1; }},
      {"levels apart", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.key.data.strides[3] = 2; }},
      {"no group", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.value.group[2] = 0; }},
      {"a group below 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.value.group[0] = -1; }},
      {"more groups than scales", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.key.group[2] = 1; }},
      {"fewer groups than scales", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.key.group[2] = INT64_MAX; }},
      {"no scales", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.key.scales = {}; }},
      {"fp16 scales", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.key.scales.dtype = ORCHARD_FLOAT16; }},
      {"zeros of another size", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.key.zeros.sizes[2] += 1; }},
      {"fp32 zeros", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.key.zeros.dtype = ORCHARD_FLOAT32; }},
      {"mean of a row", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.key.mean.sizes[2] = 2; }},
      {"mean of value", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.value.mean = a.key.mean; }},
      {"scales of fp32", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.query.scales = a.key.scales; }},
      {"group of fp32", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.query.group[1] = 1; }},
      {"heads that do not divide", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.query.data.sizes[1] = a.out.sizes[1] = a.lse.sizes[1] = 3; }},
      {"int8 out", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.out.dtype = ORCHARD_INT8; }},
      {"int8 mask", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.mask.dtype = ORCHARD_INT8; }},
      {"out with stride 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.out.strides[2] = 0; }},
      {"accuracy 2", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.bf16_accuracy = 2; }},
      {"reserved not 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.reserved = 1; }},
      {"a stride that leaves 64 bits", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.key.scales.strides[2] = INT64_MAX; }},
      {"threads below 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.threads = -1; }},
  };
}

std::vector<Refusal<orchard_quantize_args>> quantize_refusals() {
  using Args = orchard_quantize_args;
  return {
      {"struct_size 0", ORCHARD_WRONG_ABI, [](Args &a) { a.struct_size = 0; }},
      {"source.data NULL", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.source.data = nullptr; }},
      {"int8 source", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.source.dtype = ORCHARD_INT8; }},
      {"fp32 result", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.result.data.dtype = ORCHARD_FLOAT32; }},
      {"result of other rows", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.result.data.sizes[2] -= 1; }},
      {"result.mean", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.result.mean = a.mean; }},
      {"mean of another head", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.mean.sizes[1] += 1; }},
      {"no group", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.result.group[0] = 0; }},
      {"no scales", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.result.scales = {}; }},
      {"data with stride 0", ORCHARD_INVALID_ARGUMENT,
       [](Args &a) { a.result.data.strides[1] = 0; }},
      {"reserved not 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.reserved = 1; }},
      {"threads below 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.threads = -1; }},
  };
}

std::vector<Refusal<orchard_sum_args>> sum_refusals() {
  using Args = orchard_sum_args;
  return {
      {"struct_size 0", ORCHARD_WRONG_ABI, [](Args &a) { a.struct_size = 0; }},
      {"source.data NULL", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.source.data = nullptr; }},
      {"int8 source", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.source.dtype = ORCHARD_INT8; }},
      {"no sums", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.sums = {}; }},
      {"sums of two rows", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.sums.sizes[2] = 2; }},
      {"bf16 sums", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.sums.dtype = ORCHARD_BFLOAT16; }},
      {"sums with stride 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.sums.strides[1] = 0; }},
      {"reserved not 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.reserved = 1; }},
      {"threads below 0", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.threads = -1; }},
  };
}

std::vector<Refusal<orchard_backward_args>> backward_refusals() {
  using Args = orchard_backward_args;
  auto all = refusals_of_both<Args>();
  all.insert(all.end(),
             {{"no lse", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.lse = {}; }},
              {"no grad_out", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.grad_out = {}; }},
              {"no grad_query", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.grad_query = {}; }},
              {"grad_key of another dtype", ORCHARD_INVALID_ARGUMENT,
               [](Args &a) { a.grad_key.dtype = ORCHARD_FLOAT16; }},
              {"grad_value of another size", ORCHARD_INVALID_ARGUMENT,
               [](Args &a) { a.grad_value.sizes[2] -= 1; }},
              {"grad_lse of another size", ORCHARD_INVALID_ARGUMENT,
               [](Args &a) { a.grad_lse.sizes[2] -= 1; }},
              {"grad_mask not fp32 where an axis is broadcast", ORCHARD_INVALID_ARGUMENT,
               [](Args &a) { a.grad_mask.dtype = ORCHARD_BFLOAT16; }},
              {"grad_mask without a mask", ORCHARD_INVALID_ARGUMENT, [](Args &a) { a.mask = {}; }},
              {"grad_mask of another size", ORCHARD_INVALID_ARGUMENT,
               [](Args &a) { a.grad_mask.sizes[0] = 2; }},
              {"grad_mask of a bool mask", ORCHARD_INVALID_ARGUMENT,
               [](Args &a) { a.mask.dtype = ORCHARD_BOOL; }},
              {"grad_key with stride 0", ORCHARD_INVALID_ARGUMENT,
               [](Args &a) { a.grad_key.strides[3] = 0; }}});
  return all;
}

template <class Args>
std::string refused(const Args *args, int (*function)(const Args *), int status,
                    const std::function<std::vector<std::vector<uint8_t>>()> &outputs) {
  const auto before = outputs();
  const int found = function(args);
  if (found != status)
    return "status " + std::to_string(found) + ", should be " + std::to_string(status);
  if (*orchard_last_error() == '\0') return "no message";
  return outputs() == before ? "" : "something was written";
}

std::string run_message() {
  orchard_attention_forward(nullptr);
  std::string elsewhere;
  std::thread([&] { elsewhere = orchard_last_error(); }).join();
  if (!elsewhere.empty()) return "another thread sees the message";
  Call call({.name = "small"}, ORCHARD_FLOAT32, Edge::kEnd);
  if (*orchard_last_error() == '\0') return "the message is gone before the next call";
  if (const std::string defects = call.forward(1); !defects.empty()) return defects;
  return *orchard_last_error() == '\0' ? "" : "the message stays after a success";
}

std::string run_names() {
  const auto compiled = split(orchard_isa_compiled()), available = split(orchard_isa_available());
  if (available.empty() || compiled.back() != "portable" || available.back() != "portable")
    return "portable is not there";
  if (orchard_select_isa("none such") != ORCHARD_INVALID_ARGUMENT) return "'none such' is taken";
  if (*orchard_last_error() == '\0') return "no message";
  for (const std::string &name : available)
    if (orchard_select_isa(name.c_str()) != ORCHARD_OK || orchard_isa() != name)
      return name + " is not taken";
  if (orchard_select_isa(nullptr) != ORCHARD_OK || orchard_isa() != available.front())
    return "NULL does not choose the best";
  return orchard_abi_version() == ORCHARD_ABI_VERSION ? "" : "orchard_abi_version differs";
}

int run() {
  Report report;
  report.test("names and version", run_names());
  const Case what{.name = "small",
                  .rows = 9,
                  .keys = 11,
                  .dim = 8,
                  .value_dim = 8,
                  .mask_dtype = ORCHARD_FLOAT32,
                  .mask_axes = "sd",
                  .grad_lse = true,
                  .grad_mask = true};
  Call call(what, ORCHARD_FLOAT32, Edge::kEnd);
  call.expect();
  const auto forward_outputs = [&] { return call.forward_bytes(); };
  const auto backward_outputs = [&] { return call.backward_bytes(); };
  report.test("forward refuses NULL",
              refused<orchard_forward_args>(nullptr, orchard_attention_forward,
                                            ORCHARD_INVALID_ARGUMENT, forward_outputs));
  report.test("backward refuses NULL",
              refused<orchard_backward_args>(nullptr, orchard_attention_backward,
                                             ORCHARD_INVALID_ARGUMENT, backward_outputs));
  for (const auto &refusal : forward_refusals()) {
    orchard_forward_args args = call.forward_args;
    refusal.change(args);
    now_running(refusal.name);
    report.test(std::string("forward refuses: ") + refusal.name,
                refused(&args, orchard_attention_forward, refusal.status, forward_outputs));
  }
  for (const auto &refusal : backward_refusals()) {
    orchard_backward_args args = call.backward_args;
    refusal.change(args);
    now_running(refusal.name);
    report.test(std::string("backward refuses: ") + refusal.name,
                refused(&args, orchard_attention_backward, refusal.status, backward_outputs));
  }
  const Storage plain{.dtype = ORCHARD_FLOAT32};
  const Storage levels{.group = {1, 1, 4}, .zeros = true};
  const Storage smoothed{.group = {1, 1, 4}, .zeros = true, .mean = true};
  Case small = what;
  small.backward = small.grad_lse = small.grad_mask = false;
  QuantizedCall stored(small, {plain, smoothed, levels}, ORCHARD_FLOAT32, Edge::kEnd, 1);
  report.test("quantize", stored.quantize(2));
  report.test("quantized forward", stored.forward_and_compare(2));
  const auto stored_outputs = [&] {
    return std::vector{stored.out.bytes(), stored.plain.lse.bytes()};
  };
  for (const auto &refusal : quantized_refusals()) {
    orchard_quantized_args args = stored.args;
    refusal.change(args);
    now_running(refusal.name);
    report.test(std::string("quantized forward refuses: ") + refusal.name,
                refused(&args, orchard_quantized_forward, refusal.status, stored_outputs));
  }
  for (const auto &refusal : quantize_refusals()) {
    orchard_quantize_args args = stored.operands[1].args;
    refusal.change(args);
    now_running(refusal.name);
    report.test(std::string("quantize refuses: ") + refusal.name,
                refused(&args, orchard_quantize, refusal.status, stored_outputs));
  }
  const int64_t *of_sums = stored.operands[1].args.mean.sizes;
  const Tensor sums({of_sums[0], of_sums[1], 1, of_sums[3]}, ORCHARD_FLOAT32, "bhsd", Edge::kEnd);
  const auto sum_bytes = [&] { return std::vector<std::vector<uint8_t>>{sums.bytes()}; };
  report.test("sum_over_rows", stored.compare_sums(2));
  for (const auto &refusal : sum_refusals()) {
    orchard_sum_args args = stored.operands[1].sum_of_source(sums, 2);
    refusal.change(args);
    now_running(refusal.name);
    report.test(std::string("sum_over_rows refuses: ") + refusal.name,
                refused(&args, orchard_sum_over_rows, refusal.status, sum_bytes));
  }
  report.test("the message", run_message());
  call.forward_args.lse = {};
  report.test("forward without lse", call.forward(2));
  return report.finish();
}

}  // namespace
}  // namespace orchard_test

int main() {
  orchard_test::report_faults();
  return orchard_test::run();
}
