#include "disk.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "engine.h"

namespace ckv {

namespace {

constexpr const char *kNotDirect =
    "this file system takes no O_DIRECT, so what is on the disk is in the page cache too";

void say(ckv_disk_state *state, const char *why) {
  std::snprintf(state->why, sizeof state->why, "%s", why);
}

}  // namespace

// Half of the threads write at most: a disk that takes no writes any more may still be read.
Disk::Disk(Engine &engine, std::unique_ptr<DiskFile> file, unsigned num_threads)
    : engine_(engine),
      shape_(file->shape()),
      slot_blocks_(file->slot_blocks()),
      max_writers_(std::max(1U, num_threads / 2)),
      users_(shape_.num_slots),
      generation_(file->generation()),
      file_(std::move(file)),
      is_written_(shape_.num_slots),
      began_ns_(num_threads) {
  state_.size = sizeof state_;
  state_.is_direct = file_->is_direct();
  state_.was_kept = file_->was_kept();
  scan_next_ = file_->was_kept() ? 0 : shape_.num_slots;
  if (!file_->is_direct()) {
    say(&state_, kNotDirect);
  }
}

// By a thread that was left behind, or when all have ended.
Disk::~Disk() {
  for (std::thread &thread : threads_) {
    if (thread.joinable()) {
      thread.detach();
    }
  }
}

void Disk::push(Transfer *transfer) {
  DiskPart &part = *transfer->disk;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    part.error = is_closing_ ? CKV_CLOSED : state_.error;
    part.is_cancelled = part.generation != generation_ || !is_ready_;
    if (part.error == 0 && !part.is_cancelled && !transfer->blocks.empty()) {
      if (transfer->direction == CKV_WRITE) {
        for (int32_t slot : transfer->blocks) {
          is_written_[static_cast<size_t>(slot)] = true;
        }
      }
      (transfer->direction == CKV_READ ? reads_ : writes_).push_back(transfer);
      transfer = nullptr;
    }
  }
  if (transfer != nullptr) {
    report(transfer);
    return;
  }
  changed_.notify_one();
}

bool Disk::cancel(Transfer *transfer) {
  std::lock_guard<std::mutex> lock(mutex_);
  DiskPart &part = *transfer->disk;
  if (part.is_cancelled || !transfer->is_queued) {  // a reset has it already, or it is all begun
    return false;
  }
  (transfer->direction == CKV_READ ? reads_ : writes_).remove(transfer);
  part.is_cancelled = true;
  return part.num_under_way == 0;
}

// With mutex_ held. Moves what nobody has begun to `stopped`; what has begun ends with its slots
// under way. Of no error it is a cancellation.
void Disk::take_all(TransferQueue *stopped, int error) {
  for (TransferQueue *queue : {&reads_, &writes_}) {
    while (Transfer *transfer = queue->front()) {
      queue->remove(transfer);
      DiskPart &part = *transfer->disk;
      part.error = part.error == 0 ? error : part.error;
      part.is_cancelled = true;
      if (part.num_under_way == 0) {
        stopped->push_back(transfer);
      }
    }
  }
}

void Disk::report_all(TransferQueue *stopped) {
  while (Transfer *transfer = stopped->front()) {
    stopped->remove(transfer);
    report(transfer);
  }
}

// Nobody else knows the transfer any more.
void Disk::report(Transfer *transfer) {
  const DiskPart &part = *transfer->disk;
  int status = part.error != 0 ? CKV_FAILED : part.is_cancelled ? CKV_CANCELLED : CKV_DONE;
  engine_.finish(transfer, status, part.error);
}

void Disk::reset() {
  uint64_t generation = random_generation();
  TransferQueue stopped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    generation_ = generation;
    is_ready_ = false;
    has_superblock_ = true;
    scan_next_ = shape_.num_slots;
    found_.clear();
    take_all(&stopped, 0);
  }
  changed_.notify_one();
  report_all(&stopped);
}

size_t Disk::take_found(ckv_disk_entry *out, size_t max) {
  size_t n = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (; n < max && !found_.empty(); found_.pop_front()) {
      if (!is_written_[static_cast<size_t>(found_.front().slot)]) {
        out[n++] = found_.front();
      }
    }
  }
  changed_.notify_one();  // there may be room to scan on
  return n;
}

void Disk::get_state(ckv_disk_state *out) {
  std::lock_guard<std::mutex> lock(mutex_);
  *out = state_;
  out->is_ready = is_ready_ && state_.error == 0 && !is_closing_;
  out->is_scanned = scan_next_ == shape_.num_slots && num_scanning_ == 0 && found_.empty();
  uint64_t now = now_ns();
  for (uint64_t began_ns : began_ns_) {
    if (began_ns != 0) {
      out->oldest_op_us = std::max(out->oldest_op_us, (now - began_ns) / 1000);
    }
  }
}

void Disk::stop() {
  TransferQueue stopped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
    take_all(&stopped, CKV_CLOSED);
  }
  changed_.notify_all();
  report_all(&stopped);
}

bool Disk::has_ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_live_ == 0;
}

bool Disk::close(std::chrono::microseconds timeout) {
  stop();
  std::unique_lock<std::mutex> lock(mutex_);
  return ended_.wait_for(lock, timeout, [this] { return num_live_ == 0; });
}

}  // namespace ckv
