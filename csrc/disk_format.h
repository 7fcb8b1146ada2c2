// What stands in a disk's file, byte for byte, little-endian.
//
//   0 and 4096     the superblock, twice: the first whose sum is right counts
//   8192           the namespace for people, as JSON, with zeros behind
//   1 MiB + i * stride   disk slot i: a page of header, then the payload
//
// The headers are the index: there is no other one to be wrong. A header names the generation that
// it was written in, so a new one makes all others foreign at once and nothing has to be erased.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "ckv.h"

namespace ckv {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file's numbers are little-endian");

constexpr uint64_t kPage = 4096;  // O_DIRECT takes whole ones, at addresses that are multiples
constexpr uint64_t kSuperblockCopies[] = {kPage, 0};  // in the order of writing
constexpr uint64_t kFactsOffset = 2 * kPage;
constexpr uint64_t kSlotsOffset = uint64_t{1} << 20;
constexpr size_t kMaxFacts = 64 * 1024;

using Namespace = std::array<uint8_t, 32>;

struct Superblock {
  static constexpr uint32_t kMagic = 0x53564B43;  // "CKVS"
  static constexpr uint16_t kVersion = 1;
  // Every slot of the generation was computed with weights as a start loads them: no reset came.
  static constexpr uint32_t kOfWeightsAsLoaded = 2;

  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  uint16_t header_bytes = 0;
  uint64_t payload_bytes = 0;
  uint64_t stride = 0;
  uint64_t num_slots = 0;
  uint64_t generation = 0;  // random
  Namespace namespace_id{};
  uint32_t state = 0;
  uint32_t num_opens = 0;  // the upper half of its writes' sequence
  uint32_t reserved = 0;
  uint32_t crc = 0;  // CRC32C of all before
};
static_assert(sizeof(Superblock) == 88 && offsetof(Superblock, generation) == 32 &&
              offsetof(Superblock, namespace_id) == 40 && offsetof(Superblock, state) == 72);

struct SlotHeader {
  static constexpr uint32_t kMagic = 0x44564B43;  // "CKVD"
  static constexpr uint16_t kVersion = 1;

  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  uint16_t key_bytes = 0;
  uint8_t key[CKV_MAX_KEY] = {};  // of the slot's last block: its hash covers all before
  uint8_t namespace_id[16] = {};
  uint64_t generation = 0;
  uint64_t sequence = 0;  // orders the writes
  uint64_t slot = 0;      // a write that went astray is seen
  uint32_t payload_bytes = 0;
  uint32_t payload_sum = 0;  // checksum.h's, block by block
  uint32_t depth = 0;        // place in its chain
  uint8_t reserved[24] = {};
  uint32_t crc = 0;  // CRC32C of all before
};
static_assert(sizeof(SlotHeader) == 128 && offsetof(SlotHeader, namespace_id) == 48 &&
              offsetof(SlotHeader, generation) == 64 && offsetof(SlotHeader, payload_bytes) == 88 &&
              offsetof(SlotHeader, crc) == 124);

// Where a file's slots are and whose they are.
struct Shape {
  uint64_t num_slots = 0;
  uint64_t payload_bytes = 0;
  Namespace namespace_id{};

  uint64_t stride() const { return kPage + (payload_bytes + kPage - 1) / kPage * kPage; }
  uint64_t offset(uint64_t slot) const { return kSlotsOffset + slot * stride(); }
  uint64_t file_bytes() const { return offset(num_slots); }
};

// Sets the sum, the last thing to do to one.
void seal(Superblock *block);
void seal(SlotHeader *header);

// Whether it is one that this version wrote, whole.
bool is_whole(const Superblock &block);
// ... and whose slots may be used as they are. Of another number of slots, too: they lie where they
// lay.
bool fits(const Superblock &block, const Shape &shape);

enum class Found {
  NOTHING,  // never written, or of another generation or namespace
  BROKEN,   // written in part, changed since, or by a write that was meant for elsewhere
  GOOD
};

// What a header says that was read where `slot` is.
Found judge(const SlotHeader &header, const Shape &shape, uint64_t generation, uint64_t slot);

bool has_key(const SlotHeader &header, const uint8_t *key, size_t key_bytes);

// From getrandom(2); never 0. Throws Failure if the system gives none.
uint64_t random_generation();

}  // namespace ckv
