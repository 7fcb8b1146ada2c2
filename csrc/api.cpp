// The C boundary: no exception passes it, no call passes it in a forked child.
#include <cstdio>

#include "boundary.h"

namespace ckv {

namespace {

thread_local char last_error[512] = "";

}  // namespace

int refuse(int code, const char *text) {
  std::snprintf(last_error, sizeof last_error, "%s", text);
  return code;
}

}  // namespace ckv

namespace {

using ckv::bounded;
using ckv::check_place;
using ckv::check_size;
using ckv::Failure;
using ckv::guarded;
using ckv::refuse;
using ckv::with;
using ckv::with_sim;

ckv_config complete(const ckv_config *given) {
  if (given == nullptr || given->size != sizeof(ckv_config) || given->abi != CKV_ABI) {
    throw Failure(CKV_EINVAL, "the caller was built for another version of this library");
  }
  ckv_config config = *given;
  if (config.path < CKV_PATH_AUTO || config.path > CKV_PATH_GATHER) {
    throw Failure(CKV_EINVAL, "path " + std::to_string(config.path) + " is unknown");
  }
  config.max_descriptors = config.max_descriptors == 0 ? 1024 : config.max_descriptors;
  config.max_transfers = config.max_transfers == 0 ? 65536 : config.max_transfers;
  config.trunk_bytes = config.trunk_bytes == 0 ? uint64_t{4} << 20 : config.trunk_bytes;
  for (uint64_t &window : config.window_bytes) {
    window = window == 0 ? uint64_t{16} << 20 : window;
    config.trunk_bytes = std::min(config.trunk_bytes, window);
  }
  return config;
}

std::unique_ptr<ckv::Driver> open_driver(const ckv_config &config) {
  if (config.driver == CKV_DRIVER_CUDA) {
    return ckv::open_cuda_driver(config);
  }
  if (config.driver == CKV_DRIVER_SIM) {
    return ckv::open_sim_driver(config);
  }
  throw Failure(CKV_EINVAL, "driver " + std::to_string(config.driver) + " is unknown");
}

}  // namespace

extern "C" {

int ckv_abi_version(void) { return CKV_ABI; }

const char *ckv_last_error(void) { return ckv::last_error; }

int ckv_open(const ckv_config *config, ckv_engine **out) {
  return guarded([&] {
    check_place(out, "the engine");
    ckv_config full = complete(config);
    auto handle = std::make_unique<ckv_engine>();
    handle->engine = std::make_shared<ckv::Engine>(full, open_driver(full));
    ckv::Engine::start(handle->engine);
    *out = handle.release();
    return CKV_OK;
  });
}

int ckv_set_regions(ckv_engine *handle, const ckv_region *regions, size_t num_regions,
                    int32_t num_blocks, int32_t num_slots) {
  return with(handle, [&](ckv::Engine &engine) {
    engine.set_regions(regions, num_regions, num_blocks, num_slots);
    return CKV_OK;
  });
}

int ckv_submit(ckv_engine *handle, int direction, uint32_t flags, const int32_t *dev_blocks,
               const int32_t *host_slots, size_t n, uintptr_t after_stream, uint64_t tag) {
  return with(handle, [&](ckv::Engine &engine) {
    engine.submit(direction, flags, dev_blocks, host_slots, n, after_stream, tag);
    return CKV_OK;
  });
}

size_t ckv_poll(ckv_engine *handle, ckv_completion *out, size_t max) {
  size_t n = 0;
  max = out == nullptr ? 0 : max;
  with(handle, [&](ckv::Engine &engine) {
    ckv::ReportStack &reports = engine.reports();
    reports.forget_shown();
    while (n < max && reports.show(&out[n])) {
      ++n;
    }
    return CKV_OK;
  });
  return n;
}

const volatile uint64_t *ckv_pending_word(ckv_engine *handle) {
  return handle == nullptr ? nullptr : handle->engine->reports().pending_word();
}

int ckv_cancel(ckv_engine *handle, uint64_t tag) {
  return with(handle, [&](ckv::Engine &engine) {
    engine.cancel(tag);
    return CKV_OK;
  });
}

int ckv_wait(ckv_engine *handle, uint64_t tag, int64_t timeout_us) {
  return with(handle, [&](ckv::Engine &engine) {
    if (engine.wait(tag, bounded(timeout_us))) {
      return static_cast<int>(CKV_OK);
    }
    return refuse(CKV_TIMEOUT, "the transfer is not finished yet");
  });
}

int ckv_close(ckv_engine *handle, int64_t timeout_us) {
  return with(handle, [&](ckv::Engine &engine) {
    int code = engine.close(bounded(timeout_us));
    return code == CKV_OK ? code : refuse(code, "the driver did not finish its copies in time");
  });
}

void ckv_free(ckv_engine *handle) {
  // A fork has the memory but not the threads: its copy cannot be taken apart.
  if (handle == nullptr || handle->engine->pid() != getpid()) {
    return;
  }
  ckv_close(handle, 0);
  {
    std::lock_guard<std::mutex> lock(handle->mutex);
    handle->is_freed = true;
    if (handle->num_opening > 0) {
      return;
    }
  }
  delete handle;
}

int ckv_get_stats(ckv_engine *handle, ckv_stats *out) {
  return with(handle, [&](ckv::Engine &engine) {
    check_size(out, "ckv_stats");
    engine.get_stats(out);
    return CKV_OK;
  });
}

int ckv_pool_map(ckv_engine *handle, const ckv_pool_config *config, void **out) {
  return with(handle, [&](ckv::Engine &engine) {
    check_size(config, "ckv_pool_config");
    check_place(out, "the pool's address");
    *out = engine.map_pool(*config);
    return CKV_OK;
  });
}

int ckv_pool_get_state(ckv_engine *handle, void *base, ckv_pool_state *out) {
  return with(handle, [&](ckv::Engine &engine) {
    check_size(out, "ckv_pool_state");
    engine.get_pool_state(base, out);
    return CKV_OK;
  });
}

int ckv_pool_want(ckv_engine *handle, void *base, uint64_t bytes) {
  return with(handle, [&](ckv::Engine &engine) {
    engine.want_pool(base, bytes);
    return CKV_OK;
  });
}

int ckv_pool_wait(ckv_engine *handle, void *base, int64_t timeout_us) {
  return with(handle, [&](ckv::Engine &engine) {
    if (engine.wait_pool(base, bounded(timeout_us))) {
      return static_cast<int>(CKV_OK);
    }
    return refuse(CKV_TIMEOUT, "the pool still grows");
  });
}

int ckv_pool_release(ckv_engine *handle, void *base) {
  return with(handle, [&](ckv::Engine &engine) {
    engine.release_pool(base);
    return CKV_OK;
  });
}

int ckv_pool_regrow(ckv_engine *handle, void *base) {
  return with(handle, [&](ckv::Engine &engine) {
    engine.regrow_pool(base);
    return CKV_OK;
  });
}

int ckv_pool_unmap(ckv_engine *handle, void *base) {
  return with(handle, [&](ckv::Engine &engine) {
    engine.unmap_pool(base);
    return CKV_OK;
  });
}

int ckv_sim_hold(ckv_engine *handle, int on) {
  return with_sim(handle, [&](ckv::SimDriver &sim) { sim.hold(on != 0); });
}

int ckv_sim_fail(ckv_engine *handle, uint64_t after, uint64_t count, int code) {
  return with_sim(handle, [&](ckv::SimDriver &sim) { sim.fail(CKV_SIM_ANY, after, count, code); });
}

int ckv_sim_fail_at(ckv_engine *handle, int entry, uint64_t after, uint64_t count, int code) {
  return with_sim(handle, [&](ckv::SimDriver &sim) { sim.fail(entry, after, count, code); });
}

int ckv_sim_stop(ckv_engine *handle, uint64_t after) {
  return with_sim(handle, [&](ckv::SimDriver &sim) { sim.stop(after); });
}

int ckv_sim_set_paths(ckv_engine *handle, uint32_t paths) {
  return with_sim(handle, [&](ckv::SimDriver &sim) { sim.set_paths(paths); });
}

int ckv_sim_set_grace(ckv_engine *handle, int64_t grace_us) {
  return with_sim(handle, [&](ckv::SimDriver &sim) { sim.set_grace(bounded(grace_us)); });
}

int ckv_sim_fail_path(ckv_engine *handle, int path, int code) {
  return with_sim(handle, [&](ckv::SimDriver &sim) { sim.fail_path(path, code); });
}

int ckv_sim_stream(ckv_engine *handle, uintptr_t *out) {
  return with_sim(handle, [&](ckv::SimDriver &sim) {
    check_place(out, "the stream");
    *out = reinterpret_cast<uintptr_t>(sim.create_stream());
  });
}

int ckv_sim_compute(ckv_engine *handle, uintptr_t stream, void *ptr, int value, uint64_t bytes,
                    uint64_t delay_us) {
  return with_sim(handle, [&](ckv::SimDriver &sim) {
    sim.compute(reinterpret_cast<void *>(stream), ptr, value, bytes, delay_us);
  });
}

int ckv_sim_block(ckv_engine *handle, uintptr_t stream, int on) {
  return with_sim(
      handle, [&](ckv::SimDriver &sim) { sim.block(reinterpret_cast<void *>(stream), on != 0); });
}

int ckv_sim_watch(ckv_engine *handle, int on) {
  return with_sim(handle, [&](ckv::SimDriver &sim) { sim.turn_watch(on != 0); });
}

int ckv_sim_get_stats(ckv_engine *handle, ckv_sim_stats *out) {
  return with_sim(handle, [&](ckv::SimDriver &sim) {
    check_place(out, "the counters");
    *out = sim.stats();
  });
}

}  // extern "C"
