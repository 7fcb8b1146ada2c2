#include "checksum.h"

#include <array>
#include <cstring>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace ckv {

namespace {

constexpr size_t kLanes = 4;
constexpr size_t kWord = sizeof(uint64_t);

uint64_t word_at(const uint8_t *at) {
  uint64_t word;
  std::memcpy(&word, at, kWord);
  return word;
}

// How the lanes differ is of no matter, only that they start from the seed and not from 0: a CRC
// of 0 does not change over zeros.
struct Lanes {
  explicit Lanes(uint32_t seed) : crc{~seed, ~seed, ~seed, ~seed} {}
  uint32_t crc[kLanes];
};

// ---- Eight table look-ups per word.

using Tables = std::array<std::array<uint32_t, 256>, kWord>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78U : 0U);
    }
    tables[0][i] = crc;
  }
  for (size_t t = 1; t < kWord; ++t) {
    for (size_t i = 0; i < 256; ++i) {
      tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

struct Table {
  static uint32_t word(uint32_t crc, uint64_t word) {
    word ^= crc;
    uint32_t out = 0;
    for (size_t i = 0; i < kWord; ++i) {
      out ^= kTables[kWord - 1 - i][(word >> (8 * i)) & 0xFF];
    }
    return out;
  }
  static uint32_t byte(uint32_t crc, uint8_t byte) {
    return (crc >> 8) ^ kTables[0][(crc ^ byte) & 0xFF];
  }
};

// ---- One instruction per word. Only functions with the attribute may hold it.

#if defined(__x86_64__)
#define CKV_HAS_CRC 1
#if defined(__clang__)  // wants the instruction by name; gcc before 12 does not know the name
#define CKV_CRC_TARGET __attribute__((target("sse4.2,crc32")))
#else
#define CKV_CRC_TARGET __attribute__((target("sse4.2")))
#endif
#define CKV_CRC_WORD(crc, word) static_cast<uint32_t>(__builtin_ia32_crc32di(crc, word))
#define CKV_CRC_BYTE(crc, byte) __builtin_ia32_crc32qi(crc, byte)
bool cpu_has_crc() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__)
#define CKV_HAS_CRC 1
#define CKV_CRC_TARGET __attribute__((target("+crc")))
#define CKV_CRC_WORD(crc, word) __builtin_aarch64_crc32cx(crc, word)
#define CKV_CRC_BYTE(crc, byte) __builtin_aarch64_crc32cb(crc, byte)
bool cpu_has_crc() { return (getauxval(AT_HWCAP) & (1UL << 7)) != 0; }  // HWCAP_CRC32
#endif

// Twice the same text: a template cannot be compiled for two targets.
#define CKV_DEFINE_CHECKSUM(name, target, WORD, BYTE)                        \
  target uint32_t name##_crc32c(uint32_t crc, const void *data, size_t n) {  \
    const uint8_t *at = static_cast<const uint8_t *>(data);                  \
    crc = ~crc;                                                              \
    for (; n >= kWord; n -= kWord, at += kWord) {                            \
      crc = WORD(crc, word_at(at));                                          \
    }                                                                        \
    for (; n > 0; --n, ++at) {                                               \
      crc = BYTE(crc, *at);                                                  \
    }                                                                        \
    return ~crc;                                                             \
  }                                                                          \
  target uint32_t name##_sum(uint32_t seed, const void *data, size_t n) {    \
    const uint8_t *at = static_cast<const uint8_t *>(data);                  \
    Lanes lanes(seed);                                                       \
    for (; n >= kLanes * kWord; n -= kLanes * kWord, at += kLanes * kWord) { \
      lanes.crc[0] = WORD(lanes.crc[0], word_at(at));                        \
      lanes.crc[1] = WORD(lanes.crc[1], word_at(at + kWord));                \
      lanes.crc[2] = WORD(lanes.crc[2], word_at(at + 2 * kWord));            \
      lanes.crc[3] = WORD(lanes.crc[3], word_at(at + 3 * kWord));            \
    }                                                                        \
    uint32_t rest = name##_crc32c(seed, at, n);                              \
    return name##_crc32c(rest, lanes.crc, sizeof lanes.crc);                 \
  }

CKV_DEFINE_CHECKSUM(table, , Table::word, Table::byte)
constexpr Checksum kTable{"table", table_crc32c, table_sum};

#if defined(CKV_HAS_CRC)
CKV_DEFINE_CHECKSUM(cpu, CKV_CRC_TARGET, CKV_CRC_WORD, CKV_CRC_BYTE)
constexpr Checksum kCpu{"cpu", cpu_crc32c, cpu_sum};
#endif

}  // namespace

const Checksum &table_checksum() { return kTable; }

const Checksum &best_checksum() {
#if defined(CKV_HAS_CRC)
  static const bool has_crc = cpu_has_crc();
  return has_crc ? kCpu : kTable;
#else
  return kTable;
#endif
}

}  // namespace ckv
