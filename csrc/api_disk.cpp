// The C boundary of disks; as api.cpp.
#include <string>

#include "boundary.h"

namespace {

using ckv::bounded;
using ckv::check_place;
using ckv::check_size;
using ckv::Failure;
using ckv::refuse;
using ckv::with_sim;

// A thread that reads a header answers within that, or the disk hangs.
constexpr std::chrono::seconds kGrace{1};

// Keeps the engine's handle while a disk is opened on it, which may hang: a ckv_free meanwhile does
// not wait.
class Opening {
 public:
  explicit Opening(ckv_engine *handle) : handle_(handle) {
    std::lock_guard<std::mutex> lock(handle->mutex);
    ++handle->num_opening;
  }
  Opening(const Opening &) = delete;
  Opening &operator=(const Opening &) = delete;
  ~Opening() {
    bool is_last = false;
    {
      std::lock_guard<std::mutex> lock(handle_->mutex);
      is_last = --handle_->num_opening == 0 && handle_->is_freed;
    }
    if (is_last) {
      delete handle_;
    }
  }

 private:
  ckv_engine *handle_;
};

// The disk's handle, which is the engine's; Failure if that has closed meanwhile.
ckv_disk *add(ckv_engine *handle, const std::shared_ptr<ckv::Disk> &disk) {
  auto made = std::make_unique<ckv_disk>(ckv_disk{handle, disk});
  std::lock_guard<std::mutex> lock(handle->mutex);
  handle->disks.reserve(handle->disks.size() + 1);
  handle->engine->add_disk(disk);
  handle->disks.push_back(std::move(made));
  return handle->disks.back().get();
}

template <typename Body>
int with_disk(ckv_disk *handle, const Body &body) noexcept {
  if (handle == nullptr) {
    return refuse(CKV_EINVAL, "there is no disk");
  }
  return ckv::with(handle->owner, [&](ckv::Engine &engine) { return body(engine, *handle->disk); });
}

ckv_disk_config complete(const ckv_disk_config *given) {
  check_size(given, "ckv_disk_config");
  ckv_disk_config config = *given;
  if ((config.flags & ~uint32_t{CKV_DISK_KEEP | CKV_DISK_BUFFERED | CKV_DISK_UNSUMMED}) != 0) {
    throw Failure(CKV_EINVAL, "flags " + std::to_string(config.flags) + " are unknown");
  }
  config.num_threads = config.num_threads == 0 ? 8 : config.num_threads;
  return config;
}

}  // namespace

extern "C" {

int ckv_disk_open(ckv_engine *handle, const char *path, const char *facts,
                  const ckv_disk_config *config, ckv_disk **out) {
  return ckv::with(handle, [&](ckv::Engine &engine) -> int {
    check_place(path, "the file");
    check_place(out, "the disk");
    Opening opening(handle);
    std::shared_ptr<ckv::Disk> disk = engine.open_disk(path, facts, complete(config));
    ckv::Disk::start(handle->engine, disk);
    try {
      *out = add(handle, disk);
    } catch (...) {
      disk->close(kGrace);
      disk->let_go();
      throw;
    }
    return CKV_OK;
  });
}

int ckv_disk_submit(ckv_disk *handle, int direction, const int32_t *host_slots,
                    const int32_t *disk_slots, const uint8_t *keys, size_t key_bytes,
                    const uint32_t *depths, size_t n, uint64_t tag) {
  return with_disk(handle, [&](ckv::Engine &engine, ckv::Disk &disk) {
    ckv::DiskOrder order{host_slots, disk_slots, keys, key_bytes, depths, n};
    engine.submit_disk(disk, direction, order, tag);
    return CKV_OK;
  });
}

size_t ckv_disk_scan(ckv_disk *handle, ckv_disk_entry *out, size_t max) {
  size_t n = 0;
  max = out == nullptr ? 0 : max;
  with_disk(handle, [&](ckv::Engine &, ckv::Disk &disk) {
    n = disk.take_found(out, max);
    return CKV_OK;
  });
  return n;
}

int ckv_disk_reset(ckv_disk *handle) {
  return with_disk(handle, [&](ckv::Engine &, ckv::Disk &disk) {
    disk.reset();
    return CKV_OK;
  });
}

int ckv_disk_get_state(ckv_disk *handle, ckv_disk_state *out) {
  return with_disk(handle, [&](ckv::Engine &, ckv::Disk &disk) {
    check_size(out, "ckv_disk_state");
    disk.get_state(out);
    return CKV_OK;
  });
}

int ckv_disk_close(ckv_disk *handle, int64_t timeout_us) {
  return with_disk(handle, [&](ckv::Engine &, ckv::Disk &disk) {
    if (disk.close(bounded(timeout_us))) {
      return static_cast<int>(CKV_OK);
    }
    return refuse(CKV_TIMEOUT, "the disk did not answer in time");
  });
}

int ckv_sim_disk_fail_at(ckv_engine *handle, int entry, uint64_t after, uint64_t count, int code) {
  return with_sim(handle, [&](ckv::SimDriver &sim) { sim.disk().fail(entry, after, count, code); });
}

int ckv_sim_disk_tear(ckv_engine *handle, uint64_t after, uint64_t bytes, int is_told) {
  return with_sim(handle,
                  [&](ckv::SimDriver &sim) { sim.disk().tear(after, bytes, is_told != 0); });
}

int ckv_sim_disk_stop(ckv_engine *handle, int entry, uint64_t after) {
  return with_sim(handle, [&](ckv::SimDriver &sim) { sim.disk().stop(entry, after); });
}

int ckv_sim_disk_mbps(ckv_engine *handle, uint32_t mbps) {
  return with_sim(handle, [&](ckv::SimDriver &sim) { sim.disk().set_mbps(mbps); });
}

}  // extern "C"
