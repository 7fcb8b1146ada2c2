#include "placement.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>
#include <vector>

namespace ckv {

namespace {

constexpr int kMaxCpu = 1 << 16;
constexpr int kMaxNode = 1024;
constexpr int kPreferred = 1;  // MPOL_PREFERRED; numaif.h belongs to libnuma, which is not needed

// "Cpus_allowed_list:" of a thread's status file.
CpuSet thread_cpus(const std::string &status) {
  std::ifstream file(status);
  const std::string key = "Cpus_allowed_list:";
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) == 0) {
      return parse_cpus(line.substr(key.size()));
    }
  }
  return {};
}

}  // namespace

CpuSet parse_cpus(const std::string &list) {
  CpuSet cpus;
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    std::istringstream range(word);
    int first = -1;
    int last = -1;
    if (!(range >> first) || first < 0) {
      return {};
    }
    if (range.peek() == '-') {
      range.get();
      range >> last;
    } else {
      last = first;
    }
    if (last < first || last >= kMaxCpu) {
      return {};
    }
    for (int cpu = first; cpu <= last; ++cpu) {
      cpus.insert(cpu);
    }
  }
  return cpus;
}

int numa_node_of(const std::string &pci_id, const std::string &root) {
  std::string name = pci_id;
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::ifstream file(root + "/" + name + "/numa_node");
  int node = -1;  // what the kernel says of a machine with one node, too
  return file >> node && node >= 0 && node < kMaxNode ? node : -1;
}

CpuSet node_cpus(int node) {
  std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
  std::string list;
  std::getline(file, list);
  return parse_cpus(list);
}

CpuSet process_cpus() {
  CpuSet cpus;
  std::error_code ignored;
  // Threads come and go meanwhile; one that is gone adds nothing.
  for (std::filesystem::directory_iterator task("/proc/self/task", ignored), end;
       !ignored && task != end; task.increment(ignored)) {
    cpus.merge(thread_cpus(task->path().string() + "/status"));
  }
  return cpus;
}

CpuSet near(const CpuSet &allowed, const CpuSet &node) {
  CpuSet both;
  std::set_intersection(allowed.begin(), allowed.end(), node.begin(), node.end(),
                        std::inserter(both, both.end()));
  return both.empty() ? allowed : both;
}

CpuSet lane_cpus(const CpuSet &process, const CpuSet &node, const CpuSet &opener) {
  CpuSet local = near(process, node);
  bool is_pinned = !std::includes(opener.begin(), opener.end(), process.begin(), process.end());
  if (!is_pinned) {
    return local;
  }
  CpuSet others;
  std::set_difference(local.begin(), local.end(), opener.begin(), opener.end(),
                      std::inserter(others, others.end()));
  return others.empty() ? local : others;
}

void run_on(const CpuSet &cpus) {
  if (cpus.empty()) {
    return;
  }
  int count = *cpus.rbegin() + 1;
  std::vector<cpu_set_t> mask(CPU_ALLOC_SIZE(count) / sizeof(cpu_set_t) + 1);
  size_t bytes = mask.size() * sizeof(cpu_set_t);
  CPU_ZERO_S(bytes, mask.data());
  for (int cpu : cpus) {
    CPU_SET_S(cpu, bytes, mask.data());
  }
  sched_setaffinity(0, bytes, mask.data());
}

void place_thread(int node) noexcept {
  try {
    CpuSet opener = thread_cpus("/proc/thread-self/status");
    CpuSet wanted = lane_cpus(process_cpus(), node_cpus(node), opener);
    if (wanted != opener) {
      run_on(wanted);
    }
  } catch (const std::exception &) {
    // No memory for the sets: the thread runs where it is.
  }
}

void prefer_node(void *base, uint64_t bytes, int node) {
  if (node < 0 || node >= kMaxNode) {
    return;
  }
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kMaxNode / kBits> mask{};
  size_t at = static_cast<size_t>(node);
  mask[at / kBits] |= 1UL << (at % kBits);
  syscall(SYS_mbind, base, bytes, kPreferred, mask.data(), kMaxNode + 1, 0U);
}

}  // namespace ckv
