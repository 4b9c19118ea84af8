// SPDX-License-Identifier: Apache-2.0
// The operations on two vectors, the left one holding the earlier operands.
#pragma once

#include "codecs.h"
#include "lanes.h"

namespace detcomm {
namespace {

// Operations whose result does not depend on their order need one shape of kernel only.
struct AnyOrder {
  static constexpr bool kAnyOrder = true;
  static constexpr bool kDivides = false;
};
struct InOrder {
  static constexpr bool kAnyOrder = false;
  static constexpr bool kDivides = false;
};

struct Sum : InOrder {
  static constexpr bool kDivides = true;  // the sum of an AVG

  template <class V>
  static V apply(V left, V right) {
    return left + right;
  }
};

struct Product : InOrder {
  template <class V>
  static V apply(V left, V right) {
    return left * right;
  }
};

// IEEE 754-2019 minimum and maximum. A NaN wins: a right one fails both comparisons and is taken, a left one is put
// back. -0 < +0: where both compare equal, OR keeps the sign that either has, AND the one that both have.
struct FloatMin : AnyOrder {
  template <class V>
  static V apply(V left, V right) {
    using Bits = typename FloatTraits<V>::Bits;
    const V both = bits_as<V>(bits_as<Bits>(left) | bits_as<Bits>(right));  // bits: -0 from -0 and +0
    const V number = left == right ? both : (left < right ? left : right);
    return left == left ? number : left;
  }
};

struct FloatMax : AnyOrder {
  template <class V>
  static V apply(V left, V right) {
    using Bits = typename FloatTraits<V>::Bits;
    const V both = bits_as<V>(bits_as<Bits>(left) & bits_as<Bits>(right));  // bits: +0 from -0 and +0
    const V number = left == right ? both : (left > right ? left : right);
    return left == left ? number : left;
  }
};

// Integers, unsigned so that they wrap.
struct WrappingSum : AnyOrder {
  template <class V>
  static V apply(V left, V right) {
    return left + right;
  }
};

struct WrappingProduct : AnyOrder {
  template <class V>
  static V apply(V left, V right) {
    return left * right;
  }
};

struct IntegerMin : AnyOrder {
  template <class V>
  static V apply(V left, V right) {
    return left < right ? left : right;
  }
};

struct IntegerMax : AnyOrder {
  template <class V>
  static V apply(V left, V right) {
    return left > right ? left : right;
  }
};

struct And : AnyOrder {
  template <class V>
  static V apply(V left, V right) {
    return left & right;
  }
};

struct Or : AnyOrder {
  template <class V>
  static V apply(V left, V right) {
    return left | right;
  }
};

struct Xor : AnyOrder {
  template <class V>
  static V apply(V left, V right) {
    return left ^ right;
  }
};

// An operation on batches.
template <class Op>
struct Exact {
  static constexpr bool kAnyOrder = Op::kAnyOrder;
  static constexpr bool kDivides = Op::kDivides;

  template <class V, std::size_t kVectors>
  static Batch<V, kVectors> apply(const Batch<V, kVectors>& left, const Batch<V, kVectors>& right) {
    Batch<V, kVectors> result;
    for (std::size_t i = 0; i < kVectors; ++i) result.part[i] = Op::apply(left.part[i], right.part[i]);
    return result;
  }
};

// The same, each result rounded to what travels on the wire.
template <class Op, class Codec>
struct Rounded {
  static constexpr bool kAnyOrder = false;
  static constexpr bool kDivides = Op::kDivides;

  template <class B>
  static B apply(const B& left, const B& right) {
    return Codec::round(Exact<Op>::apply(left, right));  // bits: one rounding at each operation
  }
};

}  // namespace
}  // namespace detcomm
