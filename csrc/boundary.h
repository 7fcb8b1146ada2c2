// How the C boundary turns what is thrown into codes, and who may pass it.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "ckv.h"
#include "disk.h"
#include "driver_sim.h"
#include "engine.h"
#include "failure.h"

struct ckv_disk {
  ckv_engine *owner;
  std::shared_ptr<ckv::Disk> disk;
};

struct ckv_engine {
  std::shared_ptr<ckv::Engine> engine;
  std::mutex mutex;  // guards what follows
  std::vector<std::unique_ptr<ckv_disk>> disks;
  size_t num_opening = 0;  // calls that open a disk, for as long as its file system likes
  bool is_freed = false;   // the last of them deletes this
};

namespace ckv {

// Notes why the call of this thread fails, and returns the code.
int refuse(int code, const char *text);

// Runs `body`, which returns a code, and turns whatever it throws into one.
template <typename Body>
int guarded(const Body &body) noexcept {
  try {
    return body();
  } catch (const Failure &failure) {
    return refuse(failure.code(), failure.what());
  } catch (const std::bad_alloc &) {
    return refuse(CKV_ENOMEM, "out of memory");
  } catch (const std::system_error &error) {
    return refuse(CKV_ENOMEM, error.what());  // a thread or a mutex the system would not give
  } catch (const std::exception &error) {
    return refuse(CKV_EINTERNAL, error.what());
  } catch (...) {
    return refuse(CKV_EINTERNAL, "unknown exception");
  }
}

// As above, for calls on an engine of this process.
template <typename Body>
int with(ckv_engine *handle, const Body &body) noexcept {
  if (handle == nullptr) {
    return refuse(CKV_EINVAL, "there is no engine");
  }
  if (handle->engine->pid() != getpid()) {
    return refuse(CKV_EFORK,
                  "the copy engine belongs to the process that opened it; a fork cannot use it");
  }
  return guarded([&] { return body(*handle->engine); });
}

template <typename Body>
int with_sim(ckv_engine *handle, const Body &body) noexcept {
  return with(handle, [&](Engine &engine) -> int {
    if (engine.config().driver != CKV_DRIVER_SIM) {
      throw Failure(CKV_EINVAL, "only the simulated driver has this call");
    }
    body(static_cast<SimDriver &>(engine.driver()));
    return CKV_OK;
  });
}

inline std::chrono::microseconds bounded(int64_t timeout_us) {
  constexpr int64_t kDay = int64_t{86400} * 1000000;
  return std::chrono::microseconds(std::clamp(timeout_us, int64_t{0}, kDay));
}

// Every struct begins with its own length, so that a caller built for another one is told.
template <typename Struct>
void check_size(const Struct *given, const char *name) {
  if (given == nullptr || given->size != sizeof(Struct)) {
    throw Failure(CKV_EINVAL,
                  std::string("the caller's ") + name + " is not this library's version of it");
  }
}

// Where a result goes.
inline void check_place(const void *out, const char *what) {
  if (out == nullptr) {
    throw Failure(CKV_EINVAL, std::string("there is no place for ") + what);
  }
}

}  // namespace ckv
