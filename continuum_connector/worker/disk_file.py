"""NativeDisk: the DiskFile of csrc/, over ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from continuum_connector.errors import TransferError
from continuum_connector.messages import BlockIds, OnDisk
from continuum_connector.worker import abi
from continuum_connector.worker.engine import DiskState, DiskTuning

_WRITE, _READ = 2, 3
_ETIMEOUT, _CLOSED = -5, -4  # CKV_TIMEOUT, CKV_CLOSED
_WHY_CLOSED = "the copy engine is closed, and its files with it"
_MAX_ENTRIES = 256
_INT32 = np.dtype(np.int32)


class NativeDisk:
    """A file on a disk whose reads and writes run on native threads.

    It belongs to one native engine, whose host slots it fills and empties and whose tags it shares.
    Once the engine is closed, it says so and refuses everything else.
    """

    def __init__(
        self, engine: ctypes.c_void_p, path: str, tuning: DiskTuning, flags: int = 0
    ) -> None:
        """BLOCKS, without the GIL, until all of the file's room is allocated on the disk. `flags`:
        the library's own, for benchmarks."""
        self._blocking, self._quick = abi.load_library()
        self._slot_blocks = tuning.slot_blocks
        self._entries = (abi.DiskEntry * _MAX_ENTRIES)()
        namespace_id = abi.NamespaceId.from_buffer_copy(tuning.namespace)
        config = abi.DiskConfig(
            size=ctypes.sizeof(abi.DiskConfig),
            flags=flags | abi.DISK_KEEP,
            num_threads=tuning.num_threads,
            slot_blocks=tuning.slot_blocks,
            num_slots=tuning.num_slots,
            namespace_id=namespace_id,
        )
        self._handle: ctypes.c_void_p | None = None
        handle = ctypes.c_void_p()
        code = self._blocking.ckv_disk_open(
            engine,
            path.encode(),
            tuning.facts.encode(),
            ctypes.byref(config),
            ctypes.byref(handle),
        )
        self._check(code)
        self._handle = handle

    def write(
        self,
        slots: BlockIds,
        disk_slots: BlockIds,
        keys: Sequence[bytes],
        depths: Sequence[int],
        tag: int,
    ) -> None:
        """Queue a write; see DiskFile."""
        if len(depths) != len(disk_slots):
            raise TransferError(f"write {tag}: {len(depths)} depths, {len(disk_slots)} disk slots.")
        raw_depths = np.asarray(depths, dtype=np.uint32).tobytes()
        self._submit(_WRITE, slots, disk_slots, keys, raw_depths, tag)

    def read(self, slots: BlockIds, disk_slots: BlockIds, keys: Sequence[bytes], tag: int) -> None:
        """Queue a read; see DiskFile."""
        self._submit(_READ, slots, disk_slots, keys, None, tag)

    def _submit(
        self,
        direction: int,
        slots: BlockIds,
        disk_slots: BlockIds,
        keys: Sequence[bytes],
        depths: bytes | None,
        tag: int,
    ) -> None:
        n = len(disk_slots)
        if slots.dtype != _INT32 or disk_slots.dtype != _INT32:
            raise TransferError(f"transfer {tag}: ids are {slots.dtype}, and must be int32.")
        key_bytes = len(keys[0]) if keys else 1
        if any(len(key) != key_bytes for key in keys):
            raise TransferError(f"transfer {tag}: its keys differ in length.")
        if len(slots) != n * self._slot_blocks or len(keys) != n:
            raise TransferError(
                f"transfer {tag}: {len(slots)} slots and {len(keys)} keys do not go with {n} disk "
                f"slots of {self._slot_blocks} blocks."
            )
        self._check(
            self._quick.ckv_disk_submit(
                self._opened(),
                direction,
                slots.tobytes(),
                disk_slots.tobytes(),
                b"".join(keys),
                key_bytes,
                depths,
                n,
                tag,
            )
        )

    def scan(self, max_found: int) -> list[OnDisk]:
        """Hand over what the threads have found since the last call; see DiskFile."""
        found: list[OnDisk] = []
        while self._handle is not None and len(found) < max_found:
            most = min(_MAX_ENTRIES, max_found - len(found))
            n = self._quick.ckv_disk_scan(self._handle, self._entries, most)
            found += map(_on_disk, self._entries[:n])
            if n < most:
                break
        return found

    def reset(self) -> None:
        """Make everything on the disk foreign; see DiskFile."""
        self._check(self._quick.ckv_disk_reset(self._opened()))

    def state(self) -> DiskState:
        """The state of the file, also after it is closed."""
        if self._handle is None:
            return DiskState(False, False, True, False, 0.0, _CLOSED, _WHY_CLOSED)
        raw = self.raw_state()
        return DiskState(
            is_direct=bool(raw.is_direct),
            was_kept=bool(raw.was_kept),
            is_scanned=bool(raw.is_scanned),
            is_ready=bool(raw.is_ready),
            oldest_op_s=raw.oldest_op_us / 1e6,
            error=raw.error,
            why=raw.why.decode(errors="replace"),
        )

    def raw_state(self) -> abi.DiskState:
        """Everything that the library counts."""
        raw = abi.DiskState(size=ctypes.sizeof(abi.DiskState))
        self._check(self._quick.ckv_disk_get_state(self._opened(), ctypes.byref(raw)))
        return raw

    def close(self, timeout_s: float) -> bool:
        """BLOCK, without the GIL, until the threads have ended; see DiskFile. Idempotent."""
        if self._handle is None:
            return True  # if not, the engine says that it left the file behind
        code = self._blocking.ckv_disk_close(self._handle, int(timeout_s * 1e6))
        if code != _ETIMEOUT:
            self._check(code)
        return bool(code == 0)

    def forget(self) -> None:
        """The engine is closed, and with it the library's handle of this file."""
        self._handle = None

    def _opened(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise TransferError(f"{_WHY_CLOSED}.")
        return self._handle

    def _check(self, code: int) -> None:
        if code < 0:
            raise TransferError(f"{self._quick.ckv_last_error().decode(errors='replace')}.")


def _on_disk(entry: abi.DiskEntry) -> OnDisk:
    key = bytes(entry.key[: entry.key_bytes])
    return OnDisk(entry.slot, entry.sequence, entry.depth, key)
