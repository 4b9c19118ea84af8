// SPDX-License-Identifier: Apache-2.0
// What the sender of a PREMUL_SUM does: output[i] = input[i] * factor, rounded to the tensor's type. DC_LEAF is its codec.
#include "operations.cuh"

typedef DC_LEAF Leaf;
typedef Leaf::Value Value;

DC_KERNEL(256) dc_premultiply(const u8* input, u8* output, u64 count, double factor) {
  Value rounded;
  convert(factor, &rounded);  // bits: the factor in the accumulator's precision
  for (u64 index = first_index(); index < count; index += num_threads()) {
    const u64 offset = index * sizeof(Leaf::Stored);
    const Value value = Leaf::load(load_stored<Leaf::Stored>(input + offset));
    store_stored<Leaf::Stored>(output + offset, Leaf::store(multiply(value, rounded)));
  }
}
