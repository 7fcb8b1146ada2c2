#include "sim_disk.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "failure.h"

namespace ckv {

namespace {

class SimFile : public File {
 public:
  SimFile(SimDisk &disk, std::unique_ptr<File> file) : disk_(disk), file_(std::move(file)) {}

  int open(const char *path) override {
    int code = disk_.enter(CKV_SIM_DISK_OPEN);
    return code != 0 ? code : file_->open(path);
  }

  int lock() override {
    int code = disk_.enter(CKV_SIM_DISK_LOCK);
    return code != 0 ? code : file_->lock();
  }

  int allocate(uint64_t bytes) override {
    int code = disk_.enter(CKV_SIM_DISK_ALLOCATE);
    return code != 0 ? code : file_->allocate(bytes);
  }

  int set_direct(bool on) override { return file_->set_direct(on); }

  int64_t read(const iovec *pieces, int n, uint64_t offset) override {
    int code = disk_.enter(CKV_SIM_DISK_READ);
    if (code != 0) {
      return code;
    }
    int64_t got = file_->read(pieces, n, offset);
    disk_.wait_for_bytes(got > 0 ? static_cast<uint64_t>(got) : 0);
    return got;
  }

  int64_t write(const iovec *pieces, int n, uint64_t offset) override {
    int code = disk_.enter(CKV_SIM_DISK_WRITE);
    if (code != 0) {
      return code;
    }
    uint64_t bytes = 0;
    for (int i = 0; i < n; ++i) {
      bytes += pieces[i].iov_len;
    }
    disk_.wait_for_bytes(bytes);
    SimDisk::Tear tear = disk_.next_tear();
    if (tear.bytes >= bytes) {
      return file_->write(pieces, n, offset);
    }
    int64_t written = write_first(pieces, tear.bytes, offset);
    return written < 0 || tear.is_told ? written : static_cast<int64_t>(bytes);
  }

  int sync() override {
    int code = disk_.enter(CKV_SIM_DISK_SYNC);
    return code != 0 ? code : file_->sync();
  }

 private:
  int64_t write_first(const iovec *pieces, uint64_t bytes, uint64_t offset) {
    std::vector<iovec> first;
    for (uint64_t left = bytes; left > 0; left -= first.back().iov_len, ++pieces) {
      first.push_back({pieces->iov_base, std::min<size_t>(pieces->iov_len, left)});
    }
    return first.empty() ? 0 : file_->write(first.data(), static_cast<int>(first.size()), offset);
  }

  SimDisk &disk_;
  std::unique_ptr<File> file_;
};

}  // namespace

std::optional<uint32_t> number_of(const char *variable) {
  const char *text = std::getenv(variable);
  if (text == nullptr) {
    return std::nullopt;
  }
  uint32_t number = 0;
  const char *end = text + std::strlen(text);
  auto [rest, error] = std::from_chars(text, end, number);
  if (error != std::errc() || rest != end) {
    throw Failure(CKV_EINVAL, std::string(variable) + " = '" + text +
                                  "' is no whole number from 0 to 4294967295, so the simulator "
                                  "does not start; set one, or unset it");
  }
  return number;
}

void SimDisk::obey_environment() {
  set_mbps(number_of("CKV_SIM_DISK_MBPS").value_or(0));
  if (std::optional<uint32_t> num_reads = number_of("CKV_SIM_DISK_FAIL_READS")) {
    fail(CKV_SIM_DISK_READ, *num_reads, UINT64_MAX, EIO);
  }
  if (std::optional<uint32_t> num_reads = number_of("CKV_SIM_DISK_STOP_READS")) {
    stop(CKV_SIM_DISK_READ, *num_reads);
  }
}

std::unique_ptr<File> SimDisk::make_file() {
  return std::make_unique<SimFile>(*this, make_posix_file());
}

SimDisk::Entry &SimDisk::at(int entry) {
  if (entry < 0 || static_cast<size_t>(entry) >= kNumEntries) {
    throw Failure(CKV_EINVAL, "a disk has no entry point " + std::to_string(entry));
  }
  return entries_[static_cast<size_t>(entry)];
}

int SimDisk::enter(int entry) {
  std::unique_lock<std::mutex> lock(mutex_);
  Entry &here = at(entry);
  ++num_calls_;
  if (here.stop_after == 0) {
    uint64_t order = here.order;
    ++here.num_stopped;
    changed_.wait(lock, [&] { return here.order != order; });
  } else if (here.stop_after != kNever) {
    --here.stop_after;
  }
  if (here.num_failing == 0) {
    return 0;
  }
  if (here.fail_after > 0) {
    --here.fail_after;
    return 0;
  }
  --here.num_failing;
  return -here.code;
}

SimDisk::Tear SimDisk::next_tear() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (tear_after_ == kNever || tear_after_-- > 0) {
    return Tear();
  }
  tear_after_ = kNever;
  return tear_;
}

void SimDisk::wait_for_bytes(uint64_t bytes) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (mbps_ == 0) {
    return;
  }
  free_at_ = std::max(free_at_, Clock::now()) + std::chrono::microseconds(bytes / mbps_);
  Clock::time_point until = free_at_;
  changed_.wait_until(lock, until, [this] { return mbps_ == 0; });
}

void SimDisk::fail(int entry, uint64_t after, uint64_t count, int code) {
  std::lock_guard<std::mutex> lock(mutex_);
  Entry &here = at(entry);
  here.fail_after = after;
  here.num_failing = count;
  here.code = code;
}

void SimDisk::tear(uint64_t after, uint64_t bytes, bool is_told) {
  std::lock_guard<std::mutex> lock(mutex_);
  tear_after_ = after;
  tear_ = {bytes, is_told};
}

void SimDisk::stop(int entry, uint64_t after) {
  std::lock_guard<std::mutex> lock(mutex_);
  Entry &here = at(entry);
  here.stop_after = after;
  here.num_stopped = 0;  // they go on, if they have not yet woken up
  ++here.order;
  changed_.notify_all();
}

void SimDisk::set_mbps(uint32_t mbps) {
  std::lock_guard<std::mutex> lock(mutex_);
  mbps_ = mbps;
  free_at_ = Clock::time_point();
  changed_.notify_all();
}

uint64_t SimDisk::num_calls() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_calls_;
}

uint64_t SimDisk::num_stopped() {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t num_stopped = 0;
  for (const Entry &entry : entries_) {
    num_stopped += entry.num_stopped;
  }
  return num_stopped;
}

}  // namespace ckv
