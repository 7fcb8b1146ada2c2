#include "disk_format.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>

#include "checksum.h"
#include "failure.h"

namespace ckv {

namespace {

template <typename Struct>
uint32_t crc_of(const Struct &given) {
  return best_checksum().crc32c(0, &given, offsetof(Struct, crc));
}

}  // namespace

void seal(Superblock *block) { block->crc = crc_of(*block); }

void seal(SlotHeader *header) { header->crc = crc_of(*header); }

bool is_whole(const Superblock &block) {
  return block.magic == Superblock::kMagic && block.version == Superblock::kVersion &&
         block.crc == crc_of(block);
}

bool fits(const Superblock &block, const Shape &shape) {
  return is_whole(block) && block.header_bytes == sizeof(SlotHeader) &&
         block.payload_bytes == shape.payload_bytes && block.stride == shape.stride() &&
         block.namespace_id == shape.namespace_id && block.generation != 0;
}

// What is not ours is no damage: a slot of the file's life before, or of none. But a header that
// names this generation was written by us, so it must be whole and in its place.
Found judge(const SlotHeader &header, const Shape &shape, uint64_t generation, uint64_t slot) {
  if (header.magic != SlotHeader::kMagic || header.version != SlotHeader::kVersion) {
    return Found::NOTHING;
  }
  if (header.crc != crc_of(header)) {
    return Found::BROKEN;
  }
  if (header.generation != generation ||
      !std::equal(std::begin(header.namespace_id), std::end(header.namespace_id),
                  shape.namespace_id.begin())) {
    return Found::NOTHING;
  }
  bool is_ours = header.slot == slot && header.payload_bytes == shape.payload_bytes &&
                 header.key_bytes > 0 && header.key_bytes <= CKV_MAX_KEY;
  return is_ours ? Found::GOOD : Found::BROKEN;
}

bool has_key(const SlotHeader &header, const uint8_t *key, size_t key_bytes) {
  return header.key_bytes == key_bytes && std::memcmp(header.key, key, key_bytes) == 0;
}

uint64_t random_generation() {
  uint64_t generation = 0;
  while (generation == 0) {
    ssize_t got = getrandom(&generation, sizeof generation, 0);
    if (got < 0 && errno != EINTR) {
      throw Failure(CKV_EIO,
                    std::string("the system gives no random number: ") + std::strerror(errno));
    }
    generation = got == sizeof generation ? generation : 0;
  }
  return generation;
}

}  // namespace ckv
