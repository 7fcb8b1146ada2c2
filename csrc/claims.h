// Who uses a block or a slot just now: nobody, n readers, or one writer.
//
// The batch copy of a load may read its source at any time (CU_MEMCPY_SRC_ACCESS_ORDER_ANY), and
// the two directions run beside each other, so a conflict would be silent corruption. It is
// refused.
//
// The lane alone counts, as it takes a transfer: so these are plain numbers, and a submit, on the
// step's thread between steps, touches none of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "transfer.h"

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

class Claims {
 public:
  Claims() = default;
  Claims(const Claims &) = delete;
  Claims &operator=(const Claims &) = delete;
  ~Claims() { drop_returned(); }

  // Before the first transfer.
  void resize(size_t num_blocks, size_t num_slots) {
    blocks_ = Users(num_blocks);
    slots_ = Users(num_slots);
  }

  // The lane. All blocks and slots of the transfer, or none and false: another one is there that
  // excludes it.
  bool take(Transfer *transfer) {
    drop_returned();
    bool is_load = transfer->direction == CKV_LOAD;
    if (!blocks_.add(transfer->blocks, is_load)) {
      return false;
    }
    if (!slots_.add(transfer->slots, !is_load)) {
      blocks_.remove(transfer->blocks, is_load);
      return false;
    }
    transfer->has_claims = true;
    return true;
  }

  // Any thread; O(1), no lock. What the transfer claimed is free for every `take` from here on.
  void give_back(std::unique_ptr<Transfer> transfer) {
    Transfer *node = transfer.release();
    node->next = returned_.load(std::memory_order_relaxed);
    while (!returned_.compare_exchange_weak(node->next, node, std::memory_order_release,
                                            std::memory_order_relaxed)) {
    }
  }

 private:
  void drop_returned() {
    Transfer *next = returned_.exchange(nullptr, std::memory_order_acquire);
    while (next != nullptr) {
      std::unique_ptr<Transfer> transfer(next);
      next = transfer->next;
      if (transfer->has_claims) {
        bool is_load = transfer->direction == CKV_LOAD;
        blocks_.remove(transfer->blocks, is_load);
        slots_.remove(transfer->slots, !is_load);
      }
    }
  }

  Users blocks_;
  Users slots_;
  std::atomic<Transfer *> returned_{nullptr};
};

}  // namespace ckv
