// Compiled only, and only where there is a CUDA toolkit: our declarations are the driver's.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <type_traits>

#include "cuda_types.h"
#include "driver.h"
#include "path.h"

// Copies in batches came with 12.8; all else is compared on an older toolkit too.
#define HAS_BATCH_COPIES (CUDA_VERSION >= 12080)

namespace ckv::cuda {
namespace {

// What stands for a type of cuda.h here: enums are their underlying int, the one struct is ours.
template <typename T>
struct Ours {
  using type = std::conditional_t<std::is_enum_v<T>, int, T>;
};
#if HAS_BATCH_COPIES
template <>
struct Ours<CUmemcpyAttributes> {
  using type = MemcpyAttributes;
};
#endif
template <typename T>
struct Ours<T *> {
  using type = std::conditional_t<std::is_same_v<T, std::remove_const_t<T>>,
                                  typename Ours<std::remove_const_t<T>>::type *,
                                  const typename Ours<std::remove_const_t<T>>::type *>;
};
template <typename R, typename... Args>
struct Ours<R (*)(Args...)> {
  using type = typename Ours<R>::type (*)(typename Ours<Args>::type...);
};

template <typename Declared, typename Real>
constexpr bool is_same = std::is_same_v<Declared, typename Ours<Real>::type>;

static_assert(is_same<Init, PFN_cuInit_v2000>);
static_assert(is_same<DeviceGet, PFN_cuDeviceGet_v2000>);
static_assert(is_same<DevicePciBusId, PFN_cuDeviceGetPCIBusId_v4010>);
static_assert(is_same<DeviceAttribute, PFN_cuDeviceGetAttribute_v2000>);
static_assert(is_same<PrimaryRetain, PFN_cuDevicePrimaryCtxRetain_v7000>);
static_assert(is_same<PrimaryRelease, PFN_cuDevicePrimaryCtxRelease_v11000>);
static_assert(is_same<CtxPush, PFN_cuCtxPushCurrent_v4000>);
static_assert(is_same<CtxPop, PFN_cuCtxPopCurrent_v4000>);
static_assert(is_same<CtxSet, PFN_cuCtxSetCurrent_v4000>);
static_assert(is_same<StreamCreate, PFN_cuStreamCreateWithPriority_v5050>);
static_assert(is_same<StreamDestroy, PFN_cuStreamDestroy_v4000>);
static_assert(is_same<StreamQuery, PFN_cuStreamQuery_v2000>);
static_assert(is_same<PriorityRange, PFN_cuCtxGetStreamPriorityRange_v5050>);
static_assert(is_same<EventCreate, PFN_cuEventCreate_v2000>);
static_assert(is_same<EventDestroy, PFN_cuEventDestroy_v4000>);
static_assert(is_same<EventRecord, PFN_cuEventRecord_v2000>);
static_assert(is_same<EventQuery, PFN_cuEventQuery_v2000>);
static_assert(is_same<MemcpyAsync, PFN_cuMemcpyAsync_v4000>);
static_assert(is_same<HostRegister, PFN_cuMemHostRegister_v6050>);
static_assert(is_same<HostUnregister, PFN_cuMemHostUnregister_v4000>);
static_assert(is_same<ModuleLoadData, PFN_cuModuleLoadData_v2000>);
static_assert(is_same<ModuleUnload, PFN_cuModuleUnload_v2000>);
static_assert(is_same<ModuleGetFunction, PFN_cuModuleGetFunction_v2000>);
static_assert(is_same<LaunchKernel, PFN_cuLaunchKernel_v4000>);
static_assert(is_same<ErrorText, PFN_cuGetErrorName_v6000>);
static_assert(is_same<ErrorText, PFN_cuGetErrorString_v6000>);
static_assert(is_same<GetProcAddress, PFN_cuGetProcAddress_v12000>);
static_assert(is_same<ExchangeCaptureMode, PFN_cuThreadExchangeStreamCaptureMode_v10010>);

static_assert(sizeof(MemLocation) == sizeof(CUmemLocation));
static_assert(offsetof(MemLocation, id) == offsetof(CUmemLocation, id));
static_assert(sizeof(cuuint64_t) == sizeof(uint64_t));

#if HAS_BATCH_COPIES
static_assert(is_same<MemcpyBatchAsync, PFN_cuMemcpyBatchAsync_v12080>);
static_assert(sizeof(MemcpyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(MemcpyAttributes, src_hint) == offsetof(CUmemcpyAttributes, srcLocHint));
static_assert(offsetof(MemcpyAttributes, dst_hint) == offsetof(CUmemcpyAttributes, dstLocHint));
static_assert(offsetof(MemcpyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(kSrcAccessOrderStream == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
static_assert(kSrcAccessOrderAny == CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
#endif

static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kHostRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(kCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(kCanUseHostPointer == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
static_assert(kNotReady == CUDA_ERROR_NOT_READY);

template <CUresult... codes>
constexpr bool are_harmless = (... && !is_sticky(codes));
template <CUresult... codes>
constexpr bool are_sticky = (... && is_sticky(codes));

static_assert(
    are_harmless<CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY,
                 CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_INVALID_CONTEXT,
                 CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_READY,
                 CUDA_ERROR_NOT_FOUND, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
                 CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
                 CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                 CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, CUDA_ERROR_STREAM_CAPTURE_MERGE,
                 CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
                 CUDA_ERROR_STREAM_CAPTURE_ISOLATION, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                 CUDA_ERROR_CAPTURED_EVENT, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD>);
static_assert(
    are_sticky<CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_ECC_UNCORRECTABLE, CUDA_ERROR_ILLEGAL_ADDRESS,
               CUDA_ERROR_LAUNCH_TIMEOUT, CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_ASSERT,
               CUDA_ERROR_HARDWARE_STACK_ERROR, CUDA_ERROR_ILLEGAL_INSTRUCTION,
               CUDA_ERROR_MISALIGNED_ADDRESS, CUDA_ERROR_INVALID_ADDRESS_SPACE,
               CUDA_ERROR_INVALID_PC, CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_UNKNOWN>);

static_assert(is_path_at_fault(CKV_PATH_GATHER, CUDA_ERROR_NO_BINARY_FOR_GPU));
static_assert(is_path_at_fault(CKV_PATH_GATHER, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES));
static_assert(is_path_at_fault(CKV_PATH_BATCH, CUDA_ERROR_INVALID_VALUE));
static_assert(is_path_at_fault(CKV_PATH_BATCH, CUDA_ERROR_NOT_FOUND));
static_assert(is_path_at_fault(CKV_PATH_BATCH, CUDA_ERROR_NOT_SUPPORTED));

}  // namespace
}  // namespace ckv::cuda
