"""Plots: one SVG per question, drawn by matplotlib, coloured by the page (palette.py)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.ticker import FuncFormatter

from bench.common.arms import looks
from bench.common.tables import mean
from bench.page import marks
from bench.page.drawing import STYLE, log_seconds, panels, svg
from bench.page.palette import SOFT, Look
from bench.page.panels import along, bars_only, by_turn, done_by, name_along, waiting, where_found
from bench.sim.report.summary import Figures, Table, arm_names, oracle_of

Draw = Callable[[Any, dict[str, Sequence[float]], dict[str, Look]], None]

MOST_PANELS = 5
Arms = dict[str, Figures]


def _some(table: Table) -> dict[Any, Arms]:
    """At most five points: the ends and what lies evenly between."""
    return {point: table[point] for point in marks.some(list(table), MOST_PANELS)}


def _title(point: Any) -> str:
    return "" if point.load is None else f"{point.load:g} programs/s"


# --- against load ---------------------------------------------------------------------------
def against_load(table: Table) -> str:
    """JCT of each arm against load and, where an oracle ran, its regret."""
    with matplotlib.rc_context(STYLE):
        oracle = oracle_of(arm_names(table))
        figure, axes = panels(2 if oracle else 1, 4.2)
        _jct(axes[0], table)
        if oracle:
            _regret(axes[1], table, oracle)
        return svg(figure)


def _jct(axes: Any, table: Table) -> None:
    lines = {
        arm: [(p.load or 0.0, mean(arms[arm].jct_s)) for p, arms in table.items() if arm in arms]
        for arm in arm_names(table)
    }
    all_looks = looks(list(lines))
    ends = along(axes, lines, all_looks)
    for point, arms in table.items():
        for arm, each in arms.items():
            marks.span(axes, point.load or 0.0, each.jct_of_seeds, all_looks[arm])
    axes.set_title("Mean JCT", loc="left")
    log_seconds(axes.yaxis)
    _finish(axes, table, ends)


def _regret(axes: Any, table: Table, oracle: str) -> None:
    all_looks = looks(arm_names(table))
    lines = {
        arm: [
            (p.load or 0.0, mean(arms[arm].jct_s) / mean(arms[oracle].jct_s))
            for p, arms in table.items()
            if arm in arms and oracle in arms
        ]
        for arm in arm_names(table)
        if arm != oracle
    }
    ends = along(axes, lines, all_looks)
    axes.axhline(1.0, color=all_looks[oracle].code, linewidth=1.2, linestyle=(0, (2, 2)))
    axes.set_title(f"Regret: mean JCT over that of `{oracle}`", loc="left")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    _finish(axes, table, ends)


def _finish(axes: Any, table: Table, ends: marks.Ends) -> None:
    axes.set(xlabel="programs that arrive per second")
    name_along(axes, sorted({point.load or 0.0 for point in table}), ends)


# --- at some loads --------------------------------------------------------------------------
def _per_point(
    table: Table, draw: Draw, values: Callable[[Figures], Sequence[float]], **options: Any
) -> tuple[Any, Sequence[Any]]:
    """A panel for each load shown, in it each arm's values as `draw` puts them."""
    points, all_looks = _some(table), looks(arm_names(table))
    figure, axes = panels(len(points), 2.9, **options)
    for panel, (point, arms) in zip(axes, points.items(), strict=True):
        draw(panel, {arm: values(figures) for arm, figures in arms.items()}, all_looks)
        panel.set_title(_title(point), loc="left")
    return figure, axes


def turn_latency(table: Table) -> str:
    """Mean latency of a program's first, second, ... turn."""
    with matplotlib.rc_context(STYLE):
        draw = functools.partial(by_turn, has_marks=False)
        figure, axes = _per_point(table, draw, Figures.turn_latency_s)
        for panel in axes:
            panel.set(yscale="log")
            log_seconds(panel.yaxis)
        return svg(figure)


def waiting_tail(table: Table) -> str:
    """Share of turns whose first token took longer than that."""
    return _shares(table, waiting, lambda f: f.ttft_s, "TTFT", "turns that wait longer")


def jct_shares(table: Table) -> str:
    """Share of programs that were done by then."""
    return _shares(table, done_by, lambda f: f.jct_s, "JCT", "programs done")


def _shares(
    table: Table, draw: Draw, values: Callable[[Figures], Sequence[float]], of: str, share: str
) -> str:
    with matplotlib.rc_context(STYLE):
        figure, axes = _per_point(table, draw, values, sharey=True)
        for panel in axes:
            panel.set(xlabel=of)
        axes[0].set_ylabel(share)
        return svg(figure)


def tiers(table: Table) -> str:
    """Where each arm found its prompts, a bar per arm."""
    with matplotlib.rc_context(STYLE):
        points, names = _some(table), arm_names(table)
        figure, axes = panels(len(points), 0.9 + 0.27 * len(names), sharey=True)
        for panel, (point, arms) in zip(axes, points.items(), strict=True):
            told = {arm: figures.tier_shares for arm, figures in arms.items()}
            where_found(panel, names, told, is_share=True)
            panel.set_title(_title(point), loc="left")
        marks.arm_ticks(axes[0], names, looks(names))
        return svg(figure)


def bus(table: Table) -> str:
    """Bytes over PCIe: stored to the left, loaded to the right, and how much came back."""
    with matplotlib.rc_context(STYLE):
        points, names = _some(table), arm_names(table)
        figure, axes = panels(len(points), 0.9 + 0.27 * len(names), sharey=True)
        all_looks = looks(names)
        for panel, (point, arms) in zip(axes, points.items(), strict=True):
            most = max(
                [f.total(n) for f in arms.values() for n in ("stored_bytes", "loaded_bytes")]
            )
            most = most / 1e9 or 1.0
            for place, arm in enumerate(reversed(names)):
                if arm in arms:
                    _bus_bar(panel, place, arms[arm], all_looks[arm], most)
            panel.axvline(0, color=SOFT, linewidth=0.8)
            panel.set_title(_title(point), loc="left")
            panel.set(xlim=(-1.25 * most, 1.9 * most), xlabel="GB  stored | loaded")
            panel.set_xticks([-most, 0, most], [f"{most:,.0f}", "0", f"{most:,.0f}"])
            bars_only(panel)
        marks.arm_ticks(axes[0], names, looks(names))
        return svg(figure)


def _bus_bar(panel: Any, place: int, figures: Figures, look: Look, most: float) -> None:
    stored, loaded = figures.total("stored_bytes") / 1e9, figures.total("loaded_bytes") / 1e9
    panel.barh(place, -stored, height=0.72, color=look.code, alpha=0.5)
    panel.barh(place, loaded, height=0.72, color=look.code)
    if stored or loaded:
        text = "" if math.isnan(figures.read_back) else f"{figures.read_back:.1f}x"
        panel.text(loaded + 0.05 * most, place, text, va="center", fontsize=8, color=SOFT)
