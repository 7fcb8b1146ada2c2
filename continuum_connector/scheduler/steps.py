"""Steps: the scheduler half's hooks for the engine's steps. They handle what is due, send plans to
the workers, and take in their reports.

It runs on the scheduler's thread; `now` is monotonic seconds, read by connector.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.policy.base import After
from continuum_connector.scheduler.away import Absence
from continuum_connector.scheduler.decider import Decider
from continuum_connector.scheduler.epochs import Cause, Epochs
from continuum_connector.scheduler.pins import LivePin, PinEnd
from continuum_connector.scheduler.records import Records
from continuum_connector.scheduler.retention import Retention
from continuum_connector.scheduler.room import Room
from continuum_connector.scheduler.tiers.base import Tier

# A preemption costs a prefill, while a store in flight ends within milliseconds. After this
# many seconds the store counts as slow, and the running turn is preempted after all.
MAX_STORE_WAIT_S = 0.25
# While nothing happens, we look for silent programs this often.
LOOK_S = 0.05


class Steps:
    """What the engine asks in each step. `epochs`: which KV is of the current weights."""

    def __init__(
        self,
        retention: Retention,
        tier: Tier,
        decider: Decider,
        records: Records,
        room: Room,
        waker: Any,
        is_vram_empty: Callable[[], bool],
    ) -> None:
        self._retention = retention
        self._pins = retention.pins
        self._tier, self._traffic = tier, tier.traffic
        self._decider, self._away = decider, decider.away
        self._records, self._outcomes = records, records.outcomes
        self._room = room
        self._waker = waker
        self.epochs = Epochs(retention, tier, records, is_vram_empty)
        self._told_reason = ""
        self._owes_step = False  # metrics show a reset only after a step
        self._idle_until = -math.inf  # until then `plan` may be left out

    def note_change(self) -> None:
        """Make the next `plan` run: something has happened that it may have to take into account.
        Every hook after which a pin, a copy or a turn may be different calls it."""
        self._idle_until = -math.inf

    def plan(self, now: float) -> StepPlan:
        """One tick: expire what is due, then send everything queued to the workers."""
        self.expire(now)
        for absence in self._away.silent(now):
            self.fell_silent(absence, now)
        self._room.new_step(self._decider.new_step(now), now)
        self._owes_step = False
        plan = self._tier.plan(now)
        self._wake_for_tier(now)
        self._record_tier(now)
        if not len(self._traffic):
            self._idle_until = min(now + LOOK_S, self._pins.next_deadline())
        return plan

    def is_idle(self, now: float) -> bool:
        """Whether `plan` has nothing to do: nothing has happened since it last ran, no copy is
        under way, and nothing is due. This is so in most steps of a busy server."""
        return now < self._idle_until

    def settle(self, report: WorkerReport, now: float) -> None:
        """Take in which transfers the workers saw settle since their last report."""
        self.note_change()
        # If an epoch has begun since that change, by a reset for instance, it needs no other.
        is_over = 0 <= report.changed_in < self.epochs.number
        if report.new_weights and not is_over:
            self.new_epoch(Cause.WEIGHTS, now, report.new_weights)
        self._tier.hear(report)
        for transfer in self._traffic.settle(report, now):
            self._records.settled(transfer, now)
            self._decider.settled(transfer, now)
            self._room.references_dropped()
        self._wake_for_tier(now)  # for what is begun below now that a store has settled
        self._record_tier(now)

    def expire(self, now: float) -> None:
        """End the pins that are due. If a pin's blocks belong in DRAM at its end (After.STORE), a
        store is queued for those that are not there yet."""

        def store(pin: LivePin) -> None:
            if pin.then is After.STORE:
                self._tier.store(pin.program, pin.blocks.read_again(), now)

        self._retention.expire(now, before=store)

    def has_work(self, now: float) -> bool:
        """Whether an otherwise idle engine must step: if a copy must be looked at or a pin is due,
        and once after a reset, since vLLM sends metrics only with a step."""
        next_look = min(self._tier.next_look, self._pins.next_deadline())
        return next_look <= now or self._owes_step

    def fell_silent(self, absence: Absence, now: float) -> None:
        """The program is not expected back: count its gaps, and close its decision."""
        self._decider.silent(absence, now)
        self._outcomes.silent(absence, now)

    def will_free_blocks(self, now: float) -> bool:
        """Whether a store in flight will release its blocks soon enough to wait for it."""
        age = self._traffic.oldest_store_age(now)
        return age is not None and age < MAX_STORE_WAIT_S

    def new_epoch(self, cause: Cause, now: float, why: str = "") -> None:
        """KV computed until now is outdated: end every pin, and forget every block below VRAM."""
        if cause is Cause.RESET and self.epochs.is_resetting:
            return
        self.note_change()
        self.epochs.begin(cause, now, why)
        self._owes_step = True

    def forget_all(self, cause: PinEnd, now: float) -> None:
        """End every pin with `cause`, and forget every block below VRAM."""
        self.note_change()
        self.epochs.forget_all(cause, now)
        self._owes_step = True

    def shutdown(self, now: float) -> None:
        """The server stops: end every pin, and close all parts that have threads. Idempotent."""
        self._retention.end_all(PinEnd.SHUTDOWN, now)
        self._waker.close()
        self._records.close(now)

    def _wake_for_tier(self, now: float) -> None:
        """Let an idle engine step when the tier wants it to. At once needs no waker."""
        at = self._tier.next_look
        self._waker.set(at if at > now else math.inf, "tier")

    def _record_tier(self, now: float) -> None:
        """Record once that a tier has failed: all memory below VRAM, or what is below DRAM."""
        if (reason := self._tier.down_reason) != self._told_reason:
            self._told_reason = reason
            what = "disk_down" if self._tier.is_up else "tier_down"
            self._records.happened(what, now, reason=reason)
