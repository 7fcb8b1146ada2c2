// Who uses a block or a slot just now: nobody, n readers, or one writer.
//
// The batch copy of a load may read its source at any time (CU_MEMCPY_SRC_ACCESS_ORDER_ANY), and
// the two directions run beside each other, so a conflict would be silent corruption. It is
// refused.
//
// The lane never touches the counts: it hands back the transfer, and the next caller drops what
// that claimed. So they are plain numbers in the callers' cache, and a submit does not fetch line
// after line from the lane's core.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "transfer.h"

namespace ckv {

// The users of each block, or of each slot.
class Users {
 public:
  static constexpr size_t kAll = SIZE_MAX;

  Users() = default;
  explicit Users(size_t size) : counts_(size) {}

  // All ids or none; returns the index of the first id in conflict, kAll if there is none.
  size_t add(const std::vector<int32_t> &ids, bool writes) {
    for (size_t i = 0; i < ids.size(); ++i) {
      Count &count = counts_[static_cast<size_t>(ids[i])];
      if (writes ? count != 0 : count < 0 || count == kMax) {
        remove(ids.data(), i, writes);
        return i;
      }
      count = static_cast<Count>(writes ? kWriter : count + 1);
    }
    return kAll;
  }

  void remove(const int32_t *ids, size_t n, bool writes) {
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
  // The first id that somebody else uses in a way that excludes this one; `what` is null if none.
  struct Conflict {
    const char *what = nullptr;
    int32_t id = 0;
  };

  Claims() = default;
  Claims(const Claims &) = delete;
  Claims &operator=(const Claims &) = delete;
  ~Claims() { drop_returned(); }

  void resize(size_t num_blocks, size_t num_slots) {
    blocks_ = Users(num_blocks);
    slots_ = Users(num_slots);
  }

  // Callers, in turn: all ids of the transfer or none.
  Conflict take(const Transfer &transfer) {
    std::lock_guard<std::mutex> lock(mutex_);
    drop_returned();
    bool is_load = transfer.direction == CKV_LOAD;
    size_t at = blocks_.add(transfer.blocks, is_load);
    if (at != Users::kAll) {
      return {"block", transfer.blocks[at]};
    }
    at = slots_.add(transfer.slots, !is_load);
    if (at != Users::kAll) {
      blocks_.remove(transfer.blocks.data(), transfer.blocks.size(), is_load);
      return {"slot", transfer.slots[at]};
    }
    return {};
  }

  // Of a transfer that did not get as far as the lane.
  void drop(const Transfer &transfer) {
    std::lock_guard<std::mutex> lock(mutex_);
    remove(transfer);
  }

  // The lane: O(1), no lock. What the transfer claimed is free for every `take` from here on.
  void give_back(std::unique_ptr<Transfer> transfer) {
    Transfer *node = transfer.release();
    node->next = returned_.load(std::memory_order_relaxed);
    while (!returned_.compare_exchange_weak(node->next, node, std::memory_order_release,
                                            std::memory_order_relaxed)) {
    }
  }

 private:
  void remove(const Transfer &transfer) {
    bool is_load = transfer.direction == CKV_LOAD;
    blocks_.remove(transfer.blocks.data(), transfer.blocks.size(), is_load);
    slots_.remove(transfer.slots.data(), transfer.slots.size(), !is_load);
  }

  void drop_returned() {
    Transfer *next = returned_.exchange(nullptr, std::memory_order_acquire);
    while (next != nullptr) {
      std::unique_ptr<Transfer> transfer(next);
      next = transfer->next;
      remove(*transfer);
    }
  }

  std::mutex mutex_;  // guards both
  Users blocks_;
  Users slots_;
  std::atomic<Transfer *> returned_{nullptr};
};

}  // namespace ckv
