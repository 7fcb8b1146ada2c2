// driver_cuda.cpp over the fake libcuda: the calls it makes, what it does about their errors, and
// that it leaves nothing behind.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "allocations.h"
#include "cuda_library.h"
#include "driver.h"
#include "failure.h"
#include "fake_cuda.h"
#include "rig.h"

namespace {

constexpr size_t kPage = 4096;

ckv_config cuda_config() {
  ckv_config config = sim_config();
  config.driver = CKV_DRIVER_CUDA;
  config.max_descriptors = 64;
  return config;
}

FakeCudaCounts counts() {
  FakeCudaCounts out{};
  fake_cuda_get_counts(&out);
  return out;
}

// For faults of the batch call: a lone descriptor would go by the plain copy.
ckv_config batch_config() {
  ckv_config config = cuda_config();
  config.path = CKV_PATH_BATCH;
  return config;
}

void check_nothing_left() {
  FakeCudaCounts left = counts();
  CHECK(left.contexts == 0 && left.streams == 0 && left.events == 0);
  CHECK(left.registrations == 0 && left.modules == 0 && left.is_context_current == 0);
}

std::string broken_rule() { return fake_cuda_broken_rule(); }

// Whole pages that the kernel gives and takes back.
struct Pages {
  explicit Pages(size_t bytes) : num_bytes(bytes) {
    void *got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(got != MAP_FAILED && madvise(got, bytes, MADV_DONTFORK) == 0);
    base = static_cast<uint8_t *>(got);
  }
  Pages(const Pages &) = delete;
  Pages &operator=(const Pages &) = delete;
  ~Pages() { munmap(base, num_bytes); }
  uint64_t at(size_t offset) const { return reinterpret_cast<uint64_t>(base) + offset; }

  uint8_t *base = nullptr;
  size_t num_bytes;
};

// The driver alone, with 16 pages of VRAM and 16 of DRAM, registered 4 pages at a time.
struct Bench {
  static constexpr size_t kChunk = 4 * kPage;

  explicit Bench(ckv_config config = cuda_config()) {
    fake_cuda_add_vram(vram.base, vram.num_bytes);
    driver = ckv::open_cuda_driver(config);
    for (size_t offset = 0; offset < dram.num_bytes; offset += kChunk) {
      CHECK(driver->host_register(dram.base + offset, kChunk) == 0);
    }
    CHECK(driver->attach_thread() == 0);
    for (size_t i = 0; i < vram.num_bytes; ++i) {
      vram.base[i] = static_cast<uint8_t>(i * 7 + i / 251);
      dram.base[i] = static_cast<uint8_t>(i * 5 + i / 241 + 1);
    }
  }
  Bench(const Bench &) = delete;
  Bench &operator=(const Bench &) = delete;
  ~Bench() {
    for (size_t offset = 0; offset < dram.num_bytes; offset += kChunk) {
      CHECK(driver->host_unregister(dram.base + offset) == 0);
    }
    driver.reset();
    CHECK(broken_rule().empty());
    fake_cuda_reset();
  }

  ckv::Descriptor load(size_t to, size_t from, size_t bytes) const {
    return {vram.at(to), dram.at(from), bytes};
  }
  ckv::Descriptor store(size_t to, size_t from, size_t bytes) const {
    return {dram.at(to), vram.at(from), bytes};
  }
  int copy(int direction, int path, const std::vector<ckv::Descriptor> &descriptors,
           size_t place = 0) {
    return driver->copy(direction, path, descriptors.data(), descriptors.size(), place);
  }
  void drain(int direction) {
    int code = 0;
    while ((code = driver->stream_query(driver->copy_stream(direction))) == ckv::kNotReady) {
      std::this_thread::yield();
    }
    CHECK(code == 0);
  }
  bool has(int direction, int path) const { return (driver->paths(direction) >> path & 1U) != 0; }

  Pages vram{16 * kPage};
  Pages dram{16 * kPage};
  std::unique_ptr<ckv::Driver> driver;
};

// Every test ends on a thread of its own: attach_thread leaves its context current.
template <typename Body>
void apart(const Body &body) {
  std::thread([&] {
    fake_cuda_reset();
    body();
  }).join();
  check_nothing_left();
}

// An engine over the fake; `vram` of the rig is its VRAM.
struct CudaRig : Rig {
  explicit CudaRig(Shape s = Shape(), ckv_config config = cuda_config())
      : Rig(std::move(s), config) {
    for (auto &region : vram) {
      fake_cuda_add_vram(region.data(), region.size());
    }
  }
};

void round_trip(CudaRig &rig) {
  rig.fill(3);
  auto original = rig.vram;
  Ids blocks = range(0, rig.shape.num_blocks);
  Ids slots = range(rig.shape.num_slots - rig.shape.num_blocks, rig.shape.num_slots);
  std::reverse(slots.begin() + 10, slots.end());
  CHECK(rig.submit(CKV_STORE, blocks, slots, 1) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE);
  for (auto &region : rig.vram) {
    std::memset(region.data(), 0xEE, region.size());
  }
  CHECK(rig.submit(CKV_LOAD, blocks, slots, 2, 1) == CKV_OK);  // behind the legacy stream
  CHECK(rig.finish(2).status == CKV_DONE);
  CHECK(rig.vram == original);
}

TEST(test_cuda_round_trip_by_batch_leaves_nothing) {
  apart([] {
    {
      CudaRig rig(Shape{64, 96, {4096, 1040}, 0});
      round_trip(rig);
      CHECK(fake_cuda_num_calls("cuMemcpyAsync") == 0);
      CHECK(counts().contexts == 1 && counts().streams == 2);
    }
    CHECK(broken_rule().empty());
  });
}

TEST(test_cuda_without_a_batch_call_loops) {
  apart([] {
    fake_cuda_hide("cuMemcpyBatchAsync");
    {
      CudaRig rig;
      round_trip(rig);
      CHECK(fake_cuda_num_calls("cuMemcpyAsync") > 0);
      CHECK(fake_cuda_num_calls("cuMemcpyBatchAsync") == 0);
    }
    ckv_config config = batch_config();
    ckv_engine *engine = nullptr;
    CHECK(ckv_open(&config, &engine) == CKV_EDRIVER);
    CHECK(std::string(ckv_last_error()).find("no cuMemcpyBatchAsync (12.8)") != std::string::npos);
    CHECK(broken_rule().empty());
  });
}

TEST(test_cuda_host_pointers_that_are_not_the_devices_are_never_given_to_a_batch) {
  apart([] {
    fake_cuda_set(FAKE_CUDA_HOST_POINTERS, 0);
    CudaRig rig;
    round_trip(rig);
    CHECK(fake_cuda_num_calls("cuMemcpyBatchAsync") == 0);
    CHECK(broken_rule().empty());
  });
}

// The fake refuses a copy that touches two registrations, as the documentation allows a driver to.
TEST(test_cuda_no_descriptor_crosses_from_one_registration_into_the_next) {
  for (int32_t path : {CKV_PATH_BATCH, CKV_PATH_LOOP, CKV_PATH_GATHER}) {
    apart([&] {  // each, for the fake takes what once was VRAM for VRAM
      ckv_config config = cuda_config();
      config.path = path;
      CudaRig rig(Shape{64, 96, {9000, 1040}, 0, 5 * kPage}, config);
      CHECK(counts().registrations > 40);
      round_trip(rig);
      CHECK(broken_rule().empty());
    });
  }
}

TEST(test_cuda_copies_both_ways_by_batch_and_loop) {
  apart([] {
    Bench bench;
    for (int path : {CKV_PATH_BATCH, CKV_PATH_LOOP}) {
      for (int direction : {CKV_LOAD, CKV_STORE}) {
        CHECK(bench.has(direction, path));
      }
      CHECK(bench.copy(CKV_STORE, path, {bench.store(100, 3, 1000), bench.store(8192, 0, 1)}) == 0);
      bench.drain(CKV_STORE);
      CHECK(std::memcmp(bench.dram.base + 100, bench.vram.base + 3, 1000) == 0);
      CHECK(bench.dram.base[8192] == bench.vram.base[0]);
      CHECK(bench.copy(CKV_LOAD, path, {bench.load(7, 40, 4000)}) == 0);
      bench.drain(CKV_LOAD);
      CHECK(std::memcmp(bench.vram.base + 7, bench.dram.base + 40, 4000) == 0);
    }
  });
}

// A source of its own for each destination, so that no descriptor can be taken for another.
TEST(test_cuda_gather_copies_every_size_and_alignment) {
  apart([] {
    Bench bench;
    CHECK(bench.has(CKV_LOAD, CKV_PATH_GATHER) && bench.has(CKV_STORE, CKV_PATH_GATHER));
    CHECK(counts().modules == 1);
    auto expected = std::vector<uint8_t>(bench.vram.base, bench.vram.base + 16 * kPage);
    std::vector<ckv::Descriptor> loads;
    size_t to = 0;
    size_t chunk = 0;
    for (size_t bytes : {1, 15, 16, 17, 31, 496, 512, 528, 4080, 4096, 4097, 8192, 9001}) {
      for (size_t shift : {0, 3}) {
        size_t from = chunk++ % 4 * Bench::kChunk + bytes / 16 * 16 % kPage + shift;
        loads.push_back(bench.load(to, from, bytes));
        std::memcpy(expected.data() + to, bench.dram.base + from, bytes);
        to = (to + bytes) / 16 * 16 + 16;  // aligned: so half of them go by vectors
        CHECK(to < bench.vram.num_bytes);
      }
    }
    CHECK(bench.copy(CKV_LOAD, CKV_PATH_GATHER, loads) == 0);
    bench.drain(CKV_LOAD);
    CHECK(std::memcmp(bench.vram.base, expected.data(), expected.size()) == 0);
  });
}

// All places are full and in flight before the first launch begins.
TEST(test_cuda_gather_leaves_the_descriptors_of_launches_in_flight_alone) {
  apart([] {
    Bench bench;  // 64 places of 64 descriptors of 16 bytes are its whole VRAM
    constexpr size_t kEach = 64;
    auto source = [](size_t i) { return (i * 1787 + 5) % (ckv::kMaxTrunks * kEach) * 16; };
    fake_cuda_hold(1);
    for (size_t place = 0; place < ckv::kMaxTrunks; ++place) {
      std::vector<ckv::Descriptor> loads;
      for (size_t i = place * kEach; i < (place + 1) * kEach; ++i) {
        loads.push_back(bench.load(i * 16, source(i), 16));
      }
      CHECK(bench.copy(CKV_LOAD, CKV_PATH_GATHER, loads, place) == 0);
    }
    fake_cuda_hold(0);
    bench.drain(CKV_LOAD);
    for (size_t i = 0; i < ckv::kMaxTrunks * kEach; ++i) {
      CHECK(std::memcmp(bench.vram.base + i * 16, bench.dram.base + source(i), 16) == 0);
    }
  });
}

// The two directions number their places each from 0.
TEST(test_cuda_gather_of_one_direction_leaves_the_descriptors_of_the_other_alone) {
  apart([] {
    Bench bench;
    std::vector<uint8_t> loaded(bench.dram.base + kPage, bench.dram.base + 2 * kPage);
    std::vector<uint8_t> stored(bench.vram.base + 8 * kPage, bench.vram.base + 9 * kPage);
    fake_cuda_hold(1);
    CHECK(bench.copy(CKV_LOAD, CKV_PATH_GATHER, {bench.load(0, kPage, kPage)}) == 0);
    CHECK(bench.copy(CKV_STORE, CKV_PATH_GATHER, {bench.store(4 * kPage, 8 * kPage, kPage)}) == 0);
    fake_cuda_hold(0);
    bench.drain(CKV_LOAD);
    bench.drain(CKV_STORE);
    CHECK(std::memcmp(bench.vram.base, loaded.data(), kPage) == 0);
    CHECK(std::memcmp(bench.dram.base + 4 * kPage, stored.data(), kPage) == 0);
  });
}

ckv_config gather_config() {
  ckv_config config = cuda_config();
  config.path = CKV_PATH_GATHER;
  return config;
}

uint64_t num_loads_by(CudaRig &rig, int path) {
  return rig.engine_stats().num_trunks[CKV_LOAD][path];
}

TEST(test_cuda_small_loads_are_gathered_and_stores_where_they_are_asked_to) {
  for (const ckv_config &config : {cuda_config(), gather_config()}) {
    apart([&] {
      {
        CudaRig rig(Shape{64, 96, {4096, 1040, 24}, 0, 5 * kPage}, config);
        round_trip(rig);
        CHECK(num_loads_by(rig, CKV_PATH_GATHER) > 0);
        uint64_t num_stores = rig.engine_stats().num_trunks[CKV_STORE][CKV_PATH_GATHER];
        CHECK((num_stores > 0) == (config.path == CKV_PATH_GATHER));
        uint64_t num_launches = fake_cuda_num_calls("cuLaunchKernel");
        CHECK(num_loads_by(rig, CKV_PATH_GATHER) + num_stores == num_launches);
      }
      CHECK(broken_rule().empty());
    });
  }
}

// Opens, copies and closes with everything but gather.
void check_no_gather() {
  {
    CudaRig rig(Shape(), gather_config());
    CHECK((rig.engine_stats().paths >> CKV_PATH_GATHER & 1U) == 0);
    CHECK(rig.engine_stats().num_given_up == 0);
    round_trip(rig);
    CHECK(num_loads_by(rig, CKV_PATH_BATCH) + num_loads_by(rig, CKV_PATH_LOOP) > 0);
    CHECK(fake_cuda_num_calls("cuLaunchKernel") == 0);
  }
  CHECK(broken_rule().empty());
}

TEST(test_cuda_without_a_kernel_opens_all_the_same) {
  for (const char *entry :
       {"cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction", "cuLaunchKernel"}) {
    apart([&] {
      fake_cuda_hide(entry);
      check_no_gather();
    });
  }
  for (const char *entry : {"cuModuleLoadData", "cuModuleGetFunction", "cuMemHostRegister_v2"}) {
    apart([&] {
      fake_cuda_fail(entry, 0, 1, 2);
      check_no_gather();
    });
  }
  apart([] {
    fake_cuda_set(FAKE_CUDA_BINARY, 0);
    check_no_gather();
  });
  apart([] {
    fake_cuda_set(FAKE_CUDA_HOST_POINTERS, 0);
    check_no_gather();
    CHECK(fake_cuda_num_calls("cuModuleLoadData") == 0);
  });
}

TEST(test_cuda_a_launch_that_is_refused_goes_by_batch_from_then_on) {
  for (int code : {1, 209, 701}) {
    apart([&] {
      {
        CudaRig rig(Shape(), gather_config());
        fake_cuda_fail("cuLaunchKernel", 0, 1, code);
        round_trip(rig);
        CHECK(fake_cuda_num_calls("cuLaunchKernel") == 1);
        CHECK(rig.engine_stats().num_given_up == 1 && rig.engine_stats().poison == 0);
        CHECK(num_loads_by(rig, CKV_PATH_BATCH) > 0 && num_loads_by(rig, CKV_PATH_GATHER) == 0);
      }
      CHECK(broken_rule().empty());
    });
  }
}

TEST(test_cuda_a_launch_that_ends_the_context_poisons) {
  apart([] {
    {
      CudaRig rig(Shape(), gather_config());
      fake_cuda_fail("cuLaunchKernel", 0, 1, 2);
      CHECK(rig.submit(CKV_LOAD, {1}, {1}, 1) == CKV_OK);
      CHECK(rig.finish(1).error == 2 && rig.engine_stats().num_given_up == 0);
      fake_cuda_fail("cuLaunchKernel", 0, 1, 700);
      CHECK(rig.submit(CKV_LOAD, {1}, {1}, 2) == CKV_OK);
      CHECK(rig.finish(2).error == 700);
      CHECK(rig.submit(CKV_LOAD, {1}, {1}, 3) == CKV_EPOISONED);
      CHECK(ckv_close(rig.engine, kLong) == CKV_OK);
      fake_cuda_reset();
    }
    CHECK(broken_rule().empty());
  });
}

TEST(test_cuda_a_kernel_that_faults_poisons) {
  apart([] {
    Rig rig(Shape(), gather_config());  // whose vector is not known as VRAM
    CHECK(rig.submit(CKV_LOAD, {1}, {1}, 1) == CKV_OK);
    CHECK(rig.finish(1).error == 700);
    CHECK(rig.submit(CKV_LOAD, {1}, {1}, 2) == CKV_EPOISONED);
    CHECK(ckv_close(rig.engine, kLong) == CKV_OK);
    CHECK(broken_rule().find("not mapped for the device") != std::string::npos);
    fake_cuda_reset();
  });
}

TEST(test_cuda_refused_calls_give_the_code_and_are_not_sticky) {
  apart([] {
    {
      CudaRig rig(Shape(), batch_config());
      rig.fill(1);
      fake_cuda_fail("cuMemcpyBatchAsync", 0, 1, 2);
      CHECK(rig.submit(CKV_STORE, {1}, {1}, 1) == CKV_OK);
      CHECK(rig.finish(1).status == CKV_FAILED && rig.seen.at(1).error == 2);
      CHECK(rig.submit(CKV_STORE, {1}, {1}, 2) == CKV_OK);
      CHECK(rig.finish(2).status == CKV_DONE);
      fake_cuda_fail("cuEventRecord", 0, 1, 2);  // the trunk's: the stream is asked instead
      CHECK(rig.submit(CKV_STORE, {1}, {1}, 3) == CKV_OK);
      CHECK(rig.finish(3).status == CKV_FAILED);
      CHECK(rig.submit(CKV_LOAD, {1}, {1}, 4) == CKV_OK);
      CHECK(rig.finish(4).status == CKV_DONE);
    }
    CHECK(broken_rule().empty());
  });
}

TEST(test_cuda_a_batch_that_is_not_supported_is_looped_from_then_on) {
  apart([] {
    {
      CudaRig rig;
      fake_cuda_fail("cuMemcpyBatchAsync", 0, 1, 801);
      round_trip(rig);
      CHECK(fake_cuda_num_calls("cuMemcpyBatchAsync") == 1);
    }
    CHECK(broken_rule().empty());
  });
}

TEST(test_cuda_a_dead_context_poisons_and_closes) {
  apart([] {
    {
      CudaRig rig(Shape(), batch_config());
      fake_cuda_fail("cuMemcpyBatchAsync", 0, 1, 700);
      CHECK(rig.submit(CKV_STORE, {1}, {1}, 1) == CKV_OK);
      CHECK(rig.finish(1).error == 700);
      CHECK(rig.submit(CKV_STORE, {1}, {1}, 2) == CKV_EPOISONED);
      CHECK(std::string(ckv_last_error()).find("CUDA_ERROR_ILLEGAL_ADDRESS (700)") !=
            std::string::npos);
      CHECK(ckv_close(rig.engine, kLong) == CKV_OK);
      fake_cuda_reset();  // as a new context would: what is left can be given back
    }
    CHECK(broken_rule().empty());
  });
}

TEST(test_cuda_every_call_that_fails_while_opening_leaves_nothing) {
  const char *entries[] = {"cuInit",
                           "cuDeviceGet",
                           "cuDeviceGetAttribute",
                           "cuDevicePrimaryCtxRetain",
                           "cuCtxGetStreamPriorityRange",
                           "cuStreamCreateWithPriority",
                           "cuEventCreate"};
  for (const char *entry : entries) {
    for (uint32_t after : {0U, 1U}) {
      apart([&] {
        fake_cuda_fail(entry, after, 1, 2);
        ckv_config config = cuda_config();
        ckv_engine *engine = nullptr;
        int code = ckv_open(&config, &engine);
        CHECK(code == CKV_EDRIVER || (after == 1 && code == CKV_OK));
        CHECK(code == CKV_OK || std::string(ckv_last_error()).find("(2)") != std::string::npos);
        ckv_free(engine);
        CHECK(broken_rule().empty());
      });
    }
  }
}

// Of the large allocations only: those of the fake are small, and a driver does not throw.
TEST(test_cuda_open_without_memory_leaves_nothing) {
  ckv_config config = cuda_config();
  config.max_descriptors = 4096;
  int64_t num_allocations = 0;
  for (int code = CKV_ENOMEM; code != CKV_OK; ++num_allocations) {
    apart([&] {
      ckv_engine *engine = nullptr;
      smallest_allocation = 16 * kKiB;
      num_allocations_left = num_allocations;
      code = ckv_open(&config, &engine);
      num_allocations_left = -1;
      CHECK(code == (engine == nullptr ? CKV_ENOMEM : CKV_OK));
      ckv_free(engine);
      CHECK(broken_rule().empty());
    });
  }
  CHECK(num_allocations > 8);  // three arrays for each direction's batches, the lane's two
}

TEST(test_cuda_a_pool_is_registered_in_chunks_and_all_or_nothing) {
  apart([] {
    ckv_config config = cuda_config();
    ckv_engine *engine = nullptr;
    CHECK(ckv_open(&config, &engine) == CKV_OK);
    int before = counts().registrations;
    ckv_pool_config wanted = pool_config(10 * kPage);
    wanted.chunk_bytes = 4 * kPage;
    void *base = nullptr;
    CHECK(ckv_pool_map(engine, &wanted, &base) == CKV_OK);
    CHECK(counts().registrations == before + 3);
    CHECK(ckv_pool_unmap(engine, base) == CKV_OK);
    CHECK(counts().registrations == before);
    fake_cuda_fail("cuMemHostRegister_v2", 2, 1, 2);
    CHECK(ckv_pool_map(engine, &wanted, &base) == CKV_EDRIVER);
    CHECK(counts().registrations == before);
    ckv_free(engine);
    CHECK(broken_rule().empty());
  });
}

TEST(test_cuda_puts_back_the_context_of_the_callers_thread) {
  apart([] {
    CudaRig rig;
    CHECK(rig.submit(CKV_STORE, {1}, {1}, 1, 1) == CKV_OK);
    CHECK(rig.finish(1).status == CKV_DONE);
    CHECK(counts().is_context_current == 0);
  });
}

TEST(test_cuda_close_waits_for_copies_in_flight) {
  apart([] {
    {
      CudaRig rig;
      fake_cuda_hold(1);
      CHECK(rig.submit(CKV_STORE, {1}, {1}, 1) == CKV_OK);
      CHECK(ckv_wait(rig.engine, 1, 1000) == CKV_TIMEOUT);
      std::thread closer([&] { CHECK(ckv_close(rig.engine, kLong) == CKV_OK); });
      fake_cuda_hold(0);
      closer.join();
      rig.poll();
      CHECK(rig.seen.at(1).status == CKV_DONE);
    }
    CHECK(broken_rule().empty());
  });
}

// Of another thread: a refused call would also invalidate it, and with it the start of a server.
TEST(test_cuda_transfers_leave_a_graph_capture_alone) {
  apart([] {
    {
      CudaRig rig;
      fake_cuda_capture(1);
      round_trip(rig);
      fake_cuda_fail("cuEventRecord", 1, 1, 2);  // the trunk's: the lane asks the stream instead
      CHECK(rig.submit(CKV_STORE, {1}, {1}, 3, 1) == CKV_OK);
      CHECK(rig.finish(3).error == 2);
      CHECK(fake_cuda_num_calls("cuStreamQuery") > 0);
      CHECK(ckv_close(rig.engine, kLong) == CKV_OK);
      fake_cuda_capture(0);  // the caller frees the engine, on his own thread
    }
    CHECK(broken_rule().empty());
  });
}

TEST(test_cuda_a_pool_that_grows_leaves_a_graph_capture_alone) {
  apart([] {
    ckv_config config = cuda_config();
    ckv_engine *engine = nullptr;
    CHECK(ckv_open(&config, &engine) == CKV_OK);
    ckv_pool_config wanted = pool_config(10 * kPage);
    wanted.chunk_bytes = wanted.first_bytes = 2 * kPage;
    void *base = nullptr;
    fake_cuda_capture(1);
    CHECK(ckv_pool_map(engine, &wanted, &base) == CKV_OK);
    CHECK(ckv_pool_wait(engine, base, kLong) == CKV_OK);
    fake_cuda_capture(0);
    ckv_pool_state state{};
    state.size = sizeof state;
    CHECK(ckv_pool_get_state(engine, base, &state) == CKV_OK);
    CHECK(state.error == 0 && state.ready_bytes == 10 * kPage);
    ckv_free(engine);
    CHECK(broken_rule().empty());
  });
}

// The fake refuses what the documentation forbids; else its silence would prove nothing.
TEST(test_cuda_fake_refuses_what_the_documentation_forbids) {
  apart([] {
    {
      Bench bench;
      CHECK(bench.copy(CKV_LOAD, CKV_PATH_BATCH, {bench.load(0, 0, 0)}) == 1);
      CHECK(bench.copy(CKV_LOAD, CKV_PATH_BATCH, {}) == 1);
      CHECK(bench.copy(CKV_LOAD, CKV_PATH_BATCH, {{bench.vram.at(0), 4096, 16}}) == 1);
      CHECK(bench.driver->host_register(bench.dram.base + kPage, kPage) == 712);
      CHECK(bench.driver->host_unregister(bench.dram.base + kPage) == 713);
      CHECK(bench.driver->event_query(bench.vram.base) == 400);
      std::thread([&] {
        CHECK(bench.driver->stream_query(bench.driver->copy_stream(CKV_LOAD)) == 201);
        fake_cuda_capture(1);
        CHECK(bench.driver->stream_query(bench.driver->copy_stream(CKV_LOAD)) == 900);
        CHECK(bench.driver->host_register(bench.vram.base, kPage) == 900);
        fake_cuda_capture(0);
      }).join();
      CHECK(!broken_rule().empty());
      fake_cuda_reset();
    }
  });
}

void refused(int code, const char *rule) {
  CHECK(code == 1 && broken_rule().find(rule) != std::string::npos);
}

int batch(const ckv::cuda::Library &library, const Bench &bench, ckv::Descriptor copy, int order) {
  ckv::cuda::DevicePtr dst = copy.dst;
  ckv::cuda::DevicePtr src = copy.src;
  size_t bytes = copy.bytes;
  ckv::cuda::MemcpyAttributes attributes{};
  attributes.src_access_order = order;
  size_t index = 0;
  size_t failed_at = 0;
  auto *stream = static_cast<ckv::cuda::StreamHandle>(bench.driver->copy_stream(CKV_LOAD));
  return library.memcpy_batch(&dst, &src, &bytes, 1, &attributes, &index, 1, &failed_at, stream);
}

// ... and what it leaves open where only one choice is right here.
TEST(test_cuda_fake_refuses_choices_that_are_not_ours) {
  apart([] {
    {
      Bench bench;
      ckv::cuda::Library l = ckv::cuda::open_library();
      int least = 0;
      int greatest = 0;
      CHECK(l.priority_range(&least, &greatest) == 0 && greatest < 0 && least > 0);
      ckv::cuda::StreamHandle stream = nullptr;
      refused(l.stream_create(&stream, 0, least), "waits for the legacy stream");
      refused(l.stream_create(&stream, 1, 0), "more than the least priority");
      ckv::cuda::EventHandle event = nullptr;
      refused(l.event_create(&event, 0), "takes the time");
      Pages pages(kPage);
      refused(l.host_register(pages.base, kPage, 2), "one context only");
      CHECK(madvise(pages.base, kPage, MADV_DOFORK) == 0);
      refused(l.host_register(pages.base, kPage, 3), "a fork would copy");
      refused(batch(l, bench, bench.store(0, 0, 16), 3), "VRAM out of the stream's order");
      refused(batch(l, bench, bench.load(0, 0, 16), 2), "within the call");
      CHECK(batch(l, bench, bench.load(0, 0, 16), 1) == 0);
      bench.drain(CKV_LOAD);
      fake_cuda_reset();
    }
  });
}

}  // namespace
