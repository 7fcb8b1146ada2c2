// The part of cuda.h that is used here, declared by hand so that building needs no toolkit.
// check_abi.cpp compares every line with the real header where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ckv::cuda {

using Result = int;
using Device = int;
using DevicePtr = unsigned long long;
using Context = struct CUctx_st *;
using StreamHandle = struct CUstream_st *;
using EventHandle = struct CUevent_st *;
using Module = struct CUmod_st *;
using Function = struct CUfunc_st *;

struct MemLocation {
  int type;
  int id;
};

struct MemcpyAttributes {
  int src_access_order;
  MemLocation src_hint;
  MemLocation dst_hint;
  unsigned int flags;
};

constexpr int kSrcAccessOrderStream = 1;
constexpr int kSrcAccessOrderAny = 3;
constexpr unsigned int kStreamNonBlocking = 1;
constexpr unsigned int kEventDisableTiming = 2;
constexpr unsigned int kHostRegisterPortable = 1;
constexpr unsigned int kHostRegisterDeviceMap = 2;  // kernels may touch it
constexpr unsigned int kHostRegisterFlags = kHostRegisterPortable | kHostRegisterDeviceMap;
constexpr int kCaptureModeRelaxed = 2;
constexpr int kCanUseHostPointer = 91;  // of memory that was registered
constexpr int kBatchVersion = 12080;    // the last with fail_index; newer drivers still have it
constexpr int kModuleVersion = 12000;   // unchanged since long before

using Init = Result (*)(unsigned int);
using DeviceGet = Result (*)(Device *, int);
using DeviceAttribute = Result (*)(int *, int, Device);
using DevicePciBusId = Result (*)(char *, int, Device);
using PrimaryRetain = Result (*)(Context *, Device);
using PrimaryRelease = Result (*)(Device);
using CtxPush = Result (*)(Context);
using CtxPop = Result (*)(Context *);
using CtxSet = Result (*)(Context);
using StreamCreate = Result (*)(StreamHandle *, unsigned int, int);
using StreamDestroy = Result (*)(StreamHandle);
using StreamQuery = Result (*)(StreamHandle);
using PriorityRange = Result (*)(int *, int *);
using EventCreate = Result (*)(EventHandle *, unsigned int);
using EventDestroy = Result (*)(EventHandle);
using EventRecord = Result (*)(EventHandle, StreamHandle);
using EventQuery = Result (*)(EventHandle);
using MemcpyAsync = Result (*)(DevicePtr, DevicePtr, size_t, StreamHandle);
using MemcpyBatchAsync = Result (*)(DevicePtr *dsts, DevicePtr *srcs, size_t *sizes, size_t count,
                                    MemcpyAttributes *attributes, size_t *attribute_indices,
                                    size_t num_attributes, size_t *fail_index, StreamHandle);
using HostRegister = Result (*)(void *, size_t, unsigned int);
using HostUnregister = Result (*)(void *);
using ErrorText = Result (*)(Result, const char **);
using ExchangeCaptureMode = Result (*)(int *);
using ModuleLoadData = Result (*)(Module *, const void *image);
using ModuleUnload = Result (*)(Module);
using ModuleGetFunction = Result (*)(Function *, Module, const char *name);
using LaunchKernel = Result (*)(Function, unsigned int grid_x, unsigned int grid_y,
                                unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                unsigned int block_z, unsigned int shared_bytes, StreamHandle,
                                void **arguments, void **extra);
using GetProcAddress = Result (*)(const char *, void **, int, uint64_t, int *);

}  // namespace ckv::cuda
