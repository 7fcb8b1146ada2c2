"""WorkingSet: the programs under way, and how much of their KV will be needed within a cycle.

A program is under way from its first turn until we no longer expect it back. It counts with its
present size: some programs grow while others end, so the sum is about what all of them hold. A
program that has not begun counts with the size at which programs end, because first prompts are
small. A program that is away counts by the probability that it is back within one cycle (the mean
time from a program's turn to its next), so that dead chats take no memory in this sum.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from continuum_connector.costs.costs import Costs
from continuum_connector.scheduler.away import Away
from continuum_connector.scheduler.turns import Turn

NUM_ENDS = 50  # the mean size is taken over this many programs that ended
CYCLE_WEIGHT = 1 / 20  # weight of the newest cycle in the mean
FIRST_CYCLE_S = 1.0  # until one was seen; too short, so programs begin as if nothing were known


@dataclass(eq=False, slots=True)
class _Member:
    """A program under way. `size`: its tokens at its last turn. `shared`: the tokens that its first
    turn found in a cache. `has_begun`: whether its turns pass the gate. `blocks`, `work_s`: its
    part of the sums."""

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
    """Programs by key, at most `max_programs`; beyond that, the one evaluated longest ago is
    forgotten. Microseconds per call.

    The sums depend on probabilities, which change with time, so every step that needs the sums
    evaluates a few programs again. `num_blocks(num_tokens)`: how many KV blocks those take.
    """

    def __init__(
        self, costs: Costs, away: Away, num_blocks: Callable[[int], int], max_programs: int
    ) -> None:
        self._costs = costs
        self._away = away
        self.num_blocks = num_blocks
        self._max_programs = max_programs
        self._members: OrderedDict[str, _Member] = OrderedDict()  # evaluated longest ago is first
        # Program -> its requests held at the gate; the gate fills it.
        self.at_gate: dict[str, dict[str, None]] = {}
        self._ends: deque[int] = deque(maxlen=NUM_ENDS)
        self._ended_tokens = 0
        self._num_cycles = 0
        self._num_finished = 0
        self._num_followed = 0
        self.cycle_s = FIRST_CYCLE_S
        self.blocks = 0.0  # blocks that will be needed within a cycle
        self.work_s = 0.0  # GPU seconds that programs under way still need

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, program: str) -> bool:
        return program in self._members

    @property
    def return_share(self) -> float:
        """The share of finished turns after which another turn of their program came."""
        return min(1.0, (self._num_followed + 1) / (self._num_finished + 1))

    def full_size(self, num_tokens: int) -> int:
        """How many tokens a program that now has `num_tokens` will have when it ends."""
        mean = self._ended_tokens // len(self._ends) if self._ends else 0
        return max(num_tokens, mean)

    def has_begun(self, turn: Turn) -> bool:
        """Whether the turn's program has been let in. A program that is not in the table counts as
        let in if one of its turns has ended, as when that happened while we were switched off."""
        member = self._members.get(turn.program.key)
        return turn.program.num_finished > 0 if member is None else member.has_begun

    # --- what happened ----------------------------------------------------------------
    def let_in(self, turn: Turn, num_tokens: int, has_begun: bool, now: float) -> None:
        """A turn may be admitted. `has_begun`: all later turns of its program may be, too."""
        member = self._member(turn.program.key, now)
        if member.num_turns:
            self._num_followed += 1
        gone_s = turn.arrival - member.last_arrival
        if member.num_turns and gone_s >= 0.0:  # negative if a later turn passed it at the gate
            self._num_cycles += 1
            weight = max(CYCLE_WEIGHT, 1 / self._num_cycles)
            self.cycle_s += weight * (gone_s - self.cycle_s)
        member.last_arrival = max(member.last_arrival, turn.arrival)
        member.num_turns += 1
        member.num_active += 1
        member.has_begun |= has_begun
        member.size = max(member.size, num_tokens)
        self._refresh(turn.program.key, member, now)
        self.refresh(2, now)  # so that programs that are over leave even if no turn is held

    def found(self, turn: Turn, num_tokens: int) -> None:
        """A turn was admitted, and `num_tokens` of its prompt were found in a cache."""
        member = self._members.get(turn.program.key)
        if member is not None and member.num_turns == 1:
            member.shared = num_tokens

    def finished(self, turn: Turn, num_tokens: int, now: float) -> None:
        """A turn that was let in has ended with `num_tokens`."""
        member = self._members.get(turn.program.key)
        if member is None:
            return
        self._num_finished += 1
        member.num_active = max(0, member.num_active - 1)
        member.last_end = now
        member.size = max(member.size, num_tokens)
        self._refresh(turn.program.key, member, now)

    def refresh(self, num_programs: int, now: float) -> None:
        """Evaluate `num_programs` again: those whose last evaluation is the oldest."""
        for _ in range(min(num_programs, len(self._members))):
            key, member = next(iter(self._members.items()))
            self._refresh(key, member, now)

    def clear(self) -> None:
        """Forget all programs."""
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

    def _refresh(self, key: str, member: _Member, now: float) -> None:
        """Update what the program adds to the sums; if it is over, remove it."""
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
        """The probability that the program needs its KV within a cycle; None if it is over. A
        program with a turn held at the gate needs nothing yet."""
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
        if not self._members:  # so that rounding errors do not pile up
            self.blocks = self.work_s = 0.0

    def _count(self, member: _Member, blocks: float, work_s: float) -> None:
        self.blocks += blocks - member.blocks
        self.work_s += work_s - member.work_s
        member.blocks, member.work_s = blocks, work_s
