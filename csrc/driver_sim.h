// The simulator: CUDA's streams and events over threads and memcpy, and the hooks tests pull.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ckv.h"
#include "driver.h"
#include "sim_disk.h"
#include "sim_watch.h"

namespace ckv {

class SimDriver : public Driver {
 public:
  explicit SimDriver(uint32_t mbps);
  ~SimDriver() override;
  // Adds the copy streams. Apart from the constructor, so that a failure still joins threads.
  void start();

  int attach_thread() override { return 0; }
  Stream copy_stream(int direction) override { return streams_[direction].get(); }
  int event_create(Event *out) override;
  void event_destroy(Event event) override;
  int event_record(Event event, Stream stream) override;
  int event_query(Event event) override;
  int stream_query(Stream stream) override;
  unsigned paths(int direction) const override;
  int copy(int direction, int path, const Descriptor *descriptors, size_t n, size_t place) override;
  bool locks_pages() const override { return false; }
  int host_register(void *base, size_t bytes) override;
  int host_unregister(void *) override { return 0; }
  std::string describe(int code) override;
  int numa_node() const override { return -1; }
  std::chrono::microseconds grace() const override { return grace_; }
  SimWatch *watch() override { return watch_.is_on() ? &watch_ : nullptr; }
  std::unique_ptr<File> make_file() override { return disk_.make_file(); }

  void hold(bool on);
  void fail(int entry, uint64_t after, uint64_t count, int code);
  void stop(uint64_t after);
  void set_paths(unsigned paths) { paths_ = paths; }
  void set_grace(std::chrono::microseconds grace) { grace_ = grace; }
  void fail_path(int path, int code);
  Stream create_stream();
  void compute(Stream stream, void *ptr, int value, uint64_t bytes, uint64_t delay_us);
  void block(Stream stream, bool on);
  void turn_watch(bool on) { watch_.turn(on); }
  SimDisk &disk() { return disk_; }
  ckv_sim_stats stats();

 private:
  static constexpr uint64_t kNever = UINT64_MAX;

  // After `after` calls, `count` calls fail.
  struct Fault {
    uint64_t after = 0;
    uint64_t count = 0;
    int code = 0;
    int next();
  };
  struct Op {
    std::vector<Descriptor> copies;
    uint64_t bytes = 0;  // of all copies, or to set
    void *set_at = nullptr;
    int set_to = 0;
    std::chrono::microseconds delay{0};
  };
  struct SimStream {
    std::deque<Op> ops;
    uint64_t num_queued = 0;
    uint64_t num_done = 0;
    int direction = -1;  // -1: compute
    bool is_running = false;
    bool is_blocked = false;
    uint64_t bytes_in_flight = 0;
    std::thread thread;
  };
  // Fires when the stream has done what was queued at the record; never recorded: has fired.
  struct SimEvent {
    SimStream *stream = nullptr;
    uint64_t target = 0;
  };

  SimStream *add_stream(int direction);
  SimStream *find(Stream stream);
  void work(SimStream *stream);
  void execute(std::unique_lock<std::mutex> &lock, SimStream *stream, const Op &op);
  void run_copies(int direction, const std::vector<Descriptor> &copies);
  int fault(std::unique_lock<std::mutex> &lock, int entry);
  void wait_stopped(std::unique_lock<std::mutex> &lock);
  void end_context(std::unique_lock<std::mutex> &lock, int code);
  bool is_copying() const;

  const uint32_t mbps_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<SimStream>> streams_;  // the copy streams first
  bool is_held_ = false;
  bool is_quitting_ = false;
  int dead_code_ = 0;
  std::array<Fault, CKV_SIM_HOST_REGISTER + 1> faults_;  // by entry point
  uint64_t stop_after_ = kNever;
  uint64_t stop_order_ = 0;
  std::atomic<unsigned> paths_{~0U};
  std::atomic<std::chrono::microseconds> grace_{Driver::grace()};
  int path_codes_[CKV_PATH_GATHER + 1] = {};  // what each path fails with
  ckv_sim_stats stats_{};
  SimWatch watch_;
  SimDisk disk_;
};

}  // namespace ckv
