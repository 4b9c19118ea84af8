// SPDX-License-Identifier: Apache-2.0
// The C functions of detcomm.h: check everything, then call the C++ ones, which check nothing.
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "detcomm.h"
#include "dispatch.h"
#include "fold.h"
#include "source_hash.h"

namespace {

thread_local char last_error[256] = "";

__attribute__((format(printf, 2, 3))) dc_status fail(dc_status status, const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return status;
}

const char* const kDtypeNames[] = {"float32", "float64", "bfloat16", "float16", "int8",   "int16", "int32",
                                   "int64",   "uint8",   "uint16",   "uint32",  "uint64", "bool"};
const char* const kOpNames[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};

bool in_range(int value, int last) { return value >= 0 && value <= last; }

bool is_legal(dc_op op, dc_dtype dtype) {
  const bool bitwise = op == DC_BAND || op == DC_BOR || op == DC_BXOR;
  if (detcomm::is_float(dtype)) return !bitwise;
  return !(dtype == DC_BOOL && op == DC_AVG);
}

dc_status check_spec(const dc_fold_spec& spec) {
  if (!in_range(spec.op, DC_BXOR)) return fail(DC_INVALID, "fold: no operation has the value %d", spec.op);
  if (!in_range(spec.dtype, DC_BOOL)) return fail(DC_INVALID, "fold: no type has the value %d", spec.dtype);
  if (!in_range(spec.accumulate, DC_ACCUMULATE_WIRE)) {
    return fail(DC_INVALID, "fold: no accumulation has the value %d", spec.accumulate);
  }
  if (!in_range(spec.shape, DC_SHAPE_LINEAR)) return fail(DC_INVALID, "fold: no shape has the value %d", spec.shape);
  if (spec.num_inputs < 2) return fail(DC_INVALID, "fold: expected at least 2 operands, got %u", spec.num_inputs);
  if (!is_legal(spec.op, spec.dtype)) {
    return fail(DC_UNSUPPORTED, "fold: %s is not defined on %s", kOpNames[spec.op], kDtypeNames[spec.dtype]);
  }
  if (spec.op == DC_AVG && spec.is_final && (spec.divisor == 0 || spec.divisor > INT64_MAX)) {
    return fail(DC_INVALID, "fold: expected a divisor of 1 ... 2^63 - 1, got %llu",
                static_cast<unsigned long long>(spec.divisor));
  }
  return DC_OK;
}

// Whether two runs of bytes overlap other than exactly, element on element.
bool clash(const void* input, std::size_t input_item, const void* output, std::size_t output_item, std::size_t count) {
  const auto in = reinterpret_cast<std::uintptr_t>(input);
  const auto out = reinterpret_cast<std::uintptr_t>(output);
  if (in == out && input_item == output_item) return false;
  return in < out + output_item * count && out < in + input_item * count;
}

}  // namespace

extern "C" {

dc_status dc_fold(const dc_fold_spec* spec, const void* const* inputs, void* output, size_t count) {
  if (spec == nullptr) return fail(DC_INVALID, "fold: the specification is NULL");
  if (const dc_status status = check_spec(*spec)) return status;
  if (count == 0) return DC_OK;
  if (inputs == nullptr || output == nullptr) return fail(DC_INVALID, "fold: inputs or output are NULL");
  const dc_dtype partial = detcomm::partial_dtype(spec->op, spec->dtype, spec->accumulate);
  const std::size_t output_item = detcomm::item_bytes(spec->is_final ? spec->dtype : partial);
  for (uint32_t k = 0; k < spec->num_inputs; ++k) {
    if (inputs[k] == nullptr) return fail(DC_INVALID, "fold: operand %u is NULL", k);
    const bool leaf = spec->leaves == nullptr || spec->leaves[k] != 0;
    const std::size_t input_item = detcomm::item_bytes(leaf ? spec->dtype : partial);
    if (clash(inputs[k], input_item, output, output_item, count)) {
      return fail(DC_INVALID, "fold: the output overlaps operand %u without being its memory", k);
    }
  }
  detcomm::fold(*spec, inputs, output, count);
  return DC_OK;
}

dc_status dc_premultiply(dc_dtype dtype, double factor, const void* input, void* output, size_t count) {
  if (!in_range(dtype, DC_BOOL)) return fail(DC_INVALID, "premultiply: no type has the value %d", dtype);
  if (!detcomm::is_float(dtype)) {
    return fail(DC_UNSUPPORTED, "premultiply: expected a floating-point type, got %s", kDtypeNames[dtype]);
  }
  if (count == 0) return DC_OK;
  if (input == nullptr || output == nullptr) return fail(DC_INVALID, "premultiply: input or output is NULL");
  if (clash(input, detcomm::item_bytes(dtype), output, detcomm::item_bytes(dtype), count)) {
    return fail(DC_INVALID, "premultiply: the output overlaps the input without being its memory");
  }
  detcomm::premultiply(dtype, factor, input, output, count);
  return DC_OK;
}

const char* dc_fold_variants(void) { return detcomm::fold_variant_names(); }

dc_status dc_select_fold_variant(const char* name) {
  if (name == nullptr) return fail(DC_INVALID, "select_fold_variant: the name is NULL");
  if (detcomm::select_fold_variant(name)) return DC_OK;
  return fail(DC_INVALID, "select_fold_variant: expected one of %s, got %.64s", dc_fold_variants(), name);
}

const char* dc_last_error(void) { return last_error; }

uint32_t dc_abi_version(void) { return DC_ABI_VERSION; }

const char* dc_source_hash(void) { return DETCOMM_SOURCE_HASH; }

}  // extern "C"
