// The simulator notices who writes memory that a copy still needs.
#include "rig.h"

namespace {

TEST(test_a_block_written_while_its_store_is_in_flight_is_noticed) {
  Rig rig;
  CHECK(ckv_sim_watch(rig.engine, 1) == CKV_OK);
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {1, 3}, {1, 2}, 1) == CKV_OK);
  rig.until_issued(CKV_STORE, 1);
  rig.piece(0, 3)[4095] ^= 1;
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE);  // a device would not notice either
  CHECK(rig.stats().num_violations == 1);
}

TEST(test_a_block_written_between_its_load_and_the_report_is_noticed) {
  Rig rig;
  CHECK(ckv_sim_watch(rig.engine, 1) == CKV_OK);
  CHECK(ckv_sim_stop(rig.engine, 2) == CKV_OK);  // copy, record, and here the query waits
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_LOAD, {5}, {6}, 1) == CKV_OK);
  while (rig.stats().num_stopped == 0) {
    usleep(100);
  }
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  rig.until_copied(CKV_LOAD, 1);
  rig.piece(0, 5)[0] ^= 1;
  CHECK(ckv_sim_stop(rig.engine, UINT64_MAX) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE);
  CHECK(rig.stats().num_violations == 1);
}

TEST(test_a_block_written_while_its_store_waits_for_room_is_noticed) {
  ckv_config config = sim_config();
  config.trunk_bytes = config.window_bytes[CKV_STORE] = 16 * kKiB;
  Rig rig(Shape(), config);
  CHECK(ckv_sim_watch(rig.engine, 1) == CKV_OK);
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, range(0, 4), range(0, 4), 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {7}, {7}, 2) == CKV_OK);
  rig.until_issued(CKV_STORE, 1);  // and no more: the window is full
  rig.piece(0, 7)[0] ^= 1;
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE && rig.finish(2).status == CKV_DONE);
  CHECK(rig.stats().num_violations == 1);
}

TEST(test_a_block_written_before_its_load_is_copied_is_noticed) {
  ckv_config config = sim_config();
  config.trunk_bytes = config.window_bytes[CKV_LOAD] = 3 * kKiB;  // two trunks for a block
  Rig rig(Shape(), config);
  CHECK(ckv_sim_watch(rig.engine, 1) == CKV_OK);
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_LOAD, {5, 6}, {1, 2}, 1) == CKV_OK);
  rig.piece(0, 6)[4095] = 77;  // its new owner's: the copy will destroy it
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE);
  CHECK(rig.stats().num_violations == 1 && rig.piece(0, 6)[4095] == 0);
}

TEST(test_a_block_written_by_the_kernel_before_its_store_is_not) {
  Rig rig;
  uintptr_t stream = 0;
  CHECK(ckv_sim_stream(rig.engine, &stream) == CKV_OK);
  CHECK(ckv_sim_watch(rig.engine, 1) == CKV_OK);
  CHECK(ckv_sim_compute(rig.engine, stream, rig.piece(0, 4), 9, 4096, 2000) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {4}, {4}, 1, stream) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE && rig.pool[4 * 4096] == 9);
  CHECK(rig.stats().num_violations == 0);
}

TEST(test_what_is_left_behind_or_refused_is_watched_no_more) {
  Rig rig;
  CHECK(ckv_sim_watch(rig.engine, 1) == CKV_OK);
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {1}, {1}, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {2}, {2}, 1) == CKV_EINVAL);  // the tag is taken
  rig.until_issued(CKV_STORE, 1);
  CHECK(ckv_sim_set_grace(rig.engine, 0) == CKV_OK);
  CHECK(ckv_close(rig.engine, 0) == CKV_TIMEOUT);
  rig.piece(0, 1)[0] ^= 1;  // it was reported: FAILED
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  rig.until_copied(CKV_STORE, 1);
  CHECK(rig.stats().num_violations == 0);
}

TEST(test_blocks_written_before_and_after_their_copies_are_not) {
  Rig rig;
  CHECK(ckv_sim_watch(rig.engine, 1) == CKV_OK);
  for (uint64_t tag = 1; tag < 20; ++tag) {
    rig.fill(static_cast<int>(tag));
    CHECK(rig.submit(static_cast<int>(tag % 2), range(0, 32), range(32, 64), tag) == CKV_OK);
    CHECK(rig.finish(tag).status == CKV_DONE);
  }
  CHECK(rig.stats().num_violations == 0);
}

}  // namespace
