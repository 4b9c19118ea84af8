// SPDX-License-Identifier: Apache-2.0
#include "dispatch.h"

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace detcomm {

namespace {

#if defined(__x86_64__)
bool has_f16c() {
  constexpr unsigned kF16c = 1U << 29;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kF16c) != 0;
}
#endif

std::vector<const FoldVariant*> usable_variants() {
  std::vector<const FoldVariant*> variants;
#if defined(__x86_64__)
  __builtin_cpu_init();
  // __builtin_cpu_supports asks the operating system too: it must save the wider registers.
  const bool avx2 = __builtin_cpu_supports("avx2") != 0 && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                      __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  if (avx512) variants.push_back(&kAvx512Folds);
  if (avx2) variants.push_back(&kAvx2Folds);
#endif
  variants.push_back(&kPortableFolds);
  return variants;
}

struct Dispatch {
  std::vector<const FoldVariant*> variants = usable_variants();
  std::string names;
  std::atomic<const FoldVariant*> selected{variants.front()};

  Dispatch() {
    for (const FoldVariant* variant : variants) {
      if (!names.empty()) names += ' ';
      names += variant->name;
    }
  }
};

Dispatch& dispatch() {
  static Dispatch instance;
  return instance;
}

}  // namespace

const FoldVariant& fold_variant() { return *dispatch().selected.load(std::memory_order_relaxed); }

const char* fold_variant_names() { return dispatch().names.c_str(); }

bool select_fold_variant(const char* name) {
  for (const FoldVariant* variant : dispatch().variants) {
    if (std::strcmp(variant->name, name) == 0) {
      dispatch().selected.store(variant, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace detcomm
