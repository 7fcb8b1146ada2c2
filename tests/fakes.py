"""Fakes that keep the rules of what they stand for, and fail the test that breaks one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from continuum_connector.errors import TransferError
from continuum_connector.messages import BlockIds
from continuum_connector.scheduler.holds import Hold, HoldTable
from continuum_connector.scheduler.kv_groups import ids_of
from continuum_connector.worker.abi import Completion, Direction, Health, PoolState, Status

BLOCK_BYTES = 1000
BLOCK_SECONDS = 0.001


@dataclass
class FakeClock:
    """Time that moves when told to. Call it for `now`."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        assert seconds >= 0
        self.now += seconds
        return self.now


def poll(worker: Any) -> tuple[set[str], set[str]]:
    """Poll a worker half as vLLM's hooks do: one that is idle is passed by (connector.py)."""
    return (set(), set()) if worker.is_idle else worker.poll()


@dataclass(frozen=True)
class Submitted:
    """One call of `submit`."""

    direction: Direction
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    tag: int
    after_stream: int


@dataclass
class FakeCopyEngine:
    """A NativeEngine whose transfers settle when the test says so (at once with `hold=False`).

    Asserts what the worker and the scheduler owe an engine: int32 ids of one length and not
    none, tags in flight only once, nothing touched by two transfers in flight of which one
    writes it, no load from a slot that was never stored (with `num_slots`), no call after close.
    """

    num_slots: int = 0
    num_ready: int = 0
    slot_bytes: int = BLOCK_BYTES
    is_growing: bool = False
    why: str = ""  # what stopped the pool early
    hold: bool = True
    log: list[Submitted] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    waited: list[tuple[int, float]] = field(default_factory=list)
    closed: bool = False
    poisoned: bool = False  # every submit is refused
    given_up: tuple[str, ...] = ()
    in_flight: dict[int, Submitted] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)
    _done: list[Completion] = field(default_factory=list)
    moved: list[Any] = field(default_factory=list)  # the layouts it was told of since
    is_released: bool = False
    wanted: list[int] = field(default_factory=list)  # bytes, each time more were asked for
    wanted_bytes: int = 2**63  # where the pool waits

    @property
    def pool(self) -> FakeCopyEngine:
        return self

    def set_regions(self, layout: Any, num_slots: int) -> None:
        assert not self.in_flight, "VRAM is moved under a copy"
        self.moved.append(layout)

    def release(self) -> None:
        assert not self.in_flight, "DRAM is given back under a copy"
        self.is_released, self.num_ready = True, 0
        self.stored.clear()

    def regrow(self) -> None:
        assert self.is_released
        self.is_released, self.is_growing = False, True

    def want(self, num_bytes: int) -> None:
        self.wanted.append(num_bytes)
        self.wanted_bytes = max(self.wanted_bytes, num_bytes)

    def pool_state(self) -> PoolState:
        assert not self.closed
        ready = self.num_ready * self.slot_bytes
        wanted = self.wanted_bytes
        return PoolState(ready, ready, self.is_growing, self.why, 0, 2.0, 1.0, wanted)

    def submit(
        self,
        direction: Direction,
        blocks: BlockIds,
        slots: BlockIds,
        tag: int,
        after_stream: int = 0,
    ) -> None:
        if self.closed or self.poisoned:
            raise TransferError("the engine is closed" if self.closed else "the driver failed")
        assert str(blocks.dtype) == str(slots.dtype) == "int32"
        assert len(blocks) == len(slots) > 0, "an engine gets no empty transfer"
        assert tag not in self.in_flight, f"transfer {tag} is in flight already"
        new = Submitted(direction, tuple(blocks.tolist()), tuple(slots.tolist()), tag, after_stream)
        for other in self.in_flight.values():
            _assert_apart(new, other)
        if self.num_slots:
            assert max(new.slots) < self.num_slots
            if direction is Direction.LOAD:
                assert self.stored.issuperset(new.slots), "a slot is loaded that was never stored"
            else:
                self.stored.difference_update(new.slots)
        self.log.append(new)
        self.in_flight[tag] = new
        if not self.hold:
            self.settle(tag)

    def settle(self, tag: int, status: Status = Status.DONE, error: int = 0) -> None:
        """End one transfer; its completion comes with the next poll."""
        order = self.in_flight.pop(tag)
        done = status is Status.DONE
        if done and order.direction is Direction.STORE:
            self.stored.update(order.slots)
        num_blocks = len(order.blocks) if done else 0
        self._done.append(
            Completion(tag, status, error, num_blocks * BLOCK_BYTES, num_blocks * BLOCK_SECONDS)
        )

    def fail(self, tag: int, error: int = 1) -> None:
        self.settle(tag, Status.FAILED, error)

    def settle_all(self) -> None:
        for tag in list(self.in_flight):
            self.settle(tag, Status.CANCELLED if tag in self.cancelled else Status.DONE)

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def health(self) -> Health:
        assert not self.closed
        return Health(700 if self.poisoned else 0, self.given_up)

    def cancel(self, tag: int) -> None:
        assert not self.closed
        self.cancelled.append(tag)

    def wait(self, tag: int, timeout_s: float) -> bool:
        assert not self.closed
        self.waited.append((tag, timeout_s))
        if tag in self.in_flight and tag in self.cancelled:
            self.settle(tag, Status.CANCELLED)
        return tag not in self.in_flight

    def close(self, timeout_s: float) -> None:
        assert timeout_s > 0
        for tag in list(self.in_flight):
            self.settle(tag, Status.CANCELLED)
        self.closed = True


def _assert_apart(new: Submitted, other: Submitted) -> None:
    """Two copies in flight may both read the same memory, but none writes what another touches."""
    loads = Direction.LOAD in (new.direction, other.direction)
    stores = Direction.STORE in (new.direction, other.direction)
    if loads:
        both = set(new.blocks) & set(other.blocks)
        assert not both, f"VRAM blocks {both} are loaded while transfer {other.tag} copies them"
    if stores:
        both = set(new.slots) & set(other.slots)
        assert not both, f"slots {both} are written while transfer {other.tag} copies them"


@dataclass(eq=False)
class FakeBlock:
    """A KVCacheBlock, as far as we read it."""

    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None


class FakeBlockPool:
    """vLLM's BlockPool: references and the order in which free blocks are given out.

    Block 0 is the null block, neither held nor free. Asserts that no block is freed twice.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_gpu_blocks = num_blocks
        self.blocks = [FakeBlock(i, block_hash=b"%d" % i) for i in range(num_blocks)]
        self.free = self.blocks[1:]

    def take(self, number: int) -> list[FakeBlock]:
        """Give out free blocks, as to a request."""
        assert number <= len(self.free)
        taken, self.free = self.free[:number], self.free[number:]
        for block in taken:
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[FakeBlock]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"block {block.block_id} was freed twice"
            if block.ref_cnt == 0:
                self.free.append(block)

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def state(self) -> tuple[list[int], list[int]]:
        """The free queue in order, and every reference count."""
        return [block.block_id for block in self.free], [block.ref_cnt for block in self.blocks]


def taken(holds: HoldTable, blocks: Sequence[FakeBlock]) -> Hold:
    """Hold these blocks."""
    return holds.take(blocks, ids_of(blocks))


def mount_tmpfs(folder: Path, ends: ExitStack, *options: str) -> None:
    """Make `folder` a file system of its own until `ends`, which has such `options`; skips the test
    where that cannot be."""
    folder.mkdir(mode=0o700)
    said = ",".join((*options, "mode=700"))
    mount = ["mount", "-t", "tmpfs", "-o", said, "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("only root may mount a file system, and not everywhere")
    ends.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
