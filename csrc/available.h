// How much memory may be taken before the kernel kills somebody for it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace ckv {

// Where the kernel says so; tests put files of their own there.
struct MemoryRoots {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

// What the tightest bound leaves. Pages that are populated for the pool cannot be taken back, so
// the last ones are never asked for: a reserve of 1 GiB absorbs what others of the process take
// between this look and the next, and 2 % of a large bound keeps the kernel out of direct reclaim
// (its own watermarks grow with the machine). It is a share of the bound, not of the machine: a
// small container on a large machine keeps the small reserve.
struct Room {
  const char *owner = "the machine";
  uint64_t available = 0;
  uint64_t reserve = 0;

  bool fits(uint64_t bytes) const { return available >= reserve && available - reserve >= bytes; }
};

// The tightest of the machine (MemAvailable) and of each memory cgroup (v2 or v1) this process is
// in. Of version 2 also memory.high: beyond it the kernel slows the whole server down. What cannot
// be read bounds nothing.
Room find_room(const MemoryRoots &roots);

// Lets threads of this process take memory at the same time. What one has begun to take shows in
// the next look only in part, so it is counted here until all of it does.
class Intake {
 public:
  explicit Intake(std::function<Room()> look = [] { return find_room(MemoryRoots()); });

  Room look() const { return look_(); }
  // False if there is no room for that much. Waits where only what others take is in the way.
  bool begin(uint64_t bytes);
  // After the pages are there, or were not to be had.
  void end(uint64_t bytes);

 private:
  const std::function<Room()> look_;
  std::mutex mutex_;  // guards what follows; held while it looks, so that no page is missed
  std::condition_variable changed_;
  uint64_t bytes_under_way_ = 0;
};

// "12.0 GiB", "8.0 MiB", "64.0 KiB".
std::string size_text(uint64_t bytes);

}  // namespace ckv
