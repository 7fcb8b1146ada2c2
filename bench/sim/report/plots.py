"""Plots: one SVG per question, drawn by matplotlib, coloured by the page (palette.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.ticker import FuncFormatter, NullFormatter

from bench.common.arms import looks
from bench.common.numbers import mean
from bench.page import marks
from bench.page.drawing import STYLE, log_seconds, panels, svg
from bench.page.palette import SOFT, Look
from bench.sim.report.summary import Figures, Table, arm_names, oracle_of

Draw = Callable[[Any, Figures, Look], None]

MOST_PANELS = 5
Arms = dict[str, Figures]


def _some(table: Table) -> dict[Any, Arms]:
    """At most five points: the ends and what lies evenly between."""
    return {point: table[point] for point in marks.some(list(table), MOST_PANELS)}


def _title(point: Any) -> str:
    return "" if point.load is None else f"{point.load:g} programs/s"


def _back_to_front(arms: Arms, all_looks: dict[str, Look]) -> Iterator[tuple[str, Figures, Look]]:
    """Ours is drawn last, so that nothing lies on it."""
    for arm in marks.ours_last(arms, all_looks):
        yield arm, arms[arm], all_looks[arm]


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
        arm: [(p.load or 0.0, arms[arm]) for p, arms in table.items() if arm in arms]
        for arm in arm_names(table)
    }
    all_looks, ends = looks(list(lines)), []
    for arm in marks.ours_last(lines, all_looks):
        look, xs = all_looks[arm], [x for x, _ in lines[arm]]
        ys = [mean(each.jct_s) for _, each in lines[arm]]
        marks.line(axes, xs, ys, look)
        for x, each in lines[arm]:
            marks.span(axes, x, each.jct_of_seeds, look)
        ends.append((ys[-1], arm, look))
    axes.set(yscale="log", xlabel="programs that arrive per second")
    axes.set_title("Mean JCT", loc="left")
    log_seconds(axes.yaxis)
    _ticks(axes, table)
    marks.name_ends(axes, ends)


def _regret(axes: Any, table: Table, oracle: str) -> None:
    ends = []
    names = [arm for arm in arm_names(table) if arm != oracle]
    all_looks = looks(arm_names(table))
    for arm in marks.ours_last(names, all_looks):
        points = [(p.load or 0.0, a) for p, a in table.items() if arm in a and oracle in a]
        if not points:
            continue
        ys = [mean(arms[arm].jct_s) / mean(arms[oracle].jct_s) for _, arms in points]
        marks.line(axes, [x for x, _ in points], ys, all_looks[arm])
        ends.append((ys[-1], arm, all_looks[arm]))
    axes.axhline(1.0, color=all_looks[oracle].code, linewidth=1.2, linestyle=(0, (2, 2)))
    axes.set(yscale="log", xlabel="programs that arrive per second")
    axes.set_title(f"Regret: mean JCT over that of `{oracle}`", loc="left")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    _ticks(axes, table)
    marks.name_ends(axes, ends)


def _ticks(axes: Any, table: Table) -> None:
    loads = sorted({point.load or 0.0 for point in table})
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.grid(axis="x", visible=False)


# --- at some loads --------------------------------------------------------------------------
def _panel_per_point(table: Table, draw: Draw, **options: Any) -> tuple[Any, Sequence[Any]]:
    """A panel for each load shown, in it each arm as `draw` puts it, ours on top."""
    points, all_looks = _some(table), looks(arm_names(table))
    figure, axes = panels(len(points), 2.9, **options)
    for panel, (point, arms) in zip(axes, points.items(), strict=True):
        for _, figures, look in _back_to_front(arms, all_looks):
            draw(panel, figures, look)
        panel.set_title(_title(point), loc="left")
    return figure, axes


def turn_latency(table: Table) -> str:
    """Mean latency of a program's first, second, ... turn."""

    def draw(panel: Any, figures: Figures, look: Look) -> None:
        ys = figures.turn_latency_s()
        panel.plot(range(1, len(ys) + 1), ys, color=look.code, linestyle=look.line,
                   linewidth=look.width)  # fmt: skip

    with matplotlib.rc_context(STYLE):
        figure, axes = _panel_per_point(table, draw)
        for panel in axes:
            panel.set(yscale="log", xlabel="turn")
            panel.xaxis.get_major_locator().set_params(integer=True)
            log_seconds(panel.yaxis)
        return svg(figure)


def waiting_tail(table: Table) -> str:
    """Share of turns whose first token took longer than that."""

    def draw(panel: Any, figures: Figures, look: Look) -> None:
        marks.shares(panel, figures.ttft_s, look, is_tail=True)

    with matplotlib.rc_context(STYLE):
        figure, axes = _panel_per_point(table, draw, sharey=True)
        for panel in axes:
            panel.set(xscale="log", yscale="log", xlabel="TTFT", ylim=(9e-4, 1.1))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
            panel.yaxis.set_minor_formatter(NullFormatter())
            log_seconds(panel.xaxis)
        axes[0].set_ylabel("turns that wait longer")
        return svg(figure)


def jct_shares(table: Table) -> str:
    """Share of programs that were done by then."""

    def draw(panel: Any, figures: Figures, look: Look) -> None:
        marks.shares(panel, figures.jct_s, look)

    with matplotlib.rc_context(STYLE):
        figure, axes = _panel_per_point(table, draw, sharey=True)
        for panel in axes:
            panel.set(xscale="log", xlabel="JCT", ylim=(0, 1.02))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
            log_seconds(panel.xaxis)
        axes[0].set_ylabel("programs done")
        return svg(figure)


def tiers(table: Table) -> str:
    """Where each arm found its prompts, a bar per arm."""
    with matplotlib.rc_context(STYLE):
        points, names = _some(table), arm_names(table)
        figure, axes = panels(len(points), 0.9 + 0.27 * len(names), sharey=True)
        for panel, (point, arms) in zip(axes, points.items(), strict=True):
            for place, arm in enumerate(reversed(names)):
                if arm in arms:
                    _tier_bar(panel, place, arms[arm])
            panel.set_title(_title(point), loc="left")
            panel.set(xlim=(0, 1), xlabel="of prompt tokens")
            panel.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
            panel.grid(visible=False)
            panel.spines[["left", "bottom"]].set_visible(False)
        marks.arm_ticks(axes[0], names, looks(names))
        return svg(figure)


def _tier_bar(panel: Any, place: int, figures: Figures) -> None:
    shares = {
        "VRAM": figures.share("num_local_tokens"),
        "DRAM": figures.share("num_external_tokens"),
        "computed": figures.miss_share,
    }
    marks.tier_bar(panel, place, shares)


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
            panel.grid(visible=False)
            panel.spines[["left", "bottom"]].set_visible(False)
        marks.arm_ticks(axes[0], names, looks(names))
        return svg(figure)


def _bus_bar(panel: Any, place: int, figures: Figures, look: Look, most: float) -> None:
    stored, loaded = figures.total("stored_bytes") / 1e9, figures.total("loaded_bytes") / 1e9
    panel.barh(place, -stored, height=0.72, color=look.code, alpha=0.5)
    panel.barh(place, loaded, height=0.72, color=look.code)
    if stored or loaded:
        text = "" if math.isnan(figures.read_back) else f"{figures.read_back:.1f}x"
        panel.text(loaded + 0.05 * most, place, text, va="center", fontsize=8, color=SOFT)
