// metal_stdlib for clang on a CPU. No host header is included: their names would clash.
//
// Differences to Metal that stay: a comparison of vectors gives -1 and 0 as integers, not bool;
// bool vectors are indexed with [], have no .x, and cannot lie in memory; a struct in device or
// constant memory is read member by member; fast:: and precise:: are the same functions; floats
// are not contracted.
#pragma once
#include "runtime.h"

#define thread
#define kernel static
#ifdef EMU_FLAT
#define device
#define constant
#define threadgroup
#else
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#endif
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST static constant constexpr const

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF INFINITY
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX 65504.0f
#define HALF_MIN 6.103515625e-05f
#define HALF_EPSILON 9.765625e-04f
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define M_PI_F 3.14159274f
#define M_E_F 2.71828175f
#define M_LOG2E_F 1.44269502f
#define M_LN2_F 0.693147182f
#define M_SQRT2_F 1.41421354f

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong uintptr_t;

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <class T, T V>
struct integral_constant {
  static constexpr T value = V;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return V; }
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <bool B>
using bool_constant = integral_constant<bool, B>;

// clang-format off
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> struct remove_volatile { using type = T; };
template <class T> struct remove_volatile<volatile T> { using type = T; };
template <class T> struct remove_cv { using type = typename remove_volatile<typename remove_const<T>::type>::type; };
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T&> { using type = T; };
template <class T> struct remove_reference<T&&> { using type = T; };
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> using decay_t = remove_cv_t<remove_reference_t<T>>;
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template <class...> using void_t = void;
template <class T> struct is_integral : bool_constant<__is_integral(T)> {};
template <class T> struct is_floating_point : bool_constant<__is_floating_point(T)> {};
template <class T> struct is_signed : bool_constant<__is_signed(T)> {};
template <class T> struct is_unsigned : bool_constant<__is_unsigned(T)> {};
template <class A, class B> struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class T> struct make_unsigned { using type = __make_unsigned(T); };
template <class T> struct make_signed { using type = __make_signed(T); };
template <> struct is_floating_point<half> : true_type {};
template <> struct is_floating_point<bfloat> : true_type {};
template <class T> struct is_arithmetic : bool_constant<is_integral<T>::value || is_floating_point<T>::value> {};
template <class A, class B> constexpr constant bool is_same_v = is_same<A, B>::value;
template <class T> constexpr constant bool is_integral_v = is_integral<T>::value;
template <class T> constexpr constant bool is_floating_point_v = is_floating_point<T>::value;
template <class T> constexpr constant bool is_arithmetic_v = is_arithmetic<T>::value;
template <class T> constexpr constant bool is_scalar_v = is_arithmetic<T>::value;
template <class T> constexpr constant bool is_signed_v = is_signed<T>::value;
template <class T> constexpr constant bool is_unsigned_v = is_unsigned<T>::value;
template <class A, class B> constexpr constant bool is_convertible_v = is_convertible<A, B>::value;
template <class T> using make_unsigned_t = typename make_unsigned<T>::type;
template <class T> using make_signed_t = typename make_signed<T>::type;
template <class T> remove_reference_t<T>& declval();
// clang-format on

template <class T, size_t N>
struct array {
  T elements[N];
  constexpr T &operator[](size_t i) { return elements[i]; }
  constexpr const T &operator[](size_t i) const { return elements[i]; }
  constexpr size_t size() const { return N; }
};
}  // namespace metal

#define EMU_VECTORS(T)             \
  using T##2 = ::metal::vec<T, 2>; \
  using T##3 = ::metal::vec<T, 3>; \
  using T##4 = ::metal::vec<T, 4>;
EMU_VECTORS(bool)
EMU_VECTORS(char)
EMU_VECTORS(uchar)
EMU_VECTORS(short)
EMU_VECTORS(ushort)
EMU_VECTORS(int)
EMU_VECTORS(uint)
EMU_VECTORS(long)
EMU_VECTORS(ulong)
EMU_VECTORS(half)
EMU_VECTORS(bfloat)
EMU_VECTORS(float)

#define EMU_SITE emu_site site = {__builtin_FILE(), __builtin_LINE(), __builtin_COLUMN()}

// ---- What the rewriter puts into the source

namespace emu {
using ::metal::vec;

template <class T>
struct shape {
  using element = T;
  static constexpr int size = 0;
};
template <class T, int N>
struct shape<vec<T, N>> {
  using element = T;
  static constexpr int size = N;
};

template <class T, class A>
constexpr void append(T &to, int &at, A a) {
  using E = typename shape<T>::element;
  if constexpr (shape<A>::size == 0)
    to[at++] = E(a);
  else
    for (int i = 0; i < shape<A>::size; i++) to[at++] = E(a[i]);
}

template <class... A>
constexpr int total = ((shape<A>::size ? shape<A>::size : 1) + ... + 0);

// T(a...) as Metal has it for vectors: splat, convert, concatenate; for others as C++ has it.
template <class T, class... A>
constexpr T mk(A... a) {
  constexpr int size = shape<T>::size;
  using E = typename shape<T>::element;
  if constexpr (size == 0) {
    if constexpr (sizeof...(A) == 1)
      return static_cast<T>((..., a));
    else
      return T(a...);
  } else if constexpr (sizeof...(A) == 0) {
    return T{};
  } else if constexpr (sizeof...(A) == 1 && (... && (shape<A>::size == 0))) {
    T to = (..., E(a));
    return to;
  } else if constexpr ((... && (shape<A>::size == 0))) {
    static_assert(sizeof...(A) == size, "wrong number of vector elements");
    return T{E(a)...};
  } else {
    static_assert(total<A...> == size, "wrong number of vector elements");
    T to{};
    int at = 0;
    (append(to, at, a), ...);
    return to;
  }
}

template <class T>
struct cast {
  template <class A>
  friend constexpr T operator->*(cast, A a) {
    return mk<T>(a);
  }
};

template <class T>
struct innermost {
  using type = T;
};
template <class T, unsigned long N>
struct innermost<T[N]> : innermost<T> {};

template <class T, unsigned Slot, unsigned Align>
struct declared {
#ifdef __APPLE__
  __attribute__((section("__DATA,emu_arrays"), used))
#else
  __attribute__((section("emu_arrays"), used))
#endif
  static constexpr emu_array_info info = {Slot, sizeof(T), Align > alignof(T) ? Align : alignof(T),
                                          sizeof(typename innermost<T>::type)};
};

template <class T, unsigned Slot, unsigned Align>
METAL_FUNC threadgroup T &array() {
  (void)&declared<T, Slot, Align>::info;
  return *(threadgroup T *)(unsigned long)emu_array(Slot);
}

// A kernel's parameter: a buffer if code >= 0, else a built-in value.
struct launch {
  void *const *buffers;
  const emu_u32 (*builtins)[3];
};

// Bytes of a number, negative if it is floating; 0 for what is not made of one kind of number.
template <class T>
constexpr int scalar_of() {
  using E = ::metal::remove_cv_t<typename shape<::metal::remove_cv_t<T>>::element>;
  if constexpr (::metal::is_floating_point<E>::value)
    return -int(sizeof(E));
  else if constexpr (::metal::is_integral<E>::value)
    return int(sizeof(E));
  else
    return 0;
}

template <class P>
struct parameter {
  static constexpr int scalar = 0;
  static P get(launch from, int code) {
    const emu_u32 *v = from.builtins[-1 - code];
    constexpr int size = shape<P>::size;
    if constexpr (size == 0)
      return P(v[0]);
    else if constexpr (size == 2)
      return mk<P>(v[0], v[1]);
    else
      return mk<P>(v[0], v[1], v[2]);
  }
};
#define EMU_PARAMETER(space)                               \
  template <class T>                                       \
  struct parameter<space T *> {                            \
    static constexpr int scalar = scalar_of<T>();          \
    static space T *get(launch from, int code) {           \
      return (space T *)(unsigned long)from.buffers[code]; \
    }                                                      \
  };                                                       \
  template <class T>                                       \
  struct parameter<space T &> {                            \
    static constexpr int scalar = scalar_of<T>();          \
    static space T &get(launch from, int code) {           \
      emu_require(from.buffers[code], sizeof(T));          \
      return *parameter<space T *>::get(from, code);       \
    }                                                      \
  };
EMU_PARAMETER(device)
#ifndef EMU_FLAT
EMU_PARAMETER(constant)
#endif

template <int... Codes, class... P>
METAL_FUNC void invoke(void (*f)(P...), launch from) {
  f(parameter<P>::get(from, Codes)...);
}

// What a kernel's buffer is an array of, as scalar_of says it.
template <int... Codes, class... P>
constexpr int scalar(void (*)(P...), int buffer) {
  int found = 0;
  ((found = Codes == buffer ? parameter<P>::scalar : found), ...);
  return found;
}
}  // namespace emu

template <class T, class A>
constexpr T as_type(A a) {
  return __builtin_bit_cast(T, a);
}

// ---- Arithmetic

namespace metal {
template <class T>
struct numeric_limits;
#define EMU_INTEGER_LIMITS(T)                                                                     \
  template <>                                                                                     \
  struct numeric_limits<T> {                                                                      \
    static constexpr T max() { return T(-1) > T(0) ? T(-1) : T(~(1ull << (sizeof(T) * 8 - 1))); } \
    static constexpr T min() { return T(-1) > T(0) ? T(0) : T(1ull << (sizeof(T) * 8 - 1)); }     \
    static constexpr T lowest() { return min(); }                                                 \
    static constexpr bool is_signed = T(-1) < T(0);                                               \
    static constexpr bool is_integer = true;                                                      \
  };
EMU_INTEGER_LIMITS(char)
EMU_INTEGER_LIMITS(int8_t)
EMU_INTEGER_LIMITS(uchar)
EMU_INTEGER_LIMITS(short)
EMU_INTEGER_LIMITS(ushort)
EMU_INTEGER_LIMITS(int)
EMU_INTEGER_LIMITS(uint)
EMU_INTEGER_LIMITS(long)
EMU_INTEGER_LIMITS(ulong)
#define EMU_FLOAT_LIMITS(T, MAX, MIN, EPSILON)            \
  template <>                                             \
  struct numeric_limits<T> {                              \
    static constexpr T max() { return T(MAX); }           \
    static constexpr T min() { return T(MIN); }           \
    static constexpr T lowest() { return T(-MAX); }       \
    static constexpr T epsilon() { return T(EPSILON); }   \
    static constexpr T infinity() { return T(INFINITY); } \
    static constexpr T quiet_NaN() { return T(NAN); }     \
    static constexpr bool is_signed = true;               \
    static constexpr bool is_integer = false;             \
  };
EMU_FLOAT_LIMITS(float, __FLT_MAX__, __FLT_MIN__, __FLT_EPSILON__)
EMU_FLOAT_LIMITS(half, HALF_MAX, HALF_MIN, HALF_EPSILON)
EMU_FLOAT_LIMITS(bfloat, 3.38953139e38f, __FLT_MIN__, 0.0078125f)

inline namespace math {
// Scalars are overloads, not templates, so that a call that Metal finds ambiguous is so here.
#define EMU_UNARY_AS(T, name, expression) \
  constexpr T name(T value) {             \
    float x = float(value);               \
    return T(expression);                 \
  }
#define EMU_UNARY(name, expression)                   \
  EMU_UNARY_AS(float, name, expression)               \
  EMU_UNARY_AS(half, name, expression)                \
  EMU_UNARY_AS(bfloat, name, expression)              \
  template <class T, int N>                           \
  constexpr vec<T, N> name(vec<T, N> x) {             \
    vec<T, N> r{};                                    \
    for (int i = 0; i < N; i++) r[i] = name(T(x[i])); \
    return r;                                         \
  }
EMU_UNARY(exp, __builtin_expf(x))
EMU_UNARY(exp2, __builtin_exp2f(x))
EMU_UNARY(exp10, __builtin_powf(10.0f, x))
EMU_UNARY(log, __builtin_logf(x))
EMU_UNARY(log2, __builtin_log2f(x))
EMU_UNARY(log10, __builtin_log10f(x))
EMU_UNARY(sqrt, __builtin_sqrtf(x))
EMU_UNARY(rsqrt, float(1.0 / __builtin_sqrt(double(x))))
EMU_UNARY(sin, __builtin_sinf(x))
EMU_UNARY(cos, __builtin_cosf(x))
EMU_UNARY(tan, __builtin_tanf(x))
EMU_UNARY(asin, __builtin_asinf(x))
EMU_UNARY(acos, __builtin_acosf(x))
EMU_UNARY(atan, __builtin_atanf(x))
EMU_UNARY(sinh, __builtin_sinhf(x))
EMU_UNARY(cosh, __builtin_coshf(x))
EMU_UNARY(tanh, __builtin_tanhf(x))
EMU_UNARY(asinh, __builtin_asinhf(x))
EMU_UNARY(acosh, __builtin_acoshf(x))
EMU_UNARY(atanh, __builtin_atanhf(x))
EMU_UNARY(floor, __builtin_floorf(x))
EMU_UNARY(ceil, __builtin_ceilf(x))
EMU_UNARY(round, __builtin_roundf(x))
EMU_UNARY(rint, __builtin_rintf(x))
EMU_UNARY(trunc, __builtin_truncf(x))
EMU_UNARY(fract, x - __builtin_floorf(x) >= 1.0f ? 0x1.fffffep-1f : x - __builtin_floorf(x))
EMU_UNARY(fabs, __builtin_fabsf(x))
EMU_UNARY(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f)
EMU_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))

#define EMU_TEST_AS(T, name, expression) \
  constexpr bool name(T value) {         \
    float x = float(value);              \
    return expression;                   \
  }
#define EMU_TEST(name, expression)                    \
  EMU_TEST_AS(float, name, expression)                \
  EMU_TEST_AS(half, name, expression)                 \
  EMU_TEST_AS(bfloat, name, expression)               \
  template <class T, int N>                           \
  constexpr vec<bool, N> name(vec<T, N> x) {          \
    vec<bool, N> r{};                                 \
    for (int i = 0; i < N; i++) r[i] = name(T(x[i])); \
    return r;                                         \
  }
EMU_TEST(isnan, x != x)
EMU_TEST(isinf, __builtin_fabsf(x) == INFINITY)
EMU_TEST(isfinite, __builtin_fabsf(x) < INFINITY)
EMU_TEST(signbit, __builtin_bit_cast(int, x) < 0)

#define EMU_BINARY_AS(T, F, name, expression) \
  constexpr T name(T first, T second) {       \
    F x = F(first), y = F(second);            \
    return T(expression);                     \
  }
#define EMU_BINARY_VECTOR(name)                                \
  template <class T, int N>                                    \
  constexpr vec<T, N> name(vec<T, N> x, vec<T, N> y) {         \
    vec<T, N> r{};                                             \
    for (int i = 0; i < N; i++) r[i] = name(T(x[i]), T(y[i])); \
    return r;                                                  \
  }
#define EMU_BINARY(name, expression)             \
  EMU_BINARY_AS(float, float, name, expression)  \
  EMU_BINARY_AS(half, float, name, expression)   \
  EMU_BINARY_AS(bfloat, float, name, expression) \
  EMU_BINARY_VECTOR(name)
#define EMU_INTEGERS(name, expression)            \
  EMU_BINARY_AS(char, char, name, expression)     \
  EMU_BINARY_AS(int8_t, int8_t, name, expression) \
  EMU_BINARY_AS(uchar, uchar, name, expression)   \
  EMU_BINARY_AS(short, short, name, expression)   \
  EMU_BINARY_AS(ushort, ushort, name, expression) \
  EMU_BINARY_AS(int, int, name, expression)       \
  EMU_BINARY_AS(uint, uint, name, expression)     \
  EMU_BINARY_AS(long, long, name, expression)     \
  EMU_BINARY_AS(ulong, ulong, name, expression)
EMU_BINARY(pow, __builtin_powf(x, y))
EMU_BINARY(powr, __builtin_powf(x, y))
EMU_BINARY(atan2, __builtin_atan2f(x, y))
EMU_BINARY(fmod, __builtin_fmodf(x, y))
EMU_BINARY(copysign, __builtin_copysignf(x, y))
EMU_BINARY(fdim, __builtin_fdimf(x, y))
EMU_BINARY(fmax, __builtin_fmaxf(x, y))
EMU_BINARY(fmin, __builtin_fminf(x, y))
EMU_BINARY(step, y < x ? 0.0f : 1.0f)
EMU_BINARY(max, __builtin_fmaxf(x, y))
EMU_BINARY(min, __builtin_fminf(x, y))
EMU_INTEGERS(max, x > y ? x : y)
EMU_INTEGERS(min, x < y ? x : y)
EMU_INTEGERS(absdiff, x > y ? x - y : y - x)

#define EMU_ABS(T) \
  constexpr T abs(T x) { return x < T(0) ? T(-x) : x; }
EMU_ABS(char)
EMU_ABS(short)
EMU_ABS(int)
EMU_ABS(long)
constexpr float abs(float x) { return __builtin_fabsf(x); }
constexpr half abs(half x) { return half(__builtin_fabsf(float(x))); }
constexpr bfloat abs(bfloat x) { return bfloat(__builtin_fabsf(float(x))); }
template <class T, int N>
constexpr vec<T, N> abs(vec<T, N> x) {
  vec<T, N> r{};
  for (int i = 0; i < N; i++) r[i] = abs(T(x[i]));
  return r;
}

template <class T>
constexpr T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T, int N>
constexpr vec<T, N> clamp(vec<T, N> x, T low, T high) {
  return min(max(x, vec<T, N>(low)), vec<T, N>(high));
}
template <class T>
constexpr T mix(T x, T y, T a) {
  return x + (y - x) * a;
}
constexpr float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// Rounded to odd, so that rounding once more to fewer bits is right.
constexpr float to_odd(double x) {
  float near = float(x);
  int bits = __builtin_bit_cast(int, near);
  if (double(near) != x && !(bits & 1)) bits += (x > near) == (near > 0) ? 1 : -1;
  return __builtin_bit_cast(float, bits);
}
constexpr half fma(half a, half b, half c) {
  return half(to_odd(double(float(a)) * float(b) + float(c)));
}
constexpr bfloat fma(bfloat a, bfloat b, bfloat c) {
  return bfloat(to_odd(double(float(a)) * float(b) + float(c)));
}
template <class T, int N>
constexpr vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> r{};
  for (int i = 0; i < N; i++) r[i] = fma(T(a[i]), T(b[i]), T(c[i]));
  return r;
}
inline float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
inline half ldexp(half x, int e) { return half(__builtin_ldexpf(float(x), e)); }
inline float sincos(float x, thread float &c) {
  c = __builtin_cosf(x);
  return __builtin_sinf(x);
}
inline float divide(float x, float y) { return x / y; }
}  // namespace math

namespace fast {
using namespace math;
}
namespace precise {
using namespace math;
}

template <class T>
constexpr bool isunordered(T x, T y) {
  return isnan(x) || isnan(y);
}
template <class T>
constexpr bool isordered(T x, T y) {
  return !isunordered(x, y);
}

template <class T, class C>
constexpr T select(T a, T b, C c) {
  if constexpr (emu::shape<C>::size == 0) {
    return c ? b : a;
  } else {
    T r{};
    for (int i = 0; i < emu::shape<T>::size; i++) r[i] = c[i] ? b[i] : a[i];
    return r;
  }
}
template <class T>
constexpr bool any(T x) {
  if constexpr (emu::shape<T>::size == 0)
    return bool(x);
  else {
    bool r = false;
    for (int i = 0; i < emu::shape<T>::size; i++) r = r || x[i];
    return r;
  }
}
template <class T>
constexpr bool all(T x) {
  if constexpr (emu::shape<T>::size == 0)
    return bool(x);
  else {
    bool r = true;
    for (int i = 0; i < emu::shape<T>::size; i++) r = r && x[i];
    return r;
  }
}
template <class T, int N>
constexpr T dot(vec<T, N> x, vec<T, N> y) {
  T sum = x[0] * y[0];
  for (int i = 1; i < N; i++) sum += x[i] * y[i];
  return sum;
}
template <class T, int N>
inline T length(vec<T, N> x) {
  return sqrt(dot(x, x));
}

constexpr int mulhi(int x, int y) { return int(long(x) * long(y) >> 32); }
constexpr uint mulhi(uint x, uint y) { return uint(ulong(x) * ulong(y) >> 32); }
constexpr long mulhi(long x, long y) { return long((__int128)x * y >> 64); }
constexpr ulong mulhi(ulong x, ulong y) { return ulong((unsigned __int128)x * y >> 64); }
template <int N>
constexpr vec<uint, N> mulhi(vec<uint, N> x, vec<uint, N> y) {
  vec<uint, N> r{};
  for (int i = 0; i < N; i++) r[i] = mulhi(uint(x[i]), uint(y[i]));
  return r;
}
template <class T>
constexpr T popcount(T x) {
  return T(__builtin_popcountll(make_unsigned_t<T>(x)));
}
template <class T>
constexpr T clz(T x) {
  return x ? T(__builtin_clzll(make_unsigned_t<T>(x)) - (64 - 8 * int(sizeof(T))))
           : T(8 * sizeof(T));
}
template <class T>
constexpr T ctz(T x) {
  return x ? T(__builtin_ctzll(make_unsigned_t<T>(x))) : T(8 * sizeof(T));
}
template <class T>
constexpr T reverse_bits(T x) {
  T r = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); i++) r |= T(T(x >> i & 1) << (8 * sizeof(T) - 1 - i));
  return r;
}
template <class T>
constexpr T rotate(T x, T n) {
  using U = make_unsigned_t<T>;
  constexpr unsigned bits = 8 * sizeof(T);
  unsigned by = unsigned(n) % bits;
  return by ? T(U(U(x) << by) | U(U(x) >> (bits - by))) : x;
}

// ---- Atomics

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

}  // namespace metal
namespace emu {
template <class T, class F>
METAL_FUNC T update(unsigned long address, F change) {
  T *p = (T *)address;
  emu_atomic_access(p, sizeof(T));
  T old, wanted;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do wanted = change(old);
  while (!__atomic_compare_exchange(p, &old, &wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
}  // namespace emu
namespace metal {
#define EMU_ATOMIC(space, name, expression)                                                 \
  template <class T, class U>                                                               \
  inline T atomic_##name##_explicit(volatile space atomic<T> *p, U operand, memory_order) { \
    T y = T(operand);                                                                       \
    return emu::update<T>((unsigned long)p, [=](T x) { return T(expression); });            \
  }
#define EMU_ATOMICS(space)                                                                         \
  EMU_ATOMIC(space, fetch_add, x + y)                                                              \
  EMU_ATOMIC(space, fetch_sub, x - y)                                                              \
  EMU_ATOMIC(space, fetch_max, x > y ? x : y)                                                      \
  EMU_ATOMIC(space, fetch_min, x < y ? x : y)                                                      \
  EMU_ATOMIC(space, fetch_and, x &y)                                                               \
  EMU_ATOMIC(space, fetch_or, x | y)                                                               \
  EMU_ATOMIC(space, fetch_xor, x ^ y)                                                              \
  EMU_ATOMIC(space, exchange, y)                                                                   \
  template <class T>                                                                               \
  inline T atomic_load_explicit(const volatile space atomic<T> *p, memory_order) {                 \
    return emu::update<T>((unsigned long)p, [](T x) { return x; });                                \
  }                                                                                                \
  template <class T, class U>                                                                      \
  inline void atomic_store_explicit(volatile space atomic<T> *p, U value, memory_order o) {        \
    atomic_exchange_explicit(p, value, o);                                                         \
  }                                                                                                \
  template <class T, class U>                                                                      \
  inline bool atomic_compare_exchange_weak_explicit(                                               \
      volatile space atomic<T> *p, thread T *expected, U desired, memory_order, memory_order) {    \
    T y = T(desired);                                                                              \
    emu_atomic_access((const void *)(unsigned long)p, sizeof(T));                                  \
    return __atomic_compare_exchange((T *)(unsigned long)p, expected, &y, false, __ATOMIC_RELAXED, \
                                     __ATOMIC_RELAXED);                                            \
  }
EMU_ATOMICS(device)
#ifndef EMU_FLAT
EMU_ATOMICS(threadgroup)
#endif

// ---- Threads together

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

METAL_FUNC void threadgroup_barrier(mem_flags flags, EMU_SITE) {
  emu_threadgroup_barrier(emu_u32(flags), site);
}
METAL_FUNC void simdgroup_barrier(mem_flags flags, EMU_SITE) {
  emu_simdgroup_barrier(emu_u32(flags), site);
}
}  // namespace metal

namespace emu {
#define EMU_OWN __attribute__((noinline, no_sanitize("coverage"), no_sanitize("undefined")))

// Lanes are folded in pairs, as a tree. Metal does not say in which order.
template <class T, class F>
EMU_OWN void reduce(const emu_payload *in, emu_payload *out, emu_u32 lanes) {
  T value[EMU_LANES];
  emu_u32 count = 0;
  for (emu_u32 lane = 0; lane < EMU_LANES; lane++)
    if (lanes >> lane & 1) value[count++] = *(const T *)in[lane];
  for (; count > 1; count = (count + 1) / 2)
    for (emu_u32 i = 0; i < count; i += 2)
      value[i / 2] = i + 1 < count ? F::apply(value[i], value[i + 1]) : value[i];
  for (emu_u32 lane = 0; lane < EMU_LANES; lane++) *(T *)out[lane] = value[0];
}

template <class T, class F, bool Inclusive>
EMU_OWN void prefix(const emu_payload *in, emu_payload *out, emu_u32 lanes) {
  T sum = T(F::identity);
  for (emu_u32 lane = 0; lane < EMU_LANES; lane++) {
    if (!(lanes >> lane & 1)) continue;
    T value = *(const T *)in[lane];
    T with = F::apply(sum, value);
    *(T *)out[lane] = Inclusive ? with : sum;
    sum = with;
  }
}

inline EMU_OWN void vote(const emu_payload *in, emu_payload *out, emu_u32 lanes) {
  emu_u64 set = 0;
  for (emu_u32 lane = 0; lane < EMU_LANES; lane++)
    if (lanes >> lane & 1 && *(const bool *)in[lane]) set |= 1ull << lane;
  for (emu_u32 lane = 0; lane < EMU_LANES; lane++) {
    out[lane][0] = set;
    out[lane][1] = lanes;
  }
}

struct ballots {
  emu_u64 set, lanes;
};

METAL_FUNC ballots ballot(bool x, emu_site site) {
  emu_u64 in[2] = {x, 0};
  ballots out;
  emu_exchange(in, &out, sizeof out, vote, EMU_VOTE, site);
  return out;
}

template <class T>
METAL_FUNC T exchange(T x, emu_combine combine, emu_site site) {
  static_assert(sizeof(T) <= EMU_PAYLOAD);
  T out;
  emu_exchange(&x, &out, sizeof(T), combine, EMU_REDUCTION, site);
  return out;
}

template <class T>
METAL_FUNC T shuffle(T x, emu_u32 source, emu_site site) {
  static_assert(sizeof(T) <= EMU_PAYLOAD);
  T out;
  emu_shuffle(&x, &out, sizeof(T), source, site);
  return out;
}

METAL_FUNC emu_u32 matrix_row() {
  emu_u32 lane = emu_lane();
  return (lane >> 4) * 4 + (lane >> 2 & 1) * 2 + (lane >> 1 & 1);
}
METAL_FUNC emu_u32 matrix_column() {
  emu_u32 lane = emu_lane();
  return (lane >> 3 & 1) * 4 + (lane & 1) * 2;
}

#define EMU_FOLD(name, start, expression)  \
  struct name {                            \
    static constexpr int identity = start; \
    template <class T>                     \
    static constexpr T apply(T x, T y) {   \
      return T(expression);                \
    }                                      \
  };
EMU_FOLD(add, 0, x + y)
EMU_FOLD(multiply, 1, x *y)
EMU_FOLD(maximum, 0, ::metal::max(x, y))
EMU_FOLD(minimum, 0, ::metal::min(x, y))
EMU_FOLD(bit_and, 0, x &y)
EMU_FOLD(bit_or, 0, x | y)
EMU_FOLD(bit_xor, 0, x ^ y)
}  // namespace emu

namespace metal {
#define EMU_SIMD_FOLD(name, combine)        \
  template <class T>                        \
  METAL_FUNC T name(T x, EMU_SITE) {        \
    return emu::exchange(x, combine, site); \
  }
EMU_SIMD_FOLD(simd_sum, (emu::reduce<T, emu::add>))
EMU_SIMD_FOLD(simd_product, (emu::reduce<T, emu::multiply>))
EMU_SIMD_FOLD(simd_max, (emu::reduce<T, emu::maximum>))
EMU_SIMD_FOLD(simd_min, (emu::reduce<T, emu::minimum>))
EMU_SIMD_FOLD(simd_and, (emu::reduce<T, emu::bit_and>))
EMU_SIMD_FOLD(simd_or, (emu::reduce<T, emu::bit_or>))
EMU_SIMD_FOLD(simd_xor, (emu::reduce<T, emu::bit_xor>))
EMU_SIMD_FOLD(simd_prefix_inclusive_sum, (emu::prefix<T, emu::add, true>))
EMU_SIMD_FOLD(simd_prefix_exclusive_sum, (emu::prefix<T, emu::add, false>))
EMU_SIMD_FOLD(simd_prefix_inclusive_product, (emu::prefix<T, emu::multiply, true>))
EMU_SIMD_FOLD(simd_prefix_exclusive_product, (emu::prefix<T, emu::multiply, false>))

template <class T>
METAL_FUNC T simd_shuffle(T x, ushort lane, EMU_SITE) {
  return emu::shuffle(x, lane, site);
}
template <class T>
METAL_FUNC T simd_shuffle_xor(T x, ushort mask, EMU_SITE) {
  return emu::shuffle(x, emu_lane() ^ mask, site);
}
template <class T>
METAL_FUNC T simd_shuffle_down(T x, ushort delta, EMU_SITE) {
  emu_u32 lane = emu_lane();
  return emu::shuffle(x, lane + delta < EMU_LANES ? lane + delta : lane, site);
}
template <class T>
METAL_FUNC T simd_shuffle_up(T x, ushort delta, EMU_SITE) {
  emu_u32 lane = emu_lane();
  return emu::shuffle(x, lane >= delta ? lane - delta : lane, site);
}
template <class T>
METAL_FUNC T simd_shuffle_rotate_down(T x, ushort delta, EMU_SITE) {
  return emu::shuffle(x, (emu_lane() + delta) % EMU_LANES, site);
}
template <class T>
METAL_FUNC T simd_shuffle_rotate_up(T x, ushort delta, EMU_SITE) {
  return emu::shuffle(x, (emu_lane() - delta) % EMU_LANES, site);
}
template <class T>
METAL_FUNC T simd_broadcast(T x, ushort lane, EMU_SITE) {
  return emu::shuffle(x, lane, site);
}

struct simd_vote {
  typedef ulong vote_t;
  vote_t votes;
  explicit constexpr simd_vote(vote_t v = 0) : votes(v) {}
  explicit constexpr operator vote_t() const { return votes; }
  constexpr bool any() const { return votes != 0; }
  constexpr bool all() const { return votes == 0xffffffff; }
};
METAL_FUNC simd_vote simd_ballot(bool x, EMU_SITE) { return simd_vote(emu::ballot(x, site).set); }
METAL_FUNC simd_vote simd_active_threads_mask(EMU_SITE) {
  return simd_vote(emu::ballot(true, site).lanes);
}
METAL_FUNC bool simd_any(bool x, EMU_SITE) { return emu::ballot(x, site).set != 0; }
METAL_FUNC bool simd_all(bool x, EMU_SITE) {
  emu::ballots b = emu::ballot(x, site);
  return b.set == b.lanes;
}
METAL_FUNC bool simd_is_first(EMU_SITE) {
  return emu_u32(__builtin_ctzll(emu::ballot(true, site).lanes)) == emu_lane();
}
template <class T>
METAL_FUNC T simd_broadcast_first(T x, EMU_SITE) {
  return emu::shuffle(x, emu_u32(__builtin_ctzll(emu::ballot(true, site).lanes)), site);
}

// ---- 8x8 matrices: a lane holds two neighbours of one row.

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup matrices are 8x8");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    uint row = emu::matrix_row(), column = emu::matrix_column();
    elements = vec<T, 2>{row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0)};
  }
  thread vec<T, 2> &thread_elements() { return elements; }
  const thread vec<T, 2> &thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Columns, int Rows>
METAL_FUNC simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.elements = vec<T, 2>{value, value};
  return m;
}

// Element (row, column) of the matrix is (origin.y + row, origin.x + column) of memory; with
// transpose, (origin.y + column, origin.x + row).
#define EMU_MATRIX_MEMORY(space)                                                           \
  template <class T>                                                                       \
  METAL_FUNC void simdgroup_load(thread simdgroup_matrix<T, 8, 8> &m, const space T *from, \
                                 ulong elements_per_row = 8, ulong2 origin = 0,            \
                                 bool transpose = false) {                                 \
    ulong row = emu::matrix_row(), column = emu::matrix_column();                          \
    from += origin.y * elements_per_row + origin.x;                                        \
    for (ulong i = 0; i < 2; i++)                                                          \
      m.elements[i] = transpose ? from[(column + i) * elements_per_row + row]              \
                                : from[row * elements_per_row + column + i];               \
  }                                                                                        \
  template <class T>                                                                       \
  METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> m, space T *to,                \
                                  ulong elements_per_row = 8, ulong2 origin = 0,           \
                                  bool transpose = false) {                                \
    ulong row = emu::matrix_row(), column = emu::matrix_column();                          \
    to += origin.y * elements_per_row + origin.x;                                          \
    for (ulong i = 0; i < 2; i++)                                                          \
      to[transpose ? (column + i) * elements_per_row + row                                 \
                   : row * elements_per_row + column + i] = m.elements[i];                 \
  }
EMU_MATRIX_MEMORY(device)
#ifndef EMU_FLAT
EMU_MATRIX_MEMORY(threadgroup)
#endif

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8> &d,
                                              simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b,
                                              simdgroup_matrix<C, 8, 8> c, EMU_SITE) {
  float fa[2] = {float(a.elements[0]), float(a.elements[1])};
  float fb[2] = {float(b.elements[0]), float(b.elements[1])};
  float fc[2] = {float(c.elements[0]), float(c.elements[1])};
  float fd[2];
  emu_multiply(fa, fb, fc, fd, site);
  d.elements = vec<D, 2>{D(fd[0]), D(fd[1])};
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8> &d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b, EMU_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f), site);
}
}  // namespace metal
