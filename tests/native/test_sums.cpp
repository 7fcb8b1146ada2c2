// Sums of what lies in DRAM: the function, which blocks are summed, what a changed slot does, and
// ends in the middle of a check.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>

#include "by_hand.h"
#include "checker.h"
#include "checksum.h"
#include "failure.h"

namespace {

using std::chrono::microseconds;

ckv_config summing(uint32_t every) {
  ckv_config config = sim_config();
  config.checksum_every = every;
  return config;
}

Shape pieces() {
  Shape shape;
  shape.pieces = {4096, 1000, 24, 7};
  return shape;
}

ckv_stats engine_stats(ckv_engine *engine) {
  ckv_stats stats{};
  stats.size = sizeof stats;
  CHECK(ckv_get_stats(engine, &stats) == CKV_OK);
  return stats;
}

bool is_corrupt(const ckv_completion &completion) {
  return completion.status == CKV_FAILED && completion.error == CKV_ECORRUPT;
}

// ---- The function.

TEST(test_crc32c_gives_the_published_answers) {
  std::string zeros(32, '\0');
  std::string ones(32, '\xFF');
  std::string rising(32, '\0');
  for (size_t i = 0; i < rising.size(); ++i) {
    rising[i] = static_cast<char>(i);
  }
  for (const ckv::Checksum *checksum : {&ckv::table_checksum(), &ckv::best_checksum()}) {
    CHECK(checksum->crc32c(0, "", 0) == 0);
    CHECK(checksum->crc32c(0, "123456789", 9) == 0xE3069283);
    CHECK(checksum->crc32c(0, zeros.data(), 32) == 0x8A9136AA);  // these three: RFC 3720, B.4
    CHECK(checksum->crc32c(0, ones.data(), 32) == 0x62A8AB43);
    CHECK(checksum->crc32c(0, rising.data(), 32) == 0x46DD794E);
    CHECK(checksum->crc32c(checksum->crc32c(0, "1234", 4), "56789", 5) == 0xE3069283);
  }
}

TEST(test_table_and_cpu_agree_on_every_length_and_alignment) {
  const ckv::Checksum &table = ckv::table_checksum();
  const ckv::Checksum &best = ckv::best_checksum();
  std::printf("  (by %s)\n", best.name);
  std::mt19937 random(7);
  std::vector<uint8_t> bytes(9000);
  for (uint8_t &byte : bytes) {
    byte = static_cast<uint8_t>(random());
  }
  for (size_t i = 0; i < 3000; ++i) {
    size_t n = i < 300 ? i : random() % 8000;
    const uint8_t *at = bytes.data() + random() % 16;
    uint32_t seed = static_cast<uint32_t>(random());
    CHECK(table.crc32c(seed, at, n) == best.crc32c(seed, at, n));
    CHECK(table.sum(seed, at, n) == best.sum(seed, at, n));
  }
}

TEST(test_every_bit_of_a_piece_and_its_length_and_seed_enter_the_sum) {
  const ckv::Checksum &best = ckv::best_checksum();
  std::vector<uint8_t> bytes(103, 0);
  uint32_t sum = best.sum(5, bytes.data(), bytes.size());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1U << (bit % 8)));
    CHECK(best.sum(5, bytes.data(), bytes.size()) != sum);
    bytes[bit / 8] = 0;
  }
  CHECK(best.sum(5, bytes.data(), bytes.size() - 1) != sum);
  CHECK(best.sum(6, bytes.data(), bytes.size()) != sum);
}

// ---- What a changed slot does.

TEST(test_a_changed_byte_fails_its_load_and_no_other) {
  Rig rig(pieces(), summing(1));
  rig.fill(3);
  CHECK(rig.submit(CKV_STORE, range(0, 16), range(0, 16), 1) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE);
  uint64_t tag = 2;
  std::vector<uint64_t> offsets;  // the first and the last byte of each region's piece
  uint64_t begin = 0;
  for (uint64_t bytes : rig.shape.pieces) {
    offsets.push_back(begin);
    begin += bytes;
    offsets.push_back(begin - 1);
  }
  for (int slot : {0, 7, 15}) {
    for (uint64_t offset : offsets) {
      uint8_t *byte = rig.pool + static_cast<uint64_t>(slot) * rig.slot_bytes + offset;
      *byte ^= 0x10;
      CHECK(rig.submit(CKV_LOAD, range(16, 32), range(0, 16), tag) == CKV_OK);
      CHECK(rig.submit(CKV_LOAD, {40}, {slot == 7 ? 8 : 7}, tag + 1) == CKV_OK);
      CHECK(is_corrupt(rig.finish(tag)));
      CHECK(rig.seen.at(tag).bytes == 16 * rig.slot_bytes);  // copied all the same
      CHECK(rig.finish(tag + 1).status == CKV_DONE && rig.seen.at(tag + 1).error == 0);
      *byte ^= 0x10;
      tag += 2;
    }
  }
  CHECK(rig.submit(CKV_LOAD, range(16, 32), range(0, 16), tag) == CKV_OK);
  CHECK(rig.finish(tag).status == CKV_DONE);
  ckv_stats stats = engine_stats(rig.engine);
  CHECK(stats.num_summed == 16 && stats.num_corrupt == 24);
  CHECK(stats.num_checked == 24 * 17 + 16);
}

// The id of a thread of this process but the main one.
id_t thread_named(const std::string &name) {
  for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string comm;
    std::getline(std::ifstream(task.path() / "comm"), comm);
    int tid = std::stoi(task.path().filename());
    if (comm == name && tid != getpid()) {
      return static_cast<id_t>(tid);
    }
  }
  CHECK(false);
  return 0;
}

TEST(test_the_checker_stands_behind_the_other_threads) {
  Rig rig(Shape(), summing(1));
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 1) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE);  // the checker is past its start
  int own = getpriority(PRIO_PROCESS, 0);
  int checker = getpriority(PRIO_PROCESS, thread_named("ckv-check"));
  CHECK(checker == std::min(own + 5, 19));
}

TEST(test_nothing_is_summed_unless_it_is_asked_for) {
  Rig rig(Shape(), summing(0));
  CHECK(rig.submit(CKV_STORE, range(0, 8), range(0, 8), 1) == CKV_OK);
  rig.finish(1);
  rig.pool[17] ^= 1;
  CHECK(rig.submit(CKV_LOAD, range(0, 8), range(0, 8), 2) == CKV_OK);
  CHECK(rig.finish(2).status == CKV_DONE);
  ckv_stats stats = engine_stats(rig.engine);
  CHECK(stats.num_summed == 0 && stats.num_checked == 0);
}

TEST(test_exactly_every_nth_stored_block_is_summed) {
  for (uint32_t every : {1U, 2U, 5U, 64U, 1000U}) {
    Rig rig(Shape(), summing(every));
    std::mt19937 random(every);
    int num_stored = 0;
    for (uint64_t tag = 1; num_stored < 90; ++tag) {
      int n = std::min(90 - num_stored, static_cast<int>(random() % 13));
      Ids slots = range(num_stored, num_stored + n);
      CHECK(rig.submit(CKV_STORE, range(0, n), slots, tag) == CKV_OK);
      rig.finish(tag);
      num_stored += n;
    }
    CHECK(engine_stats(rig.engine).num_summed == 90 / every);
    for (int slot = 0; slot < 90; ++slot) {  // slots are in the order in which they were stored
      rig.pool[static_cast<uint64_t>(slot) * 4096] ^= 1;
      uint64_t tag = 1000 + static_cast<uint64_t>(slot);
      CHECK(rig.submit(CKV_LOAD, {1}, {slot}, tag) == CKV_OK);
      bool is_nth = (static_cast<uint32_t>(slot) + 1) % every == 0;
      CHECK(is_corrupt(rig.finish(tag)) == is_nth);
    }
  }
}

TEST(test_a_slot_stored_again_forgets_its_old_sum) {
  Rig rig(Shape(), summing(2));
  rig.fill(1);
  CHECK(rig.submit(CKV_STORE, {0, 1}, {5, 6}, 1) == CKV_OK);  // slot 6 is summed
  rig.finish(1);
  CHECK(rig.submit(CKV_STORE, {2}, {6}, 2) == CKV_OK);  // not a second one
  rig.finish(2);
  CHECK(rig.submit(CKV_LOAD, {3}, {6}, 3) == CKV_OK);
  CHECK(rig.finish(3).status == CKV_DONE);
  CHECK(engine_stats(rig.engine).num_checked == 0);
  CHECK(rig.submit(CKV_STORE, {7}, {6}, 4) == CKV_OK);  // a second one: the new sum counts
  rig.finish(4);
  CHECK(rig.submit(CKV_LOAD, {3}, {6}, 5) == CKV_OK);
  CHECK(rig.finish(5).status == CKV_DONE);
  CHECK(engine_stats(rig.engine).num_checked == 1);
}

TEST(test_a_store_that_was_stopped_leaves_no_old_sum) {
  for (bool is_cancelled : {true, false}) {
    ckv_config config = summing(1);
    config.trunk_bytes = config.window_bytes[CKV_STORE] = 8192;
    Rig rig(Shape(), config);
    Ids slots = {7, 6, 5, 4};  // no neighbours: two descriptors a trunk
    rig.fill(1);
    CHECK(rig.submit(CKV_STORE, range(0, 4), slots, 1) == CKV_OK);
    rig.finish(1);
    rig.fill(2);
    CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
    CHECK(is_cancelled || ckv_sim_fail(rig.engine, 0, 1, 2) == CKV_OK);  // after half a trunk
    uint64_t num_calls = rig.stats().num_copy_calls[CKV_STORE];
    CHECK(rig.submit(CKV_STORE, range(0, 4), slots, 2) == CKV_OK);
    rig.until_issued(CKV_STORE, num_calls + 1);
    CHECK(!is_cancelled || ckv_cancel(rig.engine, 2) == CKV_OK);
    CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
    CHECK(rig.finish(2).status == (is_cancelled ? CKV_CANCELLED : CKV_FAILED));
    CHECK(rig.pool[7 * 4096] == rig.vram[0][0]);  // the slot has changed
    CHECK(rig.submit(CKV_LOAD, range(8, 12), slots, 3) == CKV_OK);
    CHECK(rig.finish(3).status == CKV_DONE);
  }
}

// ---- Ends in the middle. The test is the lane, and the checker only when it says so.

struct Summed : ByHand {
  Summed() : ByHand(std::make_unique<InstantDriver>(0), 1) {}

  // Submitted and copied, as far as the lane can tell.
  void copied(int direction, int32_t id, uint64_t tag) {
    submit(direction, id, id, tag);
    take_orders();
    ckv::Rank rank = direction == CKV_LOAD ? ckv::Rank::AWAITED : ckv::Rank::STORE;
    engine->settle(take(rank), CKV_DONE, 0);
  }

  void check_all() {
    ckv::Checker(*engine).run();
    engine->checker_ended();
  }
};

TEST(test_a_transfer_keeps_its_claims_until_it_is_checked_and_a_cancel_is_too_late) {
  Summed rig;
  rig.copied(CKV_STORE, 1, 7);
  CHECK(rig.engine->reports().num_pending() == 0 && !rig.engine->wait(7, microseconds(0)));
  rig.submit(CKV_LOAD, 1, 1, 8);
  rig.take_orders();
  CHECK(rig.pop().error == CKV_EINVAL);
  rig.engine->cancel(7);
  rig.take_orders();
  CHECK(rig.queues.empty());
  rig.engine->lane_ended();
  rig.check_all();
  CHECK(rig.pop().status == CKV_DONE && rig.engine->reports().num_pending() == 0);
  CHECK(rig.engine->close(microseconds(0)) == CKV_OK);
}

TEST(test_loads_are_checked_before_stores_that_were_first) {
  Summed rig;
  rig.copied(CKV_STORE, 0, 1);
  rig.engine->finish(rig.engine->take_check(), CKV_DONE, 0);
  rig.engine->sums().set(0, 0);  // not its sum
  rig.copied(CKV_STORE, 2, 2);
  rig.copied(CKV_LOAD, 0, 3);
  rig.engine->lane_ended();
  rig.check_all();
  CHECK(rig.pop().tag == 1);
  ckv_completion loaded = rig.pop();
  CHECK(loaded.tag == 3 && is_corrupt(loaded));
  CHECK(rig.pop().tag == 2);
  CHECK(rig.engine->close(microseconds(0)) == CKV_OK);
}

TEST(test_close_checks_what_it_has_time_for) {
  Summed rig;
  rig.copied(CKV_STORE, 1, 1);
  std::thread closer([&] { CHECK(rig.engine->close(std::chrono::seconds(20)) == CKV_OK); });
  rig.engine->lane_ended();
  rig.check_all();
  closer.join();
  CHECK(rig.pop().status == CKV_DONE);
}

TEST(test_checks_that_are_not_begun_at_the_deadline_fail) {
  Summed rig;
  rig.copied(CKV_STORE, 1, 1);
  rig.copied(CKV_STORE, 2, 2);
  std::thread closer([&] { CHECK(rig.engine->close(microseconds(0)) == CKV_OK); });
  while (rig.phase != ckv::Phase::STOPPING) {
    rig.engine->take_orders(ckv::kForEver, &rig.queues, &rig.phase);
  }
  rig.engine->lane_ended();
  rig.check_all();
  closer.join();
  for (uint64_t tag : {1, 2}) {
    ckv_completion completion = rig.pop();
    CHECK(completion.tag == tag && completion.status == CKV_FAILED);
    CHECK(completion.error == CKV_CLOSED);
  }
}

TEST(test_close_leaves_behind_a_checker_that_does_not_end) {
  Summed rig;
  rig.copied(CKV_STORE, 1, 1);
  rig.engine->lane_ended();
  CHECK(rig.engine->close(microseconds(0)) == CKV_TIMEOUT);
  CHECK(rig.pop().error == CKV_CLOSED);
  rig.check_all();  // it comes to itself: frees the transfer, and reports it no second time
  CHECK(rig.engine->reports().num_pending() == 0);
}

TEST(test_copies_that_were_over_before_the_context_ended_are_still_checked) {
  Summed rig;
  rig.copied(CKV_STORE, 1, 1);
  rig.engine->poison(700);
  rig.engine->lane_ended();
  rig.check_all();
  CHECK(rig.pop().status == CKV_DONE);
  CHECK(rig.engine->close(microseconds(0)) == CKV_OK);
}

TEST(test_close_with_real_checks_pending_reports_all) {
  for (int i = 0; i < 10; ++i) {
    Shape shape;
    shape.pieces = {256 * kKiB};
    shape.num_blocks = shape.num_slots = 32;
    Rig rig(shape, summing(1));
    for (int block = 0; block < 32; ++block) {
      CHECK(rig.submit(CKV_STORE, {block}, {block}, static_cast<uint64_t>(block)) == CKV_OK);
    }
    usleep(static_cast<useconds_t>(i * 100));
    CHECK(ckv_close(rig.engine, i % 2 * kLong) == CKV_OK);
    rig.poll();
    CHECK(rig.seen.size() == 32);
    for (const auto &[tag, completion] : rig.seen) {
      CHECK(completion.status == CKV_DONE ? completion.error == 0
                                          : completion.error == CKV_CLOSED && i % 2 == 0);
    }
    CHECK(ckv_pool_unmap(rig.engine, rig.pool) == CKV_OK);
  }
}

}  // namespace
