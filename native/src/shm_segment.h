// SPDX-License-Identifier: Apache-2.0
// What lies where in a rank's segment. A segment starts zeroed, and zero is the initial state of everything in it.
//
//   Control      counters, fault record, digests             (read by all, written by the owner; rank 0's also barriers)
//   inputs[2]    staged operands, double-buffered             (written by the owner, read by all)
//   results[2]   this rank's part of a result, double-buffered
//   mailboxes    one for each peer: bytes of dc_shm_exchange  (written by the owner, read by that peer)
//
// Pages that are never touched take no memory, so a group that only ever reduces small tensors stays small.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "detcomm_shm.h"

namespace detcomm::shm {

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kPage = 4096;

// Why the owner of the segment gave up. `claimed` lets one thread write, `status` publishes what it wrote.
struct FaultRecord {
  std::atomic<std::uint32_t> claimed;
  std::atomic<std::uint32_t> status;
  dc_shm_fault fault;
};

// Sleeping on `word` until a peer changes it. `sleepers` spares the peer the system call when nobody sleeps.
struct alignas(kCacheLine) Bell {
  std::atomic<std::uint32_t> word;
  std::atomic<std::uint32_t> sleepers;
};

// Where a rank's input and output of one call lie in its shared allocations; negative, elsewhere.
struct Placement {
  std::int64_t input, output;
};

struct Control {
  alignas(kCacheLine) std::atomic<std::uint64_t> arrivals;  // rank 0's: of all ranks, over all barriers
  Bell generation;                                          // rank 0's: barriers that are complete
  alignas(kCacheLine) std::atomic<std::uint32_t> arrived;   // barriers that the owner has come to
  Bell doorbell;                                            // rung when a mailbox of the owner's moved
  alignas(kCacheLine) std::atomic<std::uint32_t> left;      // the owner has closed its group
  alignas(kCacheLine) FaultRecord fault;
  // Double-buffered as the inputs are: the readers of one call's are done before the call after the next writes.
  alignas(kCacheLine) std::uint8_t digests[2][DC_SHM_DIGEST_BYTES];
  Placement placements[2];
  alignas(kCacheLine) char texts[2][DC_SHM_TEXT_BYTES];
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free,
              "atomics in shared memory must not hide a lock of one process");

// Slots of a mailbox: two let the sender fill one while the receiver empties the other; four ride out a time slice.
constexpr std::uint32_t kMailboxSlots = 4;

// A single-producer, single-consumer ring from the owner of the segment to one peer. A message is cut into fragments.
struct Mailbox {
  alignas(kCacheLine) std::atomic<std::uint32_t> filled;   // fragments put in, by the owner
  alignas(kCacheLine) std::atomic<std::uint32_t> emptied;  // fragments taken out, by the peer
  alignas(kCacheLine) std::uint64_t message_bytes[kMailboxSlots];  // of the whole message that a fragment belongs to
};

inline std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// Offsets in a segment; equal on all ranks since the tuning is.
struct Layout {
  std::size_t inputs, results, mailboxes, mailbox_stride, total;
  std::size_t chunk_bytes, mailbox_bytes;

  Layout(int world_size, const dc_shm_tuning& tuning)
      : chunk_bytes(tuning.chunk_bytes), mailbox_bytes(tuning.mailbox_bytes) {
    inputs = round_up(sizeof(Control), kPage);
    results = inputs + 2 * round_up(chunk_bytes, kPage);
    mailboxes = results + 2 * round_up(chunk_bytes, kPage);
    mailbox_stride = round_up(sizeof(Mailbox) + kMailboxSlots * mailbox_bytes, kPage);
    total = mailboxes + mailbox_stride * static_cast<std::size_t>(world_size);
  }
};

// One rank's segment as this process has mapped it.
class Segment {
 public:
  Segment() = default;
  Segment(void* base, const Layout& layout) : base_(static_cast<std::byte*>(base)), layout_(&layout) {}

  Control& control() const { return *reinterpret_cast<Control*>(base_); }
  std::byte* input(unsigned parity) const { return base_ + layout_->inputs + parity * buffer_stride(); }
  std::byte* result(unsigned parity) const { return base_ + layout_->results + parity * buffer_stride(); }
  Mailbox& mailbox(int peer) const { return *reinterpret_cast<Mailbox*>(mailbox_base(peer)); }
  std::byte* mailbox_slot(int peer, std::uint32_t index) const {
    return mailbox_base(peer) + sizeof(Mailbox) + (index % kMailboxSlots) * layout_->mailbox_bytes;
  }

 private:
  std::size_t buffer_stride() const { return round_up(layout_->chunk_bytes, kPage); }
  std::byte* mailbox_base(int peer) const {
    return base_ + layout_->mailboxes + static_cast<std::size_t>(peer) * layout_->mailbox_stride;
  }

  std::byte* base_ = nullptr;
  const Layout* layout_ = nullptr;
};

}  // namespace detcomm::shm
