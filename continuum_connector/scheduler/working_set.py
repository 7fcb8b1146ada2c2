"""WorkingSet: the programs under way, and how much of their KV will be asked for within a cycle.

A program is under way from its first turn until nobody expects it back. It counts with what it
holds by now: some grow while others end, so that is what all of them hold together. One that is to
begin counts with the size at which programs end, for first prompts are small. Who is away counts by
the chance to be back within one cycle (the mean time from a program's turn to its next), so dead
chats do not fill memory that nobody will ask for.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Container
from dataclasses import dataclass

from continuum_connector.costs.costs import Costs
from continuum_connector.scheduler.away import Away
from continuum_connector.scheduler.turns import Turn

NUM_ENDS = 50  # programs that ended, of which the mean size is taken
CYCLE_WEIGHT = 1 / 20  # of the newest cycle in the mean
FIRST_CYCLE_S = 1.0  # until one was seen; too short, so programs begin as if nothing were known


@dataclass(eq=False, slots=True)
class _Member:
    """A program under way. Tokens: its `size` at the last turn; `shared`, which its first found in
    a cache. `has_begun`: whether it may go on without asking. `blocks`, `work_s`: its part of the
    sums."""

    size: int = 0
    shared: int = 0
    num_active: int = 0
    num_turns: int = 0
    last_arrival: float = -math.inf
    last_end: float = -math.inf
    has_begun: bool = False
    blocks: float = 0.0
    work_s: float = 0.0


class WorkingSet:
    """By program key, at most `max_programs` of them; beyond, who was looked at longest ago is
    forgotten. Microseconds per call.

    The sums lean on chances, which change with time; so a few programs are looked at anew in
    every step that needs the sums. `num_blocks`: KV blocks that so many tokens take.
    """

    def __init__(
        self, costs: Costs, away: Away, num_blocks: Callable[[int], int], max_programs: int
    ) -> None:
        self._costs = costs
        self._away = away
        self.num_blocks = num_blocks
        self._max_programs = max_programs
        self._members: OrderedDict[str, _Member] = OrderedDict()  # looked at longest ago is first
        # The programs of which a turn is held, as the gate has it.
        self.at_gate: Container[str] = ()
        self._ends: deque[int] = deque(maxlen=NUM_ENDS)
        self._ended_tokens = 0
        self._num_cycles = 0
        self._num_finished = 0
        self._num_followed = 0
        self.cycle_s = FIRST_CYCLE_S
        self.blocks = 0.0  # that will be asked for within a cycle
        self.work_s = 0.0  # of the GPU, that programs under way still need

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, program: str) -> bool:
        return program in self._members

    @property
    def return_share(self) -> float:
        """The share of finished turns that another turn of their program followed."""
        return min(1.0, (self._num_followed + 1) / (self._num_finished + 1))

    def full_size(self, num_tokens: int) -> int:
        """Tokens that a program of this prompt will hold when it ends."""
        mean = self._ended_tokens // len(self._ends) if self._ends else 0
        return max(num_tokens, mean)

    def has_begun(self, turn: Turn) -> bool:
        """Whether the program has been let in. Of one that is not known, whether a turn of it
        ended, as while we were switched off."""
        member = self._members.get(turn.program.key)
        return turn.program.num_finished > 0 if member is None else member.has_begun

    # --- what happened ----------------------------------------------------------------
    def let_in(self, turn: Turn, num_tokens: int, has_begun: bool, now: float) -> None:
        """A turn may be admitted; `has_begun`: so may all later ones of its program."""
        member = self._member(turn.program.key, now)
        if member.num_turns:
            self._num_followed += 1
        gone_s = turn.arrival - member.last_arrival
        if member.num_turns and gone_s >= 0.0:  # a turn that was held may have been passed
            self._num_cycles += 1
            weight = max(CYCLE_WEIGHT, 1 / self._num_cycles)
            self.cycle_s += weight * (gone_s - self.cycle_s)
        member.last_arrival = max(member.last_arrival, turn.arrival)
        member.num_turns += 1
        member.num_active += 1
        member.has_begun |= has_begun
        member.size = max(member.size, num_tokens)
        self._look(turn.program.key, member, now)
        self.look(2, now)  # who is over leaves, though nobody stands at the gate

    def found(self, turn: Turn, num_tokens: int) -> None:
        """A turn was admitted, and so many tokens of its prompt were there."""
        member = self._members.get(turn.program.key)
        if member is not None and member.num_turns == 1:
            member.shared = num_tokens

    def finished(self, turn: Turn, num_tokens: int, now: float) -> None:
        """A turn that was let in has ended with so many tokens."""
        member = self._members.get(turn.program.key)
        if member is None:
            return
        self._num_finished += 1
        member.num_active = max(0, member.num_active - 1)
        member.last_end = now
        member.size = max(member.size, num_tokens)
        self._look(turn.program.key, member, now)

    def look(self, num_programs: int, now: float) -> None:
        """Reckon with what has changed for some programs, those looked at longest ago."""
        for _ in range(min(num_programs, len(self._members))):
            key, member = next(iter(self._members.items()))
            self._look(key, member, now)

    def clear(self) -> None:
        """Nobody is followed any more."""
        self._members.clear()
        self.blocks = self.work_s = 0.0

    # --- parts ------------------------------------------------------------------------
    def _member(self, program: str, now: float) -> _Member:
        member = self._members.get(program)
        if member is None:
            member = self._members[program] = _Member()
            if len(self._members) > self._max_programs:
                self._drop(*next(iter(self._members.items())))
        return member

    def _look(self, key: str, member: _Member, now: float) -> None:
        """Count what the program will ask for, from now on; or nothing, if it is over."""
        chance = self._chance(key, member, now)
        if chance is None:
            self._over(key, member)
            return
        self._members.move_to_end(key)
        own = max(0, self.num_blocks(member.size) - self.num_blocks(member.shared))
        left = self.full_size(member.size) - member.size
        work = self._costs.prefill_s(left, member.size)
        self._count(member, chance * own, chance * work)

    def _chance(self, key: str, member: _Member, now: float) -> float | None:
        """The chance that the program asks for its KV within a cycle; None if it is over. Whose
        turn stands at the gate asks for nothing yet."""
        if member.num_active:
            return 1.0
        forecast = self._away.forecast_of(key)
        if forecast is None:
            return 0.0 if key in self.at_gate else None
        gone = now - member.last_end
        back = forecast.within(gone)
        left = 1.0 - back
        return (forecast.within(gone + self.cycle_s) - back) / left if left > 0.0 else 0.0

    def _over(self, key: str, member: _Member) -> None:
        if member.num_turns > 1:
            if len(self._ends) == NUM_ENDS:
                self._ended_tokens -= self._ends[0]
            self._ends.append(member.size)
            self._ended_tokens += member.size
        self._drop(key, member)

    def _drop(self, key: str, member: _Member) -> None:
        self._count(member, 0.0, 0.0)
        del self._members[key]
        if not self._members:  # rounding does not pile up
            self.blocks = self.work_s = 0.0

    def _count(self, member: _Member, blocks: float, work_s: float) -> None:
        self.blocks += blocks - member.blocks
        self.work_s += work_s - member.work_s
        member.blocks, member.work_s = blocks, work_s
