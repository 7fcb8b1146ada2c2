"""A whole trace in numbers: `add` its records, then `rows`, the same for every trace."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from continuum_connector.forecast.forecast import came_true
from continuum_connector.tools.analysis.hindsight import Regret, Stakes
from continuum_connector.tools.analysis.source import (
    Record,
    against_stock,
    count,
    number,
    part,
    text,
    tiers,
)
from continuum_connector.tools.analysis.words import NOT_READ, seconds, size

MAX_PROGRAMS = 200_000  # followed at once; beyond, the program silent for longest counts as over
NUM_WORST = 5  # decisions that the report names, for `continuum explain`
NOBODY = "anonymous:"  # prefix of the keys of programs that no client named
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
DECISIONS = ("pin", "offload", "free")
COPIES = ("store", "load", "write", "read")
_MAX_OPEN = 8  # decisions without an outcome per program: parallel turns, or a trace without any


class Sample:
    """Values, their mean and their percentiles."""

    def __init__(self) -> None:
        self._values = array("d")

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def num(self) -> int:
        return len(self._values)

    @property
    def total(self) -> float:
        return sum(self._values)

    def spread(self, **more: float) -> dict[str, float | None]:
        """The mean and the QUANTILES, interpolated linearly; None without values."""
        values = sorted(self._values)
        found: dict[str, float | None] = {"mean": _share(sum(values), len(values))}
        for name, q in {**QUANTILES, **more}.items():
            low, rest = divmod(q * (len(values) - 1), 1.0)
            pair = values[int(low) : int(low) + 2]
            found[name] = pair[0] + rest * (pair[-1] - pair[0]) if pair else None
        return found


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


class Summary:
    """Takes in records in the order of the file.

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
        self.block_seconds: dict[str, float] = {}  # by cause
        self.blocks: Counter[str] = Counter()  # copied, by direction
        self.bytes: Counter[str] = Counter()
        self.num_failed: Counter[str] = Counter()  # by direction
        self.not_read: Counter[str] = Counter()  # turns, by why they got not all that the disk had
        self.left_there: Counter[str] = Counter()  # tokens that the disk had for them
        self.saved_s = self.lost_s = 0.0
        self.regrets: dict[str, Sample] = {}  # by decision
        self.num_best = 0  # decisions of the kind that was best
        self.worst: list[Costly] = []  # a heap
        self.num_unjudged = 0  # decisions whose return nobody saw, or whose record says too little
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
            **dict.fromkeys(COPIES, self._copied),
        }

    def add(self, record: Record) -> None:
        """Take in one record; events that do not matter here are skipped."""
        if (handle := self._of_event.get(text(record, "event"))) is not None:
            handle(record)

    def finish(self) -> None:
        """The trace ends: count the programs under way as far as they got."""
        while self._programs:
            self._retire()

    # --- one event each ---------------------------------------------------------------
    def _started(self, record: Record) -> None:
        self.finish()
        self.starts.append(record)

    def _arrived(self, record: Record) -> None:
        now, key = record["now"], text(record, "program")
        self.first = now if self.first is None else min(self.first, now)
        program = self._programs.setdefault(key, _Program(now))
        program.num_turns += 1
        program.arrivals[count(record, "turn")] = now
        self._programs.move_to_end(key)
        if len(self._programs) > MAX_PROGRAMS:
            self._retire()

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
        if (program := self._programs.get(text(record, "program"))) is None:
            return
        if (arrived := program.arrivals.pop(turn, None)) is not None:
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
        self.saved_s += number(record, "saved_s") or 0.0
        self.lost_s += number(record, "lost_s") or 0.0
        key, turn = text(record, "program"), count(record, "turn")
        program = self._programs.get(key)
        stakes = program.open.pop(turn, None) if program else None
        if outcome == "done":  # a last turn left nothing to choose
            return
        if (regret := _regret(record, stakes)) is None:
            self.num_unjudged += 1
            return
        self.regrets.setdefault(regret.decision, Sample()).add(regret.seconds)
        self.num_best += regret.decision == regret.best
        heapq.heappush(self.worst, Costly(regret.seconds, key, turn, regret.decision, regret.best))
        if len(self.worst) > NUM_WORST:
            heapq.heappop(self.worst)

    def _pin_ended(self, record: Record) -> None:
        cause, held_s = text(record, "cause") or "unpinned", number(record, "held_s")
        self.pin_causes[cause] += 1
        if held_s is None:
            return
        self.held_s.add(held_s)
        program = self._programs.get(text(record, "program"))
        blocks = count(record, "blocks") or (program.pinned_blocks if program else 0)
        self.block_seconds[cause] = self.block_seconds.get(cause, 0.0) + held_s * blocks

    def _copied(self, record: Record) -> None:
        if text(record, "outcome") != "done":
            self.num_failed[record["event"]] += 1
            return
        direction, blocks = record["event"], count(record, "blocks")
        self.blocks[direction] += blocks
        size = count(self.starts[-1], "block_bytes") if self.starts else 0
        self.bytes[direction] += blocks * size

    def _retire(self) -> None:
        key, program = self._programs.popitem(last=False)
        if key.startswith(NOBODY) and program.num_turns == 1:
            self.num_single += 1
            return
        self.num_programs += 1
        if program.last_end is not None:
            self.jct.add(program.last_end - program.first)


def _count_tokens(into: Counter[str], record: Record, had: int = 0) -> None:
    """Add a prompt: its tokens, those found by tier, and by who kept them if the trace says it.
    `had`: those that the program had computed before, as far as the prompt can share them."""
    hits = tiers(record)
    into.update(hits._asdict(), tokens=count(record, "tokens"))
    into.update(had=had, saved=min(sum(hits), had))
    if (kept := against_stock(record)) is not None:
        into.update(kept._asdict(), told=1)


def _regret(outcome: Record, stakes: Stakes | None) -> Regret | None:
    """The regret; None if the gap is unknown or says nothing, because turns ran in parallel or
    nobody was there to see the next one."""
    horizon_s, what = number(outcome, "horizon_s"), text(outcome, "outcome")
    if stakes is None or horizon_s is None or what in ("superseded", "switched_off"):
        return None
    if came_true(number(outcome, "gap_s"), number(outcome, "open_s") or 0.0, horizon_s) is None:
        return None
    # Blocks that the next turn does not continue are of no use to it, whenever it comes.
    return stakes.regret(number(outcome, "gap_s") if what != "diverged" else None)


# --- as rows --------------------------------------------------------------------------------
Value = float | str | None
Part = tuple[str, str, Mapping[str, Value]]  # rows of a group that have one unit


class Row(NamedTuple):
    """One number. `unit`: "s", "%" (for a share from 0 to 1), "bytes", or "" for a count."""

    group: str
    name: str
    value: Value
    unit: str

    @property
    def cell(self) -> str:
        """The value as text; "-" if there is none."""
        if self.value is None or isinstance(self.value, str):
            return self.value or "-"
        if self.unit == "%":
            return f"{100 * self.value:.1f} %"
        if self.unit == "s":
            return seconds(self.value)
        return size(self.value) if self.unit == "bytes" else f"{self.value:,.0f}"


def rows(of: Summary, num_bad: int = 0) -> list[Row]:
    """Every row, in reading order."""
    parts = (*_times(of, num_bad), *_decided(of), *_copies(of), *_judged(of))
    return [Row(group, name, v, unit) for group, unit, part in parts for name, v in part.items()]


def _times(of: Summary, num_bad: int) -> Iterator[Part]:
    policies = dict.fromkeys(text(start, "policy") or "unknown" for start in of.starts)
    wall = None if of.first is None or of.last is None else of.last - of.first
    num = {"programs": of.num_programs, "requests of nobody": of.num_single}
    policy: dict[str, Value] = {"policy": ", ".join(policies) or "unknown"}
    yield "trace", "", policy | num | {"turns": sum(of.decisions.values())}
    yield "trace", "s", {"wall time": wall}
    yield "trace", "", {"preemptions": of.num_preempted, "lines skipped": num_bad}
    yield "JCT", "", {"programs": of.jct.num}
    yield "JCT", "s", of.jct.spread(min=0.0, max=1.0)
    yield "turn", "s", of.latency.spread()
    yield "queueing", "s", of.waited.spread()
    for group, tokens in (("all prompts", of.prompts), ("returning turns", of.returning)):
        names = {"vram": "hit ratio, VRAM", "dram": "hit ratio, DRAM"}
        if tokens["disk"]:
            names["disk"] = "hit ratio, disk"
        if tokens["told"]:
            names |= {"only_ours": "only we kept", "stock_too": "stock would have kept too"}
            names["only_stock"] = "only stock would have kept"
        yield group, "", {"tokens": tokens["tokens"]}
        yield group, "%", {name: _share(tokens[of], tokens["tokens"]) for of, name in names.items()}
    yield "returning turns", "%", {"save ratio": _share(of.returning["saved"], of.returning["had"])}


def _decided(of: Summary) -> Iterator[Part]:
    def order(name: str) -> tuple[int, str]:
        kind = name.split(" ")[0]
        return (DECISIONS.index(kind) if kind in DECISIONS else len(DECISIONS), name)

    kinds = sorted({*DECISIONS, *of.decisions}, key=order)
    yield "decisions", "", {kind: of.decisions[kind] for kind in kinds}
    if of.outcomes:
        yield "outcomes", "", {name: of.outcomes[name] for name in sorted(of.outcomes, key=order)}
        saved = {"prefill saved, estimated": of.saved_s, "prefill repeated, estimated": of.lost_s}
        yield "outcomes", "s", saved
    if of.pin_causes:
        group, total = "pins ended", sum(of.block_seconds.values())
        yield group, "", dict(sorted(of.pin_causes.items()))
        yield group, "s", {"held, mean": _share(of.held_s.total, of.held_s.num)}
        yield group, "", {"block-seconds": total or None}
        returned = of.block_seconds.get("returned", 0.0)
        yield group, "%", {"of them until a return": _share(returned, total)}


def _copies(of: Summary) -> Iterator[Part]:
    """Rows on the copies to each tier and back."""
    tiers = [("DRAM", ("store", "stored"), ("load", "loaded"))]
    if {"write", "read"} & {*of.blocks, *of.num_failed}:
        tiers.append(("disk", ("write", "written"), ("read", "read")))
    for group, (out, stored), (back, loaded) in tiers:
        num_out, num_back = of.blocks[out], of.blocks[back]
        yield group, "", {f"blocks {stored}": num_out, f"blocks {loaded}": num_back}
        yield group, "%", {"read back": _share(num_back, num_out)}
        for way, name in ((out, "bytes out"), (back, "bytes in")):
            is_known = of.bytes[way] or not of.blocks[way]
            yield group, "bytes", {name: of.bytes[way] if is_known else None}
        yield group, "", {"transfers not done": of.num_failed[out] + of.num_failed[back]}
    for why, num in sorted(of.not_read.items()):
        name = f"not read as {NOT_READ.get(why, why)}"
        yield "disk", "", {f"turns, {name}": num, f"tokens, {name}": of.left_there[why]}


def _judged(of: Summary) -> Iterator[Part]:
    num = sum(each.num for each in of.regrets.values())
    total_s = sum(each.total for each in of.regrets.values())
    yield "regret", "", {"decisions judged": num, "not judged": of.num_unjudged}
    yield "regret", "%", {"best kind chosen": _share(of.num_best, num)}
    yield "regret", "s", {"per decision": _share(total_s, num), "in all": total_s if num else None}
    per = {d: of.regrets[d] for d in DECISIONS if d in of.regrets}
    yield "regret", "s", {f"per {d}": each.total / each.num for d, each in per.items()}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
