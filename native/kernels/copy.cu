// SPDX-License-Identifier: Apache-2.0
// Up to kMostCopies copies in one launch, a row of blocks for each: a plan's packs and unpacks are many and short.
#include "elements.cuh"

constexpr int kMostCopies = 64;

struct Copies {
  const u8* src[kMostCopies];
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

DC_DEVICE void copy_vectors(const u8* src, u8* dst, u64 num_bytes) {
  const u64 misaligned = reinterpret_cast<u64>(dst) & 15;
  u64 head = misaligned ? 16 - misaligned : 0;
  if (head > num_bytes) head = num_bytes;
  const u64 num_vectors = (num_bytes - head) / 16;
  const u64 first = first_index(), step = num_threads();
  copy_bytes(src, dst, first, head, step);
  for (u64 i = first; i < num_vectors; i += step) {
    u32 words[4];
    load16(src + head + 16 * i, words);
    store16(dst + head + 16 * i, words);
  }
  copy_bytes(src, dst, head + 16 * num_vectors + first, num_bytes, step);
}

DC_KERNEL(256) dc_copy(DC_ARGUMENT Copies copies) {
  const u32 row = row_index();
  const u8* src = copies.src[row];
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
