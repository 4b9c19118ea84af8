// SPDX-License-Identifier: Apache-2.0
#include "shm_group.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>

using detcomm::shm::Bell;
using detcomm::shm::Control;
using detcomm::shm::FaultRecord;

namespace {

// How long a sleeper sleeps before it looks after its peers, which bounds how late a death is seen.
constexpr std::chrono::milliseconds kSlice{20};

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::nanoseconds limit) {
  struct timespec span;
  span.tv_sec = static_cast<time_t>(limit.count() / 1000000000);
  span.tv_nsec = static_cast<long>(limit.count() % 1000000000);
  // Not FUTEX_PRIVATE_FLAG: the sleepers are different processes.
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, expected, &span, nullptr, 0);
}

void wake_all(Bell& bell) {
  // Sequentially consistent on both sides: either the sleeper sees the new word, or we see the sleeper.
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&bell.word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

// Whether `reached` barriers include number `wanted`, also after the counters wrapped around.
bool at_least(std::uint32_t reached, std::uint32_t wanted) { return static_cast<std::int32_t>(reached - wanted) >= 0; }

bool has_ended(std::int32_t pidfd) {
  if (pidfd < 0) return false;
  struct pollfd entry = {pidfd, POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

}  // namespace

dc_shm_group::dc_shm_group(int rank, int world_size, void* const* segments, const std::int32_t* pidfds,
                           void* const* heaps, const std::uint64_t* heap_bytes, const dc_shm_tuning& tuning)
    : rank_(rank),
      world_size_(world_size),
      tuning_(tuning),
      layout_(world_size, tuning),
      patience_(tuning),
      own_heap_bytes_(heaps[rank] == nullptr ? 0 : heap_bytes[rank]) {
  for (int peer = 0; peer < world_size; ++peer) {
    segments_.emplace_back(segments[peer], layout_);
    pidfds_.push_back(pidfds[peer]);
    heaps_.push_back(static_cast<std::byte*>(heaps[peer]));
    if (heaps[peer] == nullptr) own_heap_bytes_ = 0;  // some rank cannot see all heaps, so no memory counts as shared
  }
}

dc_shm_status dc_shm_group::begin(double timeout_s) {
  const auto span = std::chrono::duration<double>(std::min(std::max(timeout_s, 0.0), 1e8));
  deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(span);
  return look_for_faults();
}

template <class Done, class Missing>
dc_shm_status dc_shm_group::wait(Bell& bell, Done done, Missing missing) {
  if (done() || patience_.wait(done)) return DC_SHM_OK;

  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  dc_shm_status status = DC_SHM_OK;
  for (;;) {
    const std::uint32_t seen = bell.word.load(std::memory_order_seq_cst);
    if (done()) break;
    const auto left = deadline_ - Clock::now();
    futex_wait(bell.word, seen, std::clamp<std::chrono::nanoseconds>(left, std::chrono::microseconds(1), kSlice));
    if (done()) break;
    status = look_after(missing());
    if (status != DC_SHM_OK) break;
    if (Clock::now() >= deadline_) {
      const std::vector<int> late = missing();
      if (late.empty()) break;  // it came in this very moment
      status = fail(DC_SHM_TIMEOUT, late, "");
      break;
    }
  }
  bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return status;
}

dc_shm_status dc_shm_group::barrier() {
  Control& counters = segment(0).control();
  const std::uint64_t number = ++barriers_;
  const auto wanted = static_cast<std::uint32_t>(number);
  mine().control().arrived.store(wanted, std::memory_order_release);
  const std::uint64_t before = counters.arrivals.fetch_add(1, std::memory_order_acq_rel);
  if (before + 1 == number * static_cast<std::uint64_t>(world_size_)) {
    counters.generation.word.store(wanted, std::memory_order_seq_cst);
    wake_all(counters.generation);
    return DC_SHM_OK;
  }
  return wait(
      counters.generation,
      [&] { return at_least(counters.generation.word.load(std::memory_order_acquire), wanted); },
      [&] {
        std::vector<int> peers;
        for (int peer = 0; peer < world_size_; ++peer) {
          if (!at_least(segment(peer).control().arrived.load(std::memory_order_acquire), wanted)) peers.push_back(peer);
        }
        return peers;
      });
}

void dc_shm_group::show(const std::uint8_t* digest, detcomm::shm::Placement placement) {
  call_parity_ ^= 1U;
  std::memcpy(mine().control().digests[call_parity_], digest, DC_SHM_DIGEST_BYTES);
  mine().control().placements[call_parity_] = placement;
}

std::int64_t dc_shm_group::offset_in_heap(const void* memory, std::uint64_t num_bytes) const {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const auto begin = reinterpret_cast<std::uintptr_t>(heaps_[static_cast<std::size_t>(rank_)]);
  const bool inside = own_heap_bytes_ != 0 && address >= begin && address - begin <= own_heap_bytes_ &&
                      num_bytes <= own_heap_bytes_ - (address - begin);
  return inside ? static_cast<std::int64_t>(address - begin) : -1;
}

dc_shm_status dc_shm_group::compare_digests() const {
  const std::uint8_t* first = segment(0).control().digests[call_parity_];
  for (int rank = 1; rank < world_size_; ++rank) {
    if (std::memcmp(first, segment(rank).control().digests[call_parity_], DC_SHM_DIGEST_BYTES) != 0) {
      return DC_SHM_MISMATCH;
    }
  }
  return DC_SHM_OK;
}

dc_shm_status dc_shm_group::gather_texts(const char* text, char* all) {
  call_parity_ ^= 1U;
  std::memcpy(mine().control().texts[call_parity_], text, DC_SHM_TEXT_BYTES);
  if (const dc_shm_status status = barrier()) return status;
  for (int rank = 0; rank < world_size_; ++rank) {
    std::memcpy(all + static_cast<std::size_t>(rank) * DC_SHM_TEXT_BYTES, segment(rank).control().texts[call_parity_],
                DC_SHM_TEXT_BYTES);
  }
  return DC_SHM_OK;
}

dc_shm_status dc_shm_group::wait_for_doorbell(std::uint32_t seen, const std::vector<int>& peers) {
  Bell& bell = mine().control().doorbell;
  return wait(
      bell, [&] { return bell.word.load(std::memory_order_acquire) != seen; }, [&] { return peers; });
}

void dc_shm_group::ring(int peer) {
  Bell& bell = segment(peer).control().doorbell;
  bell.word.fetch_add(1, std::memory_order_seq_cst);
  wake_all(bell);
}

// A fault that a peer reports is everybody's, whether or not we wait for that peer. Looked for at the start of a call
// too: a rank that comes late would complete a barrier that the others have given up.
dc_shm_status dc_shm_group::look_for_faults() {
  if (const auto status = mine().control().fault.status.load(std::memory_order_acquire)) {
    return static_cast<dc_shm_status>(status);
  }
  for (int peer = 0; peer < world_size_; ++peer) {
    const FaultRecord& record = segment(peer).control().fault;
    if (record.status.load(std::memory_order_acquire) != 0) return adopt(record.fault);
  }
  return DC_SHM_OK;
}

// Called in the slices of a sleep: has anybody given up, left or died?
dc_shm_status dc_shm_group::look_after(const std::vector<int>& peers) {
  if (const dc_shm_status status = look_for_faults()) return status;
  for (const int peer : peers) {
    if (segment(peer).control().left.load(std::memory_order_acquire) != 0) {
      return fail(DC_SHM_PEER_LOST, {peer}, "it has left the group");
    }
    if (peer != rank_ && has_ended(pidfds_[static_cast<std::size_t>(peer)])) {
      return fail(DC_SHM_PEER_LOST, {peer}, "its process has ended");
    }
  }
  return DC_SHM_OK;
}

dc_shm_status dc_shm_group::adopt(const dc_shm_fault& fault) {
  FaultRecord& record = mine().control().fault;
  if (record.claimed.exchange(1, std::memory_order_acq_rel) == 0) {
    record.fault = fault;
    record.status.store(static_cast<std::uint32_t>(fault.status), std::memory_order_release);
  }
  return static_cast<dc_shm_status>(fault.status);
}

dc_shm_status dc_shm_group::fail(dc_shm_status status, const std::vector<int>& culprits, const char* text) {
  dc_shm_fault fault = {};
  fault.status = status;
  fault.reporter = rank_;
  for (const int culprit : culprits) {
    if (fault.num_culprits < DC_SHM_MAX_RANKS) fault.culprits[fault.num_culprits++] = culprit;
  }
  std::strncpy(fault.text, text, DC_SHM_TEXT_BYTES - 1);
  return adopt(fault);
}

void dc_shm_group::abort(const char* reason) {
  fail(DC_SHM_ABORTED, {rank_}, reason);
  // Wake our own sleeper at once; the peers look within a slice. The barrier's word must not change, so its sleeper
  // wakes by itself.
  ring(rank_);
}

void dc_shm_group::leave() { mine().control().left.store(1, std::memory_order_release); }

void dc_shm_group::get_fault(dc_shm_fault* fault) const {
  const FaultRecord& record = mine().control().fault;
  if (record.status.load(std::memory_order_acquire) == 0) {
    *fault = dc_shm_fault{};
  } else {
    *fault = record.fault;
  }
}
