"""A week of mixed traffic in virtual time, through vLLM's scheduler and ours: does anything grow?

    python -m bench.sim.week --turns 100000 --out runs/week.json
    python -m bench.sim.week --turns 4000 --days 1    # a first look, half a minute
    python -m bench.sim.week --disk-gb 20             # and what wears a drive out

Agents, people, forks, compactions, sub-agents and single requests, of clients that say who they
are and of some that say nothing, more by day than by night. Some turns are aborted, some programs
left by their clients, and once a day the prefix cache is reset. VRAM and DRAM are too small for
all that are under way.

Prints, by day: turns, share of prompt tokens found in VRAM or DRAM, CPU of the process per step,
Python objects, memory. Then what is larger on the last day than in the middle of the week: of every
container of ours its items, and the columns just named. What stands at its bound is not larger.
With a disk, by day, what was written to it, also per byte of KV that prompts computed (its write
amplification): its budget is the whole drive once a day, and a day's worth is in hand at the start.
Ends with status 1 if anything is larger, or more was written.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from bench.cli import MOST, start, teaching_parser
from bench.common.plans import ProgramPlan, Span, TurnPlan, Workload
from bench.sim import census, provenance
from bench.sim.arms import ARMS
from bench.sim.bus import Way
from bench.sim.engine import Finished
from bench.sim.hardware import GB, machine
from bench.sim.lab import Lab, Running
from bench.sim.load import stretched
from bench.sim.workloads.registry import build
from continuum_connector import files

HOUR_S, HOURS = 3600.0, 24
KINDS = ("mixed", "forks", "compactions", "subagents")  # of each hour one, in turn
SHAPE = {"turns": 6, "context": 3000, "answer": 8, "gaps": "coding"}
BY_HOUR = (*[0.4] * 8, *[1.6] * 10, *[1.0] * 6)  # of a day, over the mean
SILENT, LEFT = 0.3, 0.1  # of the programs say nothing of themselves; are left before they are done
ABORTED = 0.01  # of the turns, before they are answered
SHARED = 1  # the stream of the system prompt; all others are new each hour
STREAMS = 1 << 20  # more than an hour has


class Sample(msgspec.Struct, frozen=True):
    """One look: sums since the beginning, `written` in bytes to a disk, `computed` in bytes of KV
    of prompts; `tables`: items by container, as they are now."""

    at_s: float
    num_turns: int
    num_aborted: int
    num_steps: int
    num_prompt: int
    num_cached: int
    cpu_s: float
    num_objects: int
    mib: float
    tables: dict[str, int]
    written: float = 0.0
    computed: float = 0.0


# --- what is asked ------------------------------------------------------------------------
def hour_of(index: int, turns_per_hour: float, seed: int) -> list[ProgramPlan]:
    """The programs of one hour of the week; nobody else's but the system prompt is in theirs."""
    kind = KINDS[index % len(KINDS)]
    rng = random.Random(f"week {seed} {index}")
    num_turns = turns_per_hour * BY_HOUR[index % HOURS]
    num_programs = max(1, round(num_turns / _turns_per_program(kind)))
    own = {**SHAPE, "programs": num_programs, "seed": seed * 1000 + index}
    workload = stretched(build(kind, own), HOUR_S)
    return [_as_is_client(_moved(plan, index), rng) for plan in workload.programs]


@functools.cache
def _turns_per_program(kind: str) -> float:
    """Sub-agents and branches count to the program that was asked for."""
    num_programs = 64
    workload = build(kind, {**SHAPE, "programs": num_programs})
    return sum(len(plan.turns) for plan in workload.programs) / num_programs


def _moved(plan: ProgramPlan, hour: int) -> ProgramPlan:
    """The same plan in a given hour, with names and text of its own."""

    def span(one: Span) -> Span:
        return one if one.stream == SHARED else replace(one, stream=one.stream + hour * STREAMS)

    def turn(one: TurnPlan) -> TurnPlan:
        prompt = tuple(map(span, one.prompt))
        joins = tuple(f"{hour}.{name}" for name in one.joins)
        return replace(one, prompt=prompt, answer=span(one.answer), joins=joins)

    return replace(
        plan,
        name=f"{hour}.{plan.name}",
        turns=tuple(map(turn, plan.turns)),
        arrival_s=plan.arrival_s + (0.0 if plan.after else hour * HOUR_S),
        after=plan.after and (f"{hour}.{plan.after[0]}", plan.after[1]),
        parent=plan.parent and f"{hour}.{plan.parent}",
    )


def _as_is_client(plan: ProgramPlan, rng: random.Random) -> ProgramPlan:
    if rng.random() < SILENT:
        plan = replace(plan, says_program=False, says_tools=False, says_final=False)
    sends_out = any(turn.joins for turn in plan.turns)
    if rng.random() < LEFT and not sends_out:
        turns = plan.turns[: rng.randint(1, len(plan.turns))]
        plan = replace(plan, turns=(*turns[:-1], replace(turns[-1], is_final=False)))
    return plan


# --- who plays it -------------------------------------------------------------------------
class Week(Lab):
    """A lab whose programs come hour by hour, and are forgotten when they are over."""

    def __init__(
        self, num_hours: int, turns_per_hour: float, seed: int, disk_gb: float = 0.0
    ) -> None:
        live = turns_per_hour / HOUR_S * 150_000  # tokens under way, about, at these gaps
        kv_tokens, dram_gb = int(max(16_000, live / 4)), max(2.0, live / 16e3)
        on = machine("A100-40", kv_tokens=kv_tokens, dram_gb=dram_gb, disk_gb=disk_gb)
        nobody = ProgramPlan("nobody", (TurnPlan((Span(SHARED, 1),), Span(SHARED, 1, 1)),), MOST)
        super().__init__(on, ARMS["adaptive"], Workload("week", (nobody,), "made up"))
        self._token_bytes = on.model.token_bytes
        self._running.clear()
        self._begin = []  # of a batch: there is none
        self._rng = random.Random(f"aborts {seed}")
        self.num_turns = self.num_aborted = self.num_prompt = self.num_cached = 0
        for index in range(num_hours):
            begin = functools.partial(self._begin_hour, index, turns_per_hour, seed)
            self.agenda.put(index * HOUR_S, begin)
            if index and index % HOURS == 0:
                self.agenda.put(index * HOUR_S, self._reset)

    def live(self, until_s: float, look_every_s: float) -> Iterator[Sample]:
        """Play until then, and look so often."""
        look_at = look_every_s
        while look_at <= until_s:
            self._arrive()
            if self.engine.has_requests:
                for finished in self.engine.step(self._wake):
                    self._answered(finished)
            else:
                self.clock.now = max(self.clock.now, min(self.agenda.next_time, look_at))
            if self.clock.now >= look_at:
                yield self._look()
                look_at += look_every_s

    def _begin_hour(self, index: int, turns_per_hour: float, seed: int) -> None:
        for plan in hour_of(index, turns_per_hour, seed):
            self._running[plan.name] = Running(plan)
            self._plan_start(plan, 0.0)

    def _reset(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    def _send(self, name: str) -> None:
        if name not in self._running:  # it, or who sent it out, is over
            return
        super()._send(name)
        if self._rng.random() < ABORTED:
            request_id = next(reversed(self._sent))
            after_s = self._rng.random()
            self.agenda.put(self._due + after_s, functools.partial(self._abort, request_id))

    def _abort(self, request_id: str) -> None:
        """Its client goes away, if it is not answered yet, and never comes back."""
        if request_id not in self._sent:
            return
        running, _, _ = self._sent.pop(request_id)
        self.engine.abort(request_id)
        self.num_aborted += 1
        running.ended = self.clock.now
        self._release(running.plan.name, self.clock.now)

    def _answered(self, finished: Finished) -> None:
        super()._answered(finished)
        turn = self.turns.pop()
        self.num_turns += 1
        self.num_prompt += turn.num_prompt
        self.num_cached += turn.num_local + turn.num_external

    def _end(self, name: str, now: float) -> None:
        """No batch ends with it."""

    def _later(self, at: float, name: str) -> None:
        if name in self._running:
            super()._later(at, name)

    def _release(self, name: str, now: float) -> None:
        """A program is over. One that was sent out is remembered until its parent is."""
        super()._release(name, now)
        if (running := self._running.get(name)) is None:
            return
        plan = running.plan
        if plan.parent in self._running:
            return
        for each in (name, *(child for turn in plan.turns for child in turn.joins)):
            self._running.pop(each, None)
        for index in range(len(plan.turns)):
            self._children.pop((name, index), None)

    def _look(self) -> Sample:
        return Sample(
            at_s=self.clock.now,
            num_turns=self.num_turns,
            num_aborted=self.num_aborted,
            num_steps=self.engine.num_steps,
            num_prompt=self.num_prompt,
            num_cached=self.num_cached,
            cpu_s=time.process_time(),
            num_objects=census.num_objects(),
            mib=census.resident_mib(),
            tables=census.count(self.engine.connector),
            written=disk.num_bytes[Way.WRITE] if (disk := self.engine.disk) else 0.0,
            computed=(self.num_prompt - self.num_cached) * self._token_bytes,
        )


# --- what is told -------------------------------------------------------------------------
class Day(msgspec.Struct, frozen=True):
    """What one day added, and what stood at its looks, at most. `cached`: of its prompt tokens;
    `step_ms`: CPU of the process per step; `written_gb`: to a disk; `amplification`: bytes written
    per byte of KV that prompts computed."""

    num_turns: int
    cached: float
    step_ms: float
    num_objects: int
    mib: float
    tables: dict[str, int]
    written_gb: float = 0.0
    amplification: float = 0.0


def days_of(samples: Sequence[Sample], day_s: float = HOURS * HOUR_S) -> list[Day]:
    """By day, each from the last look of the day before to its own last."""
    days, before = [], Sample(0.0, 0, 0, 0, 0, 0, 0.0, 0, 0.0, {})
    while rest := [each for each in samples if each.at_s > before.at_s]:
        number = len(days) + 1
        own = [each for each in rest if each.at_s < (number + 0.01) * day_s] or rest
        last = own[-1]
        tables = {name: max(each.tables.get(name, 0) for each in own) for name in last.tables}
        days.append(
            Day(
                last.num_turns - before.num_turns,
                (last.num_cached - before.num_cached) / max(1, last.num_prompt - before.num_prompt),
                1e3 * (last.cpu_s - before.cpu_s) / max(1, last.num_steps - before.num_steps),
                max(each.num_objects for each in own),
                max(each.mib for each in own),
                tables,
                (last.written - before.written) / GB,
                (last.written - before.written) / max(1.0, last.computed - before.computed),
            )
        )
        before = last
    return days


def larger(days: Sequence[Day]) -> dict[str, tuple[float, float]]:
    """What is larger on the last day than on the middle one, by name: both values."""
    middle, last = days[len(days) // 2], days[-1]
    found = census.larger(middle.tables, last.tables)
    whole = [
        {
            "ms of CPU per step": day.step_ms,
            "Python objects": day.num_objects,
            "MiB": day.mib,
            "tokens computed again, of 1": 1.0 - day.cached,
        }
        for day in (middle, last)
    ]
    return found | census.larger(*whole, few=0)


def overwritten(days: Sequence[Day], disk_gb: float) -> list[int]:
    """The days by whose end more was written than their budgets, and the one in hand, allow."""
    sums = itertools.accumulate(day.written_gb for day in days)
    return [
        number for number, gb in enumerate(sums, 1) if gb > census.GROWN * (number + 1) * disk_gb
    ]


def table(days: Sequence[Day]) -> Iterator[str]:
    has_disk = any(day.written_gb for day in days)
    yield (
        "| day | turns | found | CPU ms a step | objects | MiB |"
        + has_disk * " GB written | per GB of KV |"
    )
    yield "|---|---|---|---|---|---|" + has_disk * "---|---|"
    for number, day in enumerate(days, 1):
        written = f" {day.written_gb:,.1f} | {day.amplification:.2f} |" if has_disk else ""
        yield (
            f"| {number} | {day.num_turns:,} | {day.cached:.1%} | {day.step_ms:.3f} | "
            f"{day.num_objects:,} | {day.mib:.0f} |{written}"
        )


def verdict(grown: Mapping[str, tuple[float, float]], num_tables: int) -> Iterator[str]:
    yield f"{num_tables} containers of ours looked at; larger on the last day: {len(grown)} things."
    for name, (middle, last) in sorted(grown.items()):
        yield f"  {name}: {middle:,.6g} on the middle day, {last:,.6g} on the last"


def main(arguments: Sequence[str]) -> int:
    what, _, teach = (__doc__ or "").partition("\n\n")
    parser = teaching_parser("python -m bench.sim.week", what, teach)
    parser.add_argument("--turns", type=int, default=100_000, help="about so many, all week long")
    parser.add_argument("--days", type=int, default=7, help="default: 7; two at least tell")
    parser.add_argument("--looks", type=int, default=12, help="a day (default: 12)")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--disk-gb", type=float, default=0.0, help="a drive; default: none")
    parser.add_argument("--out", type=Path, help="all looks, days and versions, as JSON")
    said = parser.parse_args(arguments)
    for name in ("turns", "days", "looks"):
        if not 0 < getattr(said, name) <= MOST:
            parser.error(f"--{name} {getattr(said, name)} is no number of {name} to play")
    if not 0 <= said.disk_gb <= MOST:
        parser.error(f"--disk-gb {said.disk_gb} is no size of a drive; write GB, such as 20")
    num_hours = said.days * HOURS
    week = Week(num_hours, said.turns / num_hours, said.seed, said.disk_gb)
    samples = []
    for sample in week.live(num_hours * HOUR_S, HOURS * HOUR_S / said.looks):
        samples.append(sample)
        share = sample.at_s / (num_hours * HOUR_S)
        print(f"\r{share:.0%}, {sample.num_turns:,} turns", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    days = days_of(samples)
    grown = larger(days)
    print("\n".join([*table(days), "", *verdict(grown, len(days[-1].tables))]))
    print(f"{week.num_aborted:,} turns aborted; {samples[-1].num_steps:,} steps.")
    over = overwritten(days, said.disk_gb)
    if over:
        print(
            f"More written than {said.disk_gb:g} GB a day, and as much in hand: by day {over[0]}."
        )
    if said.out is not None:
        said.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"command": sys.argv, "versions": provenance.versions()}
        files.put(said.out, msgspec.json.encode({**found, "days": days, "samples": samples}))
    return 1 if grown or over else 0


if __name__ == "__main__":
    start(lambda: main(sys.argv[1:]), "python -m bench.sim.week")
