"""ContinuumWorker: one rank's hands. It submits, polls and reports; it never decides or waits.

The life of an order is QUEUED (the plan has come) -> SUBMITTED (the engine has it) ->
settled (one `Outcome` in the next report). vLLM's hooks differ in order and number by version
and runner, so every hook submits whatever is due by then, and each order leaves the queue once:

| queued | submitted by |
|---|---|
| cancels, loads | start_loads, submit_stores, poll, the next begin |
| stores | submit_stores, the next begin; not poll, see there |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import TransferError
from continuum_connector.messages import (
    LoadOrder,
    StepPlan,
    StoreOrder,
    TransferOutcome,
    WorkerReport,
)
from continuum_connector.worker.engine import Completion, CopyEngine, Direction
from continuum_connector.worker.health import Closer, EngineHealth, outcome_of
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.pool import PoolGrowth

logger = logging.getLogger(f"vllm.{__name__}")

EngineFactory = Callable[[Layout, int], CopyEngine]
Polled = tuple[set[str], set[str]]


def num_slots_for(dram_bytes: int, num_ranks: int, slot_bytes: int) -> int:
    """Return how many host slots one of a node's `num_ranks` ranks has; 0 if not one fits."""
    return dram_bytes // num_ranks // slot_bytes


@dataclass
class _Waiting:
    """A request with loads that have not settled, and the blocks of those that failed."""

    num_loads: int = 0
    bad_blocks: set[int] = field(default_factory=set)


class ContinuumWorker:
    """Carries out the scheduler's step plans on one rank. One thread calls everything."""

    def __init__(
        self,
        make_engine: EngineFactory,
        config: ContinuumConfig,
        num_ranks: int = 1,
        current_stream: Callable[[], int] = lambda: 0,
        rank: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`num_ranks` share the node's `dram_bytes`; `current_stream` names the stream that
        copies are ordered behind (0: none); `rank` is this one's, among the engine's; `clock`
        says how long nothing has completed, in monotonic seconds."""
        self._make_engine = make_engine
        self._config = config
        self._num_ranks = num_ranks
        self._current_stream = current_stream
        self._rank = rank
        self._engine: CopyEngine | None = None
        self._growth: PoolGrowth | None = None  # while the pool grows
        self._is_given_up = False  # the engine gets no more orders
        self._closer = Closer()
        self._why_no_engine = "no_tier"
        self._health = EngineHealth(clock)
        self._plan: StepPlan | None = None
        self._cancels: tuple[int, ...] = ()
        self._loads: tuple[LoadOrder, ...] = ()
        self._stores: tuple[StoreOrder, ...] = ()
        self._in_flight: dict[int, LoadOrder | StoreOrder] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._finished: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()
        self._report = WorkerReport()

    def register(self, layout: Layout) -> None:
        """Build the host pool and the engine; on failure there is no tier, and a report says why.

        Costs seconds: page-locking the first part of the pool, or all of it unless `staged`; and
        giving it back, on failure. Called once, before the first step.
        """
        if self._config.dram_bytes == 0:
            return
        num_slots = num_slots_for(self._config.dram_bytes, self._num_ranks, layout.slot_bytes)
        if num_slots == 0:
            self.disable(
                f"dram_bytes = {self._config.dram_bytes} over {self._num_ranks} rank(s) holds no "
                f"block ({layout.slot_bytes} bytes each per rank), so nothing is offloaded; "
                f"set {layout.slot_bytes * self._num_ranks} or more, or 0"
            )
            return
        try:
            self._engine = self._make_engine(layout, num_slots)
            may_be_short = self._config.dram_shortage == "smaller"
            growth = PoolGrowth(self._engine, num_slots, layout.slot_bytes, may_be_short)
            growth.start(self._config.staged)
        except TransferError as error:
            self.disable(str(error))
        else:
            self._report.ready_slots[self._rank] = growth.num_ready
            self._growth = growth
            if growth.is_over:
                self._end_growth(growth)
        self._closer.join()

    def disable(self, sentence: str) -> None:
        """Run without a DRAM tier from here on: new orders fail as "no_tier"; say why once.

        Never waits. What the engine has settles as it ends, for a load that is not over may still
        write to its blocks; with the last of it the engine is closed, on a thread.
        """
        if self._is_given_up:
            return
        self._is_given_up = True
        self._growth = None
        logger.warning("No DRAM tier on this rank: %s", sentence)
        self._report.tier_down = sentence
        self._let_go()

    def begin(self, plan: StepPlan) -> None:
        """Take this step's plan, after submitting what is left of the one before."""
        if plan is self._plan:
            return  # bound twice in one step; its orders are queued or gone already
        if self._cancels or self._loads or self._stores:
            self.submit_stores()
        self._plan = plan
        self._cancels, self._loads, self._stores = plan.cancels, plan.loads, plan.stores

    def start_loads(self) -> None:
        """Submit the cancels and loads that are due, behind what the current stream has queued.

        Before the forward pass that means behind block zeroing; after it, also behind compute.
        """
        if not (self._loads or self._cancels):
            return
        cancels, loads = self._cancels, self._loads
        self._cancels = self._loads = ()
        for transfer_id in cancels:
            self._cancel(transfer_id)
        for load in loads:
            self._waiting.setdefault(load.request_id, _Waiting()).num_loads += 1
        for load in loads:
            self._submit(Direction.LOAD, load)

    def submit_stores(self) -> None:
        """Submit the stores behind the compute queued on the current stream; return at once."""
        self.start_loads()
        if not self._stores:
            return
        stores, self._stores = self._stores, ()
        for store in stores:
            self._submit(Direction.STORE, store)

    def poll(self) -> Polled:
        """Return (requests whose loads settled, those of them that failed) since last.

        A request comes once, when its last load has settled; of a failed one `take_bad_blocks`
        then has the blocks that hold no loaded data. Stores are not submitted here: with
        speculative decoding this runs before the draft model's pass, which still writes the blocks.
        """
        self.start_loads()
        if self._growth is not None:
            self._follow(self._growth)
        if self._in_flight:
            self._drain()
        if self._is_given_up:
            self._let_go()
        if not self._finished:
            return set(), set()
        polled = (self._finished, self._failed)
        self._finished, self._failed = set(), set()
        return polled

    def take_bad_blocks(self) -> set[int]:
        """The VRAM blocks that hold no loaded data, of requests that failed since last."""
        if not self._bad_blocks:
            return set()
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        """Hand over what settled since the last report, or None."""
        if self._report.is_empty:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def shutdown(self) -> None:
        """Close the engine; what has not settled fails as "closed". Idempotent.

        Nobody reads what is copied from here on, so it is cancelled: only what the driver has
        already is waited for, milliseconds and not all that is queued.
        """
        self._why_no_engine = "closed"
        self._growth = None
        if self._engine is not None:
            for transfer_id in self._in_flight:
                self._cancel(transfer_id)
            self._closer.close(self._engine)
            self._drain("closed")
            self._engine = None
        self._closer.join()
        for order in self._in_flight.values():
            self._settle(order, TransferOutcome(num_failed=1, reasons=("closed",)))
        self._in_flight.clear()
        self.submit_stores()  # without an engine this settles what is queued

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
        """The pool is as large as it gets: go on with that, or without a tier."""
        self._growth = None
        if growth.why_no_tier:
            self.disable(growth.why_no_tier)

    def _let_go(self) -> None:
        """Have the engine closed once nothing is in flight; without a thread, poll tries again."""
        if self._engine is None or self._in_flight:
            return
        if self._closer.close_behind(self._engine):
            self._engine = None

    def _submit(self, direction: Direction, order: LoadOrder | StoreOrder) -> None:
        """Give one order to the engine; what cannot be given settles here, and never raises."""
        if self._engine is None or self._is_given_up:
            self._settle(order, TransferOutcome(num_failed=1, reasons=(self._why_no_engine,)))
            return
        if self._plan is not None and order.transfer_id in self._plan.cancels:
            # Too late before it left: an engine that did not step for long plans both at once.
            self._settle(order, TransferOutcome(num_failed=1, reasons=("cancelled",)))
            return
        if len(order.blocks) == 0:
            self._settle(order, TransferOutcome(num_done=1))
            return
        try:
            self._engine.submit(
                direction, order.blocks, order.slots, order.transfer_id, self._current_stream()
            )
        except TransferError as error:
            self._look_at(self._engine, refusal=str(error))
            reason = "driver" if self._health.has_ended else "refused"
            self._settle(order, TransferOutcome(num_failed=1, reasons=(reason,)))
        else:
            self._in_flight[order.transfer_id] = order

    def _cancel(self, transfer_id: int) -> None:
        """Ask for the end of a transfer in flight; whether it came in time, its completion says."""
        if self._engine is None or transfer_id not in self._in_flight:
            return
        try:
            self._engine.cancel(transfer_id)
        except TransferError as error:
            logger.debug("transfer %d was not cancelled: %s", transfer_id, error)

    def _drain(self, reason: str = "") -> None:
        """Settle what the engine has completed; `reason`, if given, is why it did not."""
        assert self._engine is not None
        completions = self._engine.poll()
        for completion in completions:
            order = self._in_flight.pop(completion.tag, None)
            if order is not None:
                self._settle(order, outcome_of(completion, reason))
        if not reason and (completions or self._health.is_look_due()):
            self._look_at(self._engine, completions)

    def _look_at(
        self, engine: CopyEngine, completions: Sequence[Completion] = (), refusal: str = ""
    ) -> None:
        """If the engine copies no more, go without a tier."""
        if why := self._health.look(engine, completions, refusal):
            self.disable(why)

    def _settle(self, order: LoadOrder | StoreOrder, outcome: TransferOutcome) -> None:
        """Note the end of one order for the report and, if it is a load, for its request."""
        self._report.outcomes[order.transfer_id] = outcome
        if isinstance(order, StoreOrder):
            return
        waiting = self._waiting[order.request_id]
        waiting.num_loads -= 1
        if outcome.num_failed:
            waiting.bad_blocks.update(order.blocks.tolist())
        if waiting.num_loads:
            return  # vLLM dies of a request that is reported twice: its last load reports it
        del self._waiting[order.request_id]
        self._finished.add(order.request_id)
        if waiting.bad_blocks:
            self._failed.add(order.request_id)
            self._bad_blocks |= waiting.bad_blocks


def current_stream() -> int:
    """The CUDA stream vLLM computes on in this thread, or 0 on CPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.current_stream().cuda_stream)
