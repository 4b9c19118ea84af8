// SPDX-License-Identifier: Apache-2.0
// Point-to-point messages through mailboxes: what lets any plan run over shared memory. Moves bytes, adds nothing.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "shm_copy.h"
#include "shm_run.h"

namespace detcomm::shm {
namespace {

// The messages to one peer, or from one, in posting order.
struct Lane {
  int peer;
  std::vector<const dc_shm_parcel*> parcels;
  std::size_t next = 0;         // the parcel under way
  std::uint64_t done_bytes = 0;  // of it

  bool finished() const { return next == parcels.size(); }
  void advance(std::uint64_t num_bytes) {
    done_bytes += num_bytes;
    if (done_bytes == parcels[next]->num_bytes) {
      ++next;
      done_bytes = 0;
    }
  }
};

std::vector<Lane> lanes_of(const dc_shm_parcel* parcels, int num_parcels) {
  std::vector<Lane> lanes;
  for (int i = 0; i < num_parcels; ++i) {
    auto lane = std::find_if(lanes.begin(), lanes.end(), [&](const Lane& l) { return l.peer == parcels[i].peer; });
    if (lane == lanes.end()) lane = lanes.insert(lanes.end(), Lane{parcels[i].peer, {}});
    lane->parcels.push_back(&parcels[i]);
  }
  return lanes;
}

// Fills free slots of the mailbox to the lane's peer. Whether anything moved.
bool send_some(dc_shm_group& group, Lane& lane) {
  Mailbox& box = group.mine().mailbox(lane.peer);
  const std::uint64_t slot_bytes = group.tuning().mailbox_bytes;
  bool moved = false;
  while (!lane.finished()) {
    const std::uint32_t index = box.filled.load(std::memory_order_relaxed);
    if (index - box.emptied.load(std::memory_order_acquire) >= kMailboxSlots) break;
    const dc_shm_parcel& parcel = *lane.parcels[lane.next];
    const std::uint64_t part = std::min(parcel.num_bytes - lane.done_bytes, slot_bytes);
    cached_copy(group.mine().mailbox_slot(lane.peer, index),
                static_cast<const std::byte*>(parcel.data) + lane.done_bytes, part);
    box.message_bytes[index % kMailboxSlots] = parcel.num_bytes;
    box.filled.store(index + 1, std::memory_order_release);
    lane.advance(part);
    group.ring(lane.peer);
    moved = true;
  }
  return moved;
}

// Empties what has come from the lane's peer.
dc_shm_status receive_some(dc_shm_group& group, Lane& lane, bool& moved) {
  Mailbox& box = group.segment(lane.peer).mailbox(group.rank());
  const std::uint64_t slot_bytes = group.tuning().mailbox_bytes;
  while (!lane.finished()) {
    const std::uint32_t index = box.emptied.load(std::memory_order_relaxed);
    if (index == box.filled.load(std::memory_order_acquire)) break;
    const dc_shm_parcel& parcel = *lane.parcels[lane.next];
    const std::uint64_t sent_bytes = box.message_bytes[index % kMailboxSlots];
    if (sent_bytes != parcel.num_bytes) {
      char text[160];
      std::snprintf(text, sizeof text, "rank %d expected a message of %llu bytes and got one of %llu", group.rank(),
                    static_cast<unsigned long long>(parcel.num_bytes), static_cast<unsigned long long>(sent_bytes));
      return group.fail(DC_SHM_PEER_LOST, {lane.peer}, text);
    }
    const std::uint64_t part = std::min(parcel.num_bytes - lane.done_bytes, slot_bytes);
    cached_copy(static_cast<std::byte*>(parcel.data) + lane.done_bytes,
                group.segment(lane.peer).mailbox_slot(group.rank(), index), part);
    box.emptied.store(index + 1, std::memory_order_release);
    lane.advance(part);
    group.ring(lane.peer);
    moved = true;
  }
  return DC_SHM_OK;
}

std::vector<int> unfinished_peers(const std::vector<Lane>& sends, const std::vector<Lane>& recvs) {
  std::vector<int> peers;
  for (const auto* lanes : {&sends, &recvs}) {
    for (const Lane& lane : *lanes) {
      if (!lane.finished() && std::find(peers.begin(), peers.end(), lane.peer) == peers.end()) {
        peers.push_back(lane.peer);
      }
    }
  }
  std::sort(peers.begin(), peers.end());
  return peers;
}

}  // namespace

dc_shm_status run_exchange(dc_shm_group& group, const dc_shm_parcel* sends, int num_sends,
                           const dc_shm_parcel* recvs, int num_recvs) {
  std::vector<Lane> outgoing = lanes_of(sends, num_sends);
  std::vector<Lane> incoming = lanes_of(recvs, num_recvs);
  for (;;) {
    // Read the bell before looking, so that what moves after the look is not slept through.
    const std::uint32_t seen = group.mine().control().doorbell.word.load(std::memory_order_seq_cst);
    bool moved = false;
    for (Lane& lane : outgoing) moved |= send_some(group, lane);
    for (Lane& lane : incoming) {
      if (const dc_shm_status status = receive_some(group, lane, moved)) return status;
    }
    const std::vector<int> peers = unfinished_peers(outgoing, incoming);
    if (peers.empty()) return DC_SHM_OK;
    if (moved) continue;
    if (const dc_shm_status status = group.wait_for_doorbell(seen, peers)) return status;
  }
}

}  // namespace detcomm::shm
