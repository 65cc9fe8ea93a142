// Attention and its gradient in double precision, over the structs of the C ABI, each number with
// the error that a correct kernel may make.
//
// The budget is a forward error analysis, not a measured tolerance. A kernel reads operands as they
// are, accumulates in fp32 and rounds to the operands' type three things: the probabilities and the
// derivatives of the scores that it multiplies with, and its results. With e = 2^-24 and u the unit
// roundoff of the operands' type:
//   sums      n terms in any order are off by min(n, 6 sqrt(n)) e times the sum of magnitudes: the
//             bound that always holds, or the one that holds but for one in a hundred million for
//             rounding errors of either sign (Higham and Mary 2019).
//   score     the dot product's sum, 3 e of it for the scale; with softcap 6 e of the cap for tanh
//             (from an exp2 good to 2 ulp); e for each addition; 2 e of the score and of what is
//             subtracted from it before exp.
//   weight    exp turns the score's absolute error into a relative one, and adds 6 e; the softmax
//             adds the mean of the row's score errors and two sums' errors.
//   gradient  the same through p = exp(s - lse), dP = dO . V, delta = dO . out (out as stored: each
//             element off by u or half the least step), dS = p (f dP - delta + dlse).
//   rounding  to the operands' type: u of each weight and of each dS. They are independent, so at
//             most 6 times the root of the sum of squares, unless operands repeat themselves in
//             memory; then the sum of magnitudes. The result: u of itself, half the least step.
// All to first order; a factor 1 + 4 u covers the rest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "orchard.h"

namespace orchard_test {

struct Expected {
  std::vector<double> value, budget;  // every element, the last axis innermost
};

struct ForwardExpected {
  Expected out, lse;
};

struct BackwardExpected {
  Expected grad_query, grad_key, grad_value, grad_mask;
};

ForwardExpected expect_forward(const orchard_forward_args &args);

// From the operands and what arrives; args.out and args.lse are not read.
BackwardExpected expect_backward(const orchard_backward_args &args);

// The 16 random bits of probability (plane, row, key), plane = b * Hq + h.
uint32_t random_bits(const uint32_t seed[2], uint32_t plane, uint32_t row, uint32_t key);

// "" or the element that is furthest beyond its budget.
std::string compare(const std::string &name, const orchard_tensor &found, const Expected &expected);

}  // namespace orchard_test
