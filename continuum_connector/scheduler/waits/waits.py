"""Waits: what a turn in the queue may wait for, besides room. Meanwhile vLLM counts it, but is not
shown it.

- Gate: a place among the programs under way. Looked at when the turn is queued.
- FromBelow: blocks that come up to DRAM. Looked at when vLLM tries the turn.
- Bus: its load's turn on the bus. Looked at then, too. Such turns are kept in order.
- Adapters: a place for its adapter. Looked at when the turn is first in line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

from continuum_connector.scheduler.queue import ProgramQueue, Queues, Rank
from continuum_connector.scheduler.records import Records
from continuum_connector.scheduler.turns import Turn, Turns
from continuum_connector.scheduler.waits.adapters import Adapters
from continuum_connector.scheduler.waits.bus import Bus
from continuum_connector.scheduler.waits.from_below import FromBelow
from continuum_connector.scheduler.waits.gate import Gate, LetIn


class Wait(Protocol):
    """One of them. `is_on`: whether this server has it at all."""

    is_on: bool

    def is_due(self) -> bool:
        """Whether there is something to do before the next step."""

    def left(self, turn: Turn) -> None:
        """The turn is over, and waits no more."""


class Waits:
    """All four of one engine, and the queues in which turns wait for them."""

    def __init__(
        self,
        gate: Gate,
        from_below: FromBelow,
        bus: Bus,
        adapters: Adapters,
        queues: Queues,
        turns: Turns,
        records: Records,
    ) -> None:
        self.gate, self.from_below, self.bus, self.adapters = gate, from_below, bus, adapters
        self._queues = queues
        self._turns = turns
        self._records = records
        # Those that this server has: the bus alone on most.
        every: tuple[Wait, ...] = gate, from_below, bus, adapters
        self._on = [wait for wait in every if wait.is_on]
        self._held = [wait for wait in (gate, adapters) if wait.is_on]

    def make_queue(
        self, rank: Callable[[Any], Rank], is_new: Callable[[Any], bool], has_gate: bool
    ) -> ProgramQueue:
        """A queue in which turns wait for them. `is_new(request)`: whether a request that is queued
        has not run yet, so that the gate may hold it. `has_gate`: whether it may hold any."""

        def is_held(request: Any) -> bool:
            turn = self._turns.get(request.request_id)
            if turn is None or not is_new(request):
                return False
            return self.gate.holds(turn, request.num_tokens, len(self._turns), turn.arrival)

        return ProgramQueue(
            rank,
            holds=is_held if self.gate.is_on and has_gate else None,
            hides=self.from_below.hides if self.from_below.is_on else None,
            sets_aside=self.bus.__contains__,
            passes_over=self.adapters.passes_over if self.adapters.is_on else None,
        )

    def are_due(self) -> bool:
        """Whether there is something to do before the next step."""
        return any(wait.is_due() for wait in self._on)

    def held(self) -> Iterator[str]:
        """The requests that wait because we hold them back, not for a copy."""
        return chain.from_iterable(self._held)

    def let_in(self, num_idle: int, now: float) -> None:
        """Before a step: show vLLM the turns that need not wait any more. `num_idle`: how many
        turns wait for their client."""
        self.bus.new_step(now)
        self._queues.release(self.from_below.let_in(now))
        self._queues.release(self.adapters.let_in())
        self._through_gate(self.gate.open(len(self._turns) - num_idle, now), now)

    def let_all_in(self, now: float) -> None:
        """Show vLLM all turns: none waits any more."""
        self.bus.end()
        self._queues.release(self.from_below.let_in(now, everybody=True))
        self._queues.release(self.adapters.let_in(everybody=True))
        self._through_gate(self.gate.let_all_in(now), now)

    def left(self, turn: Turn) -> None:
        """The turn is over, and waits for nothing any more."""
        for wait in self._on:
            wait.left(turn)

    def _through_gate(self, let_in: Iterable[LetIn], now: float) -> None:
        """Record each, and show it to vLLM."""
        for turn, because in let_in:
            said = {"because": because.value, "held_s": turn.held_s}
            self._records.happened("let_in", now, turn, **said)
            self._queues.release((turn.request_id,))
