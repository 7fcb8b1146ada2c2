// The checker: the thread that sums what was stored and compares what was loaded.
//
// It gets a transfer after its last trunk and settles it in the lane's place, so the lane is never
// held up, and the transfer's claims keep every writer away from the slots meanwhile.
#pragma once

#include <cstdint>

#include "checksum.h"
#include "engine.h"

namespace ckv {

class Checker {
 public:
  explicit Checker(Engine &engine) : engine_(engine), checksum_(best_checksum()) {}

  // Returns when the lane has ended and no transfer is left.
  void run();

 private:
  // 0, CKV_ECORRUPT, or CKV_CLOSED if the time was up.
  int check(const Transfer &transfer);
  bool check_slot(const Transfer &transfer, int32_t slot);

  Engine &engine_;
  const Checksum &checksum_;
};

}  // namespace ckv
