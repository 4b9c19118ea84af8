// SPDX-License-Identifier: Apache-2.0
// One fold over the whole grid. fold.cuh says for which macros; with DC_PEERS operands may lie in peers' memory.
#include "fold.cuh"
#include "peers.cuh"

#if DC_PEERS
struct Sources {
  Source source[kNumInputs];
};

DC_KERNEL(256) dc_fold(DC_ARGUMENT Sources sources, u8* output, u64 count, u64 divisor) {
  Operands operands;
#pragma unroll
  for (int k = 0; k < kNumInputs; ++k) operands.address[k] = address_of(sources.source[k]);
  fold_all(operands, output, nullptr, count, divisor, first_index(), num_threads());
}
#else
DC_KERNEL(256) dc_fold(DC_ARGUMENT Operands operands, u8* output, u64 count, u64 divisor) {
  fold_all(operands, output, nullptr, count, divisor, first_index(), num_threads());
}
#endif
