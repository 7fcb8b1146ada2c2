// The entry points of libcuda, which is opened at run time.
#pragma once

#include <string>

#include "cuda_types.h"

namespace ckv::cuda {

struct Library {
  Init init;
  DeviceGet device_get;
  DeviceAttribute device_attribute;
  DevicePciBusId device_pci_bus_id;
  PrimaryRetain primary_retain;
  PrimaryRelease primary_release;
  CtxPush ctx_push;
  CtxPop ctx_pop;
  CtxSet ctx_set;
  StreamCreate stream_create;
  StreamDestroy stream_destroy;
  StreamQuery stream_query;
  PriorityRange priority_range;
  EventCreate event_create;
  EventDestroy event_destroy;
  EventRecord event_record;
  EventQuery event_query;
  MemcpyAsync memcpy_async;
  HostRegister host_register;
  HostUnregister host_unregister;
  ErrorText error_name;
  ErrorText error_string;
  ExchangeCaptureMode exchange_capture_mode;
  // Null where the driver has none:
  MemcpyBatchAsync memcpy_batch;  // since 12.8
  ModuleLoadData module_load;
  ModuleUnload module_unload;
  ModuleGetFunction module_get_function;
  LaunchKernel launch_kernel;
};

// Throws Failure with CKV_EDRIVER. Never closed: libcuda keeps threads of its own, and the process
// has it loaded anyway.
Library open_library();

std::string text_of(const Library &library, int code);

}  // namespace ckv::cuda
