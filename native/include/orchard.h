/* Orchard's native attention: a plain C ABI over CPU kernels.
 *
 * Tensors are described, never owned. A call validates its argument struct, computes, and returns
 * a status; orchard_last_error() then holds a sentence for the calling thread. Any number of
 * threads may call at once. Nothing is started before the first call. */
#ifndef ORCHARD_H
#define ORCHARD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define ORCHARD_API __declspec(dllexport)
#else
#define ORCHARD_API __attribute__((visibility("default")))
#endif

#define ORCHARD_ABI_VERSION 1
#define ORCHARD_MAX_HEAD_DIM 512

/* Status of a call. */
enum {
  ORCHARD_OK = 0,
  ORCHARD_INVALID_ARGUMENT = 1, /* the struct contradicts itself; nothing was written */
  ORCHARD_UNSUPPORTED = 2,      /* well formed, but beyond these kernels */
  ORCHARD_OUT_OF_MEMORY = 3,    /* scratch could not be had; outputs are undefined */
  ORCHARD_WRONG_ABI = 4         /* built against another version of this header */
};

/* Element types. */
enum {
  ORCHARD_FLOAT32 = 0,
  ORCHARD_FLOAT16 = 1,
  ORCHARD_BFLOAT16 = 2,
  ORCHARD_FLOAT64 = 3, /* additive masks only */
  ORCHARD_BOOL = 4,    /* masks only: one byte, 0 or not */
  ORCHARD_INT8 = 5,    /* levels of quantised operands, here and below */
  ORCHARD_INT4 = 6     /* two to a byte, the even one in the low half; each counts as a byte */
};

/* A four-dimensional view: element strides, any sign and size that stays inside its memory. */
typedef struct orchard_tensor {
  void *data; /* NULL where the tensor is absent */
  int64_t sizes[4];
  int64_t strides[4];
  int32_t dtype;
  int32_t reserved; /* 0 */
} orchard_tensor;

/* out = attention(query, key, value).
 *
 * query [B, Hq, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv], out [B, Hq, Sq, Dv], all of
 * one type; mask 1 or full size on each of [B, Hq, Sq, Sk]; lse [B, Hq, Sq, 1] fp32, optional.
 * Row i sees key j where band_low <= j - i <= band_high; INT64_MIN and INT64_MAX do not bound. */
typedef struct orchard_forward_args {
  uint32_t struct_size; /* sizeof(orchard_forward_args) */
  uint32_t abi_version; /* ORCHARD_ABI_VERSION */
  orchard_tensor query, key, value, mask, out, lse;
  int64_t band_low, band_high;
  const uint32_t *seed;    /* two words, low first; may be NULL without dropout */
  double scale;            /* of query . key */
  double softcap;          /* 0: none */
  uint32_t drop_threshold; /* 16-bit draws below it are dropped; 0: no dropout, at most 65535 */
  int32_t threads;         /* most threads this call may use; 0: one for each core */
} orchard_forward_args;

/* Gradients from the operands of a forward, its out and lse, and what arrives at them.
 *
 * grad_query, grad_key and grad_value have the type of the operands. grad_mask is optional, of the
 * mask's shape and fp32; where no axis of a 16-bit mask is broadcast it may have the mask's type.
 * grad_lse is optional, fp32. Outputs are overwritten. */
typedef struct orchard_backward_args {
  uint32_t struct_size; /* sizeof(orchard_backward_args) */
  uint32_t abi_version; /* ORCHARD_ABI_VERSION */
  orchard_tensor query, key, value, mask, out, lse;
  orchard_tensor grad_out, grad_lse;
  orchard_tensor grad_query, grad_key, grad_value, grad_mask;
  int64_t band_low, band_high;
  const uint32_t *seed;
  double scale;
  double softcap;
  uint32_t drop_threshold;
  int32_t threads;
} orchard_backward_args;

/* An operand [B, H, S, dim] in few bits: element (b, h, i, d) is (level - zero) * scale + mean with
 * the scale at [b / group[0], h / group[1], i / group[2], 0]. Its last stride is 1. A data of a
 * floating type is the operand itself: it has no scales, any strides, and its group is 0. */
typedef struct orchard_operand {
  orchard_tensor data;   /* [B, H, S, dim], of int4 [B, H, S, (dim + 1) / 2] */
  orchard_tensor scales; /* fp32, each size that of data divided by its group, rounded up; last 1 */
  orchard_tensor zeros;  /* int8, as scales; optional */
  orchard_tensor mean;   /* fp32 [B, H, 1, dim]; optional, of key alone */
  int64_t group[3];      /* batch entries, heads and rows that share a scale */
  int64_t dim;
} orchard_operand;

/* out = attention(query, key, value) at the values of its operands, as orchard_attention_forward.
 *
 * out is of any floating type. Scores and sums are fp32, or exact integers where query and key are
 * levels. */
typedef struct orchard_quantized_args {
  uint32_t struct_size; /* sizeof(orchard_quantized_args) */
  uint32_t abi_version; /* ORCHARD_ABI_VERSION */
  orchard_operand query, key, value;
  orchard_tensor mask, out, lse;
  int64_t band_low, band_high;
  const uint32_t *seed;
  double scale;
  double softcap;
  uint32_t bf16_accuracy; /* 1: probabilities and values may be rounded, to an error as of bf16's */
  uint32_t reserved;      /* 0 */
  uint32_t drop_threshold;
  int32_t threads;
} orchard_quantized_args;

/* Levels and scales of source - mean, fp32 arithmetic rounded to nearest even:
 *
 *   symmetric   s = max(peak / L, 2^-126), level = clamp(round(x / s), -L, L)
 *   with zeros  s = max((high + low) / (2 L + 1), 2^-126), zero = round(low / s) - L - 1,
 *               level = clamp(round(x / s) + zero, -L - 1, L)
 *
 * where L is 127 or 7, `high` and `low` the largest x and -x of a group and 0, `peak` the larger.
 * A source with NaN, Inf or a magnitude above 2^126 is refused; the outputs are then undefined. */
typedef struct orchard_quantize_args {
  uint32_t struct_size;   /* sizeof(orchard_quantize_args) */
  uint32_t abi_version;   /* ORCHARD_ABI_VERSION */
  orchard_tensor source;  /* [B, H, S, dim], floating, any strides */
  orchard_tensor mean;    /* fp32 [B, H, 1, dim]; optional */
  orchard_operand result; /* written: data, scales and, where they are present, zeros */
  int32_t threads;
  int32_t reserved; /* 0 */
} orchard_quantize_args;

/* The sum over the rows of each head in fp32. Rows are added up by sixteens, their sums by
 * sixteens, and so on up to 4096 rows; what is left of each follows, fewest rows first. It may be
 * Inf or NaN. */
typedef struct orchard_sum_args {
  uint32_t struct_size;  /* sizeof(orchard_sum_args) */
  uint32_t abi_version;  /* ORCHARD_ABI_VERSION */
  orchard_tensor source; /* [B, H, S, dim], floating, any strides */
  orchard_tensor sums;   /* written: fp32 [B, H, 1, dim] */
  int32_t threads;
  int32_t reserved; /* 0 */
} orchard_sum_args;

ORCHARD_API uint32_t orchard_abi_version(void);

ORCHARD_API int orchard_attention_forward(const orchard_forward_args *args);
ORCHARD_API int orchard_attention_backward(const orchard_backward_args *args);
ORCHARD_API int orchard_quantized_forward(const orchard_quantized_args *args);
ORCHARD_API int orchard_quantize(const orchard_quantize_args *args);
ORCHARD_API int orchard_sum_over_rows(const orchard_sum_args *args);

/* Why the last call on this thread failed; "" after a success. Valid until the next call. */
ORCHARD_API const char *orchard_last_error(void);

/* Instruction sets: names compiled in, best first, separated by commas; which of them this machine
 * runs; the one in use; a choice (NULL: the best) for every call that begins later. */
ORCHARD_API const char *orchard_isa_compiled(void);
ORCHARD_API const char *orchard_isa_available(void);
ORCHARD_API const char *orchard_isa(void);
ORCHARD_API int orchard_select_isa(const char *name);

/* The host's own threads: a function that runs task(data) on each of `threads` threads, the caller
 * one of them, and returns when all have; GOMP_parallel of the OpenMP library that the host runs on
 * is one. Such threads spin between the host's parallel loops, and threads of ours would have to
 * compete with them. Used by one call at a time, never after a fork; NULL: not at all. */
typedef void orchard_team_runner(void (*task)(void *), void *data, unsigned threads,
                                 unsigned flags);
ORCHARD_API void orchard_share_threads(orchard_team_runner *team);

/* Threads that the pool holds now, callers not counted. */
ORCHARD_API int orchard_pool_threads(void);

/* The kernels' exp2 over an array, in the instruction set in use, for tests of its error. */
ORCHARD_API void orchard_exp2(const float *x, float *y, size_t count);

#ifdef __cplusplus
}
#endif

#endif
