// Every allocation of the process goes through here, so that memory can run out when a test likes.
#pragma once

#include <cstddef>
#include <cstdint>

// Of this thread: how many allocations succeed before the next fails. Below 0: all do.
extern thread_local int64_t num_allocations_left;

// ... of those of at least so many bytes; what is smaller always succeeds.
extern thread_local size_t smallest_allocation;
