#include "layout.h"

#include <algorithm>
#include <string>

#include "failure.h"

namespace ckv {

namespace {

bool overflows(uint64_t base, uint64_t stride, int32_t count, uint64_t bytes) {
  uint64_t span = 0;
  uint64_t end = 0;
  return __builtin_mul_overflow(stride, static_cast<uint64_t>(count - 1), &span) ||
         __builtin_add_overflow(span, bytes, &span) || __builtin_add_overflow(base, span, &end);
}

void check(const ckv_region &r, size_t index, int32_t num_blocks, int32_t num_slots) {
  std::string name = "region " + std::to_string(index);
  if (r.bytes == 0) {
    throw Failure(CKV_EINVAL, name + " has no bytes");
  }
  if (r.bytes > r.dev_stride || r.bytes > r.host_stride) {
    throw Failure(CKV_EINVAL, name + " has " + std::to_string(r.bytes) +
                                  " bytes per block, more than its stride in VRAM (" +
                                  std::to_string(r.dev_stride) + ") or DRAM (" +
                                  std::to_string(r.host_stride) + ")");
  }
  if (r.dev_base == 0 || r.host_base == 0 ||
      overflows(r.dev_base, r.dev_stride, num_blocks, r.bytes) ||
      overflows(r.host_base, r.host_stride, num_slots, r.bytes)) {
    throw Failure(CKV_EINVAL, name + " does not lie in the address space");
  }
}

}  // namespace

Layout::Layout(const ckv_region *regions, size_t num_regions, int32_t num_blocks, int32_t num_slots)
    : num_blocks_(num_blocks), num_slots_(num_slots) {
  if (regions == nullptr || num_regions == 0 || num_blocks <= 0 || num_slots <= 0) {
    throw Failure(CKV_EINVAL, "an engine needs at least one region, one block and one slot");
  }
  regions_.assign(regions, regions + num_regions);
  for (size_t i = 0; i < num_regions; ++i) {
    check(regions_[i], i, num_blocks, num_slots);
  }
}

void Layout::move_to(const Layout &other) {
  auto has_same_piece = [](const ckv_region &a, const ckv_region &b) {
    return a.host_base == b.host_base && a.host_stride == b.host_stride && a.bytes == b.bytes;
  };
  if (num_blocks_ != other.num_blocks_ || num_slots_ != other.num_slots_ ||
      !std::equal(regions_.begin(), regions_.end(), other.regions_.begin(), other.regions_.end(),
                  has_same_piece)) {
    throw Failure(CKV_EINVAL, "blocks that were moved must be what they were, and these are not");
  }
  for (size_t i = 0; i < regions_.size(); ++i) {
    regions_[i].dev_base = other.regions_[i].dev_base;
    regions_[i].dev_stride = other.regions_[i].dev_stride;
  }
}

void Layout::set_borders(uint64_t base, uint64_t bytes) {
  border_base_ = base;
  border_bytes_ = bytes;
}

uint64_t Layout::to_border(uint64_t host) const {
  return border_bytes_ == 0 ? UINT64_MAX : border_bytes_ - (host - border_base_) % border_bytes_;
}

Descriptor Layout::piece(const Transfer &transfer, const Cursor &cursor) const {
  const ckv_region &r = regions_[cursor.region];
  uint64_t dev = r.dev_base + static_cast<uint64_t>(transfer.blocks[cursor.pair]) * r.dev_stride;
  uint64_t host = r.host_base + static_cast<uint64_t>(transfer.slots[cursor.pair]) * r.host_stride;
  bool is_load = transfer.direction == CKV_LOAD;
  return {(is_load ? dev : host) + cursor.offset, (is_load ? host : dev) + cursor.offset,
          r.bytes - cursor.offset};
}

// Pairs outside, regions inside: this order merges both pieces of one block that lie side by side
// and whole blocks in a row, whichever the layout offers.
uint64_t Layout::expand(const Transfer &transfer, const TrunkLimits &limits, Cursor *cursor,
                        std::vector<Descriptor> *out) const {
  out->clear();
  uint64_t total = 0;
  while (total < limits.bytes && cursor->pair < transfer.blocks.size()) {
    Descriptor next = piece(transfer, *cursor);
    if (total > 0 && next.bytes > limits.bytes - total) {
      break;  // cut only what no trunk could hold
    }
    uint64_t host = transfer.direction == CKV_LOAD ? next.src : next.dst;
    uint64_t until_border = to_border(host);
    uint64_t most = std::min(limits.bytes, until_border);
    bool is_whole = next.bytes <= most;
    next.bytes = std::min(next.bytes, most);
    Descriptor *last = out->empty() ? nullptr : &out->back();
    bool is_behind_border = until_border == border_bytes_;
    if (last && !is_behind_border && last->dst + last->bytes == next.dst &&
        last->src + last->bytes == next.src) {
      last->bytes += next.bytes;
    } else if (out->size() < limits.num_descriptors) {
      out->push_back(next);
    } else {
      break;
    }
    total += next.bytes;
    cursor->offset = is_whole ? 0 : cursor->offset + next.bytes;
    cursor->region += is_whole ? 1 : 0;
    if (cursor->region == regions_.size()) {
      cursor->region = 0;
      ++cursor->pair;
    }
  }
  return total;
}

}  // namespace ckv
