#include "cuda_library.h"

#include <dlfcn.h>

#include "ckv.h"
#include "failure.h"

namespace ckv::cuda {

namespace {

template <typename Entry>
void find(void *library, const char *name, Entry *out) {
  void *symbol = dlsym(library, name);
  if (symbol == nullptr) {
    throw Failure(CKV_EDRIVER, std::string("the CUDA driver has no ") + name);
  }
  *out = reinterpret_cast<Entry>(symbol);
}

// By cuGetProcAddress and not dlsym: only it hands out the signature of a given version.
template <typename Entry>
void find_optional(void *library, const char *name, int version, Entry *out) {
  auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  void *found = nullptr;
  bool has = get != nullptr && get(name, &found, version, 0, nullptr) == 0;
  *out = has ? reinterpret_cast<Entry>(found) : nullptr;
}

}  // namespace

Library open_library() {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Failure(CKV_EDRIVER, std::string("the CUDA driver cannot be opened: ") + dlerror());
  }
  Library l{};
  find(library, "cuInit", &l.init);
  find(library, "cuDeviceGet", &l.device_get);
  find(library, "cuDeviceGetAttribute", &l.device_attribute);
  find(library, "cuDeviceGetPCIBusId", &l.device_pci_bus_id);
  find(library, "cuDevicePrimaryCtxRetain", &l.primary_retain);
  find(library, "cuDevicePrimaryCtxRelease_v2", &l.primary_release);
  find(library, "cuCtxPushCurrent_v2", &l.ctx_push);
  find(library, "cuCtxPopCurrent_v2", &l.ctx_pop);
  find(library, "cuCtxSetCurrent", &l.ctx_set);
  find(library, "cuStreamCreateWithPriority", &l.stream_create);
  find(library, "cuStreamDestroy_v2", &l.stream_destroy);
  find(library, "cuStreamQuery", &l.stream_query);
  find(library, "cuCtxGetStreamPriorityRange", &l.priority_range);
  find(library, "cuEventCreate", &l.event_create);
  find(library, "cuEventDestroy_v2", &l.event_destroy);
  find(library, "cuEventRecord", &l.event_record);
  find(library, "cuEventQuery", &l.event_query);
  find(library, "cuMemcpyAsync", &l.memcpy_async);
  find(library, "cuMemHostRegister_v2", &l.host_register);
  find(library, "cuMemHostUnregister", &l.host_unregister);
  find(library, "cuGetErrorName", &l.error_name);
  find(library, "cuGetErrorString", &l.error_string);
  find(library, "cuThreadExchangeStreamCaptureMode", &l.exchange_capture_mode);
  find_optional(library, "cuMemcpyBatchAsync", kBatchVersion, &l.memcpy_batch);
  find_optional(library, "cuModuleLoadData", kModuleVersion, &l.module_load);
  find_optional(library, "cuModuleUnload", kModuleVersion, &l.module_unload);
  find_optional(library, "cuModuleGetFunction", kModuleVersion, &l.module_get_function);
  find_optional(library, "cuLaunchKernel", kModuleVersion, &l.launch_kernel);
  return l;
}

std::string text_of(const Library &l, int code) {
  const char *name = nullptr;
  const char *text = nullptr;
  l.error_name(code, &name);
  l.error_string(code, &text);
  return std::string(name ? name : "unknown CUDA error") + " (" + std::to_string(code) + ")" +
         (text ? std::string(": ") + text : "");
}

}  // namespace ckv::cuda
