// Random calls of several threads against a model of what blocks and slots must hold.
//
// Each thread owns a share of the blocks and slots, so it knows their bytes without asking another.
// All bytes of a block are one value. The main thread is the consumer, pulls the simulator's hooks
// and closes at a random moment.
#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <thread>

#include "rig.h"

namespace {

constexpr int kThreads = 3;
constexpr int kBlocks = 16;  // of each thread
constexpr int kSlots = 20;
constexpr int kOps = 1500;
constexpr int kUnknown = -1;  // a transfer that was not DONE may have written a part
constexpr uint64_t kTagsPerThread = 1000000;

using Random = std::mt19937;

int below(Random &random, int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }

struct Cell {
  int value = 0;
  int num_users = 0;       // unfinished transfers
  bool is_behind = false;  // its value is written by the stream, not yet by now
};

struct Sent {
  int direction = CKV_LOAD;
  Ids blocks;
  Ids slots;
  std::vector<int> values;  // to be found at the destination
};

struct Chaos {
  bool has_faults = false;  // that leave the context alive
  bool has_end = false;     // ... and that do not
  std::atomic<bool> is_closing{false};
};

class Owner {
 public:
  Owner(Rig &rig, Chaos &chaos, int index, unsigned seed)
      : rig_(rig), chaos_(chaos), index_(index), random_(seed) {
    blocks_.resize(kBlocks);
    slots_.resize(kSlots);
    for (int b = 0; b < kBlocks; ++b) {
      write_block(b, 1 + below(random_, 255));
    }
    CHECK(ckv_sim_stream(rig.engine, &stream_) == CKV_OK);
  }

  void run() {
    for (int i = 0; i < kOps; ++i) {
      take_reports();
      act();
    }
    CHECK(ckv_sim_block(rig_.engine, stream_, 0) == CKV_OK);
  }

  // By the consumer.
  void give(const ckv_completion &completion) { mailbox_.give(completion); }

  void take_reports() {
    for (const ckv_completion &completion : mailbox_.take()) {
      finish(completion);
    }
  }

  size_t num_unreported() const { return sent_.size(); }
  size_t num_done() const { return num_done_; }
  uint64_t num_bytes(int direction) const { return num_bytes_[direction]; }

 private:
  void act() {
    switch (below(random_, 12)) {
      case 0:
        CHECK(ckv_cancel(rig_.engine, any_tag()) == CKV_OK);
        return;
      case 1:
        wait_a_while();
        return;
      case 2:
        CHECK(ckv_sim_block(rig_.engine, stream_, below(random_, 2)) == CKV_OK);
        return;
      case 3:
      case 4:
        compute();
        return;
      case 5:
        if (int b = below(random_, kBlocks); blocks_[b].num_users == 0 && !blocks_[b].is_behind) {
          write_block(b, 1 + below(random_, 255));
        }
        return;
      default:
        submit(below(random_, 2));
    }
  }

  uint64_t any_tag() {
    return tag_of(next_ == 0 ? 0 : random_() % next_);  // often one that is finished already
  }

  uint64_t tag_of(uint64_t number) const {
    return static_cast<uint64_t>(index_) * kTagsPerThread + number;
  }

  void wait_a_while() {
    uint64_t tag = below(random_, 2) == 0 || next_ == 0 ? any_tag() : tag_of(next_ - 1);
    int code = ckv_wait(rig_.engine, tag, below(random_, 2000));
    CHECK(code == CKV_OK || code == CKV_TIMEOUT);
  }

  uint8_t *piece(size_t region, int b) { return rig_.piece(region, index_ * kBlocks + b); }

  uint8_t *slot(size_t region, int s) {
    uint64_t at = static_cast<uint64_t>(index_ * kSlots + s) * rig_.slot_bytes;
    return rig_.pool + at + (region == 0 ? 0 : rig_.shape.pieces[0]);
  }

  void write_block(int b, int value) {
    for (size_t r = 0; r < rig_.shape.pieces.size(); ++r) {
      std::fill_n(piece(r, b), rig_.shape.pieces[r], static_cast<uint8_t>(value));
    }
    blocks_[b].value = value;
  }

  void compute() {
    int b = below(random_, kBlocks);
    if (blocks_[b].num_users > 0) {
      return;
    }
    int value = 1 + below(random_, 255);
    for (size_t r = 0; r < rig_.shape.pieces.size(); ++r) {
      CHECK(ckv_sim_compute(rig_.engine, stream_, piece(r, b), value, rig_.shape.pieces[r],
                            static_cast<uint64_t>(below(random_, 200))) == CKV_OK);
    }
    blocks_[b].value = value;
    blocks_[b].is_behind = true;
  }

  // Free to be written, or free to be read and of known value.
  bool can_use(const std::vector<Cell> &cells, int at, bool writes) const {
    const Cell &cell = cells[at];
    return writes ? cell.num_users == 0 : cell.value != kUnknown && !is_written(cells, at);
  }

  bool is_written(const std::vector<Cell> &cells, int at) const {
    bool is_block = &cells == &blocks_;
    for (const auto &[tag, sent] : sent_) {
      const Ids &ids = is_block ? sent.blocks : sent.slots;
      bool writes = (sent.direction == CKV_LOAD) == is_block;
      if (writes && std::find(ids.begin(), ids.end(), at) != ids.end()) {
        return true;
      }
    }
    return false;
  }

  Ids choose(const std::vector<Cell> &cells, size_t n, bool writes) {
    Ids ids = range(0, static_cast<int32_t>(cells.size()));
    std::shuffle(ids.begin(), ids.end(), random_);
    auto useless = [&](int32_t at) { return !can_use(cells, at, writes); };
    ids.erase(std::remove_if(ids.begin(), ids.end(), useless), ids.end());
    ids.resize(std::min(n, ids.size()));
    return ids;
  }

  static Ids shifted(Ids ids, int by) {
    for (int32_t &id : ids) {
      id += by;
    }
    return ids;
  }

  void submit(int direction) {
    bool is_load = direction == CKV_LOAD;
    size_t wanted = static_cast<size_t>(below(random_, 6));
    Sent sent;
    sent.direction = direction;
    sent.blocks = choose(blocks_, wanted, is_load);
    sent.slots = choose(slots_, wanted, !is_load);
    size_t n = std::min(sent.blocks.size(), sent.slots.size());
    sent.blocks.resize(n);
    sent.slots.resize(n);
    bool is_behind = below(random_, 3) == 0;
    for (size_t i = 0; i < n; ++i) {
      is_behind |= blocks_[sent.blocks[i]].is_behind;
      sent.values.push_back((is_load ? slots_[sent.slots[i]] : blocks_[sent.blocks[i]]).value);
    }
    uint32_t flags = is_load && below(random_, 3) == 0 ? CKV_SPECULATIVE : 0;
    int code = rig_.submit(direction, shifted(sent.blocks, index_ * kBlocks),
                           shifted(sent.slots, index_ * kSlots), tag_of(next_),
                           is_behind ? stream_ : 0, flags);
    if (code == CKV_OK) {
      accept(std::move(sent));
    } else {
      check_refusal(code);
    }
  }

  void accept(Sent sent) {
    for (size_t i = 0; i < sent.blocks.size(); ++i) {
      Cell &block = blocks_[sent.blocks[i]];
      Cell &slot = slots_[sent.slots[i]];
      ++block.num_users;
      ++slot.num_users;
      (sent.direction == CKV_LOAD ? block : slot).value = kUnknown;
    }
    CHECK(sent_.emplace(tag_of(next_++), std::move(sent)).second);
  }

  void check_refusal(int code) {
    bool is_allowed = code == CKV_AGAIN || (code == CKV_CLOSED && chaos_.is_closing) ||
                      (code == CKV_EDRIVER && chaos_.has_faults) ||
                      (code == CKV_EPOISONED && chaos_.has_end);
    CHECK(is_allowed);
  }

  void finish(const ckv_completion &completion) {
    auto found = sent_.find(completion.tag);
    CHECK(found != sent_.end());  // accepted, and not reported before
    Sent sent = std::move(found->second);
    sent_.erase(found);
    uint64_t whole = rig_.slot_bytes * sent.blocks.size();
    CHECK(completion.bytes <= whole);
    num_bytes_[sent.direction] += completion.bytes;
    for (size_t i = 0; i < sent.blocks.size(); ++i) {
      --blocks_[sent.blocks[i]].num_users;
      --slots_[sent.slots[i]].num_users;
    }
    if (completion.status == CKV_DONE) {
      CHECK(completion.error == 0 && completion.bytes == whole);
      check_bytes(sent);
      ++num_done_;
    } else if (completion.status == CKV_FAILED) {
      CHECK(completion.error != 0 && (chaos_.has_faults || completion.error == CKV_CLOSED));
      leave_behind(sent);
    } else {
      CHECK(completion.status == CKV_CANCELLED && completion.error == 0);
      leave_behind(sent);
    }
  }

  void check_bytes(const Sent &sent) {
    for (size_t i = 0; i < sent.blocks.size(); ++i) {
      bool is_load = sent.direction == CKV_LOAD;
      for (size_t r = 0; r < rig_.shape.pieces.size(); ++r) {
        const uint8_t *at = is_load ? piece(r, sent.blocks[i]) : slot(r, sent.slots[i]);
        CHECK(std::all_of(at, at + rig_.shape.pieces[r],
                          [&](uint8_t byte) { return byte == sent.values[i]; }));
      }
      Cell &written = is_load ? blocks_[sent.blocks[i]] : slots_[sent.slots[i]];
      written.value = sent.values[i];
      blocks_[sent.blocks[i]].is_behind = false;  // it waited for the stream
    }
  }

  // A block that still waits for the stream must not be used without it, whatever it holds.
  void leave_behind(const Sent &sent) {
    for (size_t i = 0; i < sent.blocks.size(); ++i) {
      (sent.direction == CKV_LOAD ? blocks_[sent.blocks[i]] : slots_[sent.slots[i]]).value =
          kUnknown;
    }
  }

  Rig &rig_;
  Chaos &chaos_;
  const int index_;
  Random random_;
  uintptr_t stream_ = 0;
  std::vector<Cell> blocks_;
  std::vector<Cell> slots_;
  std::map<uint64_t, Sent> sent_;
  uint64_t next_ = 0;
  size_t num_done_ = 0;
  uint64_t num_bytes_[2] = {0, 0};
  Mailbox mailbox_;
};

class Run {
 public:
  explicit Run(unsigned seed) : random_(seed), rig_(shape(), config(random_)) {
    CHECK(ckv_sim_watch(rig_.engine, 1) == CKV_OK);
    chaos_.has_faults = seed % 3 != 0;
    chaos_.has_end = seed % 3 == 2;
    for (int i = 0; i < kThreads; ++i) {
      owners_.push_back(
          std::make_unique<Owner>(rig_, chaos_, i, seed * 100 + static_cast<unsigned>(i)));
    }
  }

  size_t operator()() {
    std::vector<std::thread> threads;
    for (auto &owner : owners_) {
      threads.emplace_back([this, &owner] {
        owner->run();
        ++num_ended_;
      });
    }
    // Some runs close in the middle, some after all is submitted.
    int patience = below(random_, 60000);
    for (int i = 0; i < patience && num_ended_ < kThreads; ++i) {
      consume();
      disturb();
    }
    close();
    for (std::thread &thread : threads) {
      thread.join();
    }
    return settle();
  }

 private:
  static Shape shape() {
    Shape shape;
    shape.num_blocks = kThreads * kBlocks;
    shape.num_slots = kThreads * kSlots;
    shape.pieces = {2048, 512};
    shape.gap = 64;
    return shape;
  }

  static ckv_config config(Random &random) {
    ckv_config config = sim_config();
    config.trunk_bytes = 1024ULL << below(random, 5);
    config.window_bytes[CKV_LOAD] = config.window_bytes[CKV_STORE] = 16 * kKiB;
    config.max_descriptors = 1 + random() % 8;
    config.max_transfers = 8 + random() % 128;
    config.checksum_every = random() % 3;
    return config;
  }

  void consume() {
    ckv_completion batch[7];
    while (size_t n = ckv_poll(rig_.engine, batch, 7)) {
      for (size_t i = 0; i < n; ++i) {
        owners_.at(batch[i].tag / kTagsPerThread)->give(batch[i]);
      }
    }
    std::this_thread::yield();
  }

  void disturb() {
    switch (below(random_, 60)) {
      case 0:
        CHECK(ckv_sim_hold(rig_.engine, 1) == CKV_OK);
        return;
      case 1:
      case 2:
        CHECK(ckv_sim_hold(rig_.engine, 0) == CKV_OK);
        return;
      case 3:
        fail();
        return;
      case 4: {
        ckv_stats stats{};
        stats.size = sizeof stats;
        CHECK(ckv_get_stats(rig_.engine, &stats) == CKV_OK);
        return;
      }
      default:
        return;
    }
  }

  // A query that fails means the context cannot be trusted, whatever the code: those are for runs
  // that may end.
  void fail() {
    if (!chaos_.has_faults) {
      return;
    }
    int entry = below(random_, 2) == 0 ? CKV_SIM_COPY : CKV_SIM_EVENT_RECORD;
    int code = 1 + below(random_, 2);
    if (chaos_.has_end && below(random_, 8) == 0) {
      entry = below(random_, 2) == 0 ? CKV_SIM_ANY : CKV_SIM_EVENT_QUERY;
      code = below(random_, 2) == 0 ? 700 : 2;
    }
    uint64_t count = 1 + random_() % 3;
    CHECK(ckv_sim_fail_at(rig_.engine, entry, random_() % 50, count, code) == CKV_OK);
  }

  void close() {
    CHECK(ckv_sim_hold(rig_.engine, 0) == CKV_OK);
    chaos_.is_closing = true;
    constexpr int64_t kDrains[] = {0, 1000, kLong};
    CHECK(ckv_close(rig_.engine, kDrains[below(random_, 3)]) == CKV_OK);
  }

  // Returns how many transfers were done.
  size_t settle() {
    consume();
    CHECK(*ckv_pending_word(rig_.engine) == 0);
    ckv_stats stats{};
    stats.size = sizeof stats;
    CHECK(ckv_get_stats(rig_.engine, &stats) == CKV_OK);
    size_t num_done = 0;
    for (auto &owner : owners_) {
      owner->take_reports();
      CHECK(owner->num_unreported() == 0);
      for (int direction : {CKV_LOAD, CKV_STORE}) {
        stats.num_bytes[direction] -= owner->num_bytes(direction);
      }
      num_done += owner->num_done();
    }
    CHECK(stats.num_bytes[CKV_LOAD] == 0 && stats.num_bytes[CKV_STORE] == 0);
    CHECK(stats.bytes_in_flight[CKV_LOAD] == 0 && stats.bytes_in_flight[CKV_STORE] == 0);
    CHECK(stats.num_corrupt == 0);
    CHECK(rig_.stats().num_violations == 0);
    return num_done;
  }

  Random random_;
  Rig rig_;
  Chaos chaos_;
  std::vector<std::unique_ptr<Owner>> owners_;
  std::atomic<int> num_ended_{0};
};

TEST(test_random_calls_agree_with_the_model) {
  const char *given = std::getenv("CKV_SEED");  // to run one again
  unsigned first = given == nullptr ? 1 : static_cast<unsigned>(std::atoi(given));
  unsigned last = given == nullptr ? 12 : first;
  size_t num_done = 0;
  for (unsigned seed = first; seed <= last; ++seed) {
    std::printf("  seed %u\n", seed);
    std::fflush(stdout);
    num_done += Run(seed)();
  }
  std::printf("  %zu transfers done\n", num_done);
  CHECK(given != nullptr || num_done > 500);
}

}  // namespace
