// SPDX-License-Identifier: Apache-2.0
// The C entry points: check the arguments, then hand over.
#include <exception>
#include <new>

#include "shm_run.h"

using namespace detcomm::shm;

namespace {

bool is_valid(std::int32_t world_size, const dc_shm_tuning* tuning) {
  return world_size >= 2 && world_size <= DC_SHM_MAX_RANKS && tuning != nullptr &&
         tuning->chunk_bytes % kCacheLine == 0 &&
         tuning->chunk_bytes >= kCacheLine * static_cast<std::uint64_t>(world_size) &&
         tuning->mailbox_bytes % kCacheLine == 0 && tuning->mailbox_bytes != 0;
}

bool is_valid(const dc_shm_group& group, const dc_shm_call& call) {
  const bool sharded = call.collective == DC_SHM_REDUCE_SCATTER || call.collective == DC_SHM_ALL_GATHER;
  return call.collective >= DC_SHM_ALL_REDUCE && call.collective <= DC_SHM_REDUCE &&
         (call.item_bytes == 1 || call.item_bytes == 2 || call.item_bytes == 4 || call.item_bytes == 8) &&
         call.root >= 0 && call.root < group.world_size() && sharded == (call.shards != nullptr);
}

// No exception may cross a C boundary. Memory for a handful of pointers is all that is ever allocated here.
template <class Body>
std::int32_t guarded(dc_shm_group& group, double timeout_s, Body body) {
  try {
    if (const dc_shm_status status = group.begin(timeout_s)) return status;
    return body();
  } catch (const std::exception& error) {
    return group.fail(DC_SHM_ABORTED, {group.rank()}, error.what());
  }
}

}  // namespace

extern "C" {

std::uint64_t dc_shm_segment_bytes(std::int32_t world_size, const dc_shm_tuning* tuning) {
  return is_valid(world_size, tuning) ? Layout(world_size, *tuning).total : 0;
}

dc_shm_group* dc_shm_open(std::int32_t rank, std::int32_t world_size, void* const* segments,
                          const std::int32_t* pidfds, void* const* heaps, const std::uint64_t* heap_bytes,
                          const dc_shm_tuning* tuning) {
  if (!is_valid(world_size, tuning) || rank < 0 || rank >= world_size) return nullptr;
  try {
    return new dc_shm_group(rank, world_size, segments, pidfds, heaps, heap_bytes, *tuning);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void dc_shm_close(dc_shm_group* group) {
  if (group == nullptr) return;
  group->leave();
  delete group;
}

std::int32_t dc_shm_run(dc_shm_group* group, const dc_shm_call* call, const void* input, void* output, double factor,
                        double timeout_s) {
  if (!is_valid(*group, *call)) return DC_SHM_USAGE;
  return guarded(*group, timeout_s, [&] { return run_collective(*group, *call, input, output, factor); });
}

std::int32_t dc_shm_agree(dc_shm_group* group, const std::uint8_t* digest, double timeout_s) {
  return guarded(*group, timeout_s, [&]() -> dc_shm_status {
    group->show(digest, {-1, -1});
    group->next_input_parity();  // as every collective does before its first barrier: they may disagree, and stay in step
    const dc_shm_status status = group->barrier();
    return status != DC_SHM_OK ? status : group->compare_digests();
  });
}

std::int32_t dc_shm_gather_texts(dc_shm_group* group, const char* mine, char* all, double timeout_s) {
  return guarded(*group, timeout_s, [&] { return group->gather_texts(mine, all); });
}

std::int32_t dc_shm_exchange(dc_shm_group* group, const dc_shm_parcel* sends, std::int32_t num_sends,
                             const dc_shm_parcel* recvs, std::int32_t num_recvs, double timeout_s) {
  for (std::int32_t i = 0; i < num_sends + num_recvs; ++i) {
    const std::int32_t peer = i < num_sends ? sends[i].peer : recvs[i - num_sends].peer;
    if (peer < 0 || peer >= group->world_size() || peer == group->rank()) return DC_SHM_USAGE;
  }
  return guarded(*group, timeout_s,
                 [&] { return run_exchange(*group, sends, num_sends, recvs, num_recvs); });
}

void dc_shm_abort(dc_shm_group* group, const char* reason) { group->abort(reason); }

void dc_shm_get_fault(const dc_shm_group* group, dc_shm_fault* fault) { group->get_fault(fault); }

}  // extern "C"
