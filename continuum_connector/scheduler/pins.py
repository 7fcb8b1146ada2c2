"""Retention: the life of a pin, from the decision to its one end.

A pin is a preference, never a lock (law 1): it has a deadline and an owner, and the cheapest gives
way first when a request needs the room. Retention owns the table and the pins' holds. All pins
begin and end there, so that blocks, metrics, trace, queue order and the next wake-up always follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from continuum_connector.policy.base import Pin
from continuum_connector.programs.continuation import TO_ITS_END, UNKNOWN, PromptText
from continuum_connector.programs.program import Program
from continuum_connector.scheduler.holds import HoldTable
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

        A turn that continues no pinned chain changes no pin: it may be a side request, a fork or
        another conversation under the same name. So after a compaction the old pin expires, as if
        its program had not come back.
        """
        pins = [(pin.kept.continued(hashes, text), pin) for pin in self.pins.of(turn.program.key)]
        surest, pin = max(reversed(pins), key=itemgetter(0), default=(0, None))
        if pin is None or surest <= UNKNOWN:
            return False
        self.pins.expect(pin, turn)
        turn.came_for = pin
        self._waker.set(self.pins.next_deadline())
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
                self.pins.revalue(pin, min(pin.rank[0], 0.0))

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
    def give_up_cheapest(self, now: float) -> bool:
        """End the pin that gives way first; False if there is none."""
        pins = self.pins.cheapest_first()
        cheapest = next(pins, None)
        pins.close()
        if cheapest is None:
            return False
        self._end(cheapest, PinEnd.PRESSURE, now)
        return True

    def gave_way(self, pin: LivePin, now: float) -> None:
        """An allocation took the blocks that the pin gave up on trial: complete the pin's end."""
        self.holds.settle_trial(pin.hold)
        self._note_end(pin, PinEnd.PRESSURE, now)

    # --- parts ------------------------------------------------------------------------
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
