// SPDX-License-Identifier: Apache-2.0
// How a wait passes its time before it sleeps: it spins a moment, then offers its core to others again and again.
//
// A sleep costs two system calls and the wake-up of a core, tens of microseconds where the ranks share cores; handing
// the core to a rank that has work costs one or two. But a yield to a process that computes costs that process's whole
// time slice, milliseconds, and no wake-up ends it. So the first yield that takes so long turns yielding off for a while:
// this rank then sleeps at once, and the scheduler runs it as soon as it is woken.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "detcomm_shm.h"

namespace detcomm::shm {

class Patience {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Patience(const dc_shm_tuning& tuning) : spin_(tuning.spin_ns), yield_(tuning.yield_ns) {}

  // Whether `done` became true before the patience was at its end. Called for one wait after the other.
  template <class Done>
  bool wait(Done done) {
    auto now = Clock::now();
    for (const auto spin_until = now + spin_; now < spin_until; now = Clock::now()) {
      for (int i = 0; i < 32; ++i) {
        if (done()) return true;
        pause_briefly();
      }
    }
    if (now < no_yield_until_) return done();
    for (const auto yield_until = now + yield_; now < yield_until;) {
      if (done()) return true;
      sched_yield();
      const auto before = now;
      now = Clock::now();
      if (now - before > kTimeSlice) {
        no_yield_until_ = now + pause_;
        pause_ = std::min(2 * pause_, kLongestPause);
        return done();
      }
      pause_ = std::max(pause_ / 2, kShortestPause);
    }
    return done();
  }

 private:
  // Shorter than any scheduler's time slice, longer than the work of several ranks between two calls.
  static constexpr std::chrono::microseconds kTimeSlice{500};
  // One lost slice in so long a time is a few percent; on a machine that stays busy, less and less.
  static constexpr std::chrono::milliseconds kShortestPause{100};
  static constexpr std::chrono::milliseconds kLongestPause{1600};

  static void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  std::chrono::nanoseconds spin_;
  std::chrono::nanoseconds yield_;
  Clock::time_point no_yield_until_{};
  std::chrono::milliseconds pause_ = kShortestPause;
};

}  // namespace detcomm::shm
