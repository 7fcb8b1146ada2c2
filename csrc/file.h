// The few calls to a file there are. Tests put a simulated one in their place (sim_disk.h).
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>

namespace ckv {

// All calls return 0, or a count, or an errno below 0. A call that a signal interrupts goes on.
class File {
 public:
  virtual ~File() = default;  // closes it, which ends the lock

  // Makes it, readable by its owner alone, if there is none.
  virtual int open(const char *path) = 0;
  // Against every other open of it, in this process too. -EWOULDBLOCK: somebody has it.
  virtual int lock() = 0;
  // Gives it exactly so many bytes, with room on the disk for all of them.
  virtual int allocate(uint64_t bytes) = 0;
  // Around the page cache, or not. -EINVAL where the file system cannot.
  virtual int set_direct(bool on) = 0;
  // May move fewer bytes than asked for; 0 at the file's end.
  virtual int64_t read(const iovec *pieces, int n, uint64_t offset) = 0;
  virtual int64_t write(const iovec *pieces, int n, uint64_t offset) = 0;
  virtual int sync() = 0;
};

std::unique_ptr<File> make_posix_file();

}  // namespace ckv
