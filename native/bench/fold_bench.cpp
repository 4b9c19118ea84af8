// SPDX-License-Identifier: Apache-2.0
// How near one thread's fold of 8 operands comes to only reading them. scripts/bench_fold builds and runs this.
//
// Both passes of a case alternate, so that a change of the machine's load or clock meets both; the median of the ratios
// is judged. Prints one line a case and exits with the number of bars missed; writes the same to a file as JSON if asked.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <vector>

#include "detcomm.h"

namespace {

constexpr unsigned kOperands = 8;

// The reader that the fold is measured against: integer additions in 8 independent chains, wider than any fold needs.
typedef std::uint64_t Lane __attribute__((vector_size(32), aligned(8), may_alias));

__attribute__((target("avx2"), noinline)) std::uint64_t read_only(const unsigned char* data, std::size_t bytes) {
  Lane sums[8] = {};
  const Lane* lanes = reinterpret_cast<const Lane*>(data);
  for (std::size_t i = 0; i + 8 <= bytes / sizeof(Lane); i += 8) {
#pragma GCC unroll 8
    for (std::size_t k = 0; k < 8; ++k) sums[k] += lanes[i + k];
  }
  Lane total = {};
  for (const Lane& sum : sums) total += sum;
  return total[0] + total[1] + total[2] + total[3];
}

// What a fold in one pass does at the least: reads all operands side by side, which a memory serves less well than one
// after the other, and stores a result past the caches. Integer additions again, fetched ahead as a 16-bit fold does.
__attribute__((target("avx2"), noinline)) void side_by_side(const void* const* inputs, void* output, std::size_t bytes) {
  const unsigned char* from[kOperands];
  for (unsigned k = 0; k < kOperands; ++k) from[k] = static_cast<const unsigned char*>(inputs[k]);
  for (std::size_t i = 0; i + 2 * sizeof(Lane) <= bytes; i += 2 * sizeof(Lane)) {
    Lane sums[2] = {};
    for (const unsigned char* data : from) {
      const Lane* lanes = reinterpret_cast<const Lane*>(data + i);
      sums[0] += lanes[0];
      sums[1] += lanes[1];
      __builtin_prefetch(data + i + 512, 0, 0);
    }
    __m256i* to = reinterpret_cast<__m256i*>(static_cast<unsigned char*>(output) + i);
    _mm256_stream_si256(to, (__m256i)sums[0]);
    _mm256_stream_si256(to + 1, (__m256i)sums[1]);
  }
  _mm_sfence();
}

struct Case {
  const char* name;
  dc_dtype dtype;
  std::size_t item_bytes;
  std::size_t operand_bytes;
  double least_ratio;  // of the read-only rate; 0: no bar
  double least_gbps;   // 0: no bar
};

// 16 KiB of operands fit the first cache, 256 KiB the second one, 512 MiB none.
const Case kCases[] = {
    {"float32 L1", DC_FLOAT32, 4, 2048, 0, 0},
    {"float32 L2", DC_FLOAT32, 4, 32 << 10, 0.75, 0},
    {"float32 DRAM", DC_FLOAT32, 4, 64 << 20, 0.80, 0},
    {"bfloat16 L1", DC_BFLOAT16, 2, 2048, 0, 0},
    {"bfloat16 L2", DC_BFLOAT16, 2, 32 << 10, 0, 40},
    {"bfloat16 DRAM", DC_BFLOAT16, 2, 64 << 20, 0.90, 0},
    {"float16 L2", DC_FLOAT16, 2, 32 << 10, 0, 0},
    {"float64 L2", DC_FLOAT64, 8, 32 << 10, 0, 0},
};

volatile std::uint64_t sink;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Of this thread's own time: what others do with the processor in between does not count.
double thread_seconds() {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

template <class Pass>
double seconds(unsigned repeats, const Pass& pass) {
  const double start = thread_seconds();
  for (unsigned i = 0; i < repeats; ++i) pass();
  return thread_seconds() - start;
}

bool run(const Case& c, unsigned rounds, std::FILE* json) {
  // Apart by a page and a line, so that the operands do not all meet in the same cache sets.
  const std::size_t stride = c.operand_bytes + 4096 + 64;
  std::vector<unsigned char> memory(stride * (kOperands + 1) + 64);
  unsigned char* base = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64);
  for (std::size_t i = 0; i < memory.size(); i += 2) memory[i] = static_cast<unsigned char>(i * 37);
  const void* inputs[kOperands];
  for (unsigned k = 0; k < kOperands; ++k) inputs[k] = base + k * stride;
  void* output = base + kOperands * stride;

  dc_fold_spec spec{};
  spec.op = DC_SUM;
  spec.dtype = c.dtype;
  spec.is_final = 1;
  spec.num_inputs = kOperands;
  const auto fold = [&] {
    if (dc_fold(&spec, inputs, output, c.operand_bytes / c.item_bytes) != DC_OK) std::abort();
  };
  const auto read = [&] {
    for (const void* input : inputs) sink = read_only(static_cast<const unsigned char*>(input), c.operand_bytes);
  };

  const double bytes = static_cast<double>(c.operand_bytes) * kOperands;
  const unsigned repeats = std::max(1U, static_cast<unsigned>(64e6 / bytes));
  seconds(2, fold);
  seconds(2, read);
  const bool from_memory = c.operand_bytes >= (std::size_t{4} << 20);
  std::vector<double> ratios, fold_rates, read_rates, bounds;
  for (unsigned round = 0; round < rounds; ++round) {
    const double fold_rate = bytes * repeats / seconds(repeats, fold) * 1e-9;
    const double read_rate = bytes * repeats / seconds(repeats, read) * 1e-9;
    fold_rates.push_back(fold_rate);
    read_rates.push_back(read_rate);
    ratios.push_back(fold_rate / read_rate);
    if (!from_memory) continue;
    const auto bound = [&] { side_by_side(inputs, output, c.operand_bytes); };
    bounds.push_back(bytes * repeats / seconds(repeats, bound) * 1e-9 / read_rate);
  }
  const double ratio = median(ratios), rate = median(fold_rates);
  const bool met = ratio >= c.least_ratio && rate >= c.least_gbps;
  std::printf("%-14s fold %6.1f GB/s   read-only %6.1f GB/s   ratio %3.0f %%", c.name, rate, median(read_rates),
              100 * ratio);
  if (c.least_ratio > 0) std::printf("   bar %2.0f %%     %s", 100 * c.least_ratio, met ? "met" : "MISSED");
  if (c.least_gbps > 0) std::printf("   bar %2.0f GB/s  %s", c.least_gbps, met ? "met" : "MISSED");
  const double bound = from_memory ? median(bounds) : 0;
  if (from_memory) std::printf("   side by side without a fold %3.0f %%", 100 * bound);
  std::printf("\n");
  std::fflush(stdout);
  if (json != nullptr) {
    std::fprintf(json, "%s{\"case\": \"%s\", \"fold_gbps\": %.1f, \"read_gbps\": %.1f, \"ratio\": %.3f, ",
                 &c == kCases ? "[" : ",\n ", c.name, rate, median(read_rates), ratio);
    std::fprintf(json, "\"least_ratio\": %g, \"least_gbps\": %g, \"bound\": %.3f, \"met\": %s}", c.least_ratio,
                 c.least_gbps, bound, met ? "true" : "false");
  }
  return met;
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned rounds = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 15;
  const std::string variant = argc > 2 ? argv[2] : "";
  if (!variant.empty() && dc_select_fold_variant(variant.c_str()) != DC_OK) {
    std::fprintf(stderr, "%s\n", dc_last_error());
    return 100;
  }
  std::printf("fold of %u operands, one thread, variants here: %s\n", kOperands, dc_fold_variants());
  int missed = 0;
  std::FILE* json = argc > 3 ? std::fopen(argv[3], "w") : nullptr;
  if (argc > 3 && json == nullptr) {
    std::perror(argv[3]);
    return 100;
  }
  for (const Case& c : kCases) missed += run(c, rounds, json) ? 0 : 1;
  if (json != nullptr) {
    std::fprintf(json, "]\n");
    if (std::fclose(json) != 0) return 100;
  }
  return missed;
}
