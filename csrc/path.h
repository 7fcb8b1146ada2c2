// Which way a trunk is given to the driver.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ckv.h"

namespace ckv {

// Where one kernel beats a batch of copies, on the H100 of vLLM PR 42212: loads of at least so many
// pieces that are smaller than this on average. Above it a kernel only takes processors from the
// step. On an H200 the bound lies between 16 and 32 KiB (bench/copy_engine/gpu.md), and a decoding
// step takes 2.5 times as long beside a kernel that stores, so that must be asked for.
constexpr size_t kMinGathered = 16;
constexpr uint64_t kMaxGatheredBytes = 28 * 1024;

// `paths`: bit p is set if CKV_PATH_ p can be used in this direction; LOOP always can. `wanted` is
// taken if it can be used, AUTO leaves the choice to the rules.
inline int choose_path(int direction, size_t num_descriptors, uint64_t bytes, uint32_t paths,
                       int wanted) {
  auto has = [paths](int path) { return (paths & 1U << path) != 0; };
  if (wanted != CKV_PATH_AUTO && has(wanted)) {
    return wanted;
  }
  if (num_descriptors <= 1) {
    return CKV_PATH_LOOP;  // a plain copy: a batch of one costs more to set up
  }
  bool is_small = num_descriptors >= kMinGathered && bytes < kMaxGatheredBytes * num_descriptors;
  if (direction == CKV_LOAD && is_small && has(CKV_PATH_GATHER)) {
    return CKV_PATH_GATHER;
  }
  return has(CKV_PATH_BATCH) ? CKV_PATH_BATCH : CKV_PATH_LOOP;
}

// Whether a copy call's code may mean that this machine cannot do `path`. Then the trunk is issued
// again another way: on the same stream, so after what may have been queued, and the same bytes to
// the same places. LOOP has nothing behind it: it fails the transfer.
constexpr bool is_path_at_fault(int path, int code) {
  constexpr int kInvalidValue = 1;
  constexpr int kNoBinary = 209;  // of a kernel for this device
  constexpr int kNotFound = 500;
  constexpr int kNoLaunchResources = 701;
  constexpr int kNotSupported = 801;
  if (path == CKV_PATH_GATHER && (code == kNoBinary || code == kNoLaunchResources)) {
    return true;
  }
  return path != CKV_PATH_LOOP &&
         (code == kInvalidValue || code == kNotFound || code == kNotSupported);
}

}  // namespace ckv
