// The few driver calls the engine needs: one table, filled by libcuda or by the simulator.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "ckv.h"
#include "file.h"

namespace ckv {

class SimWatch;

using Stream = void *;
using Event = void *;

constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY, also the simulator's

constexpr size_t kMaxTrunks = 64;  // in flight per direction

struct Descriptor {
  uint64_t dst;
  uint64_t src;
  uint64_t bytes;
};

// Which errors end the CUDA context: all that are not known to leave it alive. Those of captures
// refuse an operation or invalidate a capture, nothing else.
constexpr bool is_sticky(int code) {
  switch (code) {
    case 0:
    case 1:          // INVALID_VALUE
    case 2:          // OUT_OF_MEMORY
    case 3:          // NOT_INITIALIZED
    case 201:        // INVALID_CONTEXT
    case 209:        // NO_BINARY_FOR_GPU
    case 400:        // INVALID_HANDLE
    case kNotReady:  // NOT_READY
    case 500:        // NOT_FOUND
    case 701:        // LAUNCH_OUT_OF_RESOURCES: the launch did not occur
    case 712:        // HOST_MEMORY_ALREADY_REGISTERED
    case 713:        // HOST_MEMORY_NOT_REGISTERED
    case 801:        // NOT_SUPPORTED
    case 900:        // STREAM_CAPTURE_UNSUPPORTED
    case 901:        // STREAM_CAPTURE_INVALIDATED
    case 902:        // STREAM_CAPTURE_MERGE
    case 903:        // STREAM_CAPTURE_UNMATCHED
    case 904:        // STREAM_CAPTURE_UNJOINED
    case 905:        // STREAM_CAPTURE_ISOLATION
    case 906:        // STREAM_CAPTURE_IMPLICIT
    case 907:        // CAPTURED_EVENT
    case 908:        // STREAM_CAPTURE_WRONG_THREAD
      return false;
    default:
      return true;
  }
}

// Calls return 0 or a driver code. All may be called from any thread.
class Driver {
 public:
  Driver() = default;
  Driver(const Driver &) = delete;
  Driver &operator=(const Driver &) = delete;
  virtual ~Driver() = default;

  virtual int attach_thread() = 0;
  virtual Stream copy_stream(int direction) = 0;
  virtual int event_create(Event *out) = 0;
  virtual void event_destroy(Event event) = 0;
  virtual int event_record(Event event, Stream stream) = 0;
  // 0 once all that preceded the record is done, kNotReady before.
  virtual int event_query(Event event) = 0;
  virtual int stream_query(Stream stream) = 0;
  // Bit p: copy() takes CKV_PATH_ p in this direction. LOOP is always there.
  virtual unsigned paths(int direction) const = 0;
  // Queues n copies on the direction's stream, by one of `paths`. On failure some of them may have
  // been queued. `place` (below kMaxTrunks) is not used again on this path before the trunk is
  // over: what the device reads of this call can be kept there.
  virtual int copy(int direction, int path, const Descriptor *descriptors, size_t n,
                   size_t place) = 0;
  // Whether host memory must be populated and page-locked for this driver.
  virtual bool locks_pages() const = 0;
  virtual int host_register(void *base, size_t bytes) = 0;
  virtual int host_unregister(void *base) = 0;
  virtual std::string describe(int code) = 0;
  // The NUMA node the device is attached to, -1 if that is not known.
  virtual int numa_node() const = 0;
  // How long copies that it already has may take after the drain deadline of a close.
  virtual std::chrono::microseconds grace() const { return std::chrono::seconds(1); }
  // Wants to know of transfers what a device does not: only a simulator has one, if it is on.
  virtual SimWatch *watch() { return nullptr; }
  // For a disk. A device has nothing to do with it; a simulator puts faults before it.
  virtual std::unique_ptr<File> make_file() { return make_posix_file(); }
};

// Throws Failure with CKV_EDRIVER.
std::unique_ptr<Driver> open_cuda_driver(const ckv_config &config);
// Throws Failure with CKV_EINVAL for a switch in the environment that it cannot read.
std::unique_ptr<Driver> open_sim_driver(const ckv_config &config);

}  // namespace ckv
