"""A whole trace in numbers: `add` its records, then `rows`, the same for every trace."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from continuum_connector.memory import size
from continuum_connector.tools.analysis.source import (
    Record,
    against_stock,
    count,
    number,
    part,
    text,
    tiers,
)
from continuum_connector.tools.analysis.words import COPIED, NOT_READ, ratio, seconds

NOBODY = "anonymous:"  # prefix of the keys of programs that no client named


@dataclass
class _Program:
    """One program under way. `arrivals`: those of its turns that have not ended."""

    first: float
    last_end: float | None = None
    arrivals: dict[int, float] = field(default_factory=dict)
    num_tokens: int = 0  # of its last turn: prompt, and output if the trace gives it
    num_turns: int = 0


class Summary:
    """Takes in records in the order of the file.

    `num`: counts by group, `samples`: values by group. Durations are differences of `now`. A
    `start` ends every program under way, because a new server knows none of them.
    """

    def __init__(self) -> None:
        self.policies: dict[str, None] = {}
        self.block_bytes = 0  # 0 if the file with the start is gone
        self.first, self.last = math.inf, -math.inf  # the first arrival, the last departure
        self.num: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.samples: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self.saved_s = self.lost_s = 0.0
        self._programs: dict[str, _Program] = {}

    def add(self, record: Record) -> None:
        """Take in one record; events that do not matter here are skipped."""
        event = text(record, "event")
        if event == "start":
            self.finish()
            self.policies[text(record, "policy") or "unknown"] = None
            self.block_bytes = count(record, "block_bytes")
        elif event in ("arrive", "return"):
            self._arrived(record)
        elif event == "admit":
            self._admitted(record)
        elif event == "preempt":
            self.num["trace"]["preemptions"] += 1
        elif event == "decision":
            self._decided(record)
        elif event == "outcome":
            self.num["outcomes"][f"{text(record, 'decision')} {text(record, 'outcome')}"] += 1
            self.saved_s += number(record, "saved_s") or 0.0
            self.lost_s += number(record, "lost_s") or 0.0
        elif event == "pin_end":
            self.num["pins ended"][text(record, "cause") or "unpinned"] += 1
            self.samples["held"].append(number(record, "held_s") or 0.0)
        elif event in COPIED:
            did, _, group = COPIED[event]
            if text(record, "outcome") == "done":
                self.num[group][f"blocks {did}"] += count(record, "blocks")
            else:
                self.num[group]["transfers not done"] += 1

    def finish(self) -> None:
        """The trace ends: count the programs under way as far as they got."""
        for key, program in self._programs.items():
            if key.startswith(NOBODY) and program.num_turns == 1:  # nothing followed: no program
                self.num["trace"]["requests of nobody"] += 1
                continue
            self.num["trace"]["programs"] += 1
            if program.last_end is not None:
                self.samples["JCT"].append(program.last_end - program.first)
        self._programs.clear()

    # --- one event each ---------------------------------------------------------------
    def _arrived(self, record: Record) -> None:
        now, key = record["now"], text(record, "program")
        self.first = min(self.first, now)
        program = self._programs.setdefault(key, _Program(now))
        program.num_turns += 1
        program.arrivals[count(record, "turn")] = now

    def _admitted(self, record: Record) -> None:
        num, on_disk = count(record, "tokens"), part(record, "disk")
        _count_tokens(self.num["all prompts"], record)
        if why := text(on_disk, "not_read"):
            name = f"not read as {NOT_READ.get(why, why)}"
            self.num["disk"][f"turns, {name}"] += 1
            self.num["disk"][f"tokens, {name}"] += count(on_disk, "tokens")
        if (waited_s := number(record, "waited_s")) is not None:
            self.samples["queueing"].append(waited_s)
        if (program := self._programs.get(text(record, "program"))) is not None:
            if program.last_end is not None:
                _count_tokens(self.num["returning turns"], record, min(num, program.num_tokens))
            program.num_tokens = num  # until its decision says how long the answer was

    def _decided(self, record: Record) -> None:
        now, turn = record["now"], count(record, "turn")
        self.num["trace"]["turns"] += 1
        self.num["decisions"][text(record, "decision")] += 1
        self.last = max(self.last, now)
        if (program := self._programs.get(text(record, "program"))) is None:
            return
        if (arrived := program.arrivals.pop(turn, None)) is not None:
            self.samples["turn"].append(now - arrived)
        program.last_end = now
        program.num_tokens = count(record, "tokens") or program.num_tokens


def _count_tokens(into: Counter[str], record: Record, had: int = 0) -> None:
    """Add a prompt: its tokens, those found by tier, and by who kept them if the trace says it.
    `had`: those that the program had computed before, as far as the prompt can share them."""
    hits, kept = tiers(record), against_stock(record)
    into.update(hits, tokens=count(record, "tokens"), told=len(kept))
    into.update(kept, had=had, saved=min(sum(hits.values()), had))


# --- as rows --------------------------------------------------------------------------------
Value = float | str | None


class Row(NamedTuple):
    """One number. `unit`: "s", "%" (for a share from 0 to 1), "bytes", or "" for a count."""

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


def rows(of: Summary) -> dict[str, dict[str, Row]]:
    """Every row by group and name, in reading order."""
    found: defaultdict[str, dict[str, Row]] = defaultdict(dict)

    def add(group: str, unit: str, values: Mapping[str, Value]) -> None:
        found[group].update((name, Row(value, unit)) for name, value in values.items())

    names = ("programs", "requests of nobody", "turns", "preemptions", "lines skipped")
    wall_s = of.last - of.first
    add("trace", "", {"policy": ", ".join(of.policies) or "unknown"})
    add("trace", "", {name: of.num["trace"][name] for name in names})
    add("trace", "s", {"wall time": wall_s if math.isfinite(wall_s) else None})
    for group in ("JCT", "turn", "queueing"):
        add(group, "s", spread(of.samples[group]))
    jct = of.samples["JCT"]
    add("JCT", "s", {"min": min(jct, default=None), "max": max(jct, default=None)})
    for group in ("all prompts", "returning turns"):
        num = of.num[group]
        shares = {"vram": "hit ratio, VRAM", "dram": "hit ratio, DRAM"}
        if num["disk"]:
            shares["disk"] = "hit ratio, disk"
        if num["told"]:
            shares |= {"only_ours": "only we kept", "stock_too": "stock would have kept too"}
            shares["only_stock"] = "only stock would have kept"
        add(group, "", {"tokens": num["tokens"]})
        add(group, "%", {name: ratio(num[key], num["tokens"]) for key, name in shares.items()})
    add("returning turns", "%", {"save ratio": ratio(num["saved"], num["had"])})
    for group in ("decisions", "outcomes", "pins ended", "DRAM", "disk"):
        add(group, "", dict(sorted(of.num[group].items())))
    add("outcomes", "s", {"prefill saved, estimated": of.saved_s})
    add("outcomes", "s", {"prefill repeated, estimated": of.lost_s})
    held = of.samples["held"]
    add("pins ended", "s", {"held, mean": ratio(sum(held), len(held))})
    for group, out, back in (("DRAM", "stored", "loaded"), ("disk", "written", "read")):
        blocks_out, blocks_in = (of.num[group][f"blocks {did}"] for did in (out, back))
        add(group, "%", {"read back": ratio(blocks_in, blocks_out)})
        add(group, "bytes", {"bytes out": blocks_out * of.block_bytes or None})
        add(group, "bytes", {"bytes in": blocks_in * of.block_bytes or None})
    return {group: found[group] for group in found if of.num[group] or of.samples[group]}


def spread(values: Sequence[float]) -> dict[str, Value]:
    """The mean and percentiles, interpolated linearly; None without values."""
    values = sorted(values)
    found: dict[str, Value] = {"mean": ratio(sum(values), len(values))}
    for percent in (50, 90, 95, 99):
        low, rest = divmod(percent / 100 * (len(values) - 1), 1.0)
        pair = values[int(low) : int(low) + 2]
        found[f"p{percent}"] = pair[0] + rest * (pair[-1] - pair[0]) if pair else None
    return found
