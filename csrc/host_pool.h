// DRAM for the slots: anonymous, not inherited by forks, page-locked where the driver needs it.
//
// Locking takes seconds per 10 GiB, so a pool grows chunk by chunk on a thread of its own, with a
// breath between chunks, and is used from its base on as far as it is ready. What cannot be had
// ends the growth, not the pool; where memory was short it is tried again from time to time, for a
// virtual machine may be given its memory slowly, and what others took comes back. One that is
// given back keeps its address and grows anew.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "available.h"
#include "driver.h"

namespace ckv {

class HostPool {
 public:
  // Maps. For a driver that locks no pages nothing is touched; all is ready then, or as far as it
  // is wanted once it grows. Throws
  // Failure; leaves nothing mapped then. `pause`: from a shortage of memory to the next try.
  HostPool(Driver &driver, const ckv_pool_config &config, Intake &intake,
           std::chrono::milliseconds pause = std::chrono::seconds(30));
  HostPool(const HostPool &) = delete;
  HostPool &operator=(const HostPool &) = delete;
  // Waits for the chunk under way.
  ~HostPool();

  // Starts to grow and returns when first_bytes are ready; Failure if they will never be.
  void grow();
  // Until it grows no more, or memory is short; false if it still does at the end of `timeout`.
  bool wait_grown(std::chrono::microseconds timeout);
  // From any thread: it grows to so many bytes, if it wanted less.
  void want(uint64_t bytes);
  // Waits for the chunk under way, unlocks and empties all pages. The address stays.
  void give_back();
  // From nothing, and without waiting for the first bytes.
  void grow_again();
  // From any thread: the growth ends after what is under way.
  void stop();

  void *base() const { return base_; }
  uint64_t ready_bytes() const { return ready_bytes_.load(std::memory_order_acquire); }
  bool contains(uint64_t address) const;
  void get_state(ckv_pool_state *out) const;
  uint64_t chunk_bytes() const { return chunk_bytes_; }

 private:
  void map(uint64_t bytes, bool huge);
  void run();
  void start_grower();
  bool try_to_grow();
  bool pause();
  void add_chunks();
  void until_wanted();
  void breathe();
  void populate(uint64_t begin, uint64_t end);
  int populate_tasks(std::atomic<uint64_t> *next, uint64_t end) noexcept;
  void touch_with_threads(const std::function<void()> &work);
  void lock_pages(uint64_t begin, uint64_t end);
  void are_ready(uint64_t end);
  void check_room(uint64_t bytes) const;
  void check_not_stopped() const;
  std::string stopped_at(const char *what) const;
  void end_growth(int error, const char *why) noexcept;
  void unlock_pages();
  void release();

  Driver &driver_;
  Intake &intake_;
  const int numa_node_;
  const uint64_t chunk_bytes_;
  const std::chrono::milliseconds pause_;
  const uint64_t num_left_;
  unsigned num_threads_;
  std::chrono::steady_clock::duration last_lock_{};  // the grower's thread
  char *base_ = nullptr;
  uint64_t mapped_bytes_ = 0;
  uint64_t first_bytes_ = 0;
  bool grows_ = false;                     // else all of it is there from the start
  std::atomic<uint64_t> wanted_bytes_{0};  // set under the mutex, for who waits
  uint64_t wanted_at_first_ = 0;
  std::atomic<uint64_t> ready_bytes_{0};  // populated and locked, whole chunks but for the last
  std::atomic<bool> should_stop_{false};  // set under the mutex, for who pauses

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool is_growing_ = false;
  int error_ = 0;
  char why_[sizeof ckv_pool_state::why] = "";
  double populate_s_ = 0;
  double lock_s_ = 0;
  std::thread grower_;
};

}  // namespace ckv
