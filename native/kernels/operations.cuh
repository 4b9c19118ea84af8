// SPDX-License-Identifier: Apache-2.0
// The operations on two values, the left one holding the earlier operands.
#pragma once

#include "elements.cuh"

template <class T> struct IsFloat { static constexpr bool kValue = false; };
template <> struct IsFloat<float> { static constexpr bool kValue = true; };
template <> struct IsFloat<double> { static constexpr bool kValue = true; };

// Integers wrap: unsigned arithmetic, at least 32 bits wide, since narrower types would be promoted to signed ones.
template <int kBytes> struct Wide { typedef u32 Type; };
template <> struct Wide<8> { typedef u64 Type; };

struct Sum {
  static constexpr bool kRounds = true;
  template <class V>
  DC_DEVICE V apply(V left, V right) {
    if constexpr (IsFloat<V>::kValue) {
      return add(left, right);
    } else {
      typedef typename Wide<sizeof(V)>::Type W;
      return static_cast<V>(static_cast<W>(left) + static_cast<W>(right));
    }
  }
};

struct Product {
  static constexpr bool kRounds = true;
  template <class V>
  DC_DEVICE V apply(V left, V right) {
    if constexpr (IsFloat<V>::kValue) {
      return multiply(left, right);
    } else {
      typedef typename Wide<sizeof(V)>::Type W;
      return static_cast<V>(static_cast<W>(left) * static_cast<W>(right));
    }
  }
};

DC_DEVICE float both_signs(float left, float right) { return float_of(bits_of(left) | bits_of(right)); }
DC_DEVICE double both_signs(double left, double right) { return double_of(bits_of(left) | bits_of(right)); }
DC_DEVICE float common_sign(float left, float right) { return float_of(bits_of(left) & bits_of(right)); }
DC_DEVICE double common_sign(double left, double right) { return double_of(bits_of(left) & bits_of(right)); }

// IEEE 754-2019 minimum and maximum: a NaN wins, -0 < +0.
struct Min {
  static constexpr bool kRounds = false;
  template <class V>
  DC_DEVICE V apply(V left, V right) {
    if constexpr (IsFloat<V>::kValue) {
      if (left != left) return left;
      if (left == right) return both_signs(left, right);  // bits: -0 from -0 and +0
    }
    return left < right ? left : right;  // a right NaN fails the comparison and is taken
  }
};

struct Max {
  static constexpr bool kRounds = false;
  template <class V>
  DC_DEVICE V apply(V left, V right) {
    if constexpr (IsFloat<V>::kValue) {
      if (left != left) return left;
      if (left == right) return common_sign(left, right);  // bits: +0 from -0 and +0
    }
    return left > right ? left : right;
  }
};

struct And {
  static constexpr bool kRounds = false;
  template <class V>
  DC_DEVICE V apply(V left, V right) { return static_cast<V>(left & right); }
};

struct Or {
  static constexpr bool kRounds = false;
  template <class V>
  DC_DEVICE V apply(V left, V right) { return static_cast<V>(left | right); }
};

struct Xor {
  static constexpr bool kRounds = false;
  template <class V>
  DC_DEVICE V apply(V left, V right) { return static_cast<V>(left ^ right); }
};

// AVG of the whole: one IEEE division for floats, truncation toward zero for integers.
template <class V>
DC_DEVICE V divide_by(V value, u64 divisor) {
  if constexpr (IsFloat<V>::kValue) {
    V whole;
    convert(divisor, &whole);
    return divide(value, whole);  // bits: one division, no product with 1/N
  } else if constexpr (static_cast<V>(-1) < static_cast<V>(0)) {
    return static_cast<V>(static_cast<s64>(value) / static_cast<s64>(divisor));  // bits: truncates toward zero
  } else {
    return static_cast<V>(static_cast<u64>(value) / divisor);
  }
}
