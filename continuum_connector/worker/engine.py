"""CopyEngine: what the worker needs of a copier of blocks; DiskFile: what it needs of a disk."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from continuum_connector.messages import BlockIds, OnDisk

if TYPE_CHECKING:
    from continuum_connector.worker.layout import Layout

# Completion.error, below 0 as in csrc/ckv.h; above 0 it is the driver's own code.
CONFLICT = -2  # an unfinished transfer uses a block or slot of it (CKV_EINVAL)
CORRUPT = -10  # a slot, of DRAM or disk, no longer holds what was put into it (CKV_ECORRUPT)
EIO = -11  # the disk failed, or its file is short
MISSING = -12  # the disk slot holds another key than the one that was asked for
LOCKED = -13  # of an open: another process has the file
ENOSPC = -14  # the disk is full


class Direction(enum.Enum):
    LOAD = 0  # DRAM -> VRAM
    STORE = 1  # VRAM -> DRAM


class Status(enum.Enum):
    DONE = 1
    CANCELLED = 2
    FAILED = 3


@dataclass(frozen=True)
class Region:
    """One span that holds a piece of every block.

    Piece of VRAM block b: `dev_base + b * dev_stride`, `num_bytes` long. Piece of host
    slot s: `host_offset + s * slot_bytes` into the pool. All in bytes.
    """

    dev_base: int
    dev_stride: int
    host_offset: int
    num_bytes: int


@dataclass(frozen=True)
class Completion:
    """One submitted transfer that will not touch memory again, reported exactly once."""

    tag: int
    status: Status
    error: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class PoolState:
    """How far a pool has come. `why` says what stopped it early, or is empty."""

    ready_bytes: int
    mapped_bytes: int
    is_growing: bool
    why: str
    numa_node: int
    populate_s: float
    lock_s: float


@dataclass(frozen=True)
class Health:
    """`poison`: what ended the engine for good, the driver's own code or a CKV_ code (below 0);
    0 while it can copy. `given_up`: ways of copying that failed and are not used any more."""

    poison: int = 0
    given_up: tuple[str, ...] = ()


@dataclass(frozen=True)
class DiskTuning:
    """What one rank's file on a disk is made of.

    A disk slot holds `slot_blocks` consecutive blocks of a chain. `namespace` (32 bytes) is the
    digest of all that the bytes of a block depend on, `facts` the same for people, as JSON: what
    the file holds of another namespace is not found again, and nothing is unless `keep`.
    """

    num_slots: int
    slot_blocks: int
    namespace: bytes
    facts: str
    keep: bool = True
    num_threads: int = 8


@dataclass(frozen=True)
class DiskState:
    """How one rank's file is doing.

    `is_direct`: the page cache is not in between. `was_kept`: the open found slots of this
    namespace worth scanning; `is_scanned`: all that they hold has been handed over. `is_ready`: it
    reads and writes; not between a reset and the moment when that is durable. `oldest_op_s`: since
    when the disk owes an answer, 0 if it owes none. `error`: the code of what ended it for good, 0
    while it serves, and `why` the sentence.
    """

    is_direct: bool
    was_kept: bool
    is_scanned: bool
    is_ready: bool
    oldest_op_s: float
    error: int
    why: str


class DiskFile(Protocol):
    """One rank's file. All but `close` take microseconds, on the thread that has the engine; with
    `reset` called, `write` and `read` complete as CANCELLED until that is durable.

    Completions come by `CopyEngine.poll`, and `CopyEngine.cancel` stops what has not begun. Tags
    are the engine's: one that is unfinished may not be used again, whoever uses it.
    """

    def write(
        self,
        slots: BlockIds,
        disk_slots: BlockIds,
        keys: Sequence[bytes],
        depths: Sequence[int],
        tag: int,
    ) -> None:
        """Queue host `slots`, slot_blocks of them for each disk slot, to be written to
        `disk_slots` under `keys` (of equal length, 40 bytes at most); TransferError if refused."""
        ...

    def read(self, slots: BlockIds, disk_slots: BlockIds, keys: Sequence[bytes], tag: int) -> None:
        """Queue `disk_slots`, which must hold `keys`, to be read to host `slots`, -1: not wanted.
        Host slots of a read that fails hold anything. TransferError if refused."""
        ...

    def scan(self, max_found: int) -> list[OnDisk]:
        """Hand over up to `max_found` of what the background found since, each slot once; never
        one that was written meanwhile."""
        ...

    def reset(self) -> None:
        """Make all that is on the disk foreign, what is queued or under way too. Queued; durable
        when `state` says ready."""
        ...

    def state(self) -> DiskState:
        """Say how it is doing."""
        ...

    def close(self, timeout_s: float) -> bool:
        """BLOCK until what is under way has ended; what has not begun fails as closed. False: the
        disk did not answer in time, so threads are left behind, and the engine keeps its pool."""
        ...


class Pool(Protocol):
    """An engine's host memory. One thread calls all of it, the one that submits."""

    def set_regions(self, layout: Layout, num_slots: int) -> None:
        """Blocks lie where `layout` says from here on; nothing else of it may differ.
        TransferError while a copy is under way."""
        ...

    def release(self) -> None:
        """BLOCK, seconds per 10 GiB, until the system has its pages back. No slot is ready then.
        TransferError while a copy is under way."""
        ...

    def regrow(self) -> None:
        """Have it grow again from nothing, behind."""
        ...


class CopyEngine(Protocol):
    """Submits and polls in microseconds; only `wait`, `wait_pool`, `open_disk` and `close` block.

    All methods are called from one thread; `open_disk` may come from another, and the last,
    `close`, where nothing is in flight. `submit` copies the id arrays (int32, contiguous, equal
    length) before it returns.
    """

    @property
    def pool(self) -> Pool:
        """What the slots lie in."""
        ...

    def pool_state(self) -> PoolState:
        """Say how far the host pool has come, and what stopped it. A few microseconds.

        Slots within `ready_bytes` may be used; it grows until the pool is released.
        """
        ...

    def wait_pool(self, timeout_s: float) -> bool:
        """Block until the host pool grows no more. False: timeout."""
        ...

    def open_disk(self, path: str, tuning: DiskTuning) -> DiskFile:
        """BLOCK until the file at `path` is there in full size and locked; TransferError, with the
        sentence, if it cannot be. Host slots must be multiples of 4 KiB (Layout.padded)."""
        ...

    def submit(
        self,
        direction: Direction,
        blocks: BlockIds,
        slots: BlockIds,
        tag: int,
        after_stream: int = 0,
        *,
        speculative: bool = False,
    ) -> None:
        """Queue a transfer; raises TransferError if the engine is closed or poisoned.

        `after_stream`: the CUDA stream whose queued work the copy waits for (store: compute
        done; load: block zeroing done). 0 is CUDA's default stream; a simulated engine,
        whose compute is done when it is called, has nothing to wait for then.
        `speculative`: a load that nobody waits for yet; loads that are waited for pass it.
        """
        ...

    def poll(self) -> list[Completion]:
        """Return what settled since the last poll, oldest first; [] costs well under 1 us."""
        ...

    def health(self) -> Health:
        """Say what has failed for good so far. A few microseconds; also of a poisoned engine."""
        ...

    def cancel(self, tag: int) -> None:
        """Ask to stop a transfer; it still completes, as CANCELLED unless it was faster."""
        ...

    def wait(self, tag: int, timeout_s: float) -> bool:
        """Block until `tag` has settled; its completion still comes by `poll`. False: timeout."""
        ...

    def close(self, timeout_s: float) -> None:
        """Drain or cancel what is in flight, stop the threads, unmap the pool. Idempotent."""
        ...
