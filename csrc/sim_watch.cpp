#include "sim_watch.h"

#include <cstdio>
#include <cstring>

namespace ckv {

namespace {

// FNV over words: any changed byte changes it, which is all that is asked.
uint64_t hash_of(const void *at, uint64_t bytes) {
  const char *next = static_cast<const char *>(at);
  uint64_t hash = 14695981039346656037U;
  for (; bytes > 0;) {
    uint64_t word = 0;
    uint64_t n = bytes < sizeof word ? bytes : sizeof word;
    std::memcpy(&word, next, n);
    hash = (hash ^ word) * 1099511628211U;
    next += n;
    bytes -= n;
  }
  return hash;
}

}  // namespace

void SimWatch::note(uint64_t order, const void *at, uint64_t bytes) {
  ranges_.push_back({order, at, bytes, hash_of(at, bytes)});
}

uint64_t SimWatch::settle(uint64_t order, const char *what) {
  uint64_t num_changed = 0;
  while (!ranges_.empty() && ranges_.front().order <= order) {
    const Range range = ranges_.front();
    ranges_.pop_front();
    if (hash_of(range.at, range.bytes) == range.hash) {
      continue;
    }
    if (num_changed++ == 0) {
      std::fprintf(stderr, "ckv simulator: %llu bytes at %p, %s, were written before its report\n",
                   static_cast<unsigned long long>(range.bytes), range.at, what);
    }
  }
  return num_changed;
}

}  // namespace ckv
