/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The native core of detcomm: folds. A contract in C99, so that any language can load the library.
 *
 * A fold combines n operands elementwise in a written-out order and stores the outcome once. docs/numerics.md says
 * which bits come out; every function here gives exactly those, on every processor and with every instruction set.
 *
 * Rules for all functions:
 *   - they may be called from any thread, and from many at once; they keep no state but the thread's last error text;
 *   - they allocate nothing, take no lock, start no thread, and never wait;
 *   - the calling thread's floating-point environment (rounding, flush to zero, exception flags) is set to IEEE 754's
 *     defaults inside and is as it was when they return;
 *   - memory may have any alignment; what must not be NULL is said;
 *   - a function that can fail returns a dc_status. On any but DC_OK it has written nothing to the caller's memory,
 *     and dc_last_error() says in English what was expected and what was given.
 *
 * The names of types and operations are those of detcomm/collectives.py, the values are part of this contract.
 */
#ifndef DETCOMM_H
#define DETCOMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Goes up with every change of this file that a caller can notice. */
#define DC_ABI_VERSION 2

typedef enum dc_status {
  DC_OK = 0,
  DC_INVALID = 1,    /* an argument is out of range, NULL where it must not be, or overlaps another one */
  DC_UNSUPPORTED = 2 /* the arguments are sound, but no bits are specified for them */
} dc_status;

/* Element types. Complex tensors are folded as pairs of reals, so they have no type of their own. */
typedef enum dc_dtype {
  DC_FLOAT32 = 0,
  DC_FLOAT64 = 1,
  DC_BFLOAT16 = 2, /* the upper half of a float32 */
  DC_FLOAT16 = 3,  /* IEEE 754 binary16 */
  DC_INT8 = 4,
  DC_INT16 = 5,
  DC_INT32 = 6,
  DC_INT64 = 7,
  DC_UINT8 = 8,
  DC_UINT16 = 9,
  DC_UINT32 = 10,
  DC_UINT64 = 11,
  DC_BOOL = 12 /* a byte: zero is false, all else is true; results are 0 or 1 */
} dc_dtype;

/* Operations. A PREMUL_SUM is a DC_SUM of operands that went through dc_premultiply. */
typedef enum dc_op {
  DC_SUM = 0,
  DC_AVG = 1, /* a sum; a final fold divides it */
  DC_PRODUCT = 2,
  DC_MIN = 3, /* IEEE 754-2019 minimum and maximum: a NaN wins, -0 < +0 */
  DC_MAX = 4,
  DC_BAND = 5,
  DC_BOR = 6,
  DC_BXOR = 7
} dc_op;

/* Where the 16-bit floating-point types are rounded. All other types are computed in their own precision. */
typedef enum dc_accumulate {
  DC_ACCUMULATE_FLOAT32 = 0, /* once, by the final fold; partials are float32 */
  DC_ACCUMULATE_WIRE = 1     /* after every operation; partials have the tensor's type */
} dc_accumulate;

/* The order of operations over the operands o[0] ... o[n-1]. The left one always holds the earlier operands. */
typedef enum dc_shape {
  DC_SHAPE_TREE = 0,  /* T(n) = T(first k) + T(rest), k the largest power of two below n (RFC 6962, section 2.1) */
  DC_SHAPE_LINEAR = 1 /* ((o[0] + o[1]) + o[2]) + ... */
} dc_shape;

/* What one fold does. */
typedef struct dc_fold_spec {
  dc_op op;
  dc_dtype dtype; /* the tensor's type */
  dc_accumulate accumulate;
  dc_shape shape;
  int32_t is_final;     /* nonzero: the output is the result, in `dtype`. Zero: it is a partial, in the partial type:
                           float32 for 16-bit floats that accumulate in it (not MIN, MAX), `dtype` for all else. */
  uint32_t num_inputs;  /* at least 2; there is no upper limit */
  uint64_t divisor;     /* what a final AVG divides by, at least 1: the world size. Else ignored. */
  const uint8_t *leaves; /* num_inputs flags: nonzero, the operand has `dtype`; zero, it is a partial.
                            NULL: all are leaves. Read only during the call. */
} dc_fold_spec;

/*
 * Folds `count` elements.
 *
 *   inputs  num_inputs addresses of operands, in leaf order, each of `count` elements of its type.
 *   output  room for `count` elements of the output's type. It may be exactly the memory of operands whose elements
 *           have the same size, and must not overlap an operand in any other way. DC_INVALID if it does.
 *
 * A NaN is stored in its one canonical pattern, in partials too. Subnormals are kept. Integers wrap. With count 0
 * nothing is read or written and the addresses may be NULL.
 */
dc_status dc_fold(const dc_fold_spec *spec, const void *const *inputs, void *output, size_t count);

/*
 * What the sender of a PREMUL_SUM does: output[i] = input[i] * factor, computed in the accumulator's precision
 * (float64 for float64, else float32), to which `factor` is rounded first; the product is rounded to `dtype`.
 *
 * DC_UNSUPPORTED unless `dtype` is a floating-point type. `output` may be `input`; no other overlap.
 */
dc_status dc_premultiply(dc_dtype dtype, double factor, const void *input, void *output, size_t count);

/*
 * The instruction sets for which this library holds folds and which this processor has, best first, as names
 * separated by spaces: "avx512 avx2 portable". The first is the one in use. Speed only: the bits are the same.
 */
const char *dc_fold_variants(void);

/*
 * Runs all later folds of the process with one of these variants; for tests and measurements. DC_INVALID, naming
 * what there is, if `name` is not among dc_fold_variants().
 */
dc_status dc_select_fold_variant(const char *name);

/* Why this thread's last failing call failed; "" before the first. Valid until the thread's next failing call. */
const char *dc_last_error(void);

/* DC_ABI_VERSION of the library as built. */
uint32_t dc_abi_version(void);

/*
 * SHA-256, in hexadecimal, over the sources from which the library was built (native/CMakeLists.txt says how). A
 * loader that sees the sources compares, so that an edited source is never run as its stale binary.
 */
const char *dc_source_hash(void);

#ifdef __cplusplus
}
#endif
#endif
