// SPDX-License-Identifier: Apache-2.0
// The folds from C++, for the sanitizers: every type, operation and number of operands through every instruction set,
// with operands that end where their memory ends. The bits of all variants must be those of a scalar loop written here.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "detcomm.h"

namespace {

std::atomic<int> failures{0};

void expect(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

std::size_t item_bytes(dc_dtype dtype) {
  const std::size_t sizes[] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1};
  return sizes[dtype];
}

bool is_float(dc_dtype dtype) { return dtype <= DC_FLOAT16; }

bool is_legal(dc_op op, dc_dtype dtype) {
  if (is_float(dtype)) return op <= DC_MAX;
  return !(dtype == DC_BOOL && op == DC_AVG);
}

// splitmix64: numbers that are the same everywhere.
std::uint64_t next_word(std::uint64_t& state) {
  std::uint64_t word = state += 0x9E3779B97F4A7C15U;
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9U;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBU;
  return word ^ (word >> 31);
}

// Exactly as large as its data, on the heap, so that the sanitizer sees one byte too many.
using Memory = std::unique_ptr<unsigned char[]>;

Memory random_bytes(std::size_t size, std::uint64_t seed) {
  Memory memory(new unsigned char[size]);
  for (std::size_t i = 0; i < size; ++i) memory[i] = static_cast<unsigned char>(next_word(seed) >> 40);
  return memory;
}

// The order of a fold, element by element, in float32: what a tree and a chain mean.
float combine(const std::vector<float>& operands, std::size_t first, std::size_t num, dc_shape shape) {
  if (num == 1) return operands[first];
  std::size_t left = num - 1;
  if (shape == DC_SHAPE_TREE) {
    for (left = 1; 2 * left < num;) left *= 2;
  }
  return combine(operands, first, left, shape) + combine(operands, first + left, num - left, shape);
}

std::vector<std::string> variants() {
  std::istringstream names(dc_fold_variants());
  std::vector<std::string> list;
  for (std::string name; names >> name;) list.push_back(name);
  return list;
}

void select(const std::string& name) { expect(dc_select_fold_variant(name.c_str()) == DC_OK, dc_last_error()); }

void test_float32_order() {
  for (const std::string& variant : variants()) {
    select(variant);
    for (std::uint32_t num : {2U, 3U, 5U, 7U, 8U, 9U, 17U, 64U, 65U, 600U}) {
      for (dc_shape shape : {DC_SHAPE_TREE, DC_SHAPE_LINEAR}) {
        const std::size_t count = 700;
        std::vector<std::vector<float>> operands(num, std::vector<float>(count));
        std::vector<const void*> inputs;
        std::uint64_t seed = num;
        for (auto& operand : operands) {
          for (float& value : operand) {
            const int exponent = static_cast<int>(next_word(seed) % 30);
            value = std::ldexp(static_cast<float>(static_cast<std::int32_t>(next_word(seed))), exponent - 40);
          }
          inputs.push_back(operand.data());
        }
        dc_fold_spec spec{};
        spec.shape = shape;
        spec.is_final = 1;
        spec.num_inputs = num;
        std::vector<float> output(count);
        expect(dc_fold(&spec, inputs.data(), output.data(), count) == DC_OK, dc_last_error());
        for (std::size_t i = 0; i < count; ++i) {
          std::vector<float> column;
          for (const auto& operand : operands) column.push_back(operand[i]);
          const float want = combine(column, 0, num, shape);
          if (std::memcmp(&want, &output[i], sizeof want) != 0) {
            expect(false, variant + ": float32 sum of " + std::to_string(num) + ", element " + std::to_string(i));
            break;
          }
        }
      }
    }
  }
}

// All variants write the same bytes, for arbitrary bytes of operands, and none beyond the output.
void test_variants_agree() {
  const std::vector<std::string> names = variants();
  for (int dtype = DC_FLOAT32; dtype <= DC_BOOL; ++dtype) {
    for (int op = DC_SUM; op <= DC_BXOR; ++op) {
      dc_fold_spec spec{};
      spec.op = static_cast<dc_op>(op);
      spec.dtype = static_cast<dc_dtype>(dtype);
      spec.divisor = 3;
      if (!is_legal(spec.op, spec.dtype)) continue;
      for (std::uint32_t num : {2U, 3U, 4U, 6U, 8U, 11U, 66U}) {
        for (unsigned mode = 0; mode < 8; ++mode) {
          spec.num_inputs = num;
          spec.accumulate = (mode & 1U) != 0 ? DC_ACCUMULATE_WIRE : DC_ACCUMULATE_FLOAT32;
          spec.shape = (mode & 2U) != 0 ? DC_SHAPE_LINEAR : DC_SHAPE_TREE;
          spec.is_final = (mode & 4U) != 0 ? 1 : 0;
          const bool wide = is_float(spec.dtype) && item_bytes(spec.dtype) == 2 && op <= DC_PRODUCT &&
                            spec.accumulate == DC_ACCUMULATE_FLOAT32;
          const std::size_t partial_bytes = wide ? 4 : item_bytes(spec.dtype);
          const std::size_t output_bytes = spec.is_final != 0 ? item_bytes(spec.dtype) : partial_bytes;
          const std::size_t count = num > 8 ? 1100 : 1 + (num * 37 + mode * 13) % 97;
          std::vector<std::uint8_t> leaves(num);
          std::vector<Memory> memories;
          std::vector<const void*> inputs;
          for (std::uint32_t k = 0; k < num; ++k) {
            leaves[k] = mode < 4 ? 1 : (k * 7 + mode) % 3 != 0;
            memories.push_back(random_bytes(count * (leaves[k] != 0 ? item_bytes(spec.dtype) : partial_bytes),
                                            k + 1000 * static_cast<unsigned>(op)));
            inputs.push_back(memories.back().get());
          }
          spec.leaves = leaves.data();
          Memory first;
          for (const std::string& name : names) {
            select(name);
            Memory output(new unsigned char[count * output_bytes]);
            expect(dc_fold(&spec, inputs.data(), output.get(), count) == DC_OK, dc_last_error());
            if (first == nullptr) {
              first = std::move(output);
            } else {
              expect(std::memcmp(first.get(), output.get(), count * output_bytes) == 0,
                     name + " differs from " + names.front() + ": dtype " + std::to_string(dtype) + ", op " +
                         std::to_string(op) + ", " + std::to_string(num) + " operands, mode " + std::to_string(mode));
            }
          }
        }
      }
    }
  }
}

// A result of many megabytes goes past the caches: it has the bytes of its pieces, wherever it begins, also in place.
void test_large_results() {
  constexpr std::size_t kBytes = (std::size_t{5} << 20) + 1000, kPiece = 1000, kRoom = kBytes + 128;
  for (const std::string& name : variants()) {
    select(name);
    for (dc_dtype dtype : {DC_FLOAT32, DC_FLOAT64, DC_BFLOAT16, DC_FLOAT16, DC_INT32, DC_BOOL}) {
      const std::size_t item = item_bytes(dtype), count = kBytes / item;
      dc_fold_spec spec{};
      spec.dtype = dtype;
      spec.is_final = 1;
      spec.num_inputs = 3;
      std::vector<Memory> memories;
      std::vector<const void*> inputs;
      for (unsigned k = 0; k < spec.num_inputs; ++k) {
        memories.push_back(random_bytes(kBytes, k + 5));
        inputs.push_back(memories.back().get());
      }
      std::vector<unsigned char> want(count * item);
      for (std::size_t first = 0; first < count; first += kPiece) {
        std::vector<const void*> pieces;
        for (const Memory& memory : memories) pieces.push_back(memory.get() + first * item);
        const std::size_t num = std::min(kPiece, count - first);
        expect(dc_fold(&spec, pieces.data(), want.data() + first * item, num) == DC_OK, dc_last_error());
      }
      const auto check = [&](const unsigned char* output, const char* where) {
        expect(std::memcmp(output, want.data(), want.size()) == 0, name + ": large result, " + where);
      };
      Memory room(new unsigned char[kRoom]);
      unsigned char* aligned = room.get() + (0 - reinterpret_cast<std::uintptr_t>(room.get())) % 64;
      for (const std::size_t shift : {std::size_t{0}, item, std::size_t{32}}) {
        std::memset(room.get(), 0x5A, kRoom);
        unsigned char* output = aligned + shift;
        expect(dc_fold(&spec, inputs.data(), output, count) == DC_OK, dc_last_error());
        check(output, shift == 0 ? "aligned" : "shifted");
        expect(output[want.size()] == 0x5A, name + ": large result: written beyond its end");
      }
      expect(dc_fold(&spec, inputs.data(), memories[1].get(), count) == DC_OK, dc_last_error());
      check(memories[1].get(), "in place");
    }
  }
}

void test_premultiply_agrees() {
  for (dc_dtype dtype : {DC_FLOAT32, DC_FLOAT64, DC_BFLOAT16, DC_FLOAT16}) {
    for (std::size_t count : {1, 31, 333}) {
      Memory first;
      const std::size_t bytes = count * item_bytes(dtype);
      for (const std::string& name : variants()) {
        select(name);
        Memory data = random_bytes(bytes, 5);
        expect(dc_premultiply(dtype, 0.1, data.get(), data.get(), count) == DC_OK, dc_last_error());
        if (first == nullptr) {
          first = std::move(data);
        } else {
          expect(std::memcmp(first.get(), data.get(), bytes) == 0, name + ": premultiply");
        }
      }
    }
  }
}

// Two threads fold and fail at once; each keeps its own error text.
void test_threads() {
  const auto work = [](dc_op op, const char* text) {
    const float one = 1;
    const void* inputs[] = {&one, &one};
    for (int i = 0; i < 2000; ++i) {
      float result = 0;
      dc_fold_spec spec{};
      spec.num_inputs = 2;
      spec.is_final = 1;
      if (dc_fold(&spec, inputs, &result, 1) != DC_OK || result != 2) ++failures;
      spec.op = op;
      if (dc_fold(&spec, inputs, &result, 1) != DC_UNSUPPORTED || std::strcmp(dc_last_error(), text) != 0) ++failures;
    }
  };
  std::thread other(work, DC_BOR, "fold: bor is not defined on float32");
  work(DC_BXOR, "fold: bxor is not defined on float32");
  other.join();
}

}  // namespace

int main() {
  test_float32_order();
  test_variants_agree();
  test_large_results();
  test_premultiply_agrees();
  select(variants().front());
  test_threads();
  std::printf("folds with %s: %s\n", dc_fold_variants(), failures == 0 ? "all right" : "FAILED");
  return failures == 0 ? 0 : 1;
}
