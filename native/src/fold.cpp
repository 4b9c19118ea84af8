// SPDX-License-Identifier: Apache-2.0
// Any number of operands, leaves and partials mixed, out of kernels that take a few operands of one type.
//
// One kernel call does the whole message where the operands are few and alike, which is the usual case. Otherwise the
// message is folded block by block: a block's inner results are small enough to stay in the first-level cache.
#include "fold.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "dispatch.h"
#include "float_environment.h"
#include "fold_variant.h"

namespace detcomm {

namespace {

constexpr std::size_t kBlockBytes = 2048;  // of one inner result

struct Operand {
  const unsigned char* data;
  dc_dtype dtype;
};

// Inner results of one level, or leaves made into partials.
struct Workspace {
  alignas(64) unsigned char blocks[kMaxRadix][kBlockBytes];
};

// Folds the elements [start, start + count) of all operands, count small enough for a Workspace.
class BlockFold {
 public:
  BlockFold(const FoldVariant& variant, const FoldSpec& spec, const void* const* inputs, std::size_t start,
            std::size_t count)
      : variant_(variant),
        spec_(spec),
        inputs_(inputs),
        start_(start),
        count_(count),
        partial_(partial_dtype(spec.op, spec.dtype, spec.accumulate)),
        radix_(kernel_radix(spec.op, spec.dtype)) {}

  void run(void* output) const {
    const Target target{output, spec_.is_final ? spec_.dtype : partial_, spec_.is_final != 0};
    if (spec_.shape == DC_SHAPE_TREE) {
      fold_tree(0, spec_.num_inputs, target);
    } else {
      fold_chain(target);
    }
  }

 private:
  struct Target {
    void* data;
    dc_dtype dtype;
    bool divides;
  };

  Operand input(std::uint32_t index) const {
    const dc_dtype dtype = spec_.leaves == nullptr || spec_.leaves[index] != 0 ? spec_.dtype : partial_;
    return {static_cast<const unsigned char*>(inputs_[index]) + start_ * item_bytes(dtype), dtype};
  }

  // bits: T(n) over operands [first, first + num). Children are the largest aligned runs that a kernel can join: full
  // ones are subtrees of T(n), and T over the children's results is the rest of it, since both are powers of two.
  void fold_tree(std::uint32_t first, std::uint32_t num, const Target& target) const {
    std::uint64_t span = 1;
    while (span * radix_ < num) span *= radix_;
    Workspace workspace;
    Operand children[kMaxRadix];
    unsigned num_children = 0;
    for (std::uint64_t at = 0; at < num; at += span, ++num_children) {
      const std::uint32_t child_first = first + static_cast<std::uint32_t>(at);
      const std::uint32_t child_num = static_cast<std::uint32_t>(std::min<std::uint64_t>(span, num - at));
      if (child_num == 1) {
        children[num_children] = input(child_first);
      } else {
        unsigned char* block = workspace.blocks[num_children];
        fold_tree(child_first, child_num, {block, partial_, false});
        children[num_children] = {block, partial_};
      }
    }
    fold_few(children, num_children, workspace, target);
  }

  // bits: the running result is the left operand of the next kernel.
  void fold_chain(const Target& target) const {
    alignas(64) unsigned char running[kBlockBytes];
    Workspace workspace;
    Operand operands[kMaxRadix];
    unsigned num = 0;
    for (std::uint32_t next = 0; next < spec_.num_inputs;) {
      while (num < radix_ && next < spec_.num_inputs) operands[num++] = input(next++);
      if (next == spec_.num_inputs) return fold_few(operands, num, workspace, target);
      fold_few(operands, num, workspace, {running, partial_, false});
      operands[0] = {running, partial_};
      num = 1;
    }
  }

  // One kernel call. Leaves among partials become partials first, in the workspace's blocks, which are free then: a
  // leaf is a child that needed none.
  void fold_few(Operand* operands, unsigned num, Workspace& workspace, const Target& target) const {
    const dc_dtype source = widen_if_mixed(operands, num, workspace);
    const void* data[kMaxRadix];
    for (unsigned k = 0; k < num; ++k) data[k] = operands[k].data;
    const bool rounds = spec_.accumulate == DC_ACCUMULATE_WIRE;
    const KernelKey key{spec_.op, source, target.dtype, rounds, spec_.shape, num};
    const double divisor = target.divides && spec_.op == DC_AVG ? static_cast<double>(spec_.divisor) : 0;
    variant_.find_kernel(key)(data, target.data, count_, divisor);
  }

  dc_dtype widen_if_mixed(Operand* operands, unsigned num, Workspace& workspace) const {
    const auto is_partial = [this](const Operand& operand) { return operand.dtype == partial_; };
    if (std::none_of(operands, operands + num, is_partial)) return spec_.dtype;
    for (unsigned k = 0; k < num; ++k) {
      if (is_partial(operands[k])) continue;
      variant_.widen(operands[k].dtype, operands[k].data, workspace.blocks[k], count_);
      operands[k] = {workspace.blocks[k], partial_};
    }
    return partial_;
  }

  const FoldVariant& variant_;
  const FoldSpec& spec_;
  const void* const* inputs_;
  std::size_t start_;
  std::size_t count_;
  dc_dtype partial_;
  unsigned radix_;
};

bool fits_one_kernel(const FoldSpec& spec, dc_dtype partial) {
  if (spec.num_inputs > kernel_radix(spec.op, spec.dtype)) return false;
  if (spec.leaves == nullptr || partial == spec.dtype) return true;
  const auto differs = [&spec](std::uint8_t leaf) { return (leaf != 0) != (spec.leaves[0] != 0); };
  return std::none_of(spec.leaves, spec.leaves + spec.num_inputs, differs);
}

// bits: truncates toward zero, as C++ divides.
template <class T, class Wide>
void divide_integers(void* data, std::size_t count, std::uint64_t divisor) {
  unsigned char* bytes = static_cast<unsigned char*>(data);
  for (std::size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, bytes + i * sizeof value, sizeof value);
    value = static_cast<T>(static_cast<Wide>(value) / static_cast<Wide>(divisor));
    std::memcpy(bytes + i * sizeof value, &value, sizeof value);
  }
}

void divide_integers(dc_dtype dtype, void* data, std::size_t count, std::uint64_t divisor) {
  switch (dtype) {
    case DC_INT8: return divide_integers<std::int8_t, std::int64_t>(data, count, divisor);
    case DC_INT16: return divide_integers<std::int16_t, std::int64_t>(data, count, divisor);
    case DC_INT32: return divide_integers<std::int32_t, std::int64_t>(data, count, divisor);
    case DC_INT64: return divide_integers<std::int64_t, std::int64_t>(data, count, divisor);
    case DC_UINT8: return divide_integers<std::uint8_t, std::uint64_t>(data, count, divisor);
    case DC_UINT16: return divide_integers<std::uint16_t, std::uint64_t>(data, count, divisor);
    case DC_UINT32: return divide_integers<std::uint32_t, std::uint64_t>(data, count, divisor);
    case DC_UINT64: return divide_integers<std::uint64_t, std::uint64_t>(data, count, divisor);
    default: return;
  }
}

}  // namespace

std::size_t item_bytes(dc_dtype dtype) {
  switch (dtype) {
    case DC_FLOAT64:
    case DC_INT64:
    case DC_UINT64: return 8;
    case DC_FLOAT32:
    case DC_INT32:
    case DC_UINT32: return 4;
    case DC_BFLOAT16:
    case DC_FLOAT16:
    case DC_INT16:
    case DC_UINT16: return 2;
    case DC_INT8:
    case DC_UINT8:
    case DC_BOOL: return 1;
  }
  return 0;
}

dc_dtype partial_dtype(dc_op op, dc_dtype dtype, dc_accumulate accumulate) {
  const bool narrow = dtype == DC_BFLOAT16 || dtype == DC_FLOAT16;
  const bool extreme = op == DC_MIN || op == DC_MAX;
  return narrow && !extreme && accumulate == DC_ACCUMULATE_FLOAT32 ? DC_FLOAT32 : dtype;  // bits: one rounding
}

void fold(const FoldSpec& spec, const void* const* inputs, void* output, std::size_t count) {
  const DefaultFloatEnvironment environment;
  const FoldVariant& variant = fold_variant();
  const dc_dtype partial = partial_dtype(spec.op, spec.dtype, spec.accumulate);
  const std::size_t block = fits_one_kernel(spec, partial) ? count : kBlockBytes / item_bytes(partial);
  const dc_dtype output_dtype = spec.is_final ? spec.dtype : partial;
  unsigned char* to = static_cast<unsigned char*>(output);
  for (std::size_t start = 0; start < count; start += block) {
    const std::size_t num = std::min(block, count - start);
    BlockFold(variant, spec, inputs, start, num).run(to + start * item_bytes(output_dtype));
  }
  if (spec.op == DC_AVG && spec.is_final && !is_float(spec.dtype)) {
    divide_integers(spec.dtype, output, count, spec.divisor);
  }
}

void premultiply(dc_dtype dtype, double factor, const void* input, void* output, std::size_t count) {
  const DefaultFloatEnvironment environment;
  fold_variant().premultiply(dtype, factor, input, output, count);
}

}  // namespace detcomm
