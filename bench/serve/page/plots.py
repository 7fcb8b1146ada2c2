"""Plots of one point: who is faster, when, at which turn, and which tier had the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.ticker import FuncFormatter

from bench.common.tables import mean
from bench.page import marks
from bench.page.drawing import STYLE, counts, grid, panels, svg
from bench.page.palette import FADED, PAPER, SOFT, TIERS
from bench.page.panels import by_turn, done_by, where_found
from bench.serve.compare import Column
from bench.serve.page.points import Point
from bench.serve.results import Loaded, Sample, Turn
from bench.serve.summary import BY_KEY, per_turn

RATIOS = {
    "jct_mean_s": "JCT mean",
    "jct_p95_s": "JCT P95",
    "ttft_mean_s": "TTFT mean",
    "computed_tokens": "tokens computed",
}
SOURCES = {"VRAM": "hit_vram", "DRAM": "hit_dram", "computed": "computed"}  # of a sample
OF_A_TURN: dict[str, Callable[[Turn], float]] = {
    "Seconds from request to answer": lambda turn: turn.latency_s,
    "Prompt tokens computed": lambda turn: turn.prompt_tokens - turn.cached_tokens,
}
PER_ROW = 4


def ratios(point: Point) -> str:
    """Each arm over the first one, with its interval."""
    with matplotlib.rc_context(STYLE):
        arms = [arm for arm in point.arms if arm != point.base]
        figure, axes = panels(len(RATIOS), 0.95 + 0.26 * len(arms), sharey=True)
        for panel, (key, title) in zip(axes, RATIOS.items(), strict=True):
            for place, arm in enumerate(reversed(arms)):
                _interval(panel, place, point, arm, key)
            panel.axvline(1.0, color=point.looks[point.base].code, linewidth=1.2)
            panel.set_title(title, loc="left")
            panel.set(xlabel=f"times {point.base}", ylim=(-0.6, len(arms) - 0.4))
            panel.set_xlim(min(0.0, panel.get_xlim()[0]), max(1.1, panel.get_xlim()[1]))
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
            panel.grid(axis="y", visible=False)
            panel.spines["left"].set_visible(False)
        marks.arm_ticks(axes[0], arms, point.looks)
        return svg(figure)


def _interval(panel: Any, place: int, point: Point, arm: str, key: str) -> None:
    found, look = point.ratios[arm, key], point.looks[arm]
    if math.isnan(found.value):
        return
    if not math.isnan(found.low):
        panel.plot([found.low, found.high], [place, place], color=look.code, linewidth=look.width,
                   alpha=FADED)  # fmt: skip
    panel.plot([found.value], [place], "o", color=look.code, markersize=look.width + 4,
               markeredgecolor=PAPER, markeredgewidth=0.8)  # fmt: skip


def distributions(point: Point) -> str:
    """Share of programs that were done, and of turns that had their first token, by then."""
    with matplotlib.rc_context(STYLE):
        figure, axes = panels(2, 3.3, sharey=True)
        for panel, title, seconds in zip(axes, ("JCT", "TTFT"), (_jct, _ttft), strict=True):
            told = {
                arm: [value for run in column.runs.values() for value in seconds(run)]
                for arm, column in point.arms.items()
            }
            done_by(panel, told, point.looks)
            panel.set_title(title, loc="left")
        axes[0].set_ylabel("done by then")
        return svg(figure)


def _jct(run: Loaded) -> list[float]:
    return [program.jct_s for program in run.finished]


def _ttft(run: Loaded) -> list[float]:
    return [turn.ttft_s for turn in run.turns if turn.ttft_s and not turn.error]


def turns(point: Point) -> str:
    """Of a program's first, second, ... turn: its seconds, and the tokens computed for it."""
    with matplotlib.rc_context(STYLE):
        figure, axes = panels(2, 3.3)
        for panel, (title, value) in zip(axes, OF_A_TURN.items(), strict=True):
            told = {arm: _by_turn(column, value) for arm, column in point.arms.items()}
            by_turn(panel, told, point.looks)
            panel.set_title(title, loc="left")
            panel.set(ylim=(0, None))
        counts(axes[1].yaxis)
        return svg(figure)


def _by_turn(column: Column, value: Callable[[Turn], float]) -> list[float]:
    grouped: dict[int, list[float]] = {}
    for run in column.runs.values():
        for index, here in per_turn(run).items():
            grouped.setdefault(index, []).extend(map(value, here))
    return [mean(grouped[index]) for index in sorted(grouped)]


def tiers(point: Point) -> str:
    """Where each arm found its prompts, a bar per arm."""
    with matplotlib.rc_context(STYLE):
        told = {arm: by_tier for arm, column in point.arms.items() if (by_tier := _found(column))}
        figure, (panel,) = panels(1, 0.8 + 0.27 * len(told))
        where_found(panel, list(told), told)
        marks.arm_ticks(panel, list(told), point.looks)
        return svg(figure)


def _found(column: Column) -> dict[str, float]:
    """Tokens by tier, mean over the repeats; empty where the server did not tell."""
    by_tier = {tier: column.figure(f"{name}_tokens") for tier, name in SOURCES.items()}
    return {} if any(map(math.isnan, by_tier.values())) else by_tier


def over_time(point: Point) -> str:
    """Prompt tokens so far by where they were found, a panel per arm: its first repeat."""
    with matplotlib.rc_context(STYLE):
        told = {arm: run for arm in point.arms if (run := _first(point.arms[arm])).samples}
        figure, axes = grid(len(told), PER_ROW, 1.9)
        most_s = max(run.run.wall_s or run.samples[-1].t_s for run in told.values())
        for panel, (arm, run) in zip(axes, told.items(), strict=True):
            xs, stacked = _stacked(run)
            layers = panel.stackplot(xs, stacked, colors=list(TIERS.values()), linewidth=0)
            layers[-1].set_alpha(FADED)
            panel.axvline(xs[-1], color=SOFT, linewidth=0.8, linestyle=(0, (2, 2)))
            panel.set_title(arm, loc="left", color=point.looks[arm].code)
            panel.set(xlim=(0, most_s * 1.02), ylim=(0, None))
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
            panel.xaxis.get_major_locator().set_params(nbins=4)
            counts(panel.yaxis)
        return svg(figure)


def has_samples(point: Point) -> bool:
    """Whether a server told of itself while it worked."""
    return any(_first(column).samples for column in point.arms.values())


def has_turns(point: Point) -> bool:
    """Whether single turns are known, not programs alone."""
    return any(run.turns for column in point.arms.values() for run in column.runs.values())


def has_tiers(point: Point) -> bool:
    """Whether a server told where it found its prompts."""
    return any(_found(column) for column in point.arms.values())


def _first(column: Column) -> Loaded:
    return column.runs[min(column.runs)]


def _stacked(run: Loaded) -> tuple[list[float], list[list[float]]]:
    """From nothing at 0 to what the server counted at the end."""
    start = Sample(t_s=0.0, values={})
    samples: Sequence[Sample] = (start, *run.samples)
    xs = [sample.t_s for sample in samples]
    stacked = [[s.values.get(name, 0.0) for s in samples] for name in SOURCES.values()]
    if run.added and run.run.wall_s > xs[-1]:
        xs.append(run.run.wall_s)
        for values, name in zip(stacked, SOURCES.values(), strict=True):
            values.append(max(BY_KEY[f"{name}_tokens"].value(run), values[-1]))
    return xs, stacked
