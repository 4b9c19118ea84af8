// SPDX-License-Identifier: Apache-2.0
// Memory that the ranks of a block have mapped: where an operand lies, and the signal pad by which they keep order.
//
// A pad belongs to one rank; peers write into it what they tell that rank, and it keeps its own counts there. All counts
// only grow, and all lie on the device: a captured graph replays with the same parameters and goes on counting.
#pragma once

#include "device.cuh"

constexpr int kMostPeers = 16;
constexpr int kMostRegions = 4096;  // of one rank

// What a kernel reads, of this rank or of a peer.
struct Source {
  const u8* address;  // unless `place` says otherwise
  const u64* place;   // the word that holds the base of a peer's buffer, or 0 if the peer has staged it
  u64 offset;         // behind that base
};

DC_DEVICE const u8* address_of(const Source& source) {
  const u64 base = source.place == nullptr ? 0 : *source.place;
  return base == 0 ? source.address : reinterpret_cast<const u8*>(base + source.offset);
}

struct Pad {
  // Written by peers, by their index.
  u32 ready[kMostPeers];      // messages that the peer has made ready for this rank
  u32 done[kMostPeers];       // messages of this rank that the peer has read
  u64 places[kMostPeers][2];  // where the peer's input and output lie: region << 48 | offset, 0 for staged
  // This rank's own, by the index of the peer.
  u64 resolved[kMostPeers][2];  // `places` as addresses of this process
  u32 sent[kMostPeers];         // what was told the peer by `ready`
  u32 awaited[kMostPeers];      // what was waited for
  u32 consumed[kMostPeers];     // what was told the peer by `done`
  u32 dead;                     // a wait has failed: nothing is told or waited for any more
  u32 unused[47];
};
static_assert(sizeof(Pad) == 1024, "pads lie one behind the other, PAD_BYTES of detcomm/cuda/peer/path.py");

// What one sync does with one peer.
struct Signal {
  u32 peer;
  u32 ready;    // 1: tell it that what it is to read is there
  u32 awaited;  // 1: wait until it has told the same
  u32 done;     // of how many of its messages to tell it that they have been read
  s32 most;     // wait until it has read all but so many of ours; below 0: do not
  u32 flags;
};
constexpr u32 kPublish = 1, kResolve = 2;

struct Host {
  u32* words;
  u64 patience_ns;  // how long a peer is waited for
};

struct Sync {
  Pad* pads[kMostPeers];
  const u64* table;  // bases by index and region
  Host host;
  u64 places[2];
  u32 index;
  u32 num_signals;
  Signal signals[kMostPeers];
};

// Words of the host.
constexpr int kAbort = 0, kError = 1, kErrorPeer = 2, kErrorKind = 3;

DC_DEVICE bool has_come(const u32* word, u32 target) { return static_cast<s32>(load_acquire(word) - target) >= 0; }

constexpr u32 kTurnsBetweenLooks = 256;  // at the clock, and at the host's memory, which takes a microsecond

// False if it has not come in time, or the host wants an end; says so to the host once.
DC_DEVICE bool wait_for(const u32* word, u32 target, u32 peer, u32 kind, const Host& host, Pad* own) {
  u64 started = 0;
  for (u32 turn = 1; !has_come(word, target); ++turn) {
    pause();
    if (turn % kTurnsBetweenLooks != 0) continue;
    if (load_relaxed(host.words + kAbort) != 0 || load_relaxed(&own->dead) != 0) {
      store_relaxed(&own->dead, 1);
      return false;
    }
    const u64 now = clock_ns();
    if (started == 0) started = now;
    if (now - started < host.patience_ns) continue;
    if (exchange(&own->dead, 1) == 0) {
      store_relaxed(host.words + kErrorPeer, peer);
      store_relaxed(host.words + kErrorKind, kind);
      store_release(host.words + kError, 1);
    }
    return false;
  }
  return true;
}

// What is told comes first, whatever is waited for: so no two ranks wait for what the other would tell next.
DC_DEVICE void tell(const Sync& sync, u32 k) {
  const Signal& signal = sync.signals[k];
  Pad* own = sync.pads[sync.index];
  Pad* peer = sync.pads[signal.peer];
  if (signal.done != 0) {
    store_release(&peer->done[sync.index], own->consumed[signal.peer] += signal.done);
  }
  if (signal.ready != 0) {
    if (signal.flags & kPublish) {
      peer->places[sync.index][0] = sync.places[0];
      peer->places[sync.index][1] = sync.places[1];
    }
    store_release(&peer->ready[sync.index], own->sent[signal.peer] += signal.ready);
  }
}

DC_DEVICE void wait(const Sync& sync, u32 k) {
  const Signal& signal = sync.signals[k];
  Pad* own = sync.pads[sync.index];
  const u32 peer = signal.peer;
  if (signal.awaited != 0) {
    const u32 target = own->awaited[peer] += signal.awaited;
    if (!wait_for(&own->ready[peer], target, peer, 1, sync.host, own)) return;
    if (signal.flags & kResolve) {
      for (int buffer = 0; buffer < 2; ++buffer) {
        const u64 place = load_relaxed(&own->places[peer][buffer]);
        const u64 base = place == 0 ? 0 : sync.table[peer * kMostRegions + (place >> 48)];
        own->resolved[peer][buffer] = place == 0 ? 0 : base + (place & 0xFFFFFFFFFFFFull);
      }
    }
  }
  if (signal.most >= 0) {
    wait_for(&own->done[peer], own->sent[peer] - static_cast<u32>(signal.most), peer, 2, sync.host, own);
  }
}
