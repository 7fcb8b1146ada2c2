"""Turn, LivePin, Absence: what the scheduler half knows of a request, of a pin and of a program
that is away; and Turns, PinTable, Away: the one table of each.

Turns also answers what making room in DRAM asks of waiting turns. An absence has gaps, from which
we learn how long absences last, and an OpenDecision, of which we report how good it was. Decider
and Records end these. No other table knows which programs are away, and nothing else looks for
programs that have fallen silent.
"""

from __future__ import annotations

import enum
import itertools
import math
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from continuum_connector.errors import InvariantError
from continuum_connector.forecast import Forecast, Gap, Gaps
from continuum_connector.observe.account import Told
from continuum_connector.policy.base import After
from continuum_connector.programs.continuation import Divergence, Kept, PromptText
from continuum_connector.programs.program import MAX_LEFT, OVER_S, Identity, Program
from continuum_connector.scheduler.holds import Hold
from continuum_connector.scheduler.kv_groups import NO_BLOCKS, ChainBlocks
from continuum_connector.scheduler.queue import LazyHeap
from continuum_connector.toolcalls import Asked, Ending

MAX_HELD = 8  # gaps of a program
_MAX_SILENT = 8  # per step, because after a quiet night thousands of programs may be over at once


class TurnEnd(enum.Enum):
    """How vLLM says that a request ended."""

    STOP = "stop"  # the model ended its answer
    LENGTH = "length"  # it reached a token limit
    ABORTED = "aborted"  # by the API server: a stop string matched, or the client went away
    FAILED = "failed"  # by vLLM, as after a load that failed


BY_ITSELF = (TurnEnd.STOP, TurnEnd.LENGTH)  # it ran, so nothing is being loaded for it


class State(enum.Enum):
    """Where a turn stands; `Turns` alone moves it."""

    WAITING = "waiting"  # it has never run
    RUNNING = "running"  # it computes, or loads first
    PREEMPTED = "preempted"  # and it has not been admitted again yet


def strays(
    program: Program,
    identity: Identity,
    hashes: Sequence[bytes],
    text: PromptText,
) -> bool:
    """Whether a turn says `final` without continuing what its program's last turn left.

    A program's id can be guessed, and a call that is no part of the program may carry it, so
    the content must show whether the turn really ends the program. If no turn of the program
    has left anything yet, another turn under way shows that there is more to come. A stray turn
    has its place in the queue, and takes nothing of the program.
    """
    if not identity.hints.final:
        return False
    kept = program.kept
    if not kept.marks:
        return program.num_active > 1
    is_edited = kept.goes_on_in(hashes) and text.repeats(kept)
    return not (kept.continued(hashes, text) or is_edited)


class InUse(NamedTuple):
    """An adapter's id. `is_awaited`: the turn that uses it loads, or has loaded, and does not run
    yet."""

    adapter: int
    is_awaited: bool


@dataclass(frozen=True)
class AgainstStock:
    """A turn's prompt tokens: those that only we kept, those that stock vLLM would have kept too,
    and those that stock would have kept and we did not."""

    only_ours: int
    stock_too: int
    only_stock: int

    @classmethod
    def of(cls, num_found: int, num_in_stock: int) -> AgainstStock:
        too = min(num_found, num_in_stock)
        return cls(num_found - too, too, num_in_stock - too)

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))


@dataclass(eq=False)
class Turn:
    """One request while vLLM knows it: the one record of it. `number` counts the program's turns
    from 1; `arrival` is monotonic seconds. What becomes of it is written by the module that sees
    it: each field by one (tests/test_layering.py).

    `is_stray`: what `strays` said at its arrival, and says again at its end. `since`: the end of
    the earlier turn that it continues, the key in `Program.left`; None if it continues none.
    `num_common`: how many blocks others begin with of what that left; None if nobody can be sure.
    `may_begin_alike`: it has no more than those in common with it.
    `diverged`: where its prompt departs from its program's earlier ones, if it repeats them without
    continuing any. `epoch`: the epoch of its oldest KV.

    `vram_tokens`: tokens that VRAM had for it when vLLM last looked before it ran; `hit_tokens`:
    tokens of its prompt that were found, by memory, nearest first, once it runs; `stock_tokens`:
    what stock vLLM would have had for it, None if nobody knows (stock.py). `came_for`: the pin of
    the chain that it continues; `taken`: what that held for it. `is_let_in`: the gate let it pass,
    after `held_s`. `was_tried`: vLLM has tried to admit it, where a memory lies below DRAM.
    `below`: what that had for it, if anything of use. `awaits_below`: when last asked, it had to
    wait for some of that to come up; `awaits_load`: the hash of the block that it waits for because
    another turn's load brings it.
    `num_wanted`: blocks that it wants to load, while it waits for the bus. `adapter`: what it uses
    of a step's places for adapters.
    """

    request_id: str
    program: Program
    identity: Identity
    number: int
    arrival: float
    num_prompt_tokens: int = 0
    is_stray: bool = False
    since: float | None = None
    num_common: int | None = None
    may_begin_alike: bool = False
    diverged: Divergence | None = None
    epoch: int = 0
    state: State = State.WAITING
    vram_tokens: int = 0
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    stock_tokens: int | None = None
    taken: ChainBlocks = NO_BLOCKS
    is_let_in: bool = False
    held_s: float = 0.0
    was_tried: bool = False
    below: Told | None = None
    awaits_below: bool = False
    awaits_load: bytes | None = None
    num_wanted: int = 0
    adapter: InUse | None = None
    came_for: LivePin | None = None
    program_arrival: float = field(init=False)  # its program's arrival, as it was when it came

    def __post_init__(self) -> None:
        self.program_arrival = self.program.arrival

    @property
    def is_admitted(self) -> bool:
        """Whether it has run, so that it may have held blocks."""
        return self.state is not State.WAITING

    @property
    def is_edit(self) -> bool:
        """Whether it may go on with what it continues, edited, or with another conversation that
        begins alike."""
        return self.since is not None and self.num_common is None

    @property
    def pin(self) -> LivePin | None:
        """The pin that waits for it."""
        return self.came_for if self.came_for is not None and self.came_for.ended is None else None

    @property
    def num_found(self) -> int:
        """Tokens of its prompt that were found, in any memory."""
        return sum(self.hit_tokens.values())

    @property
    def against_stock(self) -> AgainstStock | None:
        """The tokens that it found by who kept them; None if nobody knows."""
        if self.stock_tokens is None:
            return None
        return AgainstStock.of(self.num_found, self.stock_tokens)

    def place(self, head_start_s: float) -> float:
        """The turn's place in line, in monotonic seconds: its program's arrival, or half the head
        start earlier if its KV is pinned. The place is never earlier than its own arrival by more
        than the head start, so that a turn that comes later by that much cannot pass turns that
        already wait.
        """
        pin = self.pin
        return self._place(pin is not None and pin.leads(self), head_start_s)

    def victim_place(self, head_start_s: float) -> float:
        """Its place among those that run: its program's last turn ranks half the head start
        earlier."""
        is_last = bool(self.identity.hints.final) and not self.is_stray
        return self._place(is_last, head_start_s)

    def _place(self, is_ahead: bool, head_start_s: float) -> float:
        program = self.program.arrival - (head_start_s / 2 if is_ahead else 0.0)
        return max(program, self.arrival - head_start_s)


class PinEnd(enum.Enum):
    """Each pin ends with exactly one cause."""

    RETURNED = "returned"  # the program's next turn took the blocks over
    EXPIRED = "expired"  # the tool call took longer than the TTL
    PRESSURE = "pressure"  # a request needed the room, or the budget was full
    SUPERSEDED = "superseded"  # a turn that continues its chain ended
    LOSES = "loses"  # what pins keep finds less than stock vLLM would
    PROGRAM_DONE = "program_done"  # the program's last turn ended
    RESET = "reset"  # the prefix cache was reset
    SWITCHED_OFF = "switched_off"  # an operator switched the connector off
    SHUTDOWN = "shutdown"  # the server stopped


@dataclass(eq=False)
class LivePin:
    """A program's finished turn, kept in VRAM until `deadline` (monotonic seconds).

    `kept`: its chain, by which we see which turn continues it. `priority`: the user's, of the
    turn's request; the lower, the more urgent. From `asked_from` on only the client's request keeps
    the pin (`is_wish`), so it gives way first.
    """

    program: str
    hold: Hold
    blocks: ChainBlocks
    started: float
    deadline: float
    then: After
    rank: tuple[float, float]  # under pressure the lowest goes first
    kept: Kept
    priority: int = 0
    asked_from: float = math.inf
    is_wish: bool = False
    waiting: OrderedDict[Turn, None] = field(default_factory=OrderedDict)  # that are back for it
    ended: PinEnd | None = None
    value: float = field(init=False)  # worth when it was made; `rank` may have aged since

    def __post_init__(self) -> None:
        self.value = self.rank[0]

    @property
    def is_returning(self) -> bool:
        return bool(self.waiting)

    @property
    def first_waiting(self) -> Turn | None:
        """The turn that has this pin's place in the queue: the first of those that came back.

        Only one has it, because the first one admitted takes the pin, and thousands may have come.
        """
        return next(iter(self.waiting), None)

    def leads(self, turn: Turn) -> bool:
        """Whether the pin gives this turn its head start in the queue. Only the first turn that is
        back for it has that, and none if the pin is only a client's wish."""
        return not self.is_wish and self.first_waiting is turn

    @property
    def is_hinted(self) -> bool:
        """Whether the pin will last longer than the policy wanted, or does already."""
        return self.asked_from < self.deadline

    @property
    def next_change(self) -> float:
        return self.deadline if self.is_wish else min(self.asked_from, self.deadline)


class PinTable:
    """Pins by program, deadline and rank; every operation is O(log pins), or O(pins of a program),
    which are few."""

    def __init__(self) -> None:
        self._pins: OrderedDict[LivePin, None] = OrderedDict()
        self._of_program: dict[str, list[LivePin]] = {}  # the newest last
        self._by_deadline: LazyHeap[LivePin] = LazyHeap()
        self._by_rank: LazyHeap[LivePin] = LazyHeap()

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[LivePin]:
        return iter(list(self._pins))

    def __contains__(self, program: str) -> bool:
        return program in self._of_program

    def of(self, program: str) -> Sequence[LivePin]:
        """The program's pins, the newest last; of more than MAX_LEFT the newest, as each turn that
        arrives looks at all of them. The others hold what they hold until they end."""
        return tuple(self._of_program.get(program, ())[-MAX_LEFT:])

    def add(self, pin: LivePin) -> None:
        self._pins[pin] = None
        self._of_program.setdefault(pin.program, []).append(pin)
        self._queue(pin)

    def remove(self, pin: LivePin, cause: PinEnd) -> None:
        """Forget the pin and note why; its hold is the caller's to release."""
        if pin.ended is not None or pin not in self._pins:
            raise InvariantError(
                f"pin of {pin.program!r} ended twice: {pin.ended}, now {cause.value}"
            )
        del self._pins[pin]
        pins = self._of_program[pin.program]
        pins.remove(pin)
        if not pins:
            del self._of_program[pin.program]
        pin.ended = cause
        self._by_deadline.discard(pin)
        self._by_rank.discard(pin)

    def expect(self, pin: LivePin, turn: Turn) -> None:
        """The program's next turn has arrived: the pin cannot expire while it waits."""
        pin.waiting[turn] = None
        self._queue(pin)

    def unexpect(self, pin: LivePin, turn: Turn) -> None:
        """That turn went away without taking the pin: its deadline counts again."""
        pin.waiting.pop(turn, None)
        self._queue(pin)

    def make_wish(self, pin: LivePin) -> None:
        """From now on only its client wants the pin: it gives way before all that are no wish."""
        pin.is_wish = True
        self.revalue(pin, -math.inf)

    def revalue(self, pin: LivePin, value: float) -> None:
        """Give the pin a new worth; -inf: it is only a client's wish."""
        pin.rank = (value, pin.rank[1])
        self._queue(pin)

    def least_recent(self, number: int) -> list[LivePin]:
        """Up to `number` pins in turn, so that each is returned as often as any other."""
        pins = list(itertools.islice(self._pins, number))
        for pin in pins:
            self._pins.move_to_end(pin)
        return pins

    def due(self, now: float) -> list[LivePin]:
        """The pins whose deadline has passed, or the time for which the policy wanted them;
        earliest first. They stay registered.

        An idle engine takes no steps, so deadlines pass unseen; call this before every
        lookup. Cost grows with the number of pins that are due, not with those held.
        """
        found = []
        while (entry := self._by_deadline.first()) and entry[0][0] <= now:
            self._by_deadline.discard(entry[1])
            found.append(entry[1])
        return found

    def next_deadline(self) -> float:
        """The earliest time at which a pin is due, or infinity."""
        entry = self._by_deadline.first()
        return entry[0][0] if entry else math.inf

    def cheapest_first(self) -> Generator[LivePin, None, None]:
        """Pins in the order in which they give way; those that a turn came back for are last.

        O(log pins) per pin taken. The iterator must be exhausted or closed before the
        table is used otherwise.
        """
        passed = []
        try:
            while entry := self._by_rank.first():
                self._by_rank.discard(entry[1])
                passed.append(entry)
                yield entry[1]
        finally:
            for key, pin in passed:
                if pin.ended is None:
                    self._by_rank.push(key, pin)

    def _queue(self, pin: LivePin) -> None:
        is_returning = pin.is_returning
        if is_returning:
            self._by_deadline.discard(pin)
        else:
            self._by_deadline.push((pin.next_change,), pin)
        is_last = is_returning and not pin.is_wish
        self._by_rank.push((float(is_last), *pin.rank), pin)


class Turns:
    """Every turn that vLLM knows, by request id, from its arrival to its end.

    Turns that have never run count as waiting. Their number and their programs are kept up to date
    with every turn, because thousands may wait while a turn ends in each step.
    """

    def __init__(self) -> None:
        self._turns: dict[str, Turn] = {}
        self._arrivals: list[float] = []  # of the programs of those that wait, ascending
        self._num_by_program: Counter[str] = Counter()
        self._num_waiting_tokens = 0
        self._num_preempted = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[str]:
        return iter(self._turns)

    def get(self, request_id: str) -> Turn | None:
        return self._turns.get(request_id)

    def all(self) -> Iterable[Turn]:
        return self._turns.values()

    def begin(self, turn: Turn) -> None:
        """The turn has arrived, and waits."""
        self._turns[turn.request_id] = turn
        insort(self._arrivals, turn.program_arrival)
        self._num_waiting_tokens += turn.num_prompt_tokens
        self._num_by_program[turn.program.key] += 1

    def move(self, turn: Turn, state: State) -> None:
        """The turn is admitted, for the first time or again, or is put back. If it began while we
        were off, we hear of it only then."""
        self._leaves(turn)
        self._num_preempted += state is State.PREEMPTED
        turn.state = state

    def end(self, request_id: str) -> Turn | None:
        """Forget the turn and return it; None if it is not known."""
        turn = self._turns.pop(request_id, None)
        if turn is not None:
            self._leaves(turn)
        return turn

    def make_last(self, program: Program) -> None:
        """The program's turns under way are its last, as if their client had said so."""
        for turn in self._turns.values():
            if turn.program is program:
                hints = structs.replace(turn.identity.hints, final=True)
                turn.identity = structs.replace(turn.identity, hints=hints)

    @property
    def num_waiting(self) -> int:
        return len(self._arrivals)

    def has_load(self, max_running: int, num_tokens: int) -> bool:
        """Whether there are more than may run at once, or some were preempted, or those that wait
        would not all fit where there is room for `num_tokens`."""
        is_full = len(self._turns) > max_running
        return is_full or self._num_preempted > 0 or self._num_waiting_tokens > num_tokens

    @property
    def num_with_kv(self) -> int:
        """Turns that run, load or have loaded."""
        return len(self._turns) - len(self._arrivals) - self._num_preempted

    def has_waiting(self, program: str) -> bool:
        """Whether a turn of the program waits."""
        return program in self._num_by_program

    def share_ahead(self, arrival: float) -> float:
        """The share of the waiting turns whose programs arrived before `arrival`."""
        return bisect_left(self._arrivals, arrival) / len(self._arrivals) if self._arrivals else 0.0

    def _leaves(self, turn: Turn) -> None:
        """The turn leaves the state that it is in."""
        self._num_preempted -= turn.state is State.PREEMPTED
        if turn.state is not State.WAITING:
            return
        del self._arrivals[bisect_left(self._arrivals, turn.program_arrival)]
        self._num_waiting_tokens -= turn.num_prompt_tokens
        key = turn.program.key
        self._num_by_program[key] -= 1
        if not self._num_by_program[key]:
            del self._num_by_program[key]


@dataclass(eq=False)
class OpenDecision:
    """A decision whose outcome is not known yet.

    Of the finished turn it keeps only what will be reported: there are thousands of decisions, and
    a forecast takes 6 KB. `p`: the probability that the program is back within `horizon_s`. `back`:
    turns that arrived since and wait, and whether each fits the pin; None if the pin was gone.
    """

    program: str
    turn: int
    prefill_s: float
    load_s: float
    p: float
    decision: str
    kept_tokens: int
    decided: float
    horizon_s: float
    pin_end: PinEnd | None = None
    gap_s: float | None = None
    back: dict[Turn, bool | None] = field(default_factory=dict)

    @property
    def has_pin(self) -> bool:
        return self.decision == "pin" and self.pin_end is None

    def came_back(self, turn: Turn, fits: bool, now: float) -> None:
        """A turn of its program has arrived; `fits`: it continues what the pin holds."""
        self.back[turn] = fits if self.has_pin else None
        if self.gap_s is None:
            self.gap_s = now - self.decided

    def pin_ended(self, cause: PinEnd) -> None:
        self.pin_end = cause


@dataclass(eq=False)
class Absence:
    """A program's absence `since` its last turn ended; `num_turns` had arrived by then. `gaps`: by
    when a turn ended, until one continues what it left. `decision` is set until the program's next
    turn is admitted."""

    program: Program
    since: float
    num_turns: int
    gaps: dict[float, Gap] = field(default_factory=dict)
    decision: OpenDecision | None = None


class Away:
    """Absences by program, at most about `max_programs`. Beyond that, the longest absence of an
    unnamed program of one turn is forgotten, or else the longest of all, and we see neither the end
    of that program nor its return. Microseconds per call."""

    def __init__(self, gaps: Gaps, max_programs: int) -> None:
        self._gaps = gaps
        self._max_programs = max_programs
        self._absences: OrderedDict[str, Absence] = OrderedDict()  # the longest absence is first
        self._once: OrderedDict[str, None] = OrderedDict()  # of unnamed programs of one turn
        # Gaps by program and begin, and after how many seconds a turn may have ended them.
        self._held: OrderedDict[str, dict[float, tuple[Gap, float]]] = OrderedDict()

    # --- gaps -------------------------------------------------------------------------
    def left(self, program: Program, asked: Asked, now: float) -> None:
        """A turn of the program ended with `asked`."""
        gaps = self._begin(program, now).gaps
        if now in gaps:
            self._gaps.drop(gaps.pop(now))
        elif len(gaps) >= MAX_LEFT:
            self._gaps.drop(gaps.pop(next(iter(gaps))))
        gaps[now] = self._gaps.begin(asked, now)

    def arrived(self, program: str, since: float | None, now: float) -> float | None:
        """The program is back, and continues what a turn left that ended at `since`, if any; return
        how many seconds ago that was, or None if nobody knows."""
        seconds = self._gaps.arrived(self._take_gap(program, since), now)
        if since is not None and (held := self._take_held(program, since)):
            seconds = now - since  # what came meanwhile was no edit of it
            self._gaps.learn(held[0], seconds)
        return seconds

    def hold_gap(self, program: str, since: float, now: float) -> None:
        """A turn goes on with what was left at `since`, edited, or with another conversation that
        begins alike: which, a later turn shows. Until then nothing is learned, unless the program
        does so again and again."""
        gap = self._take_gap(program, since)
        if gap is None or not self._gaps.drop(gap):
            return
        held = self._held.setdefault(program, {})
        held[since] = gap, now - since
        if len(held) > MAX_HELD:
            self.learn_held(program, next(iter(held)))
        if len(self._held) > self._max_programs:
            self._held.popitem(last=False)

    def learn_held(self, program: str, since: float) -> None:
        """It was an edit, as a turn continues what that turn made of it."""
        if held := self._take_held(program, since):
            self._gaps.learn(*held)

    def ended(self, program: str, now: float, were_edits: bool = True) -> None:
        """The program is over: count its open gaps as longer than until now. `were_edits`: nothing
        has shown that what may have been edits were others."""
        for held in self._held.pop(program, {}).values():
            if were_edits:
                self._gaps.learn(*held)
        for since in self._since(program):
            if (gap := self._take_gap(program, since)) is not None:
                self._gaps.ended(gap, now)

    def forecast_of(self, program: str) -> Forecast | None:
        """Forecast when what the program left last is continued, counted from then; None if it is
        not away."""
        absence = self._absences.get(program)
        if absence is None or not absence.gaps:
            return None
        return self.forecast_since(program, next(reversed(absence.gaps)))

    def forecast_since(self, program: str, since: float) -> Forecast | None:
        """The same of what it left at `since`."""
        absence = self._absences.get(program)
        gap = None if absence is None else absence.gaps.get(since)
        return None if gap is None else self._gaps.forecast(gap.asked)

    def is_question(self, program: str, since: float) -> bool:
        """Whether all that is known of the program is one answer, given at `since`: it has no name,
        called no tool, and no turn followed. Nothing shows that whoever asked goes on."""
        if program not in self._once:
            return False
        gap = self._absences[program].gaps.get(since)
        return gap is not None and gap.asked.ending is not Ending.CALLS

    def forget_gaps(self) -> None:
        """Drop all gaps without learning from them, because we will not see the programs return."""
        self._held.clear()
        for program in list(self._absences):
            for since in self._since(program):
                if (gap := self._take_gap(program, since)) is not None:
                    self._gaps.drop(gap)

    # --- decisions --------------------------------------------------------------------
    def decided(self, program: Program, decision: OpenDecision, now: float) -> OpenDecision | None:
        """Record the decision for a turn that has ended; it replaces the program's older one.

        If this makes the table forget another program, returns that program's decision.
        """
        self._begin(program, now).decision = decision
        if len(self._absences) <= self._max_programs:
            return None
        oldest = self._absences.pop(next(iter(self._once or self._absences)))
        self._once.pop(oldest.program.key, None)
        for gap in oldest.gaps.values():
            self._gaps.ended(gap, now)
        return oldest.decision

    def decision_of(self, program: str) -> OpenDecision | None:
        """The last decision for the program, if its outcome is not known yet."""
        absence = self._absences.get(program)
        return None if absence is None else absence.decision

    def absence_of(self, program: str) -> Absence | None:
        return self._absences.get(program)

    def decisions(self) -> list[OpenDecision]:
        """All decisions whose outcome is not known yet."""
        return [each.decision for each in self._absences.values() if each.decision is not None]

    def close(self, program: str) -> None:
        """The outcome of the program's decision is known."""
        absence = self._absences.get(program)
        if absence is not None:
            absence.decision = None
            self._keep(absence)

    # --- every step -------------------------------------------------------------------
    def silent(self, now: float) -> Iterator[Absence]:
        """Yield programs away for so long that they count as over: a few per call, longest first.

        If the caller does not end an absence, for example because a pin lasts longer, the absence
        comes up again after all others.
        """
        for absence in list(itertools.islice(self._absences.values(), _MAX_SILENT)):
            if absence.since >= now - OVER_S:
                return
            self._absences.move_to_end(absence.program.key)
            yield absence

    # --- parts ------------------------------------------------------------------------
    def _begin(self, program: Program, now: float) -> Absence:
        absence = self._absences.pop(program.key, None) or Absence(program, now, 0)
        absence.program, absence.since, absence.num_turns = program, now, program.num_turns
        self._absences[program.key] = absence
        self._once.pop(program.key, None)
        if program.num_turns == 1 and not program.is_named:
            self._once[program.key] = None
        return absence

    def _since(self, program: str) -> list[float]:
        absence = self._absences.get(program)
        return [] if absence is None else list(absence.gaps)

    def _take_gap(self, program: str, since: float | None) -> Gap | None:
        absence = self._absences.get(program)
        if absence is None or since is None:
            return None
        gap = absence.gaps.pop(since, None)
        self._keep(absence)
        return gap

    def _take_held(self, program: str, since: float) -> tuple[Gap, float] | None:
        held = self._held.get(program)
        if held is None:
            return None
        found = held.pop(since, None)
        if not held:
            del self._held[program]
        return found

    def _keep(self, absence: Absence) -> None:
        """Keep the absence only while a gap or its decision is open."""
        if not absence.gaps and absence.decision is None:
            del self._absences[absence.program.key]
            self._once.pop(absence.program.key, None)
