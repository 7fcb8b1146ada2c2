// What the engine did since it was opened, for ckv_get_stats. Relaxed words: whoever polled or
// waited for a transfer sees it counted in full, for its report was made after.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ckv.h"

namespace ckv {

class Counter {
 public:
  void add(uint64_t n) { value_.fetch_add(n, std::memory_order_relaxed); }
  void sub(uint64_t n) { value_.fetch_sub(n, std::memory_order_relaxed); }
  // One writer only.
  void raise(uint64_t n) { value_.store(std::max(get(), n), std::memory_order_relaxed); }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

constexpr size_t kNumPaths = CKV_PATH_GATHER + 1;

// Names and meanings are those of ckv_stats; the pairs are by direction.
struct Counters {
  Counter num_bytes[2];
  Counter num_pieces[2];
  Counter num_descriptors[2];
  Counter num_trunks[2][kNumPaths];
  Counter bytes_in_flight[2];
  Counter issue_ns[2];
  Counter max_issue_ns[2];
  Counter num_issued[2];
  Counter num_summed;
  Counter num_checked;
  Counter num_corrupt;
  std::atomic<uint32_t> given_up{0};  // bit p: CKV_PATH_ p failed and is not used any more

  void get(ckv_stats *out) const {
    for (int direction : {CKV_LOAD, CKV_STORE}) {
      out->num_bytes[direction] = num_bytes[direction].get();
      out->num_pieces[direction] = num_pieces[direction].get();
      out->num_descriptors[direction] = num_descriptors[direction].get();
      for (size_t path = 0; path < kNumPaths; ++path) {
        out->num_trunks[direction][path] = num_trunks[direction][path].get();
      }
      out->bytes_in_flight[direction] = bytes_in_flight[direction].get();
      out->issue_ns[direction] = issue_ns[direction].get();
      out->max_issue_ns[direction] = max_issue_ns[direction].get();
      out->num_issued[direction] = num_issued[direction].get();
    }
    out->num_summed = num_summed.get();
    out->num_checked = num_checked.get();
    out->num_corrupt = num_corrupt.get();
  }
};

}  // namespace ckv
