// Many small copies in one launch, to VRAM or from it. Compiled into gather_fatbin.inc by
// scripts/gather; no build needs nvcc. One warp per descriptor, for what is waited for is the bus:
// a read over PCIe takes a microsecond or two, first the descriptor's and then the data's, so many
// must be under way.
#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
#else
#include <stdint.h>
#endif

struct Descriptor {  // as in driver.h
  uint64_t dst;
  uint64_t src;
  uint64_t bytes;
};

constexpr uint32_t kMaxThreads = 512;  // as in gather.cpp
constexpr uint32_t kWarp = 32;
constexpr uint32_t kHeld = 3;          // reads under way per thread; a warp holds 1.5 KiB
constexpr uint32_t kPerProcessor = 4;  // blocks for which registers must suffice: 32 a thread

__device__ void copy_vectors(const Descriptor &d, uint32_t lane) {
  uint4 *to = reinterpret_cast<uint4 *>(d.dst);
  const uint4 *from = reinterpret_cast<const uint4 *>(d.src);
  uint64_t n = d.bytes / sizeof(uint4);
  for (uint64_t i = lane; i < n; i += kHeld * kWarp) {
    uint4 held[kHeld];
#pragma unroll
    for (uint32_t k = 0; k < kHeld; ++k) {
      if (i + k * kWarp < n) {
        held[k] = from[i + k * kWarp];
      }
    }
#pragma unroll
    for (uint32_t k = 0; k < kHeld; ++k) {
      if (i + k * kWarp < n) {
        to[i + k * kWarp] = held[k];
      }
    }
  }
}

__device__ void copy_bytes(const Descriptor &d, uint64_t first, uint32_t lane) {
  uint8_t *to = reinterpret_cast<uint8_t *>(d.dst);
  const uint8_t *from = reinterpret_cast<const uint8_t *>(d.src);
  for (uint64_t i = first + lane; i < d.bytes; i += kWarp) {
    to[i] = from[i];
  }
}

extern "C" __global__ void __launch_bounds__(kMaxThreads, kPerProcessor)
    ckv_gather(const Descriptor *descriptors, uint32_t n) {
  uint32_t lane = threadIdx.x % kWarp;
  // Few descriptors are spread over the blocks, not put into the first.
  uint32_t first = threadIdx.x / kWarp * gridDim.x + blockIdx.x;
  for (uint32_t i = first; i < n; i += gridDim.x * (blockDim.x / kWarp)) {
    Descriptor d = descriptors[i];
    bool is_aligned = (d.dst | d.src) % sizeof(uint4) == 0;
    if (is_aligned) {
      copy_vectors(d, lane);
    }
    copy_bytes(d, is_aligned ? d.bytes / sizeof(uint4) * sizeof(uint4) : 0, lane);
  }
}
