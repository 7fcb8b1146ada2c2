// How long the lane naps before it looks at the driver again.
//
// Each look costs a wake, 20 us of a core in a virtual machine: 2000 naps of 500 us are 4 % of it.
// So a nap is short only while things move: it starts short after each move and doubles up to a
// bound, and the bound rises where nothing has moved for long.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "engine.h"

namespace ckv {

class Naps {
 public:
  enum class Work { NONE, EVENTS, COPIES };  // what is there: nothing, only events, copies too

  static constexpr std::chrono::microseconds kFirst{10};
  static constexpr std::chrono::microseconds kCopy{50};    // a 4 MiB trunk takes 80 us at 50 GB/s
  static constexpr std::chrono::microseconds kEvent{200};  // a step takes milliseconds
  static constexpr std::chrono::microseconds kIdle{500};   // a load is not much later
  static constexpr std::chrono::microseconds kStalled{5000};
  static constexpr std::chrono::milliseconds kLinger{50};  // without work: longer than most steps
  static constexpr std::chrono::milliseconds kStall{100};  // with work: a long step, or a fault

  // `has_moved`: orders were taken, trunks issued or finished since the last call.
  std::chrono::microseconds next(uint64_t now_ns, bool has_moved, Work work) {
    if (has_moved) {
      moved_ns_ = now_ns;
      nap_ = std::chrono::microseconds::zero();
      if (work != Work::NONE) {
        return nap_;
      }
    }
    std::chrono::nanoseconds still(now_ns - moved_ns_);
    if (work == Work::NONE && still >= kLinger) {
      return kForEver;
    }
    nap_ = std::min(std::max(nap_ * 2, kFirst), bound(still, work));
    return nap_;
  }

 private:
  static std::chrono::microseconds bound(std::chrono::nanoseconds still, Work work) {
    // To wake a sleeping thread takes the waker microseconds, in a virtual machine some tens. So
    // while steps come with transfers the lane naps between them, and they need not wake it.
    if (work == Work::NONE) {
      return kIdle;
    }
    return still >= kStall ? kStalled : work == Work::COPIES ? kCopy : kEvent;
  }

  std::chrono::microseconds nap_{0};
  uint64_t moved_ns_ = 0;  // 0: nothing ever did
};

}  // namespace ckv
