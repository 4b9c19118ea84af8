// SPDX-License-Identifier: Apache-2.0
// The four collectives. Each is a loop over chunks with one barrier a chunk:
//
//   one-shot        stage chunk t | barrier | fold chunk t of all ranks into the output
//   reduce-scatter  stage chunk t of every shard | barrier | fold chunk t of the own shard into the output
//   all-gather      stage chunk t of the own shard | barrier | copy chunk t of all shards to the output
//   two-shot        stage chunk t; fold the own part of chunk t-1; copy chunk t-2 to the output | barrier
//
// In the two-shot loop three chunks are under way at once, so it too needs only one barrier a chunk.
//
// Why two buffers suffice: the readers of a buffer that was staged before barrier b read it before they come to barrier
// b+1, and its owner stages into it again only after barrier b+1. This also holds from one call to the next, because the
// buffers alternate over all calls and every call has a barrier after its first staging.
//
// A rank reads its own operand where the caller has it, and stages only what others read.
#include <algorithm>
#include <cstring>
#include <vector>

#include "fold.h"
#include "shm_copy.h"
#include "shm_run.h"

namespace detcomm::shm {
namespace {

// From this size on, a result is written past the caches.
constexpr std::uint64_t kStreamBytes = std::uint64_t{4} << 20;

// A run of elements.
struct Range {
  std::uint64_t begin, end;
  std::uint64_t size() const { return end - begin; }
};

class Collective {
 public:
  Collective(dc_shm_group& group, const dc_shm_call& call, const void* input, void* output, double factor)
      : group_(group),
        call_(call),
        input_(static_cast<const std::byte*>(input)),
        output_(static_cast<std::byte*>(output)),
        factor_(factor),
        rank_(group.rank()),
        world_size_(group.world_size()),
        item_(static_cast<std::uint64_t>(call.item_bytes)),
        chunk_elems_(group.tuning().chunk_bytes / item_),
        streams_(call.count * item_ >= kStreamBytes),
        operands_(static_cast<std::size_t>(world_size_)),
        ordered_(static_cast<std::size_t>(world_size_)) {
    group.show_digest(call.digest);
  }

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
  bool receives() const { return call_.collective != DC_SHM_REDUCE || rank_ == call_.root; }
  const std::byte* input_at(std::uint64_t elem) const { return input_ + elem * item_; }
  std::byte* output_at(std::uint64_t elem) const { return output_ + elem * item_; }

  // Elements that chunk `index` of a range covers; empty beyond its end.
  static Range chunk_of(Range range, std::uint64_t index, std::uint64_t elems) {
    const std::uint64_t begin = std::min(range.begin + index * elems, range.end);
    return {begin, std::min(begin + elems, range.end)};
  }

  // Part `rank` of a range cut into world_size parts whose borders are cache lines of the staged chunk.
  Range part_of(Range range, int rank) const {
    const std::uint64_t line = std::max<std::uint64_t>(1, kCacheLine / item_);
    const std::uint64_t even = (range.size() + static_cast<std::uint64_t>(world_size_) - 1) /
                               static_cast<std::uint64_t>(world_size_);
    return chunk_of(range, static_cast<std::uint64_t>(rank), round_up(even, line));
  }

  static std::uint64_t num_chunks(std::uint64_t elems, std::uint64_t chunk) {
    return std::max<std::uint64_t>(1, (elems + chunk - 1) / chunk);
  }

  Range shard(int rank) const { return {call_.shards[rank], call_.shards[rank + 1]}; }

  std::uint64_t largest_shard() const {
    std::uint64_t largest = 0;
    for (int rank = 0; rank < world_size_; ++rank) largest = std::max(largest, shard(rank).size());
    return largest;
  }

  // Shows elements of this rank's operand to the others.
  void stage(Range elems, std::byte* slot) const {
    if (call_.premultiply) {
      premultiply(static_cast<dc_dtype>(call_.dtype), factor_, input_at(elems.begin), slot, elems.size());  // bits: the sender multiplies
    } else if (elems.size() != 0) {
      std::memcpy(slot, input_at(elems.begin), elems.size() * item_);
    }
  }

  // The first barrier of a call is also the agreement: nothing has been written to any output before it.
  dc_shm_status meet() {
    const dc_shm_status status = group_.barrier();
    if (status != DC_SHM_OK || agreed_) return status;
    agreed_ = true;
    return group_.compare_digests();
  }

  // Folds the operands of all ranks for `elems` into `target`. `staged(rank)` is where the first of these elements lies in
  // the rank's slot. `fixed_class` is the owner in a reduce-scatter, or -1: by position.
  template <class Staged>
  void fold_all(Range elems, Staged staged, std::byte* target, int fixed_class) {
    if (elems.size() == 0) return;
    for (int rank = 0; rank < world_size_; ++rank) {
      const bool own = rank == rank_ && !call_.premultiply;
      operands_[static_cast<std::size_t>(rank)] = own ? input_at(elems.begin) : staged(rank);
    }
    const std::uint64_t chunk = call_.ring_chunk_elems;
    if (chunk == 0) {
      fold_run(operands_.data(), target, elems.size());  // bits: leaf order is rank order
      return;
    }
    for (std::uint64_t begin = elems.begin; begin < elems.end;) {
      const std::uint64_t index = begin / chunk;
      const std::uint64_t end = fixed_class >= 0 ? elems.end : std::min(elems.end, (index + 1) * chunk);
      const auto owner = fixed_class >= 0 ? static_cast<std::uint64_t>(fixed_class)
                                          : index % static_cast<std::uint64_t>(world_size_);
      const std::uint64_t offset = (begin - elems.begin) * item_;
      for (std::size_t step = 0; step < ordered_.size(); ++step) {
        const std::size_t rank = (owner + 1 + step) % ordered_.size();  // bits: the left fold that ends at the owner
        ordered_[step] = static_cast<const std::byte*>(operands_[rank]) + offset;
      }
      fold_run(ordered_.data(), target + offset, end - begin);
      begin = end;
    }
  }

  void fold_run(const void* const* operands, std::byte* target, std::uint64_t count) {
    FoldSpec spec = {};
    spec.op = static_cast<dc_op>(call_.op);
    spec.dtype = static_cast<dc_dtype>(call_.dtype);
    spec.accumulate = static_cast<dc_accumulate>(call_.accumulate);
    spec.shape = static_cast<dc_shape>(call_.shape);
    spec.is_final = 1;
    spec.num_inputs = static_cast<std::uint32_t>(world_size_);
    spec.divisor = static_cast<std::uint64_t>(world_size_);
    fold(spec, operands, target, count);
  }

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
        const Range own = part_of(chunk, rank_);
        const std::uint64_t offset = (own.begin - chunk.begin) * item_;
        fold_all(own, [&](int rank) { return group_.segment(rank).input(staged_parity) + offset; },
                 group_.mine().result((t - 1) % 2), -1);
      }
      if (t >= 2 && receives()) {
        const Range chunk = chunk_of(whole, t - 2, chunk_elems_);
        for (int rank = 0; rank < world_size_; ++rank) {
          const Range part = part_of(chunk, rank);
          copy_out(part, group_.segment(rank).result((t - 2) % 2));
        }
      }
      if (t < chunks + 1) {
        if (const dc_shm_status status = meet()) return status;
      }
      staged_parity = parity;
    }
    return DC_SHM_OK;
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
      if (own.size() != 0) std::memcpy(slot, input_at(own.begin - shard(rank_).begin), own.size() * item_);
      if (const dc_shm_status status = meet()) return status;
      for (int rank = 0; rank < world_size_; ++rank) {
        if (rank == rank_ && in_place) continue;
        copy_out(chunk_of(shard(rank), t, chunk_elems_), group_.segment(rank).input(parity));
      }
    }
    return DC_SHM_OK;
  }

  void copy_out(Range elems, const std::byte* from) const {
    if (elems.size() == 0) return;
    if (streams_) {
      stream_copy(output_at(elems.begin), from, elems.size() * item_);
    } else {
      std::memcpy(output_at(elems.begin), from, elems.size() * item_);
    }
  }

  dc_shm_group& group_;
  const dc_shm_call& call_;
  const std::byte* input_;
  std::byte* output_;
  double factor_;
  int rank_;
  int world_size_;
  std::uint64_t item_;
  std::uint64_t chunk_elems_;
  bool streams_;
  bool agreed_ = false;
  std::vector<const void*> operands_;  // in rank order
  std::vector<const void*> ordered_;   // in leaf order
};

}  // namespace

dc_shm_status run_collective(dc_shm_group& group, const dc_shm_call& call, const void* input, void* output,
                             double factor) {
  return Collective(group, call, input, output, factor).run();
}

}  // namespace detcomm::shm
