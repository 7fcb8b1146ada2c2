// What the fake CUDA driver offers to tests beside the driver's own entry points. Plain C, so that
// Python can call it too. All of it is thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Live objects, except: retains of the primary context. Nothing may be left after a close.
struct FakeCudaCounts {
  int32_t contexts;
  int32_t streams;
  int32_t events;
  int32_t registrations;
  int32_t modules;
  int32_t is_context_current;  // on the thread that asks
};
void fake_cuda_get_counts(FakeCudaCounts *out);

// Memory of the device. Copies and kernels may touch this and registered memory, nothing else.
void fake_cuda_add_vram(void *base, uint64_t bytes);

// After `after` more calls of `entry`, `count` of them fail with `code`; 700 ends the context.
void fake_cuda_fail(const char *entry, uint32_t after, uint32_t count, int code);

// on: nothing that is queued begins (what runs is waited for); off: it goes on.
void fake_cuda_hold(int on);

// on: another thread captures a graph, in mode GLOBAL. Calls that are unsafe then are refused to
// threads that have not set their own mode to RELAXED.
void fake_cuda_capture(int on);

enum {
  FAKE_CUDA_BINARY = 0,        // 1: the gather kernel's module holds code for this device
  FAKE_CUDA_HOST_POINTERS = 1  // 1: the device uses host pointers of registered memory
};
void fake_cuda_set(int what, int value);

// The driver has no such entry point, for cuGetProcAddress.
void fake_cuda_hide(const char *entry);

// Calls of an entry point since the start, failed ones too.
uint64_t fake_cuda_num_calls(const char *entry);

// A sentence about the last rule that was broken, "" if none was. Lasts until the next one.
const char *fake_cuda_broken_rule(void);

// Back to the start, but for live objects.
void fake_cuda_reset(void);
}
