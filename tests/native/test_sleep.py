"""A KV cache that is taken away and comes back elsewhere, over the real engine: nothing touches
where it was, for that is unmapped, and whoever did would end the process."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import TransferError
from continuum_connector.messages import LoadOrder, ReadOrder, StepPlan, StoreOrder, WorkerReport
from continuum_connector.worker.abi import Direction, Region
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeEngine, Tuning
from continuum_connector.worker.worker import ContinuumWorker
from tests.fakes import poll
from tests.native import sim
from tests.native.conftest import LIMIT_S, Rig, ids
from tests.native.test_worker_disk import BLOCK as BLOCK_OF_DISK
from tests.native.test_worker_disk import KEYS, Life, write

LOAD, STORE = Direction.LOAD, Direction.STORE
NUM_BLOCKS, BLOCK = 16, 65536


class Cache:
    """A rank whose KV cache lies in mappings of its own, one after the other."""

    def __init__(self, sleep_dram: str = "keep", mbps: int = 0) -> None:
        config = ContinuumConfig(dram_bytes=NUM_BLOCKS * BLOCK, sleep_dram=sleep_dram)
        self.vram = _mapped()
        self.worker = ContinuumWorker(
            lambda each, n: NativeEngine("sim", each, n, Tuning(sim_mbps=mbps)), config
        )
        self.worker.register(self.layout())
        self.engine: NativeEngine = self.worker._engine  # type: ignore[assignment]
        sim.watch(self.engine)
        self.report = WorkerReport()

    def layout(self) -> Layout:
        region = Region(self.vram.ctypes.data, BLOCK, 0, BLOCK)
        return Layout((region,), NUM_BLOCKS, BLOCK, "cpu", 0)

    def step(self, epoch: int, *orders: LoadOrder | StoreOrder) -> None:
        loads = tuple(each for each in orders if isinstance(each, LoadOrder))
        stores = tuple(each for each in orders if isinstance(each, StoreOrder))
        self.worker.begin(StepPlan(loads=loads, stores=stores, epoch=epoch))
        self.worker.submit_stores()

    def settle(self) -> dict[int, tuple[str, ...]]:
        """How each order so far went."""
        for tag in self.worker._in_flight:
            assert self.engine.wait(tag, LIMIT_S)
        poll(self.worker)
        if report := self.worker.take_report():
            self.report.merge(report)
        return {each: outcome.reasons for each, outcome in self.report.outcomes.items()}

    def remap(self) -> None:
        """The KV cache is at another address; at the old one there is nothing."""
        old, self.vram = self.vram, _mapped()
        _unmap(old)


def _mapped() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, NUM_BLOCKS * BLOCK), np.uint8)


def _unmap(array: np.ndarray) -> None:
    """Also where somebody still has the array; it must not be used."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.munmap(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)) == 0


def orders(kind: type, first: int, blocks: range) -> list[LoadOrder | StoreOrder]:
    if kind is LoadOrder:
        return [LoadOrder(first + b, f"r{b}", ids(b), ids(b)) for b in blocks]
    return [StoreOrder(first + b, ids(b), ids(b)) for b in blocks]


UNDER_WAY = """
from tests.native.test_sleep import *
cache = Cache(mbps=50)
cache.vram[:] = 7
cache.step(1, *orders(StoreOrder, 0, range(8)))
assert set(cache.settle().values()) == {()}
# Slow copies both ways, and some that no hook has given to the engine yet.
cache.step(1, *orders(LoadOrder, 100, range(8)), *orders(StoreOrder, 200, range(8, 16)))
cache.worker.begin(StepPlan(loads=tuple(orders(LoadOrder, 300, range(8)))))
cache.worker.fall_asleep()
cache.remap()
cache.step(1, *orders(LoadOrder, 400, range(8)), *orders(StoreOrder, 500, range(8, 16)))
how = cache.settle()
assert {how[400], how[500 + 8], how[300]} == {("asleep",)}, how
assert {how[100 + b] for b in range(8)} <= {("asleep",), ("cancelled",)}, how  # none has come
cache.worker.wake_up(cache.layout())
assert not cache.vram.any()
cache.step(1, *orders(LoadOrder, 600, range(8)))
assert cache.settle()[600] == ()
assert (cache.vram[: 8 * BLOCK] == 7).all() and not cache.vram[8 * BLOCK :].any()
print(sim.stats(cache.engine).num_violations)
cache.worker.shutdown()
"""


def test_nothing_reads_or_writes_where_the_kv_cache_was() -> None:
    """The old mapping is gone: a copy that came late would end that process with a signal."""
    done = subprocess.run(
        [sys.executable, "-c", UNDER_WAY],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_blocks_are_moved_only_while_nothing_is_under_way_and_only_as_they_are(rig: Rig) -> None:
    moved = rig.vram.copy()
    regions = tuple(
        Region(moved[i].ctypes.data, Rig.PIECE, i * Rig.PIECE, Rig.PIECE) for i in range(2)
    )
    layout = Layout(regions, Rig.NUM_BLOCKS, 2 * Rig.PIECE, "cpu", 0)
    sim.hold(rig.engine)
    rig.engine.submit(STORE, ids(1), ids(1), 1)
    for refused in (rig.engine.pool.release, lambda: rig.engine.pool.set_regions(layout, 24)):
        with pytest.raises(TransferError, match="stay while 1 transfers are unfinished"):
            refused()
    sim.release(rig.engine)
    assert rig.engine.wait(1, LIMIT_S)
    rig.engine.poll()
    swapped = Layout(regions[::-1], Rig.NUM_BLOCKS, 2 * Rig.PIECE, "cpu", 0)
    with pytest.raises(TransferError, match="must be what they were"):
        rig.engine.pool.set_regions(swapped, 24)
    rig.engine.pool.set_regions(layout, 24)
    moved[:] = 0
    rig.vram[:] = 9
    rig.finish(LOAD, ids(2), ids(1), 2)
    assert moved[:, 2].any()
    assert (rig.vram == 9).all()


def test_dram_that_was_released_is_zero_and_is_filled_anew() -> None:
    cache = Cache("release")
    cache.vram[:] = 7
    cache.step(1, *orders(StoreOrder, 0, range(4)))
    cache.settle()
    cache.worker.fall_asleep()
    assert not cache.engine.pool.view().any()
    assert cache.engine.pool_state().ready_bytes == 0
    cache.worker.wake_up(cache.layout())
    cache.step(1, *orders(LoadOrder, 100, range(4)))
    cache.step(2, *orders(StoreOrder, 200, range(4)))
    cache.settle()
    cache.step(2, *orders(LoadOrder, 300, range(4)))
    how = cache.settle()
    assert (how[100], how[200], how[300]) == (("stale",), (), ())
    assert cache.report.new_weights == "sleep"
    cache.worker.shutdown()


def test_a_disk_that_hangs_ends_no_tier_when_the_kv_cache_comes_back(tmp_path: Path) -> None:
    """It uses DRAM's slots, which stay where they are."""
    life = Life(tmp_path / "disk")
    assert life.do(write(1)) == [()]
    engine: NativeEngine = life.worker._engine  # type: ignore[assignment]
    sim.stop_disk(engine, "read")
    life.worker.begin(StepPlan(reads=(ReadOrder(2, ids(4, 5), ids(0), KEYS[1:]),)))
    life.worker.submit_stores()
    while not life.disk._file.state().oldest_op_s:  # type: ignore[union-attr]
        life.hear()
    life.worker.fall_asleep()
    moved = np.full_like(life.vram, 7)
    region = Region(moved.ctypes.data, BLOCK_OF_DISK, 0, BLOCK_OF_DISK)
    life.worker.wake_up(replace(life.layout, regions=(region,)))
    life.worker.begin(StepPlan(stores=(StoreOrder(3, ids(0), ids(0)),)))
    life.worker.submit_stores()
    sim.let_disk_go(engine, "read")
    while not {2, 3} <= life.report.outcomes.keys():
        life.hear()
    assert life.report.tier_down == life.report.disk_down == ""
    assert life.report.outcomes[3].reasons == ()
    assert (engine.pool.view()[:BLOCK_OF_DISK] == 7).all()
    life.worker.shutdown()


def test_a_disk_stays_open_while_dram_is_away(tmp_path: Path) -> None:
    life = Life(tmp_path / "disk", sleep_dram="release")
    assert life.do(write(1)) == [()]
    life.worker.fall_asleep()
    life.worker.wake_up(life.layout)
    while not life.disk._file.state().is_ready:  # type: ignore[union-attr]
        life.hear()
    life.epoch = 1
    assert life.do(ReadOrder(2, ids(4, 5), ids(0), KEYS[1:])) == [("missing",)]
    assert life.do(write(3)) == [("stale",)], "of slots that are empty"
    filling = StoreOrder(4, ids(0, 1, 2, 3), ids(0, 1, 2, 3))
    life.worker.begin(StepPlan(stores=(filling,), epoch=1))
    life.worker.submit_stores()
    while 4 not in life.report.outcomes:
        life.hear()
    assert life.do(write(5)) == [()]
    assert life.do(ReadOrder(6, ids(4, 5), ids(0), KEYS[1:])) == [()]
    assert life.report.disk_down == ""
    life.worker.shutdown()
