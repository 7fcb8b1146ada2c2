// How a trunk is given to the driver: the choice, and what happens when the driver refuses one.
#include <cstring>

#include "path.h"
#include "rig.h"

namespace {

constexpr uint32_t bit(int path) { return 1U << path; }

constexpr uint32_t kBatch = bit(CKV_PATH_BATCH) | bit(CKV_PATH_LOOP);
constexpr uint32_t kAll = kBatch | bit(CKV_PATH_GATHER);

int chosen(int direction, size_t n, uint64_t bytes_each, uint32_t paths, int wanted = 0) {
  return ckv::choose_path(direction, n, n * bytes_each, paths, wanted);
}

TEST(test_path_of_a_trunk_follows_direction_number_and_size) {
  CHECK(chosen(CKV_LOAD, 1, 4 * kMiB, kAll) == CKV_PATH_LOOP);
  CHECK(chosen(CKV_LOAD, 1, 512, kAll) == CKV_PATH_LOOP);
  CHECK(chosen(CKV_LOAD, 15, 4096, kAll) == CKV_PATH_BATCH);
  CHECK(chosen(CKV_LOAD, 16, 4096, kAll) == CKV_PATH_GATHER);
  CHECK(chosen(CKV_LOAD, 16, 28 * kKiB - 1, kAll) == CKV_PATH_GATHER);
  CHECK(chosen(CKV_LOAD, 16, 28 * kKiB, kAll) == CKV_PATH_BATCH);
  CHECK(chosen(CKV_STORE, 1024, 4096, kAll) == CKV_PATH_BATCH);
  CHECK(chosen(CKV_LOAD, 1024, 4096, kBatch) == CKV_PATH_BATCH);
  CHECK(chosen(CKV_LOAD, 1024, 4096, bit(CKV_PATH_LOOP)) == CKV_PATH_LOOP);
  CHECK(chosen(CKV_STORE, 2, 4096, bit(CKV_PATH_LOOP)) == CKV_PATH_LOOP);
}

TEST(test_a_wanted_path_is_taken_where_it_can_be_had) {
  CHECK(chosen(CKV_LOAD, 1, 4096, kAll, CKV_PATH_BATCH) == CKV_PATH_BATCH);
  CHECK(chosen(CKV_LOAD, 2, kMiB, kAll, CKV_PATH_GATHER) == CKV_PATH_GATHER);
  CHECK(chosen(CKV_LOAD, 100, 4096, kAll, CKV_PATH_LOOP) == CKV_PATH_LOOP);
  CHECK(chosen(CKV_STORE, 2, 4096, kBatch, CKV_PATH_GATHER) == CKV_PATH_BATCH);
  CHECK(chosen(CKV_STORE, 64, 4096, kAll) == CKV_PATH_BATCH);
  CHECK(chosen(CKV_STORE, 64, 4096, kAll, CKV_PATH_GATHER) == CKV_PATH_GATHER);
  CHECK(chosen(CKV_LOAD, 2, 4096, bit(CKV_PATH_LOOP), CKV_PATH_BATCH) == CKV_PATH_LOOP);
}

// 32 blocks of which no two are neighbours.
Ids scattered() {
  Ids ids;
  for (int32_t id = 0; id < 64; id += 2) {
    ids.push_back(id);
  }
  return ids;
}

// Loads all of them; whether every byte came.
bool load(Rig *rig, uint64_t tag) {
  std::memset(rig->pool, static_cast<int>(tag), rig->slot_bytes * 64);
  rig->fill(0);
  CHECK(rig->submit(CKV_LOAD, scattered(), scattered(), tag) == CKV_OK);
  if (rig->finish(tag).status != CKV_DONE) {
    return false;
  }
  for (int32_t id : scattered()) {
    CHECK(std::memcmp(rig->piece(0, id), rig->pool + id * 4096, 4096) == 0);
  }
  return true;
}

TEST(test_trunks_are_counted_by_the_path_they_take) {
  Rig rig;
  CHECK(load(&rig, 1));
  CHECK(rig.submit(CKV_STORE, scattered(), scattered(), 2) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, {1}, {95}, 3) == CKV_OK);
  CHECK(rig.finish(2).status == CKV_DONE && rig.finish(3).status == CKV_DONE);
  CHECK(ckv_sim_set_paths(rig.engine, kBatch) == CKV_OK);
  CHECK(load(&rig, 4));
  CHECK(rig.engine_stats().paths == kBatch);
  CHECK(ckv_sim_set_paths(rig.engine, 0) == CKV_OK);
  CHECK(load(&rig, 5));
  ckv_stats stats = rig.engine_stats();
  CHECK(stats.paths == bit(CKV_PATH_LOOP) && stats.num_given_up == 0);
  CHECK(stats.num_trunks[CKV_LOAD][CKV_PATH_GATHER] == 1);
  CHECK(stats.num_trunks[CKV_LOAD][CKV_PATH_BATCH] == 1);
  CHECK(stats.num_trunks[CKV_LOAD][CKV_PATH_LOOP] == 1);
  CHECK(stats.num_trunks[CKV_STORE][CKV_PATH_BATCH] == 1);
  CHECK(stats.num_trunks[CKV_STORE][CKV_PATH_LOOP] == 1);
}

TEST(test_a_path_the_driver_refuses_is_given_up_and_the_trunk_goes_another_way) {
  for (int code : {1, 500, 801}) {
    Rig rig;
    CHECK(ckv_sim_fail_path(rig.engine, CKV_PATH_GATHER, code) == CKV_OK);
    CHECK(load(&rig, 1));
    ckv_stats stats = rig.engine_stats();
    CHECK(stats.num_given_up == 1 && stats.paths == kBatch && stats.poison == 0);
    CHECK(stats.num_trunks[CKV_LOAD][CKV_PATH_GATHER] == 0);
    CHECK(stats.num_trunks[CKV_LOAD][CKV_PATH_BATCH] == 1);
    CHECK(stats.num_bytes[CKV_LOAD] == 32 * 4096 && stats.num_descriptors[CKV_LOAD] == 32);
    CHECK(ckv_sim_fail_path(rig.engine, CKV_PATH_GATHER, 0) == CKV_OK);
    CHECK(load(&rig, 2));  // given up for good
    CHECK(rig.engine_stats().num_trunks[CKV_LOAD][CKV_PATH_BATCH] == 2);
    CHECK(ckv_sim_fail_path(rig.engine, CKV_PATH_BATCH, code) == CKV_OK);
    CHECK(load(&rig, 3));
    stats = rig.engine_stats();
    CHECK(stats.num_given_up == 2 && stats.paths == bit(CKV_PATH_LOOP));
    CHECK(ckv_sim_fail_path(rig.engine, CKV_PATH_LOOP, code) == CKV_OK);
    CHECK(!load(&rig, 4) && rig.seen.at(4).error == code);  // there is no other way
    CHECK(rig.engine_stats().num_given_up == 2);
  }
}

TEST(test_a_trunk_issued_again_is_reported_only_after_both_are_over) {
  Rig rig;
  CHECK(ckv_sim_fail_path(rig.engine, CKV_PATH_BATCH, 801) == CKV_OK);
  CHECK(ckv_sim_hold(rig.engine, 1) == CKV_OK);
  CHECK(rig.submit(CKV_STORE, scattered(), scattered(), 1) == CKV_OK);
  rig.until_issued(CKV_STORE, 2);
  CHECK(ckv_wait(rig.engine, 1, 20000) == CKV_TIMEOUT);
  CHECK(ckv_sim_hold(rig.engine, 0) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE);
  std::memset(rig.pool, 1, rig.slot_bytes * 64);  // under TSan a copy still running is a race
}

TEST(test_other_errors_fail_the_transfer_and_keep_the_path) {
  Rig rig;
  CHECK(ckv_sim_fail_path(rig.engine, CKV_PATH_GATHER, 2) == CKV_OK);
  CHECK(!load(&rig, 1) && rig.seen.at(1).error == 2);
  CHECK(rig.engine_stats().num_given_up == 0 && rig.engine_stats().paths == kAll);
}

TEST(test_codes_that_only_a_launch_gives_are_a_fault_of_no_other_path) {
  for (int code : {209, 701}) {
    CHECK(ckv::is_path_at_fault(CKV_PATH_GATHER, code) && !ckv::is_sticky(code));
    CHECK(!ckv::is_path_at_fault(CKV_PATH_BATCH, code));
    CHECK(!ckv::is_path_at_fault(CKV_PATH_LOOP, code));
  }
}

// A kernel that reads memory which nobody page-locked would end the context.
TEST(test_no_kernel_touches_host_memory_that_is_not_of_the_pool) {
  ckv_config config = sim_config();
  config.path = CKV_PATH_GATHER;
  std::vector<uint8_t> host(64 * 4096, 7);
  std::vector<uint8_t> vram(64 * 4096);
  ckv_engine *engine = nullptr;
  CHECK(ckv_open(&config, &engine) == CKV_OK);
  ckv_region region{reinterpret_cast<uint64_t>(vram.data()), 4096,
                    reinterpret_cast<uint64_t>(host.data()), 4096, 4096};
  CHECK(ckv_set_regions(engine, &region, 1, 64, 64) == CKV_OK);
  Ids ids = scattered();
  CHECK(ckv_submit(engine, CKV_LOAD, 0, ids.data(), ids.data(), ids.size(), 0, 1) == CKV_OK);
  CHECK(ckv_wait(engine, 1, kLong) == CKV_OK);
  ckv_stats stats{};
  stats.size = sizeof stats;
  CHECK(ckv_get_stats(engine, &stats) == CKV_OK);
  CHECK(stats.paths == kBatch && stats.num_given_up == 0);
  CHECK(stats.num_trunks[CKV_LOAD][CKV_PATH_BATCH] == 1);
  ckv_free(engine);
  CHECK(vram[2 * 4096] == 7);
}

TEST(test_a_wanted_path_is_forced_through_the_engine) {
  for (int path : {CKV_PATH_BATCH, CKV_PATH_LOOP, CKV_PATH_GATHER}) {
    ckv_config config = sim_config();
    config.path = path;
    Rig rig(Shape(), config);
    CHECK(load(&rig, 1));
    CHECK(rig.submit(CKV_STORE, scattered(), scattered(), 2) == CKV_OK);
    CHECK(rig.finish(2).status == CKV_DONE);
    CHECK(rig.engine_stats().num_trunks[CKV_LOAD][path] == 1);
    CHECK(rig.engine_stats().num_trunks[CKV_STORE][path] == 1);
  }
}

}  // namespace
