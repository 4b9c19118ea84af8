// SPDX-License-Identifier: Apache-2.0
// Finds the kernel of one instruction set for (operation, types, order, number of operands).
// See lanes.h for how this file is included.
#pragma once

#include "fold_kernels.h"
#include "fold_variant.h"
#include "operations.h"

namespace detcomm {
namespace {

template <class Source, class Sink, class Op, dc_shape kShape, unsigned kRadix>
inline FoldKernel of_operands(unsigned num_inputs) {
  switch (num_inputs) {
    case 2: return fold_kernel<Source, Sink, Op, kShape, 2>;
    case 3: return fold_kernel<Source, Sink, Op, kShape, 3>;
    case 4: return fold_kernel<Source, Sink, Op, kShape, 4>;
  }
  if constexpr (kRadix > 4) {
    switch (num_inputs) {
      case 5: return fold_kernel<Source, Sink, Op, kShape, 5>;
      case 6: return fold_kernel<Source, Sink, Op, kShape, 6>;
      case 7: return fold_kernel<Source, Sink, Op, kShape, 7>;
      case 8: return fold_kernel<Source, Sink, Op, kShape, 8>;
    }
  }
  return nullptr;
}

template <class Source, class Sink, class Op, unsigned kRadix = 4>
inline FoldKernel of_shape(const KernelKey& key) {
  if constexpr (!Op::kAnyOrder) {
    if (key.shape == DC_SHAPE_LINEAR) return of_operands<Source, Sink, Op, DC_SHAPE_LINEAR, kRadix>(key.num_inputs);
  }
  return of_operands<Source, Sink, Op, DC_SHAPE_TREE, kRadix>(key.num_inputs);
}

template <class Source, class Sink>
inline FoldKernel float_arithmetic(const KernelKey& key) {
  switch (key.op) {
    case DC_SUM:
    case DC_AVG: return of_shape<Source, Sink, Exact<Sum>, kMaxRadix>(key);
    case DC_PRODUCT: return of_shape<Source, Sink, Exact<Product>>(key);
    default: return nullptr;
  }
}

template <class Codec>
inline FoldKernel float_extreme(const KernelKey& key) {
  switch (key.op) {
    case DC_MIN: return of_shape<Codec, Codec, Exact<FloatMin>>(key);
    case DC_MAX: return of_shape<Codec, Codec, Exact<FloatMax>>(key);
    default: return nullptr;
  }
}

template <class Codec>
inline FoldKernel rounded_arithmetic(const KernelKey& key) {
  switch (key.op) {
    case DC_SUM:
    case DC_AVG: return of_shape<Codec, Codec, Rounded<Sum, Codec>, kMaxRadix>(key);
    case DC_PRODUCT: return of_shape<Codec, Codec, Rounded<Product, Codec>>(key);
    default: return nullptr;
  }
}

// `Codec` is one whose order of elements is memory's, `Compact` any for kernels that have it on both sides.
template <class Codec, class Compact>
inline FoldKernel half_kernel(const KernelKey& key) {
  if (key.op == DC_MIN || key.op == DC_MAX) return float_extreme<Compact>(key);
  if (key.sink == DC_FLOAT32) return float_arithmetic<Codec, Real<float>>(key);
  return key.rounds ? rounded_arithmetic<Compact>(key) : float_arithmetic<Compact, Compact>(key);
}

template <class T>
inline FoldKernel real_kernel(const KernelKey& key) {
  if (key.op == DC_MIN || key.op == DC_MAX) return float_extreme<Real<T>>(key);
  return float_arithmetic<Real<T>, Real<T>>(key);
}

// Sums and products do not depend on the sign, so both kinds of integers share them; extremes do.
template <class Unsigned, class T>
inline FoldKernel integer_kernel(const KernelKey& key) {
  switch (key.op) {
    case DC_SUM:
    case DC_AVG: return of_shape<Integer<Unsigned>, Integer<Unsigned>, Exact<WrappingSum>>(key);
    case DC_PRODUCT: return of_shape<Integer<Unsigned>, Integer<Unsigned>, Exact<WrappingProduct>>(key);
    case DC_MIN: return of_shape<Integer<T>, Integer<T>, Exact<IntegerMin>>(key);
    case DC_MAX: return of_shape<Integer<T>, Integer<T>, Exact<IntegerMax>>(key);
    case DC_BAND: return of_shape<Integer<Unsigned>, Integer<Unsigned>, Exact<And>>(key);
    case DC_BOR: return of_shape<Integer<Unsigned>, Integer<Unsigned>, Exact<Or>>(key);
    case DC_BXOR: return of_shape<Integer<Unsigned>, Integer<Unsigned>, Exact<Xor>>(key);
  }
  return nullptr;
}

inline FoldKernel bool_kernel(const KernelKey& key) {
  switch (key.op) {
    case DC_SUM:
    case DC_MAX:
    case DC_BOR: return of_shape<Bool, Bool, Exact<Or>>(key);
    case DC_PRODUCT:
    case DC_MIN:
    case DC_BAND: return of_shape<Bool, Bool, Exact<And>>(key);
    case DC_BXOR: return of_shape<Bool, Bool, Exact<Xor>>(key);
    case DC_AVG: break;
  }
  return nullptr;
}

FoldKernel find_kernel(const KernelKey& key) {
  switch (key.source) {
    case DC_FLOAT32:
      if (key.sink == DC_BFLOAT16) return float_arithmetic<Real<float>, BFloat16>(key);
      if (key.sink == DC_FLOAT16) return float_arithmetic<Real<float>, Float16>(key);
      return real_kernel<float>(key);
    case DC_FLOAT64: return real_kernel<double>(key);
    case DC_BFLOAT16: return half_kernel<BFloat16, EvenOddBFloat16>(key);
    case DC_FLOAT16: return half_kernel<Float16, Float16>(key);
    case DC_INT8: return integer_kernel<std::uint8_t, std::int8_t>(key);
    case DC_INT16: return integer_kernel<std::uint16_t, std::int16_t>(key);
    case DC_INT32: return integer_kernel<std::uint32_t, std::int32_t>(key);
    case DC_INT64: return integer_kernel<std::uint64_t, std::int64_t>(key);
    case DC_UINT8: return integer_kernel<std::uint8_t, std::uint8_t>(key);
    case DC_UINT16: return integer_kernel<std::uint16_t, std::uint16_t>(key);
    case DC_UINT32: return integer_kernel<std::uint32_t, std::uint32_t>(key);
    case DC_UINT64: return integer_kernel<std::uint64_t, std::uint64_t>(key);
    case DC_BOOL: return bool_kernel(key);
  }
  return nullptr;
}

void widen(dc_dtype dtype, const void* input, void* output, std::size_t count) {
  if (dtype == DC_BFLOAT16) {
    widen_leaves<BFloat16>(input, output, count);
  } else {
    widen_leaves<Float16>(input, output, count);
  }
}

void premultiply(dc_dtype dtype, double factor, const void* input, void* output, std::size_t count) {
  switch (dtype) {
    case DC_FLOAT32: return premultiply_batches<Real<float>, float>(factor, input, output, count);
    case DC_FLOAT64: return premultiply_batches<Real<double>, double>(factor, input, output, count);
    case DC_BFLOAT16: return premultiply_batches<EvenOddBFloat16, float>(factor, input, output, count);
    case DC_FLOAT16: return premultiply_batches<Float16, float>(factor, input, output, count);
    default: return;
  }
}

}  // namespace
}  // namespace detcomm
