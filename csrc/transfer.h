// A transfer, the queue it waits in, and the stack its completion is reported through.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ckv.h"
#include "driver.h"

namespace ckv {

// A completion on its way to the consumer. Allocated at submit, so that reporting cannot fail.
struct Report {
  Report *next = nullptr;
  ckv_completion completion{};
  std::vector<int32_t> disk_errors;  // what the completion points to
};

// The order of leaving: loads that somebody waits for, loads on a guess, stores. In each, first in
// is first out.
enum class Rank { AWAITED, SPECULATIVE, STORE };
constexpr std::array<Rank, 3> kRanks = {Rank::AWAITED, Rank::SPECULATIVE, Rank::STORE};

// How far the expansion of a transfer has come: pair, region, byte within the piece.
struct Cursor {
  size_t pair = 0;
  size_t region = 0;
  uint64_t offset = 0;
};

class Disk;

// What a write or a read has besides.
struct DiskPart {
  Disk *disk = nullptr;             // the engine's, as long as that is
  std::vector<int32_t> host_slots;  // slot_blocks for each disk slot; -1: not wanted
  std::vector<uint8_t> keys;        // key_bytes for each disk slot
  size_t key_bytes = 0;
  std::vector<uint32_t> depths;
  uint64_t generation = 0;  // of the file, when it was submitted

  // Guarded by the disk's mutex.
  size_t next = 0;
  size_t num_under_way = 0;
  int error = 0;
  bool is_cancelled = false;
  std::vector<int32_t> errors;  // of each disk slot; allocated at submit, so that no report fails
};

struct Transfer {
  uint64_t tag = 0;
  int direction = CKV_LOAD;
  Rank rank = Rank::AWAITED;
  std::vector<int32_t> blocks;  // of a write or a read: disk slots
  std::vector<int32_t> slots;
  std::unique_ptr<DiskPart> disk;  // of a write or a read
  Event after = nullptr;           // not yet seen fired; owned
  uint64_t until_sampled = 0;      // a store's blocks before the first that is to be summed
  bool is_summed = false;          // a slot of it is to be summed or compared; fixed by the lane
  std::unique_ptr<Report> report;  // empty once reported; guarded by the engine's mutex
  bool is_cancelled = false;       // asked for; guarded by the engine's mutex

  // The lane's own from here on; of a write or a read, once that is handed over, its disk's.
  Transfer *prev = nullptr;
  Transfer *next = nullptr;
  bool has_claims = false;
  bool is_queued = false;
  bool is_stopping = false;  // no further trunk
  Cursor cursor;
  int error = 0;
  uint32_t num_trunks_in_flight = 0;
  uint64_t copied_bytes = 0;
  uint64_t submit_ns = 0;
  uint64_t free_ns = 0;  // when nothing but the lane kept it from starting, as the lane saw it
  uint64_t start_ns = 0;

  bool is_expanded() const { return cursor.pair == blocks.size(); }
  bool writes_blocks() const { return direction == CKV_LOAD || direction == CKV_WRITE; }
  bool writes_slots() const { return direction == CKV_STORE || direction == CKV_READ; }
};

// Intrusive, so that moving a transfer needs no memory and leaving the middle is O(1).
class TransferQueue {
 public:
  bool empty() const { return head_ == nullptr; }
  Transfer *front() const { return head_; }

  void push_back(Transfer *t) {
    t->prev = tail_;
    t->next = nullptr;
    (tail_ ? tail_->next : head_) = t;
    tail_ = t;
    t->is_queued = true;
  }

  void push_front(Transfer *t) {
    t->prev = nullptr;
    t->next = head_;
    (head_ ? head_->prev : tail_) = t;
    head_ = t;
    t->is_queued = true;
  }

  void remove(Transfer *t) {
    (t->prev ? t->prev->next : head_) = t->next;
    (t->next ? t->next->prev : tail_) = t->prev;
    t->prev = nullptr;
    t->next = nullptr;
    t->is_queued = false;
  }

  // Appends all of `other`, which is empty afterwards. O(1).
  void take_all(TransferQueue &other) {
    if (other.empty()) {
      return;
    }
    other.head_->prev = tail_;
    (tail_ ? tail_->next : head_) = other.head_;
    tail_ = other.tail_;
    other.head_ = nullptr;
    other.tail_ = nullptr;
  }

 private:
  Transfer *head_ = nullptr;
  Transfer *tail_ = nullptr;
};

// One queue per rank.
class Queues {
 public:
  TransferQueue &operator[](Rank rank) { return queues_[static_cast<size_t>(rank)]; }

  bool empty() const {
    for (const TransferQueue &queue : queues_) {
      if (!queue.empty()) {
        return false;
      }
    }
    return true;
  }

 private:
  std::array<TransferQueue, kRanks.size()> queues_;
};

// Transfers whose copies are over, through the same links; the lane does not see them as queued.
class CheckQueue {
 public:
  bool empty() const { return head_ == nullptr; }

  void push(Transfer *t) {
    t->next = nullptr;
    (head_ ? tail_->next : head_) = t;
    tail_ = t;
  }

  Transfer *pop() {
    Transfer *t = head_;
    head_ = t ? t->next : nullptr;
    return t;
  }

 private:
  Transfer *head_ = nullptr;
  Transfer *tail_ = nullptr;
};

// Many producers, one consumer, no lock: a consumer that holds the GIL never waits for the lane.
class ReportStack {
 public:
  ReportStack() = default;
  ReportStack(const ReportStack &) = delete;
  ReportStack &operator=(const ReportStack &) = delete;

  ~ReportStack() {
    drop(newest_.load());
    drop(oldest_);
    drop(shown_);
  }

  void push(std::unique_ptr<Report> report) {
    Report *node = report.release();
    node->next = newest_.load(std::memory_order_relaxed);
    while (!newest_.compare_exchange_weak(node->next, node, std::memory_order_release,
                                          std::memory_order_relaxed)) {
    }
    __atomic_fetch_add(&pending_, 1, __ATOMIC_RELEASE);
  }

  // Consumer only.
  std::unique_ptr<Report> pop() {
    if (oldest_ == nullptr) {
      reverse(newest_.exchange(nullptr, std::memory_order_acquire));
    }
    std::unique_ptr<Report> report(oldest_);
    if (report) {
      oldest_ = report->next;
      __atomic_fetch_sub(&pending_, 1, __ATOMIC_RELAXED);
    }
    return report;
  }

  // Consumer only. Keeps what a completion points to until the next call of forget_shown.
  bool show(ckv_completion *out) {
    std::unique_ptr<Report> report = pop();
    if (!report) {
      return false;
    }
    *out = report->completion;
    if (!report->disk_errors.empty()) {
      report->next = shown_;
      shown_ = report.release();
    }
    return true;
  }
  void forget_shown() {
    drop(shown_);
    shown_ = nullptr;
  }

  uint64_t num_pending() const { return __atomic_load_n(&pending_, __ATOMIC_RELAXED); }
  const volatile uint64_t *pending_word() const { return &pending_; }

 private:
  static void drop(Report *node) {
    while (node != nullptr) {
      std::unique_ptr<Report> owned(node);
      node = node->next;
    }
  }

  void reverse(Report *node) {
    while (node != nullptr) {
      Report *next = node->next;
      node->next = oldest_;
      oldest_ = node;
      node = next;
    }
  }

  std::atomic<Report *> newest_{nullptr};
  Report *oldest_ = nullptr;
  Report *shown_ = nullptr;
  // A plain word, for the caller reads it through a pointer without a call.
  alignas(64) uint64_t pending_ = 0;
};

}  // namespace ckv
