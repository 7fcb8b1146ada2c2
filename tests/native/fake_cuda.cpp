// A libcuda.so.1 over host memory: the entry points that driver_cuda.cpp looks up, and the rules
// that the CUDA documentation states for them, enforced with the real error codes. So are the
// choices that it leaves to us and csrc/README.md has made ("not ours" below). Streams are
// threads, the kernel is gather.cu itself, thread after thread. It shows that our calls obey the
// rules, not that hardware does what they say.
#include "fake_cuda.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda_types.h"

using namespace ckv::cuda;

namespace ckv::cuda {

struct CUctx_st {};

struct CUstream_st {
  std::deque<std::function<void()>> work;
  uint64_t num_queued = 0;
  uint64_t num_done = 0;
  bool is_running = false;
  bool is_ending = false;
  bool is_dead = false;  // its context is gone
  std::thread thread;
};

struct CUevent_st {
  CUstream_st *stream = nullptr;  // null: never recorded
  uint64_t until = 0;             // work of the stream that was queued before the record
  bool is_dead = false;
};

struct CUmod_st {};
struct CUfunc_st {};

}  // namespace ckv::cuda

// What nvcc gives a kernel.
namespace kernel {

struct Index {
  uint32_t x;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
thread_local Index threadIdx, blockIdx, blockDim, gridDim;

#define __device__
#define __global__
#define __launch_bounds__(...)
#include "gather.cu"

}  // namespace kernel

namespace {

constexpr int kInvalidValue = 1;
constexpr int kNotInitialized = 3;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidImage = 200;
constexpr int kInvalidContext = 201;
constexpr int kNoBinary = 209;
constexpr int kInvalidHandle = 400;
constexpr int kNotFound = 500;
constexpr int kNotReady = 600;
constexpr int kIllegalAddress = 700;
constexpr int kContextIsDestroyed = 709;
constexpr int kAlreadyRegistered = 712;
constexpr int kNotRegistered = 713;
constexpr int kCaptureUnsupported = 900;

constexpr uint64_t kPage = 4096;

// A device says 0 for the least; not this one, so that it has to be asked.
constexpr int kLeastPriority = 1;
constexpr int kGreatestPriority = -5;

struct Copy {
  uint64_t dst;
  uint64_t src;
  uint64_t bytes;
};

struct Fault {
  uint32_t after;
  uint32_t count;
  int code;
};

using Ranges = std::map<uint64_t, uint64_t>;  // base -> bytes

struct Fake {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_started = false;
  bool is_held = false;
  bool is_capturing = false;
  int num_retains = 0;
  int sticky = 0;
  std::map<CUstream_st *, std::unique_ptr<CUstream_st>> streams;
  std::map<CUevent_st *, std::unique_ptr<CUevent_st>> events;
  std::set<CUmod_st *> modules;
  Ranges registered;
  Ranges mapped;  // those of them that kernels may touch
  Ranges vram;
  std::map<std::string, Fault> faults;
  std::map<std::string, uint64_t> num_calls;
  std::string broken_rule;
  int switches[2] = {1, 1};
  std::set<std::string> hidden;
  CUctx_st context;
  CUfunc_st gather;
  CUstream_st legacy;  // never holds work: what is queued on it has run
};

// Never destroyed: streams that a test leaves behind still run when the process ends.
Fake &fake() {
  static Fake *only = new Fake;
  return *only;
}

thread_local std::vector<Context> current;
thread_local int capture_mode = 0;  // GLOBAL

using Lock = std::unique_lock<std::mutex>;

int broken(int code, std::string rule) {
  fake().broken_rule = std::move(rule);
  return code;
}

// "Potentially unsafe" during a capture, as cuThreadExchangeStreamCaptureMode calls it. It names
// but an allocation; the programming guide adds queries. Page-locking (vLLM issue 46933), unloading
// modules and creating streams were seen to be refused; what undoes or resembles them is taken for
// unsafe too.
bool is_unsafe_in_capture(const std::string &entry) {
  static const std::set<std::string> unsafe = {
      "cuEventQuery",        "cuStreamQuery",      "cuMemHostRegister_v2",
      "cuModuleLoadData",    "cuModuleUnload",     "cuMemHostUnregister",
      "cuModuleGetFunction", "cuStreamDestroy_v2", "cuStreamCreateWithPriority"};
  return unsafe.count(entry) != 0;
}

// What every call begins with: count it, fail it if asked to, refuse it without cuInit or on a
// context that an error has ended.
int enter(const char *entry) {
  Fake &f = fake();
  ++f.num_calls[entry];
  auto fault = f.faults.find(entry);
  if (fault != f.faults.end()) {
    if (fault->second.after > 0) {
      --fault->second.after;
    } else if (fault->second.count > 0) {
      --fault->second.count;
      if (fault->second.code == kIllegalAddress) {
        f.sticky = fault->second.code;
      }
      return fault->second.code;
    }
  }
  if (!f.is_started) {
    return broken(kNotInitialized, std::string(entry) + " before cuInit");
  }
  if (f.is_capturing && capture_mode != kCaptureModeRelaxed && is_unsafe_in_capture(entry)) {
    return broken(kCaptureUnsupported, std::string(entry) + " during another thread's capture");
  }
  return f.sticky;
}

int enter_with_context(const char *entry) {
  int code = enter(entry);
  if (code != 0) {
    return code;
  }
  if (current.empty() || current.back() == nullptr) {
    return broken(kInvalidContext, std::string(entry) + " without a current context");
  }
  if (fake().num_retains == 0) {
    return broken(kContextIsDestroyed, std::string(entry) + " after the context's last release");
  }
  return 0;
}

CUstream_st *find_stream(StreamHandle handle) {
  Fake &f = fake();
  if (reinterpret_cast<uintptr_t>(handle) <= 2) {  // null, legacy, per thread
    return &f.legacy;
  }
  auto found = f.streams.find(handle);
  return found == f.streams.end() ? nullptr : found->second.get();
}

int check_stream(const char *entry, StreamHandle handle, CUstream_st **out) {
  *out = find_stream(handle);
  if (*out == nullptr) {
    return broken(kInvalidHandle, std::string(entry) + " on no stream");
  }
  return (*out)->is_dead ? broken(kContextIsDestroyed, std::string(entry) + " on a dead stream")
                         : 0;
}

// The range that holds all of it, or null. Two ranges side by side do not count as one: the
// documentation leaves open whether a copy may straddle two registrations.
bool lies_in(const Ranges &ranges, uint64_t base, uint64_t bytes) {
  auto next = ranges.upper_bound(base);
  if (next == ranges.begin()) {
    return false;
  }
  --next;
  return base + bytes <= next->first + next->second;
}

bool is_device_readable(uint64_t base, uint64_t bytes) {
  return lies_in(fake().vram, base, bytes) || lies_in(fake().registered, base, bytes);
}

int check_copy(const char *entry, const Copy &copy) {
  for (uint64_t base : {copy.dst, copy.src}) {
    if (!is_device_readable(base, copy.bytes)) {
      return broken(kInvalidValue, std::string(entry) + " on " + std::to_string(copy.bytes) +
                                       " bytes that no single registration or VRAM holds");
    }
  }
  return 0;
}

// A block of VRAM must be read in the stream's order: out of it, the source is read while what is
// queued before may write it. A slot may be read at any time until the copy is done, claims see to
// that; but not only within the call, which then would have to wait for the copy.
int check_source(uint64_t src, int order) {
  if (order == kSrcAccessOrderStream) {
    return 0;
  }
  if (order != kSrcAccessOrderAny) {
    return broken(kInvalidValue, "not ours: a batch that reads its sources within the call");
  }
  return lies_in(fake().vram, src, 1)
             ? broken(kInvalidValue, "a batch that reads VRAM out of the stream's order")
             : 0;
}

// A fork would leave the child and us with copies of a page, and the device with one of them. Only
// the kernel knows whether there will be a copy: the flag "dc" of a mapping says no.
bool is_kept_from_forks(uint64_t begin, uint64_t end) {
  std::ifstream mappings("/proc/self/smaps");
  bool is_in_range = false;
  for (std::string line; std::getline(mappings, line);) {
    unsigned long long first = 0;
    unsigned long long last = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &first, &last) == 2) {
      is_in_range = first < end && begin < last;
    } else if (is_in_range && line.rfind("VmFlags:", 0) == 0 &&
               (line + " ").find(" dc ") == std::string::npos) {
      return false;
    }
  }
  return true;
}

void run(const Copy &copy) {
  std::memcpy(reinterpret_cast<void *>(copy.dst), reinterpret_cast<const void *>(copy.src),
              copy.bytes);
}

void run_stream(CUstream_st *stream) {
  Fake &f = fake();
  Lock lock(f.mutex);
  for (;;) {
    f.changed.wait(lock,
                   [&] { return stream->is_ending || (!f.is_held && !stream->work.empty()); });
    if (stream->work.empty()) {
      return;
    }
    std::function<void()> work = std::move(stream->work.front());
    stream->work.pop_front();
    bool is_alive = f.sticky == 0;
    stream->is_running = true;
    lock.unlock();
    if (is_alive) {
      work();
    }
    lock.lock();
    stream->is_running = false;
    ++stream->num_done;
    f.changed.notify_all();
  }
}

void queue(CUstream_st *stream, std::function<void()> work) {
  stream->work.push_back(std::move(work));
  ++stream->num_queued;
  fake().changed.notify_all();
}

Result copy_batch(DevicePtr *dsts, DevicePtr *srcs, size_t *sizes, size_t count,
                  MemcpyAttributes *attributes, size_t *attribute_indices, size_t num_attributes,
                  size_t *fail_index, StreamHandle handle) {
  const char *entry = "cuMemcpyBatchAsync";
  Fake &f = fake();
  Lock lock(f.mutex);
  if (fail_index == nullptr) {
    return broken(kInvalidValue, "a batch with no place for the index that failed");
  }
  *fail_index = SIZE_MAX;
  CUstream_st *stream = nullptr;
  int code = enter_with_context(entry);
  code = code ? code : check_stream(entry, handle, &stream);
  if (code != 0) {
    return code;
  }
  if (stream == &f.legacy) {
    return broken(kInvalidValue, "a batch on the legacy stream");
  }
  if (count == 0 || num_attributes == 0 || num_attributes > count || attribute_indices[0] != 0 ||
      attribute_indices[num_attributes - 1] >= count) {
    return broken(kInvalidValue, "a batch whose attributes do not cover its copies");
  }
  for (size_t i = 0; i < num_attributes; ++i) {
    int order = attributes[i].src_access_order;
    if (order < 1 || order > 3 || attributes[i].flags > 1 ||
        (i > 0 && attribute_indices[i] <= attribute_indices[i - 1])) {
      return broken(kInvalidValue, "a batch with an invalid attribute");
    }
  }
  if (f.switches[FAKE_CUDA_HOST_POINTERS] == 0) {
    // What was seen on such machines: sglang issue 40232.
    f.sticky = kIllegalAddress;
    return broken(kIllegalAddress, "a batch on host pointers that are not the device's");
  }
  std::vector<Copy> copies(count);
  size_t attribute = 0;
  for (size_t i = 0; i < count; ++i) {
    copies[i] = {dsts[i], srcs[i], sizes[i]};
    code = sizes[i] == 0 ? broken(kInvalidValue, "a batch with a copy of no bytes")
                         : check_copy(entry, copies[i]);
    while (attribute + 1 < num_attributes && attribute_indices[attribute + 1] <= i) {
      ++attribute;
    }
    code = code ? code : check_source(srcs[i], attributes[attribute].src_access_order);
    if (code != 0) {
      *fail_index = i;
      return code;
    }
  }
  queue(stream, [copies] { std::for_each(copies.begin(), copies.end(), run); });
  return 0;
}

// The image's first words, as fatbinary.h of the toolkit has them.
constexpr uint32_t kFatbinMagic = 0xba55ed50;

Result load_module(Module *out, const void *image) {
  Fake &f = fake();
  Lock lock(f.mutex);
  int code = enter_with_context("cuModuleLoadData");
  uint32_t magic = 0;
  std::memcpy(&magic, image, sizeof magic);
  if (code == 0 && magic != kFatbinMagic) {
    return broken(kInvalidImage, "a module that is no fatbin");
  }
  if (code != 0 || f.switches[FAKE_CUDA_BINARY] == 0) {
    return code ? code : kNoBinary;
  }
  *out = new CUmod_st;
  f.modules.insert(*out);
  return 0;
}

Result unload_module(Module module) {
  Fake &f = fake();
  Lock lock(f.mutex);
  int code = enter_with_context("cuModuleUnload");
  if (f.modules.erase(module) == 0) {
    return broken(kInvalidHandle, "a module unloaded that there is not");
  }
  delete module;
  return code;
}

Result get_function(Function *out, Module module, const char *name) {
  Fake &f = fake();
  Lock lock(f.mutex);
  int code = enter_with_context("cuModuleGetFunction");
  if (code == 0 && f.modules.count(module) == 0) {
    return broken(kInvalidHandle, "a function of no module");
  }
  *out = &f.gather;
  return code ? code : std::string(name) == "ckv_gather" ? 0 : kNotFound;
}

bool is_kernels(uint64_t base, uint64_t bytes) {
  return lies_in(fake().vram, base, bytes) || lies_in(fake().mapped, base, bytes);
}

// Whether a kernel may touch all that the table has it touch; if not, the context ends.
bool check_table(const kernel::Descriptor *table, uint32_t n) {
  Fake &f = fake();
  Lock lock(f.mutex);
  bool is_good = f.switches[FAKE_CUDA_HOST_POINTERS] != 0 &&
                 is_kernels(reinterpret_cast<uint64_t>(table), n * sizeof *table);
  for (uint32_t i = 0; is_good && i < n; ++i) {
    is_good = is_kernels(table[i].dst, table[i].bytes) && is_kernels(table[i].src, table[i].bytes);
  }
  if (!is_good) {
    f.sticky = broken(kIllegalAddress, "a kernel on memory that is not mapped for the device");
  }
  return is_good;
}

void run_gather(const kernel::Descriptor *table, uint32_t n, uint32_t num_blocks,
                uint32_t num_threads) {
  if (!check_table(table, n)) {
    return;
  }
  kernel::gridDim.x = num_blocks;
  kernel::blockDim.x = num_threads;
  for (uint32_t block = 0; block < num_blocks; ++block) {
    for (uint32_t thread = 0; thread < num_threads; ++thread) {
      kernel::blockIdx.x = block;
      kernel::threadIdx.x = thread;
      kernel::ckv_gather(table, n);
    }
  }
}

Result launch(Function function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
              unsigned int block_x, unsigned int block_y, unsigned int block_z,
              unsigned int shared_bytes, StreamHandle handle, void **arguments, void **extra) {
  Fake &f = fake();
  Lock lock(f.mutex);
  CUstream_st *stream = nullptr;
  int code = enter_with_context("cuLaunchKernel");
  code = code ? code : check_stream("cuLaunchKernel", handle, &stream);
  if (code != 0) {
    return code;
  }
  if (function != &f.gather || f.modules.empty()) {
    return broken(kInvalidHandle, "a launch of no kernel");
  }
  bool is_flat = grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1 && shared_bytes == 0;
  if (!is_flat || grid_x == 0 || block_x == 0 || block_x > kernel::kMaxThreads ||
      extra != nullptr) {
    return broken(kInvalidValue, "a launch of a shape that this kernel is not made for");
  }
  DevicePtr table = 0;
  uint32_t n = 0;
  std::memcpy(&table, arguments[0], sizeof table);
  std::memcpy(&n, arguments[1], sizeof n);
  queue(stream, [=] {
    run_gather(reinterpret_cast<const kernel::Descriptor *>(table), n, grid_x, block_x);
  });
  return 0;
}

// What cuGetProcAddress finds, at these versions and later; the batch call's signature changed.
void *find_entry(const std::string &name, int version) {
  if (fake().hidden.count(name) != 0) {
    return nullptr;
  }
  if (name == "cuMemcpyBatchAsync" && version == kBatchVersion) {
    return reinterpret_cast<void *>(&copy_batch);
  }
  static const std::map<std::string, void *> modules = {
      {"cuModuleLoadData", reinterpret_cast<void *>(&load_module)},
      {"cuModuleUnload", reinterpret_cast<void *>(&unload_module)},
      {"cuModuleGetFunction", reinterpret_cast<void *>(&get_function)},
      {"cuLaunchKernel", reinterpret_cast<void *>(&launch)}};
  auto found = modules.find(name);
  return found != modules.end() && version >= 4000 ? found->second : nullptr;
}

template <typename Map>
void kill_all(Map &objects) {
  for (auto &entry : objects) {
    entry.second->is_dead = true;
  }
}

}  // namespace

extern "C" {

Result cuInit(unsigned int flags) {
  Fake &f = fake();
  Lock lock(f.mutex);
  f.is_started = true;
  int code = enter("cuInit");
  return code ? code : flags == 0 ? 0 : kInvalidValue;
}

Result cuDeviceGet(Device *out, int ordinal) {
  Lock lock(fake().mutex);
  int code = enter("cuDeviceGet");
  *out = ordinal;
  return code ? code : ordinal == 0 ? 0 : kInvalidDevice;
}

Result cuDeviceGetAttribute(int *out, int attribute, Device) {
  Fake &f = fake();
  Lock lock(f.mutex);
  int code = enter("cuDeviceGetAttribute");
  *out = attribute == 91 ? f.switches[FAKE_CUDA_HOST_POINTERS] : 0;
  return code;
}

Result cuDeviceGetPCIBusId(char *out, int length, Device) {
  Lock lock(fake().mutex);
  int code = enter("cuDeviceGetPCIBusId");
  std::snprintf(out, static_cast<size_t>(length), "%s", "0000:FE:00.0");
  return code;
}

Result cuDevicePrimaryCtxRetain(Context *out, Device) {
  Fake &f = fake();
  Lock lock(f.mutex);
  int code = enter("cuDevicePrimaryCtxRetain");
  if (code == 0) {
    ++f.num_retains;
    *out = &f.context;
  }
  return code;
}

Result cuDevicePrimaryCtxRelease_v2(Device) {
  Fake &f = fake();
  Lock lock(f.mutex);
  int code = enter("cuDevicePrimaryCtxRelease_v2");
  if (f.num_retains == 0) {
    return broken(kInvalidContext, "a context released more often than retained");
  }
  if (--f.num_retains == 0) {
    kill_all(f.streams);
    kill_all(f.events);
  }
  return code;
}

Result cuCtxPushCurrent_v2(Context context) {
  Lock lock(fake().mutex);
  int code = enter("cuCtxPushCurrent_v2");
  if (code == 0 && context == nullptr) {
    return broken(kInvalidContext, "a null context pushed");
  }
  if (code == 0) {
    current.push_back(context);
  }
  return code;
}

Result cuCtxPopCurrent_v2(Context *out) {
  Lock lock(fake().mutex);
  enter("cuCtxPopCurrent_v2");
  if (current.empty()) {
    return broken(kInvalidContext, "a context popped that was not pushed");
  }
  *out = current.back();
  current.pop_back();
  return 0;
}

Result cuCtxSetCurrent(Context context) {
  Lock lock(fake().mutex);
  int code = enter("cuCtxSetCurrent");
  if (code == 0) {
    if (!current.empty()) {
      current.pop_back();
    }
    current.push_back(context);
  }
  return code;
}

Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  Lock lock(fake().mutex);
  *least = kLeastPriority;
  *greatest = kGreatestPriority;
  return enter_with_context("cuCtxGetStreamPriorityRange");
}

Result cuStreamCreateWithPriority(StreamHandle *out, unsigned int flags, int priority) {
  Fake &f = fake();
  Lock lock(f.mutex);
  int code = enter_with_context("cuStreamCreateWithPriority");
  if (code != 0 || flags > 1) {
    return code ? code : kInvalidValue;
  }
  if (flags != kStreamNonBlocking) {
    return broken(kInvalidValue, "not ours: a stream that waits for the legacy stream");
  }
  if (priority != kLeastPriority) {
    return broken(kInvalidValue, "not ours: a stream of more than the least priority");
  }
  auto stream = std::make_unique<CUstream_st>();
  *out = stream.get();
  stream->thread = std::thread(run_stream, stream.get());
  f.streams.emplace(*out, std::move(stream));
  return 0;
}

// As the real one: what is queued still runs. This one waits for it.
Result cuStreamDestroy_v2(StreamHandle handle) {
  Fake &f = fake();
  Lock lock(f.mutex);
  int code = enter_with_context("cuStreamDestroy_v2");
  auto found = f.streams.find(handle);
  if (found == f.streams.end()) {
    return broken(kInvalidHandle, "a stream destroyed that there is not");
  }
  std::unique_ptr<CUstream_st> stream = std::move(found->second);
  f.streams.erase(found);
  for (auto &event : f.events) {
    event.second->stream = event.second->stream == handle ? nullptr : event.second->stream;
  }
  stream->is_ending = true;
  f.changed.notify_all();
  lock.unlock();
  stream->thread.join();
  return code;
}

Result cuStreamQuery(StreamHandle handle) {
  Lock lock(fake().mutex);
  CUstream_st *stream = nullptr;
  int code = enter_with_context("cuStreamQuery");
  code = code ? code : check_stream("cuStreamQuery", handle, &stream);
  return code ? code : stream->num_done == stream->num_queued ? 0 : kNotReady;
}

Result cuEventCreate(EventHandle *out, unsigned int flags) {
  Fake &f = fake();
  Lock lock(f.mutex);
  int code = enter_with_context("cuEventCreate");
  if (code != 0 || flags > 7) {
    return code ? code : kInvalidValue;
  }
  if (flags != kEventDisableTiming) {
    return broken(kInvalidValue, "not ours: an event that takes the time");
  }
  auto event = std::make_unique<CUevent_st>();
  *out = event.get();
  f.events.emplace(*out, std::move(event));
  return 0;
}

Result cuEventDestroy_v2(EventHandle handle) {
  Lock lock(fake().mutex);
  int code = enter_with_context("cuEventDestroy_v2");
  return fake().events.erase(handle) == 0
             ? broken(kInvalidHandle, "an event destroyed that there is not")
             : code;
}

Result cuEventRecord(EventHandle handle, StreamHandle on) {
  Fake &f = fake();
  Lock lock(f.mutex);
  CUstream_st *stream = nullptr;
  int code = enter_with_context("cuEventRecord");
  code = code ? code : check_stream("cuEventRecord", on, &stream);
  auto found = f.events.find(handle);
  if (code != 0 || found == f.events.end()) {
    return code ? code : broken(kInvalidHandle, "a record of no event");
  }
  found->second->stream = stream;
  found->second->until = stream->num_queued;
  return 0;
}

Result cuEventQuery(EventHandle handle) {
  Fake &f = fake();
  Lock lock(f.mutex);
  int code = enter("cuEventQuery");
  auto found = f.events.find(handle);
  if (code != 0 || found == f.events.end()) {
    return code ? code : broken(kInvalidHandle, "a query of no event");
  }
  const CUevent_st &event = *found->second;
  if (event.is_dead) {
    return broken(kContextIsDestroyed, "a query of a dead event");
  }
  return event.stream == nullptr || event.stream->num_done >= event.until ? 0 : kNotReady;
}

Result cuMemcpyAsync(DevicePtr dst, DevicePtr src, size_t bytes, StreamHandle on) {
  Lock lock(fake().mutex);
  CUstream_st *stream = nullptr;
  int code = enter_with_context("cuMemcpyAsync");
  code = code ? code : check_stream("cuMemcpyAsync", on, &stream);
  Copy copy{dst, src, bytes};
  code = code ? code : check_copy("cuMemcpyAsync", copy);
  if (code == 0) {
    queue(stream, [copy] { run(copy); });
  }
  return code;
}

Result cuMemHostRegister_v2(void *base, size_t bytes, unsigned int flags) {
  Fake &f = fake();
  Lock lock(f.mutex);
  int code = enter_with_context("cuMemHostRegister_v2");
  if (code != 0 || base == nullptr || bytes == 0 || flags > 15) {
    return code ? code : kInvalidValue;
  }
  if ((flags & kHostRegisterPortable) == 0) {
    return broken(kInvalidValue, "not ours: memory that is page-locked for one context only");
  }
  uint64_t at = reinterpret_cast<uint64_t>(base);
  if (at % kPage != 0 || bytes % kPage != 0) {
    return broken(kInvalidValue, "memory registered that is not whole pages");
  }
  auto next = f.registered.lower_bound(at);
  bool is_in_next = next != f.registered.end() && next->first < at + bytes;
  bool is_in_last =
      next != f.registered.begin() && std::prev(next)->first + std::prev(next)->second > at;
  if (is_in_next || is_in_last) {
    return broken(kAlreadyRegistered, "memory registered twice");
  }
  if (!is_kept_from_forks(at, at + bytes)) {
    return broken(kInvalidValue, "not ours: page-locked memory that a fork would copy");
  }
  f.registered[at] = bytes;
  if ((flags & kHostRegisterDeviceMap) != 0) {
    f.mapped[at] = bytes;
  }
  return 0;
}

Result cuMemHostUnregister(void *base) {
  Fake &f = fake();
  Lock lock(f.mutex);
  int code = enter_with_context("cuMemHostUnregister");
  if (code != 0) {
    return code;
  }
  f.mapped.erase(reinterpret_cast<uint64_t>(base));
  return f.registered.erase(reinterpret_cast<uint64_t>(base)) == 0
             ? broken(kNotRegistered, "memory unregistered that was not registered")
             : 0;
}

Result cuGetErrorName(Result code, const char **out) {
  *out = code == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OF_THE_FAKE";
  return 0;
}

Result cuGetErrorString(Result, const char **out) {
  *out = "a fake error";
  return 0;
}

Result cuThreadExchangeStreamCaptureMode(int *mode) {
  Lock lock(fake().mutex);
  int code = enter("cuThreadExchangeStreamCaptureMode");
  if (code != 0 || *mode < 0 || *mode > 2) {
    return code ? code : kInvalidValue;
  }
  std::swap(capture_mode, *mode);
  return 0;
}

Result cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t, int *) {
  Lock lock(fake().mutex);
  *out = find_entry(name, version);
  return *out != nullptr ? 0 : kNotFound;
}

// ---- For tests.

void fake_cuda_get_counts(FakeCudaCounts *out) {
  Fake &f = fake();
  Lock lock(f.mutex);
  out->contexts = f.num_retains;
  out->streams = static_cast<int32_t>(f.streams.size());
  out->events = static_cast<int32_t>(f.events.size());
  out->registrations = static_cast<int32_t>(f.registered.size());
  out->modules = static_cast<int32_t>(f.modules.size());
  out->is_context_current = !current.empty();
}

void fake_cuda_add_vram(void *base, uint64_t bytes) {
  Lock lock(fake().mutex);
  fake().vram[reinterpret_cast<uint64_t>(base)] = bytes;
}

void fake_cuda_fail(const char *entry, uint32_t after, uint32_t count, int code) {
  Lock lock(fake().mutex);
  fake().faults[entry] = {after, count, code};
}

void fake_cuda_hold(int on) {
  Fake &f = fake();
  Lock lock(f.mutex);
  f.is_held = on != 0;
  f.changed.notify_all();
  f.changed.wait(lock, [&] {
    return !f.is_held || std::none_of(f.streams.begin(), f.streams.end(),
                                      [](auto &entry) { return entry.second->is_running; });
  });
}

void fake_cuda_capture(int on) {
  Lock lock(fake().mutex);
  fake().is_capturing = on != 0;
}

void fake_cuda_set(int what, int value) {
  Lock lock(fake().mutex);
  fake().switches[what] = value;
}

void fake_cuda_hide(const char *entry) {
  Lock lock(fake().mutex);
  fake().hidden.insert(entry);
}

uint64_t fake_cuda_num_calls(const char *entry) {
  Lock lock(fake().mutex);
  return fake().num_calls[entry];
}

const char *fake_cuda_broken_rule(void) {
  Lock lock(fake().mutex);
  return fake().broken_rule.c_str();
}

void fake_cuda_reset(void) {
  fake_cuda_hold(0);
  Fake &f = fake();
  Lock lock(f.mutex);
  f.sticky = 0;
  f.is_capturing = false;
  f.vram.clear();
  f.faults.clear();
  f.hidden.clear();
  f.num_calls.clear();
  f.broken_rule.clear();
  std::fill(std::begin(f.switches), std::end(f.switches), 1);
}
}
