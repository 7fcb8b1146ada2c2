// Where threads run and where memory lies: next to the device, and not on the step's core.
#pragma once

#include <cstdint>
#include <set>
#include <string>

namespace ckv {

using CpuSet = std::set<int>;

// The kernel's "0-3,8,10-11"; what is no such list is the empty set.
CpuSet parse_cpus(const std::string &list);

// The CPUs of a NUMA node; empty if there is no such node.
CpuSet node_cpus(int node);

// The NUMA node of a PCI device, named as CUDA does ("0000:4B:00.0"); -1 if that is not known.
int numa_node_of(const std::string &pci_id, const std::string &root = "/sys/bus/pci/devices");

// What any thread of this process may run on. A framework that pins its main thread narrows that
// thread's mask, and a new thread inherits it; the other threads still show what there is.
CpuSet process_cpus();

// `allowed` on `node`; all of `allowed` if nothing of it is there.
CpuSet near(const CpuSet &allowed, const CpuSet &node);

// Where the lane runs: near the device, but not where its opener is pinned if another CPU is free.
CpuSet lane_cpus(const CpuSet &process, const CpuSet &node, const CpuSet &opener);

// Moves the calling thread. A system that refuses leaves it where it is: slower, not wrong.
void run_on(const CpuSet &cpus);

// On a thread of the engine, which has inherited its opener's mask. Never throws.
void place_thread(int node) noexcept;

// Pages of the range will come from `node` while it has some. A container may forbid it: then they
// come from the node of the thread that touches them first.
void prefer_node(void *base, uint64_t bytes, int node);

}  // namespace ckv
