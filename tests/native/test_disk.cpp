// A file on a disk that fails, hangs, is full or is somebody else's: a miss, and nothing worse.
#include <sys/wait.h>

#include <cerrno>
#include <memory>
#include <thread>

#include "allocations.h"
#include "boundary.h"
#include "disk_rig.h"

namespace {

TEST(test_a_slot_written_is_read_and_counted) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK);
  rig.make(0, 5);
  ckv_completion written = rig.move(CKV_WRITE, 0, 3, 5);
  CHECK(written.status == CKV_DONE && written.bytes == kPayload && written.error == 0);
  CHECK(written.start_ns >= written.submit_ns && written.done_ns >= written.start_ns);
  CHECK(rig.read(8, 3, 5) == 0);
  CHECK(rig.state().num_bytes[0] == kPayload && rig.state().num_bytes[1] == kPayload);
  CHECK(file.size() == slot_offset(kDiskSlots));
}

TEST(test_many_slots_go_as_one_transfer_and_the_first_bad_one_ends_it) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK);
  for (uint32_t i = 0; i < 8; ++i) {
    rig.make(static_cast<int32_t>(i * kSlotBlocks), i);
  }
  std::vector<uint32_t> numbers = {0, 1, 2, 3, 4, 5, 6, 7};
  CHECK(rig.submit_many(CKV_WRITE, 0, {8, 9, 3, 2, 7, 6, 0, 1}, numbers, 1) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE && rig.seen.at(1).bytes == 8 * kPayload);
  CHECK(rig.submit_many(CKV_READ, 32, {8, 9, 3, 2, 7, 6, 0, 1}, numbers, 2) == CKV_OK);
  CHECK(rig.finish(2).status == CKV_DONE);
  for (uint32_t i = 0; i < 8; ++i) {
    CHECK(rig.holds(static_cast<int32_t>(32 + i * kSlotBlocks), i));
  }
  numbers[3] = 77;
  CHECK(rig.submit_many(CKV_READ, 32, {8, 9, 3, 2, 7, 6, 0, 1}, numbers, 3) == CKV_OK);
  CHECK(rig.finish(3).status == CKV_FAILED && rig.seen.at(3).error == CKV_EMISSING);
  CHECK(rig.submit_many(CKV_WRITE, 0, {}, {}, 4) == CKV_OK);
  CHECK(rig.finish(4).status == CKV_DONE);
}

TEST(test_blocks_that_are_not_wanted_are_summed_where_nobody_sees_them) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
  std::vector<uint8_t> before(rig.pool, rig.pool + 96 * kBlock);
  std::vector<uint8_t> key = key_of(1);
  int32_t disk_slot = 1;
  for (uint64_t wanted = 0; wanted < 3; ++wanted) {  // none, the first, the second
    Ids slots = {-1, -1};
    if (wanted > 0) {
      slots[wanted - 1] = 20;
    }
    CHECK(ckv_disk_submit(rig.disk, CKV_READ, slots.data(), &disk_slot, key.data(), kKeyBytes,
                          nullptr, 1, wanted) == CKV_OK);
    CHECK(rig.finish(wanted).status == CKV_DONE);
    if (wanted > 0) {
      CHECK(std::memcmp(rig.slot(20), rig.slot(static_cast<int32_t>(wanted) - 1), kBlock) == 0);
      std::memset(rig.slot(20), 0, kBlock);
    }
    CHECK(std::memcmp(before.data(), rig.pool, before.size()) == 0);
  }
}

// What an open says of a fault at an entry point, and whether the next one works.
int open_with(int entry, uint64_t after, int code, bool *was_direct = nullptr) {
  TempFile file;
  DiskRig rig;
  CHECK(ckv_sim_disk_fail_at(rig.engine, entry, after, 1, code) == CKV_OK);
  int result = rig.open(file);
  if (was_direct != nullptr && result == CKV_OK) {
    *was_direct = rig.state().is_direct != 0;
  }
  if (result != CKV_OK) {
    CHECK(std::strstr(ckv_last_error(), file.path.c_str()) != nullptr);
    CHECK(rig.open(file) == CKV_OK);
  }
  CHECK(rig.write(0, 0, 1) && rig.read(2, 0, 1) == 0);
  return result;
}

TEST(test_an_open_that_fails_says_why_and_leaves_the_path_free) {
  CHECK(open_with(CKV_SIM_DISK_OPEN, 0, EROFS) == CKV_EIO);
  CHECK(std::strstr(ckv_last_error(), std::strerror(EROFS)) != nullptr);
  CHECK(open_with(CKV_SIM_DISK_LOCK, 0, EWOULDBLOCK) == CKV_ELOCKED);
  CHECK(open_with(CKV_SIM_DISK_LOCK, 0, EIO) == CKV_EIO);
  CHECK(open_with(CKV_SIM_DISK_ALLOCATE, 0, ENOSPC) == CKV_ENOSPC);
  CHECK(open_with(CKV_SIM_DISK_SYNC, 0, EIO) == CKV_EIO);
  CHECK(open_with(CKV_SIM_DISK_SYNC, 1, EIO) == CKV_EIO);
  CHECK(open_with(CKV_SIM_DISK_WRITE, 1, ENOSPC) == CKV_ENOSPC);
  CHECK(open_with(CKV_SIM_DISK_WRITE, 0, EIO) == CKV_OK);  // the words for people
}

TEST(test_a_second_server_has_no_disk_while_the_first_has_it) {
  TempFile file;
  DiskRig first;
  DiskRig second;
  CHECK(first.open(file) == CKV_OK && first.write(0, 1, 1));
  CHECK(second.open(file) == CKV_ELOCKED);
  CHECK(first.read(4, 1, 1) == 0 && ckv_disk_close(first.disk, kLong) == CKV_OK);
  CHECK(second.open(file) == CKV_OK && second.read(4, 1, 1) == 0);
}

TEST(test_where_direct_reads_are_refused_the_file_is_buffered_and_says_so) {
  bool is_direct = true;
  CHECK(open_with(CKV_SIM_DISK_READ, 0, EINVAL, &is_direct) == CKV_OK);
  CHECK(!is_direct);
}

TEST(test_a_file_that_the_disk_has_no_room_for_takes_none) {
  TempFile file;
  DiskRig rig;
  ckv_disk_config config = disk_config();
  config.num_slots = INT32_MAX;
  config.slot_blocks = 1000;
  CHECK(rig.open(file, config) == CKV_ENOSPC);  // not EFBIG: it was not even tried
  CHECK(file.size() == 0);
  CHECK(rig.open(file) == CKV_OK);
}

// Of a write and a read, of which one call fails: both are reported, and what is done is right.
void fault_at(int entry, uint64_t after, int code, int expected) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
  rig.make(4, 2);
  CHECK(ckv_sim_disk_fail_at(rig.engine, entry, after, 1, code) == CKV_OK);
  CHECK(rig.submit_many(CKV_WRITE, 4, {2}, {2}, 1) == CKV_OK);
  CHECK(rig.submit_many(CKV_READ, 8, {1}, {1}, 2) == CKV_OK);
  int num_failed = 0;
  for (uint64_t tag : {1, 2}) {
    const ckv_completion &done = rig.finish(tag);
    CHECK(done.status == CKV_DONE || (done.status == CKV_FAILED && done.error == expected));
    num_failed += done.status == CKV_FAILED ? 1 : 0;
  }
  CHECK(num_failed == (after == 0 ? 1 : 0));
  CHECK(rig.seen.at(2).status != CKV_DONE || rig.holds(8, 1));
  CHECK(ckv_sim_disk_fail_at(rig.engine, entry, 0, 0, 0) == CKV_OK);
  CHECK(rig.read(10, 1, 1) == 0 && rig.write(12, 3, 3) && rig.read(14, 3, 3) == 0);
}

TEST(test_one_failing_call_costs_one_transfer) {
  for (uint64_t after : {0, 1}) {
    fault_at(CKV_SIM_DISK_READ, after, EIO, CKV_EIO);
    fault_at(CKV_SIM_DISK_WRITE, after, EIO, CKV_EIO);
    fault_at(CKV_SIM_DISK_WRITE, after, ENOSPC, CKV_ENOSPC);
    fault_at(CKV_SIM_DISK_WRITE, after, EROFS, CKV_ENOSPC);
  }
}

TEST(test_a_disk_that_fills_up_after_a_short_write_is_full_and_still_read) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1) && rig.write(0, 2, 2));
  CHECK(ckv_sim_disk_tear(rig.engine, 0, ckv::kPage, 1) == CKV_OK);
  CHECK(ckv_sim_disk_fail_at(rig.engine, CKV_SIM_DISK_WRITE, 1, 100, ENOSPC) == CKV_OK);
  rig.make(0, 3);
  CHECK(rig.move(CKV_WRITE, 0, 2, 3).error == CKV_ENOSPC);
  CHECK(rig.read(4, 1, 1) == 0);
  CHECK(rig.read(4, 2, 2) == CKV_EMISSING && rig.read(4, 2, 3) == CKV_ECORRUPT);
}

TEST(test_a_short_write_alone_is_gone_on_with) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK);
  for (uint64_t bytes = 512; bytes < ckv::kPage + kPayload; bytes += 512) {
    CHECK(ckv_sim_disk_tear(rig.engine, 0, bytes, 1) == CKV_OK);
    CHECK(rig.write(0, 1, static_cast<uint32_t>(bytes)));
    CHECK(rig.read(4, 1, static_cast<uint32_t>(bytes)) == 0);
  }
}

TEST(test_a_file_cut_short_is_an_error_of_the_slots_behind_alone) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1) && rig.write(0, 2, 2));
  CHECK(truncate(file.path.c_str(), static_cast<off_t>(slot_offset(2) + 512)) == 0);
  CHECK(rig.read(4, 1, 1) == 0 && rig.read(4, 2, 2) == CKV_EIO && rig.read(4, 3, 3) == CKV_EIO);
}

TEST(test_what_a_hung_disk_holds_is_claimed_and_reported_when_it_answers) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
  rig.fill(3);
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, 0) == CKV_OK);
  CHECK(rig.submit_disk(CKV_READ, 8, 1, 1, 1) == CKV_OK);
  rig.until_stopped(1);
  while (rig.state().oldest_op_us < 2000) {
    usleep(200);
  }
  CHECK(rig.submit(CKV_STORE, {0}, {8}, 2) == CKV_OK);  // the slot that the read writes
  CHECK(rig.finish(2).error == CKV_EINVAL);
  CHECK(rig.submit(CKV_STORE, {0}, {10}, 3) == CKV_OK);
  CHECK(rig.finish(3).status == CKV_DONE);
  CHECK(rig.write(0, 2, 2));  // another entry point answers
  CHECK(ckv_disk_close(rig.disk, 1000) == CKV_TIMEOUT);
  CHECK(rig.submit_disk(CKV_READ, 12, 2, 2, 4) == CKV_OK && rig.finish(4).error == CKV_CLOSED);
  CHECK(rig.seen.count(1) == 0);
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, UINT64_MAX) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE && rig.holds(8, 1));
  CHECK(ckv_disk_close(rig.disk, kLong) == CKV_OK && ckv_disk_close(rig.disk, 0) == CKV_OK);
  CHECK(rig.state().oldest_op_us == 0 && rig.open(file) == CKV_OK);
}

// Of slot 1, tags 1 to 6: four are begun, as many as there are threads.
void hang_six_reads(DiskRig &rig) {
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, 0) == CKV_OK);
  for (uint64_t tag = 1; tag <= 6; ++tag) {
    CHECK(rig.submit_disk(CKV_READ, static_cast<int32_t>(8 + 2 * tag), 1, 1, tag) == CKV_OK);
  }
  rig.until_stopped(4);
}

TEST(test_an_engine_that_closes_over_a_hung_disk_reports_all_and_keeps_the_pool) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
  hang_six_reads(rig);
  CHECK(ckv_sim_set_grace(rig.engine, 0) == CKV_OK);
  CHECK(ckv_close(rig.engine, 0) == CKV_TIMEOUT);
  rig.poll();
  for (uint64_t tag = 1; tag <= 6; ++tag) {
    CHECK(rig.seen.at(tag).status == CKV_FAILED && rig.seen.at(tag).error == CKV_CLOSED);
  }
  CHECK(ckv_pool_unmap(rig.engine, rig.pool) == CKV_AGAIN);
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, UINT64_MAX) == CKV_OK);
  while (ckv_disk_close(rig.disk, kLong) != CKV_OK) {
  }
  rig.poll();
  CHECK(rig.seen.size() == 7 && *ckv_pending_word(rig.engine) == 0);
}

TEST(test_an_engine_is_closed_and_freed_while_an_open_hangs_which_fails_then) {
  TempFile file;
  auto rig = std::make_unique<DiskRig>();
  std::shared_ptr<ckv::Engine> engine = rig->engine->engine;
  CHECK(ckv_sim_disk_stop(rig->engine, CKV_SIM_DISK_ALLOCATE, 0) == CKV_OK);
  int code = CKV_OK;
  ckv_engine *handle = rig->engine;
  std::thread opener([&] {
    ckv_disk_config config = disk_config();
    ckv_disk *disk = nullptr;
    code = ckv_disk_open(handle, file.path.c_str(), nullptr, &config, &disk);
  });
  rig->until_stopped(1);
  CHECK(ckv_close(handle, 0) == CKV_OK);
  rig.reset();
  static_cast<ckv::SimDriver &>(engine->driver()).disk().stop(CKV_SIM_DISK_ALLOCATE, UINT64_MAX);
  opener.join();
  CHECK(code == CKV_CLOSED);
}

TEST(test_what_a_hung_disk_has_not_begun_is_cancelled_at_once) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
  hang_six_reads(rig);
  for (uint64_t tag = 1; tag <= 6; ++tag) {
    CHECK(ckv_cancel(rig.engine, tag) == CKV_OK);
  }
  CHECK(rig.finish(5).status == CKV_CANCELLED && rig.finish(6).status == CKV_CANCELLED);
  CHECK(rig.seen.count(1) == 0);
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, UINT64_MAX) == CKV_OK);
  for (uint64_t tag = 1; tag <= 4; ++tag) {  // one slot each, and it was too late for that
    CHECK(rig.finish(tag).status == CKV_DONE);
  }
}

TEST(test_a_cancelled_transfer_ends_with_the_slots_under_way) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_WRITE, 0) == CKV_OK);
  CHECK(rig.submit_many(CKV_WRITE, 0, {2, 3, 4, 5, 6, 7}, {2, 3, 4, 5, 6, 7}, 1) == CKV_OK);
  rig.until_stopped(2);  // half of the threads may write
  CHECK(ckv_cancel(rig.engine, 1) == CKV_OK);
  CHECK(rig.read(20, 1, 1) == 0);
  CHECK(rig.stats().num_disk_stopped == 2 && rig.seen.count(1) == 0);
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_WRITE, UINT64_MAX) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_CANCELLED && rig.seen.at(1).bytes <= 2 * kPayload);
}

TEST(test_beside_reads_at_most_one_write_is_under_way) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, 0) == CKV_OK);
  CHECK(rig.submit_disk(CKV_READ, 8, 1, 1, 1) == CKV_OK);
  rig.until_stopped(1);
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_WRITE, 0) == CKV_OK);
  CHECK(rig.submit_many(CKV_WRITE, 0, {2, 3, 4, 5}, {2, 3, 4, 5}, 2) == CKV_OK);
  rig.until_stopped(2);
  uint64_t calls = rig.stats().num_disk_calls;
  CHECK(rig.submit_disk(CKV_READ, 10, 1, 1, 3) == CKV_OK);
  rig.until_stopped(3);
  CHECK(rig.stats().num_disk_calls == calls + 1);  // the read; no second write went before it
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, UINT64_MAX) == CKV_OK);
  rig.until_stopped(2);  // nobody reads any more
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_WRITE, UINT64_MAX) == CKV_OK);
  for (uint64_t tag : {1, 2, 3}) {
    CHECK(rig.finish(tag).status == CKV_DONE);
  }
}

TEST(test_two_users_of_a_host_slot_or_a_disk_slot_conflict_if_one_writes_it) {
  TempFile file;
  DiskRig rig;
  rig.fill(1);
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1) && rig.write(2, 2, 2));
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_WRITE, 0) == CKV_OK);
  CHECK(rig.submit_disk(CKV_WRITE, 0, 3, 1, 1) == CKV_OK);
  rig.until_stopped(1);
  CHECK(rig.submit(CKV_LOAD, {5}, {0}, 2) == CKV_OK);   // reads what the write reads
  CHECK(rig.submit(CKV_STORE, {5}, {1}, 3) == CKV_OK);  // writes it
  CHECK(rig.submit_disk(CKV_READ, 0, 2, 2, 4) == CKV_OK);
  CHECK(rig.submit_disk(CKV_WRITE, 8, 3, 9, 5) == CKV_OK);  // the disk slot
  CHECK(rig.submit_disk(CKV_READ, 10, 3, 1, 6) == CKV_OK);
  CHECK(rig.finish(2).status == CKV_DONE);
  for (uint64_t tag : {3, 4, 5, 6}) {
    CHECK(rig.finish(tag).status == CKV_FAILED && rig.seen.at(tag).error == CKV_EINVAL);
  }
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_WRITE, UINT64_MAX) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_DONE);
  CHECK(rig.read(10, 3, 1) == 0 && rig.submit(CKV_STORE, {5}, {1}, 7) == CKV_OK);
  CHECK(rig.finish(7).status == CKV_DONE);
  Ids twice = {20, 20};
  int32_t disk_slot = 3;
  std::vector<uint8_t> key = key_of(1);
  CHECK(ckv_disk_submit(rig.disk, CKV_READ, twice.data(), &disk_slot, key.data(), kKeyBytes,
                        nullptr, 1, 8) == CKV_OK);
  CHECK(rig.finish(8).error == CKV_EINVAL);
}

TEST(test_what_a_read_brought_has_no_sum_of_before) {
  ckv_config config = sim_config();
  config.checksum_every = 1;
  TempFile file;
  DiskRig rig(config);
  rig.fill(1);
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
  CHECK(rig.submit(CKV_STORE, {0, 1}, {8, 9}, 1) == CKV_OK && rig.finish(1).status == CKV_DONE);
  CHECK(rig.read(8, 1, 1) == 0);
  CHECK(rig.submit(CKV_LOAD, {2, 3}, {8, 9}, 2) == CKV_OK && rig.finish(2).status == CKV_DONE);
}

TEST(test_arguments_of_a_disk_are_checked) {
  TempFile file;
  DiskRig rig;
  ckv_disk_config config = disk_config();
  auto refused = [&](ckv_disk_config changed) { return rig.open(file, changed) == CKV_EINVAL; };
  for (int field = 0; field < 5; ++field) {
    ckv_disk_config bad = config;
    (field == 0   ? bad.size
     : field == 1 ? bad.flags
     : field == 2 ? bad.num_threads
                  : bad.slot_blocks) = 4096;
    if (field == 4) {
      bad = config;
      bad.num_slots = 0;
    }
    CHECK(refused(bad));
  }
  CHECK(ckv_disk_open(rig.engine, nullptr, nullptr, &config, &rig.disk) == CKV_EINVAL);
  CHECK(ckv_disk_open(rig.engine, file.path.c_str(), nullptr, &config, nullptr) == CKV_EINVAL);
  CHECK(ckv_disk_open(rig.engine, file.folder.c_str(), nullptr, &config, &rig.disk) == CKV_EIO);
  CHECK(rig.open(file) == CKV_OK);
  CHECK(rig.submit_disk(CKV_STORE, 0, 0, 1, 1) == CKV_EINVAL);
  CHECK(rig.submit_disk(CKV_READ, 0, kDiskSlots, 1, 1) == CKV_EINVAL);
  CHECK(rig.submit_disk(CKV_READ, 95, 0, 1, 1) == CKV_EINVAL);
  CHECK(rig.submit_disk(CKV_WRITE, -1, 0, 1, 1) == CKV_EINVAL);
  CHECK(ckv_disk_submit(nullptr, CKV_READ, nullptr, nullptr, nullptr, 1, nullptr, 0, 1) ==
        CKV_EINVAL);
  CHECK(ckv_disk_submit(rig.disk, CKV_READ, nullptr, nullptr, nullptr, 1, nullptr, 1, 1) ==
        CKV_EINVAL);
  CHECK(ckv_disk_submit(rig.disk, CKV_READ, nullptr, nullptr, nullptr, 41, nullptr, 0, 1) ==
        CKV_EINVAL);
  CHECK(ckv_sim_disk_stop(rig.engine, 6, 0) == CKV_EINVAL);
  CHECK(ckv_sim_disk_fail_at(rig.engine, -1, 0, 0, 0) == CKV_EINVAL);
}

// Of an open, and of a write and a read: each allocation in turn cannot be had.
TEST(test_without_memory_an_open_or_a_transfer_is_refused_and_the_next_one_works) {
  TempFile file;
  DiskRig rig;
  int64_t num_open = 0;
  for (int code = CKV_ENOMEM; code == CKV_ENOMEM; ++num_open) {
    num_allocations_left = num_open;
    code = rig.open(file);
    num_allocations_left = -1;
    CHECK(code == CKV_OK || code == CKV_ENOMEM);
  }
  CHECK(num_open > 5 && rig.write(0, 1, 1));
  for (int direction : {CKV_WRITE, CKV_READ}) {
    int64_t num_refused = 0;
    for (int code = CKV_ENOMEM; code == CKV_ENOMEM; ++num_refused) {
      Ids slots = {0, 1};
      int32_t disk_slot = 1;
      std::vector<uint8_t> key = key_of(1);
      num_allocations_left = num_refused;
      code = ckv_disk_submit(rig.disk, direction, slots.data(), &disk_slot, key.data(), kKeyBytes,
                             nullptr, 1, static_cast<uint64_t>(direction));
      num_allocations_left = -1;
    }
    CHECK(num_refused > 3 && rig.finish(static_cast<uint64_t>(direction)).status == CKV_DONE);
  }
}

TEST(test_a_fork_may_not_use_the_disk) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK);
  pid_t child = fork();
  if (child == 0) {
    ckv_disk_state state{};
    state.size = sizeof state;
    bool is_refused = rig.submit_disk(CKV_READ, 0, 0, 1, 1) == CKV_EFORK &&
                      ckv_disk_reset(rig.disk) == CKV_EFORK &&
                      ckv_disk_get_state(rig.disk, &state) == CKV_EFORK &&
                      ckv_disk_close(rig.disk, 0) == CKV_EFORK;
    _exit(is_refused ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

}  // namespace
