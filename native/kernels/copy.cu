// SPDX-License-Identifier: Apache-2.0
// Up to kMostCopies copies in one launch, a row of blocks for each: a plan's packs and unpacks are many and short.
// With DC_PEERS sources may lie in peers' memory.
#include "copy.cuh"
#include "peers.cuh"

constexpr int kMostCopies = 64;

#if DC_PEERS
typedef Source From;
DC_DEVICE const u8* address_of_row(const From& from) { return address_of(from); }
#else
typedef const u8* From;
DC_DEVICE const u8* address_of_row(From from) { return from; }
#endif

struct Copies {
  From src[kMostCopies];
  u8* dst[kMostCopies];
  u64 num_bytes[kMostCopies];
};

DC_KERNEL(256) dc_copy(DC_ARGUMENT Copies copies) {
  const u32 row = row_index();
  copy_run(address_of_row(copies.src[row]), copies.dst[row], copies.num_bytes[row], first_index(), num_threads());
}
