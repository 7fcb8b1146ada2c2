#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "checker.h"
#include "failure.h"
#include "lane.h"
#include "sim_watch.h"

namespace ckv {

namespace {

using std::to_string;
using std::chrono::microseconds;

std::string quoted(const char *what, int32_t id, int32_t count) {
  return std::string(what) + " " + to_string(id) + " is not in 0.." + to_string(count - 1);
}

// Without a branch per id, so that the compiler makes it a few instructions per eight of them.
bool are_below(const std::vector<int32_t> &ids, int32_t end) {
  uint32_t highest = 0;  // of unsigned ids: one below 0 is beyond every end
  for (int32_t id : ids) {
    highest = std::max(highest, static_cast<uint32_t>(id));
  }
  return ids.empty() || highest < static_cast<uint32_t>(end);
}

void check_range(const char *what, const std::vector<int32_t> &ids, int32_t count) {
  if (are_below(ids, count)) {
    return;
  }
  for (int32_t id : ids) {
    if (id < 0 || id >= count) {
      throw Failure(CKV_EINVAL, quoted(what, id, count));
    }
  }
}

Rank rank_of(int direction, uint32_t flags) {
  if (direction == CKV_STORE) {
    return Rank::STORE;
  }
  return flags == CKV_SPECULATIVE ? Rank::SPECULATIVE : Rank::AWAITED;
}

// Of the region's slots 0..max-1, how many have their piece within what is ready of the pool.
int32_t slots_in(const ckv_region &region, const HostPool &pool, int32_t max) {
  uint64_t offset = region.host_base - reinterpret_cast<uint64_t>(pool.base());
  uint64_t ready = pool.ready_bytes();
  if (ready < region.bytes || ready - region.bytes < offset) {
    return 0;
  }
  uint64_t count = (ready - region.bytes - offset) / region.host_stride + 1;
  return static_cast<int32_t>(std::min(count, static_cast<uint64_t>(max)));
}

}  // namespace

Engine::EventStore::~EventStore() {
  for (Event event : idle) {
    driver->event_destroy(event);
  }
}

Engine::Engine(const ckv_config &config, std::unique_ptr<Driver> driver)
    : config_(config),
      pid_(getpid()),
      driver_(std::move(driver)),
      has_checker_ended_(config.checksum_every == 0) {
  events_.driver = driver_.get();
}

void Engine::set_regions(const ckv_region *regions, size_t n, int32_t num_blocks,
                         int32_t num_slots) {
  Layout layout(regions, n, num_blocks, num_slots);
  Sums sums(config_.checksum_every, static_cast<size_t>(num_slots));
  std::lock_guard<std::mutex> lock(mutex_);
  set_borders(&layout);
  if (!layout_.empty()) {
    // A disk, which may hang, uses slots alone, and those stay.
    check_idle("regions", [](const Transfer &each) { return each.disk == nullptr; });
    layout_.move_to(layout);
    return;
  }
  const std::vector<ckv_region> &given = layout.regions();
  is_host_foreign_ = !std::all_of(given.begin(), given.end(),
                                  [this](const ckv_region &r) { return has_pool_of(r); });
  claims_.resize(static_cast<size_t>(num_blocks), static_cast<size_t>(num_slots));
  layout_ = std::move(layout);
  sums_ = std::move(sums);
  count_ready_slots();
}

// With mutex_ held. A transfer that is finished uses neither regions nor slots any more.
void Engine::check_idle(const char *what, bool (*uses)(const Transfer &)) const {
  auto num = std::count_if(unfinished_.begin(), unfinished_.end(),
                           [uses](const auto &entry) { return uses(*entry.second); });
  if (num > 0) {
    throw Failure(CKV_AGAIN, std::string(what) + " stay while " + to_string(num) +
                                 " transfers are unfinished");
  }
}

// With mutex_ held. All slots lie in one pool, if any.
void Engine::set_borders(Layout *layout) const {
  for (const auto &[base, pool] : pools_) {
    if (driver_->locks_pages() && pool->contains(layout->regions().front().host_base)) {
      layout->set_borders(reinterpret_cast<uint64_t>(base), pool->chunk_bytes());
    }
  }
}

bool Engine::has_pool_of(const ckv_region &region) const {
  return std::any_of(pools_.begin(), pools_.end(), [&region](const auto &entry) {
    return entry.second->contains(region.host_base);
  });
}

// With mutex_ held. Slots whose pieces of all regions are in memory that may be copied. What lies
// in no pool of ours is the caller's business.
int32_t Engine::count_ready_slots() {
  int32_t num_ready = layout_.num_slots();
  for (const ckv_region &region : layout_.regions()) {
    for (const auto &[base, pool] : pools_) {
      if (pool->contains(region.host_base)) {
        num_ready = std::min(num_ready, slots_in(region, *pool, num_ready));
      }
    }
  }
  num_ready_slots_.store(num_ready, std::memory_order_release);
  return num_ready;
}

// Looks at the pools only if a slot is beyond what was ready when one looked last.
void Engine::check_ready(const std::vector<int32_t> &slots) {
  if (are_below(slots, num_ready_slots_.load(std::memory_order_acquire))) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  int32_t num_ready = count_ready_slots();
  for (int32_t slot : slots) {
    if (slot >= num_ready) {
      throw Failure(CKV_EINVAL, "slot " + to_string(slot) +
                                    " is not ready: the pool has grown to " + to_string(num_ready) +
                                    " of " + to_string(layout_.num_slots()) + " slots");
    }
  }
}

// Before an id is read: with more pairs than there are places to write, n is no array's length.
void Engine::check_count(int direction, size_t n) const {
  if (layout_.empty()) {
    throw Failure(CKV_EINVAL, "regions must be set before the first transfer");
  }
  bool is_load = direction == CKV_LOAD;
  int32_t max = is_load ? layout_.num_blocks() : layout_.num_slots();
  if (n > static_cast<size_t>(max)) {
    throw Failure(CKV_EINVAL, "a transfer of " + to_string(n) + " pairs would write a " +
                                  (is_load ? "block" : "slot") + " twice: there are " +
                                  to_string(max));
  }
}

void Engine::check_ids(const Transfer &transfer) {
  check_range("block", transfer.blocks, layout_.num_blocks());
  check_range("slot", transfer.slots, layout_.num_slots());
  check_ready(transfer.slots);
}

Event Engine::record_after(uintptr_t stream) {
  Event event = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!events_.idle.empty()) {
      event = events_.idle.back();
      events_.idle.pop_back();
    }
  }
  int code = event == nullptr ? driver_->event_create(&event) : 0;
  if (code == 0) {
    code = driver_->event_record(event, reinterpret_cast<Stream>(stream));
  }
  if (code == 0) {
    return event;
  }
  if (event != nullptr) {
    recycle(event);
  }
  if (is_sticky(code)) {
    poison(code);
  }
  throw Failure(CKV_EDRIVER,
                "recording an event on the caller's stream failed: " + driver_->describe(code));
}

// Keeping the event saves a driver call later; without memory for that, it is destroyed.
void Engine::recycle(Event event) {
  try {
    std::lock_guard<std::mutex> lock(mutex_);
    events_.idle.push_back(event);
  } catch (const std::bad_alloc &) {
    driver_->event_destroy(event);
  }
}

void Engine::submit(int direction, uint32_t flags, const int32_t *blocks, const int32_t *slots,
                    size_t n, uintptr_t after_stream, uint64_t tag) {
  if (direction != CKV_LOAD && direction != CKV_STORE) {
    throw Failure(CKV_EINVAL, "direction " + to_string(direction) + " is neither load nor store");
  }
  if (flags > CKV_SPECULATIVE || (flags == CKV_SPECULATIVE && direction != CKV_LOAD)) {
    throw Failure(CKV_EINVAL, "flags " + to_string(flags) + " do not fit this transfer");
  }
  if (n > 0 && (blocks == nullptr || slots == nullptr)) {
    throw Failure(CKV_EINVAL, "a transfer needs block and slot ids");
  }
  int code = poison_code();
  if (code != 0) {
    throw Failure(CKV_EPOISONED,
                  "the engine copies no more since a driver error: " + driver_->describe(code));
  }
  check_count(direction, n);
  auto transfer = std::make_unique<Transfer>();
  transfer->tag = tag;
  transfer->direction = direction;
  transfer->rank = rank_of(direction, flags);
  transfer->blocks.assign(blocks, blocks + n);
  transfer->slots.assign(slots, slots + n);
  transfer->report = std::make_unique<Report>();
  transfer->submit_ns = now_ns();
  transfer->free_ns = transfer->submit_ns;
  check_ids(*transfer);
  try {
    if (after_stream != 0) {
      transfer->after = record_after(after_stream);
    } else {
      begin_watch(*transfer);
    }
    enqueue(transfer.get());
  } catch (...) {
    if (SimWatch *watch = driver_->watch()) {
      watch->forget(*transfer);
    }
    if (transfer->after != nullptr) {
      recycle(transfer->after);
    }
    throw;
  }
  transfer.release();  // the lane's now
}

void Engine::begin_watch(const Transfer &transfer) {
  if (SimWatch *watch = driver_->watch()) {
    watch->begin(transfer, layout_);
  }
}

// Takes the transfer, or throws and has changed nothing.
void Engine::enqueue(Transfer *transfer) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (phase_ != Phase::OPEN) {
      throw Failure(CKV_CLOSED, "the copy engine is closed");
    }
    if (unfinished_.size() + reports_.num_pending() >= config_.max_transfers) {
      throw Failure(CKV_AGAIN, to_string(config_.max_transfers) +
                                   " transfers are unfinished or not yet polled");
    }
    if (!unfinished_.emplace(transfer->tag, transfer).second) {
      throw Failure(CKV_EINVAL,
                    "an unfinished transfer already has tag " + to_string(transfer->tag));
    }
    inbox_.push_back(transfer);
    if (!std::exchange(is_lane_asleep_, false)) {
      return;
    }
  }
  wake_lane_.notify_one();
}

void Engine::cancel(uint64_t tag) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = unfinished_.find(tag);
    if (found == unfinished_.end() || found->second->is_cancelled) {
      return;
    }
    cancels_.push_back(tag);
    found->second->is_cancelled = true;
    if (!std::exchange(is_lane_asleep_, false)) {
      return;
    }
  }
  wake_lane_.notify_one();
}

bool Engine::wait(uint64_t tag, microseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return wake_waiters_.wait_for(lock, timeout, [&] { return unfinished_.count(tag) == 0; });
}

// In pools_ before it grows, so that a close meanwhile stops it.
void *Engine::map_pool(const ckv_pool_config &config) {
  auto owned = std::make_unique<HostPool>(*driver_, config, intake_);
  HostPool &pool = *owned;
  void *base = pool.base();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (phase_ != Phase::OPEN) {
      throw Failure(CKV_CLOSED, "the copy engine is closed");
    }
    pools_.emplace(base, std::move(owned));
  }
  try {
    pool.grow();
  } catch (...) {
    drop_pool(base);
    throw;
  }
  return base;
}

// With mutex_ held.
Engine::Pools::iterator Engine::find_pool(void *base) {
  auto found = pools_.find(base);
  if (found == pools_.end()) {
    throw Failure(CKV_EINVAL, "this engine has mapped no pool there");
  }
  return found;
}

// Its grower may have to be waited for: after the mutex, as the order of the two locals says.
void Engine::drop_pool(void *base) {
  Pools::node_type pool;
  std::lock_guard<std::mutex> lock(mutex_);
  pool = pools_.extract(find_pool(base));
}

void Engine::get_pool_state(void *base, ckv_pool_state *out) {
  std::lock_guard<std::mutex> lock(mutex_);
  find_pool(base)->second->get_state(out);
}

// A kernel that touches memory which is not page-locked ends the context; a copy call does not.
uint32_t Engine::paths(int direction) const {
  uint32_t usable = ~counters_.given_up.load(std::memory_order_relaxed);
  if (is_host_foreign_.load(std::memory_order_relaxed)) {
    usable &= ~(1U << CKV_PATH_GATHER);
  }
  return driver_->paths(direction) & usable;
}

void Engine::want_pool(void *base, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  find_pool(base)->second->want(bytes);
}

// The caller keeps the pool mapped, so the mutex is held to find it and not while it grows.
bool Engine::wait_pool(void *base, microseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  HostPool &pool = *find_pool(base)->second;
  lock.unlock();
  return pool.wait_grown(timeout);
}

void Engine::get_stats(ckv_stats *out) const {
  *out = ckv_stats{};
  out->size = sizeof *out;
  out->poison = poison_code();
  uint32_t given_up = counters_.given_up.load(std::memory_order_relaxed);
  out->paths = paths(CKV_LOAD) | paths(CKV_STORE);
  out->num_given_up = static_cast<uint32_t>(__builtin_popcount(given_up));
  counters_.get(out);
}

// No slot is ready from the first line on, so what is slow needs no mutex.
void Engine::release_pool(void *base) {
  std::unique_lock<std::mutex> lock(mutex_);
  check_idle("the pool's pages", [](const Transfer &) { return true; });
  HostPool &pool = *find_pool(base)->second;
  num_ready_slots_.store(0, std::memory_order_release);
  lock.unlock();
  pool.give_back();
}

void Engine::regrow_pool(void *base) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (phase_ != Phase::OPEN) {
    throw Failure(CKV_CLOSED, "the copy engine is closed");
  }
  HostPool &pool = *find_pool(base)->second;
  lock.unlock();
  pool.grow_again();
}

void Engine::unmap_pool(void *base) {
  Pools::node_type pool;
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = find_pool(base);
  if (!layout_.empty() && close_result_ != CKV_OK) {
    throw Failure(CKV_AGAIN, "the pool stays mapped while the engine may still copy");
  }
  pool = pools_.extract(found);
}

void Engine::start(const std::shared_ptr<Engine> &engine) {
  // Each thread owns a share: one that is left behind keeps alive what it uses.
  auto lane = std::make_unique<Lane>(*engine);
  if (engine->config_.checksum_every > 0) {
    engine->checker_ = std::thread([engine] {
      Checker(*engine).run();
      engine->checker_ended();
    });
  }
  try {
    engine->lane_ = std::thread([engine, lane = std::move(lane)]() mutable {
      lane->run();
      lane.reset();
      engine->lane_ended();
    });
  } catch (...) {
    engine->lane_ended();  // so that the checker ends too
    if (engine->checker_.joinable()) {
      engine->checker_.join();
    }
    throw;
  }
}

int Engine::close(microseconds timeout) {
  std::lock_guard<std::mutex> one_closer(close_mutex_);
  std::unique_lock<std::mutex> lock(mutex_);
  if (close_result_ != CKV_AGAIN) {
    return close_result_;
  }
  auto ended = [this] { return has_ended(); };
  phase_ = Phase::DRAINING;
  for (auto &entry : pools_) {
    entry.second->stop();
  }
  wake_lane_.notify_one();
  lock.unlock();  // disks_ gets no more: this phase allows none
  for (auto &disk : disks_) {
    disk->stop();
  }
  lock.lock();
  if (!wake_waiters_.wait_for(lock, timeout, ended)) {
    phase_ = Phase::STOPPING;
    wake_lane_.notify_one();
    if (!wake_waiters_.wait_for(lock, driver_->grace(), ended)) {
      leave_behind();
      lock.unlock();
      let_go_of_disks();
      return CKV_TIMEOUT;
    }
  }
  close_result_ = CKV_OK;
  lock.unlock();
  for (std::thread *thread : {&lane_, &checker_}) {
    if (thread->joinable()) {
      thread->join();
    }
  }
  let_go_of_disks();
  return CKV_OK;
}

// With mutex_ held.
void Engine::leave_behind() {
  phase_ = Phase::LEFT;
  SimWatch *watch = driver_->watch();
  for (auto &entry : unfinished_) {
    if (watch != nullptr) {
      watch->forget(*entry.second);
    }
    reports_.push(complete(entry.second, CKV_FAILED, CKV_CLOSED));
  }
  unfinished_.clear();
  for (std::thread *thread : {&lane_, &checker_}) {
    if (thread->joinable()) {
      thread->detach();
    }
  }
  close_result_ = CKV_TIMEOUT;
  wake_waiters_.notify_all();
}

bool Engine::has_orders(Phase seen) const {
  return phase_ != seen || !cancels_.empty() || !inbox_.empty();
}

bool Engine::take_orders(microseconds patience, Queues *queues, Phase *phase) {
  bool has_taken = false;
  TransferQueue submitted;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    auto has_some = [&] { return has_orders(*phase); };
    is_lane_asleep_ = patience > kDeafNap && !has_some();
    if (patience == kForEver) {
      wake_lane_.wait(lock, has_some);
    } else if (patience.count() > 0) {
      wake_lane_.wait_for(lock, patience, has_some);
    }
    is_lane_asleep_ = false;
    has_taken = has_some();
    *phase = phase_;
    submitted.take_all(inbox_);
    taken_cancels_.swap(cancels_);
  }
  admit(&submitted, queues);
  stop_cancelled(queues);
  return has_taken;
}

// In the order of the submits, whatever their ranks: of two in conflict the later one is refused.
void Engine::admit(TransferQueue *submitted, Queues *queues) {
  while (Transfer *transfer = submitted->front()) {
    submitted->remove(transfer);
    if (claims_.take(transfer)) {
      sums_.begin(transfer);
      if (transfer->disk != nullptr) {
        transfer->disk->disk->push(transfer);
      } else {
        (*queues)[transfer->rank].push_back(transfer);
      }
      continue;
    }
    if (SimWatch *watch = driver_->watch()) {
      watch->forget(*transfer);  // the blocks may be another's to write
    }
    finish(transfer, CKV_FAILED, CKV_EINVAL);
  }
}

void Engine::stop_cancelled(Queues *queues) {
  if (taken_cancels_.empty()) {
    return;
  }
  TransferQueue stopped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint64_t tag : taken_cancels_) {
      auto found = unfinished_.find(tag);
      // A finished transfer's tag may be in use again; only the one that was asked for has the
      // mark, and one that the lane has not taken yet is stopped when it has.
      if (found != unfinished_.end() && found->second->is_cancelled && found->second->has_claims &&
          stop(found->second, queues)) {
        stopped.push_back(found->second);
      }
    }
    taken_cancels_.clear();
  }
  while (Transfer *transfer = stopped.front()) {
    stopped.remove(transfer);
    finish(transfer, CKV_CANCELLED, 0);
  }
}

// To the front: a cancelled transfer is settled when the lane looks next, not after all that was
// queued before it. A disk may hang, so what its threads have not begun is settled here.
bool Engine::stop(Transfer *transfer, Queues *queues) {
  if (transfer->disk != nullptr) {
    return transfer->disk->disk->cancel(transfer);
  }
  transfer->is_stopping = true;
  if (transfer->is_queued) {
    TransferQueue &queue = (*queues)[transfer->rank];
    queue.remove(transfer);
    queue.push_front(transfer);
  }
  return false;
}

void Engine::settle(Transfer *transfer, int status, int error) {
  if (status != CKV_DONE || !transfer->is_summed) {
    finish(transfer, status, error);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    to_check_[static_cast<size_t>(transfer->rank)].push(transfer);
  }
  wake_checker_.notify_one();
}

// In the order of the ranks, as the lane: somebody waits for a load, nobody for a store.
Transfer *Engine::take_check() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    for (CheckQueue &queue : to_check_) {
      if (!queue.empty()) {
        return queue.pop();
      }
    }
    if (has_lane_ended_) {
      return nullptr;
    }
    wake_checker_.wait(lock);
  }
}

bool Engine::is_past_deadline() {
  std::lock_guard<std::mutex> lock(mutex_);
  return phase_ == Phase::STOPPING || phase_ == Phase::LEFT;
}

void Engine::finish(Transfer *transfer, int status, int error) {
  std::unique_ptr<Transfer> owned(transfer);
  if (SimWatch *watch = driver_->watch()) {
    watch->end(*transfer);
  }
  if (transfer->after != nullptr) {
    recycle(transfer->after);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Report> report = complete(transfer, status, error);
    // Before the report: who has polled that may use the same blocks and slots at once.
    claims_.give_back(std::move(owned));
    if (report) {
      unfinished_.erase(report->completion.tag);
      reports_.push(std::move(report));
    }
  }
  wake_waiters_.notify_all();
}

// With mutex_ held. The transfer's report, filled in; null if close gave it away already.
std::unique_ptr<Report> Engine::complete(Transfer *transfer, int status, int error) {
  if (!transfer->report) {
    return nullptr;
  }
  ckv_completion &completion = transfer->report->completion;
  completion.tag = transfer->tag;
  completion.status = status;
  completion.error = error;
  completion.submit_ns = transfer->submit_ns;
  completion.done_ns = now_ns();
  if (phase_ != Phase::LEFT) {  // else the lane still writes these
    completion.bytes = transfer->copied_bytes;
    completion.start_ns = transfer->start_ns;
    if (transfer->disk != nullptr && status != CKV_DONE) {
      tell_slots(*transfer->disk, transfer->report.get());
    }
  }
  return std::move(transfer->report);
}

void Engine::poison(int code) {
  int none = 0;
  poison_code_.compare_exchange_strong(none, code);
}

void Engine::lane_ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  has_lane_ended_ = true;
  wake_checker_.notify_one();
  wake_waiters_.notify_all();
}

bool Engine::is_lane_asleep() {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_lane_asleep_;
}

void Engine::checker_ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  has_checker_ended_ = true;
  wake_waiters_.notify_all();
}

}  // namespace ckv
