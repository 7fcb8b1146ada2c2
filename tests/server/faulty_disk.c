/* The calls of libc by which the library reads and writes a disk's file, with the faults that a file
 * names: FAULTY_DISK is its path, and each of its lines is "<call> <fault> [number]":
 *
 *   read|write|allocate  errno <number>   fails
 *   read|write           sleep <ms>       takes so long
 *   read|write           hang             does not return until the line is gone
 *   write                tear <bytes>     puts down the first so many, and says that it was all
 *
 * Read anew by each call, and for files named *.slab alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_slab(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  return n > 5 && memcmp(path + n - 5, ".slab", 5) == 0;
}

/* The fault of this call: its name, or "". */
static long find(const char *call, char fault[16]) {
  const char *path = getenv("FAULTY_DISK");
  FILE *file = path == NULL ? NULL : fopen(path, "re");
  char name[16];
  long number = 0;
  fault[0] = 0;
  while (file != NULL && fscanf(file, "%15s %15s %ld", name, fault, &number) == 3) {
    if (strcmp(name, call) == 0) {
      break;
    }
    fault[0] = 0;
  }
  if (file != NULL) {
    fclose(file);
  }
  return number;
}

/* 1: the call fails, with errno set. */
static int suffer(const char *call, char fault[16], long *number) {
  *number = find(call, fault);
  while (strcmp(fault, "hang") == 0) {
    usleep(20000);
    *number = find(call, fault);
  }
  if (strcmp(fault, "sleep") == 0) {
    usleep((useconds_t)(*number * 1000));
  }
  if (strcmp(fault, "errno") != 0) {
    return 0;
  }
  errno = (int)*number;
  return 1;
}

typedef ssize_t (*vectored)(int, const struct iovec *, int, off_t);

ssize_t preadv(int fd, const struct iovec *pieces, int n, off_t at) {
  vectored real = (vectored)dlsym(RTLD_NEXT, "preadv");
  char fault[16];
  long number;
  return is_slab(fd) && suffer("read", fault, &number) ? -1 : real(fd, pieces, n, at);
}

ssize_t pwritev(int fd, const struct iovec *pieces, int n, off_t at) {
  vectored real = (vectored)dlsym(RTLD_NEXT, "pwritev");
  char fault[16] = "";
  long number = 0;
  if (is_slab(fd) && suffer("write", fault, &number)) {
    return -1;
  }
  if (strcmp(fault, "tear") != 0) {
    return real(fd, pieces, n, at);
  }
  ssize_t all = 0;
  struct iovec torn[64];
  int kept = 0;
  for (int i = 0; i < n; i++) {
    size_t left = all < number ? (size_t)(number - all) : 0;
    if (left != 0 && kept < 64) {
      torn[kept] = pieces[i];
      torn[kept].iov_len = left < pieces[i].iov_len ? left : pieces[i].iov_len;
      kept++;
    }
    all += (ssize_t)pieces[i].iov_len;
  }
  return kept != 0 && real(fd, torn, kept, at) < 0 ? -1 : all;
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
  int (*real)(int, int, off_t, off_t) = (int (*)(int, int, off_t, off_t))dlsym(RTLD_NEXT, "fallocate");
  char fault[16];
  long number;
  return is_slab(fd) && suffer("allocate", fault, &number) ? -1 : real(fd, mode, offset, length);
}
