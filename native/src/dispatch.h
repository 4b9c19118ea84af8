// SPDX-License-Identifier: Apache-2.0
// Which instruction set the folds use. Speed only: all give the same bits.
#pragma once

#include "fold_variant.h"

namespace detcomm {

// The variant in use.
const FoldVariant& fold_variant();

// The variants that this processor can run, best first, by name, separated by spaces.
const char* fold_variant_names();

// Makes the variant of this name the one in use. False, changing nothing, if there is none.
bool select_fold_variant(const char* name);

}  // namespace detcomm
