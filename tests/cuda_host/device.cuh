// SPDX-License-Identifier: Apache-2.0
// native/kernels/device.cuh for the host: the kernels' logic, run by one CPU thread that plays all threads of a grid.
// Compiled without contraction to FMA; the host's arithmetic rounds to nearest even by itself.
#pragma once

#include <chrono>
#include <cstring>
#include <thread>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;

#define DC_DEVICE static inline
#define DC_CONSTEXPR constexpr
#define DC_KERNEL(threads) extern "C" void
#define DC_ARGUMENT const
#define __device__

struct GridPosition {
  u64 index, num_threads;
  u32 row;
};
static GridPosition position;

DC_DEVICE u64 first_index() { return position.index; }
DC_DEVICE u64 num_threads() { return position.num_threads; }
DC_DEVICE u32 row_index() { return position.row; }

DC_DEVICE float add(float left, float right) { return left + right; }
DC_DEVICE float multiply(float left, float right) { return left * right; }
DC_DEVICE float divide(float left, float right) { return left / right; }
DC_DEVICE double add(double left, double right) { return left + right; }
DC_DEVICE double multiply(double left, double right) { return left * right; }
DC_DEVICE double divide(double left, double right) { return left / right; }
DC_DEVICE void convert(u64 from, float* to) { *to = static_cast<float>(from); }
DC_DEVICE void convert(u64 from, double* to) { *to = static_cast<double>(from); }
DC_DEVICE void convert(double from, float* to) { *to = static_cast<float>(from); }
DC_DEVICE void convert(double from, double* to) { *to = from; }

template <class To, class From>
DC_DEVICE To same_bits(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "");
  std::memcpy(&to, &from, sizeof to);
  return to;
}
DC_DEVICE u32 bits_of(float value) { return same_bits<u32>(value); }
DC_DEVICE u64 bits_of(double value) { return same_bits<u64>(value); }
DC_DEVICE float float_of(u32 bits) { return same_bits<float>(bits); }
DC_DEVICE double double_of(u64 bits) { return same_bits<double>(bits); }
DC_DEVICE float widen_float16(u16 half) { return static_cast<float>(same_bits<_Float16>(half)); }
DC_DEVICE u16 narrow_to_float16(float value) { return same_bits<u16>(static_cast<_Float16>(value)); }
DC_DEVICE u32 narrow_to_float16_pair(float low, float high) {
  const u32 left = low != low ? 0x7FFFu : narrow_to_float16(low), right = high != high ? 0x7FFFu : narrow_to_float16(high);
  return left | right << 16;
}
DC_DEVICE u32 narrow_to_bfloat16(float value) {
  if (value != value) return 0x7FFFu;
  const u32 bits = bits_of(value), whole = bits >> 16, rest = bits & 0xFFFFu;
  return whole + (rest > 0x8000u || (rest == 0x8000u && (whole & 1u)));
}
DC_DEVICE u32 narrow_to_bfloat16_pair(float low, float high) {
  return narrow_to_bfloat16(low) | narrow_to_bfloat16(high) << 16;
}
#ifndef DC_HAS_MIN_PAIR  // both ways are tested
#define DC_HAS_MIN_PAIR 0
#endif
DC_DEVICE u32 min_pair(u32 left, u32 right) {
  u32 pair = 0;
  for (int half = 0; half < 32; half += 16) {
    const s16 a = static_cast<s16>(left >> half), b = static_cast<s16>(right >> half);
    pair |= static_cast<u32>(static_cast<u16>(a < b ? a : b)) << half;
  }
  return pair;
}

DC_DEVICE void load16(const u8* from, u32* words) { std::memcpy(words, __builtin_assume_aligned(from, 16), 16); }
DC_DEVICE void store16(u8* to, const u32* words) { std::memcpy(__builtin_assume_aligned(to, 16), words, 16); }

DC_DEVICE u32 load_acquire(const u32* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
DC_DEVICE void store_release(u32* to, u32 value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
DC_DEVICE u32 load_relaxed(const u32* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
DC_DEVICE u64 load_relaxed(const u64* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
DC_DEVICE void store_relaxed(u32* to, u32 value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }
DC_DEVICE u32 exchange(u32* at, u32 value) { return __atomic_exchange_n(at, value, __ATOMIC_RELAXED); }
DC_DEVICE u64 clock_ns() {
  return static_cast<u64>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}
DC_DEVICE void pause() { std::this_thread::yield(); }
DC_DEVICE void join_warp() {}

// A kernel whose threads wait for each other is not run as a whole here: its driver calls the parts between.
DC_DEVICE u32 block_index() { return 0; }
DC_DEVICE u32 num_blocks() { return 1; }
DC_DEVICE u32 thread_index() { return 0; }
DC_DEVICE u32 block_threads() { return 1; }
DC_DEVICE void join_block() {}
DC_DEVICE bool any_in_block(bool mine) { return mine; }
