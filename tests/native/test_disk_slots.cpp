// A transfer of many disk slots that does not end well says what became of each.
#include <cerrno>

#include "disk_rig.h"

namespace {

constexpr int32_t kMany = 6;
constexpr int32_t kTarget = 32;  // host slots that reads go to, from here on

// One thread, so that slots are moved in the order of the transfer.
struct InOrder {
  InOrder() {
    ckv_disk_config config = disk_config();
    config.num_threads = 1;
    CHECK(rig.open(file, config) == CKV_OK);
    for (int32_t i = 0; i < kMany; ++i) {
      rig.make(i * static_cast<int32_t>(kSlotBlocks), static_cast<uint32_t>(i));
    }
  }

  int submit(int direction, uint64_t tag) {
    int32_t first = direction == CKV_READ ? kTarget : 0;
    return rig.submit_many(direction, first, range(0, kMany), numbers, tag);
  }
  const Ids &ended(int direction, uint64_t tag, int status, int error) {
    CHECK(submit(direction, tag) == CKV_OK);
    return ended(tag, status, error);
  }
  const Ids &ended(uint64_t tag, int status, int error) {
    const ckv_completion &completion = rig.finish(tag);
    CHECK(completion.status == status && completion.error == error);
    return rig.disk_errors[tag];
  }
  bool holds(int32_t i) {
    return rig.holds(kTarget + i * static_cast<int32_t>(kSlotBlocks), static_cast<uint32_t>(i));
  }

  TempFile file;
  DiskRig rig;
  std::vector<uint32_t> numbers = {0, 1, 2, 3, 4, 5};
};

Ids ends_at(int32_t place, int32_t error) {
  Ids errors(kMany, CKV_UNTRIED);
  std::fill(errors.begin(), errors.begin() + place, 0);
  errors[static_cast<size_t>(place)] = error;
  return errors;
}

TEST(test_what_is_done_names_no_slot) {
  InOrder in;
  CHECK(in.ended(CKV_WRITE, 1, CKV_DONE, 0).empty());
  CHECK(in.ended(CKV_READ, 2, CKV_DONE, 0).empty());
}

TEST(test_a_read_that_fails_has_read_the_slots_before_and_begins_none_behind) {
  InOrder in;
  CHECK(in.ended(CKV_WRITE, 1, CKV_DONE, 0).empty());
  CHECK(ckv_sim_disk_fail_at(in.rig.engine, CKV_SIM_DISK_READ, 2, 1, EIO) == CKV_OK);
  CHECK(in.ended(CKV_READ, 2, CKV_FAILED, CKV_EIO) == ends_at(2, CKV_EIO));
  CHECK(in.rig.seen.at(2).bytes == 2 * kPayload && in.holds(0) && in.holds(1));
}

TEST(test_a_write_that_fails_has_written_the_slots_before) {
  for (auto [code, error] : {std::pair{EIO, CKV_EIO}, std::pair{ENOSPC, CKV_ENOSPC}}) {
    InOrder in;
    CHECK(ckv_sim_disk_fail_at(in.rig.engine, CKV_SIM_DISK_WRITE, 3, 1, code) == CKV_OK);
    CHECK(in.ended(CKV_WRITE, 1, CKV_FAILED, error) == ends_at(3, error));
    CHECK(in.ended(CKV_READ, 2, CKV_FAILED, CKV_EMISSING) == ends_at(3, CKV_EMISSING));
    CHECK(in.holds(0) && in.holds(1) && in.holds(2));
  }
}

TEST(test_wrong_bytes_are_told_from_another_key) {
  InOrder in;
  CHECK(in.ended(CKV_WRITE, 1, CKV_DONE, 0).empty());
  in.file.put(slot_offset(4) + ckv::kPage + 100, {1, 2, 3});
  CHECK(in.ended(CKV_READ, 2, CKV_FAILED, CKV_ECORRUPT) == ends_at(4, CKV_ECORRUPT));
  in.numbers[1] = 77;
  CHECK(in.ended(CKV_READ, 3, CKV_FAILED, CKV_EMISSING) == ends_at(1, CKV_EMISSING));
}

// The third of six slots is under way.
void stop_at_the_third(InOrder &in) {
  CHECK(in.ended(CKV_WRITE, 1, CKV_DONE, 0).empty());
  CHECK(ckv_sim_disk_stop(in.rig.engine, CKV_SIM_DISK_READ, 2) == CKV_OK);
  CHECK(in.submit(CKV_READ, 2) == CKV_OK);
  in.rig.until_stopped(1);
}

TEST(test_a_read_that_is_cancelled_has_read_what_it_had_begun) {
  InOrder in;
  stop_at_the_third(in);
  CHECK(ckv_cancel(in.rig.engine, 2) == CKV_OK);
  for (uint64_t tag : {3, 4}) {  // once the lane has refused both, it has seen the cancel
    CHECK(in.ended(CKV_READ, tag, CKV_FAILED, CKV_EINVAL) == Ids(kMany, CKV_UNTRIED));
  }
  CHECK(ckv_sim_disk_stop(in.rig.engine, CKV_SIM_DISK_READ, UINT64_MAX) == CKV_OK);
  CHECK(in.ended(2, CKV_CANCELLED, 0) == ends_at(3, CKV_UNTRIED));
  CHECK(in.holds(0) && in.holds(1) && in.holds(2));
}

TEST(test_after_a_reset_no_slot_counts_as_read) {
  InOrder in;
  stop_at_the_third(in);
  CHECK(ckv_disk_reset(in.rig.disk) == CKV_OK);
  CHECK(ckv_sim_disk_stop(in.rig.engine, CKV_SIM_DISK_READ, UINT64_MAX) == CKV_OK);
  CHECK(in.ended(2, CKV_CANCELLED, 0) == Ids(kMany, CKV_UNTRIED));
}

TEST(test_what_a_close_leaves_behind_names_no_slot) {
  InOrder in;
  stop_at_the_third(in);
  CHECK(ckv_sim_set_grace(in.rig.engine, 0) == CKV_OK);
  CHECK(ckv_close(in.rig.engine, 0) == CKV_TIMEOUT);
  in.rig.poll();
  CHECK(in.rig.seen.at(2).error == CKV_CLOSED && in.rig.disk_errors.count(2) == 0);
  CHECK(ckv_sim_disk_stop(in.rig.engine, CKV_SIM_DISK_READ, UINT64_MAX) == CKV_OK);
  while (ckv_disk_close(in.rig.disk, kLong) != CKV_OK) {
  }
}

}  // namespace
