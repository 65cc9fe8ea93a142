// Random calls of the C ABI.
//
//   fuzz [--seconds N] [--runs N] [--seed N] [--run N]
//
// Even runs are consistent structs on guarded memory, and the results are compared with the
// reference; every third of them has operands in few bits. Odd runs overwrite fields of such a
// struct. What then leaves the memory owned here is
// only called if the library has to refuse it; a refusal comes with a sentence and writes nothing,
// and what is valid is served and writes its outputs only. --run repeats one run.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <sstream>

#include "check.h"
#include "quantized.h"

namespace orchard_test {
namespace {

constexpr unsigned kSecondsPerRun = 30;
constexpr int64_t kMostWork = 3'000'000;
constexpr size_t kArenaBytes = size_t{1} << 18;

int64_t between(Random &random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

bool one_in(Random &random, int64_t n) { return between(random, 1, n) == 1; }

template <class T>
T any_of(Random &random, const std::vector<T> &items) {
  return items[between(random, 0, static_cast<int64_t>(items.size()) - 1)];
}

std::string any_layout(Random &random, const std::string &marks) {
  std::string axes = "bhsd", layout;
  if (one_in(random, 2)) std::shuffle(axes.begin(), axes.end(), random);
  for (const char axis : axes) {
    layout += axis;
    if (one_in(random, 4))
      layout += marks[between(random, 0, static_cast<int64_t>(marks.size()) - 1)];
  }
  return layout;
}

int64_t any_size(Random &random, int64_t most) {
  return one_in(random, 40) ? 0 : between(random, 1, any_of<int64_t>(random, {1, 4, 20, 80, most}));
}

Case any_case(Random &random, int64_t most_work) {
  Case what{.name = "random"};
  do {
    what.batch = between(random, one_in(random, 40) ? 0 : 1, 3);
    what.kv_heads = between(random, 1, 3);
    what.heads = what.kv_heads * between(random, 1, 4);
    what.rows = any_size(random, 200);
    what.keys = any_size(random, 1500);
    what.dim = any_size(random, ORCHARD_MAX_HEAD_DIM);
    what.value_dim = one_in(random, 2) ? what.dim : any_size(random, ORCHARD_MAX_HEAD_DIM);
  } while (what.batch * what.heads * what.rows * what.keys * (what.dim + what.value_dim + 1) >
           most_work);
  if (one_in(random, 3)) what.high = between(random, -what.rows, what.keys);
  if (one_in(random, 4)) what.low = between(random, -what.rows, what.keys);
  if (what.low > what.high && !one_in(random, 8)) std::swap(what.low, what.high);  // sees nothing
  if (one_in(random, 4)) what.softcap = any_of<double>(random, {0.5, 5, 50});
  if (one_in(random, 3)) what.drop = static_cast<uint32_t>(between(random, 1, 65535));
  if (one_in(random, 3)) what.deviation = any_of<double>(random, {0.01, 5, 40});
  if (one_in(random, 5)) what.scale = any_of<double>(random, {-1, 0.001, 1});
  if (one_in(random, 2)) {
    what.mask_dtype = static_cast<int32_t>(between(random, ORCHARD_FLOAT32, ORCHARD_BOOL));
    what.hidden = any_of<double>(random, {0, 0.3, 0.95});
    for (const char axis : {'b', 'h', 's', 'd'})
      if (one_in(random, 3)) what.mask_axes.erase(what.mask_axes.find(axis), 1);
    what.grad_mask = what.mask_dtype != ORCHARD_BOOL && one_in(random, 2);
    what.narrow_mask_grad = one_in(random, 2);
  }
  what.grad_lse = one_in(random, 3);
  for (std::string Case::*input :
       {&Case::query, &Case::key, &Case::value, &Case::mask, &Case::grad_out, &Case::arriving_lse})
    what.*input = any_layout(random, "+-20~");
  for (std::string Case::*output : {&Case::out, &Case::lse, &Case::grad_query, &Case::grad_key,
                                    &Case::grad_value, &Case::mask_grad})
    what.*output = any_layout(random, "+-2");
  return what;
}

int32_t any_dtype(Random &random) {
  return static_cast<int32_t>(between(random, ORCHARD_FLOAT32, ORCHARD_BFLOAT16));
}

std::string describe(const Case &what, int32_t dtype) {
  std::ostringstream text;
  text << dtype_name(dtype) << " B" << what.batch << " H" << what.heads << "/" << what.kv_heads
       << " S" << what.rows << "x" << what.keys << " D" << what.dim << "/" << what.value_dim;
  if (what.low != kNoLow) text << " low " << what.low;
  if (what.high != kNoHigh) text << " high " << what.high;
  if (what.softcap != 0) text << " softcap " << what.softcap;
  if (what.drop != 0) text << " drop " << what.drop;
  if (what.scale != 0) text << " scale " << what.scale;
  if (what.mask_dtype != kNoMask)
    text << " mask " << dtype_name(what.mask_dtype) << "[" << what.mask_axes << "] " << what.mask
         << " hiding " << what.hidden << (what.grad_mask ? " with gradient " : "")
         << (what.grad_mask ? what.mask_grad : "") << (what.narrow_mask_grad ? " narrow" : "");
  text << " query " << what.query << " key " << what.key << " value " << what.value << " grad_out "
       << what.grad_out << " out " << what.out;
  return text.str();
}

std::string run_consistent(const std::string &name, Random &random) {
  const Case what = any_case(random, kMostWork);
  const Edge edge = one_in(random, 2) ? Edge::kEnd : Edge::kBegin;
  const int32_t dtype = any_dtype(random);
  now_running(name + ": " + describe(what, dtype));
  Call call(what, dtype, edge, random());
  call.expect();
  const int threads = static_cast<int>(between(random, 0, 4));
  const std::string defects =
      call.forward_and_compare(threads) + call.backward_and_compare(threads);
  return defects.empty() ? "" : defects + describe(what, dtype);
}

Storage any_storage(Random &random, bool is_key, int64_t dim) {
  Storage how;
  how.layout = any_of<std::string>(random, {"bhsd", "sbhd", "b+hs-d", "h-s+bd"});
  how.dtype = any_of<int32_t>(random, {ORCHARD_INT8, ORCHARD_INT8, ORCHARD_INT4, ORCHARD_FLOAT32,
                                       ORCHARD_FLOAT16, ORCHARD_BFLOAT16});
  for (int64_t &group : how.group) group = any_of<int64_t>(random, {1, 1, 2, 16, 1000});
  how.zeros = one_in(random, 4);
  how.mean = is_key && how.levels() && dim >= 16 && one_in(random, 2);
  return how;
}

QuantizedCall any_quantized(const Case &what, Edge edge, Random &random) {
  const std::array how{any_storage(random, false, what.dim), any_storage(random, true, what.dim),
                       any_storage(random, false, what.value_dim)};
  const int32_t out = one_in(random, 3) ? any_dtype(random) : ORCHARD_FLOAT32;
  return QuantizedCall(what, how, out, edge, random());
}

std::string run_quantized(const std::string &name, Random &random) {
  Case what = any_case(random, kMostWork);
  what.backward = what.grad_lse = what.grad_mask = false;
  now_running(name + ": quantised " + describe(what, ORCHARD_FLOAT32));
  QuantizedCall call = any_quantized(what, one_in(random, 2) ? Edge::kEnd : Edge::kBegin, random);
  const int threads = static_cast<int>(between(random, 0, 4));
  std::string defects = call.quantize(threads) + call.compare_sums(threads);
  if (defects.empty()) defects = call.forward_and_compare(threads);
  return defects.empty() ? "" : defects + "quantised " + describe(what, ORCHARD_FLOAT32);
}

std::vector<orchard_tensor *> inputs(orchard_quantized_args &args) {
  std::vector<orchard_tensor *> all{&args.mask};
  for (orchard_operand *operand : {&args.query, &args.key, &args.value})
    all.insert(all.end(), {&operand->data, &operand->scales, &operand->zeros, &operand->mean});
  return all;
}

std::vector<orchard_tensor *> inputs(orchard_quantize_args &args) {
  return {&args.source, &args.mean};
}

std::vector<orchard_tensor *> outputs(orchard_quantize_args &args) {
  return {&args.result.data, &args.result.scales, &args.result.zeros};
}

template <class Args>
std::vector<orchard_tensor *> inputs(Args &args) {
  std::vector<orchard_tensor *> all{&args.query, &args.key, &args.value, &args.mask};
  if constexpr (requires { args.grad_out; })
    all.insert(all.end(), {&args.out, &args.lse, &args.grad_out, &args.grad_lse});
  return all;
}

template <class Args>
std::vector<orchard_tensor *> outputs(Args &args) {
  if constexpr (requires { args.grad_out; })
    return {&args.grad_query, &args.grad_key, &args.grad_value, &args.grad_mask};
  else
    return {&args.out, &args.lse};
}

bool known_dtype(const orchard_tensor &tensor) {
  return tensor.dtype >= ORCHARD_FLOAT32 && tensor.dtype <= ORCHARD_INT4;
}

bool absent(const orchard_tensor &tensor) {
  return tensor.data == nullptr &&
         std::ranges::all_of(tensor.sizes, [](int64_t size) { return size == 0; });
}

// Bytes from data to the lowest one, and to the end of the highest element. In floating point no
// product overflows, and what fits into memory is exact.
struct Extent {
  long double low = 0, high = 0;
  bool any = true;
};

Extent extent(const orchard_tensor &tensor) {
  const auto item = static_cast<long double>(item_size(tensor.dtype));
  Extent reach;
  for (int axis = 0; axis < 4; ++axis) {
    if (tensor.sizes[axis] == 0) return {0, 0, false};
    const long double items = (static_cast<long double>(tensor.sizes[axis]) - 1) *
                              static_cast<long double>(tensor.strides[axis]);
    (items < 0 ? reach.low : reach.high) += items * item;
  }
  reach.high += item;
  return reach;
}

bool inside(const orchard_tensor &tensor, const Memory &memory) {
  if (absent(tensor)) return true;
  if (!known_dtype(tensor)) return false;
  const Extent reach = extent(tensor);
  if (!reach.any) return true;
  if (tensor.data == nullptr) return false;
  const auto offset =
      static_cast<long double>(static_cast<const uint8_t *>(tensor.data) - memory.data());
  return offset + reach.low >= 0 && offset + reach.high <= static_cast<long double>(memory.size());
}

enum class Verdict { kValid, kMayRefuse, kMustRefuse };

bool same_sizes(const orchard_tensor &tensor, const Sizes &sizes) {
  return std::equal(sizes.begin(), sizes.end(), tensor.sizes);
}

bool malformed(const orchard_tensor &tensor) {
  if (!known_dtype(tensor) || tensor.reserved != 0) return true;
  if (std::ranges::any_of(tensor.sizes, [](int64_t size) { return size < 0; })) return true;
  const Extent reach = extent(tensor);
  if (!reach.any) return false;
  constexpr long double kFar = 0x1p63L;
  return tensor.data == nullptr || reach.low < -kFar || reach.high > kFar + 8;
}

// What the header says of a struct, read on its own.
template <class Args>
Verdict verdict(Args &args) {
  constexpr Verdict kMust = Verdict::kMustRefuse;
  if (args.struct_size != sizeof args || args.abi_version != ORCHARD_ABI_VERSION) return kMust;
  const orchard_tensor &q = args.query, &k = args.key, &v = args.value;
  const Sizes out{q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]};
  const Sizes rows{q.sizes[0], q.sizes[1], q.sizes[2], 1};
  const orchard_tensor &o = args.out;
  for (const orchard_tensor *tensor : {&q, &k, &v, &o})
    if (malformed(*tensor) || tensor->dtype != q.dtype) return kMust;
  if (q.dtype > ORCHARD_BFLOAT16) return kMust;
  if (!same_sizes(k, {q.sizes[0], k.sizes[1], k.sizes[2], q.sizes[3]}) ||
      !same_sizes(v, {q.sizes[0], k.sizes[1], k.sizes[2], v.sizes[3]}) || !same_sizes(o, out))
    return kMust;
  if (k.sizes[1] == 0 ? q.sizes[1] != 0 : q.sizes[1] % k.sizes[1] != 0) return kMust;
  if (std::max(q.sizes[3], v.sizes[3]) > ORCHARD_MAX_HEAD_DIM) return kMust;
  if (!absent(args.mask)) {
    if (malformed(args.mask) || args.mask.dtype > ORCHARD_BOOL) return kMust;
    const Sizes full{q.sizes[0], q.sizes[1], q.sizes[2], k.sizes[2]};
    for (int axis = 0; axis < 4; ++axis)
      if (args.mask.sizes[axis] != 1 && args.mask.sizes[axis] != full[axis]) return kMust;
  }
  const auto wrong_fp32 = [](const orchard_tensor &tensor, const Sizes &sizes) {
    return !absent(tensor) &&
           (malformed(tensor) || tensor.dtype != ORCHARD_FLOAT32 || !same_sizes(tensor, sizes));
  };
  if (wrong_fp32(args.lse, rows)) return kMust;
  if (args.drop_threshold > 65535 || (args.drop_threshold != 0 && args.seed == nullptr))
    return kMust;
  if constexpr (requires { args.grad_out; }) {
    if (absent(args.lse) && q.sizes[0] * q.sizes[1] * q.sizes[2] != 0) return kMust;
    for (const auto &[gradient, of] :
         {std::pair(&args.grad_out, &args.out), std::pair(&args.grad_query, &args.query),
          std::pair(&args.grad_key, &args.key), std::pair(&args.grad_value, &args.value)})
      if (malformed(*gradient) || gradient->dtype != q.dtype ||
          !same_sizes(*gradient, std::to_array(of->sizes)))
        return kMust;
    if (wrong_fp32(args.grad_lse, rows)) return kMust;
    if (!absent(args.grad_mask)) {
      orchard_tensor wide = args.grad_mask;
      const bool halves = args.mask.dtype == ORCHARD_FLOAT16 || args.mask.dtype == ORCHARD_BFLOAT16;
      if (halves && wide.dtype == args.mask.dtype &&
          same_sizes(args.mask, {q.sizes[0], q.sizes[1], q.sizes[2], args.key.sizes[2]}))
        wide.dtype = ORCHARD_FLOAT32;
      if (absent(args.mask) || args.mask.dtype == ORCHARD_BOOL ||
          wrong_fp32(wide, std::to_array(args.mask.sizes)))
        return kMust;
    }
  }

  // Beyond what the header promises either way.
  const auto may_refuse = [](const orchard_tensor &tensor) {
    if (absent(tensor)) return false;
    return reinterpret_cast<uintptr_t>(tensor.data) % item_size(tensor.dtype) != 0 ||
           std::ranges::any_of(tensor.sizes, [](int64_t size) { return size > INT32_MAX; });
  };
  for (orchard_tensor *tensor : inputs(args))
    if (may_refuse(*tensor)) return Verdict::kMayRefuse;
  for (orchard_tensor *tensor : outputs(args)) {
    if (may_refuse(*tensor)) return Verdict::kMayRefuse;
    for (int axis = 0; axis < 4; ++axis)
      if (tensor->sizes[axis] > 1 && tensor->strides[axis] == 0) return Verdict::kMayRefuse;
  }
  const bool usual = std::isfinite(static_cast<float>(args.scale)) &&
                     (args.softcap == 0 || (args.softcap > 1e-30 && args.softcap < 1e30)) &&
                     args.threads >= 0 && args.threads <= 256;
  return usual ? Verdict::kValid : Verdict::kMayRefuse;
}

// Which of their structs are refused api_test says; what is served stays in its memory.
template <class Args>
Verdict verdict_of_levels(const Args &args) {
  const bool ours = args.struct_size == sizeof args && args.abi_version == ORCHARD_ABI_VERSION;
  return ours ? Verdict::kMayRefuse : Verdict::kMustRefuse;
}
Verdict verdict(orchard_quantized_args &args) { return verdict_of_levels(args); }
Verdict verdict(orchard_quantize_args &args) { return verdict_of_levels(args); }

double work(const orchard_quantize_args &args) {
  double product = 1;
  for (const int64_t size : args.source.sizes) product *= std::fabs(static_cast<double>(size)) + 1;
  return product;
}

double work(const orchard_quantized_args &args) {
  double product = 1;
  for (const int64_t size : args.query.data.sizes)
    product *= std::fabs(static_cast<double>(size)) + 1;
  return product * (std::fabs(static_cast<double>(args.key.data.sizes[2])) + 1);
}

// Sizes are known to agree.
double work(const auto &args) {
  double product = 1;
  for (const int64_t size : args.query.sizes) product *= static_cast<double>(size + 1);
  return product * static_cast<double>(args.key.sizes[2] + 1) *
         static_cast<double>(args.value.sizes[3] + 1) /
         static_cast<double>(args.query.sizes[3] + 1);
}

int64_t any_word(Random &random, int64_t old) {
  switch (between(random, 0, 5)) {
    case 0:
      return old + between(random, -2, 2);
    case 1:
      return between(random, -64, 64);
    case 2:
      return static_cast<int64_t>(random());
    case 3:
      return -old;
    default:
      return any_of<int64_t>(
          random, {0, 1, 2, -1, 512, 513, INT32_MAX, int64_t{1} << 31, int64_t{1} << 32,
                   int64_t{1} << 61, int64_t{1} << 62, -(int64_t{1} << 62), INT64_MAX, INT64_MIN});
  }
}

double any_number(Random &random) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return any_of<double>(random, {0, -1, 1, 1e-300, 1e300, 1e-20, 1e20, kInfinity, -kInfinity,
                                 std::numeric_limits<double>::quiet_NaN()});
}

template <class Args>
void corrupt_tensor(Args &args, Random &random) {
  std::vector<orchard_tensor *> tensors = inputs(args);
  for (orchard_tensor *tensor : outputs(args)) tensors.push_back(tensor);
  orchard_tensor &tensor = *any_of(random, tensors);
  int64_t &size = tensor.sizes[between(random, 0, 3)];
  int64_t &stride = tensor.strides[between(random, 0, 3)];
  switch (between(random, 0, 12)) {
    case 0:
    case 1:
    case 2:
      size = any_word(random, size);
      break;
    case 3:
    case 4:
    case 5:
    case 6:
      stride = any_word(random, stride);
      break;
    case 7:
      tensor.data = one_in(random, 2) ? nullptr : any_of(random, tensors)->data;
      break;
    case 8:
      if (tensor.data != nullptr)
        tensor.data = static_cast<uint8_t *>(tensor.data) + between(random, -64, 64);
      break;
    case 9:
      tensor.dtype = static_cast<int32_t>(any_word(random, tensor.dtype));
      break;
    case 10:
      tensor = one_in(random, 2) ? orchard_tensor{} : *any_of(random, tensors);
      break;
    case 11:
      tensor.reserved = static_cast<int32_t>(any_word(random, 0));
      break;
    default:
      (one_in(random, 2) ? args.struct_size : args.abi_version) =
          static_cast<uint32_t>(any_word(random, 1));
  }
}

void corrupt_operand(orchard_operand &operand, Random &random) {
  int64_t &word = one_in(random, 3) ? operand.dim : operand.group[between(random, 0, 2)];
  word = any_word(random, word);
}

void corrupt(orchard_quantize_args &args, Random &random) {
  one_in(random, 4) ? corrupt_operand(args.result, random) : corrupt_tensor(args, random);
}

template <class Args>
void corrupt(Args &args, Random &random) {
  if constexpr (requires { args.bf16_accuracy; })
    if (one_in(random, 5)) {
      orchard_operand *const operands[] = {&args.query, &args.key, &args.value};
      return corrupt_operand(*operands[between(random, 0, 2)], random);
    }
  switch (between(random, 0, 15)) {
    case 13:
      (one_in(random, 2) ? args.band_low : args.band_high) = any_word(random, 0);
      break;
    case 14:
      (one_in(random, 2) ? args.scale : args.softcap) = any_number(random);
      break;
    case 15:
      if (one_in(random, 3)) args.seed = nullptr;
      if (one_in(random, 2)) args.drop_threshold = static_cast<uint32_t>(any_word(random, 1));
      if (one_in(random, 2)) args.threads = static_cast<int32_t>(any_word(random, 1));
      break;
    default:
      corrupt_tensor(args, random);
  }
}

// Moves a tensor of its own memory to somewhere in an arena; false where it has no room.
bool move_into(const Memory &arena, orchard_tensor &tensor, Random &random) {
  if (tensor.data == nullptr) return true;
  const Extent reach = extent(tensor);
  const auto low = static_cast<int64_t>(reach.low), high = static_cast<int64_t>(reach.high);
  const auto room = static_cast<int64_t>(arena.size()) - (high - low);
  if (room < 0) return false;
  const int64_t at = between(random, 0, room / 8) * 8;
  tensor.data = arena.data() + at - low;
  return true;
}

struct Tally {
  int64_t served = 0, refused = 0, left_out = 0;
};

template <class Args>
std::string run_corrupted(Args args, int (*function)(const Args *), Random &random, Tally &tally) {
  Memory read(kArenaBytes, Edge::kEnd), written(kArenaBytes, Edge::kBegin);
  for (size_t at = 0; at < kArenaBytes; at += 8) {
    // Halves of each of these words are moderate numbers in all types.
    const uint64_t word = random() & 0xbfffbfffbfffbfff;
    std::memcpy(read.data() + at, &word, 8);
    std::memcpy(written.data() + at, &word, 8);
  }
  read.forbid_writing();
  bool moved = true;
  for (orchard_tensor *tensor : inputs(args)) moved = move_into(read, *tensor, random) && moved;
  for (orchard_tensor *tensor : outputs(args)) moved = move_into(written, *tensor, random) && moved;
  for (int64_t changes = between(random, 1, 3); changes > 0; --changes) corrupt(args, random);
  if (kThreadSanitizer && args.threads >= 0) args.threads = 1;  // outputs may overlap here

  const Verdict expected = verdict(args);
  bool owned = true;
  for (const orchard_tensor *tensor : inputs(args))
    owned = owned && (inside(*tensor, read) || inside(*tensor, written));
  for (const orchard_tensor *tensor : outputs(args)) owned = owned && inside(*tensor, written);
  if (!moved || (expected != Verdict::kMustRefuse && (!owned || work(args) > 1e7))) {
    ++tally.left_out;
    return "";
  }

  const std::vector<uint8_t> before(written.data(), written.data() + written.size());
  const int status = function(&args);
  ++(status == ORCHARD_OK ? tally.served : tally.refused);
  const std::string message = orchard_last_error();
  if (status == ORCHARD_OK) {
    if (expected == Verdict::kMustRefuse) return "a struct that contradicts itself is served";
    if (!message.empty()) return "a success with the message: " + message;
    for (const orchard_tensor *tensor : outputs(args)) {
      if (tensor->data == nullptr) continue;
      for (int64_t b = 0; b < tensor->sizes[0]; ++b)
        for (int64_t h = 0; h < tensor->sizes[1]; ++h)
          for (int64_t i = 0; i < tensor->sizes[2]; ++i)
            for (int64_t j = 0; j < tensor->sizes[3]; ++j) {
              uint8_t *const item = static_cast<uint8_t *>(address(*tensor, b, h, i, j));
              std::memcpy(item, &before[item - written.data()], item_size(tensor->dtype));
            }
    }
    if (std::memcmp(before.data(), written.data(), before.size()) != 0)
      return "something was written outside of the outputs";
    return "";
  }
  if (expected == Verdict::kValid) return "a valid struct is refused: " + message;
  if (message.empty()) return "status " + std::to_string(status) + " without a message";
  if (std::memcmp(before.data(), written.data(), before.size()) != 0)
    return "something was written by a call that was refused: " + message;
  return "";
}

std::string run_one(uint64_t seed, int64_t number, Tally &tally) {
  Random random(seed * 1'000'003 + static_cast<uint64_t>(number));
  const auto isas = split(orchard_isa_available());
  const std::string isa = any_of(random, isas);
  orchard_select_isa(isa.c_str());
  const std::string name =
      "--seed " + std::to_string(seed) + " --run " + std::to_string(number) + " [" + isa + "]";
  now_running(name);
  alarm(kSecondsPerRun);
  std::string defects;
  if (number % 2 == 0) {
    defects = number % 6 == 0 ? run_quantized(name, random) : run_consistent(name, random);
  } else if (number % 8 == 1) {
    Case what = any_case(random, 50'000);
    what.backward = what.grad_lse = what.grad_mask = false;
    const QuantizedCall call = any_quantized(what, Edge::kEnd, random);
    const orchard_quantize_args &key = call.operands[1].args;
    defects = run_corrupted(call.args, orchard_quantized_forward, random, tally);
    if (defects.empty() && key.struct_size != 0)
      defects = run_corrupted(key, orchard_quantize, random, tally);
  } else {
    const Call call(any_case(random, 50'000), any_dtype(random), Edge::kEnd, random());
    defects = number % 4 == 1
                  ? run_corrupted(call.forward_args, orchard_attention_forward, random, tally)
                  : run_corrupted(call.backward_args, orchard_attention_backward, random, tally);
  }
  alarm(0);
  return defects.empty() ? "" : "[" + isa + "] " + defects;
}

}  // namespace
}  // namespace orchard_test

int main(int argc, char **argv) {
  using namespace orchard_test;
  double seconds = std::numeric_limits<double>::infinity();
  int64_t runs = 1000, only = -1;
  uint64_t seed = 1;
  for (int at = 1; at < argc; at += 2) {
    const std::string word = argv[at];
    const char *value = at + 1 < argc ? argv[at + 1] : "";
    if (word == "--seconds") {
      seconds = std::atof(value);
      runs = INT64_MAX;
    } else if (word == "--runs") {
      runs = std::atoll(value);
    } else if (word == "--seed") {
      seed = std::strtoull(value, nullptr, 10);
    } else if (word == "--run") {
      only = std::atoll(value);
    } else {
      std::cerr << "usage: fuzz [--seconds N] [--runs N] [--seed N] [--run N]\n";
      return 2;
    }
  }
  report_faults();

  Tally tally;
  int64_t passed = 0, failed = 0;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  for (int64_t number = only < 0 ? 0 : only;
       only < 0 ? number < runs && elapsed() < seconds && failed < 40 : number == only; ++number) {
    const std::string defects = run_one(seed, number, tally);
    ++(defects.empty() ? passed : failed);
    if (!defects.empty())
      std::cout << "FAIL  --seed " << seed << " --run " << number << ": " << defects << std::endl;
  }
  std::cout << "corrupted structs: " << tally.served << " served, " << tally.refused << " refused, "
            << tally.left_out << " left out as beyond our memory\n"
            << passed << " passed, " << failed << " failed\n";
  return failed != 0 || passed == 0;
}
