// SPDX-License-Identifier: Apache-2.0
// AVX-512 F, BW, DQ and VL, and F16C.
#if defined(__x86_64__)

#define DC_VECTOR_BYTES 64
#include "kernel_table.h"

namespace detcomm {

const FoldVariant kAvx512Folds = {"avx512", find_kernel, widen, premultiply};

}  // namespace detcomm

#endif
