"""Runs side by side: one column per arm, its ratio to the first, and whether the answers agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from bench.common.tables import fitting, mean, quantile
from bench.serve import stats
from bench.serve.results import Loaded, ResultError, Turn
from bench.serve.stats import Ratio, Sampled, Statistic
from bench.serve.summary import BY_KEY, MIN_PROGRAMS_P99


@dataclass(frozen=True)
class Compared:
    """A figure whose ratio is worth an interval: what is paired, and what is made of it."""

    key: str
    sample: Callable[[Loaded], Sampled]
    statistic: Statistic
    min_programs: int = 0  # with fewer there is no interval
    of_finished: bool = False  # programs that failed are in no such figure


def _jct(run: Loaded) -> Sampled:
    return {program.program: [program.jct_s] for program in run.finished}


def _turns(field: str) -> Callable[[Loaded], Sampled]:
    def sample(run: Loaded) -> Sampled:
        found: dict[str, list[float]] = {}
        for turn in run.turns:
            if not turn.error:
                found.setdefault(turn.program, []).append(getattr(turn, field))
        return found

    return sample


def _whole(key: str) -> Callable[[Loaded], Sampled]:
    return lambda run: {"": [BY_KEY[key].value(run)]}


def _p95(values: Sequence[float]) -> float:
    return quantile(values, 0.95)


def _p99(values: Sequence[float]) -> float:
    return quantile(values, 0.99)


COMPARED = (
    Compared("jct_mean_s", _jct, mean, of_finished=True),
    Compared("jct_p95_s", _jct, _p95, stats.MIN_PROGRAMS_P95, of_finished=True),
    Compared("jct_p99_s", _jct, _p99, MIN_PROGRAMS_P99, of_finished=True),
    Compared("ttft_mean_s", _turns("ttft_s"), mean),
    Compared("ttft_p95_s", _turns("ttft_s"), _p95, stats.MIN_PROGRAMS_P95),
    Compared("turn_mean_s", _turns("latency_s"), mean),
    Compared("tpot_mean_s", _turns("tpot_s"), mean),
    Compared("computed_tokens", _whole("computed_tokens"), mean),
)
COMPARED_BY_KEY = {each.key: each for each in COMPARED}


@dataclass(frozen=True)
class Column:
    """All repeats of one arm under one pressure, by repeat."""

    key: tuple[str, float]  # arm, pressure
    title: str
    runs: dict[int, Loaded]

    def figure(self, key: str) -> float:
        """Mean over the repeats."""
        return mean([BY_KEY[key].value(run) for run in self.runs.values()])


def columns(runs: Iterable[Loaded], base: str = "") -> list[Column]:
    """Runs that told something, grouped by arm and pressure, as they began; arm `base` first."""
    found: dict[tuple[str, float], Column] = {}
    for run in runs:
        if run.run.state in ("done", "interrupted") and (run.turns or run.programs):
            pressure = run.run.dram.pressure if run.run.dram else 0.0
            title = run.run.title or run.run.arm or run.run.url
            key = (run.run.arm, round(pressure, 3))
            column = found.setdefault(key, Column(key, title, {}))
            column.runs[run.run.repeat] = run
    return sorted(found.values(), key=lambda column: column.key[0] != base)


def matching(first: list[Column], second: list[Column]) -> list[tuple[Column, Column]]:
    """Columns of two results that belong together: the same arm, or the only one of each."""
    if len(first) == len(second) == 1:
        return [(first[0], second[0])]
    theirs = {column.key: column for column in second}
    pairs = [(column, theirs[column.key]) for column in first if column.key in theirs]
    if not pairs:
        raise ResultError("nothing to compare: the two results have no arm in common")
    return pairs


def ratio(base: Column, other: Column, what: Compared) -> Ratio:
    """Over the repeats that both have; no JCT where one arm lost more programs than the other.

    Those that failed worked for nothing, or left room for the rest: what remains is no fair pair.
    """
    both = [repeat for repeat in base.runs if repeat in other.runs]
    first, second = ([column.runs[repeat] for repeat in both] for column in (base, other))
    if what.of_finished and _num_failed(first) != _num_failed(second):
        return stats.NO_RATIO
    samples = ([what.sample(run) for run in runs] for runs in (first, second))
    return stats.paired_ratio(*samples, what.statistic, what.min_programs)


def _num_failed(runs: Iterable[Loaded]) -> int:
    return sum(len(run.programs) - len(run.finished) for run in runs)


SAME = "same answers"


@dataclass(frozen=True)
class Sameness:
    """How many turns, of those that both answered, had the same token ids, or words where a chat
    has none (0 of 0: not told)."""

    same: int
    of: int
    first: str = ""  # where they first differ

    def __str__(self) -> str:
        if not self.of:
            return "-"
        where = f"; first {self.first}" if self.first else ""
        return f"{'yes' if self.same == self.of else 'NO'} ({self.same}/{self.of}{where})"


def sameness(base: Column, other: Column) -> Sameness:
    """Compare every answer. After one that differs a program's later prompts differ as well."""
    same = of = 0
    first = ""
    for repeat, run in base.runs.items():
        mine = {(t.program, t.turn): said for t in run.turns if (said := _said(t))}
        theirs = other.runs[repeat].turns if repeat in other.runs else []
        for turn in theirs:
            wanted, said = mine.get((turn.program, turn.turn)), _said(turn)
            if not wanted or not said:
                continue
            of += 1
            same += said == wanted
            if said != wanted and not first:
                first = f"{turn.program} turn {turn.turn + 1} repeat {repeat + 1}"
    return Sameness(same, of, first)


def _said(turn: Turn) -> list[int] | str:
    return "" if turn.error else turn.answer or turn.text


def by_pressure(arms: Sequence[Column]) -> dict[float, list[Column]]:
    """The arms to be compared with each other: those without DRAM belong to every pressure."""
    pressures = sorted({pressure for arm in arms if (pressure := arm.key[1])}) or [0.0]
    return {each: [arm for arm in arms if arm.key[1] in (0.0, each)] for each in pressures}


SHOWN = (  # what a table of arms has, where it says anything
    *("jct_mean_s", "jct_p95_s", "jct_p99_s", "ttft_mean_s", "ttft_p95_s", "ttft_first_mean_s"),
    *("tpot_mean_s", "gap_p99_ms", "hooks_ms"),
    *("computed_tokens", "hit_vram_tokens", "hit_dram_tokens"),
    *("cached_pct", "theory_pct", "found_pct", "tokens_per_s"),
    *("stored_gb", "loaded_gb", "written_gb", "read_gb", "busy_pct", "failed_programs"),
)
ONLY_WITH = {"cached_pct": "theory_pct"}  # what other columns say already, but for that one
UNLESS_NONE = {"written_gb", "read_gb", "failed_programs"}


def shown(arms: Sequence[Column]) -> list[str]:
    """The figures that a table of these arms has."""

    def says(key: str) -> bool:
        values = [arm.figure(ONLY_WITH.get(key, key)) for arm in arms]
        return any(value or key not in UNLESS_NONE for value in values if not math.isnan(value))

    return [key for key in SHOWN if says(key)]


def tables(console: Console, title: str, arms: Sequence[Column]) -> Iterator[Table]:
    """A row per arm; below each figure how it compares with the first arm's. More than one table
    where the terminal is narrow."""
    if not arms:
        raise ResultError("nothing to compare: no run got as far as its first answer")
    base = arms[0]
    same = {arm.key: sameness(base, arm) for arm in arms[1:]}

    def cell(arm: Column, key: str) -> str:
        if key == SAME:
            return str(same.get(arm.key, "-"))
        text = BY_KEY[key].show(arm.figure(key))
        if arm is base or key not in COMPARED_BY_KEY:
            return text
        return f"{text}\n{ratio(base, arm, COMPARED_BY_KEY[key])}"

    def make(keys: Sequence[str]) -> Table:
        made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        made.add_column("arm (runs)", no_wrap=True)
        for key in keys:
            name = SAME if key == SAME else BY_KEY[key].name
            made.add_column(name, justify="left" if key == SAME else "right", no_wrap=True)
        for arm in arms:
            made.add_row(f"{arm.title} ({len(arm.runs)})", *(cell(arm, key) for key in keys))
        return made

    answers = [SAME] * any(each.of for each in same.values())
    yield from fitting(console, [*shown(arms), *answers], make)
