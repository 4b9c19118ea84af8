// SPDX-License-Identifier: Apache-2.0
// How elements lie in memory and how they are computed with. A codec loads one batch, a few whole vectors, and makes
// of one what is stored.
//
// A batch may hold its elements in another order than memory (EvenOdd), as long as the codecs on both sides of a kernel
// agree; every operation is elementwise.
#pragma once

#include "half_floats.h"
#include "lanes.h"

namespace detcomm {
namespace {

template <class V, std::size_t kVectors = 1>
struct Batch {
  V part[kVectors];
};

// float32 and float64, in memory's order.
template <class T>
struct Real {
  using Value = Batch<Vector<T>>;
  static constexpr std::size_t kItemBytes = sizeof(T);
  static constexpr std::size_t kElems = DC_VECTOR_BYTES / sizeof(T);

  static Value load_batch(const void* from) { return {{load<Vector<T>>(from)}}; }
  static Vector<T> encode(Value value) { return canonical(value.part[0]); }
};

// 16-bit floats, in memory's order.
template <Floats (*widen)(HalfVector<std::uint16_t>), HalfVector<std::uint16_t> (*narrow)(Floats)>
struct Half {
  using Value = Batch<Floats>;
  static constexpr std::size_t kItemBytes = 2;
  static constexpr std::size_t kElems = DC_VECTOR_BYTES / 4;

  static Value load_batch(const void* from) { return {{widen(load<HalfVector<std::uint16_t>>(from))}}; }
  static HalfVector<std::uint16_t> encode(Value value) { return narrow(canonical(value.part[0])); }
  static Value round(Value value) { return {{widen(narrow(canonical(value.part[0])))}}; }
};

using Float16 = Half<widen_float16, narrow_to_float16>;
using BFloat16 = Half<widen_bfloat16, narrow_to_bfloat16>;

// bfloat16 by pairs. A 32-bit word of memory holds two elements: the lower one becomes a float32 by a shift, the upper
// one by a mask, so nothing needs to be shuffled, neither on the way in nor on the way out.
struct EvenOddBFloat16 {
  using Value = Batch<Floats, 2>;
  static constexpr std::size_t kItemBytes = 2;
  static constexpr std::size_t kElems = DC_VECTOR_BYTES / 2;

  static Value load_batch(const void* from) {
    const Words pairs = load<Words>(from);
    return {{bits_as<Floats>(pairs << 16), bits_as<Floats>(upper_halves(pairs))}};
  }
  static Words encode(Value value) {
    const Words even = round_to_bfloat16(canonical(value.part[0]));
    const Words odd = round_to_bfloat16(canonical(value.part[1]));
    return (even >> 16) | upper_halves(odd);
  }
  static Value round(Value value) {
    return {{bits_as<Floats>(upper_halves(round_to_bfloat16(canonical(value.part[0])))),
             bits_as<Floats>(upper_halves(round_to_bfloat16(canonical(value.part[1]))))}};
  }
};

template <class T>
struct Integer {
  using Value = Batch<Vector<T>>;
  static constexpr std::size_t kItemBytes = sizeof(T);
  static constexpr std::size_t kElems = DC_VECTOR_BYTES / sizeof(T);

  static Value load_batch(const void* from) { return {{load<Vector<T>>(from)}}; }
  static Vector<T> encode(Value value) { return value.part[0]; }
};

// A byte: any that is not zero is true, and true is stored as 1.
struct Bool {
  using Bytes = Vector<std::uint8_t>;
  using Value = Batch<Bytes>;
  static constexpr std::size_t kItemBytes = 1;
  static constexpr std::size_t kElems = DC_VECTOR_BYTES;

  static Value load_batch(const void* from) {
    const Bytes bytes = load<Bytes>(from);
    return {{bytes != 0 ? Bytes{} + std::uint8_t{1} : Bytes{}}};
  }
  static Bytes encode(Value value) { return value.part[0]; }
};

}  // namespace
}  // namespace detcomm
