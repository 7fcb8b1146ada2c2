// What the lane does with what it is given, and the numbers it keeps of that.
#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "allocations.h"
#include "engine.h"
#include "lane.h"
#include "naps.h"
#include "rig.h"

namespace {

// An engine whose lane is the test itself, so that what is there at its first step is certain.
// Blocks and slots have 16 bytes and a trunk holds one of them; block b lies at 16 * (b + 1).
struct ManualRig {
  explicit ManualRig(std::unique_ptr<InstantDriver> owned = std::make_unique<InstantDriver>(0)) {
    ckv_config config = sim_config();
    config.max_transfers = 100;
    config.max_descriptors = 64;
    config.trunk_bytes = 16;
    config.window_bytes[CKV_LOAD] = config.window_bytes[CKV_STORE] = 1024;
    driver = owned.get();
    engine = std::make_unique<ckv::Engine>(config, std::move(owned));
    ckv_region region{16, 16, 1 << 20, 16, 16};
    engine->set_regions(&region, 1, 100, 100);
    driver->on_copy = [this](const ckv::Descriptor &d) {
      blocks.push_back(static_cast<int32_t>(std::min(d.dst, d.src) / 16 - 1));
      if (after_copy) {
        after_copy();
      }
    };
  }

  void submit(int direction, const Ids &ids, uint64_t tag, uint32_t flags = 0,
              uintptr_t after = 0) {
    engine->submit(direction, flags, ids.data(), ids.data(), ids.size(), after, tag);
    tags.push_back(tag);
  }

  // Until all is done. Closes after what is there now, for after_copy may submit until then.
  void run() {
    std::thread closer([this, first = tags] {
      for (uint64_t tag : first) {
        CHECK(engine->wait(tag, std::chrono::seconds(20)));
      }
      CHECK(engine->close(std::chrono::seconds(20)) == CKV_OK);
    });
    ckv::Lane(*engine).run();
    engine->lane_ended();
    closer.join();
  }

  InstantDriver *driver = nullptr;
  std::unique_ptr<ckv::Engine> engine;
  Ids blocks;  // of the trunks, in the order of issue
  std::vector<uint64_t> tags;
  std::function<void()> after_copy;
};

TEST(test_waited_for_loads_leave_first_then_speculative_ones_then_stores) {
  ManualRig rig;
  rig.submit(CKV_STORE, range(60, 70), 1);
  rig.submit(CKV_LOAD, range(20, 30), 2, CKV_SPECULATIVE);
  rig.submit(CKV_STORE, range(70, 80), 3);
  rig.submit(CKV_LOAD, range(30, 40), 4, CKV_SPECULATIVE);
  rig.submit(CKV_LOAD, range(0, 20), 5);
  rig.run();
  Ids expected = range(0, 40);
  Ids stored = range(60, 80);
  expected.insert(expected.end(), stored.begin(), stored.end());
  CHECK(rig.blocks == expected);
}

TEST(test_a_load_passes_a_speculative_one_that_has_begun_at_its_next_trunk) {
  ManualRig rig;
  rig.submit(CKV_LOAD, range(20, 60), 1, CKV_SPECULATIVE);
  rig.after_copy = [&] {
    if (rig.blocks.size() == 3) {
      rig.submit(CKV_LOAD, range(0, 4), 2);
    }
  };
  rig.run();
  CHECK(rig.blocks.size() == 44);
  rig.blocks.resize(8);
  CHECK(rig.blocks == Ids({20, 21, 22, 0, 1, 2, 3, 23}));
}

TEST(test_a_cancel_takes_effect_at_the_next_trunk_of_any_rank) {
  for (int rank = 0; rank < 3; ++rank) {
    ManualRig rig;
    rig.submit(rank == 2 ? CKV_STORE : CKV_LOAD, range(0, 20), 1, rank == 1 ? CKV_SPECULATIVE : 0);
    rig.after_copy = [&] {
      if (rig.blocks.size() == 3) {
        rig.engine->cancel(1);
      }
    };
    rig.run();
    CHECK(rig.blocks == range(0, 3));
    auto report = rig.engine->reports().pop();
    CHECK(report->completion.status == CKV_CANCELLED && report->completion.bytes == 48);
  }
}

TEST(test_an_exception_on_the_lane_poisons_the_engine_and_ends_no_process) {
  ManualRig rig;
  rig.submit(CKV_STORE, range(0, 20), 1);
  rig.submit(CKV_LOAD, range(20, 40), 2);
  rig.after_copy = [&] {
    if (rig.blocks.size() == 3) {
      throw std::runtime_error("of a driver");
    }
  };
  rig.run();
  CHECK(rig.engine->poison_code() == CKV_EINTERNAL && rig.blocks.size() == 3);
  for (int i = 0; i < 2; ++i) {
    ckv_completion done = rig.engine->reports().pop()->completion;
    CHECK(done.status == CKV_FAILED && done.error == CKV_EINTERNAL);
  }
}

// No copy ends before the event that a caller recorded was asked for.
class FullDriver : public InstantDriver {
 public:
  FullDriver() : InstantDriver(0) {}
  int event_create(ckv::Event *out) override {
    *out = &events_[num_events_++];
    return 0;
  }
  int event_query(ckv::Event event) override {
    was_asked_ |= event == &events_[0];  // the caller's: it is there before the lane's
    return was_asked_ ? 0 : ckv::kNotReady;
  }

 private:
  std::array<char, 2 * ckv::kMaxTrunks + 1> events_{};
  size_t num_events_ = 0;
  bool was_asked_ = false;
};

// So that the time it waits for room counts as the lane's, not as the caller's.
TEST(test_an_event_is_asked_though_the_window_is_full) {
  ManualRig rig(std::make_unique<FullDriver>());
  rig.submit(CKV_STORE, range(0, 64), 1);  // the window
  rig.submit(CKV_STORE, {99}, 2, 0, 1);
  rig.run();
}

// Whose events are something, so that they are kept or, without memory for that, destroyed.
class EventDriver : public InstantDriver {
 public:
  EventDriver() : InstantDriver(0) {}
  int event_create(ckv::Event *out) override { return *out = this, 0; }
  void event_destroy(ckv::Event) override { ++num_destroyed; }
  int num_destroyed = 0;
};

TEST(test_the_lane_needs_no_memory_after_it_started) {
  ckv_config config = sim_config();
  config.max_transfers = 10;
  config.max_descriptors = 64;
  config.trunk_bytes = 64;
  config.window_bytes[CKV_LOAD] = config.window_bytes[CKV_STORE] = 1024;
  auto owned = std::make_unique<EventDriver>();
  EventDriver &driver = *owned;
  ckv::Engine engine(config, std::move(owned));
  ckv_region regions[] = {{16, 16, 1 << 20, 16, 16}, {4096, 16, 1 << 21, 16, 8}};
  engine.set_regions(regions, 2, 100, 100);
  Ids ids = range(0, 60);
  engine.submit(CKV_STORE, 0, ids.data(), ids.data(), 20, 1, 1);  // behind an event
  engine.submit(CKV_LOAD, 0, ids.data() + 20, ids.data() + 20, 20, 0, 2);
  engine.submit(CKV_LOAD, CKV_SPECULATIVE, ids.data() + 40, ids.data() + 40, 20, 0, 3);
  engine.submit(CKV_STORE, 0, ids.data(), ids.data(), 0, 0, 4);
  engine.cancel(3);
  std::thread closer([&engine] { CHECK(engine.close(std::chrono::seconds(20)) == CKV_OK); });
  int num_copies = 0;
  int num_allocations = 0;
  auto count = [&] { num_allocations += num_copies > 0 && num_allocations_left < 0; };
  driver.on_copy = [&](const ckv::Descriptor &) {
    count();
    ++num_copies;
    num_allocations_left = 0;  // from the first copy on
  };
  ckv::Lane(engine).run();
  count();
  num_allocations_left = -1;
  engine.lane_ended();
  closer.join();
  CHECK(engine.poison_code() == 0);
  CHECK(num_copies > 4 && driver.num_destroyed >= 1);
  CHECK(num_allocations == 1);  // to keep the event: the one place that may, and need not
  for (int i = 0; i < 4; ++i) {
    ckv_completion done = engine.reports().pop()->completion;
    CHECK(done.status == (done.tag == 3 ? CKV_CANCELLED : CKV_DONE));
  }
}

// The window holds two trunks of the direction.
ckv_config two_trunks(int direction, uint64_t trunk_bytes) {
  ckv_config config = sim_config();
  config.trunk_bytes = trunk_bytes;
  config.window_bytes[direction] = 2 * trunk_bytes;
  return config;
}

TEST(test_a_load_waits_for_no_more_of_a_speculative_one_than_is_in_flight) {
  Rig rig(Shape(), two_trunks(CKV_LOAD, 4096));
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_LOAD, range(0, 60), range(0, 60), 1, 0, CKV_SPECULATIVE) == CKV_OK);
  rig.until_issued(CKV_LOAD, 2);  // its window is full
  CHECK(rig.submit(CKV_LOAD, {63}, {63}, 2) == CKV_OK);
  CHECK(rig.submit(CKV_LOAD, {62}, {62}, 3, 0, CKV_SPECULATIVE) == CKV_OK);
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE && rig.finish(2).status == CKV_DONE);
  CHECK(rig.finish(3).status == CKV_DONE);
  CHECK(rig.seen.at(2).done_ns < rig.seen.at(1).done_ns);
  CHECK(rig.seen.at(3).start_ns > rig.seen.at(2).start_ns);  // not waited for: its turn is last
}

TEST(test_a_speculative_load_is_cancelled_like_any_other) {
  Rig rig(Shape(), two_trunks(CKV_LOAD, 4096));
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_LOAD, range(0, 20), range(0, 20), 1, 0, CKV_SPECULATIVE) == CKV_OK);
  CHECK(rig.submit(CKV_LOAD, range(20, 40), range(20, 40), 2, 0, CKV_SPECULATIVE) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {63}, {63}, 3, 0, CKV_SPECULATIVE) == CKV_EINVAL);
  rig.until_issued(CKV_LOAD, 2);
  CHECK(ckv_cancel(rig.engine, 2) == CKV_OK);
  CHECK(rig.finish(2).status == CKV_CANCELLED && rig.seen.at(2).bytes == 0);  // at once
  CHECK(ckv_cancel(rig.engine, 1) == CKV_OK);
  CHECK(ckv_wait(rig.engine, 1, 20000) == CKV_TIMEOUT);  // two trunks are still in flight
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_CANCELLED && rig.seen.at(1).bytes == 8192);
  CHECK(rig.stats().num_copy_calls[CKV_LOAD] == 2);
}

// A wake-up that is lost leaves a transfer unfinished; which side is faster changes by the round.
void wake_by_every_order(std::chrono::microseconds patience) {
  ManualRig rig;
  std::atomic<bool> has_begun{false};
  std::thread lane([&] {
    ckv::Queues queues;
    ckv::Phase phase = ckv::Phase::OPEN;
    CHECK(!rig.engine->take_orders(std::chrono::microseconds(0), &queues, &phase));
    has_begun = true;
    while (phase == ckv::Phase::OPEN) {
      CHECK(rig.engine->take_orders(patience, &queues, &phase));
      while (ckv::Transfer *transfer = queues[ckv::Rank::STORE].front()) {
        queues[ckv::Rank::STORE].remove(transfer);
        rig.engine->settle(transfer, CKV_CANCELLED, 0);
      }
    }
    rig.engine->lane_ended();
  });
  while (!has_begun) {
    usleep(20);
  }
  for (uint64_t tag = 1; tag <= 3000; ++tag) {
    rig.submit(CKV_STORE, {1}, tag);
    CHECK(rig.engine->wait(tag, std::chrono::seconds(20)));
    CHECK(rig.engine->reports().pop() != nullptr);
  }
  CHECK(rig.engine->close(std::chrono::seconds(20)) == CKV_OK);
  lane.join();
}

TEST(test_a_lane_that_sleeps_or_takes_a_long_nap_is_woken_by_every_order) {
  wake_by_every_order(ckv::kForEver);
  wake_by_every_order(std::chrono::hours(1));
}

TEST(test_a_lane_that_sleeps_or_takes_a_long_nap_is_woken_by_a_cancel) {
  for (std::chrono::microseconds patience :
       {ckv::kForEver, std::chrono::microseconds(std::chrono::hours(1))}) {
    ManualRig rig;
    rig.submit(CKV_STORE, {1}, 1);
    ckv::Queues queues;
    ckv::Phase phase = ckv::Phase::OPEN;
    CHECK(rig.engine->take_orders(std::chrono::microseconds(0), &queues, &phase));
    std::thread lane([&] {
      CHECK(rig.engine->take_orders(patience, &queues, &phase));
      ckv::Transfer *transfer = queues[ckv::Rank::STORE].front();
      CHECK(transfer->is_stopping);
      queues[ckv::Rank::STORE].remove(transfer);
      rig.engine->settle(transfer, CKV_CANCELLED, 0);
      rig.engine->lane_ended();
    });
    while (!rig.engine->is_lane_asleep()) {
      usleep(20);
    }
    rig.engine->cancel(1);
    CHECK(rig.engine->wait(1, std::chrono::seconds(20)));
    CHECK(rig.engine->close(std::chrono::seconds(20)) == CKV_OK);
    lane.join();
  }
}

// ---- How long it naps, on a clock of the test's.

using ckv::Naps;
using std::chrono::microseconds;

struct Clock {
  // The nap after something has moved, then those after it while nothing does.
  microseconds first(Naps::Work work) { return naps.next(now_ns, true, work); }
  microseconds then(Naps::Work work) {
    microseconds nap = naps.next(now_ns, false, work);
    sleep(nap == ckv::kForEver ? microseconds::zero() : nap);
    ++num_naps;
    return nap;
  }
  void sleep(microseconds time) { now_ns += static_cast<uint64_t>(time.count()) * 1000; }
  Naps naps;
  uint64_t now_ns = 1000000000;
  int num_naps = 0;
};

TEST(test_naps_are_short_after_each_move_and_grow_to_their_bound) {
  for (auto [work, bound] : {std::pair{Naps::Work::NONE, 500}, std::pair{Naps::Work::EVENTS, 200},
                             std::pair{Naps::Work::COPIES, 50}}) {
    Clock clock;
    for (int round = 0; round < 2; ++round) {
      CHECK(clock.first(work) == microseconds(work == Naps::Work::NONE ? 10 : 0));
      int64_t expected = work == Naps::Work::NONE ? 20 : 10;
      for (int i = 0; i < 20; ++i) {
        CHECK(clock.then(work) == microseconds(std::min<int64_t>(expected, bound)));
        expected *= 2;
      }
    }
  }
}

TEST(test_a_first_order_after_a_rest_is_followed_by_short_naps) {
  Clock clock;
  clock.first(Naps::Work::NONE);
  for (int i = 0; i < 20; ++i) {
    clock.then(Naps::Work::NONE);
  }
  CHECK(clock.first(Naps::Work::EVENTS) == microseconds(0));  // the order is what moved
  CHECK(clock.then(Naps::Work::EVENTS) == microseconds(10));
}

TEST(test_naps_grow_long_where_nothing_moves_for_long) {
  for (Naps::Work work : {Naps::Work::EVENTS, Naps::Work::COPIES}) {
    Clock clock;
    clock.first(work);
    uint64_t began_ns = clock.now_ns;
    while (clock.then(work) <= ckv::kDeafNap) {
    }
    CHECK(clock.now_ns - began_ns >= 100000000 && clock.now_ns - began_ns < 110000000);
    clock.num_naps = 0;
    for (uint64_t until = clock.now_ns + 1000000000; clock.now_ns < until;) {
      CHECK(clock.then(work) <= microseconds(5000));
    }
    CHECK(clock.num_naps < 210);  // of a second
    clock.first(work);
    CHECK(clock.then(work) == microseconds(10));
  }
}

TEST(test_a_lane_without_work_sleeps_after_its_linger_and_at_first) {
  Clock clock;
  CHECK(clock.then(Naps::Work::NONE) == ckv::kForEver);
  clock.first(Naps::Work::NONE);
  uint64_t began_ns = clock.now_ns;
  while (clock.then(Naps::Work::NONE) != ckv::kForEver) {
  }
  CHECK(clock.now_ns - began_ns >= 50000000 && clock.now_ns - began_ns < 51000000);
  CHECK(clock.first(Naps::Work::NONE) == microseconds(10));
}

// Of the process' only lane, that the test's thread is not.
uint64_t num_sleeps_of_lane() {
  for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string line;
    std::getline(std::ifstream(task.path() / "comm"), line);
    if (line != "ckv-lane" || std::stoi(task.path().filename()) == getpid()) {
      continue;
    }
    for (std::ifstream status(task.path() / "status"); std::getline(status, line);) {
      if (line.rfind("voluntary_ctxt_switches:", 0) == 0) {
        return std::stoull(line.substr(line.find(':') + 1));
      }
    }
  }
  CHECK(false);
  return 0;
}

TEST(test_a_lane_goes_to_sleep_stays_asleep_and_is_woken_by_the_next_order) {
  ckv_config config = sim_config();
  config.max_transfers = 10;
  config.max_descriptors = 4;
  config.trunk_bytes = config.window_bytes[CKV_LOAD] = config.window_bytes[CKV_STORE] = 16;
  auto engine = std::make_shared<ckv::Engine>(config, std::make_unique<InstantDriver>(0));
  ckv::Engine::start(engine);
  ckv_region region{16, 16, 1 << 20, 16, 16};
  engine->set_regions(&region, 1, 1, 1);
  for (uint64_t tag = 1; tag <= 3; ++tag) {
    for (int i = 0; !engine->is_lane_asleep(); ++i) {
      CHECK(i < 200000);
      usleep(100);
    }
    // On a busy machine it may say so well before it lies down.
    for (uint64_t before = 0, after = 1, i = 0; before != after; ++i) {
      CHECK(i < 100);
      before = num_sleeps_of_lane();
      usleep(20000);  // forty naps
      after = num_sleeps_of_lane();
    }
    int32_t id = 0;
    engine->submit(CKV_STORE, 0, &id, &id, 1, 0, tag);
    CHECK(engine->wait(tag, std::chrono::seconds(20)));
  }
  CHECK(engine->close(std::chrono::seconds(20)) == CKV_OK);
}

uint64_t num_trunks(const ckv_stats &stats, int direction) {
  uint64_t sum = 0;
  for (uint64_t n : stats.num_trunks[direction]) {
    sum += n;
  }
  return sum;
}

TEST(test_stats_add_up_for_known_transfers) {
  Shape shape;
  shape.pieces = {4096, 1024};
  ckv_config config = sim_config();
  config.trunk_bytes = 20 * kKiB;  // 4 blocks of 5 KiB
  Rig rig(shape, config);
  CHECK(rig.submit(CKV_STORE, range(0, 8), range(0, 8), 1) == CKV_OK);
  CHECK(rig.submit(CKV_LOAD, {8, 20, 40}, {10, 12, 14}, 2) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {}, {}, 3) == CKV_OK);  // issues nothing
  rig.finish(1);
  rig.finish(2);
  rig.finish(3);
  CHECK(ckv_close(rig.engine, kLong) == CKV_OK);
  ckv_stats stats = rig.engine_stats();
  CHECK(stats.num_bytes[CKV_STORE] == 8 * 5 * kKiB && stats.num_bytes[CKV_LOAD] == 3 * 5 * kKiB);
  CHECK(stats.num_pieces[CKV_STORE] == 16 && stats.num_pieces[CKV_LOAD] == 6);
  // Regions lie apart in VRAM, so no two pieces are neighbours on both sides.
  CHECK(stats.num_descriptors[CKV_STORE] == 16 && stats.num_descriptors[CKV_LOAD] == 6);
  CHECK(num_trunks(stats, CKV_STORE) == 2 && num_trunks(stats, CKV_LOAD) == 1);
  CHECK(stats.num_issued[CKV_STORE] == 1 && stats.num_issued[CKV_LOAD] == 1);
  for (int direction : {CKV_LOAD, CKV_STORE}) {
    const ckv_completion &done = rig.seen.at(direction == CKV_LOAD ? 2 : 1);
    CHECK(stats.issue_ns[direction] == done.start_ns - done.submit_ns);
    CHECK(stats.max_issue_ns[direction] == stats.issue_ns[direction]);
    CHECK(stats.bytes_in_flight[direction] == 0);
    CHECK(stats.num_descriptors[direction] == rig.stats().num_descriptors[direction]);
  }
  CHECK(stats.poison == 0 && stats.num_given_up == 0);
}

TEST(test_stats_count_a_piece_once_however_it_is_cut_and_merged) {
  Shape shape;
  shape.pieces = {10000};
  ckv_config config = sim_config();
  config.trunk_bytes = 4096;  // each piece: 4096, 4096, 1808
  Rig rig(shape, config);
  CHECK(rig.submit(CKV_STORE, {1, 2}, {1, 2}, 1) == CKV_OK);
  rig.finish(1);
  ckv_stats stats = rig.engine_stats();
  CHECK(stats.num_pieces[CKV_STORE] == 2 && stats.num_trunks[CKV_STORE][0] == 0);
  CHECK(num_trunks(stats, CKV_STORE) == 6);
  CHECK(stats.num_bytes[CKV_STORE] == 20000);
  Rig merged;
  CHECK(merged.submit(CKV_STORE, range(0, 64), range(0, 64), 1) == CKV_OK);
  merged.finish(1);
  stats = merged.engine_stats();
  CHECK(stats.num_pieces[CKV_STORE] == 64 && stats.num_descriptors[CKV_STORE] == 1);
}

TEST(test_stats_show_bytes_in_flight_and_leave_out_what_was_not_copied) {
  Rig rig(Shape(), two_trunks(CKV_STORE, 8192));
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, range(0, 64), range(0, 64), 1) == CKV_OK);
  rig.until_issued(CKV_STORE, 2);
  while (rig.engine_stats().bytes_in_flight[CKV_STORE] < 16384) {
  }
  CHECK(rig.engine_stats().num_bytes[CKV_STORE] == 0);
  CHECK(ckv_cancel(rig.engine, 1) == CKV_OK);
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_CANCELLED);
  ckv_stats stats = rig.engine_stats();
  CHECK(stats.num_bytes[CKV_STORE] == rig.seen.at(1).bytes);
  CHECK(stats.bytes_in_flight[CKV_STORE] == 0);
  ckv_stats other{};
  CHECK(ckv_get_stats(rig.engine, &other) == CKV_EINVAL);  // size is not set
}

TEST(test_time_spent_waiting_for_compute_is_not_counted_as_delay_of_issue) {
  Rig rig;
  uintptr_t stream = rig.blocked_stream();
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 1, stream) == CKV_OK);
  CHECK(ckv_wait(rig.engine, 1, 20000) == CKV_TIMEOUT);
  CHECK(ckv_sim_block(rig.engine, stream, 0) == CKV_OK);
  const ckv_completion &done = rig.finish(1);
  CHECK(rig.engine_stats().issue_ns[CKV_STORE] + 20000000 <= done.start_ns - done.submit_ns);
}

}  // namespace
