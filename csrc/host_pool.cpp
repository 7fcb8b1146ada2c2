#include "host_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "failure.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ckv {

namespace {

constexpr uint64_t kPopulateTask = uint64_t{64} << 20;
constexpr unsigned kMaxPopulateThreads = 8;

std::string gib(uint64_t bytes) {
  return std::to_string(bytes) + " bytes (" + std::to_string(bytes >> 30) + " GiB)";
}

// Kernels before 5.14 do not know MADV_POPULATE_WRITE; touching does the same, but cannot report
// that memory ran out.
int populate_task(char *begin, uint64_t bytes, uint64_t page) {
  if (madvise(begin, bytes, MADV_POPULATE_WRITE) == 0) {
    return 0;
  }
  if (errno != EINVAL) {
    return errno;
  }
  for (uint64_t at = 0; at < bytes; at += page) {
    static_cast<volatile char *>(begin)[at] = 0;
  }
  return 0;
}

}  // namespace

HostPool::HostPool(Driver &driver, const ckv_pool_config &config)
    : driver_(driver), lock_chunk_(config.chunk_bytes == 0 ? kLockChunk : config.chunk_bytes) {
  try {
    map(config.bytes, config.huge != 0);
    if (driver_.locks_pages()) {
      populate();
      lock_pages();
    }
  } catch (...) {
    release();
    throw;
  }
}

HostPool::~HostPool() { release(); }

void HostPool::get_state(ckv_pool_state *out) const {
  *out = ckv_pool_state{};
  out->size = sizeof *out;
  out->numa_node = -1;
  out->mapped_bytes = mapped_bytes_;
  out->ready_bytes = mapped_bytes_;
}

void HostPool::map(uint64_t bytes, bool huge) {
  uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (bytes == 0 || bytes > UINT64_MAX - page) {
    throw Failure(CKV_EINVAL, "a host pool of " + gib(bytes) + " cannot be mapped");
  }
  uint64_t rounded = (bytes + page - 1) / page * page;
  void *got = mmap(nullptr, rounded, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) {
    throw Failure(CKV_ENOMEM,
                  "mapping a host pool of " + gib(bytes) + " failed: " + std::strerror(errno));
  }
  base_ = static_cast<char *>(got);
  mapped_bytes_ = rounded;
  // A child must not share page-locked pages: copy-on-write would move the parent's away from the
  // addresses the device writes to.
  if (madvise(base_, rounded, MADV_DONTFORK) != 0) {
    throw Failure(CKV_ENOMEM,
                  std::string("keeping the host pool from forks failed: ") + std::strerror(errno));
  }
  if (huge) {
    madvise(base_, rounded, MADV_HUGEPAGE);  // a kernel without huge pages is only slower
  }
}

void HostPool::populate() {
  uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  std::atomic<uint64_t> next{0};
  std::atomic<int> failed{0};
  auto work = [&] {
    for (uint64_t at = 0; failed == 0 && (at = next.fetch_add(kPopulateTask)) < mapped_bytes_;) {
      int code = populate_task(base_ + at, std::min(kPopulateTask, mapped_bytes_ - at), page);
      if (code != 0) {
        failed = code;
      }
    }
  };
  std::vector<std::thread> threads;
  unsigned wanted = std::min(kMaxPopulateThreads, std::thread::hardware_concurrency());
  threads.reserve(wanted);
  try {
    for (unsigned i = 1; i < wanted; ++i) {
      threads.emplace_back(work);
    }
  } catch (const std::system_error &) {
    // No more threads to be had; those there are do it.
  }
  work();
  for (std::thread &thread : threads) {
    thread.join();
  }
  if (failed != 0) {
    throw Failure(CKV_ENOMEM, "the machine has no " + gib(mapped_bytes_) +
                                  " for the host pool: " + std::strerror(failed));
  }
}

void HostPool::lock_pages() {
  while (locked_bytes_ < mapped_bytes_) {
    uint64_t bytes = std::min(lock_chunk_, mapped_bytes_ - locked_bytes_);
    int code = driver_.host_register(base_ + locked_bytes_, bytes);
    if (code != 0) {
      throw Failure(CKV_EDRIVER, "page-locking the host pool failed after " + gib(locked_bytes_) +
                                     " of " + gib(mapped_bytes_) + ": " + driver_.describe(code));
    }
    locked_bytes_ += bytes;
  }
}

void HostPool::release() {
  for (uint64_t at = 0; at < locked_bytes_; at += lock_chunk_) {
    driver_.host_unregister(base_ + at);
  }
  if (base_ != nullptr) {
    munmap(base_, mapped_bytes_);
  }
  base_ = nullptr;
  mapped_bytes_ = 0;
  locked_bytes_ = 0;
}

}  // namespace ckv
