// The kernels of each instruction set against the reference, and against themselves.
//
//   driver [--quick] [--part I/N] [--only TEXT] [--isa best|NAME,NAME] [--list]
#include <unistd.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <iostream>
#include <limits>

#include "check.h"
#include "problem.h"

namespace orchard_test {
namespace {

struct Options {
  bool quick = false, list = false;
  int part = 1, parts = 1;
  std::string only;
  std::vector<std::string> isas;
};

constexpr unsigned kSecondsPerTest = 120;

constexpr int32_t kDtypes[] = {ORCHARD_FLOAT32, ORCHARD_FLOAT16, ORCHARD_BFLOAT16};

void add_sizes(std::vector<Case> &cases) {
  cases.insert(
      cases.end(),
      {{.name = "1 row, 1 key, D 1", .rows = 1, .keys = 1, .dim = 1, .value_dim = 1},
       {.name = "7 x 7, D 1", .rows = 7, .keys = 7, .dim = 1, .value_dim = 1},
       {.name = "7 x 77, D 40", .batch = 2, .rows = 7, .keys = 77, .dim = 40, .value_dim = 40},
       {.name = "77 x 77, D 64", .rows = 77, .keys = 77},
       {.name = "77 x 7, D 17", .rows = 77, .keys = 7, .dim = 17, .value_dim = 17},
       {.name = "130 x 130, D 80",
        .heads = 1,
        .kv_heads = 1,
        .rows = 130,
        .keys = 130,
        .dim = 80,
        .value_dim = 80},
       {.name = "77 x 130, D 128",
        .heads = 1,
        .kv_heads = 1,
        .rows = 77,
        .keys = 130,
        .dim = 128,
        .value_dim = 128},
       {.name = "5 x 1000, D 64", .rows = 5, .keys = 1000},
       {.name = "1000 x 5, D 64", .rows = 1000, .keys = 5, .slow = true},
       {.name = "20 x 1000, D 96",
        .rows = 20,
        .keys = 1000,
        .dim = 96,
        .value_dim = 96,
        .slow = true},
       {.name = "33 x 70, D 256", .rows = 33, .keys = 70, .dim = 256, .value_dim = 256},
       {.name = "20 x 40, D 512", .rows = 20, .keys = 40, .dim = 512, .value_dim = 512},
       {.name = "300 x 520, D 64",
        .heads = 1,
        .kv_heads = 1,
        .rows = 300,
        .keys = 520,
        .slow = true},
       {.name = "Dv 80, D 64", .value_dim = 80},
       {.name = "Dv 64, D 128", .heads = 1, .kv_heads = 1, .rows = 77, .keys = 130, .dim = 128},
       {.name = "Dv 1, D 40", .dim = 40, .value_dim = 1},
       {.name = "Dv 256, D 1", .dim = 1, .value_dim = 256},
       {.name = "Dv 511, D 3", .dim = 3, .value_dim = 511},
       {.name = "Dv 5, D 509", .dim = 509, .value_dim = 5},
       {.name = "scale 0.3, large scores", .rows = 77, .keys = 130, .scale = 0.3, .deviation = 30},
       {.name = "scale below 0", .scale = -0.5, .deviation = 4}});
}

void add_heads(std::vector<Case> &cases) {
  cases.insert(
      cases.end(),
      {{.name = "8 heads on 2", .batch = 2, .heads = 8, .rows = 19, .keys = 45},
       {.name = "6 heads on 1", .heads = 6, .kv_heads = 1, .rows = 40, .keys = 77, .high = 0},
       {.name = "3 batches, 5 heads", .batch = 3, .heads = 5, .kv_heads = 5, .rows = 9, .keys = 21},
       {.name = "12 heads on 4, dropout, both masks",
        .batch = 2,
        .heads = 12,
        .kv_heads = 4,
        .rows = 21,
        .keys = 37,
        .high = 16,
        .drop = 20000,
        .mask_dtype = ORCHARD_FLOAT32,
        .grad_lse = true,
        .grad_mask = true}});
}

void add_bands(std::vector<Case> &cases) {
  const auto causal = [&](const char *name, int64_t rows, int64_t keys, int64_t high) {
    cases.push_back({.name = name, .rows = rows, .keys = keys, .high = high});
  };
  causal("causal, top left, 77 x 77", 77, 77, 0);
  causal("causal, top left, 77 x 130", 77, 130, 0);
  causal("causal, top left, 130 x 77", 130, 77, 0);
  causal("causal, bottom right, 77 x 130", 77, 130, 130 - 77);
  causal("causal, bottom right, 130 x 77: empty rows", 130, 77, 77 - 130);
  causal("band above every key: empty rows", 33, 40, -200);
  const auto window = [&](const char *name, int64_t low, int64_t high) {
    cases.push_back({.name = name,
                     .heads = 1,
                     .kv_heads = 1,
                     .rows = 150,
                     .keys = 170,
                     .low = low,
                     .high = high});
  };
  window("window -5 to 5", -5, 5);
  window("window -16 to 0", -16, 0);
  window("window 0 to 0", 0, 0);
  window("window 30 on: empty rows at the end", 30, kNoHigh);
  window("window from 3 to 2: nothing", 3, 2);
  window("window from 90 to 20: nothing", 90, 20);
  window("window from -20 to -90: nothing", -20, -90);
  cases.push_back({.name = "window from -36 to -53 on 4 keys: nothing",
                   .rows = 168,
                   .keys = 4,
                   .low = -36,
                   .high = -53});
  window("window -64 to 63", -64, 63);
  window("bounds beyond 2^40", -(int64_t{1} << 50), int64_t{1} << 50);
  cases.push_back({.name = "window of 10 in 600 keys",
                   .heads = 1,
                   .kv_heads = 1,
                   .rows = 600,
                   .keys = 600,
                   .dim = 16,
                   .value_dim = 16,
                   .low = -10,
                   .high = 0,
                   .slow = true});
}

void add_scores(std::vector<Case> &cases) {
  cases.insert(
      cases.end(),
      {{.name = "softcap 20", .rows = 40, .keys = 77, .softcap = 20, .deviation = 8},
       {.name = "softcap 0.5", .rows = 40, .keys = 77, .softcap = 0.5},
       {.name = "softcap 50, causal, dropout, 4 heads on 2",
        .heads = 4,
        .rows = 40,
        .keys = 77,
        .high = 37,
        .softcap = 50,
        .drop = 6554,
        .deviation = 10,
        .grad_lse = true},
       {.name = "dropout 0.1", .rows = 40, .keys = 77, .drop = 6554},
       {.name = "dropout 0.5", .batch = 2, .rows = 33, .keys = 130, .drop = 32768},
       {.name = "dropout but for one draw in 65536", .rows = 40, .keys = 77, .drop = 65535},
       {.name = "dropout, 7 heads on 1, window",
        .batch = 2,
        .heads = 7,
        .kv_heads = 1,
        .rows = 50,
        .keys = 61,
        .low = -13,
        .high = 6,
        .drop = 6554},
       {.name = "gradient of lse", .batch = 2, .rows = 40, .keys = 77, .grad_lse = true},
       {.name = "gradient of lse, strided, dropout",
        .rows = 40,
        .keys = 77,
        .drop = 6554,
        .grad_lse = true,
        .arriving_lse = "bhs2d",
        .lse = "bh-s+d"}});
}

void add_masks(std::vector<Case> &cases) {
  const auto mask = [&](const char *name, int32_t dtype, const char *axes, const char *layout) {
    cases.push_back({.name = name,
                     .batch = 2,
                     .rows = 37,
                     .keys = 77,
                     .mask_dtype = dtype,
                     .mask_axes = axes,
                     .mask = layout});
  };
  mask("bool mask", ORCHARD_BOOL, "bhsd", "bhsd");
  mask("bool mask of keys", ORCHARD_BOOL, "bd", "bhsd");
  mask("bool mask of rows", ORCHARD_BOOL, "bs", "bhsd");
  mask("bool mask, keys outermost", ORCHARD_BOOL, "bhsd", "dhsb");
  mask("bool mask, one for all", ORCHARD_BOOL, "sd", "bhsd");
  mask("bool mask, expanded", ORCHARD_BOOL, "bhsd", "b0h0sd");
  mask("bool mask, backwards", ORCHARD_BOOL, "bhsd", "b-h-s-d-");
  mask("bool mask, every second", ORCHARD_BOOL, "bhsd", "bhsd2");
  mask("fp32 mask", ORCHARD_FLOAT32, "bhsd", "bhsd");
  mask("fp16 mask", ORCHARD_FLOAT16, "bhsd", "bhsd");
  mask("bf16 mask", ORCHARD_BFLOAT16, "bhsd", "bhsd");
  mask("fp64 mask", ORCHARD_FLOAT64, "bhsd", "bhsd");
  mask("fp32 mask of heads and keys", ORCHARD_FLOAT32, "hd", "bhsd");
  mask("fp16 mask, transposed", ORCHARD_FLOAT16, "bhsd", "bhds");
  mask("bf16 mask, every second, padded", ORCHARD_BFLOAT16, "bsd", "bhs+d2");
  mask("fp64 mask, backwards", ORCHARD_FLOAT64, "hsd", "bhs-d-");
  mask("fp32 mask, expanded over keys", ORCHARD_FLOAT32, "bhsd", "bhsd0");
  cases.insert(cases.end(), {{.name = "bool mask, causal, dropout",
                              .batch = 2,
                              .rows = 37,
                              .keys = 77,
                              .high = 40,
                              .drop = 6554,
                              .mask_dtype = ORCHARD_BOOL,
                              .mask_axes = "bsd"},
                             {.name = "fp32 mask, window, softcap",
                              .rows = 37,
                              .keys = 77,
                              .low = -20,
                              .high = 20,
                              .softcap = 10,
                              .deviation = 5,
                              .mask_dtype = ORCHARD_FLOAT32},
                             {.name = "bool mask, empty rows that get NaN",
                              .rows = 37,
                              .keys = 77,
                              .mask_dtype = ORCHARD_BOOL,
                              .empty_every = 3,
                              .grad_lse = true},
                             {.name = "fp32 mask, empty rows that get NaN, dropout",
                              .rows = 37,
                              .keys = 77,
                              .drop = 6554,
                              .mask_dtype = ORCHARD_FLOAT32,
                              .empty_every = 5,
                              .grad_mask = true},
                             {.name = "fp16 mask, every row empty",
                              .rows = 37,
                              .keys = 77,
                              .mask_dtype = ORCHARD_FLOAT16,
                              .empty_every = 1,
                              .grad_lse = true,
                              .grad_mask = true},
                             {.name = "bool mask hides all but a few",
                              .rows = 40,
                              .keys = 300,
                              .mask_dtype = ORCHARD_BOOL,
                              .hidden = 0.98}});
}

void add_mask_gradients(std::vector<Case> &cases) {
  for (int axes = 0; axes < 16; ++axes) {
    std::string named;
    for (int axis = 0; axis < 4; ++axis)
      if (axes >> axis & 1) named += "bhsd"[axis];
    cases.push_back({.name = "gradient of a mask over [" + named + "]",
                     .batch = 2,
                     .heads = 4,
                     .rows = 19,
                     .keys = 37,
                     .dim = 24,
                     .value_dim = 40,
                     .mask_dtype = ORCHARD_FLOAT32,
                     .mask_axes = named,
                     .hidden = 0,
                     .grad_mask = true});
  }
  cases.insert(cases.end(), {{.name = "gradient of a mask, strided",
                              .batch = 2,
                              .heads = 4,
                              .rows = 19,
                              .keys = 37,
                              .mask_dtype = ORCHARD_BFLOAT16,
                              .grad_mask = true,
                              .mask = "bhds",
                              .mask_grad = "d2hs+b"},
                             {.name = "narrow gradient of a mask, two panels and a part, window",
                              .batch = 2,
                              .rows = 150,
                              .keys = 299,
                              .dim = 16,
                              .value_dim = 16,
                              .low = 3,
                              .high = 70,
                              .mask_dtype = ORCHARD_BFLOAT16,
                              .grad_mask = true,
                              .narrow_mask_grad = true},
                             {.name = "narrow gradient of a mask, strided, causal",
                              .heads = 4,
                              .rows = 140,
                              .keys = 61,
                              .high = -20,
                              .mask_dtype = ORCHARD_FLOAT16,
                              .grad_mask = true,
                              .narrow_mask_grad = true,
                              .mask = "bhds",
                              .mask_grad = "d2hs+b"},
                             {.name = "gradient of a mask, backwards",
                              .batch = 2,
                              .rows = 19,
                              .keys = 37,
                              .mask_dtype = ORCHARD_FLOAT64,
                              .mask_axes = "sd",
                              .grad_mask = true,
                              .mask_grad = "bhs-d-"},
                             {.name = "gradient of a mask, causal, softcap, dropout, lse",
                              .batch = 2,
                              .heads = 4,
                              .rows = 50,
                              .keys = 61,
                              .high = 11,
                              .softcap = 10,
                              .drop = 6554,
                              .deviation = 4,
                              .mask_dtype = ORCHARD_FLOAT32,
                              .mask_axes = "hsd",
                              .grad_lse = true,
                              .grad_mask = true},
                             {.name = "gradient of a mask of keys, 150 x 300",
                              .batch = 2,
                              .rows = 150,
                              .keys = 300,
                              .dim = 16,
                              .value_dim = 16,
                              .mask_dtype = ORCHARD_FLOAT32,
                              .mask_axes = "bd",
                              .grad_mask = true,
                              .slow = true}});
}

void add_layouts(std::vector<Case> &cases) {
  const Case base{
      .name = "", .batch = 2, .heads = 4, .rows = 37, .keys = 45, .dim = 40, .value_dim = 24};
  for (const char *layout :
       {"bshd", "sbhd", "bhds", "dbhs", "bhsd2", "bhsd+", "bhs2d", "b+h+s+d+", "bhsd-", "bhs-d",
        "b-h-s-d-", "d2h-s+b", "b0hsd", "bh0sd", "bhs0d", "bhsd0", "b0h0s0d0", "bhs~d"}) {
    Case each = base;
    each.name = std::string("inputs laid out ") + layout;
    each.query = each.key = each.value = each.grad_out = layout;
    cases.push_back(each);
  }
  for (const char *layout : {"bshd", "sbhd", "bhds", "dbhs", "bhsd2", "bhsd+", "bhs2d", "b+h+s+d+",
                             "bhsd-", "bhs-d", "b-h-s-d-", "d2h-s+b"}) {
    Case each = base;
    each.name = std::string("outputs laid out ") + layout;
    each.out = each.lse = each.grad_query = each.grad_key = each.grad_value = layout;
    cases.push_back(each);
  }
  Case mixed = base;
  mixed.name = "each operand in a layout of its own";
  mixed.query = "bshd";
  mixed.key = "bhds";
  mixed.value = "d2h-s+b";
  mixed.grad_out = "b0h0s0d0";
  mixed.out = "sbhd";
  mixed.grad_query = "bhs-d";
  mixed.grad_key = "bhds";
  mixed.grad_value = "bhsd+";
  mixed.high = 8;
  mixed.drop = 6554;
  cases.push_back(mixed);
  Case strided_decode = base;
  strided_decode.name = "2 rows, keys laid out bhds, values bhsd2";
  strided_decode.rows = 2;
  strided_decode.keys = 500;
  strided_decode.key = "bhds";
  strided_decode.value = "bhsd2";
  cases.push_back(strided_decode);
}

void add_nothing(std::vector<Case> &cases) {
  cases.insert(
      cases.end(),
      {{.name = "no batch", .batch = 0},
       {.name = "no heads", .heads = 0, .kv_heads = 0},
       {.name = "no rows", .rows = 0},
       {.name = "no keys", .keys = 0, .grad_lse = true},
       {.name = "no keys, causal, dropout", .keys = 0, .high = 0, .drop = 6554},
       {.name = "no keys, a mask", .keys = 0, .mask_dtype = ORCHARD_FLOAT32, .grad_mask = true},
       {.name = "no keys, a mask of size one",
        .keys = 0,
        .mask_dtype = ORCHARD_FLOAT32,
        .mask_axes = "s",
        .grad_mask = true},
       {.name = "no rows, a mask of keys",
        .rows = 0,
        .mask_dtype = ORCHARD_FLOAT32,
        .mask_axes = "d",
        .grad_mask = true},
       {.name = "no rows, a mask of one row for each head",
        .rows = 0,
        .high = 2,
        .mask_dtype = ORCHARD_BFLOAT16,
        .mask_axes = "bhd",
        .grad_mask = true},
       {.name = "no batch, a mask of keys",
        .batch = 0,
        .mask_dtype = ORCHARD_FLOAT32,
        .mask_axes = "d",
        .grad_mask = true},
       {.name = "no D", .dim = 0},
       {.name = "no Dv", .value_dim = 0, .grad_lse = true},
       {.name = "nothing",
        .batch = 0,
        .heads = 0,
        .kv_heads = 0,
        .rows = 0,
        .keys = 0,
        .dim = 0,
        .value_dim = 0}});
}

void add_decode(std::vector<Case> &cases) {
  const Case base{.name = "", .heads = 2, .kv_heads = 1, .keys = 4097};
  for (int64_t rows = 1; rows <= 4; ++rows) {
    Case each = base;
    each.name = "decode, " + std::to_string(rows) + " of 4097";
    each.rows = rows;
    each.high = each.keys - rows;
    each.slow = rows % 2 == 0;
    cases.push_back(each);
  }
  cases.insert(
      cases.end(),
      {{.name = "decode, one head",
        .heads = 1,
        .kv_heads = 1,
        .rows = 1,
        .keys = 4097,
        .dim = 80,
        .value_dim = 64},
       {.name = "decode, 32 heads on 8, D 128, a cache laid out bshd",
        .heads = 32,
        .kv_heads = 8,
        .rows = 1,
        .keys = 4097,
        .dim = 128,
        .value_dim = 128,
        .slow = true,
        .key = "bshd",
        .value = "bshd"},
       {.name = "decode, mask of keys, dropout, lse",
        .heads = 4,
        .kv_heads = 1,
        .rows = 2,
        .keys = 1500,
        .drop = 6554,
        .mask_dtype = ORCHARD_BOOL,
        .mask_axes = "bd",
        .grad_lse = true},
       {.name = "decode, window", .rows = 3, .keys = 2000, .low = 900, .high = 1400},
       {.name = "decode, softcap, gradient of the mask",
        .batch = 2,
        .rows = 3,
        .keys = 700,
        .softcap = 15,
        .deviation = 5,
        .mask_dtype = ORCHARD_FLOAT16,
        .mask_axes = "hd",
        .grad_mask = true},
       {.name = "decode, every key hidden in one of two rows", .rows = 2, .keys = 700, .low = 699},
       {.name = "decode, window from 647 to 548: nothing",
        .heads = 3,
        .kv_heads = 1,
        .rows = 1,
        .keys = 1395,
        .dim = 7,
        .value_dim = 7,
        .low = 647,
        .high = 548}});
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  add_sizes(cases);
  add_heads(cases);
  add_bands(cases);
  add_scores(cases);
  add_masks(cases);
  add_mask_gradients(cases);
  add_layouts(cases);
  add_nothing(cases);
  add_decode(cases);
  return cases;
}

// Whether this process runs the test.
bool chosen(const Options &options, const std::string &name, bool slow = false) {
  static int count = 0;
  if ((slow && options.quick) || name.find(options.only) == std::string::npos) return false;
  return count++ % options.parts == options.part - 1;
}

// One case in one type: every instruction set, against either edge, forward and backward.
std::string run_case(const Case &what, int32_t dtype, const Options &options) {
  std::string defects;
  Call at_end(what, dtype, Edge::kEnd), at_begin(what, dtype, Edge::kBegin);
  at_end.expect();
  at_begin.expect_as(at_end);
  for (const Edge edge : {Edge::kEnd, Edge::kBegin}) {
    Call &call = edge == Edge::kEnd ? at_end : at_begin;
    int turn = dtype + (edge == Edge::kEnd);
    for (const std::string &isa : options.isas) {
      if (++turn % 2 == 0 && options.quick) continue;  // one edge each
      orchard_select_isa(isa.c_str());
      const char *side = edge == Edge::kEnd ? " at the end" : " at the beginning";
      now_running(what.name + ", " + dtype_name(dtype) + ", " + isa + side);
      alarm(kSecondsPerTest);
      const int threads = edge == Edge::kEnd ? 1 : 3;
      std::string found = call.forward_and_compare(threads);
      if (what.backward) found += call.backward_and_compare(threads);
      if (!found.empty()) defects += "[" + isa + side + "] " + found;
    }
  }
  return defects;
}

// The same bits from any number of threads.
std::string run_threads(const Case &what, int32_t dtype, const Options &options) {
  std::string defects;
  Call call(what, dtype, Edge::kEnd);
  call.expect();
  for (const std::string &isa : options.isas) {
    orchard_select_isa(isa.c_str());
    now_running(what.name + ", any number of threads, " + isa);
    alarm(kSecondsPerTest);
    defects += call.forward(1) + call.backward(1);
    const auto forward = call.forward_bytes(), backward = call.backward_bytes();
    for (const int threads : {2, 3, 8, 0}) {
      defects += call.forward(threads) + call.backward(threads);
      const std::string where =
          " differs with " + std::to_string(threads) + " threads [" + isa + "]; ";
      if (call.forward_bytes() != forward) defects += "forward" + where;
      if (call.backward_bytes() != backward) defects += "backward" + where;
    }
  }
  return defects;
}

// Entry `b` and the query heads from `h` on, of one key head, as a problem of their own.
orchard_tensor part(orchard_tensor whole, int64_t b, int64_t h, int64_t heads) {
  if (whole.data == nullptr) return whole;
  whole.data = address(whole, b, h, 0, 0);
  whole.sizes[0] = 1;
  whole.sizes[1] = whole.sizes[1] == 1 ? 1 : heads;
  return whole;
}

std::string differing(const char *name, const orchard_tensor &whole, const Tensor &alone, int64_t b,
                      int64_t h) {
  const orchard_tensor &own = alone.view();
  for (int64_t g = 0; g < own.sizes[1]; ++g)
    for (int64_t i = 0; i < own.sizes[2]; ++i)
      for (int64_t j = 0; j < own.sizes[3]; ++j)
        if (std::memcmp(address(whole, b, h + g, i, j), address(own, 0, g, i, j),
                        item_size(own.dtype)) != 0)
          return std::string(name) + " differs in row " + std::to_string(i) + "; ";
  return "";
}

// The same bits for a row in another batch, among other heads.
std::string run_alone(const Case &what, int32_t dtype, const Options &options) {
  Call call(what, dtype, Edge::kEnd);
  call.expect();
  const int64_t group = what.heads / what.kv_heads;
  Case single = what;
  single.batch = 1;
  single.heads = group;
  single.kv_heads = 1;
  Call alone(single, dtype, Edge::kBegin);
  std::string defects;
  for (const std::string &isa : options.isas) {
    orchard_select_isa(isa.c_str());
    now_running(what.name + ", alone, " + isa);
    alarm(kSecondsPerTest);
    defects += call.forward(2) + call.backward(2);
    for (int64_t b = 0; b < what.batch; ++b)
      for (int64_t k = 0; k < what.kv_heads; ++k) {
        orchard_forward_args &f = alone.forward_args;
        orchard_backward_args &g = alone.backward_args;
        const orchard_backward_args &from = call.backward_args;
        f.query = g.query = part(from.query, b, k * group, group);
        f.key = g.key = part(from.key, b, k, 1);
        f.value = g.value = part(from.value, b, k, 1);
        f.mask = g.mask = part(from.mask, b, k * group, group);
        g.out = part(from.out, b, k * group, group);
        g.lse = part(from.lse, b, k * group, group);
        g.grad_out = part(from.grad_out, b, k * group, group);
        g.grad_lse = part(from.grad_lse, b, k * group, group);
        std::string found = alone.forward(1) + alone.backward(1);
        found += differing("out", call.out.view(), alone.out, b, k * group);
        found += differing("lse", call.lse.view(), alone.lse, b, k * group);
        found += differing("grad_query", call.grad_query.view(), alone.grad_query, b, k * group);
        found += differing("grad_key", call.grad_key.view(), alone.grad_key, b, k);
        found += differing("grad_value", call.grad_value.view(), alone.grad_value, b, k);
        if (!found.empty())
          defects += "[" + isa + ", batch " + std::to_string(b) + ", key head " +
                     std::to_string(k) + "] " + found;
      }
  }
  return defects;
}

std::vector<Case> determinism_cases() {
  return {{.name = "plain", .batch = 3, .heads = 4, .rows = 130, .keys = 150, .slow = true},
          {.name = "causal, D 80",
           .batch = 2,
           .heads = 2,
           .kv_heads = 1,
           .rows = 150,
           .keys = 150,
           .dim = 80,
           .value_dim = 40,
           .high = 0},
          {.name = "mask, softcap",
           .batch = 3,
           .rows = 40,
           .keys = 300,
           .dim = 40,
           .softcap = 10,
           .mask_dtype = ORCHARD_FLOAT32,
           .mask_axes = "hsd",
           .grad_lse = true,
           .slow = true},
          {.name = "decode", .batch = 3, .heads = 8, .rows = 1, .keys = 2500, .slow = true},
          {.name = "decode, 3 rows", .batch = 2, .rows = 3, .keys = 1300},
          {.name = "decode, 2 rows, D 128",
           .batch = 3,
           .rows = 2,
           .keys = 1700,
           .dim = 128,
           .value_dim = 128,
           .slow = true}};
}

void run_determinism(Report &report, const Options &options) {
  for (const Case &what : determinism_cases())
    for (const int32_t dtype : kDtypes) {
      const std::string name = what.name + ", " + dtype_name(dtype);
      if (chosen(options, "any number of threads: " + name, what.slow))
        report.test("any number of threads: " + name, run_threads(what, dtype, options));
      if (chosen(options, "alone or in a batch: " + name, what.slow))
        report.test("alone or in a batch: " + name, run_alone(what, dtype, options));
    }
  Case random{.name = "dropout, gradient of a mask",
              .batch = 2,
              .heads = 6,
              .rows = 70,
              .keys = 140,
              .drop = 6554,
              .mask_dtype = ORCHARD_FLOAT32,
              .mask_axes = "d",
              .grad_lse = true,
              .grad_mask = true};
  for (const int32_t dtype : kDtypes) {
    const std::string name = "any number of threads: " + random.name + ", " + dtype_name(dtype);
    if (chosen(options, name)) report.test(name, run_threads(random, dtype, options));
  }
}

// A mask of the lowest finite number absorbs every score: such a row is the mean of the values,
// not an empty one. The budget of the analysis is no use at that size; the row is exact.
std::string run_lowest(const std::string &isa) {
  const Case what{.name = "lowest",
                  .rows = 5,
                  .keys = 64,
                  .mask_dtype = ORCHARD_FLOAT32,
                  .mask_axes = "sd",
                  .backward = false};
  Call call(what, ORCHARD_FLOAT32, Edge::kEnd);
  Tensor mask({1, 1, what.rows, what.keys}, ORCHARD_FLOAT32, "bhsd", Edge::kEnd);
  mask.assign(std::vector<double>(what.rows * what.keys, -FLT_MAX));
  call.forward_args.mask = mask.view();
  orchard_select_isa(isa.c_str());
  now_running("the lowest finite mask, " + isa);
  std::string defects = call.forward(1);
  for (int64_t h = 0; h < what.heads; ++h)
    for (int64_t i = 0; i < what.rows; ++i) {
      const double lse = load_item(address(call.lse.view(), 0, h, i, 0), ORCHARD_FLOAT32);
      if (!std::isfinite(lse)) return defects + "[" + isa + "] lse is " + std::to_string(lse);
      for (int64_t d = 0; d < what.value_dim; ++d) {
        double mean = 0;
        for (int64_t j = 0; j < what.keys; ++j)
          mean += load_item(address(call.value.view(), 0, h, j, d), ORCHARD_FLOAT32) / 64;
        const double out = load_item(address(call.out.view(), 0, h, i, d), ORCHARD_FLOAT32);
        if (!(std::fabs(out - mean) < 64 * 0x1p-23))
          return defects + "[" + isa + "] out is " + std::to_string(out) + ", not the mean " +
                 std::to_string(mean);
      }
    }
  return defects;
}

// exp2 within 1.5e-7 of itself on [-126, 127.4], 0 or subnormal below, inf above.
std::string run_exp2(const std::string &isa) {
  orchard_select_isa(isa.c_str());
  std::vector<float> x{0.0f, -0.0f, -INFINITY, INFINITY, NAN, -1e30f, -150.0f, -127.5f, 200.0f};
  const size_t special = x.size();
  for (int step = 0; step <= 2'000'000; ++step) x.push_back(-130.0f + 257.4f * step / 2'000'000);
  for (int i = 0; i < 160; ++i) x.push_back(std::ldexp(i % 2 ? -1.0f : 1.0f, -i));
  std::vector<float> y(x.size());
  orchard_exp2(x.data(), y.data(), x.size());
  if (y[0] != 1 || y[1] != 1 || y[2] != 0 || y[3] != INFINITY || !std::isnan(y[4]) || y[5] != 0 ||
      y[6] != 0 || !(y[7] >= 0 && y[7] < FLT_MIN) || y[8] != INFINITY)
    return "a special value is wrong";
  for (size_t at = special; at < x.size(); ++at) {
    const double exact = std::exp2(static_cast<double>(x[at]));
    const bool right =
        x[at] < -126 ? y[at] >= 0 && y[at] <= FLT_MIN : std::fabs(y[at] - exact) <= 1.5e-7 * exact;
    if (!right)
      return "exp2(" + std::to_string(x[at]) + ") is off by " +
             std::to_string(std::fabs(y[at] / exact - 1) * 1e7) + "e-7";
  }
  return "";
}

std::string run_philox() {
  // The generator's published answer for an all-zero key and counter.
  constexpr uint32_t kWords[] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}, kSeed[2] = {};
  for (uint32_t key = 0; key < 8; ++key)
    if (random_bits(kSeed, 0, 0, key) != (kWords[key / 2] >> key % 2 * 16 & 0xffff))
      return "the reference draws other bits";
  return "";
}

int run(const Options &options) {
  if (options.list) {
    for (const Case &what : all_cases()) std::cout << what.name << "\n";
    return 0;
  }
  Report report;
  if (chosen(options, "philox")) report.test("philox", run_philox());
  for (const std::string &isa : options.isas) {
    if (chosen(options, "exp2")) report.test("exp2, " + isa, run_exp2(isa));
    if (chosen(options, "the lowest finite mask"))
      report.test("the lowest finite mask, " + isa, run_lowest(isa));
  }
  for (const Case &what : all_cases()) {
    for (const int32_t dtype : kDtypes) {
      const std::string name = what.name + ", " + dtype_name(dtype);
      if (chosen(options, name, what.slow)) report.test(name, run_case(what, dtype, options));
    }
  }
  run_determinism(report, options);
  return report.finish();
}

}  // namespace
}  // namespace orchard_test

int main(int argc, char **argv) {
  using namespace orchard_test;
  Options options;
  options.isas = split(orchard_isa_available());
  for (int at = 1; at < argc; ++at) {
    const std::string word = argv[at];
    if (word == "--quick") {
      options.quick = true;
    } else if (word == "--list") {
      options.list = true;
    } else if (word == "--only" && at + 1 < argc) {
      options.only = argv[++at];
    } else if (word == "--part" && at + 1 < argc &&
               std::sscanf(argv[at + 1], "%d/%d", &options.part, &options.parts) == 2) {
      ++at;
    } else if (word == "--isa" && at + 1 < argc) {
      const std::string names = argv[++at];
      options.isas = names == "best" ? std::vector{options.isas.front()} : split(names);
    } else {
      std::cerr
          << "usage: driver [--quick] [--part I/N] [--list] [--only TEXT] [--isa best|NAME,NAME]\n";
      return 2;
    }
  }
  for (const std::string &isa : options.isas)
    if (orchard_select_isa(isa.c_str()) != ORCHARD_OK) {
      std::cerr << orchard_last_error() << "\n";
      return 2;
    }
  report_faults();
  return run(options);
}
