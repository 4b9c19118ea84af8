// SPDX-License-Identifier: Apache-2.0
// Vectors of one instruction set's width, in the compilers' own vector notation, and nothing about reductions.
//
// Included by the translation unit of each variant, which is compiled for its instruction set and defines
// DC_VECTOR_BYTES. Everything is in an unnamed namespace: with external linkage the linker would keep one copy of each
// function, maybe the one with instructions that this processor does not have. For the same reason nothing of the
// standard library that could be emitted out of line is used here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if !defined(DC_VECTOR_BYTES)
#error "define DC_VECTOR_BYTES before including lanes.h"
#endif

namespace detcomm {
namespace {

template <class T, std::size_t kBytes = DC_VECTOR_BYTES>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};

template <class T>
using Vector = typename VectorOf<T>::type;

// Half a vector: 16-bit elements that become a whole one of 32-bit elements.
template <class T>
using HalfVector = typename VectorOf<T, DC_VECTOR_BYTES / 2>::type;

template <class V>
inline V load(const void* from) {
  V vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class V>
inline void store(void* to, V vector) {
  std::memcpy(to, &vector, sizeof vector);
}

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "a view of the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// A store past the caches, to an address that is a multiple of the vector's size.
template <class V>
inline void stream(void* to, V vector) {
#if defined(__AVX512F__)
  if constexpr (sizeof vector == 64) return _mm512_stream_si512(static_cast<__m512i*>(to), bits_as<__m512i>(vector));
#endif
#if defined(__AVX__)
  if constexpr (sizeof vector == 32) return _mm256_stream_si256(static_cast<__m256i*>(to), bits_as<__m256i>(vector));
#endif
#if defined(__SSE2__)
  if constexpr (sizeof vector == 16) return _mm_stream_si128(static_cast<__m128i*>(to), bits_as<__m128i>(vector));
#endif
  store(to, vector);
}

// Streaming stores are weakly ordered: what comes later must not overtake them.
inline void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

using Floats = Vector<float>;
using Doubles = Vector<double>;
using Words = Vector<std::uint32_t>;

// A vector's scalars, the integers that hold their bits, and the canonical NaN in these.
template <class V>
struct FloatTraits;
template <>
struct FloatTraits<Floats> {
  using Scalar = float;
  using Bits = Vector<std::uint32_t>;
  static constexpr std::uint32_t kNan = 0x7FC00000U;
};
template <>
struct FloatTraits<Doubles> {
  using Scalar = double;
  using Bits = Vector<std::uint64_t>;
  static constexpr std::uint64_t kNan = 0x7FF8000000000000U;
};

// bits: hardware differs in the sign and the payload of the NaN it makes, so there is one pattern.
template <class V>
inline V canonical(V value) {
  using Bits = typename FloatTraits<V>::Bits;
  const Bits nan = Bits{} + FloatTraits<V>::kNan;
  return value == value ? value : bits_as<V>(nan);
}

}  // namespace
}  // namespace detcomm
