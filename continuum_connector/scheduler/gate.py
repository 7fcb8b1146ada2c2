"""Gate: holds a program's first turn while those under way leave no room for it. Off by default.

If live KV exceeds VRAM and DRAM, each start pushes out another program's context, which must be
computed or loaded again in every cycle, as long as too many programs are under way. No eviction
order mends that. So the first turn in line begins once what programs under way will need within a
cycle leaves room for its program, in VRAM or, if that is larger, in DRAM; or once nobody else is
there; or once it has waited for `wait_s`. docs/decisions.md has the numbers.

A program is under way from its first turn until we no longer expect it back. It counts with its
present size: some programs grow while others end, so the sum is about what all of them hold. A
program that has not begun counts with the size at which programs end, because first prompts are
small. A program that is away counts by the probability that it is back within one cycle (the mean
time from a program's turn to its next), so that dead chats take no room.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from continuum_connector.costs import Costs
from continuum_connector.observe.account import Account
from continuum_connector.scheduler.turns import Away, Turn

# Share of a mean turn: a smaller prompt passes, and its program is held once it has grown.
SMALL = 0.2
REFRESHED_PER_STEP = 4  # programs under way, while a turn is held
NUM_ENDS = 50  # the mean size is taken over this many programs that ended
CYCLE_WEIGHT = 1 / 20  # weight of the newest cycle in the mean
FIRST_CYCLE_S = 1.0  # until one is measured; too short on purpose, so that programs may begin


class Because(enum.Enum):
    """Why a turn that was held may begin."""

    FITS = "fits"
    EMPTY = "empty"  # no other turn is under way
    DEADLINE = "deadline"  # it has waited long enough
    SWITCHED_OFF = "switched_off"


@dataclass(eq=False, slots=True)
class Member:
    """A program under way. `size`: its tokens at its last turn. `shared`: the tokens that its first
    turn found in a cache, which others hold. `has_begun`: whether its turns pass the gate.
    `blocks`: its part of the sum."""

    size: int = 0
    shared: int = 0
    num_active: int = 0
    num_turns: int = 0
    last_arrival: float = -math.inf
    last_end: float = -math.inf
    has_begun: bool = False
    blocks: float = 0.0


class Held(NamedTuple):
    """What the gate knows of a turn: its tokens, and since when it waits here."""

    num_tokens: int
    since: float


LetIn = tuple[Turn, Because]  # why it may begin


class Gate:
    """The turns that are held, and the programs under way, of which at most `max_programs` are
    followed: beyond, the one evaluated longest ago is forgotten.

    `wait_s`: a turn is held for at most this long; 0: no turn is held. `room()`: how many blocks
    VRAM or DRAM can hold; `num_blocks(num_tokens)`: how many those take. For one thread; `now` is
    monotonic seconds. Microseconds per call.
    """

    def __init__(
        self,
        wait_s: float,
        room: Callable[[], int],
        num_blocks: Callable[[int], int],
        costs: Costs,
        away: Away,
        max_programs: int,
        account: Account,
    ) -> None:
        self.is_on = wait_s > 0.0
        self._wait_s = wait_s
        self._room = room
        self._num_blocks = num_blocks
        self._costs = costs
        self._away = away
        self._max_programs = max_programs
        self._account = account
        self._line: OrderedDict[Turn, Held] = OrderedDict()
        self._num_held: Counter[str] = Counter()  # by program
        self.members: OrderedDict[str, Member] = OrderedDict()  # evaluated longest ago is first
        self.blocks = 0.0  # that they will need within a cycle
        self._ends: deque[int] = deque(maxlen=NUM_ENDS)  # sizes
        self.cycle_s = FIRST_CYCLE_S
        self._num_cycles = 0

    def __len__(self) -> int:
        return len(self._line)

    def is_due(self) -> bool:
        """Whether a turn is held."""
        return bool(self._line)

    def __iter__(self) -> Iterator[str]:
        """The requests that wait here."""
        return (turn.request_id for turn in self._line)

    # --- which turns are held ---------------------------------------------------------
    def holds(self, turn: Turn, num_tokens: int, num_known: int, now: float) -> bool:
        """Whether the turn must wait here; repeated calls agree until it is let in.

        `num_known`: how many turns the engine has, including this one and those at the gate.
        """
        if turn in self._line:
            return True
        if not self.is_on or turn.is_let_in:
            return False
        is_small = self._num_blocks(num_tokens) < SMALL * self._costs.mean_blocks
        if not (is_small or self._may_pass(turn)):
            held = self._line[turn] = Held(num_tokens, now)
            self._num_held[turn.program.key] += 1
            if len(self._line) > 1 or self._why_now(held, num_known - 1, now) is None:
                return True
            self.left(turn)
        turn.is_let_in = True
        self._let_in(turn, num_tokens, not is_small, now)
        return False

    def open(self, num_known: int, now: float) -> Iterator[LetIn]:
        """Let in turns that may begin now; called before each step. `num_known`: see `holds`."""
        num_let_in = num_known - len(self._line)
        while self._line:
            first, held = next(iter(self._line.items()))
            because = self._why_now(held, num_let_in, now)
            if because is None:
                return
            for one in self._begin(first, because, now):
                num_let_in += 1
                yield one

    def let_all_in(self, now: float) -> Iterator[LetIn]:
        """Let in all turns, and follow no program any more."""
        while self._line:
            yield from self._begin(next(iter(self._line)), Because.SWITCHED_OFF, now)
        self.members.clear()
        self.blocks = 0.0

    def left(self, turn: Turn) -> None:
        """The turn is over; if it was held, its client went away."""
        if self._line.pop(turn, None) is not None:
            program = turn.program.key
            self._num_held[program] -= 1
            if not self._num_held[program]:
                del self._num_held[program]

    # --- what happened to those let in ------------------------------------------------
    def found(self, turn: Turn, num_tokens: int) -> None:
        """A turn was admitted, and `num_tokens` of its prompt were found in a cache."""
        member = self.members.get(turn.program.key)
        if member is not None and member.num_turns == 1:
            member.shared = num_tokens

    def finished(self, turn: Turn, num_tokens: int, now: float) -> None:
        """A turn that was let in has ended with `num_tokens`."""
        member = self.members.get(turn.program.key)
        if member is None:
            return
        member.num_active = max(0, member.num_active - 1)
        member.last_end = now
        member.size = max(member.size, num_tokens)
        self._evaluate(turn.program.key, member, now)

    def refresh(self, num_programs: int, now: float) -> None:
        """Evaluate `num_programs` again, as chances change with time: those whose last evaluation
        is the oldest."""
        for _ in range(min(num_programs, len(self.members))):
            self._evaluate(*next(iter(self.members.items())), now)

    def update_gauges(self) -> None:
        """Set the gauges, which are levels, not events; called about once a second."""
        self._account.gauge("gate_held", len(self._line))
        self._account.gauge("working_set_blocks", self.blocks)
        self._account.gauge("working_set_programs", len(self.members))

    # --- parts ------------------------------------------------------------------------
    def _may_pass(self, turn: Turn) -> bool:
        """Whether the turn passes unheld. A program that has begun does, and so does a child that
        names its parent, because the parent waits for it. So does a program's last turn, after
        which the program needs no KV again. A program that is not followed has begun if one of its
        turns has ended, as when that happened while we were switched off."""
        hints, member = turn.identity.hints, self.members.get(turn.program.key)
        has_begun = turn.program.num_finished > 0 if member is None else member.has_begun
        return has_begun or hints.parent is not None or (bool(hints.final) and not turn.is_stray)

    def _why_now(self, held: Held, num_let_in: int, now: float) -> Because | None:
        if num_let_in <= 0:
            return Because.EMPTY
        if now >= held.since + self._wait_s:
            return Because.DEADLINE
        self.refresh(REFRESHED_PER_STEP, now)
        # VRAM or DRAM, not their sum: what turns have in VRAM needs room in DRAM at their ends.
        wanted = self.blocks + self._num_blocks(self.full_size(held.num_tokens))
        return Because.FITS if wanted <= self._room() else None

    def full_size(self, num_tokens: int) -> int:
        """How many tokens a program that now has `num_tokens` will have when it ends."""
        return max(num_tokens, sum(self._ends) // max(1, len(self._ends)))

    def _begin(self, first: Turn, because: Because, now: float) -> Iterator[LetIn]:
        """Let in the turn and all others of its program, because the program has begun now."""
        for turn, held in list(self._line.items()):
            if turn.program is not first.program:
                continue
            self.left(turn)
            turn.is_let_in, turn.held_s = True, now - held.since
            self._account.count("gate_opened", label=because.value)
            self._account.observe("gate_wait_seconds", turn.held_s)
            self._let_in(turn, held.num_tokens, True, now)
            yield turn, because

    def _let_in(self, turn: Turn, num_tokens: int, has_begun: bool, now: float) -> None:
        """The turn may be admitted. `has_begun`: all later turns of its program may be, too."""
        key = turn.program.key
        member = self.members.setdefault(key, Member())
        if len(self.members) > self._max_programs:
            self._drop(*next(iter(self.members.items())))
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
        self._evaluate(key, member, now)
        self.refresh(2, now)  # so that programs that are over leave even if no turn is held

    def _evaluate(self, key: str, member: Member, now: float) -> None:
        """Update what the program adds to the sum; if it is over, remove it."""
        chance = self._chance(key, member, now)
        if chance is None:
            if member.num_turns > 1:
                self._ends.append(member.size)
            self._drop(key, member)
            return
        self.members.move_to_end(key)
        own = max(0, self._num_blocks(member.size) - self._num_blocks(member.shared))
        self.blocks += chance * own - member.blocks
        member.blocks = chance * own

    def _chance(self, key: str, member: Member, now: float) -> float | None:
        """The probability that the program needs its KV within a cycle; None if it is over. A
        program with a turn held at the gate needs nothing yet."""
        if member.num_active:
            return 1.0
        forecast = self._away.forecast_of(key)
        if forecast is None:
            return 0.0 if key in self._num_held else None
        gone = now - member.last_end
        back = forecast.within(gone)
        left = 1.0 - back
        return (forecast.within(gone + self.cycle_s) - back) / left if left > 0.0 else 0.0

    def _drop(self, key: str, member: Member) -> None:
        del self.members[key]
        # So that rounding errors do not pile up.
        self.blocks = self.blocks - member.blocks if self.members else 0.0
