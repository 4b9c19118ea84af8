// SPDX-License-Identifier: Apache-2.0
// Copies between a rank's own memory and the segments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace detcomm::shm {

#if defined(__SSE2__)
// Whole lines of 64 bytes, as many as there are, by `store`; moves the three on to what is left.
template <typename Store>
inline void copy_lines(std::byte*& to, const std::byte*& from, std::size_t& num_bytes, Store store) {
  for (; num_bytes >= 64; num_bytes -= 64, to += 64, from += 64) {
    const auto* line = reinterpret_cast<const __m128i*>(from);
    const __m128i a = _mm_loadu_si128(line);
    const __m128i b = _mm_loadu_si128(line + 1);
    const __m128i c = _mm_loadu_si128(line + 2);
    const __m128i d = _mm_loadu_si128(line + 3);
    auto* out = reinterpret_cast<__m128i*>(to);
    store(out, a);
    store(out + 1, b);
    store(out + 2, c);
    store(out + 3, d);
  }
}
#endif

// A copy whose target stays in the caches. Not memcpy for more than a few lines: glibc's takes `rep movsb` up to the size
// of the second-level cache, and on AMD's Zen 3 that falls from 50 to 1 GB/s where the target begins a few bytes further
// into its page than the source does: so do an array 16 bytes after the start of an allocation, and a staged chunk.
inline void cached_copy(void* target, const void* source, std::size_t num_bytes) {
#if defined(__SSE2__)
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  if (num_bytes >= 1024) {
    copy_lines(to, from, num_bytes, [](__m128i* out, __m128i value) { _mm_storeu_si128(out, value); });
  }
  if (num_bytes != 0) std::memcpy(to, from, num_bytes);
#else
  if (num_bytes != 0) std::memcpy(target, source, num_bytes);
#endif
}

// A copy whose target will not be read soon: it goes past the caches, which saves reading each line of the target
// before it is written, and leaves the staged chunks where they are.
inline void stream_copy(void* target, const void* source, std::size_t num_bytes) {
#if defined(__SSE2__)
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(to)) & 63U;
  if (num_bytes < 256 + head) {
    std::memcpy(to, from, num_bytes);
    return;
  }
  std::memcpy(to, from, head);
  to += head;
  from += head;
  num_bytes -= head;
  copy_lines(to, from, num_bytes, [](__m128i* out, __m128i value) { _mm_stream_si128(out, value); });
  std::memcpy(to, from, num_bytes);
  _mm_sfence();  // streaming stores are weakly ordered; a later release store must not overtake them
#else
  std::memcpy(target, source, num_bytes);
#endif
}

}  // namespace detcomm::shm
