// How often each block, or each slot, is read just now, or that it is written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace ckv {

// The users of each block, or of each slot.
class Users {
 public:
  Users() = default;
  explicit Users(size_t size) : counts_(size) {}

  // All ids, or none and false.
  bool add(const std::vector<int32_t> &ids, bool writes) {
    for (size_t i = 0; i < ids.size(); ++i) {
      Count &count = counts_[static_cast<size_t>(ids[i])];
      if (writes ? count != 0 : count < 0 || count == kMax) {
        remove(ids, writes, i);
        return false;
      }
      count = static_cast<Count>(writes ? kWriter : count + 1);
    }
    return true;
  }

  // The first `n` of the ids.
  void remove(const std::vector<int32_t> &ids, bool writes, size_t n = SIZE_MAX) {
    n = std::min(n, ids.size());
    for (size_t i = 0; i < n; ++i) {
      counts_[static_cast<size_t>(ids[i])] -= writes ? kWriter : 1;
    }
  }

 private:
  using Count = int16_t;  // small: with ids in no order each is a cache line
  static constexpr Count kWriter = -1;
  static constexpr Count kMax = std::numeric_limits<Count>::max();

  std::vector<Count> counts_;
};

}  // namespace ckv
