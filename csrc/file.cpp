#include "file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>

namespace ckv {

namespace {

// Again after a signal. A result below 0 is -errno.
template <typename Call>
int64_t retried(const Call &call) {
  for (;;) {
    int64_t got = call();
    if (got >= 0) {
      return got;
    }
    if (errno != EINTR) {
      return -errno;
    }
  }
}

class PosixFile : public File {
 public:
  ~PosixFile() override {
    if (fd_ >= 0) {
      ::flock(fd_, LOCK_UN);  // a fork may have the descriptor as well, and live on
      ::close(fd_);
    }
  }

  int open(const char *path) override {
    int64_t fd = retried([&] { return ::open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600); });
    if (fd < 0) {
      return static_cast<int>(fd);
    }
    fd_ = static_cast<int>(fd);
    struct stat seen{};
    if (::fstat(fd_, &seen) != 0) {
      return -errno;
    }
    return S_ISREG(seen.st_mode) ? 0 : -EISDIR;
  }

  int lock() override {
    return static_cast<int>(retried([&] { return ::flock(fd_, LOCK_EX | LOCK_NB); }));
  }

  // A disk without the room is told before any of it is taken: others live there too.
  // Not posix_fallocate, which writes every block where a file system has no preallocation. There
  // the file is sparse, and the disk may turn out to be full later.
  int allocate(uint64_t bytes) override {
    struct stat before{};
    if (::fstat(fd_, &before) != 0) {
      return -errno;
    }
    struct statvfs disk{};
    if (::fstatvfs(fd_, &disk) != 0) {
      return -errno;
    }
    uint64_t has = static_cast<uint64_t>(before.st_blocks) * 512;
    if (bytes > has && (bytes - has) / disk.f_frsize >= disk.f_bavail) {
      return -ENOSPC;
    }
    auto length = static_cast<off_t>(bytes);
    if (before.st_size > length && ::ftruncate(fd_, length) != 0) {
      return -errno;
    }
    int64_t code = retried([&] { return ::fallocate(fd_, 0, 0, length); });
    if (code == -EOPNOTSUPP) {
      code = retried([&] { return ::ftruncate(fd_, length); });
    }
    if (code != 0 && ::ftruncate(fd_, before.st_size) != 0) {  // what it took for nothing
      return -errno;
    }
    return static_cast<int>(code);
  }

  int set_direct(bool on) override {
    int flags = ::fcntl(fd_, F_GETFL);
    flags = on ? flags | O_DIRECT : flags & ~O_DIRECT;
    return ::fcntl(fd_, F_SETFL, flags) == 0 ? 0 : -errno;
  }

  int64_t read(const iovec *pieces, int n, uint64_t offset) override {
    return retried([&] { return ::preadv(fd_, pieces, n, static_cast<off_t>(offset)); });
  }

  int64_t write(const iovec *pieces, int n, uint64_t offset) override {
    return retried([&] { return ::pwritev(fd_, pieces, n, static_cast<off_t>(offset)); });
  }

  int sync() override {
    return static_cast<int>(retried([&] { return ::fdatasync(fd_); }));
  }

 private:
  int fd_ = -1;
};

}  // namespace

std::unique_ptr<File> make_posix_file() { return std::make_unique<PosixFile>(); }

}  // namespace ckv
