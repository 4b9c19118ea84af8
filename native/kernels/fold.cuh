// SPDX-License-Identifier: Apache-2.0
// One fold: n operands combined elementwise in a written-out order, rounded once. docs/numerics.md says which bits.
//
// Compiled for one specification at a time, which macros give:
//
//   DC_LEAF, DC_PARTIAL, DC_OUTPUT   codecs of elements.cuh
//   DC_OP                            an operation of operations.cuh; on bool its logical counterpart
//   DC_ROUND                         1: round to DC_LEAF after every operation
//   DC_TREE                          1: RFC 6962's split; 0: a left fold
//   DC_DIVIDE                        1: divide the whole before it is stored
//   DC_NUM_INPUTS, DC_LEAVES         operands, and for each 1 if it has DC_LEAF, 0 if DC_PARTIAL
//
// Up to kMostInRegisters operands are loaded at once, so that their loads are in flight together; more are streamed, with
// one accumulator for each level of the tree. Every operand is read once and nothing else touches memory.
#pragma once

#include "operations.cuh"

typedef DC_LEAF Leaf;
typedef DC_PARTIAL Partial;
typedef DC_OUTPUT Output;
typedef DC_OP Op;
typedef Leaf::Value Value;

constexpr int kNumInputs = DC_NUM_INPUTS;
constexpr int kMostInRegisters = 16;
constexpr bool kRound = DC_ROUND && Leaf::kNarrow && Op::kRounds;
constexpr int kElems = 16 / sizeof(Leaf::Stored);  // of one 16-byte access to a leaf
constexpr int kPartialWords = kElems * sizeof(Partial::Stored) / 4;

struct Flags {
  bool leaf[kNumInputs];
};
constexpr Flags kFlags = {{DC_LEAVES}};
struct StreamedFlags {
  u32 word[(kNumInputs + 31) / 32];
};
DC_CONSTEXPR StreamedFlags pack_flags() {
  StreamedFlags packed = {};
  for (int k = 0; k < kNumInputs; ++k) packed.word[k / 32] |= static_cast<u32>(kFlags.leaf[k]) << (k % 32);
  return packed;
}
DC_CONSTEXPR bool all_leaves() {
  for (int k = 0; k < kNumInputs; ++k) {
    if (!kFlags.leaf[k]) return false;
  }
  return true;
}

struct Operands {
  const u8* address[kNumInputs];
};

DC_CONSTEXPR int split(int n) {
  int left = 1;
  while (2 * left < n) left *= 2;
  return left;
}

DC_CONSTEXPR int num_levels(int n) {
  int levels = 1;
  while ((1 << levels) <= n) ++levels;
  return levels;
}

DC_DEVICE Value combine(Value left, Value right) {
  const Value value = Op::apply(left, right);
  if constexpr (kRound) return Leaf::load(Leaf::store(value));  // bits: one rounding at each operation
  return value;
}

// Operands kFirst ... kFirst + kNum - 1, each given by fetch(k).
template <int kFirst, int kNum, class Fetch>
DC_DEVICE Value combine_all(const Fetch& fetch) {
  if constexpr (kNum == 1) {
    return fetch.template operand<kFirst>();
  } else {
    constexpr int kLeft = DC_TREE ? split(kNum) : kNum - 1;  // bits: the order of operations
    const Value left = combine_all<kFirst, kLeft>(fetch);
    return combine(left, combine_all<kFirst + kLeft, kNum - kLeft>(fetch));
  }
}

// More operands than registers. Accumulator l holds the combination of 2^l operands, as a binary counter has its bits.
template <class Fetch>
DC_DEVICE Value stream_all(const Fetch& fetch) {
  if constexpr (!DC_TREE) {
    Value value = fetch.operand(0);
    for (int k = 1; k < kNumInputs; ++k) value = combine(value, fetch.operand(k));  // bits: the running value is left
    return value;
  } else {
    constexpr int kLevels = num_levels(kNumInputs);
    Value level[kLevels];
    for (int k = 0; k < kNumInputs; ++k) {
      Value value = fetch.operand(k);
      bool carry = true;
#pragma unroll
      for (int l = 0; l < kLevels; ++l) {
        if (carry) {
          if ((k >> l) & 1) {
            value = combine(level[l], value);  // bits: the accumulator holds the earlier operands
          } else {
            level[l] = value;
            carry = false;
          }
        }
      }
    }
    Value whole = level[0];
    bool any = false;
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      if ((kNumInputs >> l) & 1) {
        whole = any ? combine(level[l], whole) : level[l];  // bits: larger blocks come earlier
        any = true;
      }
    }
    return whole;
  }
}

DC_DEVICE Value finish(Value value, u64 divisor) {
  if constexpr (DC_DIVIDE) return divide_by(value, divisor);
  return value;
}

// One element, at any alignment.
struct ElementFetch {
  const Operands& operands;
  u64 index;

  template <int k>
  __device__ Value operand() const {
    if constexpr (kFlags.leaf[k]) return leaf(k);
    return partial(k);
  }
  __device__ Value operand(int k) const {
    if constexpr (all_leaves()) return leaf(k);
    constexpr StreamedFlags kPacked = pack_flags();
    return (kPacked.word[k / 32] >> (k % 32)) & 1u ? leaf(k) : partial(k);
  }
  __device__ Value leaf(int k) const {
    return Leaf::load(load_stored<Leaf::Stored>(operands.address[k] + index * sizeof(Leaf::Stored)));
  }
  __device__ Value partial(int k) const {
    return Partial::load(load_stored<Partial::Stored>(operands.address[k] + index * sizeof(Partial::Stored)));
  }
};

DC_DEVICE void fold_element(const Operands& operands, u8* output, u8* second, u64 index, u64 divisor) {
  const ElementFetch fetch = {operands, index};
  Value value;
  if constexpr (kNumInputs <= kMostInRegisters) {
    value = combine_all<0, kNumInputs>(fetch);
  } else {
    value = stream_all(fetch);
  }
  const Output::Stored stored = Output::store(finish(value, divisor));  // bits: the one rounding
  store_stored<Output::Stored>(output + index * sizeof(Output::Stored), stored);
  if (second != nullptr) store_stored<Output::Stored>(second + index * sizeof(Output::Stored), stored);
}

// kElems elements of every operand, as loaded.
struct Loaded {
  u32 words[kNumInputs <= kMostInRegisters ? kNumInputs : 1][kPartialWords > 4 ? kPartialWords : 4];
};

struct LoadedFetch {
  const Loaded& loaded;
  int element;

  template <int k>
  __device__ Value operand() const {
    if constexpr (kFlags.leaf[k]) return Leaf::load(extract<Leaf::Stored>(loaded.words[k], element));
    return Partial::load(extract<Partial::Stored>(loaded.words[k], element));
  }
};

template <int k>
DC_DEVICE void load_operands(const Operands& operands, u64 vector, Loaded* loaded) {
  if constexpr (k < kNumInputs) {
    constexpr int kWords = kFlags.leaf[k] ? 4 : kPartialWords;
    const u8* from = operands.address[k] + vector * (4 * kWords);
#pragma unroll
    for (int w = 0; w < kWords; w += 4) load16(from + 4 * w, loaded->words[k] + w);
    load_operands<k + 1>(operands, vector, loaded);
  }
}

DC_DEVICE Value fold_loaded(const Loaded& loaded, int element, u64 divisor) {
  const LoadedFetch fetch = {loaded, element};
  return finish(combine_all<0, kNumInputs>(fetch), divisor);
}

// A template, so that what is not taken need not exist.
template <class Codec>
DC_DEVICE void fold_words(const Loaded& loaded, u32* words, u64 divisor) {
  if constexpr (Codec::kNarrow) {
#pragma unroll
    for (int i = 0; i < kElems; i += 2) {
      const Value low = fold_loaded(loaded, i, divisor);
      words[i / 2] = Codec::store_pair(low, fold_loaded(loaded, i + 1, divisor));  // bits: the one rounding
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      insert<typename Codec::Stored>(words, i, Codec::store(fold_loaded(loaded, i, divisor)));  // bits: the one rounding
    }
  }
}

DC_DEVICE void store_vector(const Loaded& loaded, u8* output, u8* second, u64 vector, u64 divisor) {
  constexpr int kWords = kElems * sizeof(Output::Stored) / 4;
  u32 words[kWords] = {};
  fold_words<Output>(loaded, words, divisor);
#pragma unroll
  for (int w = 0; w < kWords; w += 4) {
    store16(output + (vector * kWords + w) * 4, words + w);
    if (second != nullptr) store16(second + (vector * kWords + w) * 4, words + w);
  }
}

DC_DEVICE bool is_aligned(const Operands& operands, const u8* output, const u8* second) {
  u64 all = reinterpret_cast<u64>(output) | reinterpret_cast<u64>(second);
  for (int k = 0; k < kNumInputs; ++k) all |= reinterpret_cast<u64>(operands.address[k]);
  return (all & 15) == 0;
}

// Thread `first` of `stride` threads; the result is stored a second time if `second` is not null.
DC_DEVICE void fold_all(const Operands& operands, u8* output, u8* second, u64 count, u64 divisor, u64 first, u64 stride) {
  u64 done = 0;
  if constexpr (kNumInputs <= kMostInRegisters) {
    const u64 num_vectors = is_aligned(operands, output, second) ? count / kElems : 0;
    for (u64 vector = first; vector < num_vectors; vector += stride) {
      Loaded loaded;
      load_operands<0>(operands, vector, &loaded);
      store_vector(loaded, output, second, vector, divisor);
    }
    done = num_vectors * kElems;
  }
  for (u64 index = done + first; index < count; index += stride) fold_element(operands, output, second, index, divisor);
}

