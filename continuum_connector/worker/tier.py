"""What can become of one rank's DRAM tier: its pool grows, vLLM sleeps, its engine fails.

The worker asks; none of this gives an order to the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from continuum_connector.errors import TransferError
from continuum_connector.messages import (
    BlockIds,
    LoadOrder,
    ReadOrder,
    StoreOrder,
    TransferOutcome,
    WriteOrder,
)
from continuum_connector.worker.abi import (
    CONFLICT,
    CORRUPT,
    EIO,
    ENOSPC,
    INTERNAL,
    MISSING,
    Completion,
    PoolState,
    Status,
)
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeEngine

logger = logging.getLogger(f"vllm.{__name__}")

Order = LoadOrder | StoreOrder | ReadOrder | WriteOrder

LOOK_EVERY_S = 1.0  # at an engine or a disk that completes nothing
DRAIN_S = 2.0  # for cancelled copies that the driver already has, which take milliseconds
_SHORT_EVERY = 256  # calls, once memory was short, when the native thread tries twice a minute
_CONSEQUENCE = "what leaves VRAM is computed again until the server is restarted"


def num_slots_for(dram_bytes: int, num_ranks: int, slot_bytes: int) -> int:
    """Return how many host slots one of a node's `num_ranks` ranks has; 0 if not one fits."""
    return dram_bytes // num_ranks // slot_bytes


class PoolGrowth:
    """Follows one engine's pool until it has its full size.

    `num_ready` slots are usable. A pool that stops before `num_slots` stays smaller for now: the
    log says so, and we follow it further, because it tries again. If it has no slot at all,
    `why_no_tier` is a sentence with both sizes and the cause.
    """

    def __init__(
        self,
        engine: NativeEngine,
        num_slots: int,
        slot_bytes: int,
        is_again: bool = False,
        first_bytes: int | None = None,
    ) -> None:
        """`is_again`: the pool was released, and may get nothing as long as others use the memory.
        `first_bytes`: it grows by use, to twice what has ever been used and so many bytes more, so
        that there is room before it is needed."""
        self.num_ready = 0
        self.is_over = False
        self.why_no_tier = ""
        self._is_again = is_again
        self.waits = False  # for more use: there is nothing to look at
        self._engine = engine
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._first_bytes = first_bytes
        self._is_used = np.zeros(0 if first_bytes is None else num_slots, np.bool_)
        self._num_used = 0
        self._num_quarters = 0
        self._is_short = False
        self._num_calls = 0

    def start(self) -> None:
        """Take the first look."""
        self.advance()
        if not self.is_over:
            when = " as blocks need it" if self.waits else ""
            logger.info("serving with %s of DRAM, the rest follows%s", self._progress(), when)

    def lacks(self, slots: BlockIds) -> bool:
        """Whether one of these slots had its memory before the pool was released, and not yet."""
        return self._is_again and bool((slots >= self.num_ready).any())

    def used(self, slots: BlockIds) -> None:
        """A copy fills these slots; -1 stands for none."""
        if self._first_bytes is None:
            return
        slots = slots[slots >= 0]
        num_new = int(np.count_nonzero(~self._is_used[slots]))
        if num_new == 0:
            return
        self._is_used[slots] = True
        self._num_used += num_new
        self._engine.pool.want(2 * self._num_used * self._slot_bytes + self._first_bytes)
        self.waits = False

    def advance(self) -> bool:
        """Look again: a few microseconds. True if more slots are usable than before."""
        self._num_calls += 1
        if self.waits or (self._is_short and self._num_calls % _SHORT_EVERY):
            return False
        state = self._engine.pool_state()
        num_ready = min(self._num_slots, state.ready_bytes // self._slot_bytes)
        before, self.num_ready = self.num_ready, num_ready
        num_quarters = 4 * num_ready // self._num_slots
        self.waits = state.wanted_bytes <= state.ready_bytes and num_ready < self._num_slots
        if self.waits:
            self._is_short = False
        elif not state.is_growing and (num_ready == self._num_slots or not self._is_short):
            self._end(state)
        elif num_quarters > self._num_quarters:
            logger.info("%s of DRAM are ready", self._progress())
        self._num_quarters = num_quarters
        return self.num_ready > before

    def _end(self, state: PoolState) -> None:
        if self.num_ready < self._num_slots:
            self._end_short(state.why.rstrip("."))
            return
        self.is_over = True
        where = f" on NUMA node {state.numa_node}" if state.numa_node >= 0 else ""
        logger.info(
            "%s of DRAM are ready%s: %.1f s to populate, %.1f s to page-lock",
            self._progress(),
            where,
            state.populate_s,
            state.lock_s,
        )

    def _end_short(self, why: str) -> None:
        why = why or "the pool stopped growing and did not say why"
        shortage = f"only {self._progress()} of DRAM could be had: {why}"
        if self.num_ready == 0 and not self._is_again:
            self.why_no_tier = f"{shortage}. Not one block fits, so nothing is offloaded"
        else:
            self._is_short = True
            logger.warning("The DRAM tier is smaller for now: %s", shortage)
        self.is_over = not self._is_short

    def _progress(self) -> str:
        """How much of the requested memory is usable, such as "1.0 of 64.0 GiB"."""
        ready, wanted = (n * self._slot_bytes for n in (self.num_ready, self._num_slots))
        unit, name = (2**30, "GiB") if wanted >= 2**30 else (2**20, "MiB")
        return f"{ready / unit:.1f} of {wanted / unit:.1f} {name}"


class Sleep:
    """The time from when vLLM takes a rank's KV cache away until it is back. The worker checks
    `is_on` before it gives any order.

        awake -> drained (no copy is under way, none begins) -> asleep -> moved -> awake

    vLLM unmaps VRAM and may map it elsewhere; a copy still under way would then overwrite something
    else. DRAM stays as it is, or all of it goes to whoever shares the machine (`sleep_dram`).
    """

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

    def wait(self, engine: NativeEngine, tags: Collection[int]) -> set[int]:
        """BLOCK until these transfers are over, at most DRAIN_S; return those that are not."""
        deadline = self._clock() + DRAIN_S
        return {tag for tag in tags if not engine.wait(tag, max(0.0, deadline - self._clock()))}

    def give_back(self, engine: NativeEngine) -> bool:
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

    def end(self, engine: NativeEngine, layout: Layout, num_slots: int) -> bool:
        """Blocks lie where `layout` says. Return whether the pool starts again, with nothing
        ready."""
        engine.pool.set_regions(layout, num_slots)
        if not self._is_released:
            return False
        engine.pool.regrow()
        self._is_released = False
        self._filled = np.zeros(num_slots, np.bool_)
        return True

    def is_lost(self, order: Order) -> bool:
        """Whether the order wants what was in DRAM before that was given back."""
        if self._filled is None or isinstance(order, StoreOrder | ReadOrder):
            return False
        return not self._filled[order.slots].all()

    def settled(self, order: Order, outcome: TransferOutcome) -> None:
        """An order has ended: what a store or a read puts into its slots may be there."""
        if self._filled is None or not isinstance(order, StoreOrder | ReadOrder):
            return
        self._filled[order.slots[order.slots >= 0]] = outcome.num_done > 0
        if outcome.copied and isinstance(order, ReadOrder):
            slots = order.slots.reshape(len(order.disk_slots), -1)[sorted(outcome.copied)]
            self._filled[slots[slots >= 0]] = True


_REASONS = {Status.FAILED: "driver", Status.CANCELLED: "cancelled"}
_REASONS_OF_ERRORS = {CONFLICT: "refused", CORRUPT: "corrupt"}
_REASONS_OF_ERRORS |= {EIO: "eio", MISSING: "missing", ENOSPC: "enospc"}
_OF_ONE_SLOT = (EIO, CORRUPT, MISSING)  # what a disk slot has, not the whole disk


class EngineHealth:
    """The health of one rank's engine. A cause may fail every block of every transfer, so it is
    logged only once; the metrics say how often it came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.has_ended = False  # the engine no longer copies
        self._told: set[str] = set()
        self._clock = clock
        self._checked = float("-inf")

    def is_check_due(self) -> bool:
        """Whether to ask an engine now that completes nothing. That is once a second, because
        copies of a poisoned engine may never end."""
        return self._clock() - self._checked >= LOOK_EVERY_S

    def check(
        self, engine: NativeEngine, completions: Sequence[Completion] = (), refusal: str = ""
    ) -> str:
        """Ask for the engine's health, now that it completed or refused something.

        Returns, once, why it no longer copies: in the engine's words if it has refused, else by
        number.
        """
        if self.has_ended:
            return ""
        self._checked = self._clock()
        for completion in completions:
            if completion.status is Status.FAILED and completion.error != CORRUPT:
                self._tell(_name(completion.error), "A copy failed: %s")
        health = engine.health()
        for path in health.given_up:
            self._tell(path, "The driver fails at the %s path, so copies go another way from here")
        if health.poison:
            self.has_ended = True
            what = refusal.rstrip(".") or _name(health.poison)
            return f"the copy engine failed: {what}; {_CONSEQUENCE}"
        if refusal:
            self._tell(refusal.rstrip("."), "A copy was refused: %s", key="refused")
        return ""

    def _tell(self, what: str, sentence: str, key: str = "") -> None:
        if (key or what) not in self._told:
            self._told.add(key or what)
            logger.warning(sentence + ". This is said once", what)


def _name(error: int) -> str:
    """A completion's code in words. The driver's own codes are above 0."""
    if error == CONFLICT:
        return "an unfinished transfer uses a block or slot of it"
    if error == INTERNAL:
        return "a bug in the native library (error -9); please report it with this log"
    return f"CUDA error {error}" if error > 0 else f"error {error} of the native library"


def outcome_of(completion: Completion, reason: str) -> TransferOutcome:
    """One rank's result of a transfer. `reason`, if given, is why it may not have succeeded."""
    if completion.status is Status.DONE:
        return TransferOutcome(
            num_done=1, num_bytes=completion.num_bytes, seconds=completion.seconds
        )
    reason = _REASONS_OF_ERRORS.get(completion.error, reason) or _REASONS[completion.status]
    errors = completion.disk_errors
    if not errors:
        return failed_because(reason)
    bad = {_REASONS_OF_ERRORS[each]: _places(errors, each) for each in _OF_ONE_SLOT}
    return TransferOutcome(num_failed=1, reasons=(reason,), copied=_places(errors, 0), bad=bad)


def failed_because(reason: str) -> TransferOutcome:
    """One rank's result of a transfer that has failed here, with one word for why."""
    return TransferOutcome(num_failed=1, reasons=(reason,))


def _places(errors: Sequence[int], error: int) -> frozenset[int]:
    return frozenset(place for place, each in enumerate(errors) if each == error)
