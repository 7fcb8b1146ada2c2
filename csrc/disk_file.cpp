#include "disk_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "failure.h"

namespace ckv {

namespace {

using std::to_string;

// A file system that became read-only takes no more, as a full one.
int code_of(int64_t error) {
  bool is_full = error == -ENOSPC || error == -EDQUOT || error == -EROFS;
  return is_full ? CKV_ENOSPC : CKV_EIO;
}

void check(int64_t error, int code, const char *path, const std::string &what) {
  if (error < 0) {
    throw Failure(code,
                  std::string(path) + " " + what + ": " + std::strerror(static_cast<int>(-error)));
  }
}

Shape shape_of(const ckv_disk_config &config, HostMemory memory) {
  Shape shape;
  shape.num_slots = static_cast<uint64_t>(config.num_slots);
  shape.payload_bytes = config.slot_blocks * memory.stride;
  std::copy(std::begin(config.namespace_id), std::end(config.namespace_id),
            shape.namespace_id.begin());
  return shape;
}

}  // namespace

Pages make_pages(uint64_t bytes) {
  uint64_t rounded = (bytes + kPage - 1) / kPage * kPage;
  Pages pages(static_cast<uint8_t *>(std::aligned_alloc(kPage, rounded)));
  if (!pages) {
    throw std::bad_alloc();
  }
  std::memset(pages.get(), 0, rounded);
  return pages;
}

DiskFile::DiskFile(std::unique_ptr<File> file, const char *path, const char *facts,
                   const ckv_disk_config &config, HostMemory memory)
    : file_(std::move(file)),
      memory_(memory),
      slot_blocks_(config.slot_blocks),
      is_summed_((config.flags & CKV_DISK_UNSUMMED) == 0),
      checksum_(best_checksum()),
      shape_(shape_of(config, memory)) {
  open(path);
  choose_direct((config.flags & CKV_DISK_BUFFERED) == 0);
  generation_ = random_generation();
  if ((config.flags & CKV_DISK_KEEP) != 0) {
    take_over();
  }
  if (!was_kept_) {
    write_facts(facts);
  }
  ++num_opens_;
  int code = write_superblock(generation_, true);
  if (code != 0) {
    throw Failure(code, std::string(path) + " does not take its superblock");
  }
}

void DiskFile::open(const char *path) {
  check(file_->open(path), CKV_EIO, path, "cannot be opened for writing");
  int error = file_->lock();
  if (error == -EWOULDBLOCK) {
    throw Failure(CKV_ELOCKED, std::string(path) +
                                   " is in use by another process; end that one, or "
                                   "give this server a disk_path of its own");
  }
  check(error, CKV_EIO, path, "cannot be locked");
  error = file_->allocate(shape_.file_bytes());
  check(error, code_of(error), path,
        "cannot be given its " + to_string(shape_.file_bytes()) + " bytes");
}

// Some file systems refuse the flag, others only the reads.
void DiskFile::choose_direct(bool wants_direct) {
  Pages page = make_pages(kPage);
  is_direct_ = wants_direct && file_->set_direct(true) == 0 && move_page(false, &page, 0) == 0;
  if (wants_direct && !is_direct_) {
    file_->set_direct(false);
  }
}

void DiskFile::take_over() {
  Pages page = make_pages(kPage);
  for (uint64_t offset : {kSuperblockCopies[1], kSuperblockCopies[0]}) {
    Superblock block;
    if (move_page(false, &page, offset) != 0) {
      continue;
    }
    std::memcpy(&block, page.get(), sizeof block);
    if (!is_whole(block)) {
      continue;
    }
    if (fits(block, shape_) && (block.state & Superblock::kOfWeightsAsLoaded) != 0) {
      was_kept_ = true;
      generation_ = block.generation;
      num_opens_ = block.num_opens;
    }
    return;
  }
}

// Only people read it, so it may fail.
void DiskFile::write_facts(const char *facts) {
  Pages text = make_pages(kMaxFacts);
  std::strncpy(reinterpret_cast<char *>(text.get()), facts == nullptr ? "" : facts, kMaxFacts - 1);
  std::vector<iovec> pieces = {{text.get(), kMaxFacts}};
  move(true, &pieces, kFactsOffset);
}

int DiskFile::write_superblock(uint64_t generation, bool is_of_weights_as_loaded) {
  Superblock block;
  block.header_bytes = sizeof(SlotHeader);
  block.payload_bytes = shape_.payload_bytes;
  block.stride = shape_.stride();
  block.num_slots = shape_.num_slots;
  block.generation = generation;
  block.namespace_id = shape_.namespace_id;
  block.state = is_of_weights_as_loaded ? Superblock::kOfWeightsAsLoaded : 0;
  block.num_opens = num_opens_;
  seal(&block);
  Pages page = make_pages(kPage);
  std::memcpy(page.get(), &block, sizeof block);
  for (uint64_t offset : kSuperblockCopies) {  // one after the other, so that one is always whole
    if (int code = move_page(true, &page, offset)) {
      return code;
    }
    if (int error = file_->sync()) {
      return code_of(error);
    }
  }
  return 0;
}

int DiskFile::move_page(bool writes, Pages *page, uint64_t offset) {
  std::vector<iovec> pieces = {{page->get(), kPage}};
  return move(writes, &pieces, offset);
}

// All of it, in as many calls as the system makes of it. Uses `pieces` up.
int DiskFile::move(bool writes, std::vector<iovec> *pieces, uint64_t offset) {
  iovec *at = pieces->data();
  iovec *end = at + pieces->size();
  while (at != end) {
    int n = static_cast<int>(end - at);
    int64_t moved = writes ? file_->write(at, n, offset) : file_->read(at, n, offset);
    if (moved <= 0) {
      return moved == 0 ? CKV_EIO : code_of(moved);  // 0: the file ends here
    }
    offset += static_cast<uint64_t>(moved);
    for (auto left = static_cast<size_t>(moved); at != end && left >= at->iov_len; ++at) {
      left -= at->iov_len;
      moved = static_cast<int64_t>(left);
    }
    if (at != end) {
      at->iov_base = static_cast<uint8_t *>(at->iov_base) + moved;
      at->iov_len -= static_cast<size_t>(moved);
    }
  }
  return 0;
}

uint8_t *DiskFile::block(Buffers *buffers, const SlotOrder &order, size_t i) const {
  int32_t host_slot = order.host_slots[i];
  if (host_slot < 0) {
    return buffers->scratch.get() + i * memory_.stride;
  }
  return reinterpret_cast<uint8_t *>(memory_.base) +
         static_cast<uint64_t>(host_slot) * memory_.stride;
}

// The header's page, then the blocks; those that lie side by side are one piece.
void DiskFile::add_blocks(Buffers *buffers, const SlotOrder &order) {
  const int32_t *slots = order.host_slots;
  if (!buffers->scratch && std::any_of(slots, slots + slot_blocks_, [](int s) { return s < 0; })) {
    buffers->scratch = make_pages(shape_.payload_bytes);
  }
  buffers->pieces.clear();
  buffers->pieces.push_back({buffers->page.get(), kPage});
  for (size_t i = 0; i < slot_blocks_; ++i) {
    uint8_t *at = block(buffers, order, i);
    iovec &last = buffers->pieces.back();
    if (i > 0 && static_cast<uint8_t *>(last.iov_base) + last.iov_len == at) {
      last.iov_len += memory_.stride;
    } else {
      buffers->pieces.push_back({at, memory_.stride});
    }
  }
}

uint32_t DiskFile::sum(Buffers *buffers, const SlotOrder &order) const {
  uint32_t sum = 0;
  for (size_t i = 0; is_summed_ && i < slot_blocks_; ++i) {
    sum = checksum_.sum(sum, block(buffers, order, i), memory_.stride);
  }
  return sum;
}

int DiskFile::write_slot(Buffers *buffers, const SlotOrder &order) {
  SlotHeader header;
  header.key_bytes = static_cast<uint16_t>(order.key_bytes);
  std::memcpy(header.key, order.key, order.key_bytes);
  std::copy_n(shape_.namespace_id.begin(), sizeof header.namespace_id, header.namespace_id);
  header.generation = order.generation;
  header.sequence = order.sequence;
  header.slot = order.slot;
  header.payload_bytes = static_cast<uint32_t>(shape_.payload_bytes);
  header.payload_sum = sum(buffers, order);
  header.depth = order.depth;
  seal(&header);
  std::memset(buffers->page.get(), 0, kPage);
  std::memcpy(buffers->page.get(), &header, sizeof header);
  add_blocks(buffers, order);
  return move(true, &buffers->pieces, shape_.offset(order.slot));
}

int DiskFile::read_slot(Buffers *buffers, const SlotOrder &order) {
  add_blocks(buffers, order);
  if (int code = move(false, &buffers->pieces, shape_.offset(order.slot))) {
    return code;
  }
  SlotHeader header;
  std::memcpy(&header, buffers->page.get(), sizeof header);
  Found found = judge(header, shape_, order.generation, order.slot);
  if (found == Found::BROKEN) {
    return CKV_ECORRUPT;
  }
  if (found == Found::NOTHING || !has_key(header, order.key, order.key_bytes)) {
    return CKV_EMISSING;
  }
  return !is_summed_ || header.payload_sum == sum(buffers, order) ? 0 : CKV_ECORRUPT;
}

int DiskFile::read_header(Buffers *buffers, uint64_t slot, SlotHeader *out) {
  if (int code = move_page(false, &buffers->page, shape_.offset(slot))) {
    return code;
  }
  std::memcpy(out, buffers->page.get(), sizeof *out);
  return 0;
}

}  // namespace ckv
