"""The native library of csrc/ over ctypes: a copying engine, its host pool, its files."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from continuum_connector.errors import TransferError
from continuum_connector.messages import BlockIds, OnDisk, ReadOrder, WriteOrder
from continuum_connector.worker import abi
from continuum_connector.worker.abi import (
    Completion,
    Direction,
    DiskState,
    DiskTuning,
    Health,
    PoolState,
    Status,
)

if TYPE_CHECKING:
    from continuum_connector.worker.layout import Layout

MIB = 1 << 20
_T = TypeVar("_T", PoolState, DiskState)

_DRIVERS = {"cuda": 1, "sim": 2}
PATHS = {"auto": 0, "batch": 1, "loop": 2, "gather": 3}
_LEGACY_STREAM = 1  # CU_STREAM_LEGACY: torch's default stream, whose own handle is 0
_WRITE, _READ = 2, 3  # beside the two of Direction
_CLOSED, _ETIMEOUT, _EFORK = -4, -5, -7  # CKV_CLOSED, ...
_INT32 = np.dtype(np.int32)
_MAX_POLLED = _MAX_ENTRIES = 256
_GRACE_S = 1.0  # for a call of the driver that locks pages


@dataclass(frozen=True)
class Tuning:
    """How a native engine copies and what its pool is made of; 0 is the library's own choice.

    `trunk_bytes` go with one driver call, `window_bytes` are under way per direction. `first_bytes`
    of the pool are locked before the engine is there, `chunk_bytes` at a time behind. `sim_mbps`:
    how fast the simulator's bus is. `num_left`: if not 0, the pool grows by use (HostPool).
    """

    trunk_bytes: int = 4 * MIB
    window_bytes: int = 16 * MIB
    path: str = "auto"
    numa: bool = True
    first_bytes: int = 0
    chunk_bytes: int = 0
    checksum_every: int = 0
    sim_mbps: int = 0
    num_left: int = 0


class NativeEngine:
    """Copies blocks on native threads, over libcuda or over a simulator. It owns the host pool.

    It submits and polls in microseconds; only `wait`, `open_disk` and `close` block. One thread
    calls all methods. Another may call `open_disk`, and, if nothing is in flight, the last one,
    `close`. Ids are checked at once, and a transfer that conflicts with an unfinished one (same
    block or slot, one of them writing) fails as CONFLICT, uncopied.
    """

    def __init__(
        self, driver: str, layout: Layout, num_slots: int, tuning: Tuning | None = None
    ) -> None:
        tuning = tuning or Tuning()
        self._blocking, self._quick = abi.load_library()
        self._handle: ctypes.c_void_p | None = None
        self._is_cuda = driver == "cuda"
        self._settled: list[Completion] = []
        self._disks: list[NativeDisk] = []
        self._buffer = (abi.RawCompletion * _MAX_POLLED)()
        self.is_left_behind = False
        config = abi.sized(
            abi.Config,
            abi=abi.ABI_VERSION,
            driver=_DRIVERS[driver],
            device=layout.device_index,
            path=PATHS[tuning.path],
            trunk_bytes=tuning.trunk_bytes,
            window_bytes=(tuning.window_bytes, tuning.window_bytes),
            checksum_every=tuning.checksum_every,
            sim_mbps=tuning.sim_mbps,
        )
        handle = ctypes.c_void_p()
        check(self._blocking.ckv_open(ctypes.byref(config), ctypes.byref(handle)))
        self._handle = handle
        try:
            self.pool = HostPool(handle, num_slots * layout.slot_bytes, tuning)
            self.pool.set_regions(layout, num_slots)
            self._paths: int = self.stats().paths
            self._pending = ctypes.c_uint64.from_address(self._blocking.ckv_pending_word(handle))
        except BaseException:
            self._blocking.ckv_free(handle)
            self._handle = None
            raise

    def pool_state(self) -> PoolState:
        """How far the host pool has grown, and what stopped it. A few microseconds.

        Slots within `ready_bytes` may be used. It never shrinks until the pool is released.
        """
        self._opened()
        return self.pool.state()

    def open_disk(self, path: str, tuning: DiskTuning) -> NativeDisk:
        """BLOCK, without the GIL, until the file at `path` has its full size and is locked. If it
        cannot be, TransferError says why. Host slots must be multiples of 4 KiB (Layout.padded)."""
        disk = NativeDisk(self._opened(), path, tuning)
        self._disks.append(disk)
        if self._handle is None:  # another thread has closed the engine meanwhile
            disk.forget()
        return disk

    def submit(
        self,
        direction: Direction,
        blocks: BlockIds,
        slots: BlockIds,
        tag: int,
        after_stream: int = 0,
    ) -> None:
        """Queue a transfer of int32 ids, of which it keeps copies; raises TransferError if the
        engine is closed or poisoned.

        `after_stream`: the CUDA stream whose queued work the copy waits for (store: compute
        done; load: block zeroing done). 0 is CUDA's default stream, never "no stream"; a simulated
        engine, whose compute is done when it is called, has nothing to wait for then.
        """
        # Between steps the CPU's caches are cold, so each line of Python counts. Ids go as bytes,
        # because numpy needs far more code for an address, and `_value_` saves Enum's property.
        raw_blocks, raw_slots = _raw(blocks, tag), _raw(slots, tag)
        if len(raw_blocks) != len(raw_slots):
            raise TransferError(
                f"transfer {tag}: {blocks.size} blocks do not pair with {slots.size} slots."
            )
        if self._is_cuda and after_stream == 0:
            after_stream = _LEGACY_STREAM
        check(
            self._quick.ckv_submit(
                self._opened(),
                direction._value_,
                0,
                raw_blocks,
                raw_slots,
                len(raw_blocks) // _INT32.itemsize,
                after_stream,
                tag,
            )
        )

    def poll(self) -> list[Completion]:
        """Return what has settled since the last poll, oldest first; also after `close`, until
        nothing is left. [] costs well under 1 us."""
        if self._handle is not None:
            return self._drain() if self._pending.value else []
        settled, self._settled = self._settled, []
        return settled

    @property
    def paths(self) -> tuple[str, ...]:
        """The ways of copying that driver and device offered when the engine was opened."""
        return tuple(name for name, bit in PATHS.items() if self._paths >> bit & 1)

    def health(self) -> Health:
        """What has failed for good, also for a poisoned engine. A path is given up when the driver
        refuses it during a copy. A few microseconds."""
        stats = self.stats()
        lost = self._paths & ~stats.paths
        return Health(stats.poison, tuple(name for name, bit in PATHS.items() if lost >> bit & 1))

    def cancel(self, tag: int) -> None:
        """Stop a transfer before its next trunk. It still completes, as CANCELLED unless it was
        faster. Does nothing if it has settled."""
        if self._handle is not None:
            check(self._quick.ckv_cancel(self._handle, tag))

    def wait(self, tag: int, timeout_s: float) -> bool:
        """Block, without the GIL, until `tag` has settled. Its completion still comes from `poll`.
        False: timeout."""
        if self._handle is None:
            return True
        return bool(self._blocking.ckv_wait(self._handle, tag, int(timeout_s * 1e6)) == 0)

    def close(self, timeout_s: float) -> None:
        """Drain for `timeout_s`, then fail the rest. What has settled can still be polled.
        Idempotent.

        If the driver does not return its copies a second later, or does not return from locking
        pages, `is_left_behind` becomes true and the pool stays mapped, because the device may still
        write to it.
        """
        handle, is_growing = self._handle, False
        if handle is None:
            return
        code = self._blocking.ckv_close(handle, int(timeout_s * 1e6))
        if code != _EFORK:
            self._settled = self._drain()
            is_growing = not self.pool.wait(_GRACE_S)
            self.is_left_behind = code != 0 or is_growing
            if not self.is_left_behind:
                self.pool.close()
        self._handle = None
        for disk in self._disks:
            disk.forget()
        if not is_growing:  # else the pool's thread is inside the driver with all of it
            self._blocking.ckv_free(handle)

    def _drain(self) -> list[Completion]:
        completions: list[Completion] = []
        while n := self._quick.ckv_poll(self._handle, self._buffer, _MAX_POLLED):
            completions += map(_completion, self._buffer[:n])
        return completions

    def _opened(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise TransferError("the copy engine is closed.")
        return self._handle

    def stats(self) -> abi.Stats:
        """What the engine did since it was opened; the pairs are (load, store)."""
        stats = abi.sized(abi.Stats)
        check(self._quick.ckv_get_stats(self._opened(), ctypes.byref(stats)))
        return stats


class HostPool:
    """`num_bytes` of zeroed memory at address `base`; belongs to one native engine.

    Under CUDA the first bytes are populated and page-locked when this returns (seconds per 10 GiB)
    and the rest follows on a native thread; what cannot be had stays out of `ready_bytes`. Under
    the simulator pages are touched only by use, and all are ready unless it grows as `want` says.
    A fork does not inherit it. One thread calls all of it, the one that submits.
    """

    def __init__(self, handle: ctypes.c_void_p, num_bytes: int, tuning: Tuning) -> None:
        self._blocking, self._quick = abi.load_library()
        base = ctypes.c_void_p()
        config = abi.sized(
            abi.PoolConfig,
            huge=True,
            numa_node=abi.NUMA_DEVICE if tuning.numa else abi.NUMA_ANY,
            bytes=num_bytes,
            chunk_bytes=tuning.chunk_bytes,
            first_bytes=min(tuning.first_bytes, num_bytes),
            wanted_bytes=min(tuning.first_bytes, num_bytes) if tuning.num_left else 0,
            num_left=tuning.num_left,
        )
        code = self._blocking.ckv_pool_map(handle, ctypes.byref(config), ctypes.byref(base))
        check(code, "no host pool")
        self._handle = handle
        self.num_bytes = num_bytes
        self.base: int = base.value or 0

    def state(self) -> PoolState:
        """How far the pool has grown. Costs microseconds."""
        if self.base == 0:
            raise TransferError("the host pool is closed.")
        raw = abi.sized(abi.RawPoolState)
        code = self._quick.ckv_pool_get_state(self._handle, self.base, ctypes.byref(raw))
        check(code, "no pool state")
        return _plain(PoolState, raw)

    def want(self, num_bytes: int) -> None:
        """Have it grow to so many bytes, if it wanted less. Costs microseconds."""
        code = self._quick.ckv_pool_want(self._handle, self.base, num_bytes)
        check(code, "the pool does not grow")

    def wait(self, timeout_s: float) -> bool:
        """Block, without the GIL, until the pool stops growing. False: it still grows."""
        code = self._blocking.ckv_pool_wait(self._handle, self.base, int(timeout_s * 1e6))
        if code != _ETIMEOUT:
            check(code, "no pool to wait for")
        return bool(code == 0)

    def set_regions(self, layout: Layout, num_slots: int) -> None:
        """Say where the blocks lie whose slots are here. To be called again after they were moved,
        with a layout that differs in nothing else; TransferError while a copy is under way."""
        size = layout.slot_bytes
        array = (abi.RawRegion * len(layout.regions))(
            *(
                abi.RawRegion(
                    r.dev_base, r.dev_stride, self.base + r.host_offset, size, r.num_bytes
                )
                for r in layout.regions
            )
        )
        shape = len(array), layout.num_blocks, num_slots
        code = self._blocking.ckv_set_regions(self._handle, array, *shape)
        check(code, "regions are not set")

    def release(self) -> None:
        """BLOCK, without the GIL, for seconds per 10 GiB, until the system has all pages back. Then
        no slot is ready. TransferError while a copy is under way."""
        code = self._blocking.ckv_pool_release(self._handle, ctypes.c_void_p(self.base))
        check(code, "the host pool keeps its pages")

    def regrow(self) -> None:
        """Have a pool that was released grow again, all of it on the native thread."""
        code = self._blocking.ckv_pool_regrow(self._handle, ctypes.c_void_p(self.base))
        check(code, "the host pool does not grow again")

    def view(self) -> npt.NDArray[np.uint8]:
        """The pool as bytes, not a copy; must not be used after `close`."""
        if self.base == 0:
            raise TransferError("the host pool is closed.")
        array_type = ctypes.c_uint8 * self.num_bytes
        return np.ctypeslib.as_array(array_type.from_address(self.base))

    def close(self) -> None:
        """Unmap. The engine refuses while it may still copy; idempotent."""
        if self.base == 0:
            return
        code = self._blocking.ckv_pool_unmap(self._handle, ctypes.c_void_p(self.base))
        check(code, "the host pool stays")
        self.base = 0


_DISK_CLOSED = "the copy engine is closed, and its files with it"


class NativeDisk:
    """A file on a disk whose reads and writes run on native threads.

    It belongs to one native engine, whose host slots it fills and empties. The thread that has the
    engine makes all calls; each takes microseconds, apart from `close`. Completions come from the
    engine's `poll`, and its `cancel` stops what has not begun. Tags are the engine's, too: nobody
    may reuse one that is unfinished. Once the engine is closed, the file says so and refuses
    everything else.
    """

    def __init__(self, engine: ctypes.c_void_p, path: str, tuning: DiskTuning) -> None:
        """BLOCKS, without the GIL, until all of the file's room is allocated on the disk."""
        self._blocking, self._quick = abi.load_library()
        self._slot_blocks = tuning.slot_blocks
        self._entries = (abi.DiskEntry * _MAX_ENTRIES)()
        config = abi.sized(
            abi.DiskConfig,
            flags=abi.DISK_KEEP,
            num_threads=tuning.num_threads,
            slot_blocks=tuning.slot_blocks,
            num_slots=tuning.num_slots,
            namespace_id=abi.NamespaceId.from_buffer_copy(tuning.namespace),
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
        check(code)
        self._handle = handle

    def submit(self, order: WriteOrder | ReadOrder) -> None:
        """Queue the order, whose keys are of equal length, 40 bytes at most; TransferError if it is
        refused. After a read that fails, host slots hold anything, but for those of disk slots that
        its completion says were copied."""
        tag, keys, n = order.transfer_id, order.keys, len(order.disk_slots)
        is_read = isinstance(order, ReadOrder)
        depths = (0,) * n if isinstance(order, ReadOrder) else order.depths
        raw_slots, raw_disk_slots = _raw(order.slots, tag), _raw(order.disk_slots, tag)
        key_bytes = len(keys[0]) if keys else 1
        if any(len(key) != key_bytes for key in keys):
            raise TransferError(f"transfer {tag}: its keys differ in length.")
        if len(order.slots) != n * self._slot_blocks or len(keys) != n or len(depths) != n:
            raise TransferError(
                f"transfer {tag}: {len(order.slots)} slots, {len(keys)} keys and {len(depths)} "
                f"depths do not go with {n} disk slots of {self._slot_blocks} blocks."
            )
        check(
            self._quick.ckv_disk_submit(
                self._opened(),
                _READ if is_read else _WRITE,
                raw_slots,
                raw_disk_slots,
                b"".join(keys),
                key_bytes,
                None if is_read else np.asarray(depths, dtype=np.uint32).tobytes(),
                n,
                tag,
            )
        )

    def scan(self, max_found: int) -> list[OnDisk]:
        """Hand over up to `max_found` of what the threads have found since the last call, each
        slot once; never one that was written meanwhile."""
        found: list[OnDisk] = []
        while self._handle is not None and len(found) < max_found:
            most = min(_MAX_ENTRIES, max_found - len(found))
            n = self._quick.ckv_disk_scan(self._handle, self._entries, most)
            found += map(_on_disk, self._entries[:n])
            if n < most:
                break
        return found

    def reset(self) -> None:
        """Make everything on the disk foreign, including what is queued or under way. The reset is
        queued, too, and durable once `state` says ready; until then `write` and `read` complete as
        CANCELLED."""
        check(self._quick.ckv_disk_reset(self._opened()))

    def state(self) -> DiskState:
        """The state of the file, also after it is closed."""
        if self._handle is None:
            return DiskState(False, False, True, False, 0.0, _CLOSED, _DISK_CLOSED)
        raw = abi.sized(abi.RawDiskState)
        check(self._quick.ckv_disk_get_state(self._handle, ctypes.byref(raw)))
        return _plain(DiskState, raw, oldest_op_s=raw.oldest_op_us / 1e6)

    def close(self, timeout_s: float) -> bool:
        """BLOCK, without the GIL, until what is under way has ended. What has not begun fails as
        closed. False: the disk did not answer in time, so threads are left behind, and the engine
        keeps its pool. Idempotent."""
        if self._handle is None:
            return True  # if not, the engine says that it left the file behind
        code = self._blocking.ckv_disk_close(self._handle, int(timeout_s * 1e6))
        if code != _ETIMEOUT:
            check(code)
        return bool(code == 0)

    def forget(self) -> None:
        """The engine is closed, and with it the library's handle of this file."""
        self._handle = None

    def _opened(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise TransferError(f"{_DISK_CLOSED}.")
        return self._handle


def check(code: int, what: str = "") -> None:
    """TransferError if a call of the library on this thread failed: `what` came of that, then its
    own words."""
    if code < 0:
        _, quick = abi.load_library()
        why = quick.ckv_last_error().decode(errors="replace")
        raise TransferError(f"{what}: {why}." if what else f"{why}.")


def _raw(ids: BlockIds, tag: int) -> bytes:
    kind = ids.dtype
    if kind is not _INT32 and kind != _INT32:  # it is the same object unless it was pickled
        raise TransferError(f"transfer {tag}: ids are {kind}, and must be int32.")
    return ids.tobytes()


def _completion(c: abi.RawCompletion) -> Completion:
    seconds = (c.done_ns - c.start_ns) / 1e9 if c.start_ns else 0.0
    errors = tuple(c.disk_errors[: c.num_disk_slots]) if c.disk_errors else ()
    return Completion(c.tag, Status(c.status), c.error, c.bytes, seconds, errors)


def _plain(kind: type[_T], raw: ctypes.Structure, **values: Any) -> _T:
    """`values`, and the other fields of `kind` as `raw` has them; `why` is text there, too."""
    values["why"] = raw.why.decode(errors="replace")
    others = [each.name for each in fields(kind) if each.name not in values]
    return kind(**values, **{name: getattr(raw, name) for name in others})


def _on_disk(entry: abi.DiskEntry) -> OnDisk:
    key = bytes(entry.key[: entry.key_bytes])
    return OnDisk(entry.slot, entry.sequence, entry.depth, key)
