// The lane: the thread that turns queued transfers into driver calls and driver events into
// reports.
//
// It waits for the caller's event itself instead of queueing the wait on the copy stream. So
// nothing is in the driver's hands that cannot start, a cancelled transfer is settled when the lane
// looks next, at most one nap later, and a compute event that never fires leaves nothing behind.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "engine.h"
#include "naps.h"

namespace ckv {

// One driver call in flight. Without an event (recording or asking it failed) the stream is asked.
struct Trunk {
  Transfer *transfer = nullptr;
  uint64_t bytes = 0;
  bool has_event = false;
  int error = 0;
};

// One direction. Trunks finish in the order in which they were issued: it is one stream.
struct Channel {
  std::array<Trunk, kMaxTrunks> trunks;
  std::array<Event, kMaxTrunks> events{};
  size_t oldest = 0;
  size_t num_in_flight = 0;
  uint64_t bytes_in_flight = 0;
  std::vector<Descriptor> descriptors;
};

class Lane {
 public:
  // Takes all the memory and events that run() will need. Throws std::bad_alloc or Failure.
  explicit Lane(Engine &engine);
  Lane(const Lane &) = delete;
  Lane &operator=(const Lane &) = delete;
  ~Lane();

  // Returns when the engine is closing and no transfer is left.
  void run();

 private:
  Lane(Engine &engine, Driver &driver);
  Naps::Work work() const;
  bool step();
  // Takes in what the driver finished; whether anything was.
  bool reap(int direction);
  int query(int direction, Trunk *trunk);
  bool has_stopped(Trunk *trunk, int code);
  void retire(int direction);
  // Issues one trunk or settles the front transfer of the rank; whether it did.
  bool issue(Rank rank);
  bool has_room(int direction) const;
  int reason_to_fail() const;
  bool is_ready(Transfer *transfer);
  void launch(int direction, Transfer *transfer);
  // Queues the trunk's descriptors, another way if the driver cannot do the first.
  int copy(int direction, const Trunk &trunk, size_t at);
  void count_start(Transfer *transfer);
  void fail(Transfer *transfer, int code);
  void finish_queued(Transfer *transfer);
  void settle(Transfer *transfer);

  Engine &engine_;
  Driver &driver_;
  Counters &counters_;
  Phase phase_ = Phase::OPEN;
  Queues queues_;
  Channel channels_[2];
  Naps naps_;
};

}  // namespace ckv
