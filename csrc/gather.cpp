#include "gather.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace ckv {

namespace {

// Few blocks of few registers, so that the step's own kernels keep nearly all of the device;
// together they have 192 KiB of reads under way, nearly twice what a bus of 50 GB/s needs.
constexpr unsigned int kMaxBlocks = 8;
constexpr unsigned int kThreads = 512;  // as in gather.cu

alignas(16) constexpr uint64_t kFatbin[] = {
#include "gather_fatbin.inc"
};

static_assert(sizeof(Descriptor) == 24, "as in gather.cu");

// Of the tables: 24 bytes per descriptor, place and direction, 3 MiB by default.
size_t mapped_bytes(size_t max_descriptors) {
  size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (2 * kMaxTrunks * max_descriptors * sizeof(Descriptor) + page - 1) / page * page;
}

}  // namespace

std::unique_ptr<Gather> Gather::open(const cuda::Library &library, size_t max_descriptors) {
  std::unique_ptr<Gather> gather(new Gather(library, max_descriptors));
  return gather->load() && gather->map_tables() ? std::move(gather) : nullptr;
}

Gather::Gather(const cuda::Library &library, size_t max_descriptors)
    : library_(library), max_descriptors_(max_descriptors) {}

Gather::~Gather() {
  if (is_locked_) {
    library_.host_unregister(tables_);
  }
  if (tables_ != nullptr) {
    munmap(tables_, mapped_bytes(max_descriptors_));
  }
  if (module_ != nullptr) {
    library_.module_unload(module_);
  }
}

// The code goes to the device here also where modules are loaded lazily: then it does so when the
// function is asked for, not at a launch that could meet a graph capture.
bool Gather::load() {
  const cuda::Library &l = library_;
  return l.module_load != nullptr && l.module_unload != nullptr &&
         l.module_get_function != nullptr && l.launch_kernel != nullptr &&
         l.module_load(&module_, kFatbin) == 0 &&
         l.module_get_function(&kernel_, module_, "ckv_gather") == 0;
}

bool Gather::map_tables() {
  size_t bytes = mapped_bytes(max_descriptors_);
  void *got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) {
    return false;
  }
  tables_ = static_cast<Descriptor *>(got);
  // A fork would otherwise move our next write to pages that the device does not see.
  is_locked_ = madvise(got, bytes, MADV_DONTFORK) == 0 &&
               library_.host_register(got, bytes, cuda::kHostRegisterFlags) == 0;
  return is_locked_;
}

int Gather::launch(int direction, cuda::StreamHandle stream, const Descriptor *descriptors,
                   size_t n, size_t place) {
  size_t number = static_cast<size_t>(direction) * kMaxTrunks + place;
  Descriptor *table = tables_ + number * max_descriptors_;
  std::copy_n(descriptors, n, table);
  cuda::DevicePtr argument = reinterpret_cast<uintptr_t>(table);
  uint32_t count = static_cast<uint32_t>(n);
  void *arguments[] = {&argument, &count};
  unsigned int num_blocks = std::min(kMaxBlocks, count);
  return library_.launch_kernel(kernel_, num_blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments,
                                nullptr);
}

}  // namespace ckv
