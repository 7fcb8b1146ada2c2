// Every allocation of the process goes through here, so that memory can run out when a test likes.
#pragma once

#include <cstddef>
#include <cstdint>

// (__thread: for what is thread_local elsewhere UBSan finds null pointers that are not there.)

// Of this thread: how many allocations succeed before the next fails. Below 0: all do.
extern __thread int64_t num_allocations_left;

// ... of those of at least so many bytes; what is smaller always succeeds.
extern __thread size_t smallest_allocation;
