// SPDX-License-Identifier: Apache-2.0
// How a wait passes its time before it sleeps: it spins a moment, then offers its core to others again and again.
//
// A sleep costs two system calls and the wake-up of a core, tens of microseconds where the ranks share cores; handing
// the core to a rank that has work costs one or two. But a yield to a process that computes costs that process's whole
// time slice, milliseconds, and no wake-up ends it. And two ranks that have come to one core while another is idle stay
// together as long as both are always ready to run. So the first yield that takes too long turns yielding off for a
// while: this rank then sleeps at once, and when it is woken the scheduler puts it on an idle core, if there is one.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "detcomm_shm.h"

namespace detcomm::shm {

// What a wait asks of the machine. A test of the rules brings its own.
struct ThisMachine {
  using Time = std::chrono::steady_clock::time_point;

  static Time now() { return std::chrono::steady_clock::now(); }
  static void yield() { sched_yield(); }
  static void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
};

template <class Machine = ThisMachine>
class Patience {
 public:
  explicit Patience(const dc_shm_tuning& tuning)
      : spin_(tuning.spin_ns), yield_(tuning.yield_ns), slice_(tuning.slice_ns) {}

  // Whether `done` became true before the patience was at its end. Called for one wait after the other.
  template <class Done>
  bool wait(Done done) {
    auto now = Machine::now();
    for (const auto spin_until = now + spin_; now < spin_until; now = Machine::now()) {
      for (int i = 0; i < 32; ++i) {
        if (done()) return true;
        Machine::pause_briefly();
      }
    }
    if (now < no_yield_until_) return done();
    for (const auto yield_until = now + yield_; now < yield_until;) {
      if (done()) return true;
      Machine::yield();
      const auto before = now;
      now = Machine::now();
      if (now - before > slice_) {
        stop_yielding(now);
        break;
      }
    }
    return done();
  }

 private:
  // One lost slice in so long a time is a few percent; on a machine that stays busy, less and less.
  static constexpr std::chrono::milliseconds kShortestPause{100};
  static constexpr std::chrono::milliseconds kLongestPause{1600};

  // Twice as long as the last time if that was over only just now; the shortest after a time of cheap yields.
  void stop_yielding(typename Machine::Time now) {
    const bool again = now - no_yield_until_ < pause_;
    pause_ = again ? std::min(2 * pause_, kLongestPause) : kShortestPause;
    no_yield_until_ = now + pause_;
  }

  std::chrono::nanoseconds spin_;
  std::chrono::nanoseconds yield_;
  std::chrono::nanoseconds slice_;
  typename Machine::Time no_yield_until_{};
  std::chrono::milliseconds pause_ = kShortestPause;
};

}  // namespace detcomm::shm
