// SPDX-License-Identifier: Apache-2.0
// The fold for callers inside the library, who have checked their arguments.
#pragma once

#include <cstddef>

#include "detcomm.h"

namespace detcomm {

using FoldSpec = dc_fold_spec;

// Bytes of one element.
std::size_t item_bytes(dc_dtype dtype);

// The type of partials: what travels between ranks and is stored between folds.
dc_dtype partial_dtype(dc_op op, dc_dtype dtype, dc_accumulate accumulate);

// As dc_fold, without its checks: the specification is legal, and memory overlaps only as that allows.
void fold(const FoldSpec& spec, const void* const* inputs, void* output, std::size_t count);

// As dc_premultiply, without its checks.
void premultiply(dc_dtype dtype, double factor, const void* input, void* output, std::size_t count);

}  // namespace detcomm
