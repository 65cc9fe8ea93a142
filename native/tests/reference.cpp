#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "tensor.h"

namespace orchard_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kE = 0x1p-24;  // unit roundoff of fp32
constexpr double kSigmas = 6.0;
constexpr double kUnderflow = 0x1p-90;  // exp2 below 2^-126 may be 0, times what it multiplies

double sum_error(int64_t terms) {
  const double n = static_cast<double>(terms);
  return std::min(n, kSigmas * std::sqrt(n)) * kE;
}

bool repeats_itself(const orchard_tensor &tensor) {
  int64_t reach = 1;
  for (int axis = 0; axis < 4; ++axis)
    if (tensor.sizes[axis] > 1) reach += (tensor.sizes[axis] - 1) * std::abs(tensor.strides[axis]);
  return reach < count(tensor);
}

// Rounding errors of either sign.
struct Spread {
  double linear = 0, square = 0;
  void add(double error) {
    linear += std::fabs(error);
    square += error * error;
  }
  void add(const Spread &other, double factor) {
    linear += std::fabs(factor) * other.linear;
    square += factor * factor * other.square;
  }
  double bound(bool independent) const {
    return independent ? std::min(linear, kSigmas * std::sqrt(square)) : linear;
  }
};

// A sum with what is known of its error.
struct Sum {
  double value = 0, magnitude = 0, error = 0;
  int64_t terms = 0;
  Spread spread;

  // `absolute`: error of the term in fp32; `rounding`: of one factor of it to the operands' type.
  void add(double term, double absolute, double rounding) {
    value += term;
    magnitude += std::fabs(term);
    error += absolute;
    spread.add(rounding * term);
    ++terms;
  }
  double budget(int32_t dtype, bool independent, double unit) const {
    const double total = error + sum_error(terms) * magnitude + spread.bound(independent) +
                         unit_roundoff(dtype) * std::fabs(value) + least_step(dtype) / 2 +
                         kUnderflow;
    return total * (1 + 4 * unit);
  }
};

Expected settle(const std::vector<Sum> &sums, int32_t dtype, bool independent, double unit) {
  Expected expected;
  for (const Sum &sum : sums) {
    expected.value.push_back(sum.value);
    expected.budget.push_back(sum.budget(dtype, independent, unit));
  }
  return expected;
}

// What forward and backward share: the problem, and the softmax of one row at a time.
struct Rows {
  explicit Rows(const auto &args)
      : heads(args.query.sizes[1]),
        group(args.key.sizes[1] ? heads / args.key.sizes[1] : 1),
        rows(args.query.sizes[2]),
        keys(args.key.sizes[2]),
        dim(args.query.sizes[3]),
        value_dim(args.value.sizes[3]),
        batch(args.query.sizes[0]),
        kv_heads(args.key.sizes[1]),
        low(args.band_low),
        high(args.band_high),
        scale(args.scale),
        softcap(args.softcap),
        threshold(args.drop_threshold),
        seed(args.seed),
        mask(args.mask),
        query(dense(args.query)),
        key(dense(args.key)),
        value(dense(args.value)),
        unit(unit_roundoff(args.query.dtype)),
        independent(!repeats_itself(args.query) && !repeats_itself(args.key) &&
                    !repeats_itself(args.value)),
        p(keys),
        factor(keys),
        slope(keys),
        slope_error(keys),
        score(keys),
        score_error(keys) {}

  void compute(int64_t b, int64_t h, int64_t i);

  int64_t heads, group, rows, keys, dim, value_dim, batch, kv_heads, low, high;
  double scale, softcap;
  uint32_t threshold;
  const uint32_t *seed;
  orchard_tensor mask;
  std::vector<double> query, key, value;
  double unit;
  bool independent;

  // The row last computed.
  std::vector<double> p, factor, slope, slope_error, score, score_error;
  double lse = 0, mean_error = 0;
  bool empty = true;

  const double *query_row(int64_t b, int64_t h, int64_t i) const {
    return query.data() + ((b * heads + h) * rows + i) * dim;
  }
  const double *key_row(int64_t b, int64_t h, int64_t j) const {
    return key.data() + ((b * kv_heads + h / group) * keys + j) * dim;
  }
  const double *value_row(int64_t b, int64_t h, int64_t j) const {
    return value.data() + ((b * kv_heads + h / group) * keys + j) * value_dim;
  }
};

void Rows::compute(int64_t b, int64_t h, int64_t i) {
  double top = -kInfinity;
  for (int64_t j = 0; j < keys; ++j) {
    double s = 0, size = 0;
    for (int64_t d = 0; d < dim; ++d) {
      const double product = query_row(b, h, i)[d] * key_row(b, h, j)[d];
      s += product;
      size += std::fabs(product);
    }
    s *= scale;
    double error = (sum_error(dim) + 3 * kE) * std::fabs(scale) * size;
    slope[j] = 1.0;
    slope_error[j] = 0.0;
    if (softcap != 0) {
      const double tanh = std::tanh(s / softcap);
      s = softcap * tanh;
      slope[j] = 1 - tanh * tanh;
      slope_error[j] = 12 * kE + 2 * error / softcap;
      error = slope[j] * error + 6 * kE * softcap;
    }
    if (mask.data != nullptr) {
      const double m = load_item(address(mask, b, h, i, j), mask.dtype);
      if (mask.dtype == ORCHARD_BOOL) {
        s = m != 0 ? s : -kInfinity;
      } else {
        s += static_cast<float>(m);
        error += kE * (std::fabs(s) + std::fabs(m));
      }
    }
    if (j - i < low || j - i > high) s = -kInfinity;
    score[j] = s;
    score_error[j] = std::isinf(s) ? 0 : error;
    top = std::max(top, s);
  }
  empty = top == -kInfinity;
  double total = 0;
  for (int64_t j = 0; j < keys; ++j) {
    p[j] = empty ? 0.0 : std::exp(score[j] - top);
    total += p[j];
  }
  lse = empty ? -kInfinity : top + std::log(total);
  mean_error = 0;
  for (int64_t j = 0; j < keys; ++j) {
    p[j] = empty ? 0.0 : p[j] / total;
    if (p[j] != 0) score_error[j] += 2 * kE * (std::fabs(score[j]) + std::fabs(top));
    mean_error += p[j] * score_error[j];
    factor[j] = 1.0;
    if (threshold != 0) {
      const auto plane = static_cast<uint32_t>(b * heads + h);
      const uint32_t bits =
          random_bits(seed, plane, static_cast<uint32_t>(i), static_cast<uint32_t>(j));
      factor[j] = bits >= threshold ? 65536.0 / (65536 - threshold) : 0.0;
    }
  }
}

}  // namespace

uint32_t random_bits(const uint32_t seed[2], uint32_t plane, uint32_t row, uint32_t key) {
  uint32_t x[4] = {key / 8, row, plane, 0}, k[2] = {seed[0], seed[1]};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * x[0], b = uint64_t{0xCD9E8D57} * x[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(b >> 32) ^ x[1] ^ k[0], static_cast<uint32_t>(b),
        static_cast<uint32_t>(a >> 32) ^ x[3] ^ k[1], static_cast<uint32_t>(a)};
    std::copy(next, next + 4, x);
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return x[key % 8 / 2] >> (key % 2 * 16) & 0xffff;
}

ForwardExpected expect_forward(const orchard_forward_args &args) {
  Rows rows(args);
  ForwardExpected expected;
  std::vector<Sum> out(rows.value_dim);
  for (int64_t b = 0; b < rows.batch; ++b)
    for (int64_t h = 0; h < rows.heads; ++h)
      for (int64_t i = 0; i < rows.rows; ++i) {
        rows.compute(b, h, i);
        const double common = rows.mean_error + 2 * sum_error(rows.keys) + 6 * kE;
        std::fill(out.begin(), out.end(), Sum{});
        for (int64_t j = 0; j < rows.keys; ++j) {
          const double weight = rows.p[j] * rows.factor[j];
          if (weight == 0) continue;
          for (int64_t d = 0; d < rows.value_dim; ++d) {
            const double term = weight * rows.value_row(b, h, j)[d];
            out[d].add(term, std::fabs(term) * (rows.score_error[j] + common), rows.unit);
          }
        }
        for (const Sum &sum : out) {
          expected.out.value.push_back(sum.value);
          expected.out.budget.push_back(sum.budget(args.query.dtype, rows.independent, rows.unit));
        }
        expected.lse.value.push_back(rows.lse);
        expected.lse.budget.push_back(rows.empty ? 0 : common + 3 * kE * std::fabs(rows.lse));
      }
  return expected;
}

BackwardExpected expect_backward(const orchard_backward_args &args) {
  Rows rows(args);
  rows.independent = rows.independent && !repeats_itself(args.grad_out);
  const std::vector<double> grad_out = dense(args.grad_out);
  const double scale = std::fabs(rows.scale);
  const bool by_mask = args.grad_mask.data != nullptr;
  std::vector<Sum> by_query(rows.query.size()), by_key(rows.key.size()),
      by_value(rows.value.size()), by_mask_sums(by_mask ? count(args.mask) : 0);
  std::vector<double> dp(rows.keys), dp_error(rows.keys), out(rows.value_dim);

  const auto mask_index = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t at[4] = {b, h, i, j};
    int64_t index = 0;
    for (int axis = 0; axis < 4; ++axis)
      index = index * args.mask.sizes[axis] + (args.mask.sizes[axis] == 1 ? 0 : at[axis]);
    return index;
  };

  for (int64_t b = 0; b < rows.batch; ++b)
    for (int64_t h = 0; h < rows.heads; ++h)
      for (int64_t i = 0; i < rows.rows; ++i) {
        rows.compute(b, h, i);
        if (rows.empty) continue;
        const int64_t row = (b * rows.heads + h) * rows.rows + i;
        const double *q = rows.query_row(b, h, i);
        const double *arriving = grad_out.data() + row * rows.value_dim;
        const double arriving_lse =
            args.grad_lse.data == nullptr
                ? 0.0
                : load_item(address(args.grad_lse, b, h, i, 0), args.grad_lse.dtype);

        std::fill(out.begin(), out.end(), 0.0);
        for (int64_t j = 0; j < rows.keys; ++j) {
          const double *v = rows.value_row(b, h, j);
          double size = 0;
          dp[j] = 0;
          for (int64_t d = 0; d < rows.value_dim; ++d) {
            dp[j] += arriving[d] * v[d];
            size += std::fabs(arriving[d] * v[d]);
            out[d] += rows.p[j] * rows.factor[j] * v[d];
          }
          dp_error[j] = (sum_error(rows.value_dim) + 3 * kE) * size;
        }
        Sum delta;
        const double least = least_step(args.out.dtype) / 2;
        for (int64_t d = 0; d < rows.value_dim; ++d) {
          delta.add(arriving[d] * out[d], 0.0, 0.0);
          delta.spread.add(arriving[d] * std::max(rows.unit * std::fabs(out[d]), least));
        }
        const double delta_error = (sum_error(rows.value_dim) + 3 * kE) * delta.magnitude;

        double seen = 0;  // of the mask's gradient, where its keys are broadcast
        for (int64_t j = 0; j < rows.keys; ++j) {
          const double p = rows.p[j], factor = rows.factor[j], slope = rows.slope[j];
          if (p == 0) continue;
          const double p_error = rows.score_error[j] +
                                 3 * kE * (std::fabs(rows.score[j]) + std::fabs(rows.lse)) + 6 * kE;
          const double ds = p * (factor * dp[j] - delta.value + arriving_lse);
          const double ds_error = std::fabs(ds) * p_error +
                                  p * (factor * dp_error[j] + delta_error +
                                       3 * kE *
                                           (factor * std::fabs(dp[j]) + std::fabs(delta.value) +
                                            std::fabs(arriving_lse)));
          const double w = rows.scale * slope * ds;
          const double w_error = scale * (slope * ds_error + std::fabs(ds) * rows.slope_error[j]);
          const double *k = rows.key_row(b, h, j);
          const int64_t key = (b * rows.kv_heads + h / rows.group) * rows.keys + j;
          for (int64_t d = 0; d < rows.dim; ++d) {
            by_query[row * rows.dim + d].add(w * k[d], w_error * std::fabs(k[d]), rows.unit);
            Sum &sum = by_key[key * rows.dim + d];
            sum.add(w * q[d], w_error * std::fabs(q[d]), rows.unit);
            sum.spread.add(delta.spread, scale * slope * p * q[d]);
          }
          if (factor != 0) {
            for (int64_t d = 0; d < rows.value_dim; ++d) {
              const double term = p * factor * arriving[d];
              by_value[key * rows.value_dim + d].add(term, std::fabs(term) * p_error, rows.unit);
            }
          }
          if (by_mask) {
            Sum &sum = by_mask_sums[mask_index(b, h, i, j)];
            sum.add(ds, ds_error, 0.0);
            if (args.mask.sizes[3] == 1) {
              seen += p;
            } else {
              sum.spread.add(delta.spread, p);
            }
          }
        }
        if (by_mask && seen != 0)
          by_mask_sums[mask_index(b, h, i, 0)].spread.add(delta.spread, seen);
        for (int64_t d = 0; d < rows.dim; ++d) {  // delta is one for the row: its error adds up
          double coherent = 0;
          for (int64_t j = 0; j < rows.keys; ++j)
            coherent += rows.p[j] * rows.slope[j] * rows.key_row(b, h, j)[d];
          by_query[row * rows.dim + d].spread.add(delta.spread, scale * coherent);
        }
      }
  const auto settled = [&](const std::vector<Sum> &sums, int32_t dtype) {
    return settle(sums, dtype, rows.independent, rows.unit);
  };
  return {settled(by_query, args.query.dtype), settled(by_key, args.query.dtype),
          settled(by_value, args.query.dtype), settled(by_mask_sums, args.grad_mask.dtype)};
}

std::string compare(const std::string &name, const orchard_tensor &found,
                    const Expected &expected) {
  const std::vector<double> values = dense(found);
  if (values.size() != expected.value.size()) return name + " has another size; ";
  double worst = 1;
  size_t where = values.size();
  for (size_t at = 0; at < values.size(); ++at) {
    if (values[at] == expected.value[at]) continue;  // infinities too
    const double ratio = std::fabs(values[at] - expected.value[at]) / expected.budget[at];
    if (!(ratio <= worst)) {
      where = at;
      worst = std::isnan(ratio) ? kInfinity : ratio;
    }
  }
  if (where == values.size()) return "";
  size_t index[4], rest = where;
  for (int axis = 3; axis >= 0; --axis) {
    index[axis] = rest % static_cast<size_t>(found.sizes[axis]);
    rest /= static_cast<size_t>(found.sizes[axis]);
  }
  char text[200];
  std::snprintf(text, sizeof text, "%s[%zu,%zu,%zu,%zu] is %.9g, should be %.9g (%.3g budgets); ",
                name.c_str(), index[0], index[1], index[2], index[3], values[where],
                expected.value[where], worst);
  return text;
}

}  // namespace orchard_test
