"""A tier that is given up while it copies: the bytes are right, and the memory goes back."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import TransferError
from continuum_connector.messages import (
    LoadOrder,
    StepPlan,
    StoreOrder,
    TransferOutcome,
    WorkerReport,
)
from continuum_connector.worker.abi import PoolState, Region
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeEngine, Tuning
from continuum_connector.worker.worker import ContinuumWorker
from tests.fakes import poll
from tests.native import sim
from tests.native.conftest import LIMIT_S, ids
from tests.unit.test_giving_up import closers, join_closers

BLOCK = 1 << 22
NUM_BLOCKS, NUM_SLOTS = 8, 256  # 1 GiB of slots, of which nobody touches more than a few


class Growing(NativeEngine):
    """Its pool is one slot short at the least, and grows until it `fails`."""

    fails = False

    def pool_state(self) -> PoolState:
        if self.fails:
            raise TransferError("the pool cannot be asked any more")
        state = super().pool_state()
        ready = min(state.ready_bytes, (NUM_SLOTS - 1) * BLOCK)
        return dataclasses.replace(state, ready_bytes=ready, is_growing=True)


class Rank:
    """A worker whose transfer 1 (load, for a) and 2 (store) the driver holds; slot 3 has 7s."""

    def __init__(
        self,
        driver: str = "sim",
        add_vram: Callable[[np.ndarray], None] = lambda vram: None,
        hold: Callable[[int], None] | None = None,
    ) -> None:
        self.vram = np.zeros((NUM_BLOCKS, BLOCK), np.uint8)
        self.driver = driver
        add_vram(self.vram)
        config = ContinuumConfig(dram_bytes=NUM_SLOTS * BLOCK)
        self.worker = ContinuumWorker(self._make, config)
        region = Region(self.vram.ctypes.data, BLOCK, 0, BLOCK)
        self.worker.register(Layout((region,), NUM_BLOCKS, BLOCK, "cpu", 0))
        self.base = self.engine.pool.base
        self.engine.pool.view()[3 * BLOCK : 4 * BLOCK] = 7
        hold(1) if hold else sim.hold(self.engine)
        load, store = LoadOrder(1, "a", ids(0), ids(3)), StoreOrder(2, ids(1), ids(4))
        self.worker.begin(StepPlan((load,), (store,)))
        self.worker.submit_stores()
        self.tell()

    def _make(self, layout: Layout, num_slots: int) -> Growing:
        tuning = Tuning(first_bytes=5 * BLOCK, chunk_bytes=BLOCK)
        self.engine = Growing(self.driver, layout, num_slots, tuning)
        return self.engine

    def tell(self) -> tuple[set[str], WorkerReport]:
        finished, failed = poll(self.worker)
        assert not failed
        return finished, self.worker.take_report() or WorkerReport()

    def give_up(self) -> None:
        self.engine.fails = True
        finished, report = self.tell()
        assert (finished, report.outcomes, bool(report.tier_down)) == (set(), {}, True)

    def settle(self) -> tuple[set[str], dict[int, TransferOutcome]]:
        """Poll until both are settled, and wait until the engine is closed."""
        finished, outcomes = set(), {}
        for tag in (1, 2):
            assert self.engine.wait(tag, LIMIT_S)
        while len(outcomes) < 2:
            also, report = self.tell()
            finished |= also
            outcomes |= report.outcomes
        join_closers()
        return finished, outcomes

    def is_mapped(self) -> bool:
        """Whether all of the pool is; a part of the place may be somebody else's later."""
        num_bytes = 0
        for line in Path("/proc/self/maps").read_text().splitlines():
            found = re.match(r"(\w+)-(\w+) ", line)
            assert found
            begin, end = (int(each, 16) for each in found.groups())
            size = NUM_SLOTS * BLOCK
            num_bytes += max(0, min(end, self.base + size) - max(begin, self.base))
        return num_bytes == NUM_SLOTS * BLOCK


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    if made.worker._engine is not None:
        sim.release(made.engine)
    made.worker.shutdown()
    assert closers() == []


def test_the_bytes_arrive_and_then_the_pool_is_unmapped(rank: Rank) -> None:
    rank.give_up()
    for _ in range(3):
        assert rank.tell() == (set(), WorkerReport())
    assert rank.is_mapped()
    assert closers() == []
    assert not rank.vram.any()
    sim.release(rank.engine)
    finished, outcomes = rank.settle()
    assert (finished, [each.num_done for each in outcomes.values()]) == ({"a"}, [1, 1])
    assert (rank.vram[0] == 7).all()
    assert not rank.is_mapped()
    assert not rank.engine.is_left_behind
    assert rank.tell() == (set(), WorkerReport())


def test_a_stop_gives_the_pool_back_in_each_state(rank: Rank) -> None:
    rank.give_up()
    sim.release(rank.engine)
    rank.worker.shutdown()
    rank.worker.shutdown()
    finished, failed = poll(rank.worker)
    report = rank.worker.take_report()
    assert report is not None
    assert report.outcomes.keys() == {1, 2}
    # The load was faster than its cancel, or it failed, and then its request hears of it.
    assert finished == {"a"}
    assert failed == ({"a"} if report.outcomes[1].num_failed else set())
    assert not rank.is_mapped()


def test_a_tier_that_is_given_up_leaves_no_thread() -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    before = threads()  # one of an earlier test may be among them, and go
    for _ in range(3):
        rank = Rank()
        rank.give_up()
        sim.release(rank.engine)
        rank.settle()
        rank.worker.shutdown()
        assert not rank.is_mapped()
    deadline = time.monotonic() + 30.0
    while threads() - before and time.monotonic() < deadline:
        os.sched_yield()  # the kernel lists a thread for a moment after it was joined
    assert not threads() - before
