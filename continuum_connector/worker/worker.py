"""ContinuumWorker: one rank's hands. It submits, polls and reports; it never decides or waits.

The life of an order is QUEUED (the plan has come) -> SUBMITTED (the engine has it) ->
settled (one `Outcome` in the next report). vLLM's hooks differ in order and number by version
and runner, so every hook submits whatever is due, and each order leaves the queue once:

| queued | submitted by |
|---|---|
| cancels, a disk's reset, loads, reads | start_loads, submit_stores, poll, the next begin |
| stores, writes | submit_stores, the next begin; not poll, which says why |

What can become of the tier that it works for is beside it: the pool grows, vLLM sleeps, the engine
fails. A failure ends the tier, but never the server.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from continuum_connector.config import FIRST_BYTES, ContinuumConfig
from continuum_connector.errors import TransferError
from continuum_connector.messages import (
    LoadOrder,
    ReadOrder,
    StepPlan,
    StoreOrder,
    TransferOutcome,
    WorkerReport,
    WriteOrder,
)
from continuum_connector.worker.abi import Completion, Direction
from continuum_connector.worker.disk import WorkerDisk
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeEngine
from continuum_connector.worker.tier import (
    EngineHealth,
    Order,
    PoolGrowth,
    Sleep,
    failed_because,
    num_slots_for,
    outcome_of,
)

logger = logging.getLogger(f"vllm.{__name__}")

EngineFactory = Callable[[Layout, int], NativeEngine]
Polled = tuple[set[str], set[str]]
_CLOSE_S = 2.0  # for the copies that the driver already has: one window, which takes milliseconds


class Loads:
    """Which requests wait for loads of one rank, until vLLM has been told of each, once. A request
    that is reported twice kills vLLM, so its last load reports it."""

    def __init__(self) -> None:
        self.finished: set[str] = set()  # not yet told
        self.bad_blocks: set[int] = set()  # without loaded data, not yet told
        self._failed: set[str] = set()
        self._waiting: Counter[str] = Counter()  # loads of each request that have not settled
        self._bad_blocks_of: dict[str, set[int]] = {}  # ... and blocks of those that failed

    def begin(self, order: LoadOrder) -> None:
        """Its request waits for one more load."""
        self._waiting[order.request_id] += 1

    def settle(self, order: LoadOrder, outcome: TransferOutcome) -> None:
        """A load has ended."""
        request_id = order.request_id
        bad = self._bad_blocks_of.setdefault(request_id, set())
        if outcome.num_failed:
            bad.update(order.blocks.tolist())
        self._waiting[request_id] -= 1
        if self._waiting[request_id]:
            return
        del self._waiting[request_id], self._bad_blocks_of[request_id]
        self.finished.add(request_id)
        if bad:
            self._failed.add(request_id)
            self.bad_blocks |= bad

    def take(self) -> Polled:
        """The requests whose loads have settled since the last call, and which of them failed."""
        polled = (self.finished, self._failed)
        self.finished, self._failed = set(), set()
        return polled

    def take_bad_blocks(self) -> set[int]:
        bad, self.bad_blocks = self.bad_blocks, set()
        return bad


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
        """`num_ranks` share the node's `dram_bytes`; `current_stream` names the stream that copies
        wait for (0: none); `rank` is this one's among the engine's; `clock`, in monotonic seconds,
        measures how long nothing has completed."""
        self._make_engine, self._config = make_engine, config
        self._num_ranks, self._rank = num_ranks, rank
        self._current_stream = current_stream
        self._engine: NativeEngine | None = None  # that gets orders, or has some in flight
        self._why_no_engine = "no_tier"
        self._is_given_up = False  # the engine gets no more orders
        self._closing: threading.Thread | None = None
        self._health = EngineHealth(clock)
        self._growth: PoolGrowth | None = None  # while the pool grows
        self._sleep = Sleep(config.sleep_dram == "release", clock)
        self._disk: WorkerDisk | None = None
        self._plan = StepPlan()  # the newest
        self.due: StepPlan | None = None  # the plan whose stores and writes are due
        self._begins: StepPlan | None = None  # the one whose cancels, reset, loads, reads are due
        self._in_flight: dict[int, Order] = {}
        self._loads = Loads()
        self._report = WorkerReport()
        self._epoch = 0  # the newest epoch that a plan was about
        self._stale_epoch = -1  # orders of this epoch or an older one are of other weights
        self._stale: set[int] = set()  # transfers in flight since before the weights changed

    # --- the tier, from start to end ------------------------------------------------------------
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
                disk.start(self._engine, layout)
        if self._closing is not None:
            self._closing.join()

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

    def new_weights(self, how: str) -> None:
        """The weights under this worker have changed, or DRAM is empty. Orders of the epoch known
        by now, and transfers in flight, fail as "stale". The disk is reset, and a restart finds
        none of what it held, because it is not known which weights computed that."""
        self._stale_epoch = self._epoch
        self._stale.update(self._in_flight)
        self._report.change_weights(how, self._epoch)
        if self._disk is not None:
            self._disk.reset(self._report)

    def fall_asleep(self) -> None:
        """Touch nothing of the KV cache from here on. BLOCKS until no copy is under way, 2 s at
        most. TransferError if the driver still keeps one; then all is as it was. Idempotent.

        It does not wait for a disk that hangs, but then DRAM is not given back.
        """
        if self._sleep.is_on:
            return
        self._sleep.switch(True)
        self.submit_stores()  # what is queued ends here
        if self._engine is None:
            return
        self._cancel(self._in_flight)
        left = self._sleep.wait(self._engine, self._in_flight)
        self._settle_completed()
        if any(isinstance(self._in_flight.get(tag), LoadOrder | StoreOrder) for tag in left):
            self._sleep.switch(False)
            raise TransferError(
                "the driver keeps copies of the KV cache under way, so it must not be taken away; "
                "ask again, or restart the server"
            )
        if self._engine is not None and self._sleep.give_back(self._engine):
            self._growth = None
            self._report.ready_slots[self._rank] = 0
            self.new_weights("sleep")

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

    def shutdown(self) -> None:
        """Close the engine; what has not settled fails as "closed". Idempotent.

        Nobody reads what is copied from here on, so it is cancelled. Only what the driver has
        already is waited for, which takes milliseconds, however much is queued.
        """
        self._why_no_engine = "closed"
        self._growth = None
        if self._engine is not None:
            self._cancel(self._in_flight)
            self._close(self._engine)
            self._settle_completed("closed")
            self._engine = None
        if self._closing is not None:
            self._closing.join()
        for order in self._in_flight.values():
            self._settle(order, failed_because("closed"))
        self._in_flight.clear()
        self.submit_stores()  # without an engine this settles what is queued

    def _num_slots(self, layout: Layout) -> int:
        return num_slots_for(self._config.tier_bytes, self._num_ranks, layout.slot_bytes)

    def _begin_growth(self, engine: NativeEngine, layout: Layout, is_again: bool = False) -> None:
        num_slots = self._num_slots(layout)
        first_bytes = FIRST_BYTES if self._config.dram and self._config.dram.num_left else None
        growth = PoolGrowth(engine, num_slots, layout.slot_bytes, is_again, first_bytes)
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
        """If nothing is in flight, have the engine closed on a thread, because to unlock and unmap
        a large pool takes seconds. Called again by each poll, in case something is, or the system
        has no thread to give, for instance for lack of memory."""
        if self._engine is None or self._in_flight:
            return
        # Not a daemon: it would die inside the driver if the interpreter ended meanwhile.
        thread = threading.Thread(
            target=self._close, args=(self._engine,), name="continuum-close", daemon=False
        )
        try:
            thread.start()
        except RuntimeError:
            return
        self._closing, self._engine = thread, None

    def _close(self, engine: NativeEngine) -> None:
        """BLOCK until disk and engine are closed. Nobody else may use either meanwhile. What does
        not close in time is logged and left as it is."""
        if self._disk is not None and not self._disk.end():
            return  # it is inside the engine
        try:
            engine.close(_CLOSE_S)
        except TransferError as error:
            logger.warning("the copy engine did not close: %s", error)

    # --- a step ---------------------------------------------------------------------------------
    def begin(self, plan: StepPlan) -> None:
        """Take this step's plan, after submitting what is left of the one before."""
        if plan is self._plan:
            return  # bound twice in one step; its orders are queued or submitted already
        if self.due is not None:
            self.submit_stores()
        self._plan = plan
        self._epoch = max(self._epoch, plan.epoch)
        if not plan.is_empty:
            self._begins = self.due = plan

    def start_loads(self) -> None:
        """Submit the cancels, loads and reads that are due. Loads run behind what the current
        stream has queued.

        Before the forward pass that is block zeroing; after it, compute as well.
        """
        plan, self._begins = self._begins, None
        if plan is None:
            return
        self._cancel(plan.cancels)
        if plan.resets_disk and self._disk is not None:
            self._disk.reset(self._report)
        for load in plan.loads:
            self._loads.begin(load)
        self._submit_all(plan.loads, plan.reads)

    def submit_stores(self) -> None:
        """Submit the stores behind the compute queued on the current stream, then the writes;
        return at once."""
        self.start_loads()
        plan, self.due = self.due, None
        if plan is not None:
            if plan.disk_spent is not None and self._disk is not None:
                self._disk.spent(plan.disk_spent)
            self._submit_all(plan.stores, plan.writes)

    @property
    def is_idle(self) -> bool:
        """Whether `poll` would do nothing now, and return nothing."""
        if self._in_flight or self._loads.finished or self._begins is not None:
            return False
        growth, disk = self._growth, self._disk
        looks = (growth is not None and not growth.waits) or (disk is not None and disk.is_due)
        return not looks and (self._engine is None or not self._is_given_up)

    def poll(self) -> Polled:
        """Return (requests whose loads settled, those of them that failed) since the last poll.

        A request comes once, when its last load has settled. If it failed, `take_bad_blocks` then
        has its blocks that hold no loaded data. Stores are not submitted here: with speculative
        decoding this runs before the draft model's pass, which still writes the blocks.
        """
        self.start_loads()
        if self._growth is not None:
            self._follow(self._growth)
        if self._in_flight:
            self._settle_completed()
        if self._disk is not None:
            self._disk.follow(self._report)
        if self._is_given_up:
            self._close_once_idle()
        return self._loads.take()

    def take_bad_blocks(self) -> set[int]:
        """The VRAM blocks without loaded data, of requests that failed since the last call."""
        return self._loads.take_bad_blocks() if self._loads.bad_blocks else set()

    def take_report(self) -> WorkerReport | None:
        """Hand over what settled since the last report, or None."""
        if self._report.is_empty:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def _submit_all(self, *orders: Sequence[Order]) -> None:
        """Give orders to the engine or the disk. An order that cannot be given, or has nothing to
        copy, settles here; nothing is raised."""
        for order in chain(*orders):
            if reason := self._why_not(order) or self._give(order):
                self._settle(order, failed_because(reason))
            elif len(order.slots):
                self._in_flight[order.transfer_id] = order
            else:
                self._settle(order, TransferOutcome(num_done=1))

    def _why_not(self, order: Order) -> str:
        """One word for why an order is not given to anyone, or ""."""
        if self._engine is None or self._is_given_up:
            return self._why_no_engine
        if self._plan.epoch <= self._stale_epoch or self._sleep.is_lost(order):
            return "stale"
        growth = self._growth
        if self._sleep.is_on or (growth is not None and growth.lacks(order.slots)):
            return "asleep"
        # It timed out before it left: after a long time without a step, one plan has both.
        return "cancelled" if order.transfer_id in self._plan.cancels else ""

    def _give(self, order: Order) -> str:
        """Give one order to the engine or the disk; one word for why it was refused, or ""."""
        engine = self._engine
        assert engine is not None
        if not len(order.slots):
            return ""
        try:
            if self._growth is not None and isinstance(order, (StoreOrder, ReadOrder)):
                self._growth.used(order.slots)
            if isinstance(order, (ReadOrder, WriteOrder)):
                return "no_tier" if self._disk is None else self._disk.submit(order)
            way = Direction.LOAD if isinstance(order, LoadOrder) else Direction.STORE
            stream = self._current_stream()
            engine.submit(way, order.blocks, order.slots, order.transfer_id, stream)
        except TransferError as error:
            self._check_health(engine, refusal=str(error))
            return "driver" if self._health.has_ended else "refused"
        return ""

    def _cancel(self, transfers: Iterable[int]) -> None:
        """Ask to end those in flight; each one's completion says whether that came in time."""
        for transfer_id in transfers:
            if self._engine is not None and transfer_id in self._in_flight:
                try:
                    self._engine.cancel(transfer_id)
                except TransferError as error:
                    logger.debug("transfer %d was not cancelled: %s", transfer_id, error)

    def _settle_completed(self, reason: str = "") -> None:
        """Settle what the engine has completed; `reason`, if given, is why a transfer failed."""
        assert self._engine is not None
        copies = []
        for completion in self._engine.poll():
            order = self._in_flight.pop(completion.tag, None)
            if isinstance(order, (ReadOrder, WriteOrder)) and self._disk is not None:
                self._disk.settle()
            else:
                copies.append(completion)
            if order is not None:
                self._settle(order, self._outcome(order, completion, reason))
        if not reason and (copies or self._health.is_check_due()):
            self._check_health(self._engine, copies)

    def _outcome(self, order: Order, completion: Completion, reason: str) -> TransferOutcome:
        outcome = outcome_of(completion, reason)
        if completion.tag in self._stale:
            self._stale.discard(completion.tag)
            return failed_because("stale")
        if self._sleep.is_on and isinstance(order, LoadOrder) and outcome.num_done:
            return failed_because("asleep")  # the block is taken away before vLLM is told of it
        return outcome

    def _check_health(
        self, engine: NativeEngine, completions: Sequence[Completion] = (), refusal: str = ""
    ) -> None:
        """If the engine no longer copies, go on without a tier."""
        if why := self._health.check(engine, completions, refusal):
            self.disable(why)

    def _settle(self, order: Order, outcome: TransferOutcome) -> None:
        """Note the end of one order for the report and, if it is a load, for its request."""
        self._report.outcomes[order.transfer_id] = outcome
        self._sleep.settled(order, outcome)
        if isinstance(order, LoadOrder):
            self._loads.settle(order, outcome)


def current_stream() -> int:
    """The CUDA stream vLLM computes on in this thread, or 0 on CPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.current_stream().cuda_stream)


def anyone(groups: Iterable[Any], is_so: bool) -> bool:
    """Whether `is_so` on any rank: what one rank finds, all must act on. `groups`: the CPU process
    groups of torch that this rank is in, which together span the engine. BLOCKS until every rank
    has called it."""
    import torch

    said = torch.tensor([int(is_so)])
    for group in groups:
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group)
    return bool(said.item())
