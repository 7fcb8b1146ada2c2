// Who uses a block or a slot just now: nobody, n readers, or one writer.
//
// The batch copy of a load may read its source at any time (CU_MEMCPY_SRC_ACCESS_ORDER_ANY), and
// the two directions run beside each other, so a conflict would be silent corruption. It is
// refused.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace ckv {

class Claims {
 public:
  static constexpr size_t kAll = SIZE_MAX;

  Claims() = default;
  explicit Claims(size_t size) : users_(new std::atomic<int32_t>[size]()) {}

  // All ids or none; returns the index of the first id in conflict, kAll if there is none.
  size_t take(const std::vector<int32_t> &ids, bool writes) {
    for (size_t i = 0; i < ids.size(); ++i) {
      fetch_ahead(ids.data(), ids.size(), i);
      if (!take_one(users_[ids[i]], writes)) {
        drop(ids.data(), i, writes);
        return i;
      }
    }
    return kAll;
  }

  void drop(const int32_t *ids, size_t n, bool writes) {
    for (size_t i = 0; i < n; ++i) {
      fetch_ahead(ids, n, i);
      users_[ids[i]].fetch_sub(writes ? kWriter : 1, std::memory_order_release);
    }
  }

 private:
  static constexpr int32_t kWriter = -1;
  static constexpr size_t kAhead = 32;

  // The caller takes and the lane drops, so the lines are in the other core's cache or in none,
  // and locked operations wait for one after the other unless all are asked for early.
  void fetch_ahead(const int32_t *ids, size_t n, size_t at) const {
    if (at + kAhead < n) {
      __builtin_prefetch(&users_[ids[at + kAhead]], 1);
    }
  }

  static bool take_one(std::atomic<int32_t> &users, bool writes) {
    int32_t seen = users.load(std::memory_order_acquire);
    while (writes ? seen == 0 : seen >= 0) {
      int32_t wanted = writes ? kWriter : seen + 1;
      if (users.compare_exchange_weak(seen, wanted, std::memory_order_acquire)) {
        return true;
      }
    }
    return false;
  }

  std::unique_ptr<std::atomic<int32_t>[]> users_;
};

}  // namespace ckv
