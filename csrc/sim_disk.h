// A real file behind faults that tests ask for: calls that fail, writes that tear, calls that hang.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "ckv.h"
#include "file.h"

namespace ckv {

// Of a variable of the environment, if it is set. Failure with CKV_EINVAL if it is no number: one
// that only looks like it would test something else.
std::optional<uint32_t> number_of(const char *variable);

// The faults of all files of one simulator. Any thread may call; it must outlive its files.
class SimDisk {
 public:
  std::unique_ptr<File> make_file();

  // As ckv_sim_disk_* say; Failure for an entry point that is not there.
  void fail(int entry, uint64_t after, uint64_t count, int code);
  void tear(uint64_t after, uint64_t bytes, bool is_told);
  void stop(int entry, uint64_t after);
  void set_mbps(uint32_t mbps);
  // The same from outside, for tests of whole servers; csrc/README.md names the variables.
  void obey_environment();
  uint64_t num_calls();
  uint64_t num_stopped();

  // ---- Its files.
  // Before a call: waits if it shall hang; -errno if it shall fail, else 0.
  int enter(int entry);
  struct Tear {
    uint64_t bytes = UINT64_MAX;  // what the write puts down
    bool is_told = true;
  };
  Tear next_tear();
  // Until so many bytes would have gone through.
  void wait_for_bytes(uint64_t bytes);

 private:
  static constexpr uint64_t kNever = UINT64_MAX;
  static constexpr size_t kNumEntries = CKV_SIM_DISK_SYNC + 1;
  using Clock = std::chrono::steady_clock;

  struct Entry {
    uint64_t fail_after = 0;
    uint64_t num_failing = 0;
    int code = 0;
    uint64_t stop_after = kNever;
    uint64_t num_stopped = 0;
    uint64_t order = 0;  // counts stops, so that those who wait know the next one
  };
  Entry &at(int entry);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Entry, kNumEntries> entries_;
  uint64_t tear_after_ = kNever;
  Tear tear_;
  uint32_t mbps_ = 0;
  Clock::time_point free_at_{};
  uint64_t num_calls_ = 0;
};

}  // namespace ckv
