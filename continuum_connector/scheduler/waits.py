"""Waits: what a turn in the queue may wait for, besides room. Meanwhile vLLM counts it, but is not
shown it.

- Gate: a place among the programs under way, for its program's first turn. Off by default. Looked
  at when the turn is queued.
- FromBelow: blocks that come up to DRAM. Looked at when vLLM tries the turn.
- SameLoad: blocks that come to VRAM already, for another turn. Looked at then, too.
- Bus: its load's turn on the bus. Looked at then, too. Such turns are kept in order.
- Adapters: a place for its adapter. Looked at when the turn is first in line.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from continuum_connector.costs import Costs, Level
from continuum_connector.observe.account import Account
from continuum_connector.scheduler.holds import BlockPool
from continuum_connector.scheduler.queue import ProgramQueue, QueueRank, Queues
from continuum_connector.scheduler.records import Records
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.tiers.traffic import Traffic
from continuum_connector.scheduler.turns import Away, InUse, Turn, Turns

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


LetIn = tuple[Turn, Because]  # why it may begin


class Gate:
    """Holds a program's first turn while those under way leave no room for it.

    If live KV exceeds VRAM and DRAM, each start pushes out another program's context, which must be
    computed or loaded again in every cycle, as long as too many programs are under way. No eviction
    order mends that. So the first turn in line begins once what programs under way will need within
    a cycle leaves room for its program, in VRAM or, if that is larger, in DRAM; or once nobody else
    is there; or once it has waited for `wait_s`. docs/decisions.md has the numbers.

    A program is under way from its first turn until we no longer expect it back. It counts with its
    present size: some programs grow while others end, so the sum is about what all of them hold. A
    program that has not begun counts with the size at which programs end, because first prompts are
    small. A program that is away counts by the probability that it is back within one cycle (the
    mean time from a program's turn to its next), so that dead chats take no room.

    At most `max_programs` are followed: beyond, the one evaluated longest ago is forgotten.

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
        self._line: OrderedDict[Turn, int] = OrderedDict()  # since their arrival; their tokens
        self._num_held: Counter[str] = Counter()  # by program
        self.members: OrderedDict[str, Member] = OrderedDict()  # evaluated longest ago is first
        self.blocks = 0.0  # that they will need within a cycle
        self._ends: deque[int] = deque(maxlen=NUM_ENDS)  # sizes
        self.cycle_s = FIRST_CYCLE_S
        self._num_cycles = 0

    def is_due(self) -> bool:
        """Whether a turn is held."""
        return bool(self._line)

    def __iter__(self) -> Iterator[str]:
        """The requests that wait here."""
        return (turn.request_id for turn in self._line)

    # --- which turns are held ---------------------------------------------------------
    def holds(self, turn: Turn, num_tokens: int, num_known: int) -> bool:
        """Whether the turn, which arrives, must wait here; repeated calls agree until it is let in.

        `num_known`: how many turns the engine has, including this one and those at the gate.
        """
        if turn in self._line:
            return True
        if not self.is_on or turn.is_let_in:
            return False
        is_small = self._num_blocks(num_tokens) < SMALL * self._costs.mean_blocks
        if not (is_small or self._may_pass(turn)):
            self._line[turn] = num_tokens
            self._num_held[turn.program.key] += 1
            if len(self._line) > 1 or self._why_now(turn, num_known - 1, turn.arrival) is None:
                return True
            self.left(turn)
        turn.is_let_in = True
        self._let_in(turn, num_tokens, not is_small, turn.arrival)
        return False

    def open(self, num_known: int, now: float) -> Iterator[LetIn]:
        """Let in turns that may begin now; called before each step. `num_known`: see `holds`."""
        num_let_in = num_known - len(self._line)
        while self._line:
            first = next(iter(self._line))
            because = self._why_now(first, num_let_in, now)
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

    def _why_now(self, turn: Turn, num_let_in: int, now: float) -> Because | None:
        if num_let_in <= 0:
            return Because.EMPTY
        if now >= turn.arrival + self._wait_s:
            return Because.DEADLINE
        self.refresh(REFRESHED_PER_STEP, now)
        # VRAM or DRAM, not their sum: what turns have in VRAM needs room in DRAM at their ends.
        wanted = self.blocks + self._num_blocks(self.full_size(self._line[turn]))
        return Because.FITS if wanted <= self._room() else None

    def full_size(self, num_tokens: int) -> int:
        """How many tokens a program that now has `num_tokens` will have when it ends."""
        return max(num_tokens, sum(self._ends) // max(1, len(self._ends)))

    def _begin(self, first: Turn, because: Because, now: float) -> Iterator[LetIn]:
        """Let in the turn and all others of its program, because the program has begun now."""
        for turn, num_tokens in list(self._line.items()):
            if turn.program is not first.program:
                continue
            self.left(turn)
            turn.is_let_in, turn.held_s = True, now - turn.arrival
            self._account.count("gate_opened", label=because.value)
            self._account.observe("gate_wait_seconds", turn.held_s)
            self._let_in(turn, num_tokens, True, now)
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


CHECKED_PER_STEP = 256  # hidden turns that a step looks at
AGAIN_S = 0.01  # a turn admitted sooner than this is not looked up again: its blocks hardly moved


class FromBelow:
    """Has blocks brought up to DRAM for waiting turns, and hides from vLLM the turns that wait for
    them; in vLLM's own queues such a turn is asked in every step. Does nothing where none can come
    up."""

    def __init__(self, tier: Tier, pool: BlockPool, turns: Turns, token_size: int) -> None:
        """`token_size`: tokens per block hash."""
        self._below = tier.below
        self._pool = pool
        self._turns = turns
        self._size = token_size
        self._hidden: OrderedDict[str, Turn] = OrderedDict()
        self.is_on = self._below.brings_up

    def bring_up(self, turn: Turn, request: Any, now: float) -> None:
        """The turn has arrived: the tiers may begin to bring up what it wants."""
        if not self.is_on or request.skip_reading_prefix_cache:
            return
        turn.below = self._below.bring_up(
            turn.program.key,
            request,
            num_vram_tokens=self._num_in_vram(request),
            num_turns=len(self._turns),
            now=now,
            before=turn.below,
        )

    def must_wait(self, turn: Turn, request: Any, now: float) -> bool:
        """vLLM would admit the turn now; return whether vLLM should pass it over, as more of its KV
        will be in DRAM soon.

        If the turn has waited in the queue, the tiers look once more: its blocks may have left VRAM
        or DRAM since it arrived. It has not been passed over yet, so its patience begins anew.
        """
        if not self.is_on:
            return False
        if not turn.was_tried:
            turn.was_tried = True
            if now - turn.arrival > AGAIN_S:
                self.bring_up(turn, request, now)
        turn.awaits_below = self._below.awaits(turn.request_id, now)
        return turn.awaits_below

    def hides(self, request: Any) -> bool:
        """Whether to hide from vLLM a request that it puts back, because `must_wait` said so, until
        `let_in` yields it. In every step vLLM looks up the prompts of all requests that it sees."""
        turn = self._turns.get(request.request_id)
        if turn is None or not turn.awaits_below:
            return False
        self._hidden[turn.request_id] = turn
        return True

    def let_in(self, now: float, everybody: bool = False) -> Iterator[str]:
        """Yield the hidden requests that no longer wait for a tier; called before each step.

        Looks at a limited number of them, so that thousands of hidden requests make no step slower.
        `everybody`: yield all of them, so that none stays hidden.
        """
        num = len(self._hidden)
        for _ in range(num if everybody else min(num, CHECKED_PER_STEP)):
            request_id, turn = self._hidden.popitem(last=False)
            turn.awaits_below = not everybody and self._below.awaits(request_id, now)
            if turn.awaits_below:
                self._hidden[request_id] = turn
            else:
                yield request_id

    def is_due(self) -> bool:
        """Whether a turn is hidden."""
        return bool(self._hidden)

    def left(self, turn: Turn) -> None:
        """The turn is over."""
        self._hidden.pop(turn.request_id, None)

    def _num_in_vram(self, request: Any) -> int:
        """How many tokens of the prompt VRAM has, block by block as vLLM looks when it admits the
        turn: a chain's tail, held by its store, may outlast the head."""
        hashes, find = request.block_hashes, self._pool.get_cached_block
        missing = (number for number, each in enumerate(hashes) if find(each, [0]) is None)
        return next(missing, len(hashes)) * self._size


class SameLoad:
    """Makes a turn wait whose first block to load comes to VRAM already, for another turn. Then it
    shares that turn's blocks, also those that are computed behind the loaded ones, as it would on
    stock vLLM. Else each of n samples would load what they begin with, and compute all the rest of
    one prompt: vLLM looks up no turn again that has loaded."""

    is_on = True

    def __init__(self, tier: Tier, turns: Turns, token_size: int) -> None:
        """`token_size`: tokens per block hash."""
        self._tier = tier
        self._turns = turns
        self._size = token_size
        self._hidden: dict[bytes, dict[str, Turn]] = {}  # by that block

    def must_wait(self, turn: Turn, request: Any, num_vram_tokens: int) -> bool:
        """The turn may load what follows so many tokens; return whether vLLM should pass it over
        instead."""
        first = request.block_hashes[num_vram_tokens // self._size]
        turn.awaits_load = first if self._tier.is_coming(first) else None
        return turn.awaits_load is not None

    def hides(self, request: Any) -> bool:
        """Whether to hide from vLLM a request that it puts back, because `must_wait` said so, until
        `let_in` yields it."""
        turn = self._turns.get(request.request_id)
        if turn is None or turn.awaits_load is None or not self._tier.is_coming(turn.awaits_load):
            return False
        self._hidden.setdefault(turn.awaits_load, {})[turn.request_id] = turn
        return True

    def let_in(self, everybody: bool = False) -> Iterator[str]:
        """Yield the hidden requests for which nothing comes any more. `everybody`: yield all."""
        for first in list(self._hidden):
            if everybody or not self._tier.is_coming(first):
                for turn in self._hidden.pop(first).values():
                    turn.awaits_load = None
                    yield turn.request_id

    def is_due(self) -> bool:
        """Whether a turn is hidden."""
        return bool(self._hidden)

    def left(self, turn: Turn) -> None:
        """The turn is over."""
        if turn.awaits_load is not None and turn.awaits_load in self._hidden:
            self._hidden[turn.awaits_load].pop(turn.request_id, None)


# At most this many turns per step are told to wait; after them vLLM asks no further turn.
MAX_PASSED = 16
# Beyond the places of those that run one turn may load, and one more for each so many places.
LOAD_AHEAD = 16
TIME_CONSTANT_S = 10.0  # many loads, of a second or less, with the wait before them


class Bus:
    """Makes turns that want a load wait while the bus is full.

    A load has its VRAM blocks from the moment it begins. While it waits behind other loads, pins
    give way to it. The programs of those pins return meanwhile and must load as well, and the bus
    is never free again. So a turn that wants a load waits in the queue, without a block, while the
    loads under way keep the bus busy for longer than the next step may take. vLLM does not ask it
    again until then, because vLLM looks up the whole prompt of each turn that it asks. The bus
    never idles because of this, and turns that need no load pass the waiting ones.

    So does a turn that would load beyond the places of those that run. A turn that loads takes no
    place, but once it has loaded vLLM admits it before all others, an urgent one included. So only
    a few load ahead of a place that becomes free.

    `queues`: our queues, in which turns wait. Without them no turn waits for the bus: in vLLM's
    own queues no turn may pass another. `max_running`: how many turns run at once. A turn's own
    record says what it wants."""

    is_on = True

    def __init__(
        self, traffic: Traffic, costs: Costs, queues: Queues, turns: Turns, max_running: int
    ) -> None:
        self._max_with_kv = max_running + 1 + max_running // LOAD_AHEAD
        self._traffic = traffic
        self._costs = costs
        self._queues = queues
        self._turns = turns
        self._num_waiting = 0
        self._num_passed = 0  # in this step, or the last one
        self._level = Level(TIME_CONSTANT_S)  # of turns that load, or wait to

    def sets_aside(self, request: Any) -> bool:
        """Whether the turn waits: it is hidden, but kept in order."""
        turn = self._turns.get(request.request_id)
        return turn is not None and turn.num_wanted > 0

    def is_due(self) -> bool:
        """Whether a turn waits, or was passed over in the last step."""
        return bool(self._num_waiting or self._num_passed)

    def hold_back(self, turn: Turn, num_blocks: int, now: float) -> bool:
        """Make the turn, which asks to load `num_blocks`, wait if the loads under way will take
        longer than the next step, or will leave it no place; return whether it does."""
        if not self._queues or not self._is_full(0, 0, now):
            return False
        self._num_waiting += not turn.num_wanted
        turn.num_wanted = num_blocks
        self._num_passed += 1
        if self._num_passed >= MAX_PASSED:
            self.close()
        return True

    def close(self) -> None:
        """Let vLLM ask no further turn in this step."""
        self._num_passed = MAX_PASSED
        self._queues.set_open(False)

    def new_step(self, now: float) -> None:
        """Let vLLM ask the first turns in line again: as many as fill the bus. If no load is under
        way, a step's share of them (MAX_PASSED), since they may not need a load any more."""
        self._num_passed = 0
        self._queues.set_open(True)
        is_idle, num_recalled, num_blocks = not self._traffic.num_loads, 0, 0
        while self._num_waiting:
            is_enough = (
                num_recalled == MAX_PASSED
                if is_idle
                else self._is_full(num_recalled, num_blocks, now)
            )
            if is_enough:
                return
            num_blocks += self._recall()
            num_recalled += 1

    def count(self, now: float) -> None:
        """A step is planned: see how many turns load, or wait to."""
        self._level.set(self._traffic.num_loads + self._num_waiting, now)

    def num_turns(self, now: float) -> float:
        """The recent average of that: one more load delays each of them by its time on the bus."""
        return self._level.mean(now)

    def end(self) -> None:
        """Let vLLM ask all turns again; none waits for the bus any more."""
        self._num_passed = 0
        while self._num_waiting:
            self._recall()
        self._queues.set_open(True)

    def left(self, turn: Turn) -> None:
        """The turn waits no more, or is over."""
        if turn.num_wanted:
            self._num_waiting -= 1
            turn.num_wanted = 0

    # --- parts ------------------------------------------------------------------------
    def _recall(self) -> int:
        """Let vLLM ask the first turn in line again; returns how many blocks it wanted."""
        request_id = self._queues.release_first_aside()
        if request_id is None:  # the turns left stand where vLLM's own queue keeps those with KV
            for each in self._turns.all():
                self.left(each)
            return 0
        turn = self._turns.get(request_id)
        if turn is None:
            return 0
        num_wanted = turn.num_wanted
        self.left(turn)
        return num_wanted

    def _is_full(self, num_turns: int, num_blocks: int, now: float) -> bool:
        """Whether the loads under way, and that of so many blocks for so many more turns, keep the
        bus busy until after the next step, or another one would load too far ahead of a place."""
        if not self._traffic.num_loads:
            return False
        if self._turns.num_with_kv + num_turns >= self._max_with_kv:
            return True
        gone_s = now - self._traffic.loads_since
        left_s = self._costs.bus_s(self._traffic.num_load_blocks + num_blocks) - gone_s
        _, longest_s = self._costs.step_s
        return left_s > longest_s


class Adapters:
    """A turn that loads keeps a place for its LoRA adapter. `max_loras`: how many a step can have,
    0 if the server has none.

    A step computes with at most `max_loras` adapters, and vLLM passes over a waiting turn whose
    adapter would be one too many. It counts the adapters of running turns alone
    (v1/core/sched/scheduler.py, schedule()). A turn that loads does not run yet, so turns with
    other adapters would be admitted meanwhile. It would then wait with its blocks until none of
    those is left: for ever, if they keep coming. So from the beginning of its load its adapter
    counts as if the turn ran.

    While nobody loads, and once the tier is down, as after a load that hangs, vLLM's own count is
    all there is.
    """

    def __init__(self, max_loras: int, tier: Tier, turns: Turns) -> None:
        self.is_on = max_loras > 0
        self._max_loras = max_loras
        self._tier = tier
        self._turns = turns
        self._in_use: Counter[int] = Counter()  # turns by adapter
        self._awaited: Counter[int] = Counter()  # of those, turns that load, or have loaded
        self._passed: dict[str, None] = {}
        self._has_changed = False

    def __iter__(self) -> Iterator[str]:
        """The turns that were passed over and wait."""
        return iter(self._passed)

    def is_due(self) -> bool:
        """Whether there is one."""
        return bool(self._passed)

    def allocated(self, turn: Turn, request: Any, loads: bool) -> None:
        """vLLM has admitted the turn: to load, or to run."""
        if not self.is_on or not request.lora_request:
            return
        self.left(turn)
        turn.adapter = InUse(request.lora_request.adapter_id, loads)
        self._count(turn.adapter, 1)

    def left(self, turn: Turn) -> None:
        """The turn neither runs nor loads, nor waits here: it is over, was preempted, or has lost
        what it loaded."""
        if not self.is_on:
            return
        self._passed.pop(turn.request_id, None)
        self._count(turn.adapter, -1)
        turn.adapter = None

    def passes_over(self, request: Any) -> bool:
        """Whether the turn, if it were admitted, would take the place of one that loads. If so, it
        waits until `let_in` yields it."""
        if not (self._awaited and request.lora_request and self._tier.is_up):
            return False
        adapter = request.lora_request.adapter_id
        num_used = len(self._in_use) + (adapter not in self._in_use)
        if adapter in self._awaited or num_used <= self._max_loras:
            return False
        self._passed[request.request_id] = None
        return True

    def let_in(self, everybody: bool = False) -> Iterator[str]:
        """Yield the turns that were passed over, if that may be different now. `everybody`: yield
        all of them, and forget who loads, so that none is passed over again."""
        if self._has_changed or everybody or not self._tier.is_up:
            passed, self._passed = self._passed, {}
            for turn in self._turns.all() if everybody else ():
                self.left(turn)
            self._has_changed = False
            yield from passed

    def _count(self, use: InUse | None, change: int) -> None:
        if use is None:
            return
        adapter = use.adapter
        for counts in (self._in_use, self._awaited) if use.is_awaited else (self._in_use,):
            counts[adapter] += change
            if counts[adapter] == max(change, 0):  # the first turn with it, or the last
                self._has_changed = True
            if not counts[adapter]:
                del counts[adapter]


class Waits:
    """All five of one engine, and the queues in which turns wait for them."""

    def __init__(
        self,
        gate: Gate,
        from_below: FromBelow,
        same_load: SameLoad,
        bus: Bus,
        adapters: Adapters,
        queues: Queues,
        turns: Turns,
        records: Records,
    ) -> None:
        self.gate, self.from_below, self.same_load = gate, from_below, same_load
        self.bus, self.adapters = bus, adapters
        self._queues = queues
        self._turns = turns
        self._records = records
        # Those that this server has: two on most.
        every = (gate, from_below, same_load, bus, adapters)
        self._on = [wait for wait in every if wait.is_on]
        self._held = [wait for wait in (gate, adapters) if wait.is_on]

    def make_queue(
        self, rank: Callable[[Any], QueueRank], is_new: Callable[[Any], bool], has_gate: bool
    ) -> ProgramQueue:
        """A queue in which turns wait for them. `is_new(request)`: whether a request that is queued
        has not run yet, so that the gate may hold it. `has_gate`: whether it may hold any."""

        def is_held(request: Any) -> bool:
            turn = self._turns.get(request.request_id)
            if turn is None or not is_new(request):
                return False
            return self.gate.holds(turn, request.num_tokens, len(self._turns))

        return ProgramQueue(
            rank,
            holds=is_held if self.gate.is_on and has_gate else None,
            hides=self._hides,
            sets_aside=self.bus.sets_aside,
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
        self._queues.release(self.same_load.let_in())
        self._queues.release(self.adapters.let_in())
        self._through_gate(self.gate.open(len(self._turns) - num_idle, now), now)

    def let_all_in(self, now: float) -> None:
        """Show vLLM all turns: none waits any more."""
        self.bus.end()
        self._queues.release(self.from_below.let_in(now, everybody=True))
        self._queues.release(self.same_load.let_in(everybody=True))
        self._queues.release(self.adapters.let_in(everybody=True))
        self._through_gate(self.gate.let_all_in(now), now)

    def left(self, turn: Turn) -> None:
        """The turn is over, and waits for nothing any more."""
        for wait in self._on:
            wait.left(turn)

    def _hides(self, request: Any) -> bool:
        """Whether to hide from vLLM a request that it puts back."""
        return self.from_below.hides(request) or self.same_load.hides(request)

    def _through_gate(self, let_in: Iterable[LetIn], now: float) -> None:
        """Record each, and show it to vLLM."""
        for turn, because in let_in:
            said = {"because": because.value, "held_s": turn.held_s}
            self._records.happened("let_in", now, turn, **said)
            self._queues.release((turn.request_id,))
