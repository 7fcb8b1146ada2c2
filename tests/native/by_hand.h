// An engine without a lane thread: the test takes the lane's turns, so the order is certain.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine.h"
#include "rig.h"

// Four blocks and four slots of 16 bytes, which are the same memory.
struct ByHand {
  explicit ByHand(std::unique_ptr<ckv::Driver> driver = std::make_unique<InstantDriver>(0),
                  uint32_t checksum_every = 0) {
    ckv_config config = sim_config();
    config.max_transfers = 10;
    config.checksum_every = checksum_every;
    engine = std::make_unique<ckv::Engine>(config, std::move(driver));
    ckv_region region{reinterpret_cast<uint64_t>(bytes.data()), 16,
                      reinterpret_cast<uint64_t>(bytes.data()), 16, 16};
    engine->set_regions(&region, 1, 4, 4);
  }

  // One block.
  void submit(int direction, int32_t block, int32_t slot, uint64_t tag) {
    engine->submit(direction, 0, &block, &slot, 1, 0, tag);
  }

  void take_orders() { engine->take_orders(std::chrono::microseconds(0), &queues, &phase); }

  // The first of the queue, no more in it; null if there is none.
  ckv::Transfer *take(ckv::Rank rank) {
    ckv::Transfer *transfer = queues[rank].front();
    if (transfer != nullptr) {
      queues[rank].remove(transfer);
    }
    return transfer;
  }

  ckv_completion pop() {
    std::unique_ptr<ckv::Report> report = engine->reports().pop();
    CHECK(report != nullptr);
    return report->completion;
  }

  std::vector<uint8_t> bytes = std::vector<uint8_t>(64);
  std::unique_ptr<ckv::Engine> engine;
  ckv::Queues queues;
  ckv::Phase phase = ckv::Phase::OPEN;
};
