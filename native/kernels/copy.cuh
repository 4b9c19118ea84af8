// SPDX-License-Identifier: Apache-2.0
// Copies of bytes by many threads, in the widest words that the addresses allow.
#pragma once

#include "elements.cuh"

DC_DEVICE void copy_bytes(const u8* src, u8* dst, u64 first, u64 stop, u64 step) {
  for (u64 i = first; i < stop; i += step) dst[i] = src[i];
}

template <class T>
DC_DEVICE void copy_words(const u8* src, u8* dst, u64 num_bytes, u64 first, u64 step) {
  const u64 misaligned = reinterpret_cast<u64>(dst) & (sizeof(T) - 1);
  u64 head = misaligned ? sizeof(T) - misaligned : 0;
  if (head > num_bytes) head = num_bytes;
  const u64 num_words = (num_bytes - head) / sizeof(T);
  copy_bytes(src, dst, first, head, step);
  const T* from = reinterpret_cast<const T*>(src + head);
  T* to = reinterpret_cast<T*>(dst + head);
  for (u64 i = first; i < num_words; i += step) to[i] = from[i];
  copy_bytes(src, dst, head + num_words * sizeof(T) + first, num_bytes, step);
}

constexpr int kInFlight = 4;  // loads of a thread: memory is further away than one load of each thread can hide

DC_DEVICE void copy_vectors(const u8* src, u8* dst, u64 num_bytes, u64 first, u64 step) {
  const u64 misaligned = reinterpret_cast<u64>(dst) & 15;
  u64 head = misaligned ? 16 - misaligned : 0;
  if (head > num_bytes) head = num_bytes;
  const u64 num_vectors = (num_bytes - head) / 16;
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

// A run of bytes at any alignment, by thread `first` of `step` threads; nothing if it is in place.
DC_DEVICE void copy_run(const u8* src, u8* dst, u64 num_bytes, u64 first, u64 step) {
  const u64 apart = reinterpret_cast<u64>(src) ^ reinterpret_cast<u64>(dst);
  if (apart == 0) return;  // in place: it is there already
  if ((apart & 15) == 0) {
    copy_vectors(src, dst, num_bytes, first, step);
  } else if ((apart & 3) == 0) {
    copy_words<u32>(src, dst, num_bytes, first, step);
  } else if ((apart & 1) == 0) {
    copy_words<u16>(src, dst, num_bytes, first, step);
  } else {
    copy_bytes(src, dst, first, num_bytes, step);
  }
}
