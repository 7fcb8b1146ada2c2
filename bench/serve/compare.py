"""Runs side by side: one column per arm, its ratio to the first, and whether the answers agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from bench.common.tables import fitting, mean
from bench.serve import stats
from bench.serve.results import Loaded, ResultError, Turn
from bench.serve.stats import Ratio
from bench.serve.summary import BY_KEY


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


def ratio(base: Column, other: Column, key: str) -> Ratio | None:
    """Over the repeats that both have; None of an arm to itself, or of what is not compared. No
    JCT where one arm lost more programs than the other.

    Those that failed worked for nothing, or left room for the rest: what remains is no fair pair.
    """
    what = BY_KEY[key]
    if base is other or what.sample is None:
        return None
    both = [repeat for repeat in base.runs if repeat in other.runs]
    first, second = ([column.runs[repeat] for repeat in both] for column in (base, other))
    if what.of_finished and _num_failed(first) != _num_failed(second):
        return stats.NO_RATIO
    samples = (list(map(what.sample, runs)) for runs in (first, second))
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


PLAIN = "none"  # the arm that others are compared with, unless another is named


@dataclass(frozen=True)
class Point:
    """What arms are compared at: a load, and how full DRAM is. The others are compared with the
    first arm."""

    arrivals: str
    pressure: float  # live KV / DRAM; 0 where no arm has DRAM
    columns: list[Column]
    scene: str = ""  # what else differs from point to point; "" where nothing does

    @property
    def arms(self) -> dict[str, Column]:
        """By name; a server that was there already has its title only."""
        return {column.key[0] or column.title: column for column in self.columns}

    @property
    def title(self) -> str:
        """The point in words."""
        kind, _, number = self.arrivals.partition(":")
        programs = f"{number} program{'s' if number != '1' else ''}"
        known = {
            "poisson": f"{programs} per second",
            "closed": f"{programs} at a time",
            "turns": "one request at a time",
        }
        dram = f"live KV / DRAM = {self.pressure:.3g}" if self.pressure else ""
        told = filter(None, (self.scene, known.get(kind, self.arrivals), dram))
        return ", ".join(told) or "One server"

    @property
    def load(self) -> float | None:
        """The number in `poisson:3` or `closed:16`; None where there is none."""
        try:
            return float(self.arrivals.partition(":")[2])
        except ValueError:
            return None


def points_of(runs: Iterable[Loaded], base: str, order: Sequence[str] = ()) -> list[Point]:
    """Scenes as they come, loads ascending; arm `base` first where it ran, then as in `order`. Arms
    without DRAM belong to every pressure."""
    by_place: dict[tuple[str, str], list[Loaded]] = {}
    for run in runs:
        by_place.setdefault(place(run), []).append(run)
    known = {arm: number for number, arm in enumerate(order)}
    found = []
    for (scene, arrivals), here in by_place.items():
        arms = columns(here, base)
        arms[1:] = sorted(arms[1:], key=lambda arm: known.get(arm.key[0], len(known)))
        for pressure in sorted({arm.key[1] for arm in arms if arm.key[1]}) or [0.0] * bool(arms):
            at = [arm for arm in arms if arm.key[1] in (0.0, pressure)]
            found.append(Point(arrivals, pressure, at, scene))
    scenes = list(dict.fromkeys(point.scene for point in found))
    return sorted(found, key=lambda p: (scenes.index(p.scene), p.load or 0.0, p.pressure))


def place(run: Loaded) -> tuple[str, str]:
    """Scene and arrivals."""
    settings = run.run.settings
    return str(settings.get("scene", "")), str(settings.get("arrivals", ""))


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
    base = arms[0]
    same = {arm.key: sameness(base, arm) for arm in arms[1:]}

    def cell(arm: Column, key: str) -> str:
        if key == SAME:
            return str(same.get(arm.key, "-"))
        text = BY_KEY[key].show(arm.figure(key))
        told = ratio(base, arm, key)
        return text if told is None else f"{text}\n{told}"

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
