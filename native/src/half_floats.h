// SPDX-License-Identifier: Apache-2.0
// bfloat16 and binary16 as vectors of float32, and back with one rounding to nearest even.
#pragma once

#include "lanes.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace detcomm {
namespace {

// The float32 whose upper half is the nearest bfloat16, in integers, since no instruction of AVX2 does it.
// `value` must hold canonical NaNs alone: the rounding of another might carry out of its fraction.
inline Words round_to_bfloat16(Floats value) {
  const Words bits = bits_as<Words>(value);
  const Words odd = (bits >> 16) & 1U;
  return bits + (odd + 0x7FFFU);  // bits: nearest, ties to even; the lower half is to be dropped
}

inline Words upper_halves(Words words) { return words & 0xFFFF0000U; }

inline Floats widen_bfloat16(HalfVector<std::uint16_t> halves) {
  return bits_as<Floats>(__builtin_convertvector(halves, Words) << 16);
}

inline HalfVector<std::uint16_t> narrow_to_bfloat16(Floats value) {
  return __builtin_convertvector(round_to_bfloat16(value) >> 16, HalfVector<std::uint16_t>);
}

#if defined(__F16C__)

#if DC_VECTOR_BYTES == 64
// GCC 12 warns of an uninitialised variable inside the forms without a mask.
constexpr __mmask16 kAllLanes = 0xFFFF;
#endif

inline Floats widen_float16(HalfVector<std::uint16_t> halves) {
#if DC_VECTOR_BYTES == 64
  return (Floats)_mm512_maskz_cvtph_ps(kAllLanes, (__m256i)halves);
#else
  return (Floats)_mm256_cvtph_ps((__m128i)halves);
#endif
}

inline HalfVector<std::uint16_t> narrow_to_float16(Floats value) {
  // bits: nearest even by the instruction itself, not by the thread's mode
#if DC_VECTOR_BYTES == 64
  return (HalfVector<std::uint16_t>)_mm512_maskz_cvtps_ph(kAllLanes, (__m512)value,
                                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return (HalfVector<std::uint16_t>)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#endif
}

#else

// After Fabian Giesen, "Float to half done quic": the subnormals are put right by one exact float subtraction, or
// rounded by one addition of a number whose last place is theirs.

inline Floats widen_float16(HalfVector<std::uint16_t> halves) {
  constexpr std::uint32_t kExponents = 0x7C00U << 13;
  constexpr std::uint32_t kRebias = (127U - 15U) << 23;
  const Words half = __builtin_convertvector(halves, Words);
  const Words sign = (half & 0x8000U) << 16;
  const Words magnitude = (half & 0x7FFFU) << 13;
  const Words exponent = magnitude & kExponents;
  const Words normal = magnitude + kRebias;
  const Words special = normal + ((128U - 16U) << 23);  // infinities and NaNs
  const Words smallest = Words{} + (113U << 23);
  const Words subnormal = bits_as<Words>(bits_as<Floats>(normal + (1U << 23)) - bits_as<Floats>(smallest));
  const Words finite = exponent == 0U ? subnormal : normal;
  return bits_as<Floats>((exponent == kExponents ? special : finite) | sign);
}

inline HalfVector<std::uint16_t> narrow_to_float16(Floats value) {
  constexpr std::uint32_t kInfinity = 255U << 23;
  constexpr std::uint32_t kOverflow = (127U + 16U) << 23;   // 65536: from here on it is infinity
  constexpr std::uint32_t kNormal = (127U - 14U) << 23;     // the smallest normal binary16
  constexpr std::uint32_t kLastPlace = (127U - 15U + 23U - 10U + 1U) << 23;  // its last place is a subnormal's
  const Words bits = bits_as<Words>(value);
  const Words sign = bits & 0x80000000U;
  const Words magnitude = bits ^ sign;
  const Words special = magnitude > kInfinity ? Words{} + 0x7E00U : Words{} + 0x7C00U;
  const Words aligned = bits_as<Words>(bits_as<Floats>(magnitude) + bits_as<Floats>(Words{} + kLastPlace));
  const Words subnormal = aligned - kLastPlace;  // bits: rounded by the addition, to nearest even
  const Words odd = (magnitude >> 13) & 1U;
  const Words normal = (magnitude - ((127U - 15U) << 23) + 0xFFFU + odd) >> 13;  // bits: nearest, ties to even
  const Words finite = magnitude < kNormal ? subnormal : normal;
  const Words half = (magnitude >= kOverflow ? special : finite) | (sign >> 16);
  return __builtin_convertvector(half, HalfVector<std::uint16_t>);
}

#endif

}  // namespace
}  // namespace detcomm
