// The engine's disks: opened beside the lane, handed what the lane has claimed, closed with it.
#include <algorithm>
#include <string>
#include <utility>

#include "disk.h"
#include "engine.h"
#include "failure.h"

namespace ckv {

namespace {

using std::to_string;

constexpr uint32_t kMaxSlotBlocks = 1000;  // with its header a slot is one call of 1024 pieces
constexpr uint32_t kMaxThreads = 256;
constexpr uint64_t kMaxPayload = uint64_t{1} << 30;  // the sum of it is one thread's

void check(const ckv_disk_config &config, uint64_t stride) {
  if (config.slot_blocks == 0 || config.slot_blocks > kMaxSlotBlocks || config.num_slots <= 0 ||
      config.num_threads > kMaxThreads || config.slot_blocks * stride > kMaxPayload) {
    throw Failure(CKV_EINVAL, "a disk of " + to_string(config.num_slots) + " slots of " +
                                  to_string(config.slot_blocks) + " blocks with " +
                                  to_string(config.num_threads) + " threads cannot be");
  }
}

void check_below(const char *what, const int32_t *ids, size_t n, int32_t least, int32_t end) {
  for (size_t i = 0; i < n; ++i) {
    if (ids[i] < least || ids[i] >= end) {
      throw Failure(CKV_EINVAL, std::string(what) + " " + to_string(ids[i]) + " is not in " +
                                    to_string(least) + ".." + to_string(end - 1));
    }
  }
}

}  // namespace

// A slot's pieces lie within one stride of each other, so a disk takes the stride as a whole.
HostMemory Engine::host_memory() const {
  if (layout_.empty()) {
    throw Failure(CKV_EINVAL, "regions must be set before a disk is opened");
  }
  const std::vector<ckv_region> &regions = layout_.regions();
  HostMemory memory{regions.front().host_base, regions.front().host_stride};
  for (const ckv_region &region : regions) {
    memory.base = std::min(memory.base, region.host_base);
  }
  for (const ckv_region &region : regions) {
    if (region.host_stride != memory.stride ||
        region.host_base - memory.base + region.bytes > memory.stride) {
      throw Failure(CKV_EINVAL, "a disk needs slots that lie apart, and this engine's do not");
    }
  }
  if (memory.base % kPage != 0 || memory.stride % kPage != 0) {
    throw Failure(CKV_EINVAL, "a disk needs slots of whole pages, and these are " +
                                  to_string(memory.stride) + " bytes");
  }
  return memory;
}

std::shared_ptr<Disk> Engine::open_disk(const char *path, const char *facts,
                                        const ckv_disk_config &config) {
  HostMemory memory{};
  {
    std::lock_guard<std::mutex> lock(mutex_);  // regions may be moved beside an open
    memory = host_memory();
  }
  check(config, memory.stride);
  auto file = std::make_unique<DiskFile>(driver_->make_file(), path, facts, config, memory);
  return std::make_shared<Disk>(*this, std::move(file), config.num_threads);
}

void Engine::add_disk(const std::shared_ptr<Disk> &disk) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (phase_ != Phase::OPEN) {
    throw Failure(CKV_CLOSED, "the copy engine is closed");
  }
  disks_.push_back(disk);
}

void Engine::submit_disk(Disk &disk, int direction, const DiskOrder &order, uint64_t tag) {
  bool is_read = direction == CKV_READ;
  if (direction != CKV_WRITE && !is_read) {
    throw Failure(CKV_EINVAL, "direction " + to_string(direction) + " is neither write nor read");
  }
  auto num_slots = static_cast<int32_t>(disk.shape().num_slots);
  if (order.n > static_cast<size_t>(num_slots) || order.key_bytes == 0 ||
      order.key_bytes > CKV_MAX_KEY) {
    throw Failure(CKV_EINVAL, to_string(order.n) + " disk slots with keys of " +
                                  to_string(order.key_bytes) + " bytes, of " +
                                  to_string(num_slots) + " that there are");
  }
  if (order.n > 0 &&
      (order.host_slots == nullptr || order.disk_slots == nullptr || order.keys == nullptr)) {
    throw Failure(CKV_EINVAL, "a transfer to or from a disk needs slots and keys");
  }
  size_t num_blocks = order.n * disk.slot_blocks();
  check_below("disk slot", order.disk_slots, order.n, 0, num_slots);
  check_below("slot", order.host_slots, num_blocks, is_read ? -1 : 0, layout_.num_slots());
  auto part = std::make_unique<DiskPart>();
  part->disk = &disk;
  part->host_slots.assign(order.host_slots, order.host_slots + num_blocks);
  part->keys.assign(order.keys, order.keys + order.n * order.key_bytes);
  part->key_bytes = order.key_bytes;
  if (order.depths != nullptr) {
    part->depths.assign(order.depths, order.depths + order.n);
  }
  part->generation = disk.generation();
  part->errors.assign(order.n, CKV_UNTRIED);
  auto transfer = std::make_unique<Transfer>();
  transfer->tag = tag;
  transfer->direction = direction;
  transfer->blocks.assign(order.disk_slots, order.disk_slots + order.n);
  std::copy_if(part->host_slots.begin(), part->host_slots.end(),
               std::back_inserter(transfer->slots), [](int32_t slot) { return slot >= 0; });
  transfer->disk = std::move(part);
  transfer->report = std::make_unique<Report>();
  transfer->submit_ns = now_ns();
  check_ready(transfer->slots);
  enqueue(transfer.get());
  transfer.release();  // the lane's now
}

// Which slots of a transfer that is not done were copied; nobody moves any of them any more.
void Engine::tell_slots(DiskPart &part, Report *report) {
  if (part.generation != part.disk->generation()) {
    std::fill(part.errors.begin(), part.errors.end(), CKV_UNTRIED);
  }
  report->disk_errors = std::move(part.errors);
  report->completion.disk_errors = report->disk_errors.data();
  report->completion.num_disk_slots = report->disk_errors.size();
}

void Engine::disk_ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  wake_waiters_.notify_all();
}

// With mutex_ held.
bool Engine::has_ended() const {
  return has_lane_ended_ && has_checker_ended_ &&
         std::all_of(disks_.begin(), disks_.end(),
                     [](const auto &disk) { return disk->has_ended(); });
}

// Of an engine that is closing, without the mutex: threads that end want it.
void Engine::let_go_of_disks() {
  for (auto &disk : disks_) {
    disk->let_go();
  }
}

}  // namespace ckv
