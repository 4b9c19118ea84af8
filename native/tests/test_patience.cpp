// SPDX-License-Identifier: Apache-2.0
// The rules of a wait, on a machine whose clock this test moves: when it spins, yields, and gives up yielding.
#include <chrono>
#include <cstdio>

#include "shm_patience.h"

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

int failures = 0;

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      ++failures;                                                                 \
      std::fprintf(stderr, "FAILED: line %d: %s\n", __LINE__, #condition);        \
    }                                                                             \
  } while (false)

struct FakeMachine {
  using Time = std::chrono::steady_clock::time_point;

  static inline Time time{std::chrono::hours(1)};
  static inline nanoseconds yield_takes{300};
  static inline int num_yields = 0;

  static Time now() { return time; }
  static void pause_briefly() { time += nanoseconds(10); }
  static void yield() {
    ++num_yields;
    time += yield_takes;
  }
};

// Waits for what happens `after`; how it ended, and what it took.
struct Wait {
  bool came;
  int num_yields;
  nanoseconds took;

  Wait(detcomm::shm::Patience<FakeMachine>& patience, nanoseconds after, nanoseconds yield_takes) {
    FakeMachine::yield_takes = yield_takes;
    FakeMachine::num_yields = 0;
    const auto begin = FakeMachine::time;
    came = patience.wait([&] { return FakeMachine::time - begin >= after; });
    num_yields = FakeMachine::num_yields;
    took = FakeMachine::time - begin;
  }
};

constexpr milliseconds kNever{1 << 20};
constexpr nanoseconds kCheap{300};
constexpr microseconds kDear{700};

detcomm::shm::Patience<FakeMachine> patience_of(microseconds spin, microseconds yield, microseconds slice) {
  return detcomm::shm::Patience<FakeMachine>(
      dc_shm_tuning{64, 64, 64, nanoseconds(spin).count(), nanoseconds(yield).count(), nanoseconds(slice).count()});
}

void test_spins_then_yields_then_ends() {
  auto patience = patience_of(microseconds(50), microseconds(500), microseconds(20));
  const Wait soon(patience, microseconds(20), kCheap);
  CHECK(soon.came && soon.num_yields == 0);
  const Wait later(patience, microseconds(200), kCheap);
  CHECK(later.came && later.num_yields > 0 && later.took < microseconds(210));
  const Wait never(patience, kNever, kCheap);
  CHECK(!never.came && never.took >= microseconds(550) && never.took < microseconds(560));
  const Wait again(patience, kNever, kCheap);  // cheap yields never turn yielding off
  CHECK(!again.came && again.num_yields == never.num_yields);
}

void test_a_dear_yield_turns_yielding_off_for_a_while() {
  auto patience = patience_of(microseconds(1), microseconds(500), microseconds(500));
  const Wait dear(patience, kNever, kDear);
  CHECK(!dear.came && dear.num_yields == 1);
  const Wait paused(patience, kNever, kDear);
  CHECK(!paused.came && paused.num_yields == 0 && paused.took < microseconds(2));
  FakeMachine::time += milliseconds(100);
  const Wait over(patience, microseconds(200), kCheap);
  CHECK(over.came && over.num_yields > 1);
}

// The shortest pause until the next dear yield; then from one to the next, each right after the last pause.
void test_a_busy_machine_is_asked_less_and_less() {
  auto patience = patience_of(microseconds(1), microseconds(500), microseconds(500));
  for (const int pause_ms : {100, 200, 400, 800, 1600, 1600}) {
    CHECK(Wait(patience, microseconds(30), kCheap).num_yields > 1);  // a cheap one in between proves nothing yet
    CHECK(Wait(patience, kNever, kDear).num_yields == 1);
    FakeMachine::time += milliseconds(pause_ms) - microseconds(10);
    CHECK(Wait(patience, kNever, kDear).num_yields == 0);
    FakeMachine::time += microseconds(10);
  }
  FakeMachine::time += milliseconds(1600);  // calm for as long as the last pause
  CHECK(Wait(patience, kNever, kDear).num_yields == 1);
  FakeMachine::time += milliseconds(100);
  CHECK(Wait(patience, microseconds(30), kCheap).num_yields > 1);
}

}  // namespace

int main() {
  test_spins_then_yields_then_ends();
  test_a_dear_yield_turns_yielding_off_for_a_while();
  test_a_busy_machine_is_asked_less_and_less();
  std::printf("waits: %s\n", failures == 0 ? "all right" : "FAILED");
  return failures == 0 ? 0 : 1;
}
