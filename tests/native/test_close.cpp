// Closing after every driver call, a fault at every entry point, and no memory at every allocation.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "allocations.h"
#include "driver_sim.h"
#include "failure.h"
#include "host_pool.h"
#include "rig.h"

namespace {

ckv_config small_trunks() {
  ckv_config config = sim_config();
  config.trunk_bytes = 16 * kKiB;
  config.window_bytes[CKV_LOAD] = config.window_bytes[CKV_STORE] = 32 * kKiB;
  return config;
}

uintptr_t make_stream(ckv_engine *engine) {
  uintptr_t stream = 0;
  CHECK(ckv_sim_stream(engine, &stream) == CKV_OK);
  return stream;
}

// A store behind an event, a load, a store: tags 1 to 3. How many were accepted.
size_t submit_three(Rig &rig, uintptr_t stream) {
  size_t num_accepted = 0;
  num_accepted += rig.submit(CKV_STORE, range(0, 12), range(0, 12), 1, stream) == CKV_OK;
  num_accepted += rig.submit(CKV_LOAD, range(32, 44), range(32, 44), 2) == CKV_OK;
  num_accepted += rig.submit(CKV_STORE, range(0, 12), range(64, 76), 3) == CKV_OK;
  return num_accepted;
}

void check_three(Rig &rig, int expected_error) {
  for (uint64_t tag : {1, 2, 3}) {
    auto found = rig.seen.find(tag);
    if (found == rig.seen.end()) {
      continue;
    }
    const ckv_completion &completion = found->second;
    CHECK(completion.bytes <= 12 * 4096);
    if (completion.status != CKV_DONE) {
      CHECK(completion.status == CKV_FAILED && completion.error == expected_error);
      continue;
    }
    CHECK(completion.error == 0 && completion.bytes == 12 * 4096);
    int block = tag == 2 ? 32 : 0;
    int slot = tag == 3 ? 64 : block;
    CHECK(std::memcmp(rig.piece(0, block), rig.pool + slot * 4096, 12 * 4096) == 0);
  }
  // Reported means untouched from here on: under TSan a copy still running is a race.
  std::memset(rig.pool, 1, rig.slot_bytes * 96);
  rig.fill(2);
}

// Until a submit is refused. The empty transfers that are accepted meanwhile count as well.
size_t until_closing(Rig &rig) {
  size_t num_accepted = 0;
  while (rig.submit(CKV_STORE, {}, {}, 1000 + num_accepted) == CKV_OK) {
    ++num_accepted;
    usleep(20);
  }
  return num_accepted;
}

// Closes while the call after `after` others has not returned. False: there was no such call.
bool close_at(uint64_t after, int64_t drain_us) {
  Rig rig(Shape(), small_trunks());
  rig.fill(1);
  uintptr_t stream = make_stream(rig.engine);
  CHECK(ckv_sim_stop(rig.engine, after) == CKV_OK);
  size_t num_accepted = 0;
  std::atomic<bool> is_over{false};
  std::thread caller([&] {
    num_accepted = submit_three(rig, stream);
    for (uint64_t tag : {1, 2, 3}) {
      CHECK(ckv_wait(rig.engine, tag, kLong) == CKV_OK);
    }
    is_over = true;
  });
  while (rig.stats().num_stopped == 0 && !is_over) {
    usleep(20);
  }
  bool was_stopped = rig.stats().num_stopped == 1;
  std::thread closer([&] { CHECK(ckv_close(rig.engine, drain_us) == CKV_OK); });
  size_t num_empty = until_closing(rig);
  CHECK(ckv_sim_stop(rig.engine, UINT64_MAX) == CKV_OK);
  caller.join();
  closer.join();
  rig.poll();
  CHECK(rig.seen.size() == num_accepted + num_empty && *ckv_pending_word(rig.engine) == 0);
  CHECK(drain_us == 0 || (num_accepted == 0 || rig.seen.begin()->second.status == CKV_DONE));
  check_three(rig, CKV_CLOSED);
  CHECK(ckv_pool_unmap(rig.engine, rig.pool) == CKV_OK);
  return was_stopped;
}

TEST(test_close_at_every_driver_call_reports_all) {
  for (int64_t drain_us : {int64_t{0}, kLong}) {
    uint64_t num_points = 0;
    while (num_points < 60 && close_at(num_points, drain_us)) {
      ++num_points;
    }
    CHECK(num_points >= 20);  // ten trunks, each copied, recorded and asked for at least
  }
}

// Whether the fault showed: at the submit, in a transfer, or, of a query, in the engine.
bool has_fired(Rig &rig, int entry, int code, size_t num_accepted) {
  if (entry == CKV_SIM_EVENT_CREATE) {
    return num_accepted < 3;
  }
  if (entry == CKV_SIM_EVENT_QUERY || entry == CKV_SIM_STREAM_QUERY) {
    return rig.engine_stats().poison == code;
  }
  return num_accepted < 3 || std::any_of(
                                 rig.seen.begin(), rig.seen.end(),
                                 [code](const auto &entry) { return entry.second.error == code; });
}

// Which calls there are: one event is created, for the stream; nine trunks are copied and recorded
// (the load's three if the stream's event does not fire), behind the stream's record; queries go on
// for ever.
bool must_fire(int entry, uint64_t after, bool fires) {
  uint64_t num_trunks = fires ? 9 : 3;
  switch (entry) {
    case CKV_SIM_EVENT_CREATE:
      return after < 1;
    case CKV_SIM_EVENT_RECORD:
      return after < num_trunks + 1;
    case CKV_SIM_COPY:
      return after < num_trunks;
    default:
      return true;
  }
}

void fault_at(int entry, uint64_t after, int code, bool fires) {
  Rig rig(Shape(), small_trunks());
  rig.fill(1);
  uintptr_t stream = make_stream(rig.engine);
  if (!fires) {
    CHECK(ckv_sim_block(rig.engine, stream, 1) == CKV_OK);
    CHECK(ckv_sim_compute(rig.engine, stream, nullptr, 0, 0, 0) == CKV_OK);
  }
  CHECK(ckv_sim_fail_at(rig.engine, entry, after, 1, code) == CKV_OK);
  if (entry == CKV_SIM_STREAM_QUERY) {  // it is asked only where a record failed
    CHECK(ckv_sim_fail_at(rig.engine, CKV_SIM_EVENT_RECORD, 1, UINT64_MAX, 1) == CKV_OK);
    CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  }
  size_t num_accepted = submit_three(rig, stream);
  while (entry == CKV_SIM_STREAM_QUERY && rig.engine_stats().poison == 0) {
    usleep(20);  // it asks again and again
  }
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  CHECK(ckv_wait(rig.engine, 2, kLong) == CKV_OK);
  if (fires) {
    CHECK(ckv_wait(rig.engine, 1, kLong) == CKV_OK && ckv_wait(rig.engine, 3, kLong) == CKV_OK);
  } else {
    CHECK(ckv_close(rig.engine, 0) == CKV_OK);
  }
  rig.poll();
  CHECK(rig.seen.size() == num_accepted);
  CHECK(has_fired(rig, entry, code, num_accepted) == must_fire(entry, after, fires));
  for (auto &[tag, completion] : rig.seen) {
    bool is_ours = completion.error == code || completion.error == 1 ||
                   (!fires && completion.error == CKV_CLOSED);
    CHECK(completion.status == CKV_DONE || is_ours);
    completion.error = completion.status == CKV_DONE ? 0 : code;
  }
  check_three(rig, code);
}

TEST(test_a_fault_at_any_entry_point_fails_transfers_and_hangs_none) {
  for (int entry = CKV_SIM_EVENT_CREATE; entry <= CKV_SIM_COPY; ++entry) {
    for (int code : {1, 2, 700}) {
      for (uint64_t after = 0; after < 10; ++after) {
        fault_at(entry, after, code, true);
      }
      fault_at(entry, 1, code, false);
    }
  }
}

TEST(test_the_named_entry_point_fails_and_no_other) {
  Rig rig;
  CHECK(ckv_sim_fail_at(rig.engine, CKV_SIM_COPY, 1, 1, 2) == CKV_OK);
  for (uint64_t tag : {1, 2, 3}) {
    CHECK(rig.submit(CKV_STORE, {1}, {1}, tag) == CKV_OK);
    CHECK(rig.finish(tag).status == (tag == 2 ? CKV_FAILED : CKV_DONE));
  }
  CHECK(ckv_sim_fail_at(rig.engine, 7, 0, 1, 2) == CKV_EINVAL);
  CHECK(ckv_sim_fail_at(rig.engine, -1, 0, 1, 2) == CKV_EINVAL);
}

class LockingSim : public ckv::SimDriver {
 public:
  LockingSim() : SimDriver(0) { start(); }
  bool locks_pages() const override { return true; }
};

TEST(test_a_pool_whose_registration_fails_leaves_nothing) {
  for (int code : {1, 2, 700}) {
    for (uint64_t after = 0; after < 3; ++after) {
      LockingSim sim;
      ckv::Intake intake;
      sim.fail(CKV_SIM_HOST_REGISTER, after, 1, code);
      ckv_pool_config wanted = pool_config(3 * kMiB);
      wanted.chunk_bytes = kMiB;
      bool has_failed = false;
      try {
        ckv::HostPool(sim, wanted, intake).grow();
      } catch (const ckv::Failure &failure) {
        has_failed = failure.code() == CKV_EDRIVER;
      }
      CHECK(has_failed && sim.stats().num_driver_calls == after + 1);
    }
  }
}

TEST(test_open_without_memory_is_refused_and_leaves_nothing) {
  int64_t num_allocations = 0;
  for (int code = CKV_ENOMEM; code != CKV_OK; ++num_allocations) {
    ckv_config config = sim_config();
    ckv_engine *engine = nullptr;
    num_allocations_left = num_allocations;
    code = ckv_open(&config, &engine);
    num_allocations_left = -1;
    CHECK(code == CKV_OK ? engine != nullptr : code == CKV_ENOMEM && engine == nullptr);
    ckv_free(engine);
  }
  CHECK(num_allocations > 10);
}

TEST(test_submit_without_memory_is_refused_and_changes_nothing) {
  Rig rig;
  rig.fill(1);
  uintptr_t stream = make_stream(rig.engine);
  Ids ids = range(0, 4);
  int64_t num_allocations = 0;
  for (int code = CKV_ENOMEM; code != CKV_OK; ++num_allocations) {
    num_allocations_left = num_allocations;
    code = rig.submit(CKV_STORE, ids, ids, 1, stream);
    num_allocations_left = -1;
    CHECK(code == CKV_OK || code == CKV_ENOMEM);
  }
  CHECK(num_allocations > 3);
  CHECK(rig.finish(1).status == CKV_DONE && rig.seen.size() == 1);
  CHECK(rig.submit(CKV_LOAD, ids, ids, 2) == CKV_OK);  // the refused ones left no claim
  CHECK(rig.finish(2).status == CKV_DONE);
}

}  // namespace
