// A reset amid reads, writes and scans; what the next open finds, and that none finds too much.
#include <cerrno>
#include <set>

#include "disk_rig.h"

namespace {

std::set<int32_t> slots_of(const std::vector<ckv_disk_entry> &entries) {
  std::set<int32_t> slots;
  for (const ckv_disk_entry &entry : entries) {
    CHECK(slots.insert(entry.slot).second);
  }
  return slots;
}

TEST(test_after_a_reset_nothing_of_before_is_read) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
  CHECK(ckv_disk_reset(rig.disk) == CKV_OK);
  rig.until_ready();
  CHECK(rig.read(4, 1, 1) == CKV_EMISSING);
  CHECK(rig.write(0, 1, 1) && rig.read(4, 1, 1) == 0);
}

TEST(test_between_a_reset_and_its_durable_superblock_transfers_are_cancelled_at_once) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_SYNC, 0) == CKV_OK);
  CHECK(ckv_disk_reset(rig.disk) == CKV_OK);
  rig.until_stopped(1);
  CHECK(rig.state().is_ready == 0);
  CHECK(rig.move(CKV_WRITE, 0, 2, 2).status == CKV_CANCELLED && rig.read(4, 1, 1) == 1);
  CHECK(ckv_disk_reset(rig.disk) == CKV_OK);  // another one before the first is durable
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_SYNC, 2) == CKV_OK);
  rig.until_stopped(1);  // the first's two calls are over: the second's is asked for
  CHECK(rig.state().is_ready == 0 && rig.read(4, 1, 1) == 1);
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_SYNC, UINT64_MAX) == CKV_OK);
  rig.until_ready();
  CHECK(rig.read(4, 1, 1) == CKV_EMISSING && rig.write(0, 1, 1) && rig.read(4, 1, 1) == 0);
}

TEST(test_what_was_under_way_or_queued_at_a_reset_is_not_done_and_not_there_after_it) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, 0) == CKV_OK);
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_WRITE, 0) == CKV_OK);
  CHECK(rig.submit_disk(CKV_READ, 8, 1, 1, 1) == CKV_OK);
  CHECK(rig.submit_many(CKV_WRITE, 0, {2, 3, 4}, {2, 3, 4}, 2) == CKV_OK);
  CHECK(rig.submit_disk(CKV_WRITE, 12, 5, 5, 3) == CKV_OK);
  rig.until_stopped(2);
  CHECK(ckv_disk_reset(rig.disk) == CKV_OK);
  CHECK(rig.finish(3).status == CKV_CANCELLED);
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_WRITE, UINT64_MAX) == CKV_OK);
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, UINT64_MAX) == CKV_OK);
  CHECK(rig.finish(1).status == CKV_CANCELLED && rig.finish(2).status == CKV_CANCELLED);
  rig.until_ready();
  for (int32_t slot : {1, 2, 3, 4, 5}) {
    CHECK(rig.read(8, slot, static_cast<uint32_t>(slot)) == CKV_EMISSING);
  }
}

// The lane may hand it over only when the reset is durable: then it must not be written in the new
// generation.
TEST(test_what_was_submitted_before_a_reset_never_comes_after_it) {
  for (int round = 0; round < 200; ++round) {
    TempFile file;
    DiskRig rig;
    CHECK(rig.open(file) == CKV_OK);
    rig.make(0, 1);
    CHECK(rig.submit_disk(CKV_WRITE, 0, 1, 1, 1) == CKV_OK);
    CHECK(ckv_disk_reset(rig.disk) == CKV_OK);
    rig.until_ready();
    rig.finish(1);  // as cancelled, or done before
    CHECK(rig.read(8, 1, 1) == CKV_EMISSING);
  }
}

TEST(test_a_superblock_that_cannot_be_written_ends_the_disk) {
  for (int entry : {CKV_SIM_DISK_WRITE, CKV_SIM_DISK_SYNC}) {
    TempFile file;
    DiskRig rig;
    CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
    CHECK(ckv_sim_disk_fail_at(rig.engine, entry, 1, 1, EIO) == CKV_OK);
    CHECK(ckv_disk_reset(rig.disk) == CKV_OK);
    while (rig.state().error == 0) {
      usleep(50);
    }
    CHECK(rig.state().error == CKV_EIO && rig.state().is_ready == 0 && rig.state().why[0] != '\0');
    CHECK(rig.read(4, 1, 1) == CKV_EIO && !rig.write(0, 2, 2));
    CHECK(ckv_disk_close(rig.disk, kLong) == CKV_OK);
  }
}

TEST(test_the_next_open_finds_each_slot_once_and_none_of_a_reset_file) {
  TempFile file;
  for (bool is_reset : {false, true}) {
    {
      DiskRig rig;
      CHECK(rig.open(file) == CKV_OK && rig.found().empty());
      for (int32_t slot : {1, 4, 9}) {
        CHECK(rig.write(0, slot, static_cast<uint32_t>(slot)));
      }
      if (is_reset) {
        CHECK(ckv_disk_reset(rig.disk) == CKV_OK);
        rig.until_ready();
        CHECK(rig.write(0, 2, 2));
      }
    }
    DiskRig rig;
    CHECK(rig.open(file) == CKV_OK && (rig.state().was_kept != 0) == !is_reset);
    CHECK(slots_of(rig.found()) == (is_reset ? std::set<int32_t>{} : std::set<int32_t>{1, 4, 9}));
    for (int32_t slot : {1, 4, 9}) {
      CHECK(rig.read(4, slot, static_cast<uint32_t>(slot)) == (is_reset ? CKV_EMISSING : 0));
    }
    CHECK(rig.read(4, 2, 2) == CKV_EMISSING);
    ckv_disk_reset(rig.disk);
    rig.until_ready();
  }
}

TEST(test_a_reset_whose_superblock_is_still_to_be_written_at_the_close_is_durable) {
  TempFile file;
  {
    DiskRig rig;
    CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
    CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, 0) == CKV_OK);
    for (uint64_t tag = 1; tag <= 4; ++tag) {  // all threads
      CHECK(rig.submit_disk(CKV_READ, static_cast<int32_t>(2 * tag), 1, 1, tag) == CKV_OK);
    }
    rig.until_stopped(4);
    CHECK(ckv_disk_reset(rig.disk) == CKV_OK && ckv_disk_close(rig.disk, 0) == CKV_TIMEOUT);
    CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, UINT64_MAX) == CKV_OK);
    CHECK(ckv_disk_close(rig.disk, kLong) == CKV_OK);
  }
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK && rig.found().empty() && rig.read(4, 1, 1) == CKV_EMISSING);
}

TEST(test_a_slot_that_is_written_before_the_scan_is_not_found_as_what_it_was) {
  TempFile file;
  {
    DiskRig rig;
    CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1) && rig.write(0, 4, 4));
  }
  DiskRig rig;
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, 3) == CKV_OK);  // the open reads twice
  CHECK(rig.open(file) == CKV_OK);
  rig.until_stopped(1);
  CHECK(rig.write(0, 4, 40) && rig.state().is_scanned == 0);
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, UINT64_MAX) == CKV_OK);
  CHECK(slots_of(rig.found()) == std::set<int32_t>{1});
  CHECK(rig.read(4, 4, 40) == 0);
}

TEST(test_a_scan_amid_a_reset_finds_nothing) {
  TempFile file;
  {
    DiskRig rig;
    CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1));
  }
  DiskRig rig;
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, 3) == CKV_OK);
  CHECK(rig.open(file) == CKV_OK);
  rig.until_stopped(1);
  CHECK(ckv_disk_reset(rig.disk) == CKV_OK);
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, UINT64_MAX) == CKV_OK);
  CHECK(rig.found().empty());
}

TEST(test_reads_do_not_wait_for_the_scan_and_a_header_that_cannot_be_read_is_no_slot) {
  TempFile file;
  {
    DiskRig rig;
    CHECK(rig.open(file) == CKV_OK && rig.write(0, 1, 1) && rig.write(0, 2, 2));
  }
  DiskRig rig;
  CHECK(ckv_sim_disk_fail_at(rig.engine, CKV_SIM_DISK_READ, 3, 1, EIO) == CKV_OK);  // slot 1's
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, 8) == CKV_OK);
  CHECK(rig.open(file) == CKV_OK);
  rig.until_stopped(1);  // the scan hangs, in one of four threads
  CHECK(ckv_sim_disk_stop(rig.engine, CKV_SIM_DISK_READ, UINT64_MAX) == CKV_OK);
  CHECK(rig.read(4, 1, 1) == 0);
  CHECK(slots_of(rig.found()) == std::set<int32_t>{2});
}

}  // namespace
