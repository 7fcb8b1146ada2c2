// What the threads of a disk do, one slot at a time: reads first, then writes, then the scan.
#include <sys/prctl.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <utility>

#include "disk.h"
#include "engine.h"
#include "placement.h"

namespace ckv {

namespace {

constexpr int kNicer = 5;  // than the server, as the checker: somebody waits for reads

// A thread that has none to work with fails what it does, and goes on.
template <typename Body>
int without_memory(const Body &body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc &) {
    return CKV_ENOMEM;
  }
}

}  // namespace

void Disk::start(const std::shared_ptr<Engine> &engine, const std::shared_ptr<Disk> &disk) {
  size_t num_threads = disk->began_ns_.size();
  disk->num_live_ = num_threads;
  disk->threads_.reserve(num_threads);
  for (size_t i = 0; i < num_threads; ++i) {
    try {
      auto buffers = std::make_unique<Buffers>();
      disk->threads_.emplace_back(
          [engine = engine, disk = disk, i, buffers = std::move(buffers)]() mutable {
            disk->run(i, buffers.get());
            disk->end_thread();
            disk.reset();  // before the engine, which has what the file stands on
            engine.reset();
          });
    } catch (...) {
      for (; i < num_threads; ++i) {
        disk->end_thread();
      }
      disk->close(std::chrono::seconds(1));  // those that began have nothing to do
      disk->let_go();
      throw;
    }
  }
}

void Disk::run(size_t thread, Buffers *buffers) {
  prctl(PR_SET_NAME, "ckv-disk");
  place_thread(engine_.driver().numa_node());
  setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + kNicer);  // Linux: of this thread
  for (;;) {
    Job job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      began_ns_[thread] = 0;
      changed_.wait(lock, [&] {
        job = take_job();
        return job.kind != Kind::NONE || is_closing_;
      });
      if (job.kind == Kind::NONE) {
        return;
      }
      began_ns_[thread] = now_ns();
    }
    changed_.notify_one();  // there may be more to do, which did not wake anybody
    work(buffers, job);
  }
}

// The last one closes the file, so that who opens it next can lock it.
void Disk::end_thread() {
  std::unique_ptr<DiskFile> file;
  std::unique_lock<std::mutex> lock(mutex_);
  if (num_live_ == 1) {
    file = std::move(file_);
    lock.unlock();
    file.reset();
    lock.lock();
  }
  if (--num_live_ == 0) {
    ended_.notify_all();
    lock.unlock();
    engine_.disk_ended();
  }
}

void Disk::let_go() {
  bool has_ended = this->has_ended();
  for (std::thread &thread : threads_) {
    has_ended ? thread.join() : thread.detach();
  }
  threads_.clear();
}

Disk::Job Disk::take_job() {
  Job job;
  if (has_superblock_ && !writes_superblock_) {
    writes_superblock_ = true;
    job.kind = Kind::SUPERBLOCK;
    job.generation = generation_;
  } else if (reads_.front() != nullptr) {
    ++num_reading_;
    job = take_slot(Kind::READ, &reads_);
  } else if (writes_.front() != nullptr && may_write()) {
    ++num_writing_;
    job = take_slot(Kind::WRITE, &writes_);
    job.sequence = uint64_t{file_->num_opens()} << 32 | num_writes_++;
  } else if (has_scan()) {
    ++num_scanning_;
    job.kind = Kind::SCAN;
    job.generation = generation_;
    job.begin = scan_next_;
    job.end = std::min(scan_next_ + kScanned, shape_.num_slots);
    scan_next_ = job.end;
  }
  return job;
}

Disk::Job Disk::take_slot(Kind kind, TransferQueue *queue) {
  Transfer *transfer = queue->front();
  DiskPart &part = *transfer->disk;
  if (transfer->start_ns == 0) {
    transfer->start_ns = now_ns();
  }
  Job job;
  job.kind = kind;
  job.transfer = transfer;
  job.at = part.next++;
  job.generation = part.generation;
  ++part.num_under_way;
  if (part.next == transfer->blocks.size()) {
    queue->remove(transfer);
  }
  return job;
}

// Beside a reader more than one write would take most of its rate.
bool Disk::may_write() const { return num_writing_ < (num_reading_ > 0 ? 1 : max_writers_); }

bool Disk::has_scan() const {
  return scan_next_ < shape_.num_slots && found_.size() < kMaxFound && !is_closing_;
}

void Disk::work(Buffers *buffers, const Job &job) {
  if (job.kind == Kind::SUPERBLOCK) {
    // Without the bit: what was computed after a reset may be of other weights than the next start
    // loads.
    end_superblock(job,
                   without_memory([&] { return file_->write_superblock(job.generation, false); }));
  } else if (job.kind == Kind::SCAN) {
    scan(buffers, job);
  } else {
    end_slot(job, without_memory([&] { return move(buffers, job); }));
  }
}

int Disk::move(Buffers *buffers, const Job &job) {
  const Transfer &transfer = *job.transfer;
  const DiskPart &part = *transfer.disk;
  SlotOrder order;
  order.slot = static_cast<uint64_t>(transfer.blocks[job.at]);
  order.host_slots = part.host_slots.data() + job.at * slot_blocks_;
  order.key = part.keys.data() + job.at * part.key_bytes;
  order.key_bytes = part.key_bytes;
  order.generation = job.generation;
  if (job.kind == Kind::READ) {
    return file_->read_slot(buffers, order);
  }
  order.sequence = job.sequence;
  order.depth = part.depths.empty() ? 0 : part.depths[job.at];
  return file_->write_slot(buffers, order);
}

void Disk::end_slot(const Job &job, int error) {
  Transfer *transfer = job.transfer;
  DiskPart &part = *transfer->disk;
  bool is_read = job.kind == Kind::READ;
  bool is_last = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --(is_read ? num_reading_ : num_writing_);
    --part.num_under_way;
    part.errors[job.at] = error;
    if (error == 0) {
      transfer->copied_bytes += shape_.payload_bytes;
      state_.num_bytes[is_read ? 1 : 0] += shape_.payload_bytes;
    } else {
      part.error = part.error == 0 ? error : part.error;
      if (transfer->is_queued) {  // the rest is of no use without this one
        (is_read ? reads_ : writes_).remove(transfer);
      }
    }
    part.is_cancelled = part.is_cancelled || part.generation != generation_;
    is_last = !transfer->is_queued && part.num_under_way == 0;
  }
  if (is_last) {
    report(transfer);
  }
}

// A reset that came meanwhile has its superblock still before it.
void Disk::end_superblock(const Job &job, int error) {
  TransferQueue stopped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    writes_superblock_ = false;
    has_superblock_ = error == 0 && job.generation != generation_;
    is_ready_ = !has_superblock_;
    if (error != 0) {
      state_.error = error;
      std::snprintf(state_.why, sizeof state_.why, "%s",
                    "the disk does not take a new superblock, so what is on it cannot be told "
                    "from what is to be");
      take_all(&stopped, error);
    }
  }
  changed_.notify_all();
  report_all(&stopped);
}

void Disk::scan(Buffers *buffers, const Job &job) {
  std::array<ckv_disk_entry, kScanned> found;
  size_t num_found = 0;
  uint64_t num_foreign = 0;
  for (uint64_t slot = job.begin; slot < job.end; ++slot) {
    SlotHeader header;
    if (without_memory([&] { return file_->read_header(buffers, slot, &header); }) != 0) {
      continue;  // as good as empty; whoever writes or reads it will hear
    }
    Found seen = judge(header, shape_, job.generation, slot);
    num_foreign += seen == Found::NOTHING && header.magic == SlotHeader::kMagic ? 1 : 0;
    if (seen == Found::GOOD) {
      ckv_disk_entry &entry = found[num_found++];
      entry = ckv_disk_entry{};
      entry.sequence = header.sequence;
      entry.slot = static_cast<int32_t>(slot);
      entry.depth = header.depth;
      entry.key_bytes = header.key_bytes;
      std::copy(std::begin(header.key), std::end(header.key), entry.key);
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  --num_scanning_;
  state_.num_scanned += job.end - job.begin;
  state_.num_foreign += num_foreign;
  for (size_t i = 0; i < num_found && job.generation == generation_; ++i) {
    if (without_memory([&] { return found_.push_back(found[i]), 0; }) != 0) {
      return;
    }
  }
}

}  // namespace ckv
