// Block ids -> descriptors: expand over the regions, merge neighbours, cut into trunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ckv.h"
#include "driver.h"
#include "transfer.h"

namespace ckv {

struct TrunkLimits {
  uint64_t bytes;
  size_t num_descriptors;
};

class Layout {
 public:
  Layout() = default;
  // Throws Failure with CKV_EINVAL.
  Layout(const ckv_region *regions, size_t num_regions, int32_t num_blocks, int32_t num_slots);

  // Page-locked memory is many registrations, each `bytes` long from `base` on: a descriptor that
  // crossed a border would name memory of two, which a driver may refuse.
  void set_borders(uint64_t base, uint64_t bytes);

  // Blocks lie where the other layout has them; its slots must be the same. Throws Failure.
  void move_to(const Layout &other);

  bool empty() const { return regions_.empty(); }
  int32_t num_blocks() const { return num_blocks_; }
  int32_t num_slots() const { return num_slots_; }
  const std::vector<ckv_region> &regions() const { return regions_; }

  // Fills `out` with the next trunk of `transfer` from `cursor` on, which it advances, and returns
  // its bytes. Needs no memory if `out` has room for limits.num_descriptors.
  uint64_t expand(const Transfer &transfer, const TrunkLimits &limits, Cursor *cursor,
                  std::vector<Descriptor> *out) const;
  // (pair, region) pieces begun before `cursor`.
  uint64_t num_pieces(const Cursor &cursor) const {
    return cursor.pair * regions_.size() + cursor.region + (cursor.offset > 0 ? 1 : 0);
  }

 private:
  Descriptor piece(const Transfer &transfer, const Cursor &cursor) const;
  uint64_t to_border(uint64_t host) const;

  std::vector<ckv_region> regions_;
  int32_t num_blocks_ = 0;
  int32_t num_slots_ = 0;
  uint64_t border_base_ = 0;
  uint64_t border_bytes_ = 0;  // 0: no borders
};

}  // namespace ckv
