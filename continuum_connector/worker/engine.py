"""CopyEngine: what the worker needs of a copier of blocks; DiskFile: what it needs of a disk."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from continuum_connector.messages import BlockIds, OnDisk

if TYPE_CHECKING:
    from continuum_connector.worker.layout import Layout

# Completion.error: below 0 as in csrc/ckv.h, above 0 the driver's own code.
CONFLICT = -2  # an unfinished transfer uses a block or slot of it (CKV_EINVAL)
INTERNAL = -9  # a bug in the native library (CKV_EINTERNAL)
CORRUPT = -10  # a slot of DRAM or disk no longer holds what was put into it (CKV_ECORRUPT)
EIO = -11  # the disk failed, or its file is too short
MISSING = -12  # the disk slot holds another key than the one we asked for
ENOSPC = -14  # the disk is full
UNTRIED = -15  # another slot's failure ended the transfer before it came to this one, or a cancel


class Direction(enum.Enum):
    LOAD = 0  # DRAM -> VRAM
    STORE = 1  # VRAM -> DRAM


class Status(enum.Enum):
    DONE = 1
    CANCELLED = 2
    FAILED = 3


@dataclass(frozen=True)
class Region:
    """A span of memory that holds a piece of every block.

    Piece of VRAM block b: `dev_base + b * dev_stride`, `num_bytes` long. Piece of host
    slot s: `host_offset + s * slot_bytes` into the pool. All in bytes.
    """

    dev_base: int
    dev_stride: int
    host_offset: int
    num_bytes: int


@dataclass(frozen=True)
class Completion:
    """A submitted transfer that will not touch memory again. It is reported exactly once.

    `disk_errors`: of a write or a read that is not done, what became of each disk slot: 0 if it was
    copied, else why not; () if nobody knows, and then none counts as copied.
    """

    tag: int
    status: Status
    error: int
    num_bytes: int
    seconds: float
    disk_errors: tuple[int, ...] = ()


@dataclass(frozen=True)
class PoolState:
    """How far a pool has grown. `why`: what stopped it early, or "". `wanted_bytes`: where it waits
    until more is wanted."""

    ready_bytes: int
    mapped_bytes: int
    is_growing: bool
    why: str
    numa_node: int
    populate_s: float
    lock_s: float
    wanted_bytes: int = 2**63


@dataclass(frozen=True)
class Health:
    """`poison`: what ended the engine for good, as the driver's own code or a CKV_ code (below 0);
    0 while it can copy. `given_up`: ways of copying that have failed and are no longer used."""

    poison: int = 0
    given_up: tuple[str, ...] = ()


@dataclass(frozen=True)
class DiskTuning:
    """How one rank's file on a disk is built.

    A disk slot holds `slot_blocks` consecutive blocks of a chain. `namespace`: the digest (32
    bytes) of everything that the bytes of a block depend on; `facts`: the same as JSON, for people.
    What the file holds of another namespace is not found again.
    """

    num_slots: int
    slot_blocks: int
    namespace: bytes
    facts: str
    num_threads: int = 8


@dataclass(frozen=True)
class DiskState:
    """The state of one rank's file.

    `is_direct`: it bypasses the page cache. `was_kept`: the open found slots of this namespace to
    scan. `is_scanned`: everything in them has been handed over. `is_ready`: it reads and writes,
    which it does not from a reset until that is durable. `oldest_op_s`: for how long the disk has
    owed an answer, 0 if it owes none. `error`, `why`: code and sentence of what ended it for good,
    0 while it serves.
    """

    is_direct: bool
    was_kept: bool
    is_scanned: bool
    is_ready: bool
    oldest_op_s: float
    error: int
    why: str


class DiskFile(Protocol):
    """One rank's file. The thread that has the engine makes all calls. Each takes microseconds,
    apart from `close`. After `reset`, `write` and `read` complete as CANCELLED until the reset is
    durable.

    Completions come from `CopyEngine.poll`, and `CopyEngine.cancel` stops what has not begun. Tags
    belong to the engine: nobody may reuse one that is unfinished.
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
        """Queue `disk_slots`, which must hold `keys`, to be read into host `slots`, where -1
        means not wanted. After a read that fails, host slots hold anything, but for those of disk
        slots that its completion says were copied. TransferError if refused."""
        ...

    def scan(self, max_found: int) -> list[OnDisk]:
        """Hand over up to `max_found` of what the background found since, each slot once; never
        one that was written meanwhile."""
        ...

    def reset(self) -> None:
        """Make everything on the disk foreign, including what is queued or under way. The reset is
        queued, too, and durable once `state` says ready."""
        ...

    def state(self) -> DiskState:
        """Say how it is doing."""
        ...

    def close(self, timeout_s: float) -> bool:
        """BLOCK until what is under way has ended. What has not begun fails as closed. False: the
        disk did not answer in time, so threads are left behind, and the engine keeps its pool."""
        ...


class Pool(Protocol):
    """An engine's host memory. One thread calls all of it, the one that submits."""

    def set_regions(self, layout: Layout, num_slots: int) -> None:
        """From here on blocks lie where `layout` says, which may not differ in anything else.
        TransferError while a copy is under way."""
        ...

    def release(self) -> None:
        """BLOCK, for seconds per 10 GiB, until the system has its pages back. Then no slot is
        ready. TransferError while a copy is under way."""
        ...

    def regrow(self) -> None:
        """Let the pool grow again from nothing, in the background."""
        ...

    def want(self, num_bytes: int) -> None:
        """Let the pool grow to `num_bytes`, in the background, if it wanted less."""
        ...


class CopyEngine(Protocol):
    """Submits and polls in microseconds; only `wait`, `open_disk` and `close` block.

    One thread calls all methods. Another may call `open_disk`, and, if nothing is in flight, the
    last one, `close`. `submit` copies the id arrays (int32, contiguous, equal length) before it
    returns.
    """

    @property
    def pool(self) -> Pool:
        """The host memory that holds the slots."""
        ...

    def pool_state(self) -> PoolState:
        """How far the host pool has grown, and what stopped it. A few microseconds.

        Slots within `ready_bytes` may be used. It never shrinks until the pool is released.
        """
        ...

    def open_disk(self, path: str, tuning: DiskTuning) -> DiskFile:
        """BLOCK until the file at `path` has its full size and is locked. If it cannot be,
        TransferError says why. Host slots must be multiples of 4 KiB (Layout.padded)."""
        ...

    def submit(
        self,
        direction: Direction,
        blocks: BlockIds,
        slots: BlockIds,
        tag: int,
        after_stream: int = 0,
    ) -> None:
        """Queue a transfer; raises TransferError if the engine is closed or poisoned.

        `after_stream`: the CUDA stream whose queued work the copy waits for (store: compute
        done; load: block zeroing done). 0 is CUDA's default stream; a simulated engine,
        whose compute is done when it is called, has nothing to wait for then.
        """
        ...

    def poll(self) -> list[Completion]:
        """Return what has settled since the last poll, oldest first. [] costs well under 1 us."""
        ...

    def health(self) -> Health:
        """What has failed for good so far, also for a poisoned engine. A few microseconds."""
        ...

    def cancel(self, tag: int) -> None:
        """Ask to stop a transfer. It still completes, as CANCELLED unless it was faster."""
        ...

    def wait(self, tag: int, timeout_s: float) -> bool:
        """Block until `tag` has settled. Its completion still comes from `poll`. False: timeout."""
        ...

    def close(self, timeout_s: float) -> None:
        """Drain or cancel what is in flight, stop the threads, unmap the pool. Idempotent."""
        ...
