// Who uses a block or a slot just now: nobody, n readers, or one writer.
//
// The batch copy of a load may read its source at any time (CU_MEMCPY_SRC_ACCESS_ORDER_ANY), and
// the two directions run beside each other, so a conflict would be silent corruption. It is
// refused.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace ckv {

class Claims {
 public:
  static constexpr size_t kAll = SIZE_MAX;
  using Users = std::vector<int16_t>;  // by id: how many read it, or kWriter

  // Before the first take.
  void reset(Users nobody) noexcept { users_ = std::move(nobody); }

  // All ids or none; returns the index of the first id in conflict, kAll if there is none.
  size_t take(const std::vector<int32_t> &ids, bool writes) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < ids.size(); ++i) {
      fetch_ahead(ids.data(), ids.size(), i);
      int16_t &users = users_[ids[i]];
      if (writes ? users != 0 : users < 0 || users == INT16_MAX) {
        give_back(ids.data(), i, writes);
        return i;
      }
      users = static_cast<int16_t>(writes ? kWriter : users + 1);
    }
    return kAll;
  }

  void drop(const int32_t *ids, size_t n, bool writes) {
    std::lock_guard<std::mutex> lock(mutex_);
    give_back(ids, n, writes);
  }

 private:
  static constexpr int16_t kWriter = -1;
  static constexpr size_t kAhead = 32;

  // With mutex_ held.
  void give_back(const int32_t *ids, size_t n, bool writes) {
    for (size_t i = 0; i < n; ++i) {
      fetch_ahead(ids, n, i);
      users_[ids[i]] = static_cast<int16_t>(writes ? 0 : users_[ids[i]] - 1);
    }
  }

  // The caller takes and the lane drops, so the lines are in the other core's cache or in none.
  void fetch_ahead(const int32_t *ids, size_t n, size_t at) const {
    if (at + kAhead < n) {
      __builtin_prefetch(&users_[ids[at + kAhead]], 1);
    }
  }

  // One lock for all ids of a transfer: a locked operation for each cost ten microseconds of 1,024.
  std::mutex mutex_;
  Users users_;
};

}  // namespace ckv
