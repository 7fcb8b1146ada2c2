// The engine: what callers and the lane thread share, under one mutex that nobody holds for long.
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "available.h"
#include "ckv.h"
#include "claims.h"
#include "counters.h"
#include "disk.h"
#include "driver.h"
#include "host_pool.h"
#include "layout.h"
#include "sums.h"
#include "transfer.h"

namespace ckv {

using Clock = std::chrono::steady_clock;

inline uint64_t now_ns() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
          .count());
}

// OPEN -> DRAINING (close: no new ones) -> STOPPING (deadline: fail what has not begun) -> LEFT
// (the driver keeps copies: the threads are on their own).
enum class Phase { OPEN, DRAINING, STOPPING, LEFT };

constexpr std::chrono::microseconds kForEver = std::chrono::microseconds::max();

// An order ends the lane's waits that are longer than this, and no shorter ones: to wake a thread
// costs the step more than so short a wait costs the copy.
constexpr std::chrono::microseconds kDeafNap{500};

// What a caller wants of a disk: ckv_disk_submit's arrays.
struct DiskOrder {
  const int32_t *host_slots;
  const int32_t *disk_slots;
  const uint8_t *keys;
  size_t key_bytes;
  const uint32_t *depths;
  size_t n;
};

class Engine {
 public:
  Engine(const ckv_config &config, std::unique_ptr<Driver> driver);

  // ---- Callers. All throw Failure.
  void set_regions(const ckv_region *regions, size_t n, int32_t num_blocks, int32_t num_slots);
  void submit(int direction, uint32_t flags, const int32_t *blocks, const int32_t *slots, size_t n,
              uintptr_t after_stream, uint64_t tag);
  void cancel(uint64_t tag);
  bool wait(uint64_t tag, std::chrono::microseconds timeout);
  void *map_pool(const ckv_pool_config &config);
  void get_pool_state(void *base, ckv_pool_state *out);
  void want_pool(void *base, uint64_t bytes);
  bool wait_pool(void *base, std::chrono::microseconds timeout);
  // BLOCKS.
  void release_pool(void *base);
  void regrow_pool(void *base);
  void unmap_pool(void *base);
  // BLOCKS.
  std::shared_ptr<Disk> open_disk(const char *path, const char *facts,
                                  const ckv_disk_config &config);
  void submit_disk(Disk &disk, int direction, const DiskOrder &order, uint64_t tag);
  void get_stats(ckv_stats *out) const;
  ReportStack &reports() { return reports_; }

  // ---- Closing, by the handle's owner.
  static void start(const std::shared_ptr<Engine> &engine);
  void add_disk(const std::shared_ptr<Disk> &disk);
  int close(std::chrono::microseconds timeout);

  // ---- The lane.
  // Waits up to `patience` for a phase other than `*phase` or, where that is longer than kDeafNap,
  // for orders; then takes all orders: new transfers join `queues`, or fail if they conflict with
  // an unfinished one; cancelled ones are marked and moved to the front. Whether there were any.
  bool take_orders(std::chrono::microseconds patience, Queues *queues, Phase *phase);
  // Takes back a transfer that no copy touches any more: reported, unless it is checked first.
  void settle(Transfer *transfer, int status, int error);
  void recycle(Event event);
  // From here on the transfer's blocks must stay as they are; for a driver that watches them.
  void begin_watch(const Transfer &transfer);
  void poison(int code);
  int poison_code() const { return poison_code_.load(std::memory_order_acquire); }
  void lane_ended();
  bool is_lane_asleep();

  // ---- Disks.
  void disk_ended();

  // ---- The checker; there is one only if blocks are summed.
  // Waits for a transfer to check; null when the lane has ended and none is left.
  Transfer *take_check();
  // Reports a transfer that will touch no memory again, and gives it back. Disks do so as well.
  void finish(Transfer *transfer, int status, int error);
  bool is_past_deadline();
  void checker_ended();
  Sums &sums() { return sums_; }

  Driver &driver() { return *driver_; }
  Counters &counters() { return counters_; }
  // Bit p: CKV_PATH_ p can be used for transfers of the direction.
  uint32_t paths(int direction) const;
  const Layout &layout() const { return layout_; }
  const ckv_config &config() const { return config_; }
  pid_t pid() const { return pid_; }

 private:
  void check_count(int direction, size_t n) const;
  void check_ids(const Transfer &transfer);
  void check_ready(const std::vector<int32_t> &slots);
  HostMemory host_memory() const;
  Event record_after(uintptr_t stream);
  void enqueue(Transfer *transfer);
  void admit(TransferQueue *submitted, Queues *queues);
  void stop_cancelled(Queues *queues);
  void drop_pool(void *base);
  // With mutex_ held:
  void check_idle(const char *what, bool (*uses)(const Transfer &)) const;
  using Pools = std::map<void *, std::unique_ptr<HostPool>>;
  Pools::iterator find_pool(void *base);
  bool has_pool_of(const ckv_region &region) const;
  void set_borders(Layout *layout) const;
  int32_t count_ready_slots();
  std::unique_ptr<Report> complete(Transfer *transfer, int status, int error);
  static void tell_slots(DiskPart &part, Report *report);
  // Whether the transfer is to be reported as cancelled, by who asks.
  static bool stop(Transfer *transfer, Queues *queues);
  bool has_ended() const;
  bool has_orders(Phase seen) const;
  void leave_behind();
  void let_go_of_disks();

  const ckv_config config_;
  const pid_t pid_;
  // Before what must die before it: events and pools need the driver, pools the intake.
  std::unique_ptr<Driver> driver_;
  struct EventStore {
    Driver *driver = nullptr;
    std::vector<Event> idle;
    ~EventStore();
  } events_;
  Intake intake_;
  Pools pools_;
  std::vector<std::shared_ptr<Disk>> disks_;  // all there ever were: claims need theirs
  Layout layout_;                             // constant while a copy is unfinished
  Claims claims_;                             // the lane's, but for what is given back
  std::vector<uint64_t> taken_cancels_;       // the lane's
  Sums sums_;
  ReportStack reports_;
  Counters counters_;
  std::atomic<int> poison_code_{0};
  std::atomic<int32_t> num_ready_slots_{0};   // when one looked last; there may be more by now
  std::atomic<bool> is_host_foreign_{false};  // some region's slots lie in no pool of ours

  std::mutex close_mutex_;  // before mutex_
  std::mutex mutex_;        // guards all below, events_, pools_ and disks_
  std::condition_variable wake_lane_;
  bool is_lane_asleep_ = false;  // whoever has an order clears this and wakes it
  std::condition_variable wake_checker_;
  std::condition_variable wake_waiters_;
  Phase phase_ = Phase::OPEN;
  TransferQueue inbox_;
  std::vector<uint64_t> cancels_;
  std::unordered_map<uint64_t, Transfer *> unfinished_;
  std::array<CheckQueue, kRanks.size()> to_check_;
  bool has_lane_ended_ = false;
  bool has_checker_ended_;
  int close_result_ = CKV_AGAIN;  // until closed
  std::thread lane_;
  std::thread checker_;
};

}  // namespace ckv
