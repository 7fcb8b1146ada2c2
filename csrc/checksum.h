// The sum of a block's bytes: four CRC32C side by side, over every fourth word each, then one over
// the four. One alone waits three cycles for itself at every word; the instruction can start one
// per cycle.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ckv {

struct Checksum {
  const char *name;
  // CRC32C as published; `crc` is 0 or what the bytes before gave.
  uint32_t (*crc32c)(uint32_t crc, const void *data, size_t n);
  // The sum; `seed` is 0 or the sum of the bytes before.
  uint32_t (*sum)(uint32_t seed, const void *data, size_t n);
};

// Works everywhere.
const Checksum &table_checksum();

// By the CPU's instructions if it has them, else the table. Both give the same sums.
const Checksum &best_checksum();

}  // namespace ckv
