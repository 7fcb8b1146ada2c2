/* ckv: copies KV blocks between VRAM and page-locked DRAM on its own thread, and between DRAM and a
 * file on a disk on threads of that.
 *
 * Python passes block ids; regions (base, stride, bytes) are registered once. A transfer is one
 * batch of (VRAM block, host slot) or (host slots, disk slot) pairs in one direction, named by the
 * caller's tag.
 *
 * Promises
 *   - Every accepted transfer is reported by ckv_poll exactly once.
 *   - Once it is reported, none of its memory is touched again. Only a ckv_close that returns
 *     CKV_TIMEOUT breaks this: driver or disk did not give the copies back in time.
 *   - Completions of loads, and of stores, come in the order of their last copies, except that a
 *     transfer whose checksums are taken or compared is reported after that, and later ones may
 *     pass it. Those of writes and reads come in no order.
 *   - No two transfers conflict: one that reads or writes what an unfinished one writes, or writes
 *     what an unfinished one reads, is reported FAILED with CKV_EINVAL and touches nothing. Of the
 *     two that is the one submitted later.
 *   - No exception leaves the library. A call that fails returns a code below 0, and
 *     ckv_last_error() says in one sentence why.
 *   - After fork() a child gets CKV_EFORK from everything that takes an engine.
 */
#ifndef CKV_H
#define CKV_H

#include <stddef.h>
#include <stdint.h>

#define CKV_ABI 6

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

enum { CKV_LOAD = 0, CKV_STORE = 1 }; /* of ckv_submit */
enum { CKV_WRITE = 2, CKV_READ = 3 }; /* of ckv_disk_submit: DRAM -> disk, disk -> DRAM */
enum { CKV_DRIVER_CUDA = 1, CKV_DRIVER_SIM = 2 };
/* How a trunk is given to the driver: one batch call, one call per descriptor, or one kernel that
 * walks the descriptors (by itself for loads of small pieces only). A path other than LOOP that the
 * driver refuses is given up for good, and the trunk is issued again another way. */
enum { CKV_PATH_AUTO = 0, CKV_PATH_BATCH = 1, CKV_PATH_LOOP = 2, CKV_PATH_GATHER = 3 };
/* Flags of ckv_submit. SPECULATIVE: a load that nobody waits for yet. */
enum { CKV_SPECULATIVE = 1 };
enum { CKV_DONE = 1, CKV_CANCELLED = 2, CKV_FAILED = 3 };
enum {
  CKV_OK = 0,
  CKV_AGAIN = -1,     /* too many transfers outstanding or not yet polled */
  CKV_EINVAL = -2,    /* an argument is wrong; no memory was touched */
  CKV_EDRIVER = -3,   /* the driver refused */
  CKV_CLOSED = -4,    /* the engine is closed */
  CKV_TIMEOUT = -5,   /* the time was up */
  CKV_ENOMEM = -6,    /* no memory for the call or the pool */
  CKV_EFORK = -7,     /* this process is a fork of the one that opened the engine */
  CKV_EPOISONED = -8, /* a driver error ended the device context; nothing can be copied any more */
  CKV_EINTERNAL = -9, /* a bug in this library */
  CKV_ECORRUPT = -10, /* a slot no longer holds what was stored in it */
  CKV_EIO = -11,      /* the disk failed, or its file is shorter than it was made */
  CKV_EMISSING = -12, /* the disk slot holds another key, or nothing of this generation */
  CKV_ELOCKED = -13,  /* another process has the file open */
  CKV_ENOSPC = -14,   /* the disk is full, or became read-only */
  CKV_UNTRIED = -15   /* of one disk slot: it was not begun, or a reset made it foreign */
};

typedef struct ckv_engine ckv_engine;

/* 0 takes the default wherever one is given. */
typedef struct {
  uint32_t size;            /* sizeof(ckv_config) */
  uint32_t abi;             /* CKV_ABI */
  int32_t driver;           /* CKV_DRIVER_*; there is no default and no fall-back */
  int32_t device;           /* CUDA ordinal */
  int32_t path;             /* CKV_PATH_*; AUTO, or what cannot be had, chooses per trunk */
  uint32_t max_descriptors; /* per driver call; 1024, see the README on driver faults above it */
  uint64_t trunk_bytes;     /* per driver call; 4 MiB: small steps copies wait behind one trunk */
  uint64_t window_bytes[2]; /* in flight per direction, never exceeded; 16 MiB */
  uint32_t max_transfers;   /* outstanding or not yet polled; 65536 */
  uint32_t checksum_every;  /* of stored blocks every n-th is summed, and compared when loaded: a
                             * difference is FAILED, CKV_ECORRUPT; 0: none */
  uint32_t sim_mbps;        /* simulated MB/s per direction; 0 is as fast as memcpy */
} ckv_config;

/* Block b is at dev_base + b * dev_stride, slot s at host_base + s * host_stride. */
typedef struct {
  uint64_t dev_base;
  uint64_t dev_stride;
  uint64_t host_base;
  uint64_t host_stride;
  uint64_t bytes;
} ckv_region;

/* error: 0, a CKV_ code (below 0) or the driver's own code (above 0); CKV_EINVAL is a conflict.
 * bytes: known to have been copied. Times are CLOCK_MONOTONIC; start_ns is the first driver call,
 * 0 if there was none. Of a write or a read that is not DONE, disk_errors says for each of its
 * num_disk_slots what became of it: 0 if it was copied, and is as right as in one that is DONE,
 * else a CKV_ code. It is null where that is unknown, so that no slot counts as copied. The engine
 * owns the array, until the next ckv_poll or ckv_free. */
typedef struct {
  uint64_t tag;
  int32_t status;
  int32_t error;
  uint64_t bytes;
  uint64_t submit_ns;
  uint64_t start_ns;
  uint64_t done_ns;
  const int32_t *disk_errors;
  uint64_t num_disk_slots;
} ckv_completion;

/* Thread-safe, does not block. */
int ckv_abi_version(void);

/* Why the last failing call of this thread failed. Thread-safe, does not block. The library owns
 * the text; it lasts until the thread's next failing call. */
const char *ckv_last_error(void);

/* Opens the driver and starts the lane thread. Thread-safe. BLOCKS (a CUDA context can take
 * seconds). Driver CUDA without libcuda gives CKV_EDRIVER, never another driver. */
int ckv_open(const ckv_config *config, ckv_engine **out);

/* Before the first submit, and again when VRAM was mapped elsewhere: then CKV_AGAIN while a load or
 * a store is unfinished, and nothing may differ but where blocks lie. Copies the array. Not safe
 * beside ckv_submit. Does not block. */
int ckv_set_regions(ckv_engine *engine, const ckv_region *regions, size_t num_regions,
                    int32_t num_blocks, int32_t num_slots);

/* Queues a transfer of n pairs, no two of which write the same block or slot. Copies both arrays.
 * Thread-safe, does not block: microseconds.
 * Loads leave before speculative loads, these before stores; otherwise first in is first out. A
 * load waits for at most the speculative trunks in flight. flags: CKV_SPECULATIVE or 0.
 * after_stream != 0: an event of ours is recorded on that stream here, and no byte is copied before
 * it fires (store: compute done; load: block zeroing done). A load behind a stream whose work never
 * ends keeps later loads of its rank waiting, first in, first out, until it is cancelled.
 * The tag must differ from every unfinished transfer's. */
int ckv_submit(ckv_engine *engine, int direction, uint32_t flags, const int32_t *dev_blocks,
               const int32_t *host_slots, size_t n, uintptr_t after_stream, uint64_t tag);

/* Moves up to max completions into the caller's array and returns how many, oldest first. ONE
 * consumer at a time. Lock-free, does not block. Works after ckv_close. 0 after fork; 0
 * where `out` is null, and nothing is lost. */
size_t ckv_poll(ckv_engine *engine, ckv_completion *out, size_t max);

/* Number of completions to poll; reading it needs no call. The engine owns it until ckv_free. */
const volatile uint64_t *ckv_pending_word(ckv_engine *engine);

/* Stops a transfer before its next trunk; it still completes, as CANCELLED unless it was faster.
 * An unknown or finished tag is CKV_OK. Thread-safe, does not block. */
int ckv_cancel(ckv_engine *engine, uint64_t tag);

/* BLOCKS until the tag is finished (its completion can then be polled), CKV_TIMEOUT if it is not in
 * time. An unknown or finished tag is CKV_OK at once. Thread-safe. */
int ckv_wait(ckv_engine *engine, uint64_t tag, int64_t timeout_us);

/* BLOCKS. Refuses new transfers, lets the queued ones finish for timeout_us, then fails what has
 * not begun or not been checked with CKV_CLOSED and gives copies in flight one second more.
 * CKV_TIMEOUT: the driver did not return them; they are reported FAILED, the lane is left behind,
 * pool and VRAM must stay mapped. Idempotent: later calls return the first one's result. Poll
 * afterwards, then ckv_free. */
int ckv_close(ckv_engine *engine, int64_t timeout_us);

/* Closes with timeout 0 if need be, unmaps pools unless the lane was left behind, frees the handle.
 * No other call may run but a ckv_disk_open, which then fails. Waits for the chunk that a growing
 * pool is locking, however long the driver takes: ckv_pool_wait after ckv_close says whether there
 * is one. A null engine is allowed.
 */
void ckv_free(ckv_engine *engine);

/* What the engine did since it was opened. Pairs are (load, store). */
typedef struct {
  uint32_t size;               /* sizeof(ckv_stats), set by the caller */
  int32_t poison;              /* the driver code that ended the context, 0 while it lives */
  uint32_t paths;              /* bit p: the driver has CKV_PATH_ p and it was not given up */
  uint32_t num_given_up;       /* paths that failed at run time and are not used any more */
  uint64_t num_bytes[2];       /* copied */
  uint64_t num_pieces[2];      /* (pair, region) pieces issued, before neighbours were merged */
  uint64_t num_descriptors[2]; /* after */
  uint64_t num_trunks[2][4];   /* by the CKV_PATH_ that took them; [.][0] is not used */
  uint64_t bytes_in_flight[2]; /* just now */
  uint64_t issue_ns[2];        /* sum over transfers: from free to go (submitted, and the stream's
                                * work seen done) to the first driver call */
  uint64_t max_issue_ns[2];
  uint64_t num_issued[2]; /* transfers in those sums */
  uint64_t num_summed;    /* blocks whose checksum was taken at a store */
  uint64_t num_checked;   /* ... compared at a load */
  uint64_t num_corrupt;   /* ... and differed */
} ckv_stats;

/* Thread-safe, does not block. Works after ckv_close. Counts every transfer already polled in full.
 */
int ckv_get_stats(ckv_engine *engine, ckv_stats *out);

enum { CKV_NUMA_ANY = -2, CKV_NUMA_DEVICE = -1 }; /* or a node's number */

/* 0 takes the default wherever one is given. */
typedef struct {
  uint32_t size;        /* sizeof(ckv_pool_config) */
  int32_t huge;         /* ask for huge pages */
  int32_t numa_node;    /* preferred; CKV_NUMA_* or a node */
  uint32_t num_threads; /* that touch pages; 0: up to 8 */
  uint64_t bytes;
  uint64_t first_bytes; /* ready when ckv_pool_map returns, the rest follows behind; 0: all */
  uint64_t chunk_bytes; /* page-locked per driver call; 128 MiB */
  /* It grows this far by itself, first_bytes at least, and on as ckv_pool_want says; then it grows
   * so under the simulator, too. 0: to its end. */
  uint64_t wanted_bytes;
  uint64_t num_left; /* bytes left to others for each that it takes, beside the reserve; may be 0 */
} ckv_pool_config;

typedef struct {
  uint32_t size;         /* sizeof(ckv_pool_state), set by the caller */
  int32_t is_growing;    /* a thread adds to ready_bytes; 0 while it pauses for memory */
  int32_t error;         /* what stopped it early: 0 or a CKV_ code */
  int32_t numa_node;     /* where it was asked for, -1 if nowhere */
  uint64_t mapped_bytes; /* address space */
  uint64_t ready_bytes;  /* from the base on: populated, locked, usable; 0 once released */
  double populate_s;     /* time spent so far */
  double lock_s;
  char why[256];         /* a sentence for `error`, or "" */
  uint64_t wanted_bytes; /* it stops growing there until more is wanted */
} ckv_pool_state;

/* BLOCKS until first_bytes are ready. Maps anonymous memory that a fork does not inherit. For CUDA
 * a thread populates and page-locks it chunk by chunk, and leaves the machine and its cgroups a
 * reserve; under the simulator all of it is ready at once and no page is touched. If not even
 * first_bytes can be had, nothing stays mapped; a later failure ends the growth and what is ready
 * stays. Where memory was short (CKV_ENOMEM) it is tried again twice a minute. ckv_close ends it
 * too (CKV_CLOSED). The engine owns the mapping until ckv_pool_unmap or ckv_free. A transfer may
 * use ready bytes only; ckv_submit refuses the others. Thread-safe.
 */
int ckv_pool_map(ckv_engine *engine, const ckv_pool_config *config, void **out);

/* Thread-safe, does not block. */
int ckv_pool_get_state(ckv_engine *engine, void *base, ckv_pool_state *out);

/* Has a pool grow to `bytes`, if it wanted less. Does not block. */
int ckv_pool_want(ckv_engine *engine, void *base, uint64_t bytes);

/* BLOCKS until the pool grows no more (CKV_OK, also where that came early: see its state) or the
 * timeout. Thread-safe; nobody may unmap the pool meanwhile. */
int ckv_pool_wait(ckv_engine *engine, void *base, int64_t timeout_us);

/* BLOCKS, seconds per 10 GiB: unlocks the pool and gives its pages back, what is in them is lost.
 * The address stays, and no slot is ready. CKV_AGAIN while a transfer is unfinished. One thread
 * calls this, ckv_pool_regrow and ckv_submit. */
int ckv_pool_release(ckv_engine *engine, void *base);

/* Has a pool that was released grow again, all of it behind; does not wait for memory. */
int ckv_pool_regrow(ckv_engine *engine, void *base);

/* BLOCKS, also for the chunk that is being locked. Refused with CKV_AGAIN while the engine may
 * still copy or left copies behind. Thread-safe. */
int ckv_pool_unmap(ckv_engine *engine, void *base);

/* ---- A file on a disk, of num_slots disk slots of slot_blocks host slots each ----
 *
 *   - A read is DONE only if every disk slot had the key that was asked for, in this generation of
 *     the file, and every byte is the one that was written under it. Of one that is not DONE this
 *     holds for the slots that its completion says were copied; other host slots hold anything.
 *   - No step, no lane and no caller waits for the disk but for ckv_disk_open and ckv_disk_close.
 *   - Bytes are durable when the system likes; only a generation's begin and end are waited for.
 */

typedef struct ckv_disk ckv_disk;

/* Flags of an open. KEEP: what an earlier process wrote under the same namespace is found again.
 * BUFFERED: not even try O_DIRECT. UNSUMMED: for benchmarks and tests that show what the sum of the
 * payload is for: it is neither taken nor compared. */
enum { CKV_DISK_KEEP = 1, CKV_DISK_BUFFERED = 2, CKV_DISK_UNSUMMED = 4 };
enum { CKV_MAX_KEY = 40 }; /* bytes */

/* 0 takes the default wherever one is given. */
typedef struct {
  uint32_t size;            /* sizeof(ckv_disk_config) */
  uint32_t flags;           /* CKV_DISK_* */
  uint32_t num_threads;     /* reads and writes under way; 8 */
  uint32_t slot_blocks;     /* host slots per disk slot, up to 1000 */
  int32_t num_slots;        /* disk slots */
  uint8_t namespace_id[32]; /* a digest of all that a block's bytes depend on */
} ckv_disk_config;

/* What a disk slot holds of an earlier process. */
typedef struct {
  uint64_t sequence; /* orders the writes of all processes */
  int32_t slot;
  uint32_t depth;
  uint32_t key_bytes;
  uint8_t key[CKV_MAX_KEY];
} ckv_disk_entry;

typedef struct {
  uint32_t size;         /* sizeof(ckv_disk_state), set by the caller */
  int32_t error;         /* what ended it for good: 0 or a CKV_ code */
  int32_t is_direct;     /* O_DIRECT is taken */
  int32_t was_kept;      /* the open kept the generation that it found */
  int32_t is_scanned;    /* ckv_disk_scan has handed over all there was */
  int32_t is_ready;      /* reads and writes; 0 from a reset until it is durable */
  uint64_t oldest_op_us; /* age of the oldest call that the system has not answered; 0: none */
  uint64_t num_scanned;  /* slots whose header was looked at, and ... */
  uint64_t num_foreign;  /* ... those of them that were written, but are not found again */
  uint64_t num_bytes[2]; /* payload of whole slots: written, read */
  char why[256];         /* a sentence for `error`, or why it is not direct, or "" */
} ckv_disk_state;

/* BLOCKS: opens or makes the file, locks it, takes all its room on the disk, and makes its
 * superblock durable. A file of another namespace or shape is begun anew. `facts`: the namespace
 * for people, put into the file; may be null. After ckv_set_regions, all of which must have one
 * host_stride, a multiple of 4096, within which the slot is the engine's alone. CKV_ELOCKED,
 * CKV_ENOSPC, CKV_EIO, CKV_EINVAL. Thread-safe, also beside submits. The handle lives as long as
 * the engine. */
int ckv_disk_open(ckv_engine *engine, const char *path, const char *facts,
                  const ckv_disk_config *config, ckv_disk **out);

/* Queues a transfer between n disk slots, no two the same, and n * slot_blocks host slots, the
 * first of which go with the first disk slot; -1 in a CKV_READ: not wanted. `keys`: n * key_bytes
 * bytes. `depths`: n, of a CKV_WRITE, may be null. Copies all arrays. Reads leave before writes,
 * and while any read is under way at most one write is; in each first in is first out. The first
 * slot that fails ends the transfer. Between a ckv_disk_reset and the moment when it is durable,
 * CANCELLED. As ckv_submit: thread-safe, does not block. */
int ckv_disk_submit(ckv_disk *disk, int direction, const int32_t *host_slots,
                    const int32_t *disk_slots, const uint8_t *keys, size_t key_bytes,
                    const uint32_t *depths, size_t n, uint64_t tag);

/* Moves up to max entries into the caller's array and returns how many: what the threads found
 * since the open while they had no reads or writes. A slot comes once, and not if a write to it was
 * taken before. Thread-safe, does not block. */
size_t ckv_disk_scan(ckv_disk *disk, ckv_disk_entry *out, size_t max);

/* A new random generation: all that the file holds is foreign from here on, and what is queued or
 * under way will be CANCELLED, if it does not fail. What a process after this one opens is empty.
 * Thread-safe, does not block; durable when the state says is_ready. */
int ckv_disk_reset(ckv_disk *disk);

/* Thread-safe, does not block. Works after ckv_disk_close. */
int ckv_disk_get_state(ckv_disk *disk, ckv_disk_state *out);

/* BLOCKS. What has not begun is FAILED with CKV_CLOSED, what has may take timeout_us. CKV_TIMEOUT:
 * the disk did not answer; threads and file are left behind, what they hold is reported when they
 * return or by ckv_close, and the pool stays mapped until then. May be called again. ckv_close
 * closes every disk. Thread-safe. */
int ckv_disk_close(ckv_disk *disk, int64_t timeout_us);

/* ---- Simulator only (CKV_EINVAL otherwise). Thread-safe. ---- */

typedef struct {
  uint64_t max_bytes_in_flight[2];
  uint64_t num_descriptors[2];
  uint64_t num_copy_calls[2];
  uint64_t num_driver_calls; /* every entry point that sim_fail counts */
  uint64_t num_stopped;      /* calls that ckv_sim_stop keeps just now */
  uint64_t num_copied[2];    /* copy calls that the device has done */
  uint64_t num_violations;   /* of block lifetimes, seen by ckv_sim_watch */
  uint64_t num_disk_calls;   /* to files on disks */
  uint64_t num_disk_stopped; /* ... that ckv_sim_disk_stop keeps just now */
} ckv_sim_stats;

/* The driver's entry points, for ckv_sim_fail_at. */
enum {
  CKV_SIM_ANY = 0,
  CKV_SIM_EVENT_CREATE = 1,
  CKV_SIM_EVENT_RECORD = 2,
  CKV_SIM_EVENT_QUERY = 3,
  CKV_SIM_STREAM_QUERY = 4,
  CKV_SIM_COPY = 5,
  CKV_SIM_HOST_REGISTER = 6
};

/* on: no copy begins from here on (BLOCKS until none is running); off: they go on. */
int ckv_sim_hold(ckv_engine *engine, int on);
/* After `after` more driver calls, `count` calls fail with `code`. As in CUDA, some codes leave the
 * context alive (1, 2) and others end it (700): copies stop and every later call fails. A copy call
 * that fails has queued half of its descriptors. */
int ckv_sim_fail(ckv_engine *engine, uint64_t after, uint64_t count, int code);
/* The same for calls of one entry point. Each entry point, CKV_SIM_ANY too, keeps its own order. */
int ckv_sim_fail_at(ckv_engine *engine, int entry, uint64_t after, uint64_t count, int code);
/* The driver call that `after` others precede waits until ckv_sim_stop is called again, and then
 * goes on as if nothing had been. UINT64_MAX: no call waits any more. */
int ckv_sim_stop(ckv_engine *engine, uint64_t after);
/* bit p: it has CKV_PATH_ p. At first all three; LOOP cannot be taken away.
 */
int ckv_sim_set_paths(ckv_engine *engine, uint32_t paths);
/* How long ckv_close gives copies in flight, so that no test depends on how fast a machine is. At
 * first one second, as for a device. */
int ckv_sim_set_grace(ckv_engine *engine, int64_t grace_us);
/* Every copy call on the path fails with `code`, having queued half of its descriptors; 0: none. */
int ckv_sim_fail_path(ckv_engine *engine, int path, int code);
/* A compute stream, to use as after_stream. Lives as long as the engine. */
int ckv_sim_stream(ckv_engine *engine, uintptr_t *out);
/* A kernel: after delay_us, sets bytes at ptr to value (bytes 0: only the delay). Does not block.
 */
int ckv_sim_compute(ckv_engine *engine, uintptr_t stream, void *ptr, int value, uint64_t bytes,
                    uint64_t delay_us);
/* on: what was queued last on the stream, and all that follows, does not finish; off: it goes on.
 */
int ckv_sim_block(ckv_engine *engine, uintptr_t stream, int on);
/* on: counts the pieces of blocks (one per region) that somebody else wrote while a transfer stood
 * on them, and names them on stderr: from its submit, or with after_stream from when the lane sees
 * that fired, to its report. Also on from the start where the environment has CKV_SIM_WATCH. */
int ckv_sim_watch(ckv_engine *engine, int on);
int ckv_sim_get_stats(ckv_engine *engine, ckv_sim_stats *out);

/* Under the simulator a disk's file is a real one behind these faults. Its entry points: */
enum {
  CKV_SIM_DISK_OPEN = 0,
  CKV_SIM_DISK_LOCK = 1,
  CKV_SIM_DISK_ALLOCATE = 2,
  CKV_SIM_DISK_READ = 3,
  CKV_SIM_DISK_WRITE = 4,
  CKV_SIM_DISK_SYNC = 5
};
/* After `after` more calls of one entry point, `count` calls fail with an errno and do nothing. */
int ckv_sim_disk_fail_at(ckv_engine *engine, int entry, uint64_t after, uint64_t count, int code);
/* The write that `after` others precede puts down its first `bytes` bytes. is_told: as a short
 * write; else it says that all are there, as a machine that lost its power would have. */
int ckv_sim_disk_tear(ckv_engine *engine, uint64_t after, uint64_t bytes, int is_told);
/* The call of one entry point that `after` others precede, and all behind it, wait until this is
 * called again for the entry point, and go on then. UINT64_MAX: no call waits any more. */
int ckv_sim_disk_stop(ckv_engine *engine, int entry, uint64_t after);
/* Reads and writes take as long as at so many MB/s, one after the other. 0: no longer than they do.
 */
int ckv_sim_disk_mbps(ckv_engine *engine, uint32_t mbps);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
