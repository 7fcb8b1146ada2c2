"""RankTier: what one rank has below VRAM: engine, pool and disk, from start to end.

Sleep: the time from when vLLM takes a rank's KV cache away until it is back.

    awake -> drained (no copy is under way, none begins) -> asleep -> moved -> awake

vLLM unmaps VRAM and may map it elsewhere; a copy still under way would then overwrite something
else. DRAM stays as it is, or all of it goes to whoever shares the machine (`sleep_dram`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from continuum_connector.config import FIRST_BYTES, ContinuumConfig
from continuum_connector.errors import TransferError
from continuum_connector.messages import (
    LoadOrder,
    ReadOrder,
    StoreOrder,
    TransferOutcome,
    WorkerReport,
    WriteOrder,
)
from continuum_connector.worker.disk import WorkerDisk
from continuum_connector.worker.engine import CopyEngine
from continuum_connector.worker.health import Closer
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.pool import Demand, PoolGrowth

logger = logging.getLogger(f"vllm.{__name__}")

DRAIN_S = 2.0  # for cancelled copies that the driver already has, which take milliseconds


class Sleep:
    """The sleep of one rank. The worker checks `is_on` before it gives any order."""

    def __init__(self, gives_back: bool, clock: Callable[[], float]) -> None:
        self.is_on = False
        self._gives_back = gives_back
        self._clock = clock
        self._is_released = False
        # By slot: whether something has been put there since DRAM was given back. A client may go
        # back to an epoch that it named before the sleep, and the slots of that are empty now.
        self._filled: npt.NDArray[np.bool_] | None = None

    def switch(self, is_on: bool) -> None:
        self.is_on = is_on

    def wait(self, engine: CopyEngine, tags: Collection[int]) -> set[int]:
        """BLOCK until these transfers are over, at most DRAIN_S; return those that are not."""
        deadline = self._clock() + DRAIN_S
        return {tag for tag in tags if not engine.wait(tag, max(0.0, deadline - self._clock()))}

    def give_back(self, engine: CopyEngine) -> bool:
        """BLOCK until the system has the pool's memory back, if the config says so; return whether
        it has."""
        if not self._gives_back or self._is_released:
            return False
        try:
            engine.pool.release()
        except TransferError as error:
            logger.warning("DRAM stays taken while vLLM sleeps: %s", error)
            return False
        self._is_released = True
        return True

    def end(self, engine: CopyEngine, layout: Layout, num_slots: int) -> bool:
        """Blocks lie where `layout` says. Return whether the pool starts again, with nothing
        ready."""
        engine.pool.set_regions(layout, num_slots)
        if not self._is_released:
            return False
        engine.pool.regrow()
        self._is_released = False
        self._filled = np.zeros(num_slots, np.bool_)
        return True

    def is_lost(self, order: LoadOrder | StoreOrder | ReadOrder | WriteOrder) -> bool:
        """Whether the order wants what was in DRAM before that was given back."""
        if self._filled is None or isinstance(order, StoreOrder | ReadOrder):
            return False
        return not self._filled[order.slots].all()

    def settled(
        self, order: LoadOrder | StoreOrder | ReadOrder | WriteOrder, outcome: TransferOutcome
    ) -> None:
        """An order has ended: what a store or a read puts into its slots may be there."""
        if self._filled is None or not isinstance(order, StoreOrder | ReadOrder):
            return
        self._filled[order.slots[order.slots >= 0]] = outcome.num_done > 0
        if outcome.copied and isinstance(order, ReadOrder):
            slots = order.slots.reshape(len(order.disk_slots), -1)[sorted(outcome.copied)]
            self._filled[slots[slots >= 0]] = True


def anyone(groups: Iterable[Any], is_so: bool) -> bool:
    """Whether `is_so` on any rank: what one rank finds, all must act on. `groups`: the CPU process
    groups of torch that this rank is in, which together span the engine. BLOCKS until every rank
    has called it."""
    import torch

    said = torch.tensor([int(is_so)])
    for group in groups:
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group)
    return bool(said.item())


EngineFactory = Callable[[Layout, int], CopyEngine]
Order = LoadOrder | StoreOrder | ReadOrder | WriteOrder


def num_slots_for(dram_bytes: int, num_ranks: int, slot_bytes: int) -> int:
    """Return how many host slots one of a node's `num_ranks` ranks has; 0 if not one fits."""
    return dram_bytes // num_ranks // slot_bytes


class RankTier:
    """Built once vLLM has a KV cache. A failure here ends the tier, but never the server."""

    def __init__(
        self,
        make_engine: EngineFactory,
        config: ContinuumConfig,
        num_ranks: int,
        rank: int,
        clock: Callable[[], float],
    ) -> None:
        self._make_engine = make_engine
        self._config = config
        self._num_ranks = num_ranks
        self._rank = rank
        self._engine: CopyEngine | None = None
        self._growth: PoolGrowth | None = None  # while the pool grows
        self._is_given_up = False  # the engine gets no more orders
        self._closer = Closer()
        self._disk: WorkerDisk | None = None
        self._sleep = Sleep(config.sleep_dram == "release", clock)
        self._in_flight: dict[int, Order] = {}
        self._report = WorkerReport()

    def register(self, layout: Layout, disk: WorkerDisk | None = None) -> None:
        """Build the host pool and the engine; on failure there is no tier, and a report says why.
        `disk` takes what leaves DRAM, once it is open.

        Costs seconds, for page-locking the first part of the pool, and for giving it back on
        failure. Called once, before the first step.
        """
        if self._config.tier_bytes == 0:
            if self._config.dram:  # an engine's other node may have something to spare
                self._report.lose_tier(self._config.dram.why)
            return
        num_slots = self._num_slots(layout)
        if num_slots == 0:
            self.disable(
                f"dram_bytes = {self._config.tier_bytes} over {self._num_ranks} rank(s) holds no "
                f"block ({layout.slot_bytes} bytes each per rank), so nothing is offloaded; "
                f"set {layout.slot_bytes * self._num_ranks} or more, or 0"
            )
            return
        try:
            self._engine = self._make_engine(layout, num_slots)
            self._begin_growth(self._engine, layout)
        except TransferError as error:
            self.disable(str(error))
        else:
            if disk is not None and not self._is_given_up:
                self._disk = disk
                self._closer.end_first(disk.end)
                disk.start(self._engine, layout)
        self._closer.join()

    def disable(self, sentence: str) -> None:
        """Run without a DRAM tier from here on, and say why, once. New orders fail as "no_tier".

        Never waits. Transfers in flight settle when they end, because a load that is not over may
        still write to its blocks. After the last one, a thread closes the engine.
        """
        if self._is_given_up:
            return
        self._is_given_up = True
        self._growth = None
        logger.warning("No DRAM tier on this rank: %s", sentence)
        self._report.lose_tier(sentence)
        if self._disk is not None:
            self._disk.give_up("there is no DRAM tier any more", self._report)
        self._close_once_idle()

    def wake_up(self, layout: Layout) -> None:
        """The KV cache is back, and lies where `layout` says."""
        if not self._sleep.is_on:
            return
        self._sleep.switch(False)
        if self._engine is None or self._is_given_up:
            return
        try:
            if self._sleep.end(self._engine, layout, self._num_slots(layout)):
                self._begin_growth(self._engine, layout, is_again=True)
        except TransferError as error:
            self.disable(str(error))

    def _num_slots(self, layout: Layout) -> int:
        return num_slots_for(self._config.tier_bytes, self._num_ranks, layout.slot_bytes)

    def _begin_growth(self, engine: CopyEngine, layout: Layout, is_again: bool = False) -> None:
        num_slots = self._num_slots(layout)
        demand = None
        if self._config.dram and self._config.dram.num_left:
            demand = Demand(engine, num_slots, layout.slot_bytes, FIRST_BYTES)
        growth = PoolGrowth(engine, num_slots, layout.slot_bytes, is_again, demand)
        self._growth = growth
        growth.start()
        self._report.ready_slots[self._rank] = growth.num_ready
        if growth.is_over:
            self._end_growth(growth)

    def _follow(self, growth: PoolGrowth) -> None:
        """Report the slots that have become usable since the last look."""
        try:
            if growth.advance():
                self._report.ready_slots[self._rank] = growth.num_ready
        except TransferError as error:
            self.disable(str(error))
            return
        if growth.is_over:
            self._end_growth(growth)

    def _end_growth(self, growth: PoolGrowth) -> None:
        """The pool is as large as it gets: continue with that, or without a tier."""
        self._growth = None
        if growth.why_no_tier:
            self.disable(growth.why_no_tier)

    def _close_once_idle(self) -> None:
        """If nothing is in flight, have the engine closed on a thread. Called again by each poll,
        in case something is, or the system has no thread to give."""
        if self._engine is None or self._in_flight:
            return
        if self._closer.close_behind(self._engine):
            self._engine = None
