#include "problem.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>
#include <tuple>

namespace orchard_test {
namespace {

char running[1024];
struct sigaction previous[3];  // a sanitizer's handler prints where it happened
constexpr int kSignals[3] = {SIGSEGV, SIGBUS, SIGALRM};

void fault(int signal, siginfo_t *info, void *context) {
  const char *text = signal == SIGALRM ? "\nHANG while running " : "\nFAULT while running ";
  (void)!write(2, text, strlen(text));
  (void)!write(2, running, strlen(running));
  (void)!write(2, "\n", 1);
  for (int at = 0; at < 3; ++at)
    if (kSignals[at] == signal && (previous[at].sa_flags & SA_SIGINFO) != 0)
      previous[at].sa_sigaction(signal, info, context);
  _exit(1);
}

double random_mask_item(Random &random, double hidden) {
  const bool hide = std::uniform_real_distribution<double>()(random) < hidden;
  const double value = std::normal_distribution<double>()(random);
  return hide ? -std::numeric_limits<double>::infinity() : value;
}

std::string status_text(const char *what, int status) {
  return std::string(what) + " gave status " + std::to_string(status) + ": " +
         orchard_last_error() + "; ";
}

}  // namespace

Call::Call(const Case &what, int32_t dtype, Edge edge, uint64_t seed) {
  Random random(seed);
  seed_[0] = static_cast<uint32_t>(random());
  seed_[1] = static_cast<uint32_t>(random());
  const auto &[b, hq, hkv, sq, sk, d, dv] = std::tie(
      what.batch, what.heads, what.kv_heads, what.rows, what.keys, what.dim, what.value_dim);
  query = Tensor({b, hq, sq, d}, dtype, what.query, edge);
  key = Tensor({b, hkv, sk, d}, dtype, what.key, edge);
  value = Tensor({b, hkv, sk, dv}, dtype, what.value, edge);
  out = Tensor({b, hq, sq, dv}, dtype, what.out, edge);
  lse = Tensor({b, hq, sq, 1}, ORCHARD_FLOAT32, what.lse, edge);
  query.fill(random, what.deviation);
  key.fill(random, 1.0);
  value.fill(random, 1.0);

  if (what.mask_dtype != kNoMask) {
    Sizes sizes{b, hq, sq, sk};
    for (int axis = 0; axis < 4; ++axis)
      if (what.mask_axes.find("bhsd"[axis]) == std::string::npos) sizes[axis] = 1;
    mask = Tensor(sizes, what.mask_dtype, what.mask, edge);
    std::vector<double> items(count(mask.view()));
    for (size_t at = 0; at < items.size(); ++at) {
      const int64_t row = static_cast<int64_t>(at) / sizes[3] % sizes[2];
      const bool empty = what.empty_every != 0 && row % what.empty_every == 0;
      const double item = random_mask_item(random, empty ? 1.0 : what.hidden);
      items[at] = what.mask_dtype == ORCHARD_BOOL ? std::isfinite(item) : item;
    }
    mask.assign(items);
    mask.forbid_writing();
  }

  orchard_forward_args &f = forward_args;
  f.struct_size = sizeof f;
  f.abi_version = ORCHARD_ABI_VERSION;
  f.query = query.view();
  f.key = key.view();
  f.value = value.view();
  f.mask = mask.view();
  f.out = out.view();
  f.lse = lse.view();
  f.band_low = what.low;
  f.band_high = what.high;
  f.seed = what.drop != 0 ? seed_ : nullptr;
  f.scale =
      what.scale != 0 ? what.scale : 1 / std::sqrt(static_cast<double>(std::max<int64_t>(d, 1)));
  f.softcap = what.softcap;
  f.drop_threshold = what.drop;

  if (what.backward) {
    saved_out = Tensor({b, hq, sq, dv}, dtype, what.out, edge);
    saved_lse = Tensor({b, hq, sq, 1}, ORCHARD_FLOAT32, what.lse, edge);
    grad_out = Tensor({b, hq, sq, dv}, dtype, what.grad_out, edge);
    grad_out.fill(random, 1.0);
    if (what.empty_every != 0) {
      for (int64_t i = 0; i < sq; i += what.empty_every)
        for (int64_t e = 0; e < dv; ++e)
          store_item(address(grad_out.view(), 0, 0, i, e), dtype, std::nan(""));
    }
    grad_out.forbid_writing();
    grad_query = Tensor({b, hq, sq, d}, dtype, what.grad_query, edge);
    grad_key = Tensor({b, hkv, sk, d}, dtype, what.grad_key, edge);
    grad_value = Tensor({b, hkv, sk, dv}, dtype, what.grad_value, edge);
    if (what.grad_lse) {
      grad_lse = Tensor({b, hq, sq, 1}, ORCHARD_FLOAT32, what.arriving_lse, edge);
      grad_lse.fill(random, 1.0);
      grad_lse.forbid_writing();
    }
    if (what.grad_mask) {
      const auto sizes = std::to_array(f.mask.sizes);
      const bool whole = sizes == std::array{b, hq, sq, sk};
      const bool halves = what.mask_dtype == ORCHARD_FLOAT16 || what.mask_dtype == ORCHARD_BFLOAT16;
      const bool narrow = what.narrow_mask_grad && whole && halves;
      grad_mask = Tensor(sizes, narrow ? what.mask_dtype : ORCHARD_FLOAT32, what.mask_grad, edge);
    }
    orchard_backward_args &g = backward_args;
    g.struct_size = sizeof g;
    g.abi_version = ORCHARD_ABI_VERSION;
    g.query = f.query;
    g.key = f.key;
    g.value = f.value;
    g.mask = f.mask;
    g.out = saved_out.view();
    g.lse = saved_lse.view();
    g.grad_out = grad_out.view();
    g.grad_lse = grad_lse.view();
    g.grad_query = grad_query.view();
    g.grad_key = grad_key.view();
    g.grad_value = grad_value.view();
    g.grad_mask = grad_mask.view();
    g.band_low = f.band_low;
    g.band_high = f.band_high;
    g.seed = f.seed;
    g.scale = f.scale;
    g.softcap = f.softcap;
    g.drop_threshold = f.drop_threshold;
  }
  for (Tensor *input : {&query, &key, &value}) input->forbid_writing();
}

std::string Call::forward(int threads) {
  out.poison();
  lse.poison();
  forward_args.threads = threads;
  const int status = orchard_attention_forward(&forward_args);
  if (status != ORCHARD_OK) return status_text("forward", status);
  if (!out.gaps_untouched()) return "forward wrote between the elements of out; ";
  if (!lse.gaps_untouched()) return "forward wrote between the elements of lse; ";
  return "";
}

std::string Call::backward(int threads) {
  std::vector<Tensor *> results{&grad_query, &grad_key, &grad_value};
  if (grad_mask.view().data != nullptr) results.push_back(&grad_mask);
  for (Tensor *result : results) result->poison();
  backward_args.threads = threads;
  const int status = orchard_attention_backward(&backward_args);
  if (status != ORCHARD_OK) return status_text("backward", status);
  for (const Tensor *result : results)
    if (!result->gaps_untouched()) return "backward wrote between the elements of a gradient; ";
  return "";
}

void Call::expect() {
  forward_ = expect_forward(forward_args);
  if (backward_args.struct_size != 0) backward_ = expect_backward(backward_args);
  save();
}

void Call::expect_as(const Call &other) {
  forward_ = other.forward_;
  backward_ = other.backward_;
  save();
}

void Call::save() {
  if (backward_args.struct_size == 0) return;
  saved_out.assign(forward_.out.value);
  saved_lse.assign(forward_.lse.value);
  saved_out.forbid_writing();
  saved_lse.forbid_writing();
}

std::string Call::forward_and_compare(int threads) {
  const std::string defects = forward(threads);
  return defects.empty() ? compare_forward() : defects;
}

std::string Call::backward_and_compare(int threads) {
  const std::string defects = backward(threads);
  return defects.empty() ? compare_backward() : defects;
}

std::string Call::compare_forward() const {
  return compare("out", out.view(), forward_.out) + compare("lse", lse.view(), forward_.lse);
}

std::string Call::compare_backward() const {
  std::string defects = compare("grad_query", grad_query.view(), backward_.grad_query) +
                        compare("grad_key", grad_key.view(), backward_.grad_key) +
                        compare("grad_value", grad_value.view(), backward_.grad_value);
  if (grad_mask.view().data != nullptr)
    defects += compare("grad_mask", grad_mask.view(), backward_.grad_mask);
  return defects;
}

std::vector<std::vector<uint8_t>> Call::backward_bytes() const {
  std::vector<std::vector<uint8_t>> all{grad_query.bytes(), grad_key.bytes(), grad_value.bytes()};
  if (grad_mask.view().data != nullptr) all.push_back(grad_mask.bytes());
  return all;
}

std::vector<std::string> split(const std::string &list) {
  std::vector<std::string> names;
  std::istringstream stream(list);
  for (std::string name; std::getline(stream, name, ',');) names.push_back(name);
  return names;
}

void report_faults() {
  struct sigaction action{};
  action.sa_sigaction = fault;
  action.sa_flags = SA_SIGINFO;
  for (int at = 0; at < 3; ++at) sigaction(kSignals[at], &action, &previous[at]);
}

void now_running(const std::string &what) {
  running[what.copy(running, sizeof running - 1)] = '\0';
}

}  // namespace orchard_test
