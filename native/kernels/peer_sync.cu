// SPDX-License-Identifier: Apache-2.0
// The one kernel of the peer-memory path that waits for peers: one block, a thread for each of them. Folds and copies,
// which fill the GPU, come behind it in the stream and never wait.
#include "peers.cuh"

DC_KERNEL(32) dc_peer_sync(DC_ARGUMENT Sync sync) {
  const u32 k = static_cast<u32>(first_index());
  const bool takes_part = k < sync.num_signals && load_relaxed(&sync.pads[sync.index]->dead) == 0;
  if (takes_part) tell(sync, k);
  join_warp();
  if (takes_part) wait(sync, k);
}
