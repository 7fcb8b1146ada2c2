// How much memory may be taken before the kernel kills somebody for it.
#pragma once

#include <cstdint>
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

// The tighter of the machine (MemAvailable) and of each memory cgroup (v2 or v1) this process is
// in. What cannot be read bounds nothing.
Room find_room(const MemoryRoots &roots);

// "12.0 GiB", "8.0 MiB", "64.0 KiB".
std::string size_text(uint64_t bytes);

}  // namespace ckv
