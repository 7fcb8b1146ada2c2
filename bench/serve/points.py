"""Points: what arms are compared at. A load and how full DRAM is, with every arm's runs there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bench.serve import compare, results
from bench.serve.arms import DEFAULT
from bench.serve.compare import COMPARED, Column
from bench.serve.results import Loaded, ResultError
from bench.serve.stats import Ratio

PLAIN = "none"  # the arm that others are compared with, unless another is named
VARIED = {"arrivals", "duration_s", "programs"}  # a load may differ from the next in these


@dataclass(frozen=True)
class Point:
    """Arms under one load and one pressure; the first is what the others are compared with."""

    arrivals: str
    pressure: float  # live KV / DRAM; 0 where no arm has DRAM
    arms: dict[str, Column]
    scene: str = ""  # what else differs from point to point; "" where nothing does

    @property
    def title(self) -> str:
        """The point in words."""
        dram = f"live KV / DRAM = {self.pressure:.3g}" if self.pressure else ""
        return ", ".join(filter(None, (self.scene, self.load_title, dram))) or "One server"

    @property
    def load_title(self) -> str:
        """How programs come."""
        kind, _, number = self.arrivals.partition(":")
        programs = f"{number} program{'s' if number != '1' else ''}"
        known = {
            "poisson": f"{programs} per second",
            "closed": f"{programs} at a time",
            "turns": "one request at a time",
        }
        return known.get(kind, self.arrivals)

    @property
    def load(self) -> float | None:
        """The number in `poisson:3` or `closed:16`; None where there is none."""
        try:
            return float(self.arrivals.partition(":")[2])
        except ValueError:
            return None

    @property
    def base(self) -> str:
        """The first arm."""
        return next(iter(self.arms))

    @cached_property
    def ratios(self) -> dict[tuple[str, str], Ratio]:
        """By arm and figure, to the first arm's; the first arm itself is left out."""
        first = self.arms[self.base]
        return {
            (arm, what.key): compare.ratio(first, column, what)
            for arm, column in self.arms.items()
            for what in COMPARED
            if arm != self.base
        }


@dataclass(frozen=True)
class Reported:
    """What one page tells of: all runs as they were started, and the points to compare at."""

    runs: list[Loaded]
    points: list[Point]


def read(folders: Sequence[Path], base: str = "") -> Reported:
    """Result folders that differ in nothing but their load, loads ascending."""
    runs = [run for folder in folders for run in _runs(folder)]
    _same(runs)
    if len({_place(run) for run in runs}) < len(folders):
        raise ResultError(
            "two of the folders hold the same load, so their runs would mix; "
            "compare them with: continuum bench compare FIRST SECOND"
        )
    return Reported(runs, points_of(runs, base or PLAIN, DEFAULT))


def points_of(runs: Sequence[Loaded], base: str, order: Sequence[str] = ()) -> list[Point]:
    """Scenes as they come, loads ascending; arm `base` first where it ran, then as in `order`."""
    by_place: dict[tuple[str, str], list[Loaded]] = {}
    for run in runs:
        by_place.setdefault(_place(run), []).append(run)
    points = [
        Point(
            arrivals, pressure, {_name(column): column for column in _in_order(arms, order)}, scene
        )
        for (scene, arrivals), here in by_place.items()
        for pressure, arms in compare.by_pressure(compare.columns(here, base)).items()
        if arms
    ]
    scenes = list(dict.fromkeys(point.scene for point in points))
    return sorted(points, key=lambda p: (scenes.index(p.scene), p.load or 0.0, p.pressure))


def _runs(folder: Path) -> list[Loaded]:
    found = results.load(folder)
    if not found:
        raise ResultError(
            f"{folder} holds no run yet: `continuum bench ab` writes one as soon as a server starts"
        )
    return found


def _same(runs: Sequence[Loaded]) -> None:
    first = runs[0].run.settings
    for each in runs:
        settings = each.run.settings
        other = [key for key in first if key not in VARIED and settings.get(key) != first[key]]
        if other:
            raise ResultError(
                f"{runs[0].folder} and {each.folder} differ in {', '.join(other)}, not only in "
                "their load; write a report of each"
            )


def _place(run: Loaded) -> tuple[str, str]:
    """Scene and arrivals."""
    settings = run.run.settings
    return str(settings.get("scene", "")), str(settings.get("arrivals", ""))


def _in_order(arms: Sequence[Column], order: Sequence[str]) -> list[Column]:
    """The first one first, the others in `order`, whenever they ran."""
    known = {arm: place for place, arm in enumerate(order)}
    rest = sorted(arms[1:], key=lambda column: known.get(column.key[0], len(known)))
    return [*arms[:1], *rest]


def _name(column: Column) -> str:
    return column.key[0] or column.title
