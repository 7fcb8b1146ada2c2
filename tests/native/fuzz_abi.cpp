// Random sequences of ckv_ calls with random arguments: no crash, no hang, no transfer lost.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "ckv.h"
#include "fuzz.h"

namespace {

using fuzz::Bytes;

constexpr int32_t kBlocks = 8;
constexpr int32_t kSlots = 12;
constexpr uint64_t kBytes = 64;
constexpr size_t kMaxPairs = 64;

size_t num_accepted = 0;  // of all runs: one that accepts none tests little
size_t num_layouts = 0;

#define REQUIRE(condition)                                                 \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

class Session {
 public:
  explicit Session(Bytes &input) : input_(input) {
    open();
    if (engine_ != nullptr && !input_.once_in(8)) {
      set_regions();
    }
  }

  void run() {
    for (int i = 0; i < 200 && !input_.empty(); ++i) {
      call();
    }
    finish();
  }

 private:
  // A null handle now and then: every call must refuse it.
  ckv_engine *engine() { return input_.once_in(32) ? nullptr : engine_; }

  void open() {
    ckv_config config{};
    config.size = input_.once_in(16) ? input_.byte() : sizeof config;
    config.abi = input_.once_in(16) ? input_.byte() : CKV_ABI;
    config.driver = input_.once_in(16) ? input_.id() % 8 : CKV_DRIVER_SIM;
    config.driver = config.driver == CKV_DRIVER_CUDA ? 0 : config.driver;
    config.path = static_cast<int32_t>(input_.number() % 5);
    config.max_descriptors = input_.byte() % 8;
    config.trunk_bytes = input_.number();
    config.window_bytes[CKV_LOAD] = input_.number();
    config.window_bytes[CKV_STORE] = input_.number();
    config.max_transfers = input_.byte();
    config.checksum_every = input_.byte() % 3;
    int code = ckv_open(input_.once_in(32) ? nullptr : &config, &engine_);
    REQUIRE((code == CKV_OK) == (engine_ != nullptr));
    ckv_sim_set_grace(engine_, 300000000);  // no close fails on a slow machine
    REQUIRE(ckv_open(&config, nullptr) == CKV_EINVAL);
  }

  void set_regions() {
    ckv_region regions[2];
    for (size_t i = 0; i < 2; ++i) {
      regions[i] = {address(vram_) + i * kBlocks * kBytes, kBytes, address(dram_) + i * kBytes,
                    2 * kBytes, kBytes};
    }
    for (int i = input_.once_in(2) ? input_.byte() % 4 : 0; i > 0; --i) {
      change(&regions[input_.byte() % 2]);
    }
    bool is_null = input_.once_in(16);
    int32_t num_blocks = input_.once_in(16) ? -input_.byte() : kBlocks;
    int32_t num_slots = input_.once_in(16) ? input_.byte() - 16 : kSlots;
    size_t n = input_.byte() % 3;
    if (ckv_set_regions(engine(), is_null ? nullptr : regions, is_null ? 0 : n, num_blocks,
                        num_slots) == CKV_OK) {
      ++num_layouts;
      may_copy_ = std::all_of(regions, regions + n, [&](const ckv_region &r) {
        return lies_in(vram_, r.dev_base, r.dev_stride, num_blocks, r.bytes) &&
               lies_in(dram_, r.host_base, r.host_stride, num_slots, r.bytes);
      });
    }
  }

  static uint64_t address(const std::vector<uint8_t> &memory) {
    return reinterpret_cast<uint64_t>(memory.data());
  }

  // One of its numbers, a little or altogether.
  void change(ckv_region *region) {
    uint64_t *numbers[] = {&region->dev_base, &region->dev_stride, &region->host_base,
                           &region->host_stride, &region->bytes};
    uint64_t *number = numbers[input_.byte() % 5];
    *number = input_.once_in(4) ? input_.number() : *number + input_.byte() % 32 - 16;
  }

  // The engine cannot know what memory there is; it has refused what overflows.
  static bool lies_in(const std::vector<uint8_t> &memory, uint64_t base, uint64_t stride,
                      int32_t count, uint64_t bytes) {
    uint64_t end = base + stride * static_cast<uint64_t>(count - 1) + bytes;
    return base >= address(memory) && end <= address(memory) + memory.size();
  }

  void call() {
    switch (input_.byte() % 20) {
      case 0:
        return set_regions();
      case 1:
        return poll();
      case 2:
        ckv_cancel(engine(), input_.number());
        return;
      case 3:
        ckv_wait(engine(), input_.number(), static_cast<int64_t>(input_.byte()) - 64);
        return;
      case 4:
        return map_pool();
      case 5:
        return unmap_pool();
      case 6:
        return read_stats();
      case 7:
        return fail();
      case 8:
        return compute();
      case 9:
        ckv_sim_hold(engine(), input_.byte() % 2);
        return;
      case 10:
        return close_now_and_then();
      case 11:
        return stop_for_a_while();
      case 12:
        ckv_sim_set_paths(engine(), static_cast<uint32_t>(input_.number()));
        return;
      case 13:
        return fail_path();
      case 14:
        ckv_sim_watch(engine(), input_.byte() % 2);
        return;
      default:
        return submit();
    }
  }

  void submit() { submit(stream()); }

  void submit(uintptr_t stream) {
    std::array<int32_t, kMaxPairs> blocks;
    std::array<int32_t, kMaxPairs> slots;
    size_t n = input_.once_in(4) ? input_.byte() % kMaxPairs : input_.byte() % 4;
    n = may_copy_ ? n : 0;
    for (size_t i = 0; i < n; ++i) {
      blocks[i] = input_.id();
      slots[i] = input_.id();
    }
    // More pairs than there ever are slots here: refused before they are read.
    n = input_.once_in(32) ? std::max<uint64_t>(256, input_.number() << 32) : n;
    bool is_null = input_.once_in(32);
    uint64_t tag = input_.number();
    int code = ckv_submit(engine(), input_.once_in(32) ? input_.id() : input_.byte() % 2,
                          input_.once_in(8) ? input_.byte() % 4 : 0,
                          is_null ? nullptr : blocks.data(), slots.data(), n, stream, tag);
    if (code == CKV_OK) {
      unreported_.insert(tag);
      ++num_accepted;
    } else {
      REQUIRE(code < 0 && code >= CKV_ENOSPC && *ckv_last_error() != '\0');
      REQUIRE(code != CKV_EINTERNAL);
    }
  }

  // None, ours, or one that does not exist.
  uintptr_t stream() {
    uint8_t kind = input_.byte() % 8;
    return kind < 4 ? 0 : kind < 7 ? stream_ : 12345;
  }

  void poll() {
    std::array<ckv_completion, 8> batch;
    size_t max = input_.byte() % (batch.size() + 1);
    REQUIRE(ckv_poll(engine(), nullptr, input_.once_in(2) ? SIZE_MAX : max) == 0);
    size_t n = ckv_poll(engine(), batch.data(), max);
    take(batch.data(), n);
  }

  void take(const ckv_completion *batch, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      auto found = unreported_.find(batch[i].tag);
      REQUIRE(found != unreported_.end());
      unreported_.erase(found);  // one: a finished transfer's tag may have been used again
      REQUIRE(batch[i].status >= CKV_DONE && batch[i].status <= CKV_FAILED);
      REQUIRE((batch[i].status == CKV_FAILED) == (batch[i].error != 0));
    }
  }

  void map_pool() {
    ckv_pool_config config{};
    config.size = input_.once_in(16) ? input_.byte() : sizeof config;
    config.huge = input_.byte() % 2;
    config.numa_node = input_.once_in(8) ? input_.id() : CKV_NUMA_ANY;
    config.num_threads = input_.byte() % 8;
    config.bytes = input_.once_in(16) ? input_.number() : input_.byte() * 64;
    config.first_bytes = input_.once_in(4) ? input_.number() : 0;
    config.chunk_bytes = input_.number();
    void *base = nullptr;
    if (ckv_pool_map(engine(), input_.once_in(32) ? nullptr : &config,
                     input_.once_in(32) ? nullptr : &base) == CKV_OK) {
      pool_ = base;
    }
  }

  void unmap_pool() {
    ckv_pool_state state{};
    state.size = input_.once_in(8) ? input_.byte() : sizeof state;
    ckv_pool_get_state(engine(), pool_, input_.once_in(16) ? nullptr : &state);
    ckv_pool_wait(engine(), pool_, 100);
    ckv_pool_unmap(engine(), input_.once_in(4) ? nullptr : pool_);
  }

  void read_stats() {
    ckv_stats stats{};
    stats.size = input_.once_in(8) ? input_.byte() : sizeof stats;
    ckv_get_stats(engine(), input_.once_in(16) ? nullptr : &stats);
    ckv_sim_stats sim;
    ckv_sim_get_stats(engine(), input_.once_in(16) ? nullptr : &sim);
  }

  // A sticky code ends the session's copies, so it comes seldom.
  void fail() {
    int code = input_.once_in(16) ? 700 : 1 + input_.byte() % 2;
    int entry = input_.byte() % 9 - 1;
    ckv_sim_fail_at(engine(), entry, input_.byte() % 16, input_.byte() % 3, code);
  }

  // Of the lane's driver calls. A call of our own would wait for ever: so none has a stream.
  void stop_for_a_while() {
    ckv_sim_stop(engine(), input_.byte() % 8);
    submit(0);
    submit(0);
    ckv_cancel(engine(), input_.number());
    poll();
    REQUIRE(engine_ == nullptr || ckv_sim_stop(engine_, UINT64_MAX) == CKV_OK);
  }

  // No sticky code: this hook does not end the context, so copies would go on.
  void fail_path() {
    constexpr int kCodes[] = {0, 0, 1, 2, 209, 500, 701, 801};
    ckv_sim_fail_path(engine(), input_.byte() % 6 - 1, kCodes[input_.byte() % 8]);
  }

  void compute() {
    REQUIRE(ckv_sim_stream(engine(), nullptr) == CKV_EINVAL || engine_ == nullptr);
    if (stream_ == 0 && ckv_sim_stream(engine(), &stream_) != CKV_OK) {
      return;
    }
    ckv_sim_block(engine(), input_.once_in(8) ? 12345 : stream_, input_.byte() % 2);
    ckv_sim_compute(engine(), stream(), nullptr, 0, 0, input_.byte());
  }

  void close_now_and_then() {
    if (engine_ != nullptr && input_.once_in(8)) {
      ckv_sim_hold(engine_, 0);  // else the close waits a second for what is held
      ckv_close(engine_, input_.byte() - 64);
    }
  }

  void finish() {
    if (engine_ == nullptr) {
      return;
    }
    REQUIRE(ckv_sim_hold(engine_, 0) == CKV_OK);
    REQUIRE(ckv_close(engine_, 0) == CKV_OK);
    std::array<ckv_completion, 16> batch;
    while (size_t n = ckv_poll(engine_, batch.data(), batch.size())) {
      take(batch.data(), n);
    }
    REQUIRE(unreported_.empty() && *ckv_pending_word(engine_) == 0);
    ckv_free(engine_);
  }

  Bytes &input_;
  ckv_engine *engine_ = nullptr;
  std::vector<uint8_t> vram_ = std::vector<uint8_t>(2 * kBlocks * kBytes);
  std::vector<uint8_t> dram_ = std::vector<uint8_t>(2 * kSlots * kBytes);
  uintptr_t stream_ = 0;
  void *pool_ = nullptr;
  std::multiset<uint64_t> unreported_;
  bool may_copy_ = true;  // the regions lie in memory that there is
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Bytes input(data, size);
  Session(input).run();
  return 0;
}

#ifndef CKV_LIBFUZZER
int main(int argc, char **argv) {
  int num_runs = fuzz::run(argc, argv, 200, 1400);
  std::printf("%d runs passed, %zu layouts and %zu transfers accepted\n", num_runs, num_layouts,
              num_accepted);
  return num_accepted > static_cast<size_t>(num_runs) ? 0 : 1;
}
#endif
