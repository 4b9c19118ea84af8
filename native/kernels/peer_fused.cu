// SPDX-License-Identifier: Apache-2.0
// A short call in one launch: each rank stages, tells its peers, folds what they have staged, and fetches their results.
//
// Block b of a rank has to do with block b of its peers alone. It has a pad and a slice of the staging area of its own,
// and its part of every message, so it waits for no other block of its own rank. These blocks wait for peers while they
// hold a place on the GPU; how many there may be at a time is agreed beforehand (detcomm/cuda/peer/residency.py).
//
// Compiled with the macros of fold.cuh, or with none of them for a rank that folds nothing.
#include "copy.cuh"
#include "peers.cuh"
#ifdef DC_NUM_INPUTS
#include "fold.cuh"
#endif

// Bytes of this rank that are staged, folded, or fetched to; all of a message, of which each block has its part.
struct Row {
  const u8* src;  // null: at `offset` of the peer's slice
  u8* dst;        // null: at `offset` of the own slice
  u64 num_bytes;
  u32 peer;
  u32 offset;
};

constexpr int kMostRows = 3 * kMostPeers + 2;

struct Fused {
  Pad* pads[kMostPeers];    // of block 0
  u8* slices[kMostPeers];  // of block 0
  u64 slice_bytes;
  Host host;
  u32 index;
  u32 num_peers;
  u32 num_rounds;  // 2: results go round, too
  u32 num_stage;   // rows, in this order
  u32 num_operands;
  u32 num_fetch;
  u32 num_copies;
  u32 result_offset;  // in the own slice, where the result is stored a second time in the first of two rounds
  u8* output;
  u64 count;
  u64 divisor;
  Row rows[kMostRows];
};

struct Here {
  u32 block, num_blocks, thread, num_threads;
};

struct Part {
  u64 first, num_bytes;
};

DC_DEVICE Part part_of(u64 num_bytes, const Here& here) {
  const u64 most = (num_bytes + 16 * here.num_blocks - 1) / (16 * here.num_blocks) * 16;
  const u64 first = here.block * most < num_bytes ? here.block * most : num_bytes;
  return {first, most < num_bytes - first ? most : num_bytes - first};
}

DC_DEVICE Pad* pad_of(const Fused& fused, u32 peer, const Here& here) { return fused.pads[peer] + here.block; }

DC_DEVICE u8* slice_of(const Fused& fused, u32 peer, const Here& here) {
  return fused.slices[peer] + here.block * fused.slice_bytes;
}

DC_DEVICE bool meets(const Fused& fused, const Here& here) {
  return here.thread < fused.num_peers && here.thread != fused.index;
}

// Peers have read what this block staged in the calls before.
DC_DEVICE bool is_free(const Fused& fused, const Here& here) {
  Pad* own = pad_of(fused, fused.index, here);
  if (load_relaxed(&own->dead) != 0) return false;
  return !meets(fused, here) ||
         wait_for(&own->done[here.thread], own->consumed[here.thread], here.thread, 2, fused.host, own);
}

DC_DEVICE void stage(const Fused& fused, const Here& here) {
  for (u32 k = 0; k < fused.num_stage; ++k) {
    const Row& row = fused.rows[k];
    const Part part = part_of(row.num_bytes, here);
    copy_run(row.src + part.first, slice_of(fused, fused.index, here) + row.offset, part.num_bytes, here.thread,
             here.num_threads);
  }
}

DC_DEVICE void tell_ready(const Fused& fused, const Here& here) {
  if (!meets(fused, here)) return;
  Pad* own = pad_of(fused, fused.index, here);
  store_release(&pad_of(fused, here.thread, here)->ready[fused.index], own->sent[here.thread] += 1);
}

DC_DEVICE bool await_ready(const Fused& fused, const Here& here) {
  if (!meets(fused, here)) return true;
  Pad* own = pad_of(fused, fused.index, here);
  const u32 target = own->awaited[here.thread] += 1;
  return wait_for(&own->ready[here.thread], target, here.thread, 1, fused.host, own);
}

DC_DEVICE void reduce(const Fused& fused, const Here& here) {
#ifdef DC_NUM_INPUTS
  const Row* rows = fused.rows + fused.num_stage;
  const Part part = part_of(fused.count * sizeof(Leaf::Stored), here);
  Operands operands;
#pragma unroll
  for (int k = 0; k < kNumInputs; ++k) {
    const Row& row = rows[k];
    operands.address[k] = row.src != nullptr ? row.src + part.first : slice_of(fused, row.peer, here) + row.offset;
  }
  u8* second = fused.num_rounds == 2 ? slice_of(fused, fused.index, here) + fused.result_offset : nullptr;
  fold_all(operands, fused.output + part.first, second, part.num_bytes / sizeof(Leaf::Stored), fused.divisor,
           here.thread, here.num_threads);
#endif
}

DC_DEVICE void fetch(const Fused& fused, const Here& here) {
  const u32 first = fused.num_stage + fused.num_operands;
  for (u32 k = first; k < first + fused.num_fetch + fused.num_copies; ++k) {
    const Row& row = fused.rows[k];
    const Part part = part_of(row.num_bytes, here);
    const u8* src = row.src != nullptr ? row.src + part.first : slice_of(fused, row.peer, here) + row.offset;
    copy_run(src, row.dst + part.first, part.num_bytes, here.thread, here.num_threads);
  }
}

DC_DEVICE void tell_done(const Fused& fused, const Here& here) {
  if (!meets(fused, here)) return;
  Pad* own = pad_of(fused, fused.index, here);
  store_release(&pad_of(fused, here.thread, here)->done[fused.index], own->consumed[here.thread] += 1);
}

DC_KERNEL(256) dc_peer_fused(DC_ARGUMENT Fused fused) {
  const Here here = {block_index(), num_blocks(), thread_index(), block_threads()};
  if (any_in_block(!is_free(fused, here))) return;
  stage(fused, here);
  join_block();
  tell_ready(fused, here);
  if (any_in_block(!await_ready(fused, here))) return;
  reduce(fused, here);
  if (fused.num_rounds == 2) {
    join_block();
    tell_ready(fused, here);
    if (any_in_block(!await_ready(fused, here))) return;
  }
  fetch(fused, here);
  join_block();
  tell_done(fused, here);
}
