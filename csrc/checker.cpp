#include "checker.h"

#include <sys/prctl.h>
#include <sys/resource.h>

namespace ckv {

namespace {

// So much nicer than the server, but not last of all: loads wait for it, and so does whoever wants
// the engine's mutex while it has it.
constexpr int kNicer = 5;

}  // namespace

void Checker::run() {
  prctl(PR_SET_NAME, "ckv-check");
  setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + kNicer);  // Linux: of this thread
  while (Transfer *transfer = engine_.take_check()) {
    int error = check(*transfer);
    engine_.finish(transfer, error == 0 ? CKV_DONE : CKV_FAILED, error);
  }
}

int Checker::check(const Transfer &transfer) {
  int error = 0;
  for (size_t i = 0; i < transfer.slots.size(); ++i) {
    if (!engine_.sums().covers(transfer, i)) {
      continue;
    }
    if (engine_.is_past_deadline()) {
      return CKV_CLOSED;
    }
    if (!check_slot(transfer, transfer.slots[i])) {
      error = CKV_ECORRUPT;
    }
  }
  return error;
}

bool Checker::check_slot(const Transfer &transfer, int32_t slot) {
  uint32_t sum = 0;
  for (const ckv_region &r : engine_.layout().regions()) {
    uint64_t at = r.host_base + static_cast<uint64_t>(slot) * r.host_stride;
    sum = checksum_.sum(sum, reinterpret_cast<const void *>(at), r.bytes);
  }
  Counters &counters = engine_.counters();
  if (transfer.direction == CKV_STORE) {
    engine_.sums().set(slot, sum);
    counters.num_summed.add(1);
    return true;
  }
  counters.num_checked.add(1);
  bool matches = engine_.sums().matches(slot, sum);
  counters.num_corrupt.add(matches ? 0 : 1);
  return matches;
}

}  // namespace ckv
