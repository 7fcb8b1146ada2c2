"""A whole trace in numbers, in bounded memory."""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from continuum_connector.tools.analysis.hindsight import Calibration, Regret, Stakes, came_true
from continuum_connector.tools.analysis.source import (
    Record,
    against_stock,
    count,
    number,
    part,
    text,
    tiers,
)

MAX_PROGRAMS = 200_000  # followed at once; beyond, the program silent for longest counts as over
NUM_WORST = 5  # decisions that the report names, for `continuum explain`
NOBODY = "anonymous:"  # prefix of the keys of programs that no client named
_MAX_OPEN = 8  # decisions without an outcome per program: parallel turns, or a trace without any


def _count_tokens(into: Counter[str], record: Record, had: int = 0) -> None:
    """Add a prompt: its tokens, those found by tier, and by who kept them if the trace says it.
    `had`: those that the program had computed before, as far as the prompt can share them."""
    hits = tiers(record)
    into.update(hits._asdict(), tokens=count(record, "tokens"))
    into.update(had=had, saved=min(sum(hits), had))
    if (kept := against_stock(record)) is not None:
        into.update(kept._asdict(), told=1)


@dataclass
class _Program:
    """One program under way. `arrivals`: those of its turns that have not ended."""

    first: float
    last_end: float | None = None
    arrivals: dict[int, float] = field(default_factory=dict)
    num_tokens: int = 0  # of its last turn: prompt, and output if the trace gives it
    num_turns: int = 0
    num_ended: int = 0
    pinned_blocks: int = 0
    open: dict[int, Stakes | None] = field(default_factory=dict)


class Costly(NamedTuple):
    """A decision that lost much. Sorts by its seconds."""

    seconds: float
    program: str
    turn: int
    decision: str
    best: str


class Regrets:
    """Regret by decision, how often each alternative was best, and the few worst decisions."""

    def __init__(self) -> None:
        self.by_decision: dict[str, Sample] = {}
        self.best: Counter[tuple[str, str]] = Counter()
        self.worst: list[Costly] = []  # a heap
        self.num_open = 0  # decisions whose return nobody saw, or whose record says too little

    def add(self, regret: Regret | None, program: str, turn: int) -> None:
        if regret is None:
            self.num_open += 1
            return
        self.by_decision.setdefault(regret.decision, Sample()).add(regret.seconds)
        self.best[regret.decision, regret.best] += 1
        one = Costly(regret.seconds, program, turn, regret.decision, regret.best)
        if len(self.worst) < NUM_WORST:
            heapq.heappush(self.worst, one)
        else:
            heapq.heappushpop(self.worst, one)

    @property
    def num(self) -> int:
        return sum(sample.num for sample in self.by_decision.values())

    @property
    def total_s(self) -> float:
        return sum(sample.total for sample in self.by_decision.values())


class Summary:
    """Takes in records in the order of the file; `finish` when there are no more.

    Durations are differences of `now`. A `start` ends every program under way, because a new server
    knows none of them.
    """

    def __init__(self) -> None:
        self.starts: list[Record] = []
        self.first: float | None = None  # the first arrival, and below it the last departure
        self.last: float | None = None
        self.num_programs = self.num_preempted = 0
        self.num_single = 0  # unnamed requests without a successor, which are no programs
        self.jct, self.latency, self.waited, self.held_s = (Sample() for _ in range(4))
        # Tokens of all prompts, and of those of programs that came back (_count_tokens).
        self.prompts: Counter[str] = Counter()
        self.returning: Counter[str] = Counter()
        self.decisions: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.pin_causes: Counter[str] = Counter()
        self.block_seconds: Counter[str] = Counter()  # by cause
        self.blocks: Counter[str] = Counter()  # copied, by direction
        self.bytes: Counter[str] = Counter()
        self.num_failed: Counter[str] = Counter()  # by direction
        self.not_read: Counter[str] = Counter()  # turns, by why they got not all that the disk had
        self.left_there: Counter[str] = Counter()  # tokens that the disk had for them
        self.saved_s = self.lost_s = 0.0
        self.calibration, self.regrets = Calibration(), Regrets()
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        self._of_event = {
            "start": self._started,
            "arrive": self._arrived,
            "return": self._arrived,
            "admit": self._admitted,
            "preempt": self._preempted,
            "decision": self._decided,
            "outcome": self._closed,
            "pin_end": self._pin_ended,
            **dict.fromkeys(("store", "load", "write", "read"), self._copied),
        }

    def add(self, record: Record) -> None:
        """Take in one record; events that do not matter here are skipped."""
        handle = self._of_event.get(text(record, "event"))
        if handle is not None:
            handle(record)

    def finish(self) -> None:
        """The trace ends: count the programs under way as far as they got."""
        while self._programs:
            self._retire(next(iter(self._programs)))

    # --- one event each ---------------------------------------------------------------
    def _started(self, record: Record) -> None:
        self.finish()
        self.starts.append(record)

    def _arrived(self, record: Record) -> None:
        now, key = record["now"], text(record, "program")
        self.first = now if self.first is None else min(self.first, now)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(now)
            if len(self._programs) > MAX_PROGRAMS:
                self._retire(next(iter(self._programs)))
        program.num_turns += 1
        program.arrivals[count(record, "turn")] = now
        self._programs.move_to_end(key)

    def _admitted(self, record: Record) -> None:
        num = count(record, "tokens")
        _count_tokens(self.prompts, record)
        on_disk = part(record, "disk")
        if why := text(on_disk, "not_read"):
            self.not_read[why] += 1
            self.left_there[why] += count(on_disk, "tokens")
        if (waited_s := number(record, "waited_s")) is not None:
            self.waited.add(waited_s)
        if (program := self._programs.get(text(record, "program"))) is not None:
            if program.num_ended:
                _count_tokens(self.returning, record, min(num, program.num_tokens))
            program.num_tokens = num  # until its decision says how long the answer was

    def _preempted(self, _: Record) -> None:
        self.num_preempted += 1

    def _decided(self, record: Record) -> None:
        now, decision, turn = record["now"], text(record, "decision"), count(record, "turn")
        self.decisions[decision] += 1
        self.last = now if self.last is None else max(self.last, now)
        program = self._programs.get(text(record, "program"))
        if program is None:
            return
        arrived = program.arrivals.pop(turn, None)
        if arrived is not None:
            self.latency.add(now - arrived)
        program.last_end = now
        program.num_ended += 1
        program.num_tokens = count(record, "tokens") or program.num_tokens
        program.open[turn] = Stakes.of(record)
        if len(program.open) > _MAX_OPEN:
            del program.open[next(iter(program.open))]
        if decision == "pin":
            program.pinned_blocks = count(record, "blocks")

    def _closed(self, record: Record) -> None:
        outcome = text(record, "outcome")
        self.outcomes[f"{text(record, 'decision')} {outcome}"] += 1
        self.calibration.add(record)
        self.saved_s += number(record, "saved_s") or 0.0
        self.lost_s += number(record, "lost_s") or 0.0
        key, turn = text(record, "program"), count(record, "turn")
        program = self._programs.get(key)
        stakes = program.open.pop(turn, None) if program else None
        if outcome != "done":  # a last turn left nothing to choose
            self.regrets.add(_regret(record, stakes), key, turn)

    def _pin_ended(self, record: Record) -> None:
        cause, held_s = text(record, "cause") or "unpinned", number(record, "held_s")
        self.pin_causes[cause] += 1
        if held_s is None:
            return
        self.held_s.add(held_s)
        blocks = count(record, "blocks")
        if not blocks and (program := self._programs.get(text(record, "program"))):
            blocks = program.pinned_blocks
        self.block_seconds[cause] += held_s * blocks  # type: ignore[assignment]

    def _copied(self, record: Record) -> None:
        if text(record, "outcome") != "done":
            self.num_failed[record["event"]] += 1
            return
        direction, blocks = record["event"], count(record, "blocks")
        self.blocks[direction] += blocks
        size = count(self.starts[-1], "block_bytes") if self.starts else 0
        self.bytes[direction] += blocks * size

    def _retire(self, key: str) -> None:
        program = self._programs.pop(key)
        if key.startswith(NOBODY) and program.num_turns == 1:
            self.num_single += 1
            return
        self.num_programs += 1
        if program.last_end is not None:
            self.jct.add(program.last_end - program.first)


def _regret(outcome: Record, stakes: Stakes | None) -> Regret | None:
    """The regret; None if the gap is unknown or says nothing, because turns ran in parallel or
    nobody was there to see the next one."""
    horizon_s, what = number(outcome, "horizon_s"), text(outcome, "outcome")
    if stakes is None or horizon_s is None or what in ("superseded", "switched_off"):
        return None
    if came_true(outcome, horizon_s) is None:
        return None
    # Blocks that the next turn does not continue are of no use to it, whenever it comes.
    return stakes.regret(number(outcome, "gap_s") if what != "diverged" else None)


MAX_KEPT = 100_000  # values; up to so many, the percentiles are exact


class Sample:
    """Values and their percentiles. Beyond MAX_KEPT they come from a uniform sample, which is the
    same in every run."""

    def __init__(self) -> None:
        self.num = 0
        self.total = 0.0
        self._kept: list[float] = []
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        self.num += 1
        self.total += value
        if len(self._kept) < MAX_KEPT:
            self._kept.append(value)
        elif (place := self._random.randrange(self.num)) < MAX_KEPT:
            self._kept[place] = value

    @property
    def mean(self) -> float | None:
        return self.total / self.num if self.num else None

    def quantile(self, q: float) -> float | None:
        """The value below which a share `q` lies, interpolated linearly; None without values."""
        if not self._kept:
            return None
        self._kept.sort()  # which takes no time if it is
        place = q * (len(self._kept) - 1)
        low = int(place)
        high = min(low + 1, len(self._kept) - 1)
        return self._kept[low] + (place - low) * (self._kept[high] - self._kept[low])
