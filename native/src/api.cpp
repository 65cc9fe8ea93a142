// The exported calls: an argument struct becomes a Problem, or a sentence that says why not.
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "engine.h"
#include "status.h"

namespace orchard {
namespace {

thread_local char last_error[512];

constexpr int64_t kMostBand = int64_t{1} << 40;

struct Shape {
  int64_t sizes[4];
};

struct Text {
  char chars[96];
};

Text text(const int64_t (&sizes)[4]) {
  Text result;
  snprintf(result.chars, sizeof(result.chars), "[%lld, %lld, %lld, %lld]",
           static_cast<long long>(sizes[0]), static_cast<long long>(sizes[1]),
           static_cast<long long>(sizes[2]), static_cast<long long>(sizes[3]));
  return result;
}

int item_size(int32_t dtype) {
  switch (dtype) {
    case ORCHARD_FLOAT32:
      return 4;
    case ORCHARD_FLOAT16:
    case ORCHARD_BFLOAT16:
      return 2;
    case ORCHARD_FLOAT64:
      return 8;
    case ORCHARD_BOOL:
    case ORCHARD_INT8:
    case ORCHARD_INT4:
      return 1;
    default:
      return 0;
  }
}

bool is_levels(int32_t dtype) { return dtype == ORCHARD_INT8 || dtype == ORCHARD_INT4; }

bool is_floating(int32_t dtype) {
  return dtype == ORCHARD_FLOAT32 || dtype == ORCHARD_FLOAT16 || dtype == ORCHARD_BFLOAT16;
}

const char *dtype_name(int32_t dtype) {
  static constexpr const char *kNames[] = {"float32", "float16", "bfloat16", "float64",
                                           "bool",    "int8",    "int4"};
  return item_size(dtype) != 0 ? kNames[dtype] : "unknown";
}

bool absent(const orchard_tensor &tensor) {
  const int64_t *sizes = tensor.sizes;
  return tensor.data == nullptr && (sizes[0] | sizes[1] | sizes[2] | sizes[3]) == 0;
}

bool empty(const orchard_tensor &tensor) {
  return std::any_of(tensor.sizes, tensor.sizes + 4, [](int64_t size) { return size == 0; });
}

// Collects the first thing that is wrong; every check after it is a no-op.
class Check {
 public:
  int status() const { return status_; }
  bool ok() const { return status_ == ORCHARD_OK; }

  // Everything about one tensor that does not depend on the others.
  void tensor(const char *name, const orchard_tensor &tensor);
  void dtype(const char *name, const orchard_tensor &tensor, int32_t dtype, const char *why);
  void shape(const char *name, const orchard_tensor &tensor, const Shape &expected,
             const char *why);
  void output(const char *name, const orchard_tensor &tensor);
  void mask(const orchard_tensor &mask, const Shape &full);

  __attribute__((format(printf, 3, 4))) void fail(int status, const char *format, ...);

 private:
  int status_ = ORCHARD_OK;
};

void Check::fail(int status, const char *format, ...) {
  if (!ok()) return;
  status_ = status;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
}

void Check::tensor(const char *name, const orchard_tensor &tensor) {
  const int size = item_size(tensor.dtype);
  if (tensor.reserved != 0)
    return fail(ORCHARD_INVALID_ARGUMENT, "%s.reserved is %d; it must be 0", name, tensor.reserved);
  if (size == 0)
    return fail(ORCHARD_INVALID_ARGUMENT, "%s.dtype is %d, which no type has", name, tensor.dtype);
  for (int axis = 0; axis < 4; ++axis) {
    if (tensor.sizes[axis] < 0 || tensor.sizes[axis] > INT32_MAX)
      return fail(ORCHARD_INVALID_ARGUMENT,
                  "%s has sizes %s; sizes[%d] must be between 0 and 2^31 - 1", name,
                  text(tensor.sizes).chars, axis);
  }
  // No empty axis hides a product that a loop over the others would need.
  int64_t count = 1;
  for (const int64_t extent : tensor.sizes) {
    if (__builtin_mul_overflow(count, std::max<int64_t>(extent, 1), &count))
      return fail(ORCHARD_INVALID_ARGUMENT, "%s has sizes %s; their product must be below 2^63",
                  name, text(tensor.sizes).chars);
  }
  if (empty(tensor)) return;
  if (tensor.data == nullptr)
    return fail(ORCHARD_INVALID_ARGUMENT, "%s has sizes %s and data NULL; it must point to them",
                name, text(tensor.sizes).chars);
  if (reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(size) != 0)
    return fail(ORCHARD_INVALID_ARGUMENT, "%s.data must be aligned to its elements of %d bytes",
                name, size);
  int64_t below = 0, above = 0;  // bytes to the lowest and to the highest element
  for (int axis = 0; axis < 4; ++axis) {
    int64_t bytes = 0;
    int64_t &end = tensor.strides[axis] < 0 ? below : above;
    if (__builtin_mul_overflow(tensor.strides[axis], (tensor.sizes[axis] - 1) * size, &bytes) ||
        __builtin_add_overflow(end, bytes, &end))
      return fail(ORCHARD_INVALID_ARGUMENT,
                  "%s has strides %s; no offset in bytes of its elements may reach 2^63", name,
                  text(tensor.strides).chars);
  }
}

void Check::dtype(const char *name, const orchard_tensor &tensor, int32_t dtype, const char *why) {
  if (tensor.dtype != dtype)
    fail(ORCHARD_INVALID_ARGUMENT, "%s is %s; it must be %s%s", name, dtype_name(tensor.dtype),
         dtype_name(dtype), why);
}

void Check::shape(const char *name, const orchard_tensor &tensor, const Shape &expected,
                  const char *why) {
  if (!std::equal(tensor.sizes, tensor.sizes + 4, expected.sizes))
    fail(ORCHARD_INVALID_ARGUMENT, "%s has sizes %s; they must be %s%s", name,
         text(tensor.sizes).chars, text(expected.sizes).chars, why);
}

void Check::output(const char *name, const orchard_tensor &tensor) {
  if (empty(tensor)) return;
  for (int axis = 0; axis < 4; ++axis) {
    if (tensor.sizes[axis] > 1 && tensor.strides[axis] == 0)
      fail(ORCHARD_INVALID_ARGUMENT,
           "%s has sizes %s and strides %s; it is written, so no two elements may share memory",
           name, text(tensor.sizes).chars, text(tensor.strides).chars);
  }
}

void Check::mask(const orchard_tensor &mask, const Shape &full) {
  if (is_levels(mask.dtype))
    fail(ORCHARD_INVALID_ARGUMENT, "mask is %s; it must be floating or bool",
         dtype_name(mask.dtype));
  for (int axis = 0; axis < 4; ++axis) {
    if (mask.sizes[axis] != 1 && mask.sizes[axis] != full.sizes[axis])
      fail(ORCHARD_INVALID_ARGUMENT, "mask has sizes %s; each must be 1 or that of %s",
           text(mask.sizes).chars, text(full.sizes).chars);
  }
}

// A stride that is never taken may be any number; kernels see a harmless one.
orchard_tensor tidy(orchard_tensor tensor, int64_t last_stride) {
  for (int axis = 0; axis < 4; ++axis)
    if (tensor.sizes[axis] <= 1 || empty(tensor))
      tensor.strides[axis] = axis == 3 ? last_stride : 0;
  return tensor;
}

// The sizes of a problem from those of its operands, and what they have to agree on.
void read_sizes(const orchard_tensor &query, const orchard_tensor &key, const orchard_tensor &value,
                const orchard_tensor &out, Problem &problem, Check &check) {
  problem.batch = query.sizes[0];
  problem.heads = query.sizes[1];
  problem.rows = query.sizes[2];
  problem.dim = query.sizes[3];
  problem.kv_heads = key.sizes[1];
  problem.keys = key.sizes[2];
  problem.value_dim = value.sizes[3];
  check.shape("key", key, {{problem.batch, problem.kv_heads, problem.keys, problem.dim}},
              ", to go with query");
  check.shape("value", value, {{problem.batch, problem.kv_heads, problem.keys, problem.value_dim}},
              ", to go with query and key");
  check.shape("out", out, {{problem.batch, problem.heads, problem.rows, problem.value_dim}},
              ", to go with query and value");

  if (problem.kv_heads == 0 ? problem.heads != 0 : problem.heads % problem.kv_heads != 0)
    check.fail(ORCHARD_INVALID_ARGUMENT,
               "query has %lld heads and key has %lld; the first must be a multiple of the second",
               static_cast<long long>(problem.heads), static_cast<long long>(problem.kv_heads));
  if (std::max(problem.dim, problem.value_dim) > ORCHARD_MAX_HEAD_DIM)
    check.fail(ORCHARD_UNSUPPORTED,
               "query has head dimension %lld and value %lld; at most %d are served",
               static_cast<long long>(problem.dim), static_cast<long long>(problem.value_dim),
               ORCHARD_MAX_HEAD_DIM);
  problem.group = problem.kv_heads != 0 ? problem.heads / problem.kv_heads : 0;
}

int read_threads(int32_t threads, Check &check) {
  if (threads < 0)
    check.fail(ORCHARD_INVALID_ARGUMENT, "threads is %d; it must not be negative", threads);
  return thread_count(threads);
}

// What every call of attention has beside its operands; their sizes are read.
template <class Args>
void read_rest(const Args &args, Problem &problem, Check &check) {
  const Shape rows{{problem.batch, problem.heads, problem.rows, 1}};
  const Shape scores{{problem.batch, problem.heads, problem.rows, problem.keys}};
  if (!absent(args.mask)) {
    check.tensor("mask", args.mask);
    check.mask(args.mask, scores);
    problem.mask = tidy(args.mask, 0);
  }
  if (!absent(args.lse)) {
    check.tensor("lse", args.lse);
    check.dtype("lse", args.lse, ORCHARD_FLOAT32, "");
    check.shape("lse", args.lse, rows, ", one for each row of query");
    problem.lse = tidy(args.lse, 1);
  }
  problem.out = tidy(args.out, 1);

  problem.band_low = std::clamp(args.band_low, -kMostBand, kMostBand);
  problem.band_high = std::clamp(args.band_high, -kMostBand, kMostBand);
  // A band without a key has one form, so that rows and keys agree on what they see.
  if (problem.band_low > problem.band_high) problem.band_low = problem.band_high = kMostBand;
  problem.scale = static_cast<float>(args.scale);
  problem.softcap = static_cast<float>(args.softcap);
  if (!isfinite(problem.scale))
    check.fail(ORCHARD_INVALID_ARGUMENT, "scale is %g; it must be finite in float32", args.scale);
  if (args.softcap != 0 && !(problem.softcap >= FLT_MIN && problem.softcap <= FLT_MAX))
    check.fail(ORCHARD_INVALID_ARGUMENT,
               "softcap is %g; it must be 0, for none, or positive and a normal float32",
               args.softcap);

  problem.drop_threshold = args.drop_threshold;
  if (args.drop_threshold > UINT16_MAX)
    check.fail(ORCHARD_INVALID_ARGUMENT, "drop_threshold is %u; it must be at most 65535",
               args.drop_threshold);
  if (args.seed != nullptr)
    memcpy(problem.seed, args.seed, sizeof(problem.seed));
  else if (args.drop_threshold != 0)
    check.fail(ORCHARD_INVALID_ARGUMENT, "seed is NULL; with dropout it must point to two words");

  problem.threads = read_threads(args.threads, check);
}

// What forward and backward have in common.
template <class Args>
void read_common(const Args &args, Problem &problem, Check &check) {
  const orchard_tensor &query = args.query, &key = args.key, &value = args.value;
  if (item_size(query.dtype) != 0 && !is_floating(query.dtype))
    check.fail(ORCHARD_INVALID_ARGUMENT, "query is %s; it must be float32, float16 or bfloat16",
               dtype_name(query.dtype));
  check.tensor("query", query);
  check.tensor("key", key);
  check.tensor("value", value);
  check.tensor("out", args.out);
  if (!check.ok()) return;

  problem.dtype = query.dtype;
  check.dtype("key", key, problem.dtype, ", as query is");
  check.dtype("value", value, problem.dtype, ", as query is");
  check.dtype("out", args.out, problem.dtype, ", as query is");
  read_sizes(query, key, value, args.out, problem, check);
  problem.query = tidy(query, 1);
  problem.key = tidy(key, 1);
  problem.value = tidy(value, 1);
  read_rest(args, problem, check);
}

void read(const orchard_forward_args &args, Problem &problem, Check &check) {
  read_common(args, problem, check);
  check.output("out", args.out);
  check.output("lse", args.lse);
}

void read(const orchard_backward_args &args, Problem &problem, Check &check) {
  read_common(args, problem, check);
  if (absent(args.lse) && problem.batch * problem.heads * problem.rows != 0)
    check.fail(ORCHARD_INVALID_ARGUMENT, "lse is absent; the backward needs that of the forward");

  const auto operand = [&](const char *name, const orchard_tensor &given, orchard_tensor &taken,
                           const char *like_name, const orchard_tensor &like) {
    check.tensor(name, given);
    check.dtype(name, given, like.dtype, ", as query is");
    Shape shape;
    std::copy(like.sizes, like.sizes + 4, shape.sizes);
    char why[32];
    snprintf(why, sizeof(why), ", as %s has", like_name);
    check.shape(name, given, shape, why);
    taken = tidy(given, 1);
  };
  operand("grad_out", args.grad_out, problem.grad_out, "out", args.out);
  operand("grad_query", args.grad_query, problem.grad_query, "query", args.query);
  operand("grad_key", args.grad_key, problem.grad_key, "key", args.key);
  operand("grad_value", args.grad_value, problem.grad_value, "value", args.value);
  check.output("grad_query", args.grad_query);
  check.output("grad_key", args.grad_key);
  check.output("grad_value", args.grad_value);

  if (!absent(args.grad_lse)) {
    check.tensor("grad_lse", args.grad_lse);
    check.dtype("grad_lse", args.grad_lse, ORCHARD_FLOAT32, "");
    check.shape("grad_lse", args.grad_lse, {{problem.batch, problem.heads, problem.rows, 1}},
                ", one for each row of query");
    problem.grad_lse = tidy(args.grad_lse, 1);
  }
  if (!absent(args.grad_mask)) {
    check.tensor("grad_mask", args.grad_mask);
    const int64_t whole[4] = {problem.batch, problem.heads, problem.rows, problem.keys};
    const bool halves = args.mask.dtype == ORCHARD_FLOAT16 || args.mask.dtype == ORCHARD_BFLOAT16;
    if (!(halves && args.grad_mask.dtype == args.mask.dtype &&
          std::equal(args.mask.sizes, args.mask.sizes + 4, whole)))
      check.dtype("grad_mask", args.grad_mask, ORCHARD_FLOAT32,
                  ", or a 16-bit mask's own type where no axis is broadcast");
    if (absent(args.mask) || args.mask.dtype == ORCHARD_BOOL)
      check.fail(ORCHARD_INVALID_ARGUMENT, "grad_mask is given; it needs an additive mask, not %s",
                 absent(args.mask) ? "none" : "a bool one");
    Shape shape;
    std::copy(args.mask.sizes, args.mask.sizes + 4, shape.sizes);
    check.shape("grad_mask", args.grad_mask, shape, ", as mask has");
    check.output("grad_mask", args.grad_mask);
    problem.grad_mask = tidy(args.grad_mask, 0);
  }
}

// What stands beside the levels of an operand with these sizes.
void read_levels(const char *name, const orchard_operand &operand, const Shape &whole,
                 Levels &levels, Check &check) {
  char part[32];
  const auto called = [&](const char *field) {
    snprintf(part, sizeof(part), "%s.%s", name, field);
    return part;
  };
  Shape groups{{0, 0, 0, 1}};
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t group = operand.group[axis];
    if (group < 1)
      return check.fail(ORCHARD_INVALID_ARGUMENT, "%s.group[%d] is %lld; it must be at least 1",
                        name, axis, static_cast<long long>(group));
    levels.group[axis] = group;
    groups.sizes[axis] = whole.sizes[axis] / group + (whole.sizes[axis] % group != 0);
  }
  check.tensor(called("scales"), operand.scales);
  check.dtype(called("scales"), operand.scales, ORCHARD_FLOAT32, "");
  check.shape(called("scales"), operand.scales, groups, ", one for each group");
  levels.scales = tidy(operand.scales, 1);
  if (absent(operand.zeros)) return;
  check.tensor(called("zeros"), operand.zeros);
  check.dtype(called("zeros"), operand.zeros, ORCHARD_INT8, "");
  check.shape(called("zeros"), operand.zeros, groups, ", one for each group");
  levels.zeros = tidy(operand.zeros, 1);
}

void read_mean(const char *name, const orchard_tensor &mean, const Shape &whole, Levels &levels,
               Check &check) {
  if (absent(mean)) return;
  check.tensor(name, mean);
  check.dtype(name, mean, ORCHARD_FLOAT32, "");
  check.shape(name, mean, {{whole.sizes[0], whole.sizes[1], 1, whole.sizes[3]}},
              ", one row for each head");
  levels.mean = tidy(mean, 1);
}

// The bytes of an operand as a tensor of its elements, with everything about it checked.
orchard_tensor read_data(const char *name, const orchard_operand &operand, Check &check) {
  orchard_tensor whole = operand.data;
  check.tensor(name, whole);
  const int64_t dim = operand.dim, stored = whole.sizes[3];
  if (dim < 0 || dim > INT32_MAX || stored != (whole.dtype == ORCHARD_INT4 ? (dim + 1) / 2 : dim))
    check.fail(ORCHARD_INVALID_ARGUMENT,
               "%s.dim is %lld and its rows are of %lld %s; they disagree", name,
               static_cast<long long>(dim), static_cast<long long>(stored),
               whole.dtype == ORCHARD_INT4 ? "bytes" : "elements");
  if (is_levels(whole.dtype) && stored > 1 && whole.strides[3] != 1)
    check.fail(ORCHARD_INVALID_ARGUMENT, "%s.data has strides %s; the last must be 1", name,
               text(whole.strides).chars);
  whole.sizes[3] = dim;
  return whole;
}

Shape shape_of(const orchard_tensor &tensor) {
  Shape shape;
  std::copy(tensor.sizes, tensor.sizes + 4, shape.sizes);
  return shape;
}

// One operand of a quantised call: where its bytes lie, what they stand for, and its sizes.
orchard_tensor read_operand(const char *name, const orchard_operand &operand, bool may_have_mean,
                            orchard_tensor &data, Levels &levels, Check &check) {
  const orchard_tensor whole = read_data(name, operand, check);
  data = tidy(operand.data, 1);
  const bool any = !absent(operand.scales) || !absent(operand.zeros) || !absent(operand.mean);
  if (is_floating(whole.dtype)) {
    if (any || (operand.group[0] | operand.group[1] | operand.group[2]) != 0)
      check.fail(ORCHARD_INVALID_ARGUMENT,
                 "%s is %s and has scales, zeros, mean or group; they belong to levels", name,
                 dtype_name(whole.dtype));
    return whole;
  }
  if (!is_levels(whole.dtype))
    check.fail(ORCHARD_INVALID_ARGUMENT,
               "%s is %s; it must be float32, float16, bfloat16, int8 or int4", name,
               dtype_name(whole.dtype));
  if (!may_have_mean && !absent(operand.mean))
    check.fail(ORCHARD_INVALID_ARGUMENT, "%s.mean is given; only that of key is served", name);
  if (!check.ok()) return whole;
  read_levels(name, operand, shape_of(whole), levels, check);
  read_mean("key.mean", operand.mean, shape_of(whole), levels, check);
  return whole;
}

void read(const orchard_quantized_args &args, Problem &problem, Check &check) {
  const orchard_tensor query =
      read_operand("query", args.query, false, problem.query, problem.query_levels, check);
  const orchard_tensor key =
      read_operand("key", args.key, true, problem.key, problem.key_levels, check);
  const orchard_tensor value =
      read_operand("value", args.value, false, problem.value, problem.value_levels, check);
  check.tensor("out", args.out);
  if (args.bf16_accuracy > 1 || args.reserved != 0)
    check.fail(ORCHARD_INVALID_ARGUMENT,
               "bf16_accuracy is %u and reserved %u; the first must be 0 or 1, the second 0",
               args.bf16_accuracy, args.reserved);
  if (!is_floating(args.out.dtype))
    check.fail(ORCHARD_INVALID_ARGUMENT, "out is %s; it must be float32, float16 or bfloat16",
               dtype_name(args.out.dtype));
  if (!check.ok()) return;
  problem.dtype = args.bf16_accuracy != 0 ? ORCHARD_BFLOAT16 : ORCHARD_FLOAT32;
  read_sizes(query, key, value, args.out, problem, check);
  read_rest(args, problem, check);
  check.output("out", args.out);
  check.output("lse", args.lse);
}

// What a call on one tensor has beside its results.
template <class Args>
void read_source(const Args &args, Quantization &quantization, Check &check) {
  check.tensor("source", args.source);
  if (!is_floating(args.source.dtype))
    check.fail(ORCHARD_INVALID_ARGUMENT, "source is %s; it must be float32, float16 or bfloat16",
               dtype_name(args.source.dtype));
  if (args.reserved != 0)
    check.fail(ORCHARD_INVALID_ARGUMENT, "reserved is %d; it must be 0", args.reserved);
  quantization.source = tidy(args.source, 1);
  quantization.threads = read_threads(args.threads, check);
}

void read(const orchard_sum_args &args, Quantization &quantization, Check &check) {
  read_source(args, quantization, check);
  if (absent(args.sums)) check.fail(ORCHARD_INVALID_ARGUMENT, "sums is absent; it is the result");
  if (!check.ok()) return;
  read_mean("sums", args.sums, shape_of(args.source), quantization.levels, check);
  check.output("sums", args.sums);
}

void read(const orchard_quantize_args &args, Quantization &quantization, Check &check) {
  const orchard_operand &result = args.result;
  const Shape whole = shape_of(args.source);
  read_source(args, quantization, check);
  const orchard_tensor data = read_data("result", result, check);
  if (!check.ok()) return;
  if (!is_levels(data.dtype))
    check.fail(ORCHARD_INVALID_ARGUMENT, "result is %s; it must be int8 or int4",
               dtype_name(data.dtype));
  check.shape("result", data, whole, ", as source has");
  if (!absent(result.mean))
    check.fail(ORCHARD_INVALID_ARGUMENT, "result.mean is given; mean is the one to take out");
  if (!check.ok()) return;
  read_levels("result", result, whole, quantization.levels, check);
  read_mean("mean", args.mean, whole, quantization.levels, check);
  check.output("result.data", result.data);
  check.output("result.scales", result.scales);
  check.output("result.zeros", result.zeros);
  quantization.data = tidy(result.data, 1);
}

// The two words that every version of the struct begins with.
template <class Args>
int check_abi(const Args *args) {
  if (args == nullptr) return fail(ORCHARD_INVALID_ARGUMENT, "args is NULL");
  if (args->struct_size != sizeof(Args))
    return fail(ORCHARD_WRONG_ABI, "struct_size is %u; in this library it is %zu",
                args->struct_size, sizeof(Args));
  if (args->abi_version != ORCHARD_ABI_VERSION)
    return fail(ORCHARD_WRONG_ABI, "abi_version is %u; this library has %d", args->abi_version,
                ORCHARD_ABI_VERSION);
  return ORCHARD_OK;
}

template <class Args, class Work>
int call(const Args *args, int (*Kernels::*kernel)(const Work &) noexcept) {
  if (const int status = check_abi(args); status != ORCHARD_OK) return status;
  Work work{};
  Check check;
  read(*args, work, check);
  if (!check.ok()) return check.status();
  const int status = (current_kernels().*kernel)(work);
  if (status == ORCHARD_OK) return succeed();
  if (status == ORCHARD_OUT_OF_MEMORY)
    return fail(status, "memory for scratch could not be allocated; outputs are undefined");
  return fail(status, "source holds NaN, Inf or a magnitude above 2^126; it must hold none");
}

}  // namespace

int succeed() noexcept {
  last_error[0] = '\0';
  return ORCHARD_OK;
}

int fail(int status, const char *format, ...) noexcept {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace orchard

uint32_t orchard_abi_version(void) { return ORCHARD_ABI_VERSION; }

int orchard_attention_forward(const orchard_forward_args *args) {
  return orchard::call(args, &orchard::Kernels::forward);
}

int orchard_attention_backward(const orchard_backward_args *args) {
  return orchard::call(args, &orchard::Kernels::backward);
}

int orchard_quantized_forward(const orchard_quantized_args *args) {
  return orchard::call(args, &orchard::Kernels::forward);
}

int orchard_quantize(const orchard_quantize_args *args) {
  return orchard::call(args, &orchard::Kernels::quantize);
}

int orchard_sum_over_rows(const orchard_sum_args *args) {
  return orchard::call(args, &orchard::Kernels::sum_over_rows);
}

const char *orchard_last_error(void) { return orchard::last_error; }

void orchard_share_threads(orchard_team_runner *team) { orchard::share_threads(team); }

int orchard_pool_threads(void) { return orchard::pool_threads(); }

void orchard_exp2(const float *x, float *y, size_t count) {
  orchard::current_kernels().exp2(x, y, count);
}
