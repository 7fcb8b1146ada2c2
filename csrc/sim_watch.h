// Watches the VRAM that transfers stand on, from when they may begin to their report.
//
// A device copies whatever lies there when it comes to it. So somebody who writes a store's source
// or a load's destination meanwhile corrupts KV and nothing fails: most of all an owner who let go
// of blocks too early. Sums of the bytes tell; by whom they were written, they cannot.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "driver.h"
#include "layout.h"
#include "transfer.h"

namespace ckv {

// Any thread may call. Work grows with the bytes: this is for tests.
class SimWatch {
 public:
  void turn(bool on);
  bool is_on() const { return is_on_.load(std::memory_order_acquire); }
  // From here on nobody writes the transfer's blocks but its own copies.
  void begin(const Transfer &transfer, const Layout &layout);
  // Around copies of loads: what they are about to overwrite, and what it is to stay.
  void before_copies(const std::vector<Descriptor> &copies);
  void after_copies(const std::vector<Descriptor> &copies);
  // It is about to be reported; from then on its blocks are their owner's.
  void end(const Transfer &transfer);
  void forget(const Transfer &transfer);
  // Pieces (of one block in one region) watched, and those of them that somebody wrote.
  uint64_t num_watched();
  uint64_t num_violations();

 private:
  struct Piece {
    int32_t block;
    uint64_t at;
    uint64_t bytes;
    uint32_t sum;
  };
  void check(const Transfer &transfer, const Piece &piece, const char *when);
  template <typename Visit>
  void for_loaded(const std::vector<Descriptor> &copies, const Visit &visit);

  std::atomic<bool> is_on_{false};
  std::mutex mutex_;  // guards all below
  std::map<const Transfer *, std::vector<Piece>> pieces_;
  uint64_t num_watched_ = 0;
  uint64_t num_violations_ = 0;
};

}  // namespace ckv
