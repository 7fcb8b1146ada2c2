// Which slots have a known sum, and which stored blocks shall get one.
//
// Not locked: a slot's entry is written only by who may write the slot and read only by who may
// read it, and the claims see to that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transfer.h"

namespace ckv {

class Sums {
 public:
  Sums() = default;
  Sums(uint32_t every, size_t num_slots) : every_(every), entries_(every > 0 ? num_slots : 0) {}

  // Of a transfer that has just got its claims, in the order of the submits. What a store or a read
  // writes has no sum from here on, however it ends. Disks take and compare sums of their own.
  void begin(Transfer *transfer) {
    if (every_ == 0) {
      return;
    }
    for (int32_t slot : transfer->slots) {
      if (transfer->writes_slots()) {
        entries_[slot] = kNone;
      } else if (transfer->direction == CKV_LOAD) {
        transfer->is_summed = transfer->is_summed || entries_[slot] != kNone;
      }
    }
    if (transfer->direction == CKV_STORE) {
      transfer->until_sampled = every_ - 1 - num_stored_ % every_;
      transfer->is_summed = transfer->until_sampled < transfer->slots.size();
      num_stored_ += transfer->slots.size();
    }
  }

  // Whether the i-th slot of the transfer is to be summed (store) or compared (load).
  bool covers(const Transfer &transfer, size_t i) const {
    if (transfer.direction == CKV_STORE) {
      return i >= transfer.until_sampled && (i - transfer.until_sampled) % every_ == 0;
    }
    return entries_[transfer.slots[i]] != kNone;
  }

  void set(int32_t slot, uint32_t sum) { entries_[slot] = kSummed | sum; }
  bool matches(int32_t slot, uint32_t sum) const { return entries_[slot] == (kSummed | sum); }

 private:
  static constexpr uint64_t kNone = 0;
  static constexpr uint64_t kSummed = uint64_t{1} << 32;

  uint64_t every_ = 0;
  uint64_t num_stored_ = 0;
  std::vector<uint64_t> entries_;  // by slot
};

}  // namespace ckv
