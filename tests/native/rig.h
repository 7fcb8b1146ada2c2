// What the tests stand on: CHECK, and an engine over fake VRAM.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "ckv.h"
#include "driver.h"

#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed; last error: %s\n", __FILE__, __LINE__, \
                   #condition, ckv_last_error());                                           \
      std::abort();                                                                         \
    }                                                                                       \
  } while (false)

struct Test {
  const char *name;
  void (*run)();
};

inline std::vector<Test> &all_tests() {
  static std::vector<Test> tests;
  return tests;
}

inline bool add_test(const char *name, void (*run)()) {
  all_tests().push_back({name, run});
  return true;
}

#define TEST(name)                                    \
  void name();                                        \
  const bool name##_is_added = add_test(#name, name); \
  void name()

// Microseconds, for what ends by itself: a slow machine or disk fails no test, and what hangs is
// named before the run's own limit.
constexpr int64_t kLong = 300000000;

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = kKiB * kKiB;

using Ids = std::vector<int32_t>;

inline Ids range(int32_t begin, int32_t end) {
  Ids ids(static_cast<size_t>(end - begin));
  std::iota(ids.begin(), ids.end(), begin);
  return ids;
}

// Completions on their way from the consumer to the thread that submitted the transfers.
class Mailbox {
 public:
  void give(const ckv_completion &completion) {
    std::lock_guard<std::mutex> lock(mutex_);
    letters_.push_back(completion);
  }
  std::vector<ckv_completion> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(letters_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<ckv_completion> letters_;
};

struct Shape {
  int num_blocks = 64;
  int num_slots = 96;
  std::vector<uint64_t> pieces = {4096};  // bytes of each region's piece of a block
  uint64_t gap = 0;                       // between blocks in VRAM
  uint64_t chunk_bytes = 0;               // of the pool; 0: as the library likes
};

inline ckv_config sim_config() {
  ckv_config config{};
  config.size = sizeof config;
  config.abi = CKV_ABI;
  config.driver = CKV_DRIVER_SIM;
  return config;
}

inline ckv_pool_config pool_config(uint64_t bytes) {
  ckv_pool_config config{};
  config.size = sizeof config;
  config.huge = 1;
  config.numa_node = CKV_NUMA_ANY;
  config.bytes = bytes;
  return config;
}

struct Rig {
  explicit Rig(Shape s = Shape(), ckv_config config = sim_config()) : shape(std::move(s)) {
    CHECK(ckv_open(&config, &engine) == CKV_OK);
    if (config.driver == CKV_DRIVER_SIM) {
      CHECK(ckv_sim_set_grace(engine, kLong) == CKV_OK);
    }
    slot_bytes = std::accumulate(shape.pieces.begin(), shape.pieces.end(), uint64_t{0});
    void *base = nullptr;
    ckv_pool_config wanted = pool_config(slot_bytes * static_cast<uint64_t>(shape.num_slots));
    wanted.chunk_bytes = shape.chunk_bytes;
    CHECK(ckv_pool_map(engine, &wanted, &base) == CKV_OK);
    pool = static_cast<uint8_t *>(base);
    std::vector<ckv_region> regions;
    uint64_t offset = 0;
    for (uint64_t bytes : shape.pieces) {
      vram.emplace_back((bytes + shape.gap) * shape.num_blocks);
      regions.push_back({reinterpret_cast<uint64_t>(vram.back().data()), bytes + shape.gap,
                         reinterpret_cast<uint64_t>(pool) + offset, slot_bytes, bytes});
      offset += bytes;
    }
    CHECK(ckv_set_regions(engine, regions.data(), regions.size(), shape.num_blocks,
                          shape.num_slots) == CKV_OK);
  }
  Rig(const Rig &) = delete;
  Rig &operator=(const Rig &) = delete;
  ~Rig() { ckv_free(engine); }

  int submit(int direction, const Ids &blocks, const Ids &slots, uint64_t tag, uintptr_t after = 0,
             uint32_t flags = 0) {
    return ckv_submit(engine, direction, flags, blocks.data(), slots.data(), blocks.size(), after,
                      tag);
  }

  void fill(int seed) {
    for (auto &region : vram) {
      for (size_t i = 0; i < region.size(); ++i) {
        region[i] = static_cast<uint8_t>(i * 31 + (i >> 8) * 7 + static_cast<size_t>(seed));
      }
    }
  }

  uint8_t *piece(size_t region, int block) {
    return vram[region].data() + static_cast<uint64_t>(block) * (shape.pieces[region] + shape.gap);
  }

  // All completions there are now; a tag that comes twice is a failure.
  void poll() {
    ckv_completion batch[16];
    while (size_t n = ckv_poll(engine, batch, 16)) {
      for (size_t i = 0; i < n; ++i) {
        CHECK(seen.emplace(batch[i].tag, batch[i]).second);
        if (const int32_t *errors = batch[i].disk_errors) {  // the next poll takes them away
          disk_errors[batch[i].tag].assign(errors, errors + batch[i].num_disk_slots);
        }
      }
    }
  }

  const ckv_completion &finish(uint64_t tag) {
    CHECK(ckv_wait(engine, tag, kLong) == CKV_OK);
    poll();
    CHECK(seen.count(tag) == 1);
    return seen.at(tag);
  }

  ckv_sim_stats stats() {
    ckv_sim_stats stats;
    CHECK(ckv_sim_get_stats(engine, &stats) == CKV_OK);
    return stats;
  }

  ckv_stats engine_stats() {
    ckv_stats stats{};
    stats.size = sizeof stats;
    CHECK(ckv_get_stats(engine, &stats) == CKV_OK);
    return stats;
  }

  // A compute stream with a kernel that ends once ckv_sim_block(engine, stream, 0) lets it.
  uintptr_t blocked_stream() {
    uintptr_t stream = 0;
    CHECK(ckv_sim_stream(engine, &stream) == CKV_OK);
    CHECK(ckv_sim_block(engine, stream, 1) == CKV_OK);
    CHECK(ckv_sim_compute(engine, stream, nullptr, 0, 0, 0) == CKV_OK);
    return stream;
  }

  // Until the driver has that many copy calls of the direction.
  void until_issued(int direction, uint64_t num_calls) {
    while (stats().num_copy_calls[direction] < num_calls) {
      usleep(100);
    }
  }

  // Until the device has done that many of them.
  void until_copied(int direction, uint64_t num_calls) {
    while (stats().num_copied[direction] < num_calls) {
      usleep(100);
    }
  }

  Shape shape;
  uint64_t slot_bytes = 0;
  ckv_engine *engine = nullptr;
  uint8_t *pool = nullptr;
  std::vector<std::vector<uint8_t>> vram;
  std::map<uint64_t, ckv_completion> seen;
  std::map<uint64_t, Ids> disk_errors;  // of each disk slot of a transfer that was not done
};

// Does everything at once. Remembers the registrations, of which it allows only some.
class InstantDriver : public ckv::Driver {
 public:
  explicit InstantDriver(size_t num_allowed) : num_allowed_(num_allowed) {}
  int attach_thread() override { return 0; }
  ckv::Stream copy_stream(int) override { return nullptr; }
  int event_create(ckv::Event *out) override { return *out = nullptr, 0; }
  void event_destroy(ckv::Event) override {}
  int event_record(ckv::Event, ckv::Stream) override { return 0; }
  int event_query(ckv::Event) override { return 0; }
  int stream_query(ckv::Stream) override { return 0; }
  unsigned paths(int) const override { return 1U << CKV_PATH_LOOP; }
  int copy(int, int, const ckv::Descriptor *descriptors, size_t, size_t) override {
    if (on_copy) {
      on_copy(descriptors[0]);
    }
    return 0;
  }
  bool locks_pages() const override { return pins_pages; }
  int host_register(void *base, size_t bytes) override {
    if (before_register) {
      before_register(registered.size());
    }
    if (registered.size() == num_allowed_) {
      return 2;
    }
    registered[base] = bytes;
    return 0;
  }
  int host_unregister(void *base) override { return registered.erase(base) == 1 ? 0 : 1; }
  std::string describe(int code) override { return "error " + std::to_string(code); }
  int numa_node() const override { return -1; }

  std::function<void(const ckv::Descriptor &first)> on_copy;  // on the lane's thread
  bool pins_pages = true;
  std::map<void *, size_t> registered;
  std::function<void(size_t num_before)> before_register;  // on the growing thread; may block

 private:
  const size_t num_allowed_;
};
