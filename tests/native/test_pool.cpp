// The host pool: it grows by chunks on its own thread, may end early, and is never a danger.
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "available.h"
#include "engine.h"
#include "failure.h"
#include "host_pool.h"
#include "placement.h"
#include "rig.h"

namespace {

using ckv::CpuSet;
using ckv::HostPool;

constexpr std::chrono::seconds kPatience{20};

ckv::Intake machine;

// Registrations from `num_free` on wait until they are let through.
class Latch {
 public:
  void attach(InstantDriver &driver, size_t num_free) {
    driver.before_register = [this, num_free](size_t num_before) {
      std::unique_lock<std::mutex> lock(mutex_);
      is_waiting_ = num_before >= num_free;
      changed_.notify_all();
      changed_.wait(lock, [&] { return num_before < num_free || is_open_; });
    };
  }
  void until_waiting() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return is_waiting_; });
  }
  void open() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_waiting_ = false;
  bool is_open_ = false;
};

// 10 MiB in chunks of 4; returned from map when the first is ready.
ckv_pool_config staged() {
  ckv_pool_config config = pool_config(10 * kMiB);
  config.chunk_bytes = 4 * kMiB;
  config.first_bytes = 4 * kMiB;
  return config;
}

ckv_pool_state state_of(const HostPool &pool) {
  ckv_pool_state state;
  pool.get_state(&state);
  return state;
}

ckv_pool_state until_grown(HostPool &pool) {
  CHECK(pool.wait_grown(kPatience));
  return state_of(pool);
}

bool has(const std::string &text, const char *part) { return text.find(part) != text.npos; }

template <typename Body>
std::string failure_of(int code, const Body &body) {
  try {
    body();
  } catch (const ckv::Failure &failure) {
    CHECK(failure.code() == code);
    return failure.what();
  }
  CHECK(false);
  return "";
}

// Of the pages of the range, those that there are; in bytes.
uint64_t resident_bytes(const void *base, uint64_t bytes) {
  uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages(bytes / page);
  CHECK(mincore(const_cast<void *>(base), bytes, pages.data()) == 0);
  uint64_t count = 0;
  for (unsigned char flags : pages) {
    count += flags & 1;
  }
  return count * page;
}

// An engine over an InstantDriver whose second registration waits, and its pool.
struct GrowingEngine {
  GrowingEngine() {
    auto owned = std::make_unique<InstantDriver>(100);
    driver = owned.get();
    latch.attach(*driver, 1);
    engine = std::make_shared<ckv::Engine>(full_config(), std::move(owned));
    ckv::Engine::start(engine);
    base = static_cast<char *>(engine->map_pool(staged()));
    latch.until_waiting();
  }
  static ckv_config full_config() {
    ckv_config config = sim_config();
    config.max_transfers = 10;
    config.max_descriptors = 4;
    config.trunk_bytes = config.window_bytes[CKV_LOAD] = config.window_bytes[CKV_STORE] = 4 * kMiB;
    return config;
  }
  ckv_pool_state state() {
    ckv_pool_state state;
    engine->get_pool_state(base, &state);
    return state;
  }
  Latch latch;
  std::shared_ptr<ckv::Engine> engine;
  InstantDriver *driver;
  char *base;
};

TEST(test_pool_is_ready_chunk_by_chunk) {
  InstantDriver driver(100);
  Latch latch;
  latch.attach(driver, 1);
  {
    HostPool pool(driver, staged(), machine);
    pool.grow();
    latch.until_waiting();
    ckv_pool_state state = state_of(pool);
    CHECK(state.ready_bytes == 4 * kMiB && state.mapped_bytes == 10 * kMiB && state.is_growing);
    latch.open();
    state = until_grown(pool);
    CHECK(state.ready_bytes == 10 * kMiB && state.error == 0 && state.why[0] == 0);
    CHECK(state.populate_s > 0 && state.lock_s > 0);
    CHECK(driver.registered.size() == 3);
    for (uint64_t at = 0; at < 10 * kMiB; at += 4096) {
      CHECK(static_cast<char *>(pool.base())[at] == 0);
    }
  }
  CHECK(driver.registered.empty());
}

// While the pool locks pages, a step's own driver calls wait.
TEST(test_a_pool_that_is_used_leaves_the_driver_alone_as_long_as_it_kept_it) {
  using Clock = std::chrono::steady_clock;
  InstantDriver driver(100);
  Latch latch;
  latch.attach(driver, 1);
  auto wait = driver.before_register;
  std::vector<std::pair<Clock::time_point, Clock::time_point>> locks;
  driver.before_register = [&](size_t num_before) {
    Clock::time_point begin = Clock::now();
    wait(num_before);
    locks.emplace_back(begin, Clock::now());
  };
  HostPool pool(driver, staged(), machine);
  pool.grow();
  latch.until_waiting();  // the second is under way
  volatile uint64_t sum = 0;
  for (uint64_t i = 0; i < 10 * kMiB; ++i) {  // milliseconds
    sum = sum + i;
  }
  latch.open();
  until_grown(pool);
  CHECK(locks.size() == 3);
  CHECK(locks[2].first - locks[1].second >= locks[1].second - locks[1].first);
}

TEST(test_a_pool_takes_what_is_wanted_and_waits_until_more_is) {
  InstantDriver driver(99);
  ckv_pool_config config = staged();
  config.wanted_bytes = 1;  // the first bytes, at least
  HostPool pool(driver, config, machine);
  pool.grow();
  ckv_pool_state state = until_grown(pool);
  CHECK(state.ready_bytes == 4 * kMiB && state.wanted_bytes == 4 * kMiB);
  CHECK(!state.is_growing && state.error == 0);
  CHECK(resident_bytes(pool.base(), 10 * kMiB) == 4 * kMiB);
  pool.want(5 * kMiB);
  pool.want(2 * kMiB);  // less than it wants
  state = until_grown(pool);
  CHECK(state.ready_bytes == 8 * kMiB && state.wanted_bytes == 5 * kMiB);
  pool.want(99 * kMiB);
  state = until_grown(pool);
  CHECK(state.ready_bytes == 10 * kMiB && state.wanted_bytes == 10 * kMiB);
  pool.give_back();
  pool.grow_again();
  CHECK(until_grown(pool).ready_bytes == 4 * kMiB);
}

TEST(test_a_pool_that_waits_for_demand_goes_at_once) {
  InstantDriver driver(99);
  ckv_pool_config config = staged();
  config.wanted_bytes = 1;
  HostPool pool(driver, config, machine);
  pool.grow();
}

TEST(test_a_pool_leaves_to_others_as_much_as_it_takes) {
  ckv::Intake intake{[] {
    ckv::Room room;
    room.available = 16 * kMiB;  // it does not shrink: as if others gave back what the pool takes
    return room;
  }};
  InstantDriver driver(99);
  ckv_pool_config config = staged();
  config.num_left = 2;  // 4 MiB and 2 x 4 fit into 16, 4 more and 2 x 8 do not
  HostPool pool(driver, config, intake);
  pool.grow();
  ckv_pool_state state = until_grown(pool);
  CHECK(state.ready_bytes == 4 * kMiB && state.error == CKV_ENOMEM);
  CHECK(has(state.why, "keeps 16.0 MiB of it"));
}

TEST(test_a_pool_of_the_simulator_grows_by_use_too_and_touches_no_page) {
  InstantDriver driver(99);
  driver.pins_pages = false;
  ckv_pool_config config = staged();
  config.wanted_bytes = 1;
  HostPool pool(driver, config, machine);
  pool.grow();
  CHECK(until_grown(pool).ready_bytes == 4 * kMiB);
  pool.want(10 * kMiB);
  CHECK(until_grown(pool).ready_bytes == 10 * kMiB);
  CHECK(driver.registered.empty() && resident_bytes(pool.base(), 10 * kMiB) == 0);
}

TEST(test_pool_of_one_stage_is_ready_when_mapped) {
  InstantDriver driver(100);
  ckv_pool_config config = staged();
  config.first_bytes = 0;
  config.chunk_bytes = 4 * kMiB - 1;  // rounded to pages
  config.num_threads = 3;
  HostPool pool(driver, config, machine);
  pool.grow();
  CHECK(state_of(pool).ready_bytes == 10 * kMiB && driver.registered.size() == 3);
}

TEST(test_pool_that_cannot_be_locked_at_first_is_rolled_back) {
  InstantDriver driver(1);
  ckv_pool_config config = staged();
  config.first_bytes = 8 * kMiB;
  std::string why = failure_of(CKV_EDRIVER, [&] { HostPool(driver, config, machine).grow(); });
  CHECK(has(why, "page-locking stopped at 4.0 MiB of 10.0 MiB: error 2; "));
  CHECK(driver.registered.empty());
}

TEST(test_a_refusal_to_lock_pages_names_the_limit_and_the_cure) {
  rlimit before{};
  CHECK(getrlimit(RLIMIT_MEMLOCK, &before) == 0);
  InstantDriver driver(1);
  ckv_pool_config config = staged();
  config.first_bytes = 8 * kMiB;
  rlimit low = before;
  low.rlim_cur = 64 * kKiB;  // a soft limit, which can be put back
  CHECK(setrlimit(RLIMIT_MEMLOCK, &low) == 0);
  std::string why = failure_of(CKV_EDRIVER, [&] { HostPool(driver, config, machine).grow(); });
  CHECK(setrlimit(RLIMIT_MEMLOCK, &before) == 0);
  CHECK(why ==
        "page-locking stopped at 4.0 MiB of 10.0 MiB: error 2; RLIMIT_MEMLOCK is 64.0 KiB "
        "(`ulimit -l unlimited`, or --ulimit memlock=-1 for a container)");
  if (before.rlim_max == RLIM_INFINITY) {
    rlimit none = {RLIM_INFINITY, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_MEMLOCK, &none) == 0);
    why = failure_of(CKV_EDRIVER, [&] { HostPool(driver, config, machine).grow(); });
    CHECK(setrlimit(RLIMIT_MEMLOCK, &before) == 0);
    CHECK(has(why, ": error 2; lower dram_bytes if the machine locks no more"));
  }
}

TEST(test_pool_that_cannot_grow_stays_smaller_and_says_why) {
  InstantDriver driver(2);
  {
    HostPool pool(driver, staged(), machine);
    pool.grow();
    ckv_pool_state state = until_grown(pool);
    CHECK(state.ready_bytes == 8 * kMiB && state.error == CKV_EDRIVER);
    CHECK(has(state.why, "page-locking stopped at 8.0 MiB of 10.0 MiB: error 2; "));
    CHECK(pool.ready_bytes() == 8 * kMiB);
    static_cast<char *>(pool.base())[8 * kMiB - 1] = 1;
    CHECK(resident_bytes(pool.base(), 8 * kMiB) == 8 * kMiB);
    CHECK(resident_bytes(static_cast<char *>(pool.base()) + 8 * kMiB, 2 * kMiB) ==
          0);  // given back
  }
  CHECK(driver.registered.empty());
}

TEST(test_growth_is_tried_again_where_memory_was_short) {
  InstantDriver driver(100);
  int num_locked = 0;
  driver.before_register = [&](size_t) { ++num_locked; };
  std::mutex mutex;
  std::condition_variable changed;
  int num_short = 0;
  uint64_t available = 5 * kMiB;  // the first chunk, not the second
  ckv::Intake scarce([&] {
    std::lock_guard<std::mutex> lock(mutex);
    num_short += driver.registered.size() == 1 && available == 5 * kMiB;
    changed.notify_all();
    return ckv::Room{"the machine", available - 4 * kMiB * (driver.registered.size() == 1), 0};
  });
  HostPool pool(driver, staged(), scarce, std::chrono::milliseconds(1));
  pool.grow();
  ckv_pool_state state = until_grown(pool);
  CHECK(state.ready_bytes == 4 * kMiB && state.error == CKV_ENOMEM && !state.is_growing);
  CHECK(has(state.why, "growing stopped at 4.0 MiB of 10.0 MiB: the machine has 1.0 MiB"));
  std::unique_lock<std::mutex> lock(mutex);
  CHECK(changed.wait_for(lock, kPatience, [&] { return num_short > 2; }));
  available = 64 * kMiB;
  for (int i = 0; i < 20'000 && (state.ready_bytes < 10 * kMiB || state.error != 0); ++i) {
    changed.wait_for(lock, std::chrono::milliseconds(1));
    state = state_of(pool);
  }
  CHECK(state.ready_bytes == 10 * kMiB && state.why[0] == 0 && !state.is_growing);
  CHECK(num_locked == 3);  // each chunk once
}

TEST(test_a_pool_that_pauses_goes_at_once) {
  InstantDriver driver(100);
  ckv::Intake scarce(
      [&] { return ckv::Room{"the machine", driver.registered.empty() ? 4 * kMiB : 0, 0}; });
  {
    HostPool pool(driver, staged(), scarce, std::chrono::hours(1));
    pool.grow();
    CHECK(until_grown(pool).error == CKV_ENOMEM);
  }
  CHECK(driver.registered.empty());
}

// "S" once it waits for something.
std::string state_of_thread(pid_t tid) {
  std::ifstream file("/proc/self/task/" + std::to_string(tid) + "/stat");
  std::string id;
  std::string name;
  std::string state;
  file >> id >> name >> state;
  return state;
}

TEST(test_pool_that_goes_while_a_chunk_is_being_locked_locks_no_other) {
  InstantDriver driver(100);
  Latch latch;
  latch.attach(driver, 1);
  size_t num_asked = 0;
  driver.before_register = [&, wait = driver.before_register](size_t num_before) {
    ++num_asked;
    wait(num_before);
  };
  auto pool = std::make_unique<HostPool>(driver, staged(), machine);
  pool->grow();
  latch.until_waiting();
  std::atomic<pid_t> tid{0};
  std::thread owner([&] {
    prctl(PR_SET_NAME, "owner");
    tid = gettid();
    pool.reset();  // waits for the chunk, which stays unused
  });
  while (tid == 0 || state_of_thread(tid) != "S") {
    usleep(100);
  }
  latch.open();
  owner.join();
  CHECK(num_asked == 2 && driver.registered.empty());
}

TEST(test_slots_beyond_what_is_ready_are_refused_until_it_is) {
  GrowingEngine growing;
  ckv::Engine &engine = *growing.engine;
  static char vram[16 * 4096];
  // 16 slots of 1 MiB: 10 in the pool, 4 of them ready; the second region ends with the slot.
  uint64_t base = reinterpret_cast<uint64_t>(growing.base);
  ckv_region regions[] = {{reinterpret_cast<uint64_t>(vram), 4096, base, kMiB, 4096},
                          {reinterpret_cast<uint64_t>(vram), 4096, base + kMiB - 4096, kMiB, 4096}};
  engine.set_regions(regions, 2, 16, 16);
  auto submit = [&](int32_t slot, uint64_t tag) {
    engine.submit(CKV_STORE, 0, &slot, &slot, 1, 0, tag);
  };
  submit(3, 1);
  std::string why = failure_of(CKV_EINVAL, [&] { submit(4, 2); });
  CHECK(why == "slot 4 is not ready: the pool has grown to 4 of 16 slots");
  growing.latch.open();
  CHECK(engine.wait_pool(growing.base, kPatience));
  submit(9, 3);
  CHECK(has(failure_of(CKV_EINVAL, [&] { submit(10, 4); }), "10 of 16"));
  CHECK(engine.close(std::chrono::seconds(20)) == CKV_OK);
}

TEST(test_a_pool_that_is_given_back_is_empty_and_grows_again_in_its_place) {
  InstantDriver driver(100);
  HostPool pool(driver, staged(), machine);
  pool.grow();
  CHECK(until_grown(pool).ready_bytes == 10 * kMiB && driver.registered.size() == 3);
  void *base = pool.base();
  static_cast<char *>(base)[5] = 1;
  pool.give_back();
  pool.give_back();
  CHECK(state_of(pool).ready_bytes == 0 && driver.registered.empty());
  CHECK(resident_bytes(base, 10 * kMiB) == 0);
  pool.grow_again();
  CHECK(until_grown(pool).ready_bytes == 10 * kMiB && driver.registered.size() == 3);
  CHECK(pool.base() == base && static_cast<char *>(base)[5] == 0);
  CHECK(has(failure_of(CKV_EINVAL, [&] { pool.grow_again(); }), "once it was given back"));
}

TEST(test_a_pool_that_is_given_back_while_it_grows_stops_and_begins_anew) {
  InstantDriver driver(100);
  Latch latch;
  latch.attach(driver, 1);
  HostPool pool(driver, staged(), machine);
  pool.grow();
  latch.until_waiting();
  std::thread opener([&] { latch.open(); });
  pool.give_back();  // waits for the chunk under way
  opener.join();
  CHECK(driver.registered.empty() && resident_bytes(pool.base(), 10 * kMiB) == 0);
  pool.grow_again();
  CHECK(until_grown(pool).ready_bytes == 10 * kMiB);
}

TEST(test_a_pool_grows_again_without_waiting_for_memory_that_others_have) {
  InstantDriver driver(100);
  std::atomic<bool> is_taken{false};
  ckv::Intake scarce([&] { return ckv::Room{"the machine", is_taken ? 0 : 64 * kMiB, 0}; });
  HostPool pool(driver, staged(), scarce, std::chrono::milliseconds(1));
  pool.grow();
  until_grown(pool);
  pool.give_back();
  is_taken = true;
  pool.grow_again();
  ckv_pool_state state = until_grown(pool);
  CHECK(state.ready_bytes == 0 && state.error == CKV_ENOMEM);
  is_taken = false;
  for (int i = 0; i < 20'000 && state.ready_bytes < 10 * kMiB; ++i) {
    usleep(1000);
    state = state_of(pool);
  }
  CHECK(state.ready_bytes == 10 * kMiB);
}

TEST(test_an_engine_gives_its_pool_back_only_when_nothing_uses_it_and_then_has_no_slot) {
  GrowingEngine growing;
  growing.latch.open();
  ckv::Engine &engine = *growing.engine;
  CHECK(engine.wait_pool(growing.base, kPatience));
  static char vram[8 * 4096];
  uint64_t base = reinterpret_cast<uint64_t>(growing.base);
  ckv_region region = {reinterpret_cast<uint64_t>(vram), 4096, base, kMiB, 4096};
  engine.set_regions(&region, 1, 8, 8);
  auto submit = [&](uint64_t tag) {
    int32_t one = 1;
    engine.submit(CKV_STORE, 0, &one, &one, 1, 0, tag);
  };
  submit(1);
  CHECK(engine.wait(1, kPatience));
  engine.release_pool(growing.base);
  CHECK(growing.driver->registered.empty());
  CHECK(has(failure_of(CKV_EINVAL, [&] { submit(2); }), "grown to 0 of 8 slots"));
  engine.regrow_pool(growing.base);
  CHECK(engine.wait_pool(growing.base, kPatience));
  submit(3);
  CHECK(engine.close(std::chrono::seconds(20)) == CKV_OK);
  failure_of(CKV_CLOSED, [&] { engine.regrow_pool(growing.base); });
}

TEST(test_close_ends_growth_and_the_engine_waits_for_the_chunk) {
  GrowingEngine growing;
  CHECK(growing.engine->close(std::chrono::seconds(20)) == CKV_OK);  // the chunk still waits
  CHECK(growing.state().is_growing);
  growing.latch.open();
  CHECK(growing.engine->wait_pool(growing.base, kPatience));
  CHECK(growing.state().error == CKV_CLOSED && growing.state().ready_bytes == 8 * kMiB);
  growing.engine->unmap_pool(growing.base);
  CHECK(growing.driver->registered.empty());
}

TEST(test_waiting_for_a_pool_ends_with_its_growth_or_with_the_time) {
  GrowingEngine growing;
  CHECK(!growing.engine->wait_pool(growing.base, std::chrono::microseconds(100)));
  failure_of(CKV_EINVAL, [&] { growing.engine->wait_pool(&growing, kPatience); });
  std::atomic<bool> was_whole{false};
  std::thread waiter([&] {
    was_whole = growing.engine->wait_pool(growing.base, kPatience) &&
                growing.state().ready_bytes == 10 * kMiB;
  });
  growing.latch.open();
  waiter.join();
  CHECK(was_whole);
  CHECK(growing.engine->close(kPatience) == CKV_OK);
}

TEST(test_an_engine_may_go_while_its_pool_grows) {
  GrowingEngine growing;
  CHECK(growing.engine->close(std::chrono::seconds(20)) == CKV_OK);
  std::thread opener([&] { growing.latch.open(); });
  growing.engine.reset();
  opener.join();
}

TEST(test_close_ends_a_map_that_waits) {
  auto owned = std::make_unique<InstantDriver>(100);
  Latch latch;
  latch.attach(*owned, 1);
  auto engine = std::make_shared<ckv::Engine>(GrowingEngine::full_config(), std::move(owned));
  ckv::Engine::start(engine);
  ckv_pool_config config = staged();
  config.first_bytes = 0;
  std::thread mapper([&] {
    std::string why = failure_of(CKV_CLOSED, [&] { engine->map_pool(config); });
    CHECK(why == "growing stopped at 8.0 MiB of 10.0 MiB: the engine is closed");
  });
  latch.until_waiting();
  CHECK(engine->close(std::chrono::seconds(20)) == CKV_OK);
  latch.open();
  mapper.join();
}

TEST(test_a_fork_does_not_inherit_the_growing_pool) {
  GrowingEngine growing;
  pid_t child = fork();
  if (child == 0) {
    int ends[2];
    bool is_there = pipe(ends) != 0 || write(ends[1], growing.base, 1) == 1;
    _exit(is_there ? 1 : 0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  growing.latch.open();
  CHECK(growing.engine->close(std::chrono::seconds(20)) == CKV_OK);
}

// ---- What memory there is.

// A folder of kernel files.
struct FakeKernel {
  FakeKernel() {
    char name[] = "/tmp/ckv-XXXXXX";
    folder = mkdtemp(name);
    roots.proc = folder + "/proc";
    roots.cgroup = folder + "/cgroup";
    meminfo(64);
  }
  ~FakeKernel() { std::filesystem::remove_all(folder); }
  void put(const std::string &path, const std::string &text) const {
    std::filesystem::create_directories(std::filesystem::path(folder + path).parent_path());
    std::ofstream(folder + path) << text;
  }
  void meminfo(uint64_t available_gib) const {
    put("/proc/meminfo", "MemTotal:       104857600 kB\nMemFree:  1 kB\nMemAvailable:   " +
                             std::to_string(available_gib << 20) + " kB\n");
  }
  std::string folder;
  ckv::MemoryRoots roots;
  ckv::Intake intake{[this] { return ckv::find_room(roots); }};
};

constexpr uint64_t kGiB = kMiB * kKiB;

TEST(test_room_is_what_the_machine_has) {
  FakeKernel kernel;
  ckv::Room room = ckv::find_room(kernel.roots);
  CHECK(room.available == 64 * kGiB && room.reserve == 2 * kGiB);  // 2 % of 100 GiB
  CHECK(room.fits(62 * kGiB) && !room.fits(62 * kGiB + 1));
  kernel.meminfo(1);
  CHECK(!ckv::find_room(kernel.roots).fits(1));
  CHECK(ckv::find_room({"/nowhere", "/nowhere"}).fits(kGiB));
}

TEST(test_room_is_bounded_by_each_cgroup_above) {
  FakeKernel kernel;
  kernel.put("/proc/self/cgroup", "0::/a/b\n");
  kernel.put("/cgroup/a/b/memory.max", "max\n");
  kernel.put("/cgroup/a/b/memory.current", "1\n");
  CHECK(ckv::find_room(kernel.roots).available == 64 * kGiB);
  kernel.put("/cgroup/a/memory.max", std::to_string(8 * kGiB));
  kernel.put("/cgroup/a/memory.current", std::to_string(6 * kGiB));
  ckv::Room room = ckv::find_room(kernel.roots);
  CHECK(room.available == 2 * kGiB && room.reserve == kGiB);
  CHECK(std::string(room.owner) == "the memory cgroup");
  kernel.put("/cgroup/a/memory.stat", "anon 5\ninactive_file 1073741824\nactive_file 1\n");
  CHECK(ckv::find_room(kernel.roots).available == 3 * kGiB + 1);  // the page cache can go
  kernel.put("/cgroup/a/memory.high", std::to_string(7 * kGiB));
  CHECK(ckv::find_room(kernel.roots).available == 2 * kGiB + 1);
  kernel.put("/cgroup/a/memory.max", "max");
  CHECK(ckv::find_room(kernel.roots).available == 2 * kGiB + 1);
  kernel.put("/cgroup/a/memory.high", "max");
  CHECK(ckv::find_room(kernel.roots).available == 64 * kGiB);
}

TEST(test_room_in_a_container_that_sees_its_cgroup_as_the_mount) {
  FakeKernel kernel;
  kernel.put("/proc/self/cgroup", "9:cpu:/x\n4:hugetlb,memory:/docker/1f\n");
  kernel.put("/cgroup/memory/memory.limit_in_bytes", std::to_string(4 * kGiB));
  kernel.put("/cgroup/memory/memory.usage_in_bytes", std::to_string(kGiB));
  CHECK(ckv::find_room(kernel.roots).available == 3 * kGiB);
}

TEST(test_pool_is_refused_before_a_page_is_touched_if_memory_is_short) {
  FakeKernel kernel;
  kernel.meminfo(2);
  InstantDriver driver(100);
  std::string why =
      failure_of(CKV_ENOMEM, [&] { HostPool(driver, staged(), kernel.intake).grow(); });
  CHECK(why ==
        "the machine has 2.0 GiB available and keeps 2.0 GiB of it, the pool wants 10.0 MiB; "
        "lower dram_bytes");
  CHECK(driver.registered.empty());
}

TEST(test_pool_stops_growing_where_memory_ends) {
  FakeKernel kernel;
  InstantDriver driver(100);
  driver.before_register = [&](size_t num_before) {
    if (num_before == 1) {
      kernel.meminfo(2);
    }
  };
  HostPool pool(driver, staged(), kernel.intake);
  pool.grow();
  ckv_pool_state state = until_grown(pool);
  CHECK(state.ready_bytes == 8 * kMiB && state.error == CKV_ENOMEM);
  CHECK(has(state.why, "growing stopped at 8.0 MiB of 10.0 MiB: the machine has 2.0 GiB"));
}

// What an Intake of the test's sees; counts the looks.
struct FakeRoom {
  ckv::Room look() {
    if (before_look) {
      before_look(num_looks);
    }
    ckv::Room room;
    room.available = available;
    ++num_looks;
    return room;
  }
  std::atomic<uint64_t> available{kGiB};
  std::atomic<size_t> num_looks{0};
  std::function<void(size_t num_before)> before_look;  // on the thread that looks
  ckv::Intake intake{[this] { return look(); }};
};

TEST(test_what_others_have_begun_to_take_is_no_room) {
  for (uint64_t left : {0, 64}) {
    FakeRoom room;
    room.available = 100;
    CHECK(room.intake.begin(64));
    bool has_got = false;
    std::thread second([&] { has_got = room.intake.begin(64); });
    while (room.num_looks < 2) {
      usleep(20);
    }
    room.available = left;  // what the first has taken is there, and shows
    room.intake.end(64);
    second.join();
    CHECK(room.num_looks == 3 && has_got == (left == 64));
  }
}

constexpr uint64_t kTask = 16 * kMiB;

// One chunk. Two looks come before the tasks': for the first bytes and for the chunk.
ckv_pool_config of_tasks(uint64_t num_tasks, unsigned num_threads) {
  ckv_pool_config config = pool_config(num_tasks * kTask);
  config.num_threads = num_threads;
  return config;
}

TEST(test_a_pool_looks_for_room_before_each_task_and_gives_back_the_chunk) {
  for (size_t num_good : {2, 3, 4}) {
    InstantDriver driver(100);
    FakeRoom room;
    room.before_look = [&](size_t num_before) {
      if (num_before == num_good) {
        room.available = kTask - kMiB;
      }
    };
    HostPool pool(driver, of_tasks(3, 1), room.intake);
    std::string why = failure_of(CKV_ENOMEM, [&] { pool.grow(); });
    CHECK(has(why, "the machine has 15.0 MiB available"));
    CHECK(room.num_looks == num_good + 2);  // the last one for the sentence
    CHECK(resident_bytes(pool.base(), 3 * kTask) == 0);
  }
}

TEST(test_a_pool_takes_no_room_that_another_of_the_engine_has_begun_to_take) {
  InstantDriver driver(100);
  FakeRoom room;
  room.available = kTask;
  CHECK(room.intake.begin(kTask));
  HostPool pool(driver, of_tasks(1, 1), room.intake);
  std::thread other([&] {
    while (room.num_looks < 4) {  // its own, two for the chunk, one for the first task
      usleep(20);
    }
    room.available = 0;
    room.intake.end(kTask);
  });
  failure_of(CKV_ENOMEM, [&] { pool.grow(); });
  other.join();
}

// ---- Where things run and lie.

TEST(test_cpu_lists_are_read) {
  CHECK((ckv::parse_cpus(" 0-2,7,10-11\n") == CpuSet{0, 1, 2, 7, 10, 11}));
  CHECK((ckv::parse_cpus("3") == CpuSet{3}));
  for (const char *bad : {"", "\n", "x", "3-1", "1-", "-1", "0-99999999"}) {
    CHECK(ckv::parse_cpus(bad).empty());
  }
  CHECK(ckv::node_cpus(-1).empty() && !ckv::process_cpus().empty());
}

TEST(test_numa_node_of_a_device_is_read_where_the_kernel_says_it) {
  FakeKernel kernel;
  kernel.put("/0000:4b:00.0/numa_node", "1\n");
  kernel.put("/0000:4c:00.0/numa_node", "-1\n");
  CHECK(ckv::numa_node_of("0000:4B:00.0", kernel.folder) == 1);
  CHECK(ckv::numa_node_of("0000:4C:00.0", kernel.folder) == -1);
  CHECK(ckv::numa_node_of("0000:4D:00.0", kernel.folder) == -1);
}

TEST(test_lane_runs_near_the_device_and_not_where_its_opener_is_pinned) {
  const CpuSet all = {0, 1, 2, 3};
  const CpuSet near = {0, 1};
  CHECK(ckv::lane_cpus(all, near, {0}) == CpuSet{1});
  CHECK((ckv::lane_cpus(all, {}, {0}) == CpuSet{1, 2, 3}));
  CHECK(ckv::lane_cpus(all, near, all) == near);      // not pinned
  CHECK(ckv::lane_cpus(all, {8, 9}, all) == all);     // nothing of the node is ours
  CHECK(ckv::lane_cpus(all, {0}, {0}) == CpuSet{0});  // no other there
  CHECK(ckv::lane_cpus({2}, near, {2}) == CpuSet{2});
}

CpuSet cpus_of(pid_t tid) {
  cpu_set_t mask;
  CHECK(sched_getaffinity(tid, sizeof mask, &mask) == 0);
  CpuSet cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &mask)) {
      cpus.insert(cpu);
    }
  }
  return cpus;
}

// But for the main one, on which a test may have run a lane.
std::vector<pid_t> threads_named(const std::string &name) {
  std::vector<pid_t> found;
  for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string comm;
    std::getline(std::ifstream(task.path() / "comm"), comm);
    pid_t tid = std::stoi(task.path().filename());
    if (comm == name && tid != getpid()) {
      found.push_back(tid);
    }
  }
  return found;
}

TEST(test_lane_of_a_pinned_opener_runs_elsewhere) {
  const CpuSet all = ckv::process_cpus();
  if (all.size() < 2) {
    std::printf("  (needs two CPUs)\n");
    return;
  }
  const int pinned = *all.begin();
  std::thread([&] {
    prctl(PR_SET_NAME, "opener");  // not the main thread's name, which is inherited
    ckv::run_on({pinned});
    Rig rig;
    CHECK(rig.submit(CKV_STORE, {1}, {1}, 1) == CKV_OK);
    CHECK(rig.finish(1).status == CKV_DONE);  // the lane is past its placement
    CpuSet lane = cpus_of(threads_named("ckv-lane").at(0));
    CHECK(lane.size() == all.size() - 1 && lane.count(pinned) == 0);
  }).join();
}

// The first task begins when all threads are there, and each of them takes one.
TEST(test_pages_are_touched_by_several_threads_that_stay_not_where_the_opener_is_pinned) {
  const CpuSet all = ckv::process_cpus();
  InstantDriver driver(100);
  FakeRoom room;
  room.before_look = [&](size_t num_before) {
    if (num_before != 2) {
      return;
    }
    auto deadline = std::chrono::steady_clock::now() + kPatience;
    std::vector<pid_t> threads;
    while ((threads = threads_named("ckv-pool")).size() < 3) {
      CHECK(std::chrono::steady_clock::now() < deadline);
      usleep(100);
    }
    for (pid_t tid : threads) {
      CHECK(cpus_of(tid) == all);  // the pool prefers no node
    }
  };
  std::thread([&] {
    prctl(PR_SET_NAME, "opener");
    ckv::run_on({*all.begin()});
    HostPool pool(driver, of_tasks(3, 3), room.intake);
    pool.grow();
    CHECK(room.num_looks >= 5 && state_of(pool).ready_bytes == 3 * kTask);
  }).join();
}

// Of the mapping that begins at `base`, in the kernel's two letters each.
std::string flags_of(const void *base) {
  char begin[32];
  std::snprintf(begin, sizeof begin, "%lx-", reinterpret_cast<unsigned long>(base));
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  while (std::getline(smaps, line) && line.rfind(begin, 0) != 0) {
  }
  while (std::getline(smaps, line)) {
    if (line.rfind("VmFlags:", 0) == 0) {
      return line + " ";
    }
  }
  return "";
}

TEST(test_a_pool_reserves_nothing_and_no_fork_inherits_it) {
  InstantDriver driver(100);
  HostPool pool(driver, staged(), machine);
  std::string flags = flags_of(pool.base());
  CHECK(has(flags, " dc "));
  std::string strict;  // 2: the kernel reserves for each mapping, whatever it asks for
  std::getline(std::ifstream("/proc/sys/vm/overcommit_memory"), strict);
  CHECK(has(flags, " nr ") || strict == "2");
}

TEST(test_huge_pages_are_asked_for_only_where_they_are_wanted) {
  if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) {
    std::printf("  (needs a kernel with huge pages)\n");
    return;
  }
  InstantDriver driver(100);
  for (int32_t huge : {0, 1}) {
    ckv_pool_config config = staged();
    config.huge = huge;
    HostPool pool(driver, config, machine);
    std::string flags = flags_of(pool.base());
    CHECK(has(flags, " hg ") == (huge == 1));
  }
}

// Of the mapping that begins at `base`; "" where the kernel does not say.
std::string policy_of(const void *base) {
  char begin[32];
  std::snprintf(begin, sizeof begin, "%lx ", reinterpret_cast<unsigned long>(base));
  std::ifstream maps("/proc/self/numa_maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.rfind(begin, 0) == 0) {
      return line.substr(std::strlen(begin));
    }
  }
  return "";
}

TEST(test_pages_of_the_pool_are_preferred_from_the_node) {
  InstantDriver driver(100);
  ckv_pool_config config = staged();
  HostPool anywhere(driver, config, machine);
  std::string without = policy_of(anywhere.base());
  config.numa_node = 0;
  HostPool pool(driver, config, machine);
  if (without.empty() || ckv::node_cpus(0).empty()) {
    std::printf("  (needs a kernel that tells of nodes)\n");
    return;
  }
  CHECK(has(without, "default") && has(policy_of(pool.base()), "prefer:0"));
}

TEST(test_a_node_that_is_not_there_is_no_error) {
  InstantDriver driver(100);
  ckv_pool_config config = staged();
  config.first_bytes = 0;
  for (int node : std::initializer_list<int>{CKV_NUMA_ANY, CKV_NUMA_DEVICE, 0, 1000, 1 << 30}) {
    config.numa_node = node;
    HostPool pool(driver, config, machine);
    pool.grow();
    CHECK(state_of(pool).ready_bytes == 10 * kMiB);
    CHECK(state_of(pool).numa_node == std::max(node, -1));
  }
}

}  // namespace
