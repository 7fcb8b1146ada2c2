"""The engine's disk threads, timed: so many slots of one size under way, written or read."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from continuum_connector.errors import TransferError
from continuum_connector.worker.abi import DISK_UNSUMMED
from continuum_connector.worker.disk_file import NativeDisk
from continuum_connector.worker.engine import Completion, DiskTuning, Region, Status
from continuum_connector.worker.layout import DISK_UNIT, Layout
from continuum_connector.worker.native import NativeEngine

LIMIT_S = 300.0
GB = 1e9
_KEY = b"bench" + b"\0" * 31
_QUEUED = 3  # transfers of `depth` slots: while one is handed over the threads have others


@dataclass(frozen=True)
class Shape:
    """What is moved: `total_bytes` in slots of `slot_bytes`, `depth` of them under way."""

    slot_bytes: int
    depth: int
    total_bytes: int
    writes: bool

    @property
    def num_orders(self) -> int:
        """Transfers of `depth` slots."""
        return max(1, self.total_bytes // self.slot_bytes // self.depth)

    def __str__(self) -> str:
        size = self.slot_bytes // 1024
        text = f"{size} KiB" if size < 1024 else f"{size // 1024} MiB"
        return f"{'write' if self.writes else 'read'} {text}, {self.depth} deep"


@dataclass(frozen=True)
class Sample:
    """One run: what went through per second, and CPU time for each GB of it."""

    gb_per_s: float
    cpu_ms_per_gb: float


class Threads:
    """An engine over the simulated driver, and a file of its own, for one shape.

    The file is written once as a whole: first writes into preallocated space take twice as long,
    and what was never written is read without the drive.
    """

    def __init__(self, folder: Path, shape: Shape, sums: bool) -> None:
        self.shape = shape
        self.path = folder / f"threads-{shape.slot_bytes}-{int(sums)}.slab"
        self._vram = np.zeros(DISK_UNIT, dtype=np.uint8)
        region = Region(self._vram.ctypes.data, DISK_UNIT, 0, DISK_UNIT)
        layout = Layout((region,), 1, shape.slot_bytes, "cpu", 0)
        self._engine = NativeEngine("sim", layout, _QUEUED * shape.depth)
        self._tag = 0
        self._under_way: dict[int, int] = {}  # tag -> which part of the pool; of `follow`
        view = self._engine.pool.view()
        view[:] = np.random.default_rng(1).integers(0, 256, len(view), dtype=np.uint8)
        num_slots = shape.num_orders * shape.depth
        num_threads = shape.depth * (2 if shape.writes else 1)  # half of them write
        tuning = DiskTuning(num_slots, 1, b"\1" * 32, "{}", num_threads=num_threads)
        flags = 0 if sums else DISK_UNSUMMED
        self._disk = NativeDisk(self._engine._opened(), str(self.path), tuning, flags)
        self.is_direct = self._disk.state().is_direct
        self._run(writes=True)

    def sample(self) -> Sample:
        """Move all slots once, in no order."""
        before, began = _cpu_s(), time.perf_counter()
        num_bytes = self._run(self.shape.writes)
        seconds, cpu_s = time.perf_counter() - began, _cpu_s() - before
        return Sample(num_bytes / GB / seconds, cpu_s * 1e3 / (num_bytes / GB))

    def follow(self) -> int:
        """Take what was read, ask for more, wait for nothing, as a worker does in each step;
        returns how many bytes came."""
        shape, num_bytes = self.shape, self._took()
        free = [part for part in range(_QUEUED) if part not in self._under_way.values()]
        for part in free:
            first = self._tag * shape.depth
            disk_slots = np.arange(first, first + shape.depth) % (shape.num_orders * shape.depth)
            slots = np.arange(part * shape.depth, (part + 1) * shape.depth, dtype=np.int32)
            keys = [_KEY] * shape.depth
            self._disk.read(slots, disk_slots.astype(np.int32), keys, self._tag)
            self._under_way[self._tag] = part
            self._tag += 1
        return num_bytes

    def rest(self) -> None:
        """Wait until nothing is under way."""
        while self._under_way:
            self._engine.wait(next(iter(self._under_way)), LIMIT_S)
            self._took()

    def _took(self) -> int:
        num_done = 0
        for done in self._engine.poll():
            _check(done)
            del self._under_way[done.tag]
            num_done += 1
        return num_done * self.shape.depth * self.shape.slot_bytes

    def _run(self, writes: bool) -> int:
        shape = self.shape
        orders = np.random.default_rng(self._tag).permutation(shape.num_orders * shape.depth)
        first = self._tag
        for i, disk_slots in enumerate(orders.astype(np.int32).reshape(-1, shape.depth)):
            if i >= _QUEUED:
                self._end(first + i - _QUEUED)
            at = i % _QUEUED * shape.depth
            slots = np.arange(at, at + shape.depth, dtype=np.int32)
            keys = [_KEY] * shape.depth
            if writes:
                self._disk.write(slots, disk_slots, keys, [0] * shape.depth, self._tag)
            else:
                self._disk.read(slots, disk_slots, keys, self._tag)
            self._tag += 1
        for tag in range(max(first, self._tag - _QUEUED), self._tag):
            self._end(tag)
        return orders.size * shape.slot_bytes

    def _end(self, tag: int) -> None:
        if not self._engine.wait(tag, LIMIT_S):
            raise TransferError(f"the disk did not answer in {LIMIT_S:g} s.")
        for done in self._engine.poll():
            _check(done)

    def close(self) -> None:
        """Close the file and remove it."""
        self._engine.close(LIMIT_S)
        self.path.unlink(missing_ok=True)


def _check(done: Completion) -> None:
    if done.status is not Status.DONE:
        raise TransferError(f"a transfer failed with {done.error}.")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
