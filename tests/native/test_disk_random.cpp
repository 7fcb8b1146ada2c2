// Random calls of several threads, beside faults, cancels, resets and a close: what is read as DONE
// is what its key says, and never of before a reset.
//
// The bytes of a key follow from it, so nothing has to be remembered to know that a read is right.
// Each thread owns a share of the host slots and VRAM blocks; the disk slots are everybody's.
#include <atomic>
#include <cerrno>
#include <mutex>
#include <random>
#include <thread>

#include "disk_rig.h"

namespace {

constexpr int kThreads = 3;
constexpr int kPairs = 12;        // of host slots, of each thread
constexpr uint64_t kSent = 1000;  // by each thread
constexpr uint64_t kTagsPerThread = 1000000;
constexpr int32_t kCopied = 0;  // what a completion points to whose disk slot was copied

using Random = std::mt19937;

int below(Random &random, int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }

struct Written {
  uint32_t number = 0;
  uint64_t num_resets = 0;  // that had begun when the write was submitted
};

// What all threads know.
struct World {
  World() { CHECK(rig.open(file) == CKV_OK); }

  TempFile file;
  DiskRig rig;
  std::mutex mutex;
  std::array<Written, kDiskSlots> written;
  std::atomic<uint64_t> num_resets_begun{0};
  std::atomic<uint64_t> num_resets_done{0};
  std::atomic<bool> is_closing{false};
  std::atomic<int> num_read{0};
  std::atomic<int> num_running{kThreads};
};

class Owner {
 public:
  Owner(World &world, int index, unsigned seed) : world_(world), index_(index), random_(seed) {}

  void run() {
    while (num_sent_ < kSent && !was_refused_) {
      take_reports();
      act();
    }
    --world_.num_running;
  }

  // By the consumer.
  void give(const ckv_completion &completion) { mailbox_.give(completion); }

  void take_reports() {
    for (const ckv_completion &completion : mailbox_.take()) {
      finish(completion);
    }
  }

  bool is_idle() const { return sent_.empty(); }

 private:
  struct Sent {
    int pair = 0;
    int direction = CKV_LOAD;
    uint32_t number = 0;
    bool is_foreign = false;  // its write came before a reset that was over at the submit
  };

  int32_t first(int pair) const { return static_cast<int32_t>((index_ * kPairs + pair) * 2); }

  void act() {
    int kind = below(random_, 10);
    int pair = below(random_, kPairs);
    if (kind == 0) {
      ckv_cancel(world_.rig.engine, tag_of(num_sent_ - 1 - std::min<uint64_t>(num_sent_, 3) / 2));
      return;
    }
    if (is_busy_[pair]) {
      usleep(20);
      return;
    }
    if (kind < 4) {
      write(pair);
    } else if (kind < 8) {
      read(pair);
    } else {
      copy(pair, kind == 8 ? CKV_LOAD : CKV_STORE);
    }
  }

  void write(int pair) {
    uint32_t number = static_cast<uint32_t>(index_ + 1) << 24 | ++num_written_;
    int32_t slot = below(random_, kDiskSlots);
    world_.rig.make(first(pair), number);
    if (sent(world_.rig.submit_disk(CKV_WRITE, first(pair), slot, number, next_tag()),
             {pair, CKV_WRITE, number, false})) {
      std::lock_guard<std::mutex> lock(world_.mutex);
      world_.written[static_cast<size_t>(slot)] = {number, world_.num_resets_begun};
    }
  }

  void read(int pair) {
    int32_t slot = below(random_, kDiskSlots);
    uint64_t num_resets = world_.num_resets_done;
    Written written;
    {
      std::lock_guard<std::mutex> lock(world_.mutex);
      written = world_.written[static_cast<size_t>(slot)];
    }
    sent(world_.rig.submit_disk(CKV_READ, first(pair), slot, written.number, next_tag()),
         {pair, CKV_READ, written.number, written.num_resets < num_resets});
  }

  void copy(int pair, int direction) {
    int32_t block = static_cast<int32_t>(index_ * 16 + below(random_, 8) * 2);
    Ids slots = {first(pair), first(pair) + 1};
    sent(world_.rig.submit(direction, {block, block + 1}, slots, next_tag()),
         {pair, direction, 0, false});
  }

  bool sent(int code, const Sent &what) {
    if (code != CKV_OK) {
      CHECK(code == CKV_CLOSED && world_.is_closing);
      was_refused_ = true;
      return false;
    }
    is_busy_[what.pair] = true;
    sent_[tag_of(num_sent_++)] = what;
    return true;
  }

  void finish(const ckv_completion &completion) {
    auto found = sent_.find(completion.tag);
    CHECK(found != sent_.end());
    const Sent &what = found->second;
    CHECK((completion.status == CKV_FAILED) == (completion.error != 0));
    bool is_right = completion.status == CKV_DONE || completion.disk_errors == &kCopied;
    if (what.direction == CKV_READ && is_right) {
      CHECK(!what.is_foreign && world_.rig.holds(first(what.pair), what.number));
      ++world_.num_read;
    }
    is_busy_[what.pair] = false;
    sent_.erase(found);
  }

  uint64_t tag_of(uint64_t i) const { return static_cast<uint64_t>(index_) * kTagsPerThread + i; }
  uint64_t next_tag() const { return tag_of(num_sent_); }

  World &world_;
  const int index_;
  Random random_;
  std::array<bool, kPairs> is_busy_{};
  std::map<uint64_t, Sent> sent_;
  uint64_t num_sent_ = 0;
  bool was_refused_ = false;
  uint32_t num_written_ = 0;
  Mailbox mailbox_;
};

// What the main thread does besides taking reports.
void disturb(World &world, Random &random) {
  ckv_engine *engine = world.rig.engine;
  switch (below(random, 60)) {
    case 0:
      ++world.num_resets_begun;
      CHECK(ckv_disk_reset(world.rig.disk) == CKV_OK);
      ++world.num_resets_done;
      return;
    case 1:
      ckv_sim_disk_fail_at(engine, CKV_SIM_DISK_READ, random() % 8, 1, EIO);
      return;
    case 2:  // none of a superblock: that ends the disk
      if (world.rig.state().is_ready != 0) {
        ckv_sim_disk_tear(engine, 0, random() % 24 * 512, 1);
      }
      return;
    case 3:
      ckv_sim_disk_stop(engine, CKV_SIM_DISK_READ, random() % 4);
      usleep(200);
      ckv_sim_disk_stop(engine, CKV_SIM_DISK_READ, UINT64_MAX);
      return;
    default:
      usleep(100);
  }
}

// How many reads were done.
int random_calls(unsigned seed, bool closes_early) {
  World world;
  Random random(seed);
  std::vector<std::unique_ptr<Owner>> owners;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    owners.push_back(std::make_unique<Owner>(world, i, seed * 7 + static_cast<unsigned>(i)));
  }
  for (auto &owner : owners) {
    threads.emplace_back([&owner] { owner->run(); });
  }
  auto deliver = [&] {
    std::array<ckv_completion, 16> batch;
    while (size_t n = ckv_poll(world.rig.engine, batch.data(), batch.size())) {
      for (size_t i = 0; i < n; ++i) {
        const int32_t *errors = batch[i].disk_errors;  // which the next poll takes away
        bool was_copied = errors != nullptr && batch[i].num_disk_slots == 1 && errors[0] == 0;
        batch[i].disk_errors = was_copied ? &kCopied : nullptr;
        owners[batch[i].tag / kTagsPerThread]->give(batch[i]);
      }
    }
  };
  for (int i = 0; world.num_running > 0; ++i) {
    deliver();
    if (!world.is_closing) {
      disturb(world, random);
    }
    if (closes_early && i == 60) {
      world.is_closing = true;
      CHECK(ckv_close(world.rig.engine, kLong) == CKV_OK);
    }
  }
  for (std::thread &thread : threads) {
    thread.join();
  }
  world.is_closing = true;
  CHECK(ckv_close(world.rig.engine, kLong) == CKV_OK);
  deliver();
  for (auto &owner : owners) {
    owner->take_reports();
    CHECK(owner->is_idle());
  }
  CHECK(*ckv_pending_word(world.rig.engine) == 0);
  return world.num_read;
}

TEST(test_random_disk_calls_of_many_threads_read_what_their_keys_say) {
  int num_read = 0;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    num_read += random_calls(seed, false);
  }
  CHECK(num_read > 0);
}

TEST(test_random_disk_calls_into_a_close_are_each_reported_once) {
  for (unsigned seed = 11; seed <= 14; ++seed) {
    random_calls(seed, true);
  }
}

}  // namespace
