// Copies over the simulator: bytes, order, windows, cancels. A failed CHECK ends the program.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <utility>

#include "by_hand.h"
#include "rig.h"

namespace {

void round_trip(const Shape &shape, const ckv_config &config) {
  Rig rig(shape, config);
  rig.fill(3);
  auto original = rig.vram;
  Ids blocks = range(0, shape.num_blocks);
  Ids slots = range(shape.num_slots - shape.num_blocks, shape.num_slots);
  std::mt19937 random(5);
  std::shuffle(slots.begin() + shape.num_blocks / 2, slots.end(), random);
  CHECK(rig.submit(CKV_STORE, blocks, slots, 1) == CKV_OK);
  const ckv_completion &stored = rig.finish(1);
  CHECK(stored.status == CKV_DONE && stored.error == 0);
  CHECK(stored.bytes == rig.slot_bytes * blocks.size());
  CHECK(stored.submit_ns <= stored.start_ns && stored.start_ns < stored.done_ns);
  for (size_t r = 0, offset = 0; r < shape.pieces.size(); offset += shape.pieces[r++]) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      const uint8_t *slot = rig.pool + static_cast<uint64_t>(slots[i]) * rig.slot_bytes + offset;
      CHECK(std::memcmp(slot, rig.piece(r, blocks[i]), shape.pieces[r]) == 0);
      std::memset(rig.piece(r, blocks[i]), 0xEE, shape.pieces[r]);
    }
  }
  CHECK(rig.submit(CKV_LOAD, blocks, slots, 2) == CKV_OK);
  CHECK(rig.finish(2).status == CKV_DONE);
  CHECK(rig.vram == original);  // gaps included: nothing beside the pieces was written
}

TEST(test_loaded_bytes_equal_stored_bytes_for_every_layout_and_trunk) {
  std::vector<Shape> shapes(4);
  shapes[1].pieces = {4096, 4096, 512};
  shapes[2].pieces = {1000, 24};
  shapes[2].gap = 40;
  shapes[3].pieces = {300 * kKiB};
  shapes[3].num_blocks = 8;
  for (const Shape &shape : shapes) {
    for (uint64_t trunk : {uint64_t{0}, uint64_t{1500}, 64 * kKiB}) {
      ckv_config config = sim_config();
      config.trunk_bytes = trunk;
      config.max_descriptors = trunk == 1500 ? 3 : 0;
      config.checksum_every = 1;
      round_trip(shape, config);
    }
  }
}

TEST(test_a_window_smaller_than_a_trunk_makes_trunks_as_small) {
  ckv_config config = sim_config();
  config.trunk_bytes = 4 * kMiB;
  config.window_bytes[CKV_LOAD] = config.window_bytes[CKV_STORE] = kKiB;
  round_trip(Shape(), config);
}

TEST(test_neighbours_are_merged_and_others_are_not) {
  Rig rig;
  CHECK(rig.submit(CKV_STORE, range(0, 64), range(0, 64), 1) == CKV_OK);
  rig.finish(1);
  CHECK(rig.stats().num_descriptors[CKV_STORE] == 1);
  Ids backwards = range(0, 64);
  std::reverse(backwards.begin(), backwards.end());
  CHECK(rig.submit(CKV_STORE, range(0, 64), backwards, 2) == CKV_OK);
  rig.finish(2);
  CHECK(rig.stats().num_descriptors[CKV_STORE] == 65);
}

TEST(test_store_waits_for_the_compute_it_was_put_behind) {
  Rig rig;
  uintptr_t stream = 0;
  CHECK(ckv_sim_stream(rig.engine, &stream) == CKV_OK);
  for (int i = 0; i < 50; ++i) {
    int block = i % rig.shape.num_blocks;
    CHECK(ckv_sim_compute(rig.engine, stream, rig.piece(0, block), i + 1, 4096, 500) == CKV_OK);
    CHECK(rig.submit(CKV_STORE, {block}, {block}, 100 + i, stream) == CKV_OK);
    if (i % 3 == 0) {
      // Later work on the stream must not delay it, or the next step's would.
      CHECK(ckv_sim_compute(rig.engine, stream, nullptr, 0, 0, 200) == CKV_OK);
    }
    CHECK(rig.finish(100 + i).status == CKV_DONE);
    CHECK(rig.pool[static_cast<uint64_t>(block) * 4096] == i + 1);
    CHECK(rig.pool[static_cast<uint64_t>(block) * 4096 + 4095] == i + 1);
  }
}

TEST(test_load_waits_for_the_zeroing_it_was_put_behind) {
  Rig rig;
  std::memset(rig.pool, 7, 4096);
  uintptr_t stream = 0;
  CHECK(ckv_sim_stream(rig.engine, &stream) == CKV_OK);
  CHECK(ckv_sim_compute(rig.engine, stream, rig.piece(0, 5), 0, 4096, 20000) == CKV_OK);
  CHECK(rig.submit(CKV_LOAD, {5}, {0}, 1, stream) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE);
  CHECK(rig.piece(0, 5)[0] == 7 && rig.piece(0, 5)[4095] == 7);
}

TEST(test_a_transfer_fails_that_conflicts_with_an_unfinished_one) {
  Rig rig;
  auto fails = [&rig, tag = uint64_t{100}](int direction, const Ids &blocks,
                                           const Ids &slots) mutable {
    CHECK(rig.submit(direction, blocks, slots, ++tag) == CKV_OK);
    ckv_completion completion = rig.finish(tag);
    return completion.status == CKV_FAILED && completion.error == CKV_EINVAL &&
           completion.bytes == 0 && completion.start_ns == 0;
  };
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {1, 2}, {1, 2}, 1) == CKV_OK);
  CHECK(fails(CKV_LOAD, {9}, {2}));   // reads an unwritten slot
  CHECK(fails(CKV_STORE, {9}, {1}));  // two writers of a slot
  CHECK(fails(CKV_LOAD, {1}, {9}));   // overwrites a block being read
  CHECK(fails(CKV_LOAD, {8, 8}, {9, 10}));
  CHECK(rig.submit(CKV_STORE, {1}, {3}, 2) == CKV_OK);     // two readers are fine
  CHECK(rig.submit(CKV_LOAD, {8}, {9}, 3) == CKV_OK);      // a refused one left no claim
  CHECK(rig.submit(CKV_LOAD, {7}, {9}, 3) == CKV_EINVAL);  // the tag is in use
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  for (uint64_t tag : {1, 2, 3}) {
    CHECK(rig.finish(tag).status == CKV_DONE);
  }
  CHECK(rig.submit(CKV_LOAD, {9}, {2}, 4) == CKV_OK);
  CHECK(rig.finish(4).status == CKV_DONE);
}

TEST(test_blocks_and_slots_are_free_once_their_transfers_are_polled) {
  Rig rig;
  uint64_t tag = 0;
  for (int round = 0; round < 3; ++round) {
    for (int32_t i = 0; i < 16; ++i) {
      CHECK(rig.submit(CKV_STORE, {i}, {i}, ++tag) == CKV_OK);
    }
    for (uint64_t store = tag - 15; store <= tag; ++store) {
      CHECK(rig.finish(store).status == CKV_DONE);
    }
    // Writes what each of them read, and reads what each wrote.
    CHECK(rig.submit(CKV_LOAD, range(0, 16), range(0, 16), ++tag) == CKV_OK);
    CHECK(rig.finish(tag).status == CKV_DONE);
  }
}

TEST(test_a_block_has_so_many_readers_and_then_is_refused) {
  constexpr int32_t kMost = 32767;
  Shape shape;
  shape.pieces = {8};
  shape.num_slots = kMost + 1;
  Rig rig(shape);
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, Ids(kMost, 5), range(0, kMost), 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {5}, {kMost}, 2) == CKV_OK);
  CHECK(rig.submit(CKV_LOAD, {5}, {kMost}, 3) == CKV_OK);
  CHECK(rig.finish(2).error == CKV_EINVAL);
  CHECK(rig.finish(3).error == CKV_EINVAL);  // the count has not wrapped to none either
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE);
  CHECK(rig.submit(CKV_LOAD, {5}, {kMost}, 4) == CKV_OK);
  CHECK(rig.finish(4).status == CKV_DONE);
}

TEST(test_window_is_never_exceeded_and_is_used) {
  for (uint64_t window : {256 * kKiB, 640 * kKiB}) {
    Shape shape;
    shape.pieces = {48 * kKiB, 16 * kKiB};
    ckv_config config = sim_config();
    config.trunk_bytes = 256 * kKiB;
    config.window_bytes[CKV_LOAD] = window;
    config.window_bytes[CKV_STORE] = window;
    config.sim_mbps = 400;
    Rig rig(shape, config);
    CHECK(rig.submit(CKV_STORE, range(0, 32), range(0, 32), 1) == CKV_OK);
    CHECK(rig.submit(CKV_LOAD, range(32, 64), range(32, 64), 2) == CKV_OK);
    rig.finish(1);
    rig.finish(2);
    for (uint64_t most : rig.stats().max_bytes_in_flight) {
      CHECK(most <= window && most >= window / 2);
    }
  }
}

TEST(test_a_full_store_window_does_not_stop_loads) {
  ckv_config config = sim_config();
  config.trunk_bytes = 4096;
  config.window_bytes[CKV_STORE] = 4096;
  Rig rig(Shape(), config);
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, range(0, 32), range(0, 32), 1) == CKV_OK);
  rig.until_issued(CKV_STORE, 1);
  CHECK(rig.submit(CKV_LOAD, range(32, 64), range(32, 64), 2) == CKV_OK);
  rig.until_issued(CKV_LOAD, 32);
  CHECK(rig.stats().num_copy_calls[CKV_STORE] == 1);
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE && rig.finish(2).status == CKV_DONE);
}

TEST(test_cancel_stops_at_the_next_trunk_and_reports_after_the_last) {
  ckv_config config = sim_config();
  config.trunk_bytes = 8192;
  config.window_bytes[CKV_STORE] = 16384;
  Rig rig(Shape(), config);
  rig.fill(1);
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, range(0, 64), range(0, 64), 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, range(0, 8), range(70, 78), 2) == CKV_OK);
  rig.until_issued(CKV_STORE, 2);
  CHECK(ckv_cancel(rig.engine, 1) == CKV_OK);
  CHECK(ckv_cancel(rig.engine, 1) == CKV_OK);
  CHECK(ckv_wait(rig.engine, 1, 20000) == CKV_TIMEOUT);  // two trunks are still in flight
  rig.poll();
  CHECK(rig.seen.empty());
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_CANCELLED);
  CHECK(rig.seen.at(1).bytes == 16384);
  CHECK(rig.finish(2).status == CKV_DONE);
  CHECK(rig.pool[4 * 4096 - 1] != 0 && rig.pool[4 * 4096 + 1] == 0);
  CHECK(ckv_cancel(rig.engine, 1) == CKV_OK && ckv_cancel(rig.engine, 12345) == CKV_OK);
}

TEST(test_cancel_of_a_queued_transfer_is_reported_at_once) {
  Rig rig;
  uintptr_t stream = rig.blocked_stream();
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 1, stream) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {2}, {2}, 2) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {3}, {3}, 3) == CKV_OK);
  CHECK(ckv_cancel(rig.engine, 2) == CKV_OK);
  CHECK(rig.finish(2).status == CKV_CANCELLED && rig.seen.size() == 1);
  CHECK(ckv_cancel(rig.engine, 1) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_CANCELLED);
  CHECK(rig.finish(3).status == CKV_DONE);
  CHECK(ckv_sim_block(rig.engine, stream, 0) == CKV_OK);
}

TEST(test_a_late_cancel_does_not_hit_the_next_user_of_the_tag) {
  ByHand rig;
  rig.submit(CKV_STORE, 1, 1, 77);
  rig.take_orders();
  ckv::Transfer *first = rig.take(ckv::Rank::STORE);
  rig.engine->cancel(77);
  rig.engine->settle(first, CKV_DONE, 0);
  rig.submit(CKV_STORE, 1, 1, 77);
  rig.take_orders();
  ckv::Transfer *second = rig.take(ckv::Rank::STORE);
  CHECK(second != nullptr && !second->is_stopping);
  rig.engine->settle(second, CKV_DONE, 0);
}

// Loads leave before stores; but what came first is not what conflicts.
TEST(test_of_two_in_conflict_the_later_one_is_refused_whatever_their_ranks) {
  ByHand rig;
  rig.submit(CKV_STORE, 1, 1, 1);
  rig.submit(CKV_LOAD, 1, 1, 2);
  rig.engine->cancel(2);  // too late
  rig.take_orders();
  CHECK(rig.take(ckv::Rank::AWAITED) == nullptr);
  ckv_completion refused = rig.pop();
  CHECK(refused.tag == 2 && refused.error == CKV_EINVAL);
  CHECK(rig.engine->reports().num_pending() == 0);
  rig.engine->settle(rig.take(ckv::Rank::STORE), CKV_DONE, 0);
  CHECK(rig.pop().tag == 1);
}

// Does something once, while the lane refuses its second transfer: the first one's tag is free.
class Meddler : public InstantDriver {
 public:
  Meddler() : InstantDriver(0) {}

  ckv::SimWatch *watch() override {
    if (engine != nullptr && engine->reports().num_pending() == 1) {
      engine = nullptr;
      meddle();
    }
    return nullptr;
  }

  ckv::Engine *engine = nullptr;
  std::function<void()> meddle;
};

TEST(test_a_cancel_that_is_under_way_does_not_hit_a_user_of_the_tag_that_the_lane_has_not_taken) {
  auto owned = std::make_unique<Meddler>();
  Meddler &meddler = *owned;
  ByHand rig(std::move(owned));
  rig.submit(CKV_STORE, 0, 0, 1);
  rig.submit(CKV_LOAD, 1, 0, 77);  // refused
  rig.submit(CKV_LOAD, 2, 0, 78);  // refused
  rig.engine->cancel(77);
  meddler.engine = rig.engine.get();
  meddler.meddle = [&rig] {
    rig.submit(CKV_STORE, 3, 3, 77);
    rig.engine->cancel(77);
  };
  for (uint64_t tag : {1, 77}) {
    rig.take_orders();
    ckv::Transfer *transfer = rig.take(ckv::Rank::STORE);
    CHECK(transfer != nullptr && transfer->tag == tag && transfer->is_stopping == (tag == 77));
    CHECK(rig.queues.empty());
    rig.engine->settle(transfer, tag == 77 ? CKV_CANCELLED : CKV_DONE, 0);
  }
  CHECK(rig.engine->reports().num_pending() == 4);
}

void random_transfers(uint32_t checksum_every) {
  ckv_config config = sim_config();
  config.checksum_every = checksum_every;
  config.trunk_bytes = 8 * kKiB;
  Rig rig(Shape(), config);
  constexpr int kThreads = 4;
  std::atomic<int> num_running{kThreads};
  std::atomic<size_t> num_accepted{0};
  auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (uint64_t i = 0; i < 1500; ++i) {
      Ids blocks = range(0, 64);
      Ids slots = range(0, 96);
      std::shuffle(blocks.begin(), blocks.end(), random);
      std::shuffle(slots.begin(), slots.end(), random);
      blocks.resize(random() % 6);
      slots.resize(blocks.size());
      uint64_t tag = seed * 100000 + i;
      num_accepted += rig.submit(static_cast<int>(random() % 2), blocks, slots, tag) == CKV_OK;
      if (random() % 3 == 0) {
        CHECK(ckv_cancel(rig.engine, tag - random() % 3) == CKV_OK);
      }
      if (random() % 40 == 0) {
        CHECK(ckv_wait(rig.engine, tag, kLong) == CKV_OK);
      }
    }
    --num_running;
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= kThreads; ++seed) {
    threads.emplace_back(work, seed);
  }
  while (num_running > 0) {
    rig.poll();
    std::this_thread::yield();
  }
  for (std::thread &thread : threads) {
    thread.join();
  }
  CHECK(ckv_close(rig.engine, kLong) == CKV_OK);
  rig.poll();
  CHECK(num_accepted > 1000 && rig.seen.size() == num_accepted);
  CHECK(*ckv_pending_word(rig.engine) == 0);
  size_t num_refused = 0;
  for (const auto &[tag, completion] : rig.seen) {
    bool is_refused = completion.status == CKV_FAILED;
    CHECK(!is_refused || (completion.error == CKV_EINVAL && completion.bytes == 0));
    num_refused += is_refused;
  }
  CHECK(num_refused > 0 && num_accepted - num_refused > 1000);
}

TEST(test_random_transfers_of_many_threads_are_each_reported_once) { random_transfers(0); }

TEST(test_random_transfers_of_many_threads_keep_to_their_sums) { random_transfers(1); }

}  // namespace

// With an argument: only the tests whose name contains it.
int main(int argc, char **argv) {
  int num_run = 0;
  for (const Test &test : all_tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) {
      continue;
    }
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.run();
    ++num_run;
  }
  std::printf("%d tests passed\n", num_run);
  return num_run > 0 ? 0 : 1;
}
