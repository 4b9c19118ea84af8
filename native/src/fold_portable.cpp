// SPDX-License-Identifier: Apache-2.0
// Vectors of 16 bytes, which every processor has or the compiler makes from scalars.
#define DC_VECTOR_BYTES 16
#include "kernel_table.h"

namespace detcomm {

const FoldVariant kPortableFolds = {"portable", find_kernel, widen, premultiply};

}  // namespace detcomm
