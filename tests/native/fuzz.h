// What the fuzz tests share: an input as arguments, and a main for where there is no libFuzzer.
//
// With clang: -fsanitize=fuzzer -DCKV_LIBFUZZER. Else fuzz_x [runs [seed]], or fuzz_x FILE...
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

namespace fuzz {

// The input as arguments; zeros when it is used up.
class Bytes {
 public:
  Bytes(const uint8_t *data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return at_ >= size_; }
  uint8_t byte() { return empty() ? 0 : data_[at_++]; }
  bool once_in(int n) { return byte() % n == 0; }

  // Often below `few`, sometimes any 64 bits.
  uint64_t number(uint64_t few = 16) {
    uint8_t kind = byte();
    if (kind < 224) {
      return kind % few;
    }
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) {
      value = value << 8 | byte();
    }
    return value;
  }
  int32_t id(uint64_t few = 16) { return static_cast<int32_t>(number(few)); }

 private:
  const uint8_t *data_;
  size_t size_;
  size_t at_ = 0;
};

inline bool replay(const char *path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t *>(data.data()), data.size());
  return file.good() || file.eof();
}

inline void run_random(unsigned seed, size_t least_bytes, size_t most_bytes) {
  std::mt19937 random(seed);
  std::vector<uint8_t> data(least_bytes + random() % (most_bytes - least_bytes));
  std::generate(data.begin(), data.end(), [&] { return static_cast<uint8_t>(random()); });
  LLVMFuzzerTestOneInput(data.data(), data.size());
}

// Runs as the command line says. How many random inputs were tried; if files were, exits.
inline int run(int argc, char **argv, size_t least_bytes, size_t most_bytes) {
  if (argc > 1 && std::strspn(argv[1], "0123456789") != std::strlen(argv[1])) {
    std::exit(std::all_of(argv + 1, argv + argc, replay) ? 0 : 1);
  }
  int num_runs = argc > 1 ? std::atoi(argv[1]) : 1000;
  unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  for (int i = 0; i < num_runs; ++i) {
    std::fprintf(stderr, "\rseed %u", seed);  // the last one printed is to be run again
    run_random(seed++, least_bytes, most_bytes);
  }
  std::fprintf(stderr, "\n");
  return num_runs;
}

}  // namespace fuzz
