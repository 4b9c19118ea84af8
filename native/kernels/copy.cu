// SPDX-License-Identifier: Apache-2.0
// Up to kMostCopies copies in one launch, a row of blocks for each: a plan's packs and unpacks are many and short.
// With DC_PEERS sources may lie in peers' memory.
#include "elements.cuh"
#include "peers.cuh"

constexpr int kMostCopies = 64;

#if DC_PEERS
typedef Source From;
DC_DEVICE const u8* address_of_row(const From& from) { return address_of(from); }
#else
typedef const u8* From;
DC_DEVICE const u8* address_of_row(From from) { return from; }
#endif

struct Copies {
  From src[kMostCopies];
  u8* dst[kMostCopies];
  u64 num_bytes[kMostCopies];
};

DC_DEVICE void copy_bytes(const u8* src, u8* dst, u64 first, u64 stop, u64 step) {
  for (u64 i = first; i < stop; i += step) dst[i] = src[i];
}

template <class T>
DC_DEVICE void copy_words(const u8* src, u8* dst, u64 num_bytes) {
  const u64 misaligned = reinterpret_cast<u64>(dst) & (sizeof(T) - 1);
  u64 head = misaligned ? sizeof(T) - misaligned : 0;
  if (head > num_bytes) head = num_bytes;
  const u64 num_words = (num_bytes - head) / sizeof(T);
  const u64 first = first_index(), step = num_threads();
  copy_bytes(src, dst, first, head, step);
  const T* from = reinterpret_cast<const T*>(src + head);
  T* to = reinterpret_cast<T*>(dst + head);
  for (u64 i = first; i < num_words; i += step) to[i] = from[i];
  copy_bytes(src, dst, head + num_words * sizeof(T) + first, num_bytes, step);
}

constexpr int kInFlight = 4;  // loads of a thread: memory is further away than one load of each thread can hide

DC_DEVICE void copy_vectors(const u8* src, u8* dst, u64 num_bytes) {
  const u64 misaligned = reinterpret_cast<u64>(dst) & 15;
  u64 head = misaligned ? 16 - misaligned : 0;
  if (head > num_bytes) head = num_bytes;
  const u64 num_vectors = (num_bytes - head) / 16;
  const u64 first = first_index(), step = num_threads();
  copy_bytes(src, dst, first, head, step);
  const u8* from = src + head;
  u8* to = dst + head;
  u64 i = first;
  for (; i + (kInFlight - 1) * step < num_vectors; i += kInFlight * step) {
    u32 words[kInFlight][4];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) load16(from + 16 * (i + k * step), words[k]);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) store16(to + 16 * (i + k * step), words[k]);
  }
  for (; i < num_vectors; i += step) {
    u32 words[4];
    load16(from + 16 * i, words);
    store16(to + 16 * i, words);
  }
  copy_bytes(src, dst, head + 16 * num_vectors + first, num_bytes, step);
}

DC_KERNEL(256) dc_copy(DC_ARGUMENT Copies copies) {
  const u32 row = row_index();
  const u8* src = address_of_row(copies.src[row]);
  u8* dst = copies.dst[row];
  const u64 num_bytes = copies.num_bytes[row];
  const u64 apart = reinterpret_cast<u64>(src) ^ reinterpret_cast<u64>(dst);
  if (apart == 0) return;  // in place: it is there already
  if ((apart & 15) == 0) {
    copy_vectors(src, dst, num_bytes);
  } else if ((apart & 3) == 0) {
    copy_words<u32>(src, dst, num_bytes);
  } else if ((apart & 1) == 0) {
    copy_words<u16>(src, dst, num_bytes);
  } else {
    copy_bytes(src, dst, first_index(), num_bytes, num_threads());
  }
}
