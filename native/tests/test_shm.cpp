// SPDX-License-Identifier: Apache-2.0
// The shared-memory collectives with threads as ranks, so that the sanitizers see all of them. Plain main: 0 is success.
//
// Chunks are as small as the layout allows and sizes go around their borders, so that short messages pass many barriers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "detcomm.h"
#include "detcomm_shm.h"

namespace {

std::atomic<int> failures{0};

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);   \
      ++failures;                                                                    \
    }                                                                                \
  } while (0)

// Zeroed segments of one group, and its ranks as threads.
class World {
 public:
  World(int size, dc_shm_tuning tuning) : size_(size), tuning_(tuning) {
    const std::size_t bytes = dc_shm_segment_bytes(size, &tuning);
    for (int rank = 0; rank < size; ++rank) {
      void* segment = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
      std::memset(segment, 0, bytes);
      segments_.push_back(segment);
      heaps_.push_back(std::calloc(kHeapBytes, 1));
    }
  }
  ~World() {
    for (void* segment : segments_) std::free(segment);
    for (void* heap : heaps_) std::free(heap);
  }
  World(const World&) = delete;

  void run(const std::function<void(dc_shm_group*, int)>& body) {
    const std::vector<std::int32_t> pidfds(static_cast<std::size_t>(size_), -1);  // threads end with the test
    const std::vector<std::uint64_t> heap_bytes(static_cast<std::size_t>(size_), kHeapBytes);
    std::vector<dc_shm_group*> groups;
    for (int rank = 0; rank < size_; ++rank) {
      groups.push_back(
          dc_shm_open(rank, size_, segments_.data(), pidfds.data(), heaps_.data(), heap_bytes.data(), &tuning_));
      CHECK(groups.back() != nullptr);
    }
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < size_; ++rank) {
      ranks.emplace_back([&, rank] { body(groups[static_cast<std::size_t>(rank)], rank); });
    }
    for (auto& thread : ranks) thread.join();
    for (dc_shm_group* group : groups) dc_shm_close(group);
  }

  float* heap(int rank) const { return static_cast<float*>(heaps_[static_cast<std::size_t>(rank)]); }

  static constexpr std::size_t kHeapBytes = 1 << 16;

 private:
  int size_;
  dc_shm_tuning tuning_;
  std::vector<void*> segments_;
  std::vector<void*> heaps_;
};

dc_shm_tuning small_tuning(int world_size) {
  return {64ULL * static_cast<unsigned>(world_size), 200, 64, 1000, 1000, 100000};
}

// A float whose sums depend on the order: wide exponents, and signs that cancel.
float operand(int rank, std::uint64_t elem, std::uint32_t seed) {
  std::mt19937 random(static_cast<std::uint32_t>(rank) * 7919U + static_cast<std::uint32_t>(elem) * 31U + seed);
  const float sign = (random() & 1U) != 0 ? -1.0F : 1.0F;
  return sign * std::ldexp(1.0F + static_cast<float>(random() % 1000) / 1024.0F, static_cast<int>(random() % 40) - 20);
}

// docs/numerics.md, written out: RFC 6962's tree or a left fold.
float combine(const std::vector<float>& operands, std::size_t begin, std::size_t end, bool linear) {
  if (end - begin == 1) return operands[begin];
  std::size_t left = end - begin - 1;
  if (!linear) {
    for (left = 1; left * 2 < end - begin;) left *= 2;
  }
  return combine(operands, begin, begin + left, linear) + combine(operands, begin + left, end, linear);
}

float expected(int world_size, std::uint64_t elem, std::uint32_t seed, dc_shape shape, std::uint64_t ring, int owner) {
  std::vector<float> operands;
  const std::uint64_t size = static_cast<std::uint64_t>(world_size);
  const std::uint64_t cls = owner >= 0 ? static_cast<std::uint64_t>(owner) : ring != 0 ? elem / ring % size : size - 1;
  for (std::uint64_t step = 0; step < size; ++step) {
    operands.push_back(operand(static_cast<int>((cls + 1 + step) % size), elem, seed));
  }
  return combine(operands, 0, operands.size(), shape == DC_SHAPE_LINEAR);
}
struct Case {
  dc_shm_collective collective;
  dc_shape shape;
  std::uint64_t ring;
  std::uint64_t count;
  bool in_place;
  std::uint32_t seed;
  bool shared = false;
};

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

std::vector<std::uint64_t> shards_of(const Case& c, int world_size) {
  std::mt19937 random(c.seed);
  std::vector<std::uint64_t> borders = {0};
  for (int rank = 1; rank < world_size; ++rank) borders.push_back(c.count == 0 ? 0 : random() % (c.count + 1));
  borders.push_back(c.count);
  std::sort(borders.begin(), borders.end());
  return borders;
}

void run_case(dc_shm_group* group, int rank, int world_size, const Case& c, float* heap = nullptr) {
  const bool sharded = c.collective == DC_SHM_REDUCE_SCATTER || c.collective == DC_SHM_ALL_GATHER;
  const std::vector<std::uint64_t> shards = shards_of(c, world_size);
  const std::uint64_t begin = sharded ? shards[static_cast<std::size_t>(rank)] : 0;
  const std::uint64_t end = sharded ? shards[static_cast<std::size_t>(rank) + 1] : c.count;
  dc_shm_call call = {};
  call.digest[0] = static_cast<std::uint8_t>(c.seed);
  call.collective = c.collective;
  call.dtype = DC_FLOAT32;
  call.op = DC_SUM;
  call.shape = c.shape;
  call.ring_chunk_elems = c.ring;
  call.root = static_cast<int>(c.seed % static_cast<unsigned>(world_size));
  call.item_bytes = 4;
  call.count = c.count;
  call.shards = sharded ? shards.data() : nullptr;

  std::vector<float> own(2 * (c.count + 1));
  float* whole = c.shared ? heap : own.data();
  float* other = whole + c.count + 1;
  for (std::uint64_t elem = 0; elem < c.count; ++elem) whole[elem] = operand(rank, elem, c.seed);
  std::fill(other, other + c.count + 1, -1.0F);
  const float* input = whole;
  float* output = c.in_place ? whole : other;
  if (c.collective == DC_SHM_ALL_GATHER) {
    input = whole + begin;
  } else if (c.in_place) {
    output = whole + begin;
  }
  CHECK(dc_shm_run(group, &call, input, output, 1.0, 60.0) == DC_SHM_OK);
  if (c.collective == DC_SHM_REDUCE && rank != call.root) return;
  for (std::uint64_t elem = 0; elem < c.count; ++elem) {
    if (c.collective == DC_SHM_ALL_GATHER) {
      const auto source = std::upper_bound(shards.begin(), shards.end() - 1, elem) - shards.begin() - 1;
      CHECK(same_bits(output[elem], operand(static_cast<int>(source), elem, c.seed)));
    } else if (elem >= begin && elem < end) {
      const int owner = c.collective == DC_SHM_REDUCE_SCATTER && c.ring != 0 ? rank : -1;
      CHECK(same_bits(output[elem - begin], expected(world_size, elem, c.seed, c.shape, c.ring, owner)));
    }
  }
}

void test_collectives(int world_size, int num_cases) {
  std::vector<Case> cases;
  std::mt19937 random(static_cast<std::uint32_t>(world_size));
  const std::uint64_t border = 16ULL * static_cast<unsigned>(world_size);  // of a chunk, in elements
  for (int i = 0; i < num_cases; ++i) {
    Case c = {};
    c.collective = static_cast<dc_shm_collective>(random() % 4);
    c.shape = random() % 2 != 0 ? DC_SHAPE_LINEAR : DC_SHAPE_TREE;
    if (c.shape == DC_SHAPE_LINEAR && random() % 2 != 0) c.ring = 1 + random() % 20;
    c.count = random() % 3 != 0 ? random() % (4 * border) : border * (random() % 4) + random() % 3;
    c.in_place = random() % 2 != 0;
    c.seed = static_cast<std::uint32_t>(i);
    c.shared = random() % 2 != 0;
    cases.push_back(c);
  }
  World world(world_size, small_tuning(world_size));
  world.run([&](dc_shm_group* group, int rank) {
    for (const Case& c : cases) {
      run_case(group, rank, world_size, c, world.heap(rank));
      // A mixture, where some ranks' memory is shared and others' is not, is staged.
      Case mixed = c;
      mixed.shared = rank % 2 == 0;
      run_case(group, rank, world_size, mixed, world.heap(rank));
    }
  });
}

void test_exchange(int world_size) {
  World world(world_size, small_tuning(world_size));
  world.run([&](dc_shm_group* group, int rank) {
    for (const std::uint64_t size : {0ULL, 1ULL, 64ULL, 65ULL, 5000ULL}) {
      std::vector<std::vector<char>> memory;
      std::vector<dc_shm_parcel> sends, recvs;
      for (int peer = 0; peer < world_size; ++peer) {
        if (peer == rank) continue;
        for (int message = 0; message < 2; ++message) {
          memory.emplace_back(size + 1, static_cast<char>(rank * 16 + peer * 2 + message));
          sends.push_back({peer, memory.back().data(), size});
          memory.emplace_back(size + 1, 'x');
          recvs.push_back({peer, memory.back().data(), size});
        }
      }
      const auto num = static_cast<std::int32_t>(sends.size());
      CHECK(dc_shm_exchange(group, sends.data(), num, recvs.data(), num, 60.0) == DC_SHM_OK);
      for (std::size_t i = 0; i < recvs.size(); ++i) {
        const char want = static_cast<char>(recvs[i].peer * 16 + rank * 2 + static_cast<int>(i % 2));
        const auto* got = static_cast<const char*>(recvs[i].data);
        CHECK(std::all_of(got, got + size, [&](char c) { return c == want; }));
        CHECK(got[size] == 'x');
      }
    }
  });
}

// A difference is seen by all, also by one that only agrees, writes nothing, and the group goes on.
void test_mismatch(int world_size) {
  World world(world_size, small_tuning(world_size));
  world.run([&](dc_shm_group* group, int rank) {
    for (int round = 0; round < 5; ++round) {
      dc_shm_call call = {};
      call.digest[0] = rank == round % world_size ? 1 : 2;
      call.dtype = DC_FLOAT32;
      call.op = DC_SUM;
      call.item_bytes = 4;
      call.count = 10 + 100 * static_cast<unsigned>(rank);
      std::vector<float> data(call.count, 3.0F);
      CHECK((call.digest[0] == round % 2 ? dc_shm_agree(group, call.digest, 60.0)
             : dc_shm_run(group, &call, data.data(), data.data(), 1.0, 60.0)) == DC_SHM_MISMATCH);
      CHECK(std::all_of(data.begin(), data.end(), [](float x) { return x == 3.0F; }));
      char mine[DC_SHM_TEXT_BYTES] = {};
      std::snprintf(mine, sizeof mine, "rank %d", rank);
      std::vector<char> all(static_cast<std::size_t>(world_size) * DC_SHM_TEXT_BYTES);
      CHECK(dc_shm_gather_texts(group, mine, all.data(), 60.0) == DC_SHM_OK);
      for (int peer = 0; peer < world_size; ++peer)
        CHECK("rank " + std::to_string(peer) == all.data() + static_cast<std::size_t>(peer) * DC_SHM_TEXT_BYTES);
      std::uint8_t digest[DC_SHM_DIGEST_BYTES] = {9};
      CHECK(dc_shm_agree(group, digest, 60.0) == DC_SHM_OK);
      run_case(group, rank, world_size, {DC_SHM_ALL_REDUCE, DC_SHAPE_TREE, 0, 100, true, 5});
      run_case(group, rank, world_size, {DC_SHM_ALL_REDUCE, DC_SHAPE_TREE, 0, 100, true, 6});
    }
  });
}

// A rank that does not come is named by all others; one that gives up ends everybody's wait.
void test_faults(int world_size, bool aborts) {
  World world(world_size, small_tuning(world_size));
  std::atomic<int> finished{0};
  world.run([&](dc_shm_group* group, int rank) {
    const std::uint8_t digest[DC_SHM_DIGEST_BYTES] = {};
    CHECK(dc_shm_agree(group, digest, 60.0) == DC_SHM_OK);
    if (rank == 1) {
      if (aborts) dc_shm_abort(group, "had enough");
      while (finished.load() < world_size - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      CHECK(dc_shm_agree(group, digest, 60.0) == (aborts ? DC_SHM_ABORTED : DC_SHM_TIMEOUT));
      return;
    }
    const int status = dc_shm_agree(group, digest, aborts ? 60.0 : 0.5);
    auto fault = std::make_unique<dc_shm_fault>();
    dc_shm_get_fault(group, fault.get());
    CHECK(status == (aborts ? DC_SHM_ABORTED : DC_SHM_TIMEOUT));
    const std::vector<std::int32_t> late(fault->culprits, fault->culprits + fault->num_culprits);
    CHECK(fault->status == status && std::count(late.begin(), late.end(), 1) == 1);  // a busy machine makes others late too
    CHECK(!aborts || (std::string(fault->text) == "had enough" && fault->reporter == 1));
    CHECK(dc_shm_agree(group, digest, 60.0) == status);
    ++finished;
  });
}

void test_arguments() {
  const dc_shm_tuning good = small_tuning(2), bad = {63, 200, 64, 1000, 1000, 100000};
  CHECK(dc_shm_segment_bytes(2, &good) != 0 && dc_shm_segment_bytes(2, &bad) == 0);
  CHECK(dc_shm_segment_bytes(1, &good) == 0 && dc_shm_segment_bytes(DC_SHM_MAX_RANKS + 1, &good) == 0);
}

}  // namespace

int main() {
  test_arguments();
  for (const int world_size : {2, 3, 4, 5, 8}) {
    test_collectives(world_size, 50);
    test_exchange(world_size);
    test_mismatch(world_size);
    test_faults(world_size, false);
    test_faults(world_size, true);
    std::printf("%d ranks: %s\n", world_size, failures.load() == 0 ? "passed" : "FAILED");
  }
  return failures.load() == 0 ? 0 : 1;
}
