#include "allocations.h"

#include <cstdlib>
#include <new>

__thread int64_t num_allocations_left = -1;
__thread size_t smallest_allocation = 0;

namespace {

void *allocate(size_t bytes, size_t alignment) {
  bool is_counted = num_allocations_left >= 0 && bytes >= smallest_allocation;
  if (is_counted && num_allocations_left-- == 0) {
    throw std::bad_alloc();
  }
  size_t rounded = (bytes + alignment) / alignment * alignment;
  void *got = std::aligned_alloc(alignment, rounded);
  return got != nullptr ? got : throw std::bad_alloc();
}

}  // namespace

void *operator new(size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void *operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void operator delete(void *at) noexcept { std::free(at); }
void operator delete(void *at, size_t) noexcept { std::free(at); }
void operator delete(void *at, std::align_val_t) noexcept { std::free(at); }
void operator delete(void *at, size_t, std::align_val_t) noexcept { std::free(at); }
