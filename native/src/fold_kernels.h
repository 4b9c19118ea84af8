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

template <class Source, class Sink, class Op, dc_shape kShape, unsigned kNum>
void fold_kernel(const void* const* inputs, void* output, std::size_t count, double divisor) {
  constexpr std::size_t kElems = Source::kElems;
  static_assert(kElems == Sink::kElems, "both sides of a kernel move the same batches");
  const unsigned char* from[kNum];
  for (unsigned k = 0; k < kNum; ++k) from[k] = static_cast<const unsigned char*>(inputs[k]);
  unsigned char* to = static_cast<unsigned char*>(output);

  const auto fold_batch = [divisor](const unsigned char* const* operands, std::size_t offset, unsigned char* result) {
    auto value = combine<Source, Op, kShape, 0, kNum>(operands, offset);
    if constexpr (Op::kDivides) {
      if (divisor != 0) value = divide(value, divisor);
    }
    Sink::store_batch(result, value);
  };

  std::size_t i = 0;
  for (; i + kElems <= count; i += kElems) fold_batch(from, i * Source::kItemBytes, to + i * Sink::kItemBytes);
  if (i == count) return;

  // The rest is a padded batch that goes through the same instructions: an element's bits cannot depend on its place.
  alignas(64) unsigned char padded[kNum][kElems * Source::kItemBytes] = {};
  alignas(64) unsigned char result[kElems * Sink::kItemBytes];
  const unsigned char* rest[kNum];
  for (unsigned k = 0; k < kNum; ++k) {
    std::memcpy(padded[k], from[k] + i * Source::kItemBytes, (count - i) * Source::kItemBytes);
    rest[k] = padded[k];
  }
  fold_batch(rest, 0, result);
  std::memcpy(to + i * Sink::kItemBytes, result, (count - i) * Sink::kItemBytes);
}

// Applies `transform` to whole batches, the rest padded as above.
template <class Source, class Sink, class Transform>
inline void map_batches(const void* input, void* output, std::size_t count, const Transform& transform) {
  constexpr std::size_t kElems = Source::kElems;
  static_assert(kElems == Sink::kElems, "both sides of a kernel move the same batches");
  const unsigned char* from = static_cast<const unsigned char*>(input);
  unsigned char* to = static_cast<unsigned char*>(output);
  std::size_t i = 0;
  for (; i + kElems <= count; i += kElems) {
    Sink::store_batch(to + i * Sink::kItemBytes, transform(Source::load_batch(from + i * Source::kItemBytes)));
  }
  if (i == count) return;
  alignas(64) unsigned char padded[kElems * Source::kItemBytes] = {};
  alignas(64) unsigned char result[kElems * Sink::kItemBytes];
  std::memcpy(padded, from + i * Source::kItemBytes, (count - i) * Source::kItemBytes);
  Sink::store_batch(result, transform(Source::load_batch(padded)));
  std::memcpy(to + i * Sink::kItemBytes, result, (count - i) * Sink::kItemBytes);
}

// A 16-bit type as float32. The sink's canonical NaN is that of the fold which is to follow.
template <class Source>
inline void widen_leaves(const void* input, void* output, std::size_t count) {
  map_batches<Source, Real<float>>(input, output, count, [](typename Source::Value value) { return value; });
}

template <class Codec, class Scalar>
inline void premultiply_batches(double factor, const void* input, void* output, std::size_t count) {
  const Scalar rounded = static_cast<Scalar>(factor);  // bits: the factor in the accumulator's precision
  map_batches<Codec, Codec>(input, output, count, [rounded](typename Codec::Value value) {
    for (auto& part : value.part) part *= rounded;
    return value;
  });
}

}  // namespace
}  // namespace detcomm
