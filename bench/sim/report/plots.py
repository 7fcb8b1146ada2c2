"""Plots: one SVG per question, drawn by matplotlib, coloured by the page (palette.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.ticker import FuncFormatter, NullFormatter

from bench.sim.report.drawing import STYLE, log_seconds, panels, svg
from bench.sim.report.palette import OURS, PAPER, SOFT, TIERS, Look, looks
from bench.sim.report.summary import Figures, Table, arm_names, mean, oracle_of

MOST_PANELS = 5
MOST_STEPS = 160  # of a distribution's curve
Arms = dict[str, Figures]


def _some(table: Table) -> dict[Any, Arms]:
    """At most five points: the ends and what lies evenly between."""
    points = list(table)
    if len(points) > MOST_PANELS:
        last = len(points) - 1
        points = [points[round(i * last / (MOST_PANELS - 1))] for i in range(MOST_PANELS)]
    return {point: table[point] for point in points}


def _title(point: Any) -> str:
    return "" if point.load is None else f"{point.load:g} programs/s"


def _back_to_front(arms: Arms, all_looks: dict[str, Look]) -> Iterator[tuple[str, Figures, Look]]:
    """Ours is drawn last, so that nothing lies on it."""
    for arm in sorted(arms, key=lambda name: name == OURS):
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
    for arm in sorted(lines, key=lambda name: name == OURS):
        look, xs = all_looks[arm], [x for x, _ in lines[arm]]
        ys = [mean(each.jct_s) for _, each in lines[arm]]
        _line(axes, xs, ys, look)
        for x, each in lines[arm]:
            if len(each.records) > 1:
                low, high = min(each.jct_of_seeds), max(each.jct_of_seeds)
                axes.plot([x, x], [low, high], color=look.code, linewidth=look.width, alpha=0.45)
        ends.append((ys[-1], arm, look))
    axes.set(yscale="log", xlabel="programs that arrive per second")
    axes.set_title("Mean JCT", loc="left")
    log_seconds(axes.yaxis)
    _ticks(axes, table)
    _label_ends(axes, ends)


def _regret(axes: Any, table: Table, oracle: str) -> None:
    ends = []
    names = [arm for arm in arm_names(table) if arm != oracle]
    all_looks = looks(arm_names(table))
    for arm in sorted(names, key=lambda name: name == OURS):
        points = [(p.load or 0.0, a) for p, a in table.items() if arm in a and oracle in a]
        if not points:
            continue
        ys = [mean(arms[arm].jct_s) / mean(arms[oracle].jct_s) for _, arms in points]
        _line(axes, [x for x, _ in points], ys, all_looks[arm])
        ends.append((ys[-1], arm, all_looks[arm]))
    axes.axhline(1.0, color=all_looks[oracle].code, linewidth=1.2, linestyle=(0, (2, 2)))
    axes.set(yscale="log", xlabel="programs that arrive per second")
    axes.set_title(f"Regret: mean JCT over that of `{oracle}`", loc="left")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    _ticks(axes, table)
    _label_ends(axes, ends)


def _line(axes: Any, xs: Sequence[float], ys: Sequence[float], look: Look) -> None:
    axes.plot(
        xs, ys, color=look.code, linestyle=look.line, linewidth=look.width,
        marker=look.mark or None, markersize=look.width + 3, markeredgecolor=PAPER,
        markeredgewidth=0.8, clip_on=False,
    )  # fmt: skip


def _ticks(axes: Any, table: Table) -> None:
    loads = sorted({point.load or 0.0 for point in table})
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.grid(axis="x", visible=False)


def _label_ends(axes: Any, ends: list[tuple[float, str, Look]]) -> None:
    """Names beside the lines' ends, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    height = axes.figure.get_size_inches()[1] * 72 * 0.8 / 12.5  # lines of text that fit
    step = math.log(high / low) / height
    places: list[float] = []
    for value, arm, look in sorted(ends, key=lambda end: end[0]):
        place = math.log(value / low)
        place = max(place, places[-1] + step) if places else place
        places.append(place)
        axes.annotate(
            arm, (1.0, low * math.exp(place)), xycoords=("axes fraction", "data"),
            xytext=(9, 0), textcoords="offset points", va="center", color=look.code,
            fontweight="bold" if arm == OURS else "normal", annotation_clip=False,
        )  # fmt: skip


# --- at some loads --------------------------------------------------------------------------
def turn_latency(table: Table) -> str:
    """Mean latency of a program's first, second, ... turn."""
    with matplotlib.rc_context(STYLE):
        points = _some(table)
        figure, axes = panels(len(points), 2.9)
        all_looks = looks(arm_names(table))
        for panel, (point, arms) in zip(axes, points.items(), strict=True):
            for _, figures, look in _back_to_front(arms, all_looks):
                ys = figures.turn_latency_s()
                panel.plot(range(1, len(ys) + 1), ys, color=look.code, linestyle=look.line,
                           linewidth=look.width)  # fmt: skip
            panel.set_title(_title(point), loc="left")
            panel.set(yscale="log", xlabel="turn")
            panel.xaxis.get_major_locator().set_params(integer=True)
            log_seconds(panel.yaxis)
        return svg(figure)


def waiting_tail(table: Table) -> str:
    """Share of turns whose first token took longer than that."""
    with matplotlib.rc_context(STYLE):
        points = _some(table)
        figure, axes = panels(len(points), 2.9, sharey=True)
        all_looks = looks(arm_names(table))
        for panel, (point, arms) in zip(axes, points.items(), strict=True):
            for _, figures, look in _back_to_front(arms, all_looks):
                xs, shares = _curve(figures.ttft_s)
                panel.step(xs, [1 - share + 1 / len(figures.ttft_s) for share in shares],
                           color=look.code, linestyle=look.line, linewidth=look.width,
                           where="post")  # fmt: skip
            panel.set_title(_title(point), loc="left")
            panel.set(xscale="log", yscale="log", xlabel="TTFT", ylim=(9e-4, 1.1))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
            panel.yaxis.set_minor_formatter(NullFormatter())
            log_seconds(panel.xaxis)
        axes[0].set_ylabel("turns that wait longer")
        return svg(figure)


def jct_shares(table: Table) -> str:
    """Share of programs that were done by then."""
    with matplotlib.rc_context(STYLE):
        points = _some(table)
        figure, axes = panels(len(points), 2.9, sharey=True)
        all_looks = looks(arm_names(table))
        for panel, (point, arms) in zip(axes, points.items(), strict=True):
            for _, figures, look in _back_to_front(arms, all_looks):
                xs, shares = _curve(figures.jct_s)
                panel.step(xs, shares, color=look.code, linestyle=look.line,
                           linewidth=look.width, where="post")  # fmt: skip
            panel.set_title(_title(point), loc="left")
            panel.set(xscale="log", xlabel="JCT", ylim=(0, 1.02))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
            log_seconds(panel.xaxis)
        axes[0].set_ylabel("programs done")
        return svg(figure)


def _curve(ordered: Sequence[float]) -> tuple[list[float], list[float]]:
    """Values and the share that does not exceed each, at most MOST_STEPS, the tail whole."""
    number = len(ordered)
    ranks = {round(number * i / MOST_STEPS) for i in range(1, MOST_STEPS + 1)}
    ranks |= {number - round(number ** (i / 40)) + 1 for i in range(41)}
    chosen = sorted(rank for rank in ranks if 1 <= rank <= number)
    return [max(ordered[rank - 1], 1e-3) for rank in chosen], [rank / number for rank in chosen]


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
        _arm_ticks(axes[0], names)
        return svg(figure)


def _tier_bar(panel: Any, place: int, figures: Figures) -> None:
    shares = {
        "VRAM": figures.share("num_local_tokens"),
        "DRAM": figures.share("num_external_tokens"),
        "computed": figures.miss_share,
    }
    left = 0.0
    for tier, share in shares.items():
        alpha = 0.45 if tier == "computed" else 1.0
        panel.barh(place, share, left=left, height=0.72, color=TIERS[tier], alpha=alpha,
                   edgecolor=PAPER, linewidth=0.8)  # fmt: skip
        left += share


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
        _arm_ticks(axes[0], names)
        return svg(figure)


def _bus_bar(panel: Any, place: int, figures: Figures, look: Look, most: float) -> None:
    stored, loaded = figures.total("stored_bytes") / 1e9, figures.total("loaded_bytes") / 1e9
    panel.barh(place, -stored, height=0.72, color=look.code, alpha=0.5)
    panel.barh(place, loaded, height=0.72, color=look.code)
    if stored or loaded:
        text = "" if math.isnan(figures.read_back) else f"{figures.read_back:.1f}x"
        panel.text(loaded + 0.05 * most, place, text, va="center", fontsize=8, color=SOFT)


def _arm_ticks(axes: Any, names: Sequence[str]) -> None:
    all_looks = looks(names)
    axes.set_yticks(range(len(names)), list(reversed(names)))
    for label in axes.get_yticklabels():
        label.set_color(all_looks[label.get_text()].code)
        label.set_fontweight("bold" if label.get_text() == OURS else "normal")
