// SPDX-License-Identifier: Apache-2.0
// AVX2 and F16C.
#if defined(__x86_64__)

#define DC_VECTOR_BYTES 32
#include "kernel_table.h"

namespace detcomm {

const FoldVariant kAvx2Folds = {"avx2", find_kernel, widen, premultiply};

}  // namespace detcomm

#endif
