// The path for many small pieces: one kernel walks a trunk's descriptors. Offered only where the
// device uses the host's pointers.
#pragma once

#include <cstddef>
#include <memory>

#include "cuda_library.h"
#include "driver.h"

namespace ckv {

class Gather {
 public:
  // Null if this driver or device cannot, for whatever reason: there are other paths. The context
  // is current here, in the destructor and in each launch.
  static std::unique_ptr<Gather> open(const cuda::Library &library, size_t max_descriptors);
  Gather(const Gather &) = delete;
  Gather &operator=(const Gather &) = delete;
  ~Gather();

  // At most max_descriptors. The kernel reads its own copy of them: `place` (below kMaxTrunks) of
  // this direction is free again once the launch is over.
  int launch(int direction, cuda::StreamHandle stream, const Descriptor *descriptors, size_t n,
             size_t place);

 private:
  Gather(const cuda::Library &library, size_t max_descriptors);
  bool load();
  bool map_tables();

  const cuda::Library &library_;
  const size_t max_descriptors_;
  cuda::Module module_ = nullptr;
  cuda::Function kernel_ = nullptr;
  Descriptor *tables_ = nullptr;  // one per direction and place, page-locked
  bool is_locked_ = false;
};

}  // namespace ckv
