// A rig with a file on a disk: blocks whose bytes follow from a number, slots named by it.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "disk_format.h"
#include "rig.h"

constexpr size_t kSlotBlocks = 2;
constexpr size_t kKeyBytes = 36;
constexpr uint64_t kBlock = 4096;
constexpr uint64_t kPayload = kSlotBlocks * kBlock;
constexpr int32_t kDiskSlots = 16;

struct TempFile {
  TempFile() : folder(make_folder()), path(folder + "/dp0-rank0.slab") {}
  TempFile(const TempFile &) = delete;
  TempFile &operator=(const TempFile &) = delete;
  ~TempFile() {
    unlink(path.c_str());
    rmdir(folder.c_str());
  }

  static std::string make_folder() {
    const char *parent = std::getenv("TMPDIR");
    std::string name = std::string(parent == nullptr ? "/tmp" : parent) + "/ckv_disk_XXXXXX";
    CHECK(mkdtemp(name.data()) != nullptr);
    return name;
  }

  // The bytes from `offset` on, read or written beside the engine.
  std::vector<uint8_t> get(uint64_t offset, size_t n) const {
    std::vector<uint8_t> bytes(n);
    int fd = open(path.c_str(), O_RDONLY);
    CHECK(fd >= 0 &&
          pread(fd, bytes.data(), n, static_cast<off_t>(offset)) == static_cast<ssize_t>(n));
    close(fd);
    return bytes;
  }
  void put(uint64_t offset, const std::vector<uint8_t> &bytes) const {
    int fd = open(path.c_str(), O_WRONLY);
    CHECK(fd >= 0 && pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset)) ==
                         static_cast<ssize_t>(bytes.size()));
    close(fd);
  }
  uint64_t size() const {
    struct stat seen{};
    CHECK(stat(path.c_str(), &seen) == 0);
    return static_cast<uint64_t>(seen.st_size);
  }

  std::string folder;
  std::string path;
};

inline ckv_disk_config disk_config() {
  ckv_disk_config config{};
  config.size = sizeof config;
  config.flags = CKV_DISK_KEEP;
  config.num_threads = 4;
  config.slot_blocks = kSlotBlocks;
  config.num_slots = kDiskSlots;
  std::fill(std::begin(config.namespace_id), std::end(config.namespace_id), uint8_t{7});
  return config;
}

// Where disk slot i is in the file.
inline uint64_t slot_offset(uint64_t slot) {
  return ckv::kSlotsOffset + slot * (ckv::kPage + kPayload);
}

inline std::vector<uint8_t> key_of(uint32_t number) {
  std::vector<uint8_t> key(kKeyBytes);
  std::memcpy(key.data(), &number, sizeof number);
  return key;
}

struct DiskRig : Rig {
  explicit DiskRig(ckv_config config = sim_config()) : Rig(Shape(), config) {}

  int open(const TempFile &file, ckv_disk_config config = disk_config()) {
    return ckv_disk_open(engine, file.path.c_str(), "{}", &config, &disk);
  }

  uint8_t *slot(int32_t index) { return pool + static_cast<uint64_t>(index) * kBlock; }

  // The bytes that the key `number` stands for, `blocks` of them from host slot `first` on.
  void make(int32_t first, uint32_t number) {
    for (uint64_t i = 0; i < kPayload; ++i) {
      slot(first)[i] = static_cast<uint8_t>(number * 37 + i * 11 + (i >> 9) * (number | 1));
    }
  }
  bool holds(int32_t first, uint32_t number) {
    std::vector<uint8_t> bytes(slot(first), slot(first) + kPayload);
    make(first, number);
    bool same = std::memcmp(bytes.data(), slot(first), kPayload) == 0;
    std::memcpy(slot(first), bytes.data(), kPayload);
    return same;
  }

  int submit_disk(int direction, int32_t first, int32_t disk_slot, uint32_t number, uint64_t tag) {
    return submit_many(direction, first, {disk_slot}, {number}, tag);
  }
  int submit_many(int direction, int32_t first, const Ids &disk_slots,
                  const std::vector<uint32_t> &numbers, uint64_t tag) {
    Ids slots = range(first, first + static_cast<int32_t>(kSlotBlocks * disk_slots.size()));
    std::vector<uint8_t> keys;
    for (uint32_t number : numbers) {
      std::vector<uint8_t> key = key_of(number);
      keys.insert(keys.end(), key.begin(), key.end());
    }
    return ckv_disk_submit(disk, direction, slots.data(), disk_slots.data(), keys.data(), kKeyBytes,
                           numbers.data(), disk_slots.size(), tag);
  }

  // Moves one disk slot from or to host slots `first` on; how that ended.
  ckv_completion move(int direction, int32_t first, int32_t disk_slot, uint32_t number) {
    uint64_t tag = next_tag++;
    CHECK(submit_disk(direction, first, disk_slot, number, tag) == CKV_OK);
    return finish(tag);
  }
  bool write(int32_t first, int32_t disk_slot, uint32_t number) {
    make(first, number);
    return move(CKV_WRITE, first, disk_slot, number).status == CKV_DONE;
  }
  // 0 if it is done and right; a wrong one ends the test.
  int read(int32_t first, int32_t disk_slot, uint32_t number) {
    ckv_completion done = move(CKV_READ, first, disk_slot, number);
    CHECK(done.status != CKV_DONE || holds(first, number));
    return done.status == CKV_DONE ? 0 : done.status == CKV_CANCELLED ? 1 : done.error;
  }

  ckv_disk_state state() {
    ckv_disk_state state{};
    state.size = sizeof state;
    CHECK(ckv_disk_get_state(disk, &state) == CKV_OK);
    return state;
  }
  void until_ready() {
    while (state().is_ready == 0) {
      usleep(50);
    }
  }
  void until_stopped(uint64_t num_calls) {
    while (stats().num_disk_stopped < num_calls) {
      usleep(50);
    }
  }
  std::vector<ckv_disk_entry> found() {
    std::vector<ckv_disk_entry> all;
    std::array<ckv_disk_entry, 3> some;
    bool is_over = false;
    do {
      is_over = state().is_scanned != 0;
      while (size_t n = ckv_disk_scan(disk, some.data(), some.size())) {
        all.insert(all.end(), some.begin(), some.begin() + static_cast<int64_t>(n));
      }
    } while (!is_over);
    return all;
  }

  ckv_disk *disk = nullptr;
  uint64_t next_tag = 100000;
};
