// SPDX-License-Identifier: Apache-2.0
// A rank's view of its group: the segments, the barrier, and how a wait ends when a peer does not come.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "shm_patience.h"
#include "shm_segment.h"

struct dc_shm_group {
 public:
  using Clock = std::chrono::steady_clock;

  dc_shm_group(int rank, int world_size, void* const* segments, const std::int32_t* pidfds,
               void* const* heaps, const std::uint64_t* heap_bytes, const dc_shm_tuning& tuning);
  dc_shm_group(const dc_shm_group&) = delete;
  dc_shm_group& operator=(const dc_shm_group&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const dc_shm_tuning& tuning() const { return tuning_; }
  const detcomm::shm::Layout& layout() const { return layout_; }
  const detcomm::shm::Segment& segment(int rank) const { return segments_[static_cast<std::size_t>(rank)]; }
  const detcomm::shm::Segment& mine() const { return segment(rank_); }

  // Starts the clock of one call. Returns the fault of an already broken group, else DC_SHM_OK.
  dc_shm_status begin(double timeout_s);

  // Returns when every rank has come; whatever a rank wrote before is then seen by all.
  dc_shm_status barrier();

  // The agreement on a call: each rank shows its digest before a barrier and compares all of them after it, so that all
  // ranks come to the same verdict. What is shown beside it is as good as agreed then.
  void show(const std::uint8_t* digest, detcomm::shm::Placement placement);
  dc_shm_status compare_digests() const;
  detcomm::shm::Placement placement(int rank) const { return segment(rank).control().placements[call_parity_]; }

  // The offset of this rank's memory in its shared allocations, or -1; and any rank's memory by that offset.
  std::int64_t offset_in_heap(const void* memory, std::uint64_t num_bytes) const;
  std::byte* heap(int rank, std::int64_t offset) const { return heaps_[static_cast<std::size_t>(rank)] + offset; }

  // Texts from all ranks, gathered the same way.
  dc_shm_status gather_texts(const char* mine, char* all);

  // Sleeps until the own doorbell is not `seen` any more, looking after the ranks in `peers` now and then.
  dc_shm_status wait_for_doorbell(std::uint32_t seen, const std::vector<int>& peers);

  // Wakes `peer`: one of the mailboxes between us has moved.
  void ring(int peer);

  // Records a fault as this rank's and returns its status; the peers see it within a slice of their wait.
  dc_shm_status fail(dc_shm_status status, const std::vector<int>& culprits, const char* text);

  void abort(const char* reason);
  void leave();
  void get_fault(dc_shm_fault* fault) const;

  // Which of two staging buffers the next chunk goes to. Ranks toggle it alike, so that a buffer is written again only
  // after a barrier that all its readers have come to.
  unsigned next_input_parity() { return input_parity_ ^= 1U; }

 private:
  template <class Done, class Missing>
  dc_shm_status wait(detcomm::shm::Bell& bell, Done done, Missing missing);
  dc_shm_status look_for_faults();
  dc_shm_status look_after(const std::vector<int>& peers);
  dc_shm_status adopt(const dc_shm_fault& fault);

  int rank_;
  int world_size_;
  dc_shm_tuning tuning_;
  detcomm::shm::Layout layout_;
  detcomm::shm::Patience<> patience_;
  std::vector<detcomm::shm::Segment> segments_;
  std::vector<std::int32_t> pidfds_;
  std::vector<std::byte*> heaps_;
  std::uint64_t own_heap_bytes_;
  Clock::time_point deadline_{};
  std::uint64_t barriers_ = 0;
  unsigned input_parity_ = 0;
  unsigned call_parity_ = 0;
};
