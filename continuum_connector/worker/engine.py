"""What the worker asks of native.py and is told by it, in plain values: it needs no library."""

from __future__ import annotations

import enum
from dataclasses import dataclass

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
