// exp2 and tanh on vectors.
#pragma once

#include "vector.h"

namespace orchard::ORCHARD_ISA {

// 2^x with a relative error below 1.5e-7 (under 2 ulp) for x in [-126, 127.4]. Below -126 it is 0
// or the subnormal; from 127.5 on inf; exp2(0) is 1 exactly, and NaN stays NaN.
ORCHARD_INLINE Floats exp2(Floats x) {
#if defined(__AVX512F__)
  const Floats clamped = larger(splat(-200.0f), x);  // x where it is NaN
  const Floats whole =
      (Floats)_mm512_roundscale_ps((__m512)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats f = clamped - whole;
#else
  const Floats high = splat(128.0f);
  Floats clamped = larger(splat(-127.0f), x);  // x where it is NaN
  clamped = clamped > high ? high : clamped;
  const Floats magic = splat(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
  const Floats shifted = clamped + magic;
  const Floats f = clamped - (shifted - magic);
#endif
  // Minimax of 2^f on [-0.5, 0.5] with the constant held at 1: 2.0e-9 before rounding.
  Floats p = splat(0x1.41fbbcp-13f);
  p = p * f + 0x1.5f3e54p-10f;
  p = p * f + 0x1.3b2d4cp-7f;
  p = p * f + 0x1.c6aee8p-5f;
  p = p * f + 0x1.ebfbdcp-3f;
  p = p * f + 0x1.62e430p-1f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  const Ints exponent = bits_as<Ints>(shifted) << 23;
  const Floats scaled = p * bits_as<Floats>(exponent + (127 << 23));
  return x < splat(-126.0f) ? splat(0.0f) : scaled;
#endif
}

constexpr float kLog2e = 1.44269504088896340736f;

// tanh within 4 ulp: a polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
ORCHARD_INLINE Floats tanh(Floats x) {
  const Floats s = x * x;
  Floats p = splat(-0x1.8256d6p-8f);
  p = p * s + 0x1.54b854p-6f;
  p = p * s - 0x1.b898d4p-5f;
  p = p * s + 0x1.1109aep-3f;
  p = p * s - 0x1.55553ep-2f;
  const Floats near = x + x * s * p;
  const Floats grown = exp2(x * (2 * kLog2e));
  const Floats far = 1.0f - 2.0f / (grown + 1.0f);
  const Ints small = s < splat(0.36f);
  return select(small, near, far);
}

}  // namespace orchard::ORCHARD_ISA
