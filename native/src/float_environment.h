// SPDX-License-Identifier: Apache-2.0
// The thread's floating-point environment, at IEEE 754's defaults for the length of a scope.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace detcomm {

// Round to nearest even, keep subnormals, trap nothing. The caller's settings and exception flags come back at the end.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

#if defined(__x86_64__)
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) {
    _mm_setcsr(kDefaults);  // bits: no FTZ, no DAZ, nearest even, whatever the caller's thread has set
  }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefaults = 0x1F80;  // MXCSR after a reset: all exceptions masked
  unsigned saved_;
#else
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);  // bits: no flush to zero, nearest even, whatever the caller's thread has set
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
};

}  // namespace detcomm
