#include "driver_sim.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "failure.h"

namespace ckv {

namespace {

constexpr int kInvalidHandle = 400;

void copy_bytes(const Descriptor &d) {
  std::memcpy(reinterpret_cast<void *>(d.dst), reinterpret_cast<const void *>(d.src), d.bytes);
}

}  // namespace

SimDriver::SimDriver(uint32_t mbps) : mbps_(mbps) {}

void SimDriver::start() {
  add_stream(CKV_LOAD);
  add_stream(CKV_STORE);
}

SimDriver::~SimDriver() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_quitting_ = true;
  }
  changed_.notify_all();
  for (auto &stream : streams_) {
    stream->thread.join();
  }
  if (watch_.is_on()) {
    std::fprintf(stderr, "ckv simulator: watched %llu pieces of blocks, %llu violations\n",
                 static_cast<unsigned long long>(watch_.num_watched()),
                 static_cast<unsigned long long>(watch_.num_violations()));
  }
}

SimDriver::SimStream *SimDriver::add_stream(int direction) {
  auto owned = std::make_unique<SimStream>();
  SimStream *stream = owned.get();
  stream->direction = direction;
  std::lock_guard<std::mutex> lock(mutex_);
  streams_.push_back(std::move(owned));
  try {
    stream->thread = std::thread([this, stream] { work(stream); });
  } catch (...) {
    streams_.pop_back();
    throw;
  }
  return stream;
}

SimDriver::SimStream *SimDriver::find(Stream stream) {
  for (auto &known : streams_) {
    if (known.get() == stream) {
      return known.get();
    }
  }
  return nullptr;
}

void SimDriver::work(SimStream *stream) {
  prctl(PR_SET_NAME, "ckv-sim");
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] {
      bool is_stopped = stream->is_blocked || (is_held_ && stream->direction >= 0);
      return is_quitting_ || (!stream->ops.empty() && !is_stopped);
    });
    if (is_quitting_) {
      return;
    }
    Op op = std::move(stream->ops.front());
    stream->ops.pop_front();
    if (dead_code_ == 0) {
      stream->is_running = true;
      execute(lock, stream, op);
      stream->is_running = false;
    }
    if (stream->direction >= 0) {
      stream->bytes_in_flight -= op.bytes;
      ++stats_.num_copied[stream->direction];
    }
    // A blocked kernel has begun and does not end.
    changed_.wait(lock, [&] { return !stream->is_blocked || is_quitting_; });
    ++stream->num_done;
    changed_.notify_all();
  }
}

void SimDriver::execute(std::unique_lock<std::mutex> &lock, SimStream *stream, const Op &op) {
  auto begin = std::chrono::steady_clock::now();
  auto until = begin + op.delay;
  changed_.wait_until(lock, until, [&] { return is_quitting_; });
  lock.unlock();
  if (op.set_at != nullptr) {
    std::memset(op.set_at, op.set_to, op.bytes);
  }
  run_copies(stream->direction, op.copies);
  lock.lock();
  if (mbps_ > 0 && !op.copies.empty()) {
    until = begin + std::chrono::microseconds(op.bytes / mbps_);
    changed_.wait_until(lock, until, [&] { return is_quitting_ || dead_code_ != 0; });
  }
}

void SimDriver::run_copies(int direction, const std::vector<Descriptor> &copies) {
  SimWatch *watch = direction == CKV_LOAD ? this->watch() : nullptr;
  if (watch != nullptr) {
    watch->before_copies(copies);
  }
  for (const Descriptor &d : copies) {
    copy_bytes(d);
  }
  if (watch != nullptr) {
    watch->after_copies(copies);
  }
}

bool SimDriver::is_copying() const {
  return streams_[CKV_LOAD]->is_running || streams_[CKV_STORE]->is_running;
}

// Counts a driver call; its code if it shall fail.
int SimDriver::fault(std::unique_lock<std::mutex> &lock, int entry) {
  ++stats_.num_driver_calls;
  if (stop_after_ != kNever && stop_after_-- == 0) {
    wait_stopped(lock);
  }
  int code = dead_code_;
  for (int e : {static_cast<int>(CKV_SIM_ANY), entry}) {
    code = code == 0 ? faults_[e].next() : code;
  }
  if (dead_code_ == 0 && is_sticky(code)) {
    end_context(lock, code);
  }
  return code;
}

// The call that is kept disarms the stop, so that the others pass.
void SimDriver::wait_stopped(std::unique_lock<std::mutex> &lock) {
  uint64_t order = stop_order_;
  ++stats_.num_stopped;
  changed_.wait(lock, [&] { return is_quitting_ || stop_order_ != order; });
  --stats_.num_stopped;
}

int SimDriver::Fault::next() {
  if (count == 0) {
    return 0;
  }
  if (after > 0) {
    --after;
    return 0;
  }
  --count;
  return code;
}

// Is not reported before the copy that is running has stopped, as a real device would.
void SimDriver::end_context(std::unique_lock<std::mutex> &lock, int code) {
  dead_code_ = code;
  changed_.notify_all();
  changed_.wait(lock, [&] { return !is_copying(); });
}

int SimDriver::event_create(Event *out) {
  std::unique_lock<std::mutex> lock(mutex_);
  int code = fault(lock, CKV_SIM_EVENT_CREATE);
  if (code == 0) {
    *out = new SimEvent;
  }
  return code;
}

void SimDriver::event_destroy(Event event) { delete static_cast<SimEvent *>(event); }

int SimDriver::event_record(Event event, Stream stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  int code = fault(lock, CKV_SIM_EVENT_RECORD);
  if (code != 0) {
    return code;
  }
  SimStream *known = find(stream);
  if (known == nullptr) {
    return kInvalidHandle;
  }
  *static_cast<SimEvent *>(event) = {known, known->num_queued};
  return 0;
}

int SimDriver::event_query(Event event) {
  std::unique_lock<std::mutex> lock(mutex_);
  int code = fault(lock, CKV_SIM_EVENT_QUERY);
  if (code != 0) {
    return code;
  }
  const SimEvent &e = *static_cast<SimEvent *>(event);
  return e.stream == nullptr || e.stream->num_done >= e.target ? 0 : kNotReady;
}

int SimDriver::stream_query(Stream stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  int code = fault(lock, CKV_SIM_STREAM_QUERY);
  if (code != 0) {
    return code;
  }
  SimStream *known = find(stream);
  if (known == nullptr) {
    return kInvalidHandle;
  }
  return known->num_done == known->num_queued ? 0 : kNotReady;
}

unsigned SimDriver::paths(int /*direction*/) const {
  unsigned possible = 1U << CKV_PATH_BATCH | 1U << CKV_PATH_GATHER;
  return (possible & paths_) | 1U << CKV_PATH_LOOP;
}

int SimDriver::copy(int direction, int path, const Descriptor *descriptors, size_t n,
                    size_t /*place*/) {
  std::unique_lock<std::mutex> lock(mutex_);
  int code = fault(lock, CKV_SIM_COPY);
  code = code != 0 ? code : path_codes_[path];
  if (code != 0) {
    n /= 2;
  }
  SimStream *stream = streams_[direction].get();
  Op op;
  op.copies.assign(descriptors, descriptors + n);
  for (const Descriptor &d : op.copies) {
    op.bytes += d.bytes;
  }
  stream->bytes_in_flight += op.bytes;
  stats_.max_bytes_in_flight[direction] =
      std::max(stats_.max_bytes_in_flight[direction], stream->bytes_in_flight);
  stats_.num_descriptors[direction] += n;
  ++stats_.num_copy_calls[direction];
  ++stream->num_queued;
  stream->ops.push_back(std::move(op));
  changed_.notify_all();
  return code;
}

int SimDriver::host_register(void *, size_t) {
  std::unique_lock<std::mutex> lock(mutex_);
  return fault(lock, CKV_SIM_HOST_REGISTER);
}

std::string SimDriver::describe(int code) {
  return "simulated driver error " + std::to_string(code);
}

void SimDriver::hold(bool on) {
  std::unique_lock<std::mutex> lock(mutex_);
  is_held_ = on;
  changed_.notify_all();
  if (on) {
    changed_.wait(lock, [&] { return !is_copying(); });
  }
}

void SimDriver::fail(int entry, uint64_t after, uint64_t count, int code) {
  if (entry < CKV_SIM_ANY || entry > CKV_SIM_HOST_REGISTER) {
    throw Failure(CKV_EINVAL, "the driver has no entry point " + std::to_string(entry));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  faults_[entry] = {after, count, code};
}

void SimDriver::stop(uint64_t after) {
  std::lock_guard<std::mutex> lock(mutex_);
  stop_after_ = after;
  ++stop_order_;
  changed_.notify_all();
}

void SimDriver::fail_path(int path, int code) {
  if (path <= CKV_PATH_AUTO || path > CKV_PATH_GATHER) {
    throw Failure(CKV_EINVAL, "path " + std::to_string(path) + " is unknown");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  path_codes_[path] = code;
}

Stream SimDriver::create_stream() { return add_stream(-1); }

void SimDriver::compute(Stream stream, void *ptr, int value, uint64_t bytes, uint64_t delay_us) {
  std::lock_guard<std::mutex> lock(mutex_);
  SimStream *known = find(stream);
  if (known == nullptr) {
    throw Failure(CKV_EINVAL, "this is no stream of the simulator");
  }
  Op op;
  op.bytes = bytes;
  op.set_at = bytes > 0 ? ptr : nullptr;
  op.set_to = value;
  op.delay = std::chrono::microseconds(delay_us);
  ++known->num_queued;
  known->ops.push_back(std::move(op));
  changed_.notify_all();
}

void SimDriver::block(Stream stream, bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  SimStream *known = find(stream);
  if (known == nullptr) {
    throw Failure(CKV_EINVAL, "this is no stream of the simulator");
  }
  known->is_blocked = on;
  changed_.notify_all();
}

ckv_sim_stats SimDriver::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.num_violations = watch_.num_violations();
  stats_.num_disk_calls = disk_.num_calls();
  stats_.num_disk_stopped = disk_.num_stopped();
  return stats_;
}

std::unique_ptr<Driver> open_sim_driver(const ckv_config &config) {
  std::optional<uint32_t> mbps = number_of("CKV_SIM_MBPS");
  auto sim = std::make_unique<SimDriver>(mbps.value_or(0) == 0 ? config.sim_mbps : *mbps);
  sim->start();
  sim->turn_watch(std::getenv("CKV_SIM_WATCH") != nullptr);
  sim->disk().obey_environment();
  return sim;
}

}  // namespace ckv
