// What goes wrong: driver faults, closing in the middle, bad arguments, pools that cannot be had.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "rig.h"

namespace {

// One fault at the n-th driver call of a load and two stores, one of them behind an event.
void fault(uint64_t n, uint64_t count, int code) {
  ckv_config config = sim_config();
  config.trunk_bytes = 16 * kKiB;
  config.window_bytes[CKV_LOAD] = config.window_bytes[CKV_STORE] = 32 * kKiB;
  config.checksum_every = n % 2;  // the checker reads slots, too
  Rig rig(Shape(), config);
  rig.fill(1);
  uintptr_t stream = 0;
  CHECK(ckv_sim_stream(rig.engine, &stream) == CKV_OK);
  CHECK(ckv_sim_fail(rig.engine, n, count, code) == CKV_OK);
  size_t num_accepted = 0;
  num_accepted += rig.submit(CKV_STORE, range(0, 32), range(0, 32), 1, stream) == CKV_OK;
  num_accepted += rig.submit(CKV_LOAD, range(32, 64), range(32, 64), 2) == CKV_OK;
  num_accepted += rig.submit(CKV_STORE, range(0, 32), range(64, 96), 3) == CKV_OK;
  for (uint64_t tag : {1, 2, 3}) {
    CHECK(ckv_wait(rig.engine, tag, kLong) == CKV_OK);
  }
  rig.poll();
  CHECK(rig.seen.size() == num_accepted);
  for (const auto &[tag, completion] : rig.seen) {
    bool is_done = completion.status == CKV_DONE;
    CHECK(is_done ? completion.error == 0
                  : completion.status == CKV_FAILED && completion.error == code);
    CHECK(!is_done || completion.bytes == 32 * 4096);
    if (is_done && tag != 2) {
      const uint8_t *slot = rig.pool + (tag == 1 ? 0 : 64 * 4096);
      CHECK(std::memcmp(slot, rig.vram[0].data(), 32 * 4096) == 0);
    }
  }
  // Reported means untouched from here on: under TSan a copy still running is a race.
  std::memset(rig.pool, 1, rig.slot_bytes * 96);
  rig.fill(2);
}

TEST(test_any_driver_call_may_fail_and_each_transfer_is_still_reported_once) {
  for (uint64_t n = 0; n < 40; ++n) {
    fault(n, 1, 1);
    fault(n, 3, 2);
    fault(n, 1, 700);
  }
}

TEST(test_a_failed_transfer_is_reported_only_after_its_copies_under_way) {
  for (uint64_t at : {0, 1}) {  // the copy call, of which half is queued; the record after it
    Rig rig;
    CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
    CHECK(ckv_sim_fail(rig.engine, at, 1, 2) == CKV_OK);
    CHECK(rig.submit(CKV_STORE, {1, 3, 5, 7}, {1, 2, 3, 4}, 1) == CKV_OK);
    CHECK(ckv_wait(rig.engine, 1, 30000) == CKV_TIMEOUT);
    CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
    CHECK(rig.finish(1).status == CKV_FAILED && rig.seen.at(1).error == 2);
    CHECK(rig.submit(CKV_STORE, {1}, {1}, 2) == CKV_OK);
    CHECK(rig.finish(2).status == CKV_DONE);
  }
}

TEST(test_a_sticky_error_at_submit_poisons) {
  Rig rig;
  uintptr_t stream = 0;
  CHECK(ckv_sim_stream(rig.engine, &stream) == CKV_OK);
  CHECK(ckv_sim_fail(rig.engine, 0, 1, 700) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 1, stream) == CKV_EDRIVER);
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 2) == CKV_EPOISONED);
  CHECK(*ckv_pending_word(rig.engine) == 0);
}

TEST(test_a_sticky_error_poisons_and_a_plain_one_does_not) {
  Rig rig;
  CHECK(ckv_sim_fail(rig.engine, 0, 1, 2) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 1) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_FAILED && rig.seen.at(1).error == 2);
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 2) == CKV_OK);
  CHECK(rig.finish(2).status == CKV_DONE);
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 3) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {2}, {2}, 4) == CKV_OK);
  CHECK(ckv_sim_fail(rig.engine, 0, 1, 700) == CKV_OK);
  CHECK(rig.finish(3).error == 700 && rig.finish(4).error == 700);
  CHECK(rig.submit(CKV_STORE, {3}, {3}, 5) == CKV_EPOISONED);
  CHECK(std::string(ckv_last_error()).find("700") != std::string::npos);
}

// What the documentation says of 900 to 908: an operation or a capture is refused. Of those that
// end the context it says that too.
TEST(test_capture_errors_end_no_context) {
  for (int code = 900; code <= 908; ++code) {
    CHECK(!ckv::is_sticky(code));
  }
  for (int code : {4, 214, 700, 702, 709, 710, 714, 718, 719, 999}) {
    CHECK(ckv::is_sticky(code));
  }
  Rig rig;
  uintptr_t stream = 0;
  CHECK(ckv_sim_stream(rig.engine, &stream) == CKV_OK);
  // The caller's stream has a capture under way that went wrong.
  CHECK(ckv_sim_fail_at(rig.engine, CKV_SIM_EVENT_RECORD, 0, 1, 901) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 1, stream) == CKV_EDRIVER);
  CHECK(std::string(ckv_last_error()).find("901") != std::string::npos);
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 1, stream) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE && rig.engine_stats().poison == 0);
}

// Set while it lives.
struct Variable {
  Variable(const char *name, const char *value) : name(name) { setenv(name, value, 1); }
  Variable(const Variable &) = delete;
  Variable &operator=(const Variable &) = delete;
  ~Variable() { unsetenv(name); }
  const char *name;
};

TEST(test_a_variable_sets_the_speed_and_0_leaves_it) {
  for (uint64_t mbps : {0, 20}) {
    Variable speed("CKV_SIM_MBPS", std::to_string(mbps).c_str());
    ckv_config config = sim_config();
    config.sim_mbps = 40;
    Rig rig(Shape(), config);
    CHECK(rig.submit(CKV_STORE, range(0, 32), range(0, 32), 1) == CKV_OK);
    const ckv_completion &done = rig.finish(1);
    uint64_t least_us = done.bytes / (mbps == 0 ? 40 : mbps);
    CHECK(done.bytes == 32 * 4096 && done.done_ns - done.start_ns >= least_us * 1000);
  }
}

TEST(test_a_variable_that_is_no_number_is_refused) {
  for (const char *value : {"", "-1", "+2", " 2", "2x", "0x10", "1.5", "4294967296"}) {
    Variable wrong("CKV_SIM_MBPS", value);
    ckv_config config = sim_config();
    ckv_engine *engine = nullptr;
    CHECK(ckv_open(&config, &engine) == CKV_EINVAL && engine == nullptr);
    std::string said = ckv_last_error();
    CHECK(said.find(std::string("CKV_SIM_MBPS = '") + value + "' is no whole number") == 0);
    CHECK(said.find("unset it") != std::string::npos);
  }
}

// Until the lane has asked the driver so many times more; nothing is reported meanwhile.
void until_asked(Rig &rig, uint64_t num_times) {
  uint64_t num_asked = rig.stats().num_driver_calls;
  while (rig.stats().num_driver_calls < num_asked + num_times) {
    CHECK(*ckv_pending_word(rig.engine) == 0);
    usleep(100);
  }
}

// An event that fails once may do so for ever. The stream knows when the copies are over.
TEST(test_where_an_event_cannot_be_asked_the_stream_says_when_its_copy_is_over) {
  ckv_config config = sim_config();
  config.trunk_bytes = 4 * kKiB;
  Rig rig(Shape(), config);
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, range(0, 4), range(0, 4), 1) == CKV_OK);
  CHECK(rig.submit(CKV_LOAD, range(4, 8), range(4, 8), 2) == CKV_OK);
  until_asked(rig, 100);  // all trunks are in flight
  CHECK(rig.engine_stats().poison == 0);
  CHECK(ckv_sim_fail_at(rig.engine, CKV_SIM_EVENT_QUERY, 0, UINT64_MAX, 201) == CKV_OK);
  until_asked(rig, 300);  // held copies are not over, whatever the events say
  CHECK(rig.engine_stats().poison == 201);
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  for (uint64_t tag : {1, 2}) {
    CHECK(rig.finish(tag).status == CKV_FAILED && rig.seen.at(tag).error == 201);
  }
  CHECK(rig.engine_stats().bytes_in_flight[CKV_STORE] == 0);
  CHECK(ckv_close(rig.engine, 0) == CKV_OK);
}

// How often a query failed says nothing about the copy: only the deadline of a close ends the wait.
TEST(test_a_query_that_keeps_failing_is_no_proof_that_its_copy_is_over) {
  Rig rig;
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(ckv_sim_fail_at(rig.engine, CKV_SIM_EVENT_QUERY, 0, UINT64_MAX, 1) == CKV_OK);
  CHECK(ckv_sim_fail_at(rig.engine, CKV_SIM_STREAM_QUERY, 0, UINT64_MAX, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 1) == CKV_OK);
  until_asked(rig, 300);
  CHECK(rig.submit(CKV_STORE, {2}, {2}, 2) == CKV_EPOISONED);
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  rig.until_copied(CKV_STORE, 1);
  CHECK(*ckv_pending_word(rig.engine) == 0);
  CHECK(ckv_sim_set_grace(rig.engine, 0) == CKV_OK);
  CHECK(ckv_close(rig.engine, 0) == CKV_TIMEOUT);
  rig.poll();
  CHECK(rig.seen.at(1).status == CKV_FAILED && rig.seen.at(1).error == CKV_CLOSED);
  CHECK(ckv_sim_fail_at(rig.engine, CKV_SIM_STREAM_QUERY, 0, 0, 0) == CKV_OK);  // the lane ends
}

TEST(test_close_with_copies_in_flight_reports_all) {
  for (int i = 0; i < 20; ++i) {
    ckv_config config = sim_config();
    config.trunk_bytes = 8 * kKiB;
    config.sim_mbps = 50;
    Rig rig(Shape(), config);
    CHECK(rig.submit(CKV_STORE, range(0, 32), range(0, 32), 1) == CKV_OK);
    CHECK(rig.submit(CKV_LOAD, range(32, 64), range(32, 64), 2) == CKV_OK);
    usleep(static_cast<useconds_t>(i * 100));
    CHECK(ckv_close(rig.engine, i % 2 * kLong) == CKV_OK);
    CHECK(ckv_close(rig.engine, 0) == CKV_OK);
    CHECK(rig.submit(CKV_STORE, {1}, {1}, 3) == CKV_CLOSED);
    rig.poll();
    CHECK(rig.seen.size() == 2);
    for (const auto &[tag, completion] : rig.seen) {
      bool is_done = completion.status == CKV_DONE;
      CHECK(is_done || completion.error == CKV_CLOSED);
      CHECK(is_done || i % 2 == 0);
    }
    CHECK(ckv_pool_unmap(rig.engine, rig.pool) == CKV_OK);
  }
}

TEST(test_close_does_not_wait_for_a_compute_event_that_never_fires) {
  Rig rig;
  uintptr_t stream = rig.blocked_stream();
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 1, stream) == CKV_OK);
  CHECK(rig.submit(CKV_LOAD, {2}, {2}, 2, stream) == CKV_OK);
  CHECK(ckv_close(rig.engine, 20000) == CKV_OK);  // nothing was issued: nothing is left behind
  rig.poll();
  CHECK(rig.seen.at(1).error == CKV_CLOSED && rig.seen.at(2).error == CKV_CLOSED);
  CHECK(rig.seen.at(1).bytes == 0 && rig.seen.at(1).start_ns == 0);
}

// Of ours, by their names: TSan starts a thread of its own, with the process' first one.
size_t num_threads() {
  size_t count = 0;
  for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    count += name.rfind("ckv-", 0) == 0;
  }
  return count;
}

TEST(test_close_leaves_behind_copies_the_driver_does_not_return) {
  static uint8_t vram[8192];  // outlives the copies that are left behind
  const size_t num_before = num_threads();
  {
    ckv_config config = sim_config();
    ckv_engine *engine = nullptr;
    void *pool = nullptr;
    CHECK(ckv_open(&config, &engine) == CKV_OK);
    ckv_pool_config wanted = pool_config(8192);
    CHECK(ckv_pool_map(engine, &wanted, &pool) == CKV_OK);
    ckv_region region{reinterpret_cast<uint64_t>(vram), 4096, reinterpret_cast<uint64_t>(pool),
                      4096, 4096};
    CHECK(ckv_set_regions(engine, &region, 1, 2, 2) == CKV_OK);
    CHECK(ckv_sim_hold(engine, 1) == CKV_OK);
    int32_t ids[] = {0, 1};
    CHECK(ckv_submit(engine, CKV_STORE, 0, ids, ids, 2, 0, 9) == CKV_OK);
    CHECK(ckv_close(engine, 10000) == CKV_TIMEOUT);
    CHECK(ckv_close(engine, 10000) == CKV_TIMEOUT);
    CHECK(ckv_pool_unmap(engine, pool) == CKV_AGAIN);
    CHECK(ckv_wait(engine, 9, 0) == CKV_OK);
    ckv_completion completion[2];
    CHECK(ckv_poll(engine, completion, 2) == 1);
    CHECK(completion[0].status == CKV_FAILED && completion[0].error == CKV_CLOSED);
    CHECK(ckv_sim_hold(engine, 0) == CKV_OK);  // the lane ends and takes all with it
    CHECK(ckv_poll(engine, completion, 2) == 0);
    ckv_free(engine);
  }
  while (num_threads() > num_before) {  // the lane is on its own: there is nothing to wait on
    usleep(1000);
  }
}

TEST(test_bad_arguments_are_refused_and_touch_nothing) {
  Rig rig;
  CHECK(rig.submit(CKV_STORE, {64}, {0}, 1) == CKV_EINVAL);
  CHECK(std::string(ckv_last_error()) == "block 64 is not in 0..63");
  CHECK(rig.submit(CKV_STORE, {-1}, {0}, 1) == CKV_EINVAL);
  CHECK(rig.submit(CKV_STORE, {0, 1}, {0, 96}, 1) == CKV_EINVAL);
  CHECK(rig.submit(CKV_LOAD, {0}, {INT32_MIN}, 1) == CKV_EINVAL);
  CHECK(rig.submit(7, {0}, {0}, 1) == CKV_EINVAL);
  CHECK(rig.submit(CKV_STORE, {0}, {0}, 1, 0x1234) == CKV_EDRIVER);  // no such stream
  CHECK(ckv_submit(rig.engine, CKV_STORE, 0, nullptr, nullptr, 1, 0, 1) == CKV_EINVAL);
  CHECK(ckv_submit(nullptr, CKV_STORE, 0, nullptr, nullptr, 0, 0, 1) == CKV_EINVAL);
  CHECK(rig.submit(CKV_STORE, Ids(97), Ids(97), 1) == CKV_EINVAL);
  CHECK(std::string(ckv_last_error()) ==
        "a transfer of 97 pairs would write a slot twice: there are 96");
  CHECK(ckv_sim_stream(rig.engine, nullptr) == CKV_EINVAL);
  CHECK(std::string(ckv_last_error()) == "there is no place for the stream");
  CHECK(ckv_sim_get_stats(rig.engine, nullptr) == CKV_EINVAL);
  CHECK(ckv_pool_map(rig.engine, nullptr, nullptr) == CKV_EINVAL);
  ckv_region region{1, 8, 1, 8, 16};
  CHECK(ckv_set_regions(rig.engine, &region, 1, 1, 1) == CKV_EINVAL);
  CHECK(rig.stats().num_copy_calls[CKV_STORE] == 0 && *ckv_pending_word(rig.engine) == 0);
  CHECK(rig.submit(CKV_STORE, {}, {}, 1) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE && rig.seen.at(1).bytes == 0);
  ckv_config config = sim_config();
  ckv_engine *engine = nullptr;
  config.abi = CKV_ABI + 1;
  CHECK(ckv_open(&config, &engine) == CKV_EINVAL && engine == nullptr);
  config.abi = CKV_ABI;
  config.driver = 0;
  CHECK(ckv_open(&config, &engine) == CKV_EINVAL);
  config.driver = CKV_DRIVER_SIM;
  config.path = CKV_PATH_GATHER + 1;
  CHECK(ckv_open(&config, &engine) == CKV_EINVAL);
}

// The array has one id: under ASan, reading the next one is an error.
TEST(test_more_pairs_than_can_be_are_refused_before_they_are_read) {
  Rig rig;
  ckv_config config = sim_config();
  ckv_engine *bare = nullptr;
  CHECK(ckv_open(&config, &bare) == CKV_OK);
  const auto id = std::make_unique<int32_t>(0);
  auto said = [&](ckv_engine *engine, int direction, size_t n) {
    CHECK(ckv_submit(engine, direction, 0, id.get(), id.get(), n, 0, 1) == CKV_EINVAL);
    return std::string(ckv_last_error());
  };
  for (size_t n : {SIZE_MAX, SIZE_MAX / 4, size_t{1} << 31, size_t{97}}) {
    CHECK(said(rig.engine, CKV_LOAD, n).find("would write a block twice: there are 64") !=
          SIZE_MAX);
    CHECK(said(rig.engine, CKV_STORE, n).find("would write a slot twice: there are 96") !=
          SIZE_MAX);
    CHECK(said(bare, CKV_LOAD, n) == "regions must be set before the first transfer");
  }
  ckv_free(bare);
}

TEST(test_a_poll_without_a_place_loses_no_completion) {
  Rig rig;
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 1) == CKV_OK);
  CHECK(ckv_wait(rig.engine, 1, kLong) == CKV_OK);
  CHECK(ckv_poll(rig.engine, nullptr, 1) == 0 && *ckv_pending_word(rig.engine) == 1);
  CHECK(ckv_poll(nullptr, nullptr, 1) == 0);
  CHECK(rig.finish(1).status == CKV_DONE);
}

TEST(test_too_many_transfers_are_refused_until_some_are_polled) {
  ckv_config config = sim_config();
  config.max_transfers = 2;
  Rig rig(Shape(), config);
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {2}, {2}, 2) == CKV_OK);
  CHECK(ckv_wait(rig.engine, 1, kLong) == CKV_OK && ckv_wait(rig.engine, 2, kLong) == 0);
  CHECK(rig.submit(CKV_STORE, {3}, {3}, 3) == CKV_AGAIN);
  rig.poll();
  CHECK(rig.submit(CKV_STORE, {3}, {3}, 3) == CKV_OK);
  CHECK(rig.finish(3).status == CKV_DONE);
}

TEST(test_a_pool_that_cannot_be_had_is_refused) {
  Rig rig;
  void *base = nullptr;
  ckv_pool_config wrong = pool_config(0);
  CHECK(ckv_pool_map(rig.engine, &wrong, &base) == CKV_EINVAL);
  wrong.bytes = uint64_t{1} << 60;
  CHECK(ckv_pool_map(rig.engine, &wrong, &base) == CKV_ENOMEM && base == nullptr);
  CHECK(ckv_pool_unmap(rig.engine, &rig) == CKV_EINVAL);
  CHECK(ckv_pool_unmap(rig.engine, rig.pool) == CKV_AGAIN);  // the engine may still copy
}

}  // namespace
