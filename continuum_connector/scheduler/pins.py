"""Retention: the life of a pin, from the decision to its one end.

A pin is a preference, never a lock (law 1): it has a deadline and an owner, and the cheapest gives
way first when a request needs the room. Retention owns the table and the pins' holds. All pins
begin and end there, so that blocks, metrics, trace, queue order and the next wake-up always follow.

Room: pins give way inside the very allocation that needs their blocks. vLLM's `allocate_slots`
returns None when blocks are short. We call it again without the cheapest pins until it succeeds. If
it fails even without all of them, every pin is put back and the result stays None, so that vLLM
does what it would do without us. PinClaim: which pins a turn that finds no room may take
(docs/decisions.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

from continuum_connector.costs import Costs
from continuum_connector.policy.base import Pin
from continuum_connector.programs.continuation import TO_ITS_END, UNKNOWN, PromptText
from continuum_connector.programs.program import Program
from continuum_connector.scheduler.holds import BlockPool, HoldTable
from continuum_connector.scheduler.kv_groups import ChainBlocks
from continuum_connector.scheduler.queue import Queues
from continuum_connector.scheduler.records import Records
from continuum_connector.scheduler.turns import LivePin, PinEnd, PinTable, State, Turn


class Retention:
    """Begins and ends pins. `holds`: the table of the pins' holds. `budget`: how many VRAM blocks
    pins may keep. `queues`: where turns wait, whose order depends on live pins. `waker.set` is told
    the next deadline."""

    def __init__(
        self,
        holds: HoldTable,
        budget: float,
        max_ttl_s: float,
        records: Records,
        queues: Queues,
        waker: Any,
    ) -> None:
        self.pins = PinTable()
        self.holds = holds
        self.budget = budget
        self.num_hinted_blocks = 0  # in pins that last longer than the policy wanted, or will
        self.num_wish_blocks = 0  # in those of them that already last longer
        self._max_ttl_s = max_ttl_s
        self._records = records
        self._queues = queues
        self._waker = waker

    @property
    def num_blocks(self) -> int:
        """How many blocks the pins hold."""
        return self.holds.num_blocks

    # --- begin ------------------------------------------------------------------------
    def begin(
        self,
        decision: Pin,
        program: Program,
        request: Any,
        blocks: ChainBlocks,
        now: float,
    ) -> None:
        """Pin a finished turn's `blocks`; this supersedes those of the program's pins that the turn
        continues.

        `request`: the turn's; `program.kept` is what it left. Pins above the budget give way,
        cheapest first.
        """
        hold = self.holds.take(blocks.blocks, blocks.ids)
        self.supersede(request, program, PinEnd.SUPERSEDED, now)
        pin = LivePin(
            program=program.key,
            hold=hold,
            blocks=blocks,
            started=now,
            deadline=now + min(decision.ttl_s, self._max_ttl_s),
            then=decision.then,
            rank=(decision.value, -program.arrival),
            kept=program.kept,
            priority=request.priority,
            asked_from=now + decision.asked_from_s,
        )
        self.pins.add(pin)
        self.num_hinted_blocks += len(pin.blocks) if pin.is_hinted else 0
        if pin.asked_from <= now:
            self._make_wish(pin)
        self._records.pin_began()
        while self.num_blocks > self.budget:
            self.give_up_cheapest(now)
        self._changed(pin)

    # --- the next turn comes back -------------------------------------------------------
    def expect(self, turn: Turn, hashes: Sequence[bytes], text: PromptText) -> bool:
        """A turn with those block hashes arrived. If it continues a pinned chain, the pin waits for
        it and cannot expire meanwhile. Returns whether one does.

        A turn that continues no pinned chain ends no pin: it may be a side request, a fork or
        another conversation under the same name. So after a compaction the old pin expires, as if
        its program had not come back. One whose answer the turn repeats gives way first.
        """
        pins = [(pin.kept.continued(hashes, text), pin) for pin in self.pins.of(turn.program.key)]
        surest, pin = max(reversed(pins), key=itemgetter(0), default=(0, None))
        if pin is None or surest <= UNKNOWN:
            for _, each in pins:
                # Its conversation, edited: it goes on behind what was cleared or condensed.
                if not each.is_returning and each.kept.is_edited_in(hashes, text):
                    self._rank_last(each)
            return False
        self.pins.expect(pin, turn)
        # The waker keeps its time: until the turn runs, the engine steps anyway.
        turn.came_for = pin
        return True

    def hand_over(self, turn: Turn, now: float) -> None:
        """The turn owns the blocks itself now, so the pin that waited for it ends.

        The turn may continue only the first part of a pinned chain, because its client has cleared
        a result or never keeps the last message. Its program has come back for that pin, too; but
        the rest may be another context's, so the pin stays, and gives way first.
        """
        if (awaited := turn.pin) is not None:
            self._end(awaited, PinEnd.RETURNED, now)
            turn.taken = awaited.blocks
        for pin in self.pins.of(turn.program.key):
            if pin.started == turn.since and not pin.is_returning:
                self._rank_last(pin)

    def unexpect(self, turn: Turn) -> None:
        """The turn went away before it took its pin over: the deadline counts again."""
        if (pin := turn.pin) is not None:
            self.pins.unexpect(pin, turn)
            self._changed(pin)

    # --- end --------------------------------------------------------------------------
    def supersede(self, request: Any, program: Program, cause: PinEnd, now: float) -> None:
        """The turn of this request ended: end those of its program's pins that it continues to
        their end."""
        hashes = request.block_hashes
        for pin in self.pins.of(program.key):
            if pin.kept.continued(hashes) == TO_ITS_END:
                self._end(pin, cause, now)

    def give_up_all(self, now: float, before: Callable[[LivePin], None]) -> None:
        """End all pins but those that a turn came back for, because stock vLLM finds more without
        any; `before` is called with each while it still holds its blocks."""
        for pin in self.pins:
            if not pin.is_returning:
                before(pin)
                self._end(pin, PinEnd.LOSES, now)

    def end_all(self, cause: PinEnd, now: float) -> None:
        for pin in self.pins:
            self._end(pin, cause, now)

    def end_program(self, program: str, now: float) -> None:
        """The program is over: end its pins, except those that a turn came back for."""
        for pin in self.pins:
            if pin.program == program and not pin.is_returning:
                self._end(pin, PinEnd.PROGRAM_DONE, now)

    def expire(self, now: float, before: Callable[[LivePin], None]) -> None:
        """End the pins that are due; `before` is called with each while it still holds its blocks.

        If the client wants a pin for longer than the policy does, the pin stays as a wish.
        """
        if self.pins.next_deadline() > now:
            return
        for pin in self.pins.due(now):
            if pin.deadline > now:
                self._make_wish(pin)
                self._changed(pin)
                continue
            before(pin)
            self._end(pin, PinEnd.EXPIRED, now)

    # --- pressure ---------------------------------------------------------------------
    def give_up_cheapest(self, now: float) -> None:
        """End the pin that gives way first."""
        pins = self.pins.cheapest_first()
        cheapest = next(pins)
        pins.close()
        self._end(cheapest, PinEnd.PRESSURE, now)

    def gave_way(self, pin: LivePin, now: float) -> None:
        """An allocation took the blocks that the pin gave up on trial: complete the pin's end."""
        self.holds.settle_trial(pin.hold)
        self._note_end(pin, PinEnd.PRESSURE, now)

    # --- parts ------------------------------------------------------------------------
    def _rank_last(self, pin: LivePin) -> None:
        """The pin gives way before all that are worth something."""
        self.pins.revalue(pin, min(pin.rank[0], 0.0))

    def _make_wish(self, pin: LivePin) -> None:
        """The time for which the policy wanted the pin is over: it gives way before all pins that
        are no wish."""
        self.pins.make_wish(pin)
        self.num_wish_blocks += len(pin.blocks)

    def _end(self, pin: LivePin, cause: PinEnd, now: float) -> None:
        """Release the pin's blocks and record why."""
        self.holds.release(pin.hold)
        self._note_end(pin, cause, now)

    def _note_end(self, pin: LivePin, cause: PinEnd, now: float) -> None:
        self.pins.remove(pin, cause)
        self.num_hinted_blocks -= len(pin.blocks) if pin.is_hinted else 0
        self.num_wish_blocks -= len(pin.blocks) if pin.is_wish else 0
        self._records.pin_ended(pin, cause, now)
        self._changed(pin)

    def _changed(self, pin: LivePin) -> None:
        """The pin changed: one waiting turn may have another place, and the next deadline may
        differ. A turn that takes the pin over runs, and vLLM is about to take it off its queue."""
        first = pin.first_waiting
        if first is not None and first.state is not State.RUNNING:
            self._queues.rerank(first.request_id)
        self._waker.set(self.pins.next_deadline())


T = TypeVar("T")

RETRY_STEPS = 8
AGED_PER_STEP = 2  # pins whose worth a step updates; 10 us each
MAX_WAIT_S = 10.0
MAX_SPARED = 32  # how many pins a patient turn may spare before it gives up
MAX_IN_VAIN = 16  # how often pins are put back for an attempt that fails; each may be all of them


class Room:
    """Makes room for one allocation at a time. `worth_now`: what a pin is worth at a time, given
    that its program has not returned. `max_wait_s`: how long a waiting turn spares pins that are
    worth more than its wait."""

    def __init__(
        self,
        pool: BlockPool,
        retention: Retention,
        worth_now: Callable[[LivePin, float], float],
        costs: Costs,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        self._pool = pool
        self._retention = retention
        self._pins = retention.pins
        self._holds = retention.holds
        self._worth_now = worth_now
        self._costs = costs
        self._max_wait_s = max_wait_s
        self._hopeless: tuple[Any, ...] = ()
        self._num_steps = 0
        self._is_blocked = False  # whether a waiting turn found no room in this step

    def new_step(self, now: float) -> None:
        """The engine takes a step, so an allocation that failed may be worth another try. A turn
        that found no room in the last step will report so again.

        If one did, pins are valued anew by how long their programs have been away. A step has no
        time for all pins, so a few are taken in rotation.
        """
        self._num_steps += 1
        if not self._is_blocked:
            self._costs.unblocked(now)
            return
        self._is_blocked = False
        for pin in self._pins.least_recent(AGED_PER_STEP):
            self._pins.revalue(pin, self._worth_now(pin, now))

    def nobody_waits(self, now: float) -> None:
        """No turn waits for room as far as we know."""
        self._is_blocked = False
        self._costs.unblocked(now)

    def references_dropped(self) -> None:
        """A store or a turn released blocks: pins whose end freed too little may free enough
        now."""
        self._hopeless = ()

    def make(
        self,
        request_id: str,
        turn: Turn | None,
        attempt: Callable[[], T | None],
        need: int,
        others_run: bool,
        now: float,
        priority: int = 0,
    ) -> T | None:
        """Retry a failed allocation while pins give way; None if that cannot help.

        `need`: a lower bound of the blocks the allocation takes from the pool, or 0 for a
        running request. `others_run`: some request computes in this step, so blocks may become
        free without the end of a pin. While no request runs we do not rely on the estimate: if it
        were too high, the engine would stand still for ever (law 1). Room that only clients'
        wishes held has no price, because wishes give way to every request. `priority`: the
        request's.
        """
        need = need if others_run else min(need, 1)
        claim = self._claim(turn, bool(need) and others_run, priority, now)
        own = [turn.pin] if turn is not None and turn.pin is not None else []
        taken, blocks = self._without_pins(attempt, request_id, need, own, claim)
        for pin in taken:
            self._retention.gave_way(pin, now)
        if need and (blocks is None or not all(pin.is_wish for pin in taken)):
            self._is_blocked = True
            self._costs.blocked(now)
        return blocks

    def _claim(self, turn: Turn | None, can_wait: bool, priority: int, now: float) -> PinClaim:
        """A turn that was admitted before, as one after a load, holds blocks itself. It takes any
        pin at once, because other turns may be waiting for its blocks; so does one that we do not
        know."""
        is_new = turn is not None and not turn.is_admitted
        is_early = turn is not None and now - turn.arrival < self._max_wait_s
        return PinClaim(
            arrival=-math.inf if turn is None else turn.program.arrival,
            priority=priority,
            is_patient=can_wait and is_early and is_new,
            # This turn certainly waits: it loses a second per second, for lack of about that many
            # blocks.
            price=0.0 if turn is None else 1.0 / self._costs.mean_blocks,
            worth_now=lambda pin: self._worth_now(pin, now),
        )

    def _without_pins(
        self,
        attempt: Callable[[], T | None],
        request_id: str,
        need: int,
        own: Sequence[LivePin],
        claim: PinClaim,
    ) -> tuple[list[LivePin], T | None]:
        """Retry `attempt` without the cheapest pins that it may take; return those and its answer.

        `own`: the pins of blocks that this very request may have found. They go last: ending them
        gains nothing for the blocks that the request shares, which would only count as free
        instead of found.

        Costs O(blocks) per pin tried. So what failed for a waiting request is not tried again until
        something changes, or RETRY_STEPS have passed. For a patient request only those steps count,
        or a store or a turn that releases blocks. A running request is preempted if this fails, so
        pins are tried every time for it.
        """
        free = self._pool.get_num_free_blocks()
        if not len(self._pins) or free + self._holds.num_blocks < need:
            return [], None
        retry = self._num_steps // RETRY_STEPS
        state: tuple[Any, ...] = (request_id, need, retry, claim.is_patient)
        if not claim.is_patient:
            state += (free, len(self._pins), self._holds.num_blocks)
        if need and state == self._hopeless:
            return [], None
        tried, answer = self._try(attempt, max(need, free + 1), own, claim)
        if answer is None:
            for pin in reversed(tried):
                self._holds.restore(pin.hold)
            self._hopeless = state
            return [], None
        return tried, answer

    def _try(
        self, attempt: Callable[[], T | None], need: int, own: Sequence[LivePin], claim: PinClaim
    ) -> tuple[list[LivePin], T | None]:
        """Retry `attempt` without one pin more each time; return these pins and the last answer.

        The last of them may free so much that cheaper ones can stay.
        """
        tried: list[LivePin] = []
        num_in_vain = 0
        pins = self._pins.cheapest_first()
        others = ((pin, need) for pin in _takeable(pins, own, claim))
        try:
            for pin, least_free in chain(others, ((pin, 0) for pin in own)):
                self._holds.try_without(pin.hold)
                tried.append(pin)
                if self._pool.get_num_free_blocks() < least_free:
                    continue
                may_spare = num_in_vain < MAX_IN_VAIN
                if may_spare and (spared := self._spare(tried[:-1], least_free, claim.price)):
                    if (answer := attempt()) is not None:
                        return [pin for pin in tried if pin not in spared], answer
                    num_in_vain += 1
                    for pin in spared:
                        self._holds.try_without(pin.hold)
                if (answer := attempt()) is not None:
                    return tried, answer
        finally:
            pins.close()
        return tried, None

    def _spare(self, tried: Sequence[LivePin], need: int, price: float) -> list[LivePin]:
        """Put back those of the pins that `need` free blocks can do without, the dearest first. Not
        those that are worth no more than a turn's wait: the next turn would take them anyway, and
        wait for it."""
        spared = []
        for pin in reversed(tried):
            if pin.rank[0] > price and self._pool.get_num_free_blocks() - len(pin.hold) >= need:
                self._holds.restore(pin.hold)
                spared.append(pin)
        return spared


def _takeable(
    pins: Iterable[LivePin], own: Sequence[LivePin], claim: PinClaim
) -> Iterator[LivePin]:
    """Yield the pins that the turn may take, `own` apart, until it has spared MAX_SPARED."""
    num_spared = 0
    for pin in pins:
        if pin in own:
            continue
        if claim.may_take(pin):
            yield pin
            continue
        num_spared += 1
        if num_spared == MAX_SPARED:
            return


@dataclass(frozen=True)
class PinClaim:
    """Which pins a turn may break. `arrival`: its program's, in monotonic seconds.

    A turn that runs or holds blocks takes any pin. So does a turn that has waited for `max_wait_s`,
    and any turn while no request computes: the engine always progresses (law 1).

    A patient turn, which waits while others compute, spares a pin if the pin's program came before
    its own, the pin is no less urgent by the user's `priority`, and it is now worth more
    (`worth_now`) than `price`, which is what a held block costs a turn that waits for it. Breaking
    such a pin would lose more than it gains. Pins that no policy priced have the value 0 and always
    give way.
    """

    arrival: float
    priority: int
    is_patient: bool
    price: float
    worth_now: Callable[[LivePin], float]

    def may_take(self, pin: LivePin) -> bool:
        value, arrival = pin.rank[0], -pin.rank[1]
        if not self.is_patient or value <= self.price or arrival > self.arrival:
            return True
        if pin.priority > self.priority:
            return True
        return self.worth_now(pin) <= self.price
