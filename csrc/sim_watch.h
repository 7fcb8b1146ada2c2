// Watches the memory that copies of the simulator stand on, from when a copy needs it to its
// report.
//
// A device copies whatever lies there when it comes to it. So somebody who writes a store's source
// too early, or a load's destination before its report, corrupts KV and nothing fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "driver.h"

namespace ckv {

class SimWatch {
 public:
  // The bytes as they lie now, of an operation that is the stream's `order`-th. Orders only rise.
  void note(uint64_t order, const void *at, uint64_t bytes);
  // How many ranges of the operations up to `order` have other bytes now. They are forgotten.
  uint64_t settle(uint64_t order, const char *what);
  void forget() { ranges_.clear(); }

 private:
  struct Range {
    uint64_t order;
    const void *at;
    uint64_t bytes;
    uint64_t hash;
  };
  std::deque<Range> ranges_;
};

}  // namespace ckv
