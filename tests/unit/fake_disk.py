"""A NativeDisk that does what a test says, and the engine that opens it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

from continuum_connector.errors import TransferError
from continuum_connector.messages import OnDisk, ReadOrder, WriteOrder
from continuum_connector.worker.abi import Completion, DiskState, DiskTuning, Status
from tests.fakes import BLOCK_BYTES, FakeCopyEngine

IDLE = DiskState(
    is_direct=True,
    was_kept=False,
    is_scanned=True,
    is_ready=True,
    oldest_op_s=0.0,
    error=0,
    why="",
)


@dataclass
class FakeDiskFile:
    """Its orders end when the test says so. Asserts what the worker owes a disk: int32 host slots,
    as many per disk slot as it takes, a key for each, no call after close."""

    path: str
    tuning: DiskTuning
    now: DiskState = IDLE
    log: list[tuple[str, object]] = field(default_factory=list)
    in_flight: set[int] = field(default_factory=set)
    left: list[OnDisk] = field(default_factory=list)  # what a restart would still find
    answers_close: bool = True
    closed: bool = False
    refuses: bool = False
    done: list[Completion] = field(default_factory=list)

    def submit(self, order: WriteOrder | ReadOrder) -> None:
        slots, disk_slots, tag = order.slots, order.disk_slots, order.transfer_id
        assert not self.closed
        if self.refuses:
            raise TransferError("disk slot 9 is not in 0..8")
        if isinstance(order, WriteOrder):
            assert len(order.depths) == len(disk_slots)
            assert min(slots) >= 0
        assert str(slots.dtype) == str(disk_slots.dtype) == "int32"
        assert len(slots) == len(disk_slots) * self.tuning.slot_blocks > 0
        assert len(order.keys) == len(disk_slots)
        assert max(disk_slots) < self.tuning.num_slots
        assert tag not in self.in_flight
        self.in_flight.add(tag)
        self.log.append(("write" if isinstance(order, WriteOrder) else "read", tag))

    def settle(self, tag: int, error: int = 0, disk_errors: tuple[int, ...] = ()) -> None:
        self.in_flight.remove(tag)
        status, num_bytes = Status.FAILED if error else Status.DONE, 0 if error else BLOCK_BYTES
        self.done.append(Completion(tag, status, error, num_bytes, 0.25, disk_errors))

    def scan(self, max_found: int) -> list[OnDisk]:
        assert not self.closed
        assert max_found > 0
        found, self.left = self.left[:max_found], self.left[max_found:]
        return found

    def reset(self) -> None:
        assert not self.closed
        self.left.clear()
        self.log.append(("reset", None))

    def state(self) -> DiskState:
        assert not self.closed
        return replace(self.now, is_scanned=not self.left)

    def close(self, timeout_s: float) -> bool:
        assert timeout_s > 0
        assert not self.closed
        self.closed = self.answers_close
        return self.answers_close


@dataclass
class EngineWithDisk(FakeCopyEngine):
    """`gate` holds the open back until it is set; `refusal`, if any, is what it says instead, and
    `bug` what it dies of."""

    gate: threading.Event = field(default_factory=threading.Event)
    refusal: str = ""
    bug: Exception | None = None
    disk: FakeDiskFile | None = None
    was_closed_first: bool = False

    def open_disk(self, path: str, tuning: DiskTuning) -> FakeDiskFile:
        self.gate.wait()
        assert not self.closed, "the engine was closed under an open"
        if self.bug is not None:
            raise self.bug
        if self.refusal:
            raise TransferError(self.refusal)
        Path(path).touch()
        self.disk = FakeDiskFile(path, tuning)
        return self.disk

    def poll(self) -> list[Completion]:
        done = super().poll()
        if self.disk is not None:
            done, self.disk.done = done + self.disk.done, []
        return done

    def close(self, timeout_s: float) -> None:
        self.was_closed_first = self.disk is not None and not self.disk.closed
        super().close(timeout_s)
