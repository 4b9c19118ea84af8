// SPDX-License-Identifier: Apache-2.0
// What one instruction set offers: kernels that fold a few operands of one type in registers.
#pragma once

#include <cstddef>

#include "detcomm.h"

namespace detcomm {

// Folds `count` elements of operands of one type. `divisor` is 0, or what floating-point results are divided by.
using FoldKernel = void (*)(const void* const* inputs, void* output, std::size_t count, double divisor);

// Which kernel: operands of `source` in, `sink` out. With `rounds`, each result is rounded to `source` at once.
struct KernelKey {
  dc_op op;
  dc_dtype source;
  dc_dtype sink;
  bool rounds;
  dc_shape shape;
  unsigned num_inputs;  // 2 ... kernel_radix(op, source)
};

struct FoldVariant {
  const char* name;
  FoldKernel (*find_kernel)(const KernelKey& key);
  // Leaves of a 16-bit type as float32, every bit that counts kept.
  void (*widen)(dc_dtype dtype, const void* input, void* output, std::size_t count);
  void (*premultiply)(dc_dtype dtype, double factor, const void* input, void* output, std::size_t count);
};

constexpr unsigned kMaxRadix = 8;

constexpr bool is_float(dc_dtype dtype) {
  return dtype == DC_FLOAT32 || dtype == DC_FLOAT64 || dtype == DC_BFLOAT16 || dtype == DC_FLOAT16;
}

// The most operands of one kernel, a power of two, so that a full kernel folds a subtree. Sums are what training runs
// on; the others get by with fewer, and the library stays small.
constexpr unsigned kernel_radix(dc_op op, dc_dtype source) {
  return is_float(source) && (op == DC_SUM || op == DC_AVG) ? kMaxRadix : 4;
}

extern const FoldVariant kPortableFolds;
#if defined(__x86_64__)
extern const FoldVariant kAvx2Folds;
extern const FoldVariant kAvx512Folds;
#endif

}  // namespace detcomm
