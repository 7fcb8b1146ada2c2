#include "lane.h"

#include <sys/prctl.h>

#include <exception>

#include "failure.h"
#include "path.h"
#include "placement.h"

namespace ckv {

Lane::Lane(Engine &engine, Driver &driver)
    : engine_(engine), driver_(driver), counters_(engine.counters()) {}

// On a lane that is built already: what fails here runs the destructor, which frees the events.
Lane::Lane(Engine &engine) : Lane(engine, engine.driver()) {
  for (Channel &channel : channels_) {
    channel.descriptors.reserve(engine.config().max_descriptors);
    for (Event &event : channel.events) {
      int code = driver_.event_create(&event);
      if (code != 0) {
        throw Failure(CKV_EDRIVER, "creating an event failed: " + driver_.describe(code));
      }
    }
  }
}

Lane::~Lane() {
  for (Channel &channel : channels_) {
    for (Event event : channel.events) {
      if (event != nullptr) {
        driver_.event_destroy(event);
      }
    }
  }
}

void Lane::run() {
  prctl(PR_SET_NAME, "ckv-lane");
  place_thread(driver_.numa_node());
  prctl(PR_SET_TIMERSLACK, 1000UL);  // else a nap of 10 us takes 60
  int code = driver_.attach_thread();
  if (code != 0) {
    engine_.poison(code);
  }
  std::chrono::microseconds nap{0};
  for (;;) {
    bool has_moved = engine_.take_orders(nap, &queues_, &phase_);
    try {
      has_moved |= step();
    } catch (const std::exception &) {
      // Must not happen. The engine fails and says so instead of taking the process with it.
      engine_.poison(CKV_EINTERNAL);
      has_moved = true;
    }
    if (work() == Naps::Work::NONE && phase_ != Phase::OPEN) {
      return;
    }
    nap = naps_.next(now_ns(), has_moved, work());
  }
}

// One trunk at a time, and then new orders: a load that is waited for is next, a cancelled transfer
// has no further trunk.
bool Lane::step() {
  bool has_moved = reap(CKV_LOAD);
  has_moved |= reap(CKV_STORE);
  return issue(Rank::AWAITED) || issue(Rank::SPECULATIVE) || issue(Rank::STORE) || has_moved;
}

Naps::Work Lane::work() const {
  if (channels_[CKV_LOAD].num_in_flight + channels_[CKV_STORE].num_in_flight > 0) {
    return Naps::Work::COPIES;
  }
  return queues_.empty() ? Naps::Work::NONE : Naps::Work::EVENTS;
}

bool Lane::reap(int direction) {
  Channel &channel = channels_[direction];
  bool has_moved = false;
  while (channel.num_in_flight > 0 &&
         query(direction, &channel.trunks[channel.oldest]) != kNotReady) {
    retire(direction);
    has_moved = true;
  }
  return has_moved;
}

// 0 if the trunk will touch no more memory, else kNotReady. An error here is not a refusal of the
// query but a copy's or a kernel's failure: the device context is not to be trusted any more. Only
// a sticky one proves that it has stopped; after another the stream decides, for an event may fail
// for ever: it is empty soon, since a poisoned engine issues nothing. If that fails as well, it is
// asked again, until a close leaves the trunk behind.
int Lane::query(int direction, Trunk *trunk) {
  const Channel &channel = channels_[direction];
  if (trunk->has_event) {
    int code = driver_.event_query(channel.events[channel.oldest]);
    if (code == 0 || code == kNotReady) {
      return code;
    }
    trunk->has_event = false;
    if (has_stopped(trunk, code)) {
      return 0;
    }
  }
  int code = driver_.stream_query(driver_.copy_stream(direction));
  if (code == 0 || code == kNotReady) {
    return code;
  }
  return has_stopped(trunk, code) ? 0 : kNotReady;
}

// Takes in the error of a query; whether it proves that nothing is copied any more.
bool Lane::has_stopped(Trunk *trunk, int code) {
  trunk->error = trunk->error == 0 ? code : trunk->error;
  engine_.poison(code);
  return is_sticky(code);
}

void Lane::retire(int direction) {
  Channel &channel = channels_[direction];
  Trunk trunk = channel.trunks[channel.oldest];
  channel.oldest = (channel.oldest + 1) % kMaxTrunks;
  --channel.num_in_flight;
  channel.bytes_in_flight -= trunk.bytes;
  counters_.bytes_in_flight[direction].sub(trunk.bytes);
  Transfer *transfer = trunk.transfer;
  --transfer->num_trunks_in_flight;
  if (trunk.error == 0) {
    transfer->copied_bytes += trunk.bytes;
    counters_.num_bytes[direction].add(trunk.bytes);
  } else {
    fail(transfer, trunk.error);
  }
  if (!transfer->is_queued && transfer->num_trunks_in_flight == 0) {
    settle(transfer);
  }
}

int Lane::reason_to_fail() const {
  int code = engine_.poison_code();
  if (code != 0) {
    return code;
  }
  return phase_ == Phase::STOPPING || phase_ == Phase::LEFT ? CKV_CLOSED : 0;
}

bool Lane::issue(Rank rank) {
  Transfer *transfer = queues_[rank].front();
  if (transfer == nullptr) {
    return false;
  }
  int reason = reason_to_fail();
  if (reason != 0 && !transfer->is_stopping) {
    fail(transfer, reason);
  }
  if (transfer->is_stopping || transfer->is_expanded()) {
    finish_queued(transfer);
    return true;
  }
  // The event is asked first: time that is spent waiting for room is the lane's, and counted.
  if (!is_ready(transfer) || !has_room(transfer->direction)) {
    return false;
  }
  launch(transfer->direction, transfer);
  return true;
}

// For a whole trunk, so that the window is never exceeded and trunks never get crumbs.
bool Lane::has_room(int direction) const {
  const ckv_config &config = engine_.config();
  const Channel &channel = channels_[direction];
  return channel.num_in_flight < kMaxTrunks &&
         channel.bytes_in_flight + config.trunk_bytes <= config.window_bytes[direction];
}

bool Lane::is_ready(Transfer *transfer) {
  if (transfer->after == nullptr) {
    return true;
  }
  int code = driver_.event_query(transfer->after);
  if (code == 0) {
    engine_.recycle(transfer->after);
    transfer->after = nullptr;
    transfer->free_ns = now_ns();
    engine_.begin_watch(*transfer);
    return true;
  }
  if (code != kNotReady) {
    engine_.poison(code);  // what the event stood behind has failed, see query()
    fail(transfer, code);
  }
  return false;
}

void Lane::launch(int direction, Transfer *transfer) {
  Channel &channel = channels_[direction];
  Cursor cursor = transfer->cursor;
  TrunkLimits limits{engine_.config().trunk_bytes, engine_.config().max_descriptors};
  Trunk trunk;
  trunk.transfer = transfer;
  trunk.bytes = engine_.layout().expand(*transfer, limits, &cursor, &channel.descriptors);
  if (transfer->start_ns == 0) {
    count_start(transfer);
  }
  size_t at = (channel.oldest + channel.num_in_flight) % kMaxTrunks;
  trunk.error = copy(direction, trunk, at);
  const Layout &layout = engine_.layout();
  counters_.num_descriptors[direction].add(channel.descriptors.size());
  counters_.num_pieces[direction].add(layout.num_pieces(cursor) -
                                      layout.num_pieces(transfer->cursor));
  counters_.bytes_in_flight[direction].add(trunk.bytes);
  // Also after a failed copy: a part of it may be under way, and must end before it is reported.
  int code = driver_.event_record(channel.events[at], driver_.copy_stream(direction));
  trunk.has_event = code == 0;
  trunk.error = trunk.error == 0 ? code : trunk.error;
  channel.trunks[at] = trunk;
  ++channel.num_in_flight;
  channel.bytes_in_flight += trunk.bytes;
  ++transfer->num_trunks_in_flight;
  transfer->cursor = cursor;
  if (trunk.error != 0) {
    fail(transfer, trunk.error);  // if it ended the context, the query that follows says so too
  }
  if (transfer->is_stopping || transfer->is_expanded()) {
    finish_queued(transfer);
  }
}

int Lane::copy(int direction, const Trunk &trunk, size_t at) {
  const std::vector<Descriptor> &descriptors = channels_[direction].descriptors;
  for (;;) {
    int path = choose_path(direction, descriptors.size(), trunk.bytes, engine_.paths(direction),
                           engine_.config().path);
    int code = driver_.copy(direction, path, descriptors.data(), descriptors.size(), at);
    if (!is_path_at_fault(path, code)) {
      counters_.num_trunks[direction][path].add(1);
      return code;
    }
    counters_.given_up.fetch_or(1U << path, std::memory_order_relaxed);
  }
}

void Lane::count_start(Transfer *transfer) {
  transfer->start_ns = now_ns();
  uint64_t delay_ns = transfer->start_ns - transfer->free_ns;
  counters_.issue_ns[transfer->direction].add(delay_ns);
  counters_.max_issue_ns[transfer->direction].raise(delay_ns);
  counters_.num_issued[transfer->direction].add(1);
}

void Lane::fail(Transfer *transfer, int code) {
  transfer->error = transfer->error == 0 ? code : transfer->error;
  transfer->is_stopping = true;
}

// Out of the queue; settled here or by its last trunk in flight.
void Lane::finish_queued(Transfer *transfer) {
  queues_[transfer->rank].remove(transfer);
  if (transfer->num_trunks_in_flight == 0) {
    settle(transfer);
  }
}

void Lane::settle(Transfer *transfer) {
  int status = CKV_CANCELLED;
  if (transfer->error != 0) {
    status = CKV_FAILED;
  } else if (transfer->is_expanded()) {
    status = CKV_DONE;
  }
  engine_.settle(transfer, status, transfer->error);
}

}  // namespace ckv
