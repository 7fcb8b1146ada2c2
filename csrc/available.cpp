#include "available.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <utility>

namespace ckv {

namespace {

constexpr uint64_t kNone = UINT64_MAX;
constexpr uint64_t kGiB = uint64_t{1} << 30;

uint64_t reserve_of(uint64_t bound) { return std::max(kGiB, bound / 50); }

// The number behind `key` in a file of "key number" lines, kNone without one.
uint64_t read_key(const std::string &path, const std::string &key) {
  std::ifstream file(path);
  std::string word;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    uint64_t value = 0;
    if (words >> word && word == key && words >> value) {
      return value;
    }
  }
  return kNone;
}

// A file with one number; kNone for "max" and for none.
uint64_t read_number(const std::string &path) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : kNone;
}

Room machine_room(const std::string &proc) {
  Room room;
  uint64_t available = read_key(proc + "/meminfo", "MemAvailable:");
  uint64_t total = read_key(proc + "/meminfo", "MemTotal:");
  room.available = available == kNone ? kNone : available * 1024;
  room.reserve = reserve_of(total == kNone ? 0 : total * 1024);
  return room;
}

struct CgroupFiles {
  const char *limit;
  const char *high;  // beyond it the kernel throttles; null: there is none
  const char *usage;
  const char *inactive;
  const char *active;
};

constexpr CgroupFiles kVersion2{"/memory.max", "/memory.high", "/memory.current", "inactive_file",
                                "active_file"};
constexpr CgroupFiles kVersion1{"/memory.limit_in_bytes", nullptr, "/memory.usage_in_bytes",
                                "total_inactive_file", "total_active_file"};

// One level. Usage counts the page cache, which the kernel drops before it kills: the weights just
// read from disk must not look like memory that is gone.
Room level_room(const std::string &folder, const CgroupFiles &files) {
  Room room;
  room.available = kNone;
  uint64_t limit = read_number(folder + files.limit);
  if (files.high != nullptr) {
    limit = std::min(limit, read_number(folder + files.high));
  }
  uint64_t usage = read_number(folder + files.usage);
  if (limit == kNone || usage == kNone) {
    return room;
  }
  for (const char *key : {files.inactive, files.active}) {
    uint64_t cached = read_key(folder + "/memory.stat", key);
    usage -= cached == kNone ? 0 : std::min(usage, cached);
  }
  room.owner = "the memory cgroup";
  room.available = limit - std::min(limit, usage);
  room.reserve = reserve_of(limit);
  return room;
}

void tighten(Room *room, const Room &other) {
  // Compared by what is left behind the reserve; both may be 0 there.
  auto usable = [](const Room &r) { return r.available - std::min(r.available, r.reserve); };
  if (other.available != kNone && usable(other) < usable(*room)) {
    *room = other;
  }
}

// From the process's cgroup up to the mount. A container often sees its own cgroup as the mount and
// another path in /proc: the levels that are not there bound nothing, the mount's does.
void tighten_by_cgroup(Room *room, const std::string &mount, std::string path,
                       const CgroupFiles &files) {
  for (;;) {
    while (!path.empty() && path.back() == '/') {
      path.pop_back();
    }
    tighten(room, level_room(mount + path, files));
    if (path.empty()) {
      return;
    }
    path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
  }
}

bool has_memory(const std::string &controllers) {
  return ("," + controllers + ",").find(",memory,") != std::string::npos;
}

}  // namespace

Room find_room(const MemoryRoots &roots) {
  Room room = machine_room(roots.proc);
  std::ifstream file(roots.proc + "/self/cgroup");
  // "0::/path" is version 2, "4:memory:/path" is version 1.
  for (std::string line; std::getline(file, line);) {
    size_t first = line.find(':');
    size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      tighten_by_cgroup(&room, roots.cgroup, path, kVersion2);
    } else if (has_memory(controllers)) {
      tighten_by_cgroup(&room, roots.cgroup + "/memory", path, kVersion1);
    }
  }
  return room;
}

Intake::Intake(std::function<Room()> look) : look_(std::move(look)) {}

bool Intake::begin(uint64_t bytes) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!look_().fits(bytes_under_way_ + bytes)) {
    if (bytes_under_way_ == 0) {
      return false;
    }
    // Pages that are there already and still counted were in the way, perhaps: look again.
    changed_.wait(lock);
  }
  bytes_under_way_ += bytes;
  return true;
}

void Intake::end(uint64_t bytes) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    bytes_under_way_ -= bytes;
  }
  changed_.notify_all();
}

std::string size_text(uint64_t bytes) {
  constexpr const char *kUnits[] = {"KiB", "MiB", "GiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1024 && unit < 2; ++unit) {
    value /= 1024;
  }
  char text[48];
  std::snprintf(text, sizeof text, "%.1f %s", value, kUnits[unit]);
  return text;
}

}  // namespace ckv
