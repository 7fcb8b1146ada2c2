// Who uses a block, a slot or a disk slot just now: nobody, n readers, or one writer.
//
// The batch copy of a load may read its source at any time (CU_MEMCPY_SRC_ACCESS_ORDER_ANY), and
// the two directions run beside each other, so a conflict would be silent corruption. It is
// refused.
//
// The lane alone counts, as it takes a transfer: so these are plain numbers, and a submit, on the
// step's thread between steps, touches none of them.
#pragma once

#include <atomic>
#include <memory>

#include "disk.h"
#include "transfer.h"
#include "users.h"

namespace ckv {

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
    if (!blocks_of(*transfer).add(transfer->blocks, transfer->writes_blocks())) {
      return false;
    }
    if (!slots_.add(transfer->slots, transfer->writes_slots())) {
      blocks_of(*transfer).remove(transfer->blocks, transfer->writes_blocks());
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
  // Those of VRAM, or those of a disk.
  Users &blocks_of(const Transfer &transfer) {
    return transfer.disk == nullptr ? blocks_ : transfer.disk->disk->users();
  }

  void drop_returned() {
    Transfer *next = returned_.exchange(nullptr, std::memory_order_acquire);
    while (next != nullptr) {
      std::unique_ptr<Transfer> transfer(next);
      next = transfer->next;
      if (transfer->has_claims) {
        blocks_of(*transfer).remove(transfer->blocks, transfer->writes_blocks());
        slots_.remove(transfer->slots, transfer->writes_slots());
      }
    }
  }

  Users blocks_;
  Users slots_;
  std::atomic<Transfer *> returned_{nullptr};
};

}  // namespace ckv
