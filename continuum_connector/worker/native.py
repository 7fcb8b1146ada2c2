"""NativeEngine: the CopyEngine of csrc/, over ctypes.

tell_paths logs at the start which ways of copying an engine has. If a driver or device lacks one,
the engine uses the others, so nothing else would show it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from continuum_connector.errors import ConfigError, TransferError
from continuum_connector.messages import BlockIds
from continuum_connector.worker import abi
from continuum_connector.worker.disk_file import NativeDisk
from continuum_connector.worker.engine import (
    Completion,
    Direction,
    DiskTuning,
    Health,
    PoolState,
    Status,
)
from continuum_connector.worker.pool import HostPool, Stages

if TYPE_CHECKING:
    from continuum_connector.worker.layout import Layout

logger = logging.getLogger(f"vllm.{__name__}")

MIB = 1 << 20

_DRIVERS = {"cuda": 1, "sim": 2}
PATHS = {"auto": 0, "batch": 1, "loop": 2, "gather": 3}
_LEGACY_STREAM = 1  # CU_STREAM_LEGACY: torch's default stream, whose own handle is 0
_EFORK = -7
_INT32 = np.dtype(np.int32)
_MAX_POLLED = 256
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
    """A CopyEngine whose copies run on native threads, over libcuda or over a simulator.

    It owns the host pool. Ids are checked at once, and a transfer that conflicts with an
    unfinished one (same block or slot, one of them writing) fails as CONFLICT, uncopied.
    """

    def __init__(
        self, driver: str, layout: Layout, num_slots: int, tuning: Tuning | None = None
    ) -> None:
        _check(driver, layout, num_slots)
        tuning = tuning or Tuning()
        self._blocking, self._quick = abi.load_library()
        self._handle: ctypes.c_void_p | None = None
        self._is_cuda = driver == "cuda"
        self._settled: list[Completion] = []
        self._disks: list[NativeDisk] = []
        self._buffer = (abi.RawCompletion * _MAX_POLLED)()
        self.is_left_behind = False
        config = abi.Config(
            size=ctypes.sizeof(abi.Config),
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
        self._check(self._blocking.ckv_open(ctypes.byref(config), ctypes.byref(handle)))
        self._handle = handle
        try:
            self.pool = HostPool(
                handle,
                num_slots * layout.slot_bytes,
                tuning.numa,
                Stages(tuning.first_bytes, tuning.chunk_bytes, tuning.num_left),
            )
            self.pool.set_regions(layout, num_slots)
            self._paths: int = self.stats().paths
            self._pending = ctypes.c_uint64.from_address(self._blocking.ckv_pending_word(handle))
        except BaseException:
            self._blocking.ckv_free(handle)
            self._handle = None
            raise

    def pool_state(self) -> PoolState:
        """How far the host pool has grown, and what stopped it."""
        self._opened()
        return self.pool.state()

    def wait_pool(self, timeout_s: float) -> bool:
        """Block, without the GIL, until the host pool stops growing. False: timeout."""
        self._opened()
        return self.pool.wait(timeout_s)

    def open_disk(self, path: str, tuning: DiskTuning) -> NativeDisk:
        """BLOCK, without the GIL, until there is a file at `path`; see CopyEngine."""
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
        *,
        speculative: bool = False,
    ) -> None:
        """Queue a transfer. Under CUDA, stream 0 is the default stream, never "no stream"."""
        # Between steps the CPU's caches are cold, so each line of Python counts. Ids go as bytes,
        # because numpy needs far more code for an address, and `_value_` saves Enum's property.
        raw_blocks, raw_slots = _raw(blocks, tag), _raw(slots, tag)
        if len(raw_blocks) != len(raw_slots):
            raise TransferError(
                f"transfer {tag}: {blocks.size} blocks do not pair with {slots.size} slots."
            )
        if self._is_cuda and after_stream == 0:
            after_stream = _LEGACY_STREAM
        self._check(
            self._quick.ckv_submit(
                self._opened(),
                direction._value_,
                abi.SPECULATIVE if speculative else 0,
                raw_blocks,
                raw_slots,
                len(raw_blocks) // _INT32.itemsize,
                after_stream,
                tag,
            )
        )

    def poll(self) -> list[Completion]:
        """Return what has settled, oldest first; also after `close`, until nothing is left."""
        if self._handle is not None:
            return self._drain() if self._pending.value else []
        settled, self._settled = self._settled, []
        return settled

    @property
    def paths(self) -> tuple[str, ...]:
        """The ways of copying that driver and device offered when the engine was opened."""
        return tuple(name for name, bit in PATHS.items() if self._paths >> bit & 1)

    def health(self) -> Health:
        """What has failed for good. A path is given up when the driver refuses it during a copy."""
        stats = self.stats()
        lost = self._paths & ~stats.paths
        return Health(stats.poison, tuple(name for name, bit in PATHS.items() if lost >> bit & 1))

    def cancel(self, tag: int) -> None:
        """Stop a transfer before its next trunk. Does nothing if it has settled."""
        if self._handle is not None:
            self._check(self._quick.ckv_cancel(self._handle, tag))

    def wait(self, tag: int, timeout_s: float) -> bool:
        """Block, without the GIL, until `tag` has settled."""
        if self._handle is None:
            return True
        return bool(self._blocking.ckv_wait(self._handle, tag, int(timeout_s * 1e6)) == 0)

    def close(self, timeout_s: float) -> None:
        """Drain for `timeout_s`, then fail the rest. What has settled can still be polled.

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

    def _check(self, code: int) -> None:
        if code < 0:
            raise TransferError(f"{self._quick.ckv_last_error().decode()}.")

    def stats(self) -> abi.Stats:
        """What the engine did since it was opened; the pairs are (load, store)."""
        stats = abi.Stats(size=ctypes.sizeof(abi.Stats))
        self._check(self._quick.ckv_get_stats(self._opened(), ctypes.byref(stats)))
        return stats


def _raw(ids: BlockIds, tag: int) -> bytes:
    kind = ids.dtype
    if kind is not _INT32 and kind != _INT32:  # it is the same object unless it was pickled
        raise TransferError(f"transfer {tag}: ids are {kind}, and must be int32.")
    return ids.tobytes()


def _completion(c: abi.RawCompletion) -> Completion:
    seconds = (c.done_ns - c.start_ns) / 1e9 if c.start_ns else 0.0
    errors = tuple(c.disk_errors[: c.num_disk_slots]) if c.disk_errors else ()
    return Completion(c.tag, Status(c.status), c.error, c.bytes, seconds, errors)


def _check(driver: str, layout: Layout, num_slots: int) -> None:
    slot_bytes = layout.slot_bytes
    if driver not in _DRIVERS:
        raise ConfigError(f"driver {driver!r} is unknown; choose from {', '.join(_DRIVERS)}.")
    if num_slots < 1 or slot_bytes < 1:
        raise ConfigError(f"{num_slots} slots of {slot_bytes} bytes hold nothing.")
    if num_slots >= 1 << 31 or num_slots * slot_bytes >= 1 << 63:
        raise ConfigError(f"{num_slots} slots of {slot_bytes} bytes are more than can be counted.")
    for region in layout.regions:
        if region.host_offset < 0 or region.host_offset + region.num_bytes > slot_bytes:
            raise ConfigError(f"{region} does not fit a slot of {slot_bytes} bytes.")


# What each path was made for: the driver's CUDA version, and the release that came with it.
MADE_FOR = {
    "batch": (12080, 570),  # cuMemcpyBatchAsync
    "gather": (12000, 525),  # the compiler of csrc/gather_fatbin.inc
}
WITHOUT = {
    "batch": "no batch, so each piece is a call of its own",
    "gather": "no gather kernel for loads of small pieces, which go as all others",
}


def tell_paths(driver: str, paths: Collection[str]) -> None:
    """Log the paths (`batch`, `loop`, `gather`) that the engine found over `driver` on opening."""
    logger.info("%s", describe(driver, paths, cuda_version() if driver == "cuda" else 0))


def describe(driver: str, paths: Collection[str], version: int) -> str:
    """The log line. `version`: the driver's CUDA, where 12080 is 12.8; 0 if unknown or no CUDA."""
    over = "the simulator" if driver == "sim" else f"CUDA {_dotted(version)}".rstrip()
    said = f"blocks are copied over {over} by {', '.join(paths)}"
    for path, (needed, release) in MADE_FOR.items():
        if path in paths:
            continue
        is_old = 0 < version < needed
        why = f"made for CUDA {_dotted(needed)}, driver {release}" if is_old else "refused here"
        said += f"; {WITHOUT[path]} ({why})"
    return said


def cuda_version() -> int:
    """The loaded driver's CUDA version, 0 if it gives none. Microseconds; needs no context."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}" if version else ""
