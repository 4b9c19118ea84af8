// SPDX-License-Identifier: Apache-2.0
// What the kernels need of CUDA, and nothing else: arithmetic with its rounding written out, 16-byte accesses, indices.
//
// Compiled by NVRTC without any header of CUDA's. The tests compile the same kernels for the host, with a file of this
// name that says the same in C++.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;

#define DC_DEVICE static __device__ __forceinline__
#define DC_CONSTEXPR constexpr __host__ __device__
#define DC_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define DC_ARGUMENT const __grid_constant__

DC_DEVICE u64 first_index() { return blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; }
DC_DEVICE u64 num_threads() { return gridDim.x * static_cast<u64>(blockDim.x); }
DC_DEVICE u32 row_index() { return blockIdx.y; }

// bits: round to nearest even, said at each operation, so that no compiler option can make an FMA of two of them.
DC_DEVICE float add(float left, float right) { return __fadd_rn(left, right); }
DC_DEVICE float multiply(float left, float right) { return __fmul_rn(left, right); }
DC_DEVICE float divide(float left, float right) { return __fdiv_rn(left, right); }
DC_DEVICE double add(double left, double right) { return __dadd_rn(left, right); }
DC_DEVICE double multiply(double left, double right) { return __dmul_rn(left, right); }
DC_DEVICE double divide(double left, double right) { return __ddiv_rn(left, right); }
DC_DEVICE void convert(u64 from, float* to) { *to = __ull2float_rn(from); }
DC_DEVICE void convert(u64 from, double* to) { *to = __ull2double_rn(from); }
DC_DEVICE void convert(double from, float* to) { *to = __double2float_rn(from); }
DC_DEVICE void convert(double from, double* to) { *to = from; }

DC_DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DC_DEVICE u64 bits_of(double value) { return static_cast<u64>(__double_as_longlong(value)); }
DC_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DC_DEVICE double double_of(u64 bits) { return __longlong_as_double(static_cast<s64>(bits)); }

DC_DEVICE float widen_float16(u16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));  // exact
  return value;
}
DC_DEVICE u16 narrow_to_float16(float value) {
  u16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));  // bits: nearest even, subnormals kept
  return half;
}

// Two at once, `low` in the low half. A NaN becomes 0x7FFF.
DC_DEVICE u32 narrow_to_bfloat16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));  // bits: nearest, ties to even
  return pair;
}
DC_DEVICE u32 narrow_to_float16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));  // bits: nearest even, subnormals kept
  return pair;
}

#if __CUDA_ARCH__ >= 900
#define DC_HAS_MIN_PAIR 1
// The smaller of each two signed 16-bit halves.
DC_DEVICE u32 min_pair(u32 left, u32 right) {
  u32 least;
  asm("min.s16x2 %0, %1, %2;" : "=r"(least) : "r"(left), "r"(right));
  return least;
}
#else
#define DC_HAS_MIN_PAIR 0
#endif

// Each byte is used once: not worth a place in the cache.
DC_DEVICE void load16(const u8* from, u32* words) {
  const uint4 loaded = __ldcs(reinterpret_cast<const uint4*>(from));
  words[0] = loaded.x;
  words[1] = loaded.y;
  words[2] = loaded.z;
  words[3] = loaded.w;
}
DC_DEVICE void store16(u8* to, const u32* words) {
  __stcs(reinterpret_cast<uint4*>(to), make_uint4(words[0], words[1], words[2], words[3]));
}

// Between ranks: what was written before a release, by this rank's earlier kernels too, is seen after the acquire.
DC_DEVICE u32 load_acquire(const u32* from) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
DC_DEVICE void store_release(u32* to, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}
DC_DEVICE u32 load_relaxed(const u32* from) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
DC_DEVICE u64 load_relaxed(const u64* from) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
DC_DEVICE void store_relaxed(u32* to, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}
DC_DEVICE u32 exchange(u32* at, u32 value) { return atomicExch(at, value); }
DC_DEVICE u64 clock_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
DC_DEVICE void pause() { __nanosleep(20); }
DC_DEVICE void join_warp() { __syncwarp(); }

DC_DEVICE u32 block_index() { return blockIdx.x; }
DC_DEVICE u32 num_blocks() { return gridDim.x; }
DC_DEVICE u32 thread_index() { return threadIdx.x; }
DC_DEVICE u32 block_threads() { return blockDim.x; }
// What the threads of a block have written, the others see behind it.
DC_DEVICE void join_block() { __syncthreads(); }
DC_DEVICE bool any_in_block(bool mine) { return __syncthreads_or(mine) != 0; }
