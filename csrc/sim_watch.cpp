#include "sim_watch.h"

#include <cstdio>

#include "checksum.h"

namespace ckv {

namespace {

uint32_t sum_of(uint64_t at, uint64_t bytes) {
  return best_checksum().sum(0, reinterpret_cast<const void *>(at), bytes);
}

}  // namespace

void SimWatch::turn(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  pieces_.clear();
  is_on_.store(on, std::memory_order_release);
}

void SimWatch::begin(const Transfer &transfer, const Layout &layout) {
  std::vector<Piece> pieces;
  for (int32_t block : transfer.blocks) {
    for (const ckv_region &region : layout.regions()) {
      uint64_t at = region.dev_base + static_cast<uint64_t>(block) * region.dev_stride;
      pieces.push_back({block, at, region.bytes, sum_of(at, region.bytes)});
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  num_watched_ += pieces.size();
  pieces_[&transfer] = std::move(pieces);
}

void SimWatch::before_copies(const std::vector<Descriptor> &copies) {
  std::lock_guard<std::mutex> lock(mutex_);
  for_loaded(copies, [this](const Transfer &transfer, const Piece &piece) {
    check(transfer, piece, "copy");
  });
}

void SimWatch::after_copies(const std::vector<Descriptor> &copies) {
  std::lock_guard<std::mutex> lock(mutex_);
  for_loaded(copies,
             [](const Transfer &, Piece &piece) { piece.sum = sum_of(piece.at, piece.bytes); });
}

void SimWatch::end(const Transfer &transfer) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = pieces_.find(&transfer);
  if (found == pieces_.end()) {
    return;
  }
  for (const Piece &piece : found->second) {
    check(transfer, piece, "report");
  }
  pieces_.erase(found);
}

void SimWatch::forget(const Transfer &transfer) {
  std::lock_guard<std::mutex> lock(mutex_);
  pieces_.erase(&transfer);
}

uint64_t SimWatch::num_watched() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_watched_;
}

uint64_t SimWatch::num_violations() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_violations_;
}

// With mutex_ held. The engine's own copies are not who wrote it: claims keep transfers apart.
void SimWatch::check(const Transfer &transfer, const Piece &piece, const char *when) {
  if (sum_of(piece.at, piece.bytes) == piece.sum) {
    return;
  }
  ++num_violations_;
  std::fprintf(stderr,
               "ckv simulator: block %d of %s %llu was written before its %s, not by the engine "
               "(%llu bytes at %#llx)\n",
               piece.block, transfer.direction == CKV_LOAD ? "load" : "store",
               static_cast<unsigned long long>(transfer.tag), when,
               static_cast<unsigned long long>(piece.bytes),
               static_cast<unsigned long long>(piece.at));
}

// With mutex_ held. Every piece of a load that one of the copies writes to, once.
template <typename Visit>
void SimWatch::for_loaded(const std::vector<Descriptor> &copies, const Visit &visit) {
  for (auto &[transfer, pieces] : pieces_) {
    for (Piece &piece : pieces) {
      for (const Descriptor &copy : copies) {
        bool is_hit = copy.dst < piece.at + piece.bytes && piece.at < copy.dst + copy.bytes;
        if (transfer->direction == CKV_LOAD && is_hit) {
          visit(*transfer, piece);
          break;
        }
      }
    }
  }
}

}  // namespace ckv
