// SPDX-License-Identifier: Apache-2.0
// What the kernels of peers' memory are told: their parameters, as native/kernels/ has them too, made from an operation.
#ifndef DETCOMM_PEER_PARAMETERS_H
#define DETCOMM_PEER_PARAMETERS_H

#include "detcomm_cuda.h"

namespace {

// native/kernels/peers.cuh has the same three.
struct Source {
  const void* address;  // unless `place` says otherwise
  const void* place;    // of the word that holds the base of a peer's buffer, or 0 if the peer has staged it
  uint64_t offset;      // behind that base
};

struct PeerCopies {
  Source src[DC_CUDA_MAX_COPIES];
  void* dst[DC_CUDA_MAX_COPIES];
  uint64_t num_bytes[DC_CUDA_MAX_COPIES];
};

struct Sync {
  void* pads[DC_CUDA_MAX_PEERS];
  const void* table;
  void* words;
  uint64_t patience_ns;
  uint64_t places[2];
  uint32_t index;
  uint32_t num_signals;
  dc_cuda_signal signals[DC_CUDA_MAX_PEERS];
};

struct Row {
  const void* src;
  void* dst;
  uint64_t num_bytes;
  uint32_t peer;
  uint32_t offset;
};

constexpr uint32_t kMostRows = 3 * DC_CUDA_MAX_PEERS + 2;

// native/kernels/peer_fused.cu has the same two.
struct Fused {
  void* pads[DC_CUDA_MAX_PEERS];
  void* slices[DC_CUDA_MAX_PEERS];
  uint64_t slice_bytes;
  void* words;
  uint64_t patience_ns;
  uint32_t index;
  uint32_t num_peers;
  uint32_t num_rounds;
  uint32_t num_stage;
  uint32_t num_operands;
  uint32_t num_fetch;
  uint32_t num_copies;
  uint32_t result_offset;
  void* output;
  uint64_t count;
  uint64_t divisor;
  Row rows[kMostRows];
};

constexpr uint64_t kResolvedOffset = 384;  // of a pad: Pad::resolved

inline void* address_of(const dc_cuda_call& call, const dc_cuda_region& region) {
  return static_cast<unsigned char*>(call.buffers[region.buffer]) + region.offset;
}

// Memory that this rank reads, its own or a peer's.
inline Source source_of(const dc_cuda_call& call, const dc_cuda_region& region) {
  if (region.buffer < 3) return {address_of(call, region), nullptr, 0};
  const dc_cuda_peers& peers = *call.peers;
  const unsigned char* staging = static_cast<const unsigned char*>(peers.staging[region.peer]);
  if (region.buffer == 3) return {staging + region.offset, nullptr, 0};
  const unsigned char* resolved = static_cast<const unsigned char*>(peers.pads[peers.index]) + kResolvedOffset;
  const void* place = resolved + 8 * (2 * region.peer + region.buffer - 4);
  return {staging + region.staged, place, region.offset};
}

inline Sync sync_of(const dc_cuda_program& program, const dc_cuda_call& call, const dc_cuda_op& op) {
  const dc_cuda_peers& peers = *call.peers;
  Sync sync = {};
  for (uint32_t k = 0; k < peers.num_peers; ++k) sync.pads[k] = peers.pads[k];
  sync.table = peers.table;
  sync.words = peers.words;
  sync.patience_ns = peers.patience_ns;
  sync.places[0] = peers.places[0];
  sync.places[1] = peers.places[1];
  sync.index = peers.index;
  sync.num_signals = op.num_regions;
  for (uint32_t k = 0; k < op.num_regions; ++k) sync.signals[k] = program.signals[op.first_region + k];
  return sync;
}

inline uint32_t num_rows_of(const dc_cuda_op& op) { return op.parts[0] + op.parts[1] + op.parts[2] + op.parts[3]; }

inline Fused fused_of(const dc_cuda_program& program, const dc_cuda_call& call, const dc_cuda_op& op) {
  const dc_cuda_peers& peers = *call.peers;
  Fused fused = {};
  for (uint32_t k = 0; k < peers.num_peers; ++k) {
    fused.pads[k] = static_cast<unsigned char*>(peers.pads[k]) + peers.pad_bytes;
    fused.slices[k] = static_cast<unsigned char*>(peers.staging[k]) + peers.fused_offset;
  }
  fused.slice_bytes = peers.slice_bytes;
  fused.words = peers.words;
  fused.patience_ns = peers.patience_ns;
  fused.index = peers.index;
  fused.num_peers = peers.num_peers;
  fused.num_rounds = op.num_rounds;
  fused.num_stage = op.parts[0];
  fused.num_operands = op.parts[1];
  fused.num_fetch = op.parts[2];
  fused.num_copies = op.parts[3];
  fused.count = op.count;
  fused.divisor = op.divisor;
  const dc_cuda_region* next = program.regions + op.first_region;
  Row* row = fused.rows;
  for (uint32_t k = 0; k < fused.num_stage + fused.num_operands; ++k, ++row, ++next) {
    const void* src = next->buffer == 3 ? nullptr : address_of(call, *next);
    *row = {src, nullptr, next->num_bytes, static_cast<uint32_t>(next->peer), static_cast<uint32_t>(next->staged)};
  }
  if (fused.num_operands != 0) {
    fused.output = address_of(call, *next);
    fused.result_offset = static_cast<uint32_t>(next->staged);
    ++next;
  }
  for (uint32_t k = 0; k < fused.num_fetch; ++k, ++row, ++next) {
    void* dst = address_of(call, *next);
    *row = {nullptr, dst, next->num_bytes, static_cast<uint32_t>(next->peer), static_cast<uint32_t>(next->staged)};
  }
  for (uint32_t k = 0; k < fused.num_copies; ++k, ++row, next += 2) {
    *row = {address_of(call, next[0]), address_of(call, next[1]), next->num_bytes, 0, 0};
  }
  return fused;
}

}  // namespace

#endif
