// The driver table filled from libcuda. No logic here: what can be wrong without a GPU to show it
// must not live in this file.
#include <string>
#include <vector>

#include "cuda_library.h"
#include "driver.h"
#include "failure.h"
#include "gather.h"
#include "placement.h"

namespace ckv {

namespace {

using cuda::DevicePtr;
using cuda::EventHandle;
using cuda::StreamHandle;

class CudaDriver : public Driver {
 public:
  // On a driver that is built already: what fails here runs the destructor, which gives all back.
  explicit CudaDriver(const ckv_config &config) : CudaDriver(cuda::open_library()) {
    check(l_.init(0), "starting CUDA");
    check(l_.device_get(&device_, config.device), "finding the device");
    // Where host pointers are not the device's, a batch on them ends the context (sglang 40232).
    int has_host_pointers = 0;
    check(l_.device_attribute(&has_host_pointers, cuda::kCanUseHostPointer, device_),
          "asking whether the device takes host pointers");
    has_batch_ = l_.memcpy_batch != nullptr && has_host_pointers != 0;
    if (config.path == CKV_PATH_BATCH && !has_batch_) {
      throw Failure(CKV_EDRIVER,
                    "no batch copies: this CUDA driver has no cuMemcpyBatchAsync (12.8), or the "
                    "device does not take host pointers");
    }
    // The primary context is torch's too; its streams and memory are the ones we copy between.
    check(l_.primary_retain(&context_, device_), "taking the primary context");
    for (Batch &batch : batches_) {
      batch.dsts.resize(config.max_descriptors);
      batch.srcs.resize(config.max_descriptors);
      batch.sizes.resize(config.max_descriptors);
    }
    create_streams();
    if (has_host_pointers != 0) {
      Current current(*this);
      gather_ = Gather::open(l_, config.max_descriptors);
    }
  }

  ~CudaDriver() override {
    if (context_ == nullptr) {
      return;
    }
    {
      Current current(*this);
      for (StreamHandle stream : streams_) {
        if (stream != nullptr) {
          l_.stream_destroy(stream);
        }
      }
      gather_.reset();
    }
    l_.primary_release(device_);
  }

  int attach_thread() override {
    // A query from this thread must not break a graph capture that another thread has under way
    // (torch's NCCL watchdog does the same).
    int mode = cuda::kCaptureModeRelaxed;
    int code = l_.ctx_set(context_);
    return code != 0 ? code : l_.exchange_capture_mode(&mode);
  }

  Stream copy_stream(int direction) override { return streams_[direction]; }

  int event_create(Event *out) override {
    Current current(*this);
    EventHandle event = nullptr;
    int code = current.code ? current.code : l_.event_create(&event, cuda::kEventDisableTiming);
    *out = event;
    return code;
  }

  void event_destroy(Event event) override {
    Current current(*this);
    l_.event_destroy(static_cast<EventHandle>(event));
  }

  int event_record(Event event, Stream stream) override {
    Current current(*this);
    return current.code ? current.code
                        : l_.event_record(static_cast<EventHandle>(event),
                                          static_cast<StreamHandle>(stream));
  }

  int event_query(Event event) override { return l_.event_query(static_cast<EventHandle>(event)); }

  int stream_query(Stream stream) override {
    return l_.stream_query(static_cast<StreamHandle>(stream));
  }

  unsigned paths(int /*direction*/) const override {
    return 1U << CKV_PATH_LOOP | (has_batch_ ? 1U << CKV_PATH_BATCH : 0U) |
           (gather_ != nullptr ? 1U << CKV_PATH_GATHER : 0U);
  }

  int copy(int direction, int path, const Descriptor *descriptors, size_t n,
           size_t place) override {
    switch (path) {
      case CKV_PATH_BATCH:
        return copy_batch(direction, descriptors, n);
      case CKV_PATH_GATHER:
        return gather_->launch(direction, streams_[direction], descriptors, n, place);
      default:
        return copy_loop(direction, descriptors, n);
    }
  }

  bool locks_pages() const override { return true; }

  int host_register(void *base, size_t bytes) override {
    Current current(*this);
    return current.code ? current.code : l_.host_register(base, bytes, cuda::kHostRegisterFlags);
  }

  int host_unregister(void *base) override {
    Current current(*this);
    return current.code ? current.code : l_.host_unregister(base);
  }

  std::string describe(int code) override { return cuda::text_of(l_, code); }

  int numa_node() const override {
    char id[32] = "";
    return l_.device_pci_bus_id(id, sizeof id, device_) == 0 ? numa_node_of(id) : -1;
  }

 private:
  explicit CudaDriver(const cuda::Library &library) : l_(library) {}

  struct Batch {
    std::vector<DevicePtr> dsts;
    std::vector<DevicePtr> srcs;
    std::vector<size_t> sizes;
  };

  // Makes the context current for one call on a thread of the caller's, then puts back what was.
  struct Current {
    explicit Current(CudaDriver &d) : driver(d), code(d.l_.ctx_push(d.context_)) {}
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;
    ~Current() {
      cuda::Context was = nullptr;
      if (code == 0) {
        driver.l_.ctx_pop(&was);
      }
    }
    CudaDriver &driver;
    int code;
  };

  void check(int code, const char *what) {
    if (code != 0) {
      throw Failure(CKV_EDRIVER, std::string(what) + " failed: " + cuda::text_of(l_, code));
    }
  }

  void create_streams() {
    int least = 0;
    int greatest = 0;
    int code = 0;
    {
      Current current(*this);
      code = current.code ? current.code : l_.priority_range(&least, &greatest);
      for (StreamHandle &stream : streams_) {
        // Lowest priority costs nothing; copy engines ignore it, trunks and windows do the work.
        code = code ? code : l_.stream_create(&stream, cuda::kStreamNonBlocking, least);
      }
    }
    check(code, "creating the copy streams");
  }

  int copy_batch(int direction, const Descriptor *descriptors, size_t n) {
    Batch &batch = batches_[direction];
    for (size_t i = 0; i < n; ++i) {
      batch.dsts[i] = descriptors[i].dst;
      batch.srcs[i] = descriptors[i].src;
      batch.sizes[i] = descriptors[i].bytes;
    }
    cuda::MemcpyAttributes attributes{};
    // A load's slot is READY and claimed, so it may be read early; a store's block is read in
    // order.
    attributes.src_access_order =
        direction == CKV_LOAD ? cuda::kSrcAccessOrderAny : cuda::kSrcAccessOrderStream;
    size_t index = 0;
    size_t failed_at = 0;
    return l_.memcpy_batch(batch.dsts.data(), batch.srcs.data(), batch.sizes.data(), n, &attributes,
                           &index, 1, &failed_at, streams_[direction]);
  }

  int copy_loop(int direction, const Descriptor *descriptors, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      const Descriptor &d = descriptors[i];
      int code = l_.memcpy_async(d.dst, d.src, d.bytes, streams_[direction]);
      if (code != 0) {
        return code;
      }
    }
    return 0;
  }

  cuda::Library l_;
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;  // null: not retained
  bool has_batch_ = false;
  StreamHandle streams_[2] = {nullptr, nullptr};
  Batch batches_[2];                // the lane's
  std::unique_ptr<Gather> gather_;  // null: this driver or device cannot
};

}  // namespace

std::unique_ptr<Driver> open_cuda_driver(const ckv_config &config) {
  return std::make_unique<CudaDriver>(config);
}

}  // namespace ckv
