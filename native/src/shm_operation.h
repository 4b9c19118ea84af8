// SPDX-License-Identifier: Apache-2.0
// One collective call on one rank: where its elements lie, how they are staged, folded and copied out, and the agreement.
// In which order that happens is shm_collectives.cpp's business.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "fold.h"
#include "shm_copy.h"
#include "shm_group.h"

namespace detcomm::shm {

// From this size on, a result is written past the caches.
constexpr std::uint64_t kStreamBytes = std::uint64_t{4} << 20;

// A run of elements.
struct Range {
  std::uint64_t begin, end;
  std::uint64_t size() const { return end - begin; }
};

class Operation {
 public:
  Operation(dc_shm_group& group, const dc_shm_call& call, const void* input, void* output, double factor)
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
    group.show(call.digest, {group.offset_in_heap(input, input_elems() * item_),
                             group.offset_in_heap(output, output_elems() * item_)});
  }

 protected:
  bool receives() const { return call_.collective != DC_SHM_REDUCE || rank_ == call_.root; }
  std::uint64_t input_elems() const {
    return call_.collective == DC_SHM_ALL_GATHER ? shard(rank_).size() : call_.count;
  }
  std::uint64_t output_elems() const {
    return call_.collective == DC_SHM_REDUCE_SCATTER ? shard(rank_).size() : call_.count;
  }
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
    } else {
      cached_copy(slot, input_at(elems.begin), elems.size() * item_);
    }
  }

  // The first barrier of a call is also the agreement: nothing has been written to any output before it.
  dc_shm_status meet() {
    const dc_shm_status status = group_.barrier();
    if (status != DC_SHM_OK || agreed_) return status;
    agreed_ = true;
    return group_.compare_digests();
  }

  // After the first barrier: whether every rank's memory can be read, and written, where it lies. All ranks see the same.
  bool is_shared(bool outputs_too) const {
    if (call_.premultiply) return false;
    for (int rank = 0; rank < world_size_; ++rank) {
      const Placement placement = group_.placement(rank);
      if (placement.input < 0 || (outputs_too && placement.output < 0)) return false;
    }
    return true;
  }

  const std::byte* shared_input(int rank, std::uint64_t elem) const {
    return group_.heap(rank, group_.placement(rank).input) + elem * item_;
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

  void copy_out(Range elems, const std::byte* from) const {
    if (elems.size() == 0) return;
    if (streams_) {
      stream_copy(output_at(elems.begin), from, elems.size() * item_);
    } else {
      cached_copy(output_at(elems.begin), from, elems.size() * item_);
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

}  // namespace detcomm::shm
