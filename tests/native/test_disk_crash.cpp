// Bytes that are not what was written: torn, flipped, astray, of a process that was killed. None is
// ever taken for KV; and without the payload's sum some would be, so these tests can fail.
#include <signal.h>
#include <sys/wait.h>

#include <random>
#include <set>

#include "disk_rig.h"

namespace {

constexpr uint64_t kSlotBytes = ckv::kPage + kPayload;

ckv_disk_config unsummed() {
  ckv_disk_config config = disk_config();
  config.flags |= CKV_DISK_UNSUMMED;
  return config;
}

// A slot in two versions on disk, and what the engine makes of what a test puts in their place.
struct Slot {
  explicit Slot(ckv_disk_config config) {
    CHECK(rig.open(file, config) == CKV_OK);
    CHECK(rig.write(0, 3, 1));
    before = file.get(slot_offset(3), kSlotBytes);
    CHECK(rig.write(0, 3, 2));
    after = file.get(slot_offset(3), kSlotBytes);
  }

  // How many of the two keys are read as DONE with other bytes than theirs.
  int num_wrong(const std::vector<uint8_t> &bytes) {
    file.put(slot_offset(3), bytes);
    int num_wrong = 0;
    for (uint32_t number : {1U, 2U}) {
      ckv_completion done = rig.move(CKV_READ, 4, 3, number);
      CHECK(done.status == CKV_DONE || done.error == CKV_ECORRUPT || done.error == CKV_EMISSING);
      num_wrong += done.status == CKV_DONE && !rig.holds(4, number) ? 1 : 0;
      num_done += done.status == CKV_DONE ? 1 : 0;
    }
    return num_wrong;
  }

  TempFile file;
  DiskRig rig;
  std::vector<uint8_t> before;
  std::vector<uint8_t> after;
  int num_done = 0;
};

// Any mixture of old and new pieces, as a disk without power leaves it.
int num_wrong_of_torn(Slot &slot, int rounds) {
  std::mt19937 random(7);
  int num_wrong = 0;
  for (int i = 0; i < rounds; ++i) {
    std::vector<uint8_t> mixed = slot.before;
    size_t unit = i % 2 == 0 ? 512 : 4096;
    for (size_t at = 0; at < kSlotBytes; at += unit) {
      if (random() % 2 == 0) {
        std::copy_n(slot.after.begin() + static_cast<int64_t>(at), unit,
                    mixed.begin() + static_cast<int64_t>(at));
      }
    }
    num_wrong += slot.num_wrong(mixed);
  }
  return num_wrong;
}

int num_wrong_of_flipped(Slot &slot, int rounds) {
  std::mt19937 random(11);
  int num_wrong = 0;
  for (int i = 0; i < rounds; ++i) {
    std::vector<uint8_t> flipped = slot.after;
    // Every other one in the header, of which the rest of the page is no part.
    size_t byte =
        i % 2 == 0 ? random() % sizeof(ckv::SlotHeader) : ckv::kPage + random() % kPayload;
    flipped[byte] = static_cast<uint8_t>(flipped[byte] ^ 1U << random() % 8);
    num_wrong += slot.num_wrong(flipped);
  }
  return num_wrong;
}

TEST(test_a_torn_slot_is_never_read_as_right) {
  Slot slot(disk_config());
  CHECK(num_wrong_of_torn(slot, 3000) == 0);
  CHECK(slot.num_done > 0);  // whole ones, of few pieces
}

TEST(test_a_torn_slot_would_be_read_without_the_sum) {
  Slot slot(unsummed());
  CHECK(num_wrong_of_torn(slot, 300) > 100);
}

TEST(test_a_flipped_bit_is_never_read_as_right) {
  Slot slot(disk_config());
  CHECK(num_wrong_of_flipped(slot, 3000) == 0);
  CHECK(slot.num_done == 0);
}

TEST(test_a_flipped_bit_would_be_read_without_the_sum) {
  Slot slot(unsummed());
  CHECK(num_wrong_of_flipped(slot, 300) > 100);
}

// As the machine lost its power amid the write, of which it had said that it is over.
TEST(test_a_write_that_was_lost_in_part_is_a_miss) {
  TempFile file;
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK);
  for (uint64_t bytes = 0; bytes < kSlotBytes; bytes += 512) {
    uint32_t number = static_cast<uint32_t>(bytes) + 1;
    CHECK(rig.write(0, 3, number) && rig.read(4, 3, number) == 0);
    CHECK(ckv_sim_disk_tear(rig.engine, 0, bytes, 0) == CKV_OK);
    CHECK(rig.write(0, 3, number + 1));
    CHECK(rig.read(4, 3, number + 1) == (bytes == 0 ? CKV_EMISSING : CKV_ECORRUPT));
    CHECK(rig.read(4, 3, number) == (bytes == 0 ? 0 : CKV_EMISSING));
  }
}

TEST(test_a_slot_that_was_written_elsewhere_is_corrupt_in_the_read_and_not_found) {
  TempFile file;
  {
    DiskRig rig;
    CHECK(rig.open(file) == CKV_OK && rig.write(0, 3, 1));
    file.put(slot_offset(5), file.get(slot_offset(3), kSlotBytes));
    CHECK(rig.read(4, 5, 1) == CKV_ECORRUPT && rig.read(4, 3, 1) == 0);
  }
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK);
  std::vector<ckv_disk_entry> found = rig.found();
  CHECK(found.size() == 1 && found[0].slot == 3);
}

TEST(test_a_header_is_a_page_of_which_every_byte_of_the_first_128_counts) {
  Slot slot(disk_config());
  for (size_t byte = 0; byte < sizeof(ckv::SlotHeader); ++byte) {
    std::vector<uint8_t> changed = slot.after;
    changed[byte] = static_cast<uint8_t>(~changed[byte]);
    CHECK(slot.num_wrong(changed) == 0 && slot.num_done == 0);
  }
}

// A superblock that is broken in one copy is taken from the other, in both it is no superblock.
TEST(test_one_of_the_two_superblocks_is_enough) {
  for (int broken = 0; broken < 4; ++broken) {
    TempFile file;
    {
      DiskRig rig;
      CHECK(rig.open(file) == CKV_OK && rig.write(0, 3, 1));
    }
    for (uint64_t copy : {0, 1}) {
      if ((broken >> copy & 1) != 0) {
        std::vector<uint8_t> page = file.get(copy * ckv::kPage, ckv::kPage);
        page[10 + static_cast<size_t>(broken)] ^= 4;
        file.put(copy * ckv::kPage, page);
      }
    }
    DiskRig rig;
    CHECK(rig.open(file) == CKV_OK && (rig.state().was_kept != 0) == (broken != 3));
    CHECK(rig.read(4, 3, 1) == (broken == 3 ? CKV_EMISSING : 0));
  }
}

// Another server's life: writes slots for ever. Each key is 1000 times its turn, plus its slot.
[[noreturn]] void write_until_killed(const TempFile &file, int said) {
  DiskRig rig;
  CHECK(rig.open(file) == CKV_OK);
  for (uint32_t turn = 1;; ++turn) {
    for (int32_t slot = 0; slot < kDiskSlots; ++slot) {
      auto first = static_cast<int32_t>(slot * 4);
      uint64_t tag = uint64_t{turn} * 100 + static_cast<uint64_t>(slot);
      rig.make(first, turn * 1000 + static_cast<uint32_t>(slot));
      CHECK(rig.submit_disk(CKV_WRITE, first, slot, turn * 1000 + static_cast<uint32_t>(slot),
                            tag) == CKV_OK);
    }
    for (int32_t slot = 0; slot < kDiskSlots; ++slot) {
      rig.finish(uint64_t{turn} * 100 + static_cast<uint64_t>(slot));
    }
    CHECK(write(said, "x", 1) == 1);
  }
}

TEST(test_of_a_process_killed_amid_its_writes_nothing_wrong_is_found) {
  std::mt19937 random(3);
  size_t num_right = 0;
  TempFile file;
  for (int round = 0; round < 20; ++round) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
      write_until_killed(file, ends[1]);
    }
    close(ends[1]);
    char said = 0;
    CHECK(read(ends[0], &said, 1) == 1);
    usleep(random() % 3000);
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, nullptr, 0) == child);
    close(ends[0]);
    DiskRig rig;
    CHECK(rig.open(file) == CKV_OK && rig.state().was_kept != 0);
    for (const ckv_disk_entry &entry : rig.found()) {
      uint32_t number = 0;
      std::memcpy(&number, entry.key, sizeof number);
      CHECK(entry.key_bytes == kKeyBytes && entry.depth == number);
      CHECK(number % 1000 == static_cast<uint32_t>(entry.slot));
      int code = rig.read(4, entry.slot, number);  // a wrong one ends the test
      CHECK(code == 0 || code == CKV_ECORRUPT);
      num_right += code == 0 ? 1 : 0;
    }
  }
  CHECK(num_right > 200);
}

}  // namespace
