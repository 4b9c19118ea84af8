// SPDX-License-Identifier: Apache-2.0
// How elements lie in memory and how they are computed with.
#pragma once

#include "device.cuh"

template <int kBytes> struct Word;
template <> struct Word<1> { typedef u8 Type; };
template <> struct Word<2> { typedef u16 Type; };
template <> struct Word<4> { typedef u32 Type; };
template <> struct Word<8> { typedef u64 Type; };

// Two narrow values with 0x7FFF for a NaN, which as a signed integer is above all others: with the type's own NaN.
template <u32 kNan>
DC_DEVICE u32 with_one_nan(u32 pair) {
#if DC_HAS_MIN_PAIR
  return min_pair(pair, kNan << 16 | kNan);  // bits: one NaN
#else
  const u32 is_nan = ((pair & 0x7FFF7FFFu) + 0x00010001u) & 0x80008000u;
  return pair & ~((is_nan >> 15) * (0x7FFFu ^ kNan));  // bits: one NaN
#endif
}

// A codec: `Value` is computed with, `Stored` lies in memory. Storing puts every NaN in its one canonical pattern. A narrow
// codec also stores two neighbours in one word, in fewer instructions: the same bits.
struct Float32 {
  typedef float Value;
  typedef u32 Stored;
  static constexpr bool kNarrow = false;
  DC_DEVICE Value load(Stored stored) { return float_of(stored); }
  DC_DEVICE Stored store(Value value) { return value != value ? 0x7FC00000u : bits_of(value); }  // bits: one NaN
};

struct Float64 {
  typedef double Value;
  typedef u64 Stored;
  static constexpr bool kNarrow = false;
  DC_DEVICE Value load(Stored stored) { return double_of(stored); }
  DC_DEVICE Stored store(Value value) { return value != value ? 0x7FF8000000000000ull : bits_of(value); }  // bits: one NaN
};

struct BFloat16 {
  typedef float Value;
  typedef u16 Stored;
  static constexpr bool kNarrow = true;
  DC_DEVICE Value load(Stored stored) { return float_of(static_cast<u32>(stored) << 16); }
  DC_DEVICE Stored store(Value value) {
    const u32 bits = Float32::store(value);
    return static_cast<Stored>((bits + (0x7FFFu + ((bits >> 16) & 1u))) >> 16);  // bits: nearest, ties to even
  }
  DC_DEVICE u32 store_pair(Value low, Value high) { return with_one_nan<0x7FC0u>(narrow_to_bfloat16_pair(low, high)); }
};

struct Float16 {
  typedef float Value;
  typedef u16 Stored;
  static constexpr bool kNarrow = true;
  DC_DEVICE Value load(Stored stored) { return widen_float16(stored); }
  DC_DEVICE Stored store(Value value) {
    return value != value ? static_cast<Stored>(0x7E00u) : narrow_to_float16(value);  // bits: one NaN
  }
  DC_DEVICE u32 store_pair(Value low, Value high) { return with_one_nan<0x7E00u>(narrow_to_float16_pair(low, high)); }
};

template <class T>
struct Integer {
  typedef T Value;
  typedef typename Word<sizeof(T)>::Type Stored;
  static constexpr bool kNarrow = false;
  DC_DEVICE Value load(Stored stored) { return static_cast<Value>(stored); }
  DC_DEVICE Stored store(Value value) { return static_cast<Stored>(value); }
};

typedef Integer<s8> Int8;
typedef Integer<s16> Int16;
typedef Integer<s32> Int32;
typedef Integer<s64> Int64;
typedef Integer<u8> UInt8;
typedef Integer<u16> UInt16;
typedef Integer<u32> UInt32;
typedef Integer<u64> UInt64;

// A byte: any that is not zero is true, and true is stored as 1.
struct Bool {
  typedef u8 Value;
  typedef u8 Stored;
  static constexpr bool kNarrow = false;
  DC_DEVICE Value load(Stored stored) { return stored != 0 ? 1 : 0; }
  DC_DEVICE Stored store(Value value) { return value; }
};

// One element at an address of any alignment.
template <class T>
DC_DEVICE T load_stored(const u8* from) {
  if ((reinterpret_cast<u64>(from) & (sizeof(T) - 1)) == 0) return *reinterpret_cast<const T*>(from);
  u64 word = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) word |= static_cast<u64>(from[i]) << (8 * i);
  return static_cast<T>(word);
}

template <class T>
DC_DEVICE void store_stored(u8* to, T stored) {
  if ((reinterpret_cast<u64>(to) & (sizeof(T) - 1)) == 0) {
    *reinterpret_cast<T*>(to) = stored;
    return;
  }
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) to[i] = static_cast<u8>(static_cast<u64>(stored) >> (8 * i));
}

// Element i of words loaded by load16; all indices are constants once the loops around are unrolled.
template <class T>
DC_DEVICE T extract(const u32* words, int i) {
  if constexpr (sizeof(T) == 8) return static_cast<T>(words[2 * i] | static_cast<u64>(words[2 * i + 1]) << 32);
  constexpr int kPerWord = sizeof(T) == 8 ? 1 : 4 / sizeof(T);
  return static_cast<T>(words[i / kPerWord] >> (8 * sizeof(T) * (i % kPerWord)));
}

// The other way; `words` are zero before the first element.
template <class T>
DC_DEVICE void insert(u32* words, int i, T stored) {
  if constexpr (sizeof(T) == 8) {
    words[2 * i] = static_cast<u32>(stored);
    words[2 * i + 1] = static_cast<u32>(static_cast<u64>(stored) >> 32);
  } else {
    constexpr int kPerWord = 4 / sizeof(T);
    words[i / kPerWord] |= static_cast<u32>(stored) << (8 * sizeof(T) * (i % kPerWord));
  }
}
