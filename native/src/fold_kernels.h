// SPDX-License-Identifier: Apache-2.0
// The kernels of one instruction set. See lanes.h for how this file is included.
#pragma once

#include "codecs.h"
#include "detcomm.h"
#include "lanes.h"

namespace detcomm {
namespace {

// The largest power of two below n: operands of the left subtree (RFC 6962, section 2.1).
constexpr unsigned split(unsigned n) {
  unsigned left = 1;
  while (2 * left < n) left *= 2;
  return left;
}

// One batch of operands First ... First + n - 1, `offset` bytes into each.
template <class Source, class Op, dc_shape kShape, unsigned kFirst, unsigned kNum>
inline typename Source::Value combine(const unsigned char* const* inputs, std::size_t offset) {
  if constexpr (kNum == 1) {
    return Source::load_batch(inputs[kFirst] + offset);
  } else {
    constexpr unsigned kLeft = kShape == DC_SHAPE_TREE ? split(kNum) : kNum - 1;  // bits: the order of operations
    return Op::apply(combine<Source, Op, kShape, kFirst, kLeft>(inputs, offset),
                     combine<Source, Op, kShape, kFirst + kLeft, kNum - kLeft>(inputs, offset));
  }
}

template <class V, std::size_t kVectors>
inline Batch<V, kVectors> divide(Batch<V, kVectors> value, double divisor) {
  using Scalar = typename FloatTraits<V>::Scalar;
  for (V& part : value.part) part /= static_cast<Scalar>(divisor);  // bits: one IEEE division, no product with 1/N
  return value;
}

// A 16-bit fold computes so long between its loads that it has too few of them under way by itself. 512 bytes ahead was
// the best of 256 ... 2048, and a fetch that spares the outer caches better than one that fills them.
constexpr std::size_t kAheadBytes = 512;

// Whole batches. One copy of this code serves a message's body and its padded rest. `divides` says whether `divisor` is
// to be used; a flag of its own keeps the comparison of two doubles out of the loop. `streams`: the result goes past the
// caches, `output` is aligned to a vector.
template <class Source, class Sink, class Op, dc_shape kShape, unsigned kNum>
__attribute__((noinline)) void fold_batches(const unsigned char* const* inputs, unsigned char* output,
                                            std::size_t num_batches, bool divides, double divisor, bool streams) {
  const unsigned char* from[kNum];  // local, so that the addresses stay in registers
  for (unsigned k = 0; k < kNum; ++k) from[k] = inputs[k];
  std::size_t offset = 0;
  for (std::size_t i = 0; i < num_batches; ++i) {
    auto value = combine<Source, Op, kShape, 0, kNum>(from, offset);
    if constexpr (Op::kDivides) {
      if (divides) value = divide(value, divisor);
    }
    const auto encoded = Sink::encode(value);
    if (streams) {
      for (unsigned k = 0; k < kNum; ++k) __builtin_prefetch(from[k] + offset + kAheadBytes, 0, 0);
      stream(output, encoded);
    } else {
      store(output, encoded);
    }
    offset += Source::kElems * Source::kItemBytes;
    output += Sink::kElems * Sink::kItemBytes;
  }
}

// A result of this size is out of the caches before anybody reads it. Stored as usual, each of its lines would be read
// from memory first, in vain: a tenth of what a fold of 8 operands moves. In place the line has been read anyway.
inline bool goes_past_caches(const void* output, std::size_t num_bytes, const void* const* inputs, unsigned num) {
  if (num_bytes < (std::size_t{4} << 20) || reinterpret_cast<std::uintptr_t>(output) % DC_VECTOR_BYTES != 0) return false;
  for (unsigned k = 0; k < num; ++k) {
    if (inputs[k] == output) return false;
  }
  return true;
}

template <class Source, class Sink, class Op, dc_shape kShape, unsigned kNum>
void fold_kernel(const void* const* inputs, void* output, std::size_t count, double divisor) {
  constexpr std::size_t kElems = Source::kElems;
  static_assert(kElems == Sink::kElems, "both sides of a kernel move the same batches");
  constexpr auto kFold = fold_batches<Source, Sink, Op, kShape, kNum>;
  const unsigned char* from[kNum];
  for (unsigned k = 0; k < kNum; ++k) from[k] = static_cast<const unsigned char*>(inputs[k]);
  unsigned char* to = static_cast<unsigned char*>(output);
  const bool streams = goes_past_caches(to, count * Sink::kItemBytes, inputs, kNum);
  kFold(from, to, count / kElems, divisor != 0, divisor, streams);
  if (streams) stream_fence();

  const std::size_t rest = count % kElems;
  if (rest == 0) return;
  // The rest is a padded batch that goes through the same instructions: an element's bits cannot depend on its place.
  const std::size_t done = count - rest;
  alignas(64) unsigned char padded[kNum][kElems * Source::kItemBytes] = {};
  alignas(64) unsigned char result[kElems * Sink::kItemBytes];
  for (unsigned k = 0; k < kNum; ++k) {
    std::memcpy(padded[k], from[k] + done * Source::kItemBytes, rest * Source::kItemBytes);
    from[k] = padded[k];
  }
  kFold(from, result, 1, divisor != 0, divisor, false);
  std::memcpy(to + done * Sink::kItemBytes, result, rest * Sink::kItemBytes);
}

// Whole batches, one operand.
template <class Source, class Sink, class Transform>
__attribute__((noinline)) void map_batches(const unsigned char* input, unsigned char* output, std::size_t num_batches,
                                           Transform transform) {
  for (std::size_t i = 0; i < num_batches; ++i) {
    store(output, Sink::encode(transform(Source::load_batch(input))));
    input += Source::kElems * Source::kItemBytes;
    output += Sink::kElems * Sink::kItemBytes;
  }
}

// Applies `transform` to each batch, the rest padded as above.
template <class Source, class Sink, class Transform>
void map_elements(const void* input, void* output, std::size_t count, Transform transform) {
  constexpr std::size_t kElems = Source::kElems;
  static_assert(kElems == Sink::kElems, "both sides of a kernel move the same batches");
  const unsigned char* from = static_cast<const unsigned char*>(input);
  unsigned char* to = static_cast<unsigned char*>(output);
  map_batches<Source, Sink>(from, to, count / kElems, transform);

  const std::size_t rest = count % kElems;
  if (rest == 0) return;
  const std::size_t done = count - rest;
  alignas(64) unsigned char padded[kElems * Source::kItemBytes] = {};
  alignas(64) unsigned char result[kElems * Sink::kItemBytes];
  std::memcpy(padded, from + done * Source::kItemBytes, rest * Source::kItemBytes);
  map_batches<Source, Sink>(padded, result, 1, transform);
  std::memcpy(to + done * Sink::kItemBytes, result, rest * Sink::kItemBytes);
}

// A 16-bit type as float32. The sink's canonical NaN is that of the fold which is to follow.
template <class Source>
inline void widen_leaves(const void* input, void* output, std::size_t count) {
  map_elements<Source, Real<float>>(input, output, count, [](typename Source::Value value) { return value; });
}

template <class Codec, class Scalar>
inline void premultiply_batches(double factor, const void* input, void* output, std::size_t count) {
  const Scalar rounded = static_cast<Scalar>(factor);  // bits: the factor in the accumulator's precision
  map_elements<Codec, Codec>(input, output, count, [rounded](typename Codec::Value value) {
    for (auto& part : value.part) part *= rounded;
    return value;
  });
}

}  // namespace
}  // namespace detcomm
