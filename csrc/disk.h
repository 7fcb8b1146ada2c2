// A disk: the queues of a rank's file and the threads that work them off.
//
// Threads, not io_uring: at slots of 1 MiB and more it was not faster, and container runtimes block
// it. Nobody but these threads ever waits for a disk, so one that hangs holds what it was given and
// nothing else.
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
#include "disk_file.h"
#include "transfer.h"
#include "users.h"

namespace ckv {

class Engine;

class Disk {
 public:
  Disk(Engine &engine, std::unique_ptr<DiskFile> file, unsigned num_threads);
  Disk(const Disk &) = delete;
  Disk &operator=(const Disk &) = delete;
  ~Disk();
  // Each thread owns a share of both: one that is left behind keeps alive what it uses.
  static void start(const std::shared_ptr<Engine> &engine, const std::shared_ptr<Disk> &disk);

  // ---- Callers.
  uint64_t generation() const { return generation_; }
  size_t take_found(ckv_disk_entry *out, size_t max);
  void reset();
  void get_state(ckv_disk_state *out);
  // Whether all threads have ended in time.
  bool close(std::chrono::microseconds timeout);
  const Shape &shape() const { return shape_; }
  size_t slot_blocks() const { return slot_blocks_; }

  // ---- The engine, as it closes.
  // Fails what has not begun; what has may end, and then the threads do.
  void stop();
  bool has_ended();
  // Joins the threads if they have ended, else leaves them behind.
  void let_go();

  // ---- The lane.
  // Who uses which disk slot; the lane alone counts, as in claims.h.
  Users &users() { return users_; }
  // Takes on a transfer that has its claims, or reports it if it cannot be had.
  void push(Transfer *transfer);
  // With the engine's mutex held. Whether the transfer is the caller's to report as cancelled;
  // else a thread has begun it, and reports it.
  bool cancel(Transfer *transfer);

 private:
  enum class Kind { NONE, SUPERBLOCK, WRITE, READ, SCAN };
  // What one thread does before it looks again.
  struct Job {
    Kind kind = Kind::NONE;
    Transfer *transfer = nullptr;  // of a write or a read: its slot number `at`
    size_t at = 0;
    uint64_t begin = 0;  // of a scan
    uint64_t end = 0;
    uint64_t generation = 0;
    uint64_t sequence = 0;
  };
  static constexpr uint64_t kScanned = 16;        // headers that a thread reads in one go
  static constexpr size_t kMaxFound = 64 * 1024;  // entries; until they are taken no more are read

  void run(size_t thread, Buffers *buffers);
  void end_thread();
  // With mutex_ held:
  Job take_job();
  Job take_slot(Kind kind, TransferQueue *queue);
  bool may_write() const;
  bool has_scan() const;
  void take_all(TransferQueue *stopped, int error);
  // Without:
  int move(Buffers *buffers, const Job &job);
  void work(Buffers *buffers, const Job &job);
  void end_slot(const Job &job, int error);
  void end_superblock(const Job &job, int error);
  void scan(Buffers *buffers, const Job &job);
  void report_all(TransferQueue *stopped);
  void report(Transfer *transfer);

  Engine &engine_;
  const Shape shape_;
  const size_t slot_blocks_;
  const size_t max_writers_;
  Users users_;  // the lane's

  // Set under the mutex. A submit, on the step's thread, reads it without.
  std::atomic<uint64_t> generation_;

  std::mutex mutex_;                 // guards all below; behind the engine's
  std::condition_variable changed_;  // there may be a job
  std::condition_variable ended_;
  std::unique_ptr<DiskFile> file_;  // until the last thread ends
  uint64_t num_writes_ = 0;
  bool is_ready_ = true;
  bool has_superblock_ = false;     // one is to be written, and ...
  bool writes_superblock_ = false;  // ... a thread does so
  bool is_closing_ = false;
  TransferQueue reads_;
  TransferQueue writes_;
  size_t num_reading_ = 0;
  size_t num_writing_ = 0;
  std::vector<bool> is_written_;  // by slot: a write was taken, so what a scan finds there is old
  uint64_t scan_next_ = 0;
  size_t num_scanning_ = 0;
  std::deque<ckv_disk_entry> found_;
  ckv_disk_state state_{};          // what is counted, and what ended it
  std::vector<uint64_t> began_ns_;  // by thread; 0: it does nothing
  size_t num_live_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace ckv
