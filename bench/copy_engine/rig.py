"""Rig: an engine over regions of a machine's memory, whose completions keep their times."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.copy_engine.machine import Machine
from continuum_connector.errors import ToldError
from continuum_connector.messages import BlockIds
from continuum_connector.worker import abi
from continuum_connector.worker.abi import Direction, Region
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeEngine, Tuning

WAIT_S = 120.0


def compute(seconds: float) -> None:
    """Keep the calling thread at work for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class BenchError(ToldError):
    """A measurement that went wrong; its numbers would mean nothing."""


class TimedEngine(NativeEngine):
    """A NativeEngine that hands out the library's own time stamps."""

    def poll_timed(self) -> list[abi.RawCompletion]:
        """What settled, with submit, start and end in nanoseconds."""
        found: list[abi.RawCompletion] = []
        while n := self._quick.ckv_poll(self._handle, self._buffer, len(self._buffer)):
            found += [abi.RawCompletion.from_buffer_copy(each) for each in self._buffer[:n]]
        return found


class Rig:
    """`num_blocks` blocks of `num_regions` pieces, as many slots, and ids in no order.

    Shuffled ids keep the engine from merging neighbours: a chunk size stays what it says.
    """

    def __init__(
        self,
        machine: Machine,
        num_blocks: int,
        piece_bytes: int,
        num_regions: int = 1,
        **tuning: Any,
    ) -> None:
        self.num_blocks = num_blocks
        span = num_blocks * piece_bytes
        self.vram = machine.vram(num_regions * span)
        regions = [
            Region(self.vram.data_ptr() + i * span, piece_bytes, i * piece_bytes, piece_bytes)
            for i in range(num_regions)
        ]
        where = "cpu" if machine.driver == "sim" else "cuda"
        layout = Layout(tuple(regions), num_blocks, num_regions * piece_bytes, where, 0)
        self.engine = TimedEngine(machine.driver, layout, num_blocks, Tuning(**tuning))
        if machine.driver == "sim":
            self.engine.pool.view()[:] = 2  # a first touch is not a copy
        random = np.random.default_rng(5)
        self.blocks: BlockIds = random.permutation(num_blocks).astype(np.int32)
        self.slots: BlockIds = random.permutation(num_blocks).astype(np.int32)
        self._tags = itertools.count(1)  # its next() is one step also among threads

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *ended: object) -> None:
        self.engine.close(5.0)

    def started(self) -> Rig:
        """The same, once its lane is at work: it places itself as it starts, and one that is late
        takes the core it was put on meanwhile (`another_core`) for its opener's, and leaves it."""
        self.finish(Direction.STORE, 0, 1)
        return self

    def submit(self, direction: Direction, first: int, count: int) -> int:
        """Queue `count` blocks from the `first` on; returns the tag."""
        return self.give(direction, *self.ids(first, count))

    def ids(self, first: int, count: int) -> tuple[BlockIds, BlockIds]:
        """Blocks and slots of a transfer, as a plan would bring them."""
        return self.blocks[first : first + count], self.slots[first : first + count]

    def give(self, direction: Direction, blocks: BlockIds, slots: BlockIds) -> int:
        """Queue these; returns the tag."""
        tag = next(self._tags)
        self.engine.submit(direction, blocks, slots, tag)
        return tag

    def finish(self, direction: Direction, first: int, count: int) -> abi.RawCompletion:
        """Queue, wait, and return the completion; nothing else may be under way."""
        tag = self.submit(direction, first, count)
        self.wait(tag)
        (completion,) = self.engine.poll_timed()
        return checked(completion)

    def wait(self, tag: int) -> None:
        if not self.engine.wait(tag, WAIT_S):
            raise BenchError(f"transfer {tag} took more than {WAIT_S:g} s.")


def checked(completion: abi.RawCompletion) -> abi.RawCompletion:
    """The same, if the transfer is done."""
    if completion.status != 1:
        raise BenchError(
            f"transfer {completion.tag}: status {completion.status}, error {completion.error}."
        )
    return completion


@contextlib.contextmanager
def another_core() -> Iterator[None]:
    """Threads begun inside run on the last core, the caller on the first ones ever after.

    Each is put there by its number: a lane leaves the core of a pinned opener by itself.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield
        return
    before = threads()
    try:
        yield
    finally:
        for thread in threads() - before:
            with contextlib.suppress(ProcessLookupError):  # it was a short one
                os.sched_setaffinity(thread, cores[-1:])
        os.sched_setaffinity(0, cores[:-1])


def threads() -> set[int]:
    """The system's numbers of this process' threads."""
    return {int(name) for name in os.listdir("/proc/self/task")}


@contextlib.contextmanager
def same_cores_afterwards() -> Iterator[None]:
    """Undo what `another_core` did to the caller."""
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
