// A rank's file on a disk: opened, locked, preallocated; disk slots written and read, summed.
//
// The thread that moves a slot's bytes also sums them, while they are in its core's cache. Nothing
// is copied in between: the file reads and writes the pool's memory itself, whole pages of it.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "checksum.h"
#include "ckv.h"
#include "disk_format.h"
#include "file.h"

namespace ckv {

// The host slots, as a disk sees them: slot s is `stride` bytes from base + s * stride on.
struct HostMemory {
  uint64_t base = 0;
  uint64_t stride = 0;
};

struct Freed {
  void operator()(void *at) const { std::free(at); }
};
using Pages = std::unique_ptr<uint8_t, Freed>;

// Zeroed, at an address that O_DIRECT takes. Throws std::bad_alloc.
Pages make_pages(uint64_t bytes);

// What one thread needs to move a slot. Only reads that leave out blocks need `scratch`.
struct Buffers {
  Pages page = make_pages(kPage);
  Pages scratch;
  std::vector<iovec> pieces;
};

// One slot to be moved.
struct SlotOrder {
  uint64_t slot = 0;
  const int32_t *host_slots = nullptr;  // slot_blocks of them; -1 in a read: not wanted
  const uint8_t *key = nullptr;
  size_t key_bytes = 0;
  uint64_t generation = 0;
  uint64_t sequence = 0;  // the rest of a write only
  uint32_t depth = 0;
};

class DiskFile {
 public:
  // BLOCKS. Throws Failure with a sentence that names the path.
  DiskFile(std::unique_ptr<File> file, const char *path, const char *facts,
           const ckv_disk_config &config, HostMemory memory);

  // ---- Any thread. 0 or a CKV_ code.
  // Durable when it returns.
  int write_superblock(uint64_t generation, bool is_of_weights_as_loaded);
  int write_slot(Buffers *buffers, const SlotOrder &order);
  int read_slot(Buffers *buffers, const SlotOrder &order);
  int read_header(Buffers *buffers, uint64_t slot, SlotHeader *out);

  const Shape &shape() const { return shape_; }
  size_t slot_blocks() const { return slot_blocks_; }
  bool is_direct() const { return is_direct_; }
  bool was_kept() const { return was_kept_; }
  uint64_t generation() const { return generation_; }  // as opened
  uint32_t num_opens() const { return num_opens_; }

 private:
  void open(const char *path);
  void choose_direct(bool wants_direct);
  // What an earlier process left may be used; takes over its generation.
  void take_over();
  void write_facts(const char *facts);
  int move(bool writes, std::vector<iovec> *pieces, uint64_t offset);
  int move_page(bool writes, Pages *page, uint64_t offset);
  void add_blocks(Buffers *buffers, const SlotOrder &order);
  uint8_t *block(Buffers *buffers, const SlotOrder &order, size_t i) const;
  uint32_t sum(Buffers *buffers, const SlotOrder &order) const;

  const std::unique_ptr<File> file_;
  const HostMemory memory_;
  const size_t slot_blocks_;
  const bool is_summed_;
  const Checksum &checksum_;
  Shape shape_;
  bool is_direct_ = false;
  bool was_kept_ = false;
  uint64_t generation_ = 0;
  uint32_t num_opens_ = 0;
};

}  // namespace ckv
