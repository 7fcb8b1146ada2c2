"""The boundary to csrc/ckv.h: plain values, which native.py takes and returns; then ctypes, its
structs and signatures, and how the library is found.

Calls from a step take microseconds and keep the GIL (PyDLL): releasing it costs up to a switch
interval if another thread wants it. Calls that block release it (CDLL), and so do those at the
start and at the end. What the simulator alone has is for tests (tests/native/sim.py).
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import continuum_connector
from continuum_connector.errors import TransferError

# Completion.error: below 0 as in csrc/ckv.h, above 0 the driver's own code.
CONFLICT = -2  # an unfinished transfer uses a block or slot of it (CKV_EINVAL)
INTERNAL = -9  # a bug in the native library (CKV_EINTERNAL)
CORRUPT = -10  # a slot of DRAM or disk no longer holds what was put into it (CKV_ECORRUPT)
EIO = -11  # the disk failed, or its file is too short
MISSING = -12  # the disk slot holds another key than the one we asked for
ENOSPC = -14  # the disk is full
UNTRIED = -15  # another slot's failure ended the transfer before it came to this one, or a cancel


T = TypeVar("T", bound=ctypes.Structure)


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


ABI_VERSION = 6
DISK_KEEP = 1  # a flag of ckv_disk_open
NUMA_ANY, NUMA_DEVICE = -2, -1

_i32, _u32, _i64, _u64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64
_size, _ptr = ctypes.c_size_t, ctypes.c_void_p


def _each(kind: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """Fields of one type, one after the other."""
    return ((name, kind) for name in names)


class Config(ctypes.Structure):
    _fields_ = (
        *_each(_u32, "size", "abi"),
        *_each(_i32, "driver", "device", "path"),
        ("max_descriptors", _u32),
        ("trunk_bytes", _u64),
        ("window_bytes", _u64 * 2),
        *_each(_u32, "max_transfers", "checksum_every", "sim_mbps"),
    )


class PoolConfig(ctypes.Structure):
    _fields_ = (
        ("size", _u32),
        *_each(_i32, "huge", "numa_node"),
        ("num_threads", _u32),
        *_each(_u64, "bytes", "first_bytes", "chunk_bytes", "wanted_bytes", "num_left"),
    )


class RawPoolState(ctypes.Structure):
    _fields_ = (
        ("size", _u32),
        *_each(_i32, "is_growing", "error", "numa_node"),
        *_each(_u64, "mapped_bytes", "ready_bytes"),
        *_each(ctypes.c_double, "populate_s", "lock_s"),
        ("why", ctypes.c_char * 256),
        ("wanted_bytes", _u64),
    )


class Stats(ctypes.Structure):
    """What the engine did; the pairs are (load, store)."""

    _fields_ = (
        ("size", _u32),
        ("poison", _i32),
        *_each(_u32, "paths", "num_given_up"),
        *_each(_u64 * 2, "num_bytes", "num_pieces", "num_descriptors"),
        ("num_trunks", _u64 * 4 * 2),
        *_each(_u64 * 2, "bytes_in_flight", "issue_ns", "max_issue_ns", "num_issued"),
        *_each(_u64, "num_summed", "num_checked", "num_corrupt"),
    )


class RawRegion(ctypes.Structure):
    _fields_ = (*_each(_u64, "dev_base", "dev_stride", "host_base", "host_stride", "bytes"),)


class RawCompletion(ctypes.Structure):
    _fields_ = (
        ("tag", _u64),
        *_each(_i32, "status", "error"),
        *_each(_u64, "bytes", "submit_ns", "start_ns", "done_ns"),
        ("disk_errors", ctypes.POINTER(_i32)),
        ("num_disk_slots", _u64),
    )


NamespaceId = ctypes.c_uint8 * 32


class DiskConfig(ctypes.Structure):
    _fields_ = (
        *_each(_u32, "size", "flags", "num_threads", "slot_blocks"),
        ("num_slots", _i32),
        ("namespace_id", NamespaceId),
    )


class DiskEntry(ctypes.Structure):
    _fields_ = (
        ("sequence", _u64),
        ("slot", _i32),
        *_each(_u32, "depth", "key_bytes"),
        ("key", ctypes.c_uint8 * 40),
    )


class RawDiskState(ctypes.Structure):
    """How a disk is doing; the pair is (written, read)."""

    _fields_ = (
        ("size", _u32),
        *_each(_i32, "error", "is_direct", "was_kept", "is_scanned", "is_ready"),
        *_each(_u64, "oldest_op_us", "num_scanned", "num_foreign"),
        ("num_bytes", _u64 * 2),
        ("why", ctypes.c_char * 256),
    )


def sized(kind: type[T], **values: Any) -> T:
    """A struct of this kind that says its size, as the library asks for."""
    return kind(size=ctypes.sizeof(kind), **values)


Signatures = dict[str, tuple[type[Any] | None, tuple[type[Any], ...]]]  # result, arguments
_BLOCKING: Signatures = {
    "ckv_abi_version": (_i32, ()),
    "ckv_open": (_i32, (_ptr, _ptr)),
    "ckv_set_regions": (_i32, (_ptr, _ptr, _size, _i32, _i32)),
    "ckv_pending_word": (_ptr, (_ptr,)),
    "ckv_wait": (_i32, (_ptr, _u64, _i64)),
    "ckv_close": (_i32, (_ptr, _i64)),
    "ckv_free": (None, (_ptr,)),
    "ckv_pool_map": (_i32, (_ptr, _ptr, _ptr)),
    "ckv_pool_wait": (_i32, (_ptr, _ptr, _i64)),
    "ckv_pool_release": (_i32, (_ptr, _ptr)),
    "ckv_pool_regrow": (_i32, (_ptr, _ptr)),
    "ckv_pool_unmap": (_i32, (_ptr, _ptr)),
    "ckv_disk_open": (_i32, (_ptr, ctypes.c_char_p, ctypes.c_char_p, _ptr, _ptr)),
    "ckv_disk_close": (_i32, (_ptr, _i64)),
}
_QUICK: Signatures = {
    "ckv_submit": (_i32, (_ptr, _i32, _u32, _ptr, _ptr, _size, _ptr, _u64)),
    "ckv_poll": (_size, (_ptr, _ptr, _size)),
    "ckv_cancel": (_i32, (_ptr, _u64)),
    "ckv_pool_want": (_i32, (_ptr, _ptr, _u64)),
    "ckv_pool_get_state": (_i32, (_ptr, _ptr, _ptr)),
    "ckv_get_stats": (_i32, (_ptr, _ptr)),
    "ckv_disk_submit": (_i32, (_ptr, _i32, _ptr, _ptr, _ptr, _size, _ptr, _size, _u64)),
    "ckv_disk_scan": (_size, (_ptr, _ptr, _size)),
    "ckv_disk_reset": (_i32, (_ptr,)),
    "ckv_disk_get_state": (_i32, (_ptr, _ptr)),
    "ckv_last_error": (ctypes.c_char_p, ()),
}


def find_library() -> Path:
    """Where the native library is: the one that CKV_LIBRARY names (for developers, such as one
    built with a sanitizer), else the package's own. It may lie in another folder than these
    sources: in any folder of the package after an editable install, or further down `sys.path` if
    a source tree hides an installed wheel, as it does for `python -m` run in that tree."""
    named = os.environ.get("CKV_LIBRARY")
    if named is not None:
        if Path(named).is_file():
            return Path(named)
        raise TransferError(f"CKV_LIBRARY = {named} is no file, so nothing is copied; unset it.")
    hidden = (Path(each, "continuum_connector") for each in sys.path)
    for folder in (*map(Path, continuum_connector.__path__), *hidden):
        path = folder / "_ckv" / "libckv.so"
        if path.is_file():
            return path
    raise TransferError("the native library is not built; `pip install .` builds it and needs g++.")


def declare(library: ctypes.CDLL, signatures: Signatures) -> None:
    """Say how these functions are called."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


@functools.cache
def load_library() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The library twice: calls that release the GIL, calls that keep it."""
    path = find_library()
    try:
        blocking, quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        declare(blocking, _BLOCKING)
        declare(quick, _QUICK)
        found = blocking.ckv_abi_version()
    except OSError as error:  # made for another libc or CPU, or cut short; the text names the file
        raise TransferError(
            f"the native library does not load ({error}); install the package again here."
        ) from error
    except AttributeError as error:
        raise TransferError(f"{path} is from another version ({error}); install again.") from error
    if found != ABI_VERSION:
        raise TransferError(
            f"{path} has ABI {found}, these sources need {ABI_VERSION}; install again."
        )
    return blocking, quick
