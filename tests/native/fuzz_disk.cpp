// Random superblocks and headers, and random arguments of ckv_disk_ calls: no crash, no hang, no
// transfer lost, and nothing found that is out of bounds.
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <set>
#include <vector>

#include "disk_rig.h"
#include "fuzz.h"

namespace {

using fuzz::Bytes;

size_t num_kept = 0;  // of all runs: one that never takes a file over tests little
size_t num_found = 0;
size_t num_done = 0;

// Changes some bytes of a struct in the file, and often makes its sum right again: then the fields
// themselves are tried, and not only the sum.
template <typename Struct>
void change(const TempFile &file, uint64_t offset, Bytes &input) {
  std::vector<uint8_t> page = file.get(offset, ckv::kPage);
  for (int i = 1 + input.byte() % 4; i > 0; --i) {
    page[input.byte() % sizeof(Struct)] = input.byte();
  }
  Struct made;
  std::memcpy(&made, page.data(), sizeof made);
  if (!input.once_in(4)) {
    ckv::seal(&made);
  }
  std::memcpy(page.data(), &made, sizeof made);
  file.put(offset, page);
}

class Session {
 public:
  explicit Session(Bytes &input) : input_(input) {}

  void run() {
    make_file();
    while (input_.once_in(2)) {
      change<ckv::Superblock>(file_, input_.once_in(2) ? 0 : ckv::kPage, input_);
    }
    for (int32_t slot = 0; slot < 4; ++slot) {
      if (input_.once_in(2)) {
        change<ckv::SlotHeader>(file_, slot_offset(static_cast<uint64_t>(slot)), input_);
      }
    }
    DiskRig rig;
    ckv_disk_config config = disk_config();
    config.num_slots = input_.once_in(8) ? input_.id(kDiskSlots) : config.num_slots;
    config.slot_blocks = input_.once_in(8) ? input_.byte() : config.slot_blocks;
    config.num_threads = input_.byte() % 5;
    config.flags = input_.once_in(8) ? input_.byte() : config.flags;
    if (config.num_slots > 4096 || rig.open(file_, config) != CKV_OK) {
      return;
    }
    num_kept += rig.state().was_kept != 0 ? 1 : 0;
    num_slots_ = config.num_slots;
    slot_blocks_ = config.slot_blocks;
    look_at(rig.found());
    for (int i = 0; i < 60 && !input_.empty(); ++i) {
      call(rig);
    }
    finish(rig);
  }

 private:
  void make_file() {
    DiskRig rig;
    CHECK(rig.open(file_) == CKV_OK);
    for (int32_t slot = 0; slot < 4; ++slot) {
      CHECK(rig.write(0, slot, static_cast<uint32_t>(slot)));
    }
  }

  void look_at(const std::vector<ckv_disk_entry> &found) {
    std::set<int32_t> slots;
    for (const ckv_disk_entry &entry : found) {
      CHECK(entry.slot >= 0 && entry.slot < num_slots_ && slots.insert(entry.slot).second);
      CHECK(entry.key_bytes > 0 && entry.key_bytes <= CKV_MAX_KEY);
    }
    num_found += found.size();
  }

  void call(DiskRig &rig) {
    switch (input_.byte() % 12) {
      case 0:
        if (input_.once_in(4)) {
          ckv_disk_reset(rig.disk);
        }
        return;
      case 1:
        rig.state();
        return;
      case 2:
        ckv_cancel(rig.engine, input_.byte());
        return;
      case 3:
        ckv_sim_disk_fail_at(rig.engine, input_.byte() % 8 - 1, input_.byte() % 8,
                             input_.byte() % 3, 1 + input_.byte() % 40);
        return;
      case 4:
        ckv_sim_disk_tear(rig.engine, input_.byte() % 4, input_.byte() * uint64_t{512},
                          input_.byte() % 2);
        return;
      case 5:
        if (input_.once_in(8)) {
          ckv_disk_close(rig.disk, input_.byte());
        }
        return;
      case 6:
        rig.poll();
        return;
      default:
        return submit(rig);
    }
  }

  void submit(DiskRig &rig) {
    std::array<int32_t, 4> disk_slots;
    std::array<uint8_t, 4 * 64> keys{};
    std::vector<int32_t> slots(disk_slots.size() * slot_blocks_);
    size_t n = input_.byte() % (disk_slots.size() + 1);
    for (size_t i = 0; i < n; ++i) {
      disk_slots[i] = input_.id(kDiskSlots);
      keys[i * kKeyBytes] = static_cast<uint8_t>(disk_slots[i]);
    }
    for (size_t i = 0; i < n * slot_blocks_; ++i) {
      slots[i] = input_.once_in(64) ? static_cast<int32_t>(input_.number()) - 1
                                    : static_cast<int32_t>(tag_ * 8 + i) % rig.shape.num_slots;
    }
    n = input_.once_in(32) ? input_.number() << 32 | 4096 : n;  // refused before they are read
    size_t key_bytes = input_.once_in(16) ? input_.byte() % 64 : kKeyBytes;
    int direction = input_.once_in(16) ? input_.byte() : 2 + input_.byte() % 2;
    int code = ckv_disk_submit(input_.once_in(32) ? nullptr : rig.disk, direction,
                               input_.once_in(32) ? nullptr : slots.data(), disk_slots.data(),
                               keys.data(), key_bytes, nullptr, n, tag_);
    CHECK(code <= 0 && code != CKV_EINTERNAL);
    num_accepted_ += code == CKV_OK ? 1 : 0;
    ++tag_;
  }

  void finish(DiskRig &rig) {
    for (uint64_t tag = input_.byte() % 4; tag < tag_; ++tag) {  // the close finds some unbegun
      CHECK(ckv_wait(rig.engine, tag, kLong) == CKV_OK);
    }
    CHECK(ckv_close(rig.engine, kLong) == CKV_OK);
    rig.poll();
    CHECK(rig.seen.size() == num_accepted_ && *ckv_pending_word(rig.engine) == 0);
    for (const auto &[tag, done] : rig.seen) {
      CHECK((done.status == CKV_FAILED) == (done.error != 0));
      CHECK(done.status != CKV_DONE || rig.disk_errors.count(tag) == 0);
      num_done += done.status == CKV_DONE ? 1 : 0;
    }
  }

  Bytes &input_;
  TempFile file_;
  int32_t num_slots_ = 0;
  size_t slot_blocks_ = 0;
  uint64_t tag_ = 0;
  size_t num_accepted_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Bytes input(data, size);
  Session(input).run();
  return 0;
}

#ifndef CKV_LIBFUZZER
int main(int argc, char **argv) {
  int num_runs = fuzz::run(argc, argv, 100, 700);
  std::printf("%d runs passed, %zu files kept, %zu slots found, %zu transfers done\n", num_runs,
              num_kept, num_found, num_done);
  return num_kept > 0 && num_found > 0 && num_done > static_cast<size_t>(num_runs) / 4 ? 0 : 1;
}
#endif
