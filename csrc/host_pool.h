// DRAM for the slots: anonymous, not inherited by forks, page-locked where the driver needs it.
#pragma once

#include <cstdint>
#include <string>

#include "driver.h"

namespace ckv {

class HostPool {
 public:
  // Registering holds locks that other CUDA calls and other processes wait for; chunks let them
  // through (TensorRT-LLM issue 17429: 700 GB in one call stalled a host for minutes).
  static constexpr uint64_t kLockChunk = uint64_t{1} << 30;

  // Throws Failure; leaves nothing mapped or registered then.
  HostPool(Driver &driver, const ckv_pool_config &config);
  HostPool(const HostPool &) = delete;
  HostPool &operator=(const HostPool &) = delete;
  ~HostPool();

  void *base() const { return base_; }
  void get_state(ckv_pool_state *out) const;

 private:
  void map(uint64_t bytes, bool huge);
  void populate();
  void lock_pages();
  void release();

  Driver &driver_;
  const uint64_t lock_chunk_;
  char *base_ = nullptr;
  uint64_t mapped_bytes_ = 0;
  uint64_t locked_bytes_ = 0;
};

}  // namespace ckv
