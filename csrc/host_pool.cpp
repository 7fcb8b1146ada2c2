#include "host_pool.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

#include "failure.h"
#include "placement.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ckv {

namespace {

using Clock = std::chrono::steady_clock;

// Registering holds locks that other CUDA calls and other processes wait for, an engine step's
// among them; small chunks and a breath between them let those through (TensorRT-LLM issue 17429:
// 700 GB in one call stalled a host for minutes).
constexpr uint64_t kChunk = uint64_t{128} << 20;
constexpr uint64_t kPopulateTask = uint64_t{16} << 20;  // each thread has one of a chunk
constexpr unsigned kPopulateThreads = 8;
constexpr unsigned kMaxThreads = 64;
constexpr int kStopped = -1;
constexpr int kNoRoom = -2;

uint64_t page_bytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

uint64_t whole_pages(uint64_t bytes) {
  uint64_t page = page_bytes();
  return bytes > UINT64_MAX - page ? UINT64_MAX / page * page : (bytes + page - 1) / page * page;
}

int choose_node(const Driver &driver, int wanted) {
  int node = wanted == CKV_NUMA_DEVICE ? driver.numa_node() : wanted;
  return std::max(node, -1);
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
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

std::string memlock_text() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return "; lower dram_bytes if the machine locks no more";
  }
  return "; RLIMIT_MEMLOCK is " + size_text(limit.rlim_cur) +
         " (`ulimit -l unlimited`, or --ulimit memlock=-1 for a container)";
}

}  // namespace

HostPool::HostPool(Driver &driver, const ckv_pool_config &config, Intake &intake,
                   std::chrono::milliseconds pause)
    : driver_(driver),
      intake_(intake),
      numa_node_(choose_node(driver, config.numa_node)),
      chunk_bytes_(whole_pages(config.chunk_bytes == 0 ? kChunk : config.chunk_bytes)),
      pause_(pause),
      num_left_(config.num_left),
      num_threads_(std::min(config.num_threads, kMaxThreads)) {
  try {
    map(config.bytes, config.huge != 0);
  } catch (...) {
    release();
    throw;
  }
  first_bytes_ =
      config.first_bytes == 0 ? mapped_bytes_ : std::min(config.first_bytes, mapped_bytes_);
  uint64_t wanted = config.wanted_bytes == 0 ? mapped_bytes_ : config.wanted_bytes;
  wanted_at_first_ = std::min(std::max(wanted, first_bytes_), mapped_bytes_);
  wanted_bytes_ = wanted_at_first_;
  grows_ = driver_.locks_pages() || config.wanted_bytes != 0;
  if (!grows_) {
    ready_bytes_.store(mapped_bytes_, std::memory_order_release);
  }
}

HostPool::~HostPool() {
  stop();
  if (grower_.joinable()) {
    grower_.join();
  }
  release();
}

void HostPool::map(uint64_t bytes, bool huge) {
  if (bytes == 0 || bytes > UINT64_MAX - page_bytes()) {
    throw Failure(CKV_EINVAL, "a host pool of " + size_text(bytes) + " cannot be mapped");
  }
  uint64_t rounded = whole_pages(bytes);
  void *got = mmap(nullptr, rounded, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) {
    throw Failure(CKV_ENOMEM, "mapping a host pool of " + size_text(bytes) +
                                  " failed: " + std::strerror(errno) + "; lower dram_bytes");
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
  prefer_node(base_, rounded, numa_node_);
}

void HostPool::grow() {
  if (ready_bytes() == mapped_bytes_) {
    return;
  }
  check_room(first_bytes_);
  std::unique_lock<std::mutex> lock(mutex_);
  start_grower();
  changed_.wait(lock, [this] { return !is_growing_ || ready_bytes() >= first_bytes_; });
  if (ready_bytes() < first_bytes_) {
    throw Failure(error_, why_);
  }
}

// Under the mutex.
void HostPool::start_grower() {
  is_growing_ = true;
  error_ = 0;
  why_[0] = '\0';
  try {
    grower_ = std::thread([this] { run(); });
  } catch (...) {
    is_growing_ = false;
    throw;
  }
}

bool HostPool::wait_grown(std::chrono::microseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout,
                           [this] { return !is_growing_ || ready_bytes() >= wanted_bytes_; });
}

void HostPool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    should_stop_ = true;
  }
  changed_.notify_all();
}

void HostPool::want(uint64_t bytes) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    wanted_bytes_ = std::max(wanted_bytes_.load(), std::min(bytes, mapped_bytes_));
  }
  changed_.notify_all();
}

// Returns once more is wanted than there is, or the growth is to end.
void HostPool::until_wanted() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return should_stop_ || ready_bytes() < wanted_bytes_; });
}

// The grower's thread.
void HostPool::run() {
  prctl(PR_SET_NAME, "ckv-pool");
  try {
    CpuSet cpus = near(process_cpus(), node_cpus(numa_node_));
    run_on(cpus);  // the threads that touch pages inherit it
    unsigned spread = std::max<unsigned>(1, static_cast<unsigned>(cpus.size()));
    num_threads_ = num_threads_ == 0 ? std::min(kPopulateThreads, spread) : num_threads_;
    while (!try_to_grow() && pause()) {
    }
  } catch (const std::exception &error) {
    end_growth(CKV_ENOMEM, error.what());
  }
}

// False where memory is short and a later try may have more.
bool HostPool::try_to_grow() {
  try {
    add_chunks();
    end_growth(0, "");
    return true;
  } catch (const Failure &failure) {
    end_growth(failure.code(), failure.what());
    return failure.code() != CKV_ENOMEM || ready_bytes() < first_bytes_;
  }
}

// False once the growth is to end.
bool HostPool::pause() {
  std::unique_lock<std::mutex> lock(mutex_);
  return !changed_.wait_for(lock, pause_, [this] { return should_stop_.load(); });
}

void HostPool::add_chunks() {
  // Also because a call of an unattached thread would break a graph capture under way elsewhere.
  int code = driver_.attach_thread();
  if (code != 0) {
    throw Failure(CKV_EDRIVER,
                  "the pool's thread got no device context: " + driver_.describe(code));
  }
  for (uint64_t begin = ready_bytes(); begin < mapped_bytes_; begin = ready_bytes()) {
    uint64_t end = begin + std::min(chunk_bytes_, mapped_bytes_ - begin);
    try {
      until_wanted();
      check_not_stopped();
      check_room(end - begin);
      if (driver_.locks_pages()) {
        populate(begin, end);
        check_not_stopped();
        breathe();
        lock_pages(begin, end);
      } else {
        are_ready(end);
      }
    } catch (...) {
      madvise(base_ + begin, end - begin, MADV_DONTNEED);  // what nobody can use goes back
      throw;
    }
  }
}

// Somebody serves by now: the driver is left to them for as long as it has just been kept.
void HostPool::breathe() {
  if (ready_bytes() < first_bytes_ || ready_bytes() == 0) {
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, last_lock_, [this] { return should_stop_.load(); });
  lock.unlock();
  check_not_stopped();
}

void HostPool::populate(uint64_t begin, uint64_t end) {
  Clock::time_point start = Clock::now();
  std::atomic<uint64_t> next{begin};
  std::atomic<int> failed{0};
  touch_with_threads([&] {
    int code = populate_tasks(&next, end);
    if (code != 0) {
      failed = code;
      next = end;  // the others stop too
    }
  });
  {
    std::lock_guard<std::mutex> lock(mutex_);
    populate_s_ += seconds_since(start);
  }
  check_not_stopped();
  if (failed == kNoRoom) {
    check_room(kPopulateTask);
  }
  if (failed != 0) {
    const char *text = failed > 0 ? std::strerror(failed) : "memory ran short for a moment";
    throw Failure(CKV_ENOMEM, stopped_at("populating") + text + "; lower dram_bytes");
  }
}

// 0, an errno, kStopped or kNoRoom. Looks at what is left before each task: the other ranks of a
// node grow at the same time, and no rank sees what another has only begun to take. So that must
// be little: a task of each thread, not a chunk.
int HostPool::populate_tasks(std::atomic<uint64_t> *next, uint64_t end) noexcept try {
  const uint64_t page = page_bytes();
  for (uint64_t at = 0; (at = next->fetch_add(kPopulateTask)) < end;) {
    uint64_t bytes = std::min(kPopulateTask, end - at);
    if (should_stop_) {
      return kStopped;
    }
    if (!intake_.begin(bytes)) {
      return kNoRoom;
    }
    int code = populate_task(base_ + at, bytes, page);
    intake_.end(bytes);
    if (code != 0) {
      return code;
    }
  }
  return 0;
} catch (const std::exception &) {  // no memory to look at what is left
  return kNoRoom;
}

void HostPool::touch_with_threads(const std::function<void()> &work) {
  std::vector<std::thread> threads;
  threads.reserve(num_threads_);
  try {
    for (unsigned i = 1; i < num_threads_; ++i) {
      threads.emplace_back(work);
    }
  } catch (const std::exception &) {
    // No more threads to be had; those there are do it.
  }
  work();
  for (std::thread &thread : threads) {
    thread.join();
  }
}

void HostPool::lock_pages(uint64_t begin, uint64_t end) {
  Clock::time_point start = Clock::now();
  int code = driver_.host_register(base_ + begin, end - begin);
  last_lock_ = Clock::now() - start;
  if (code != 0) {
    throw Failure(CKV_EDRIVER,
                  stopped_at("page-locking") + driver_.describe(code) + memlock_text());
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    lock_s_ += std::chrono::duration<double>(last_lock_).count();
  }
  are_ready(end);
}

void HostPool::are_ready(uint64_t end) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ready_bytes_.store(end, std::memory_order_release);
    is_growing_ = true;  // again, if memory had been short: what is said of that is past
    error_ = 0;
    why_[0] = '\0';
  }
  changed_.notify_all();
}

void HostPool::check_room(uint64_t bytes) const {
  Room room = intake_.look();
  room.reserve += num_left_ * (ready_bytes() + bytes);
  if (room.fits(bytes)) {
    return;
  }
  std::string so_far = ready_bytes() == 0 ? "" : stopped_at("growing");
  throw Failure(CKV_ENOMEM, so_far + room.owner + " has " + size_text(room.available) +
                                " available and keeps " + size_text(room.reserve) +
                                " of it, the pool wants " + size_text(mapped_bytes_) +
                                "; lower dram_bytes");
}

void HostPool::check_not_stopped() const {
  if (should_stop_) {
    throw Failure(CKV_CLOSED, stopped_at("growing") + "the engine is closed");
  }
}

std::string HostPool::stopped_at(const char *what) const {
  return std::string(what) + " stopped at " + size_text(ready_bytes()) + " of " +
         size_text(mapped_bytes_) + ": ";
}

void HostPool::end_growth(int error, const char *why) noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_growing_ = false;
    error_ = error;
    std::snprintf(why_, sizeof why_, "%s", why);
  }
  changed_.notify_all();
}

bool HostPool::contains(uint64_t address) const {
  uint64_t base = reinterpret_cast<uint64_t>(base_);
  return address >= base && address - base < mapped_bytes_;
}

void HostPool::get_state(ckv_pool_state *out) const {
  *out = ckv_pool_state{};
  out->size = sizeof *out;
  out->numa_node = numa_node_;
  out->mapped_bytes = mapped_bytes_;
  std::lock_guard<std::mutex> lock(mutex_);
  out->ready_bytes = ready_bytes();
  out->wanted_bytes = wanted_bytes_;
  out->is_growing = is_growing_ && ready_bytes() < wanted_bytes_;
  out->error = error_;
  out->populate_s = populate_s_;
  out->lock_s = lock_s_;
  std::memcpy(out->why, why_, sizeof out->why);
}

void HostPool::unlock_pages() {
  uint64_t ready = ready_bytes_.exchange(0);
  if (driver_.locks_pages()) {
    for (uint64_t at = 0; at < ready; at += chunk_bytes_) {
      driver_.host_unregister(base_ + at);
    }
  }
}

void HostPool::give_back() {
  stop();
  if (grower_.joinable()) {
    grower_.join();
  }
  unlock_pages();
  madvise(base_, mapped_bytes_, MADV_DONTNEED);
}

void HostPool::grow_again() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (grower_.joinable() || ready_bytes() > 0) {
    throw Failure(CKV_EINVAL, "a pool grows again once it was given back");
  }
  if (!grows_) {
    ready_bytes_.store(mapped_bytes_, std::memory_order_release);
    return;
  }
  should_stop_ = false;
  wanted_bytes_ = wanted_at_first_;
  first_bytes_ = 0;
  start_grower();
}

void HostPool::release() {
  unlock_pages();
  if (base_ != nullptr) {
    munmap(base_, mapped_bytes_);
  }
}

}  // namespace ckv
