// SPDX-License-Identifier: Apache-2.0
// The four collectives. Each is a loop over chunks with one barrier a chunk:
//
//   one-shot        stage chunk t | barrier | fold chunk t of all ranks into the output
//   reduce-scatter  stage chunk t of every shard | barrier | fold chunk t of the own shard into the output
//   all-gather      stage chunk t of the own shard | barrier | copy chunk t of all shards to the output
//   two-shot        stage chunk t; fold the own part of chunk t-1; copy the others' parts of chunk t-2 | barrier
//
// In the two-shot loop three chunks are under way at once, so it too needs only one barrier a chunk.
//
// Why two buffers suffice: the readers of a buffer that was staged before barrier b read it before they come to barrier
// b+1, and its owner stages into it again only after barrier b+1. This also holds from one call to the next, because the
// buffers alternate over all calls and every call has a barrier after its first staging.
//
// A rank reads its own operand where the caller has it, and stages only what others read. Messages of several chunks that
// lie in shared allocations on all ranks are not staged at all: after the first barrier all memory is read and written
// where it lies, and a second barrier ends the call.
#include "shm_operation.h"
#include "shm_run.h"

namespace detcomm::shm {
namespace {

// What a rank folds before it copies it on: it should stay in the cache in between.
constexpr std::uint64_t kBlockBytes = std::uint64_t{32} << 10;

class Collective : Operation {
 public:
  using Operation::Operation;

  dc_shm_status run() {
    switch (call_.collective) {
      case DC_SHM_REDUCE_SCATTER:
        return reduce_scatter();
      case DC_SHM_ALL_GATHER:
        return all_gather();
      default:
        return call_.count * item_ <= group_.tuning().oneshot_bytes ? one_shot() : two_shot();
    }
  }

 private:
  dc_shm_status one_shot() {
    const Range whole = {0, call_.count};
    const std::uint64_t chunks = num_chunks(call_.count, chunk_elems_);
    for (std::uint64_t t = 0; t < chunks; ++t) {
      const Range chunk = chunk_of(whole, t, chunk_elems_);
      const unsigned parity = group_.next_input_parity();
      stage(chunk, group_.mine().input(parity));
      if (const dc_shm_status status = meet()) return status;
      if (receives()) {
        fold_all(chunk, [&](int rank) { return group_.segment(rank).input(parity); }, output_at(chunk.begin), -1);
      }
    }
    return DC_SHM_OK;
  }

  dc_shm_status two_shot() {
    const Range whole = {0, call_.count};
    const std::uint64_t chunks = num_chunks(call_.count, chunk_elems_);
    unsigned staged_parity = 0;    // of chunk t - 1
    for (std::uint64_t t = 0; t < chunks + 2; ++t) {
      unsigned parity = 0;
      if (t < chunks) {
        const Range chunk = chunk_of(whole, t, chunk_elems_);
        const Range own = call_.premultiply ? Range{chunk.end, chunk.end} : part_of(chunk, rank_);
        parity = group_.next_input_parity();
        std::byte* slot = group_.mine().input(parity);
        stage({chunk.begin, own.begin}, slot);
        stage({own.end, chunk.end}, slot + (own.end - chunk.begin) * item_);
      }
      if (t >= 1 && t - 1 < chunks) {
        const Range chunk = chunk_of(whole, t - 1, chunk_elems_);
        fold_part(chunk, part_of(chunk, rank_), staged_parity, (t - 1) % 2);
      }
      if (t >= 2 && receives()) {
        const Range chunk = chunk_of(whole, t - 2, chunk_elems_);
        for (int rank = 0; rank < world_size_; ++rank) {
          if (rank != rank_) copy_out(part_of(chunk, rank), group_.segment(rank).result((t - 2) % 2));
        }
      }
      if (t < chunks + 1) {
        if (const dc_shm_status status = meet()) return status;
      }
      if (t == 0 && call_.collective == DC_SHM_ALL_REDUCE && is_shared(true)) return direct_all_reduce();
      staged_parity = parity;
    }
    return DC_SHM_OK;
  }

  // Folds this rank's part of a staged chunk for the others, and copies it to the own output while it is in the cache.
  void fold_part(Range chunk, Range own, unsigned input_parity, unsigned result_parity) {
    const std::uint64_t block_elems = kBlockBytes / item_;
    for (std::uint64_t t = 0; t * block_elems < own.size(); ++t) {
      const Range block = chunk_of(own, t, block_elems);
      const std::uint64_t offset = (block.begin - chunk.begin) * item_;
      std::byte* result = group_.mine().result(result_parity) + (block.begin - own.begin) * item_;
      fold_all(block, [&](int rank) { return group_.segment(rank).input(input_parity) + offset; }, result, -1);
      if (receives()) copy_out(block, result);
    }
  }

  // Each rank folds its part straight from everybody's tensor and writes it straight to everybody's: nobody else reads or
  // writes that part, so it may be in place.
  dc_shm_status direct_all_reduce() {
    const Range own = part_of({0, call_.count}, rank_);
    const std::uint64_t block_elems = kBlockBytes / item_;
    for (std::uint64_t t = 0; t * block_elems < own.size(); ++t) {
      const Range block = chunk_of(own, t, block_elems);
      fold_all(block, [&](int rank) { return shared_input(rank, block.begin); }, output_at(block.begin), -1);
      for (int rank = 0; rank < world_size_; ++rank) {
        std::byte* target = group_.heap(rank, group_.placement(rank).output) + block.begin * item_;
        if (rank != rank_) stream_copy(target, output_at(block.begin), block.size() * item_);
      }
    }
    return group_.barrier();  // nobody touches a tensor that others still read or write
  }

  dc_shm_status reduce_scatter() {
    // The slot of a chunk holds one piece for each receiver.
    const std::uint64_t piece_bytes =
        group_.tuning().chunk_bytes / static_cast<std::uint64_t>(world_size_) / kCacheLine * kCacheLine;
    const std::uint64_t piece_elems = piece_bytes / item_;
    const std::uint64_t chunks = num_chunks(largest_shard(), piece_elems);
    for (std::uint64_t t = 0; t < chunks; ++t) {
      const unsigned parity = group_.next_input_parity();
      for (int rank = 0; rank < world_size_; ++rank) {
        if (rank == rank_ && !call_.premultiply) continue;
        stage(chunk_of(shard(rank), t, piece_elems),
              group_.mine().input(parity) + static_cast<std::uint64_t>(rank) * piece_bytes);
      }
      if (const dc_shm_status status = meet()) return status;
      if (t == 0 && chunks > 1 && is_shared(false)) {
        fold_all(shard(rank_), [&](int rank) { return shared_input(rank, shard(rank_).begin); }, output_, rank_);
        return group_.barrier();
      }
      const Range own = chunk_of(shard(rank_), t, piece_elems);
      const std::uint64_t offset = static_cast<std::uint64_t>(rank_) * piece_bytes;
      fold_all(own, [&](int rank) { return group_.segment(rank).input(parity) + offset; },
               output_at(own.begin - shard(rank_).begin), rank_);
    }
    return DC_SHM_OK;
  }

  dc_shm_status all_gather() {
    const std::uint64_t chunks = num_chunks(largest_shard(), chunk_elems_);
    const bool in_place = input_ == output_at(shard(rank_).begin);
    for (std::uint64_t t = 0; t < chunks; ++t) {
      const Range own = chunk_of(shard(rank_), t, chunk_elems_);
      const unsigned parity = group_.next_input_parity();
      std::byte* slot = group_.mine().input(parity);
      cached_copy(slot, input_at(own.begin - shard(rank_).begin), own.size() * item_);
      if (const dc_shm_status status = meet()) return status;
      if (t == 0 && chunks > 1 && is_shared(false)) {
        for (int rank = 0; rank < world_size_; ++rank) {
          if (rank != rank_ || !in_place) copy_out(shard(rank), shared_input(rank, 0));
        }
        return group_.barrier();
      }
      for (int rank = 0; rank < world_size_; ++rank) {
        if (rank == rank_ && in_place) continue;
        copy_out(chunk_of(shard(rank), t, chunk_elems_), group_.segment(rank).input(parity));
      }
    }
    return DC_SHM_OK;
  }
};

}  // namespace

dc_shm_status run_collective(dc_shm_group& group, const dc_shm_call& call, const void* input, void* output,
                             double factor) {
  return Collective(group, call, input, output, factor).run();
}

}  // namespace detcomm::shm
