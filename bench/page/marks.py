"""Marks: what plots of arms are made of, so that a line means the same in every report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from bench.page.palette import FADED, PAPER, TIERS, Look

MOST_STEPS = 160  # of a distribution's curve
Ends = list[tuple[float, str, Look]]  # a line's last value, its arm, its look


def ours_last(arms: Iterable[str], looks: Mapping[str, Look]) -> list[str]:
    """The order to draw in: nothing lies on ours."""
    return sorted(arms, key=lambda arm: looks[arm].is_ours)


def line(axes: Any, xs: Sequence[float], ys: Sequence[float], look: Look) -> None:
    """A line with a mark at every value."""
    axes.plot(
        xs, ys, color=look.code, linestyle=look.line, linewidth=look.width,
        marker=look.mark or None, markersize=look.width + 3, markeredgecolor=PAPER,
        markeredgewidth=0.8, clip_on=False,
    )  # fmt: skip


def span(axes: Any, x: float, values: Sequence[float], look: Look) -> None:
    """How far several values of one point lie apart."""
    if len(values) > 1:
        axes.plot(
            [x, x], [min(values), max(values)], color=look.code, linewidth=look.width, alpha=FADED
        )


def name_ends(axes: Any, ends: Ends) -> None:
    """Names beside the lines' ends, moved apart where they would overlap."""
    step = 12.5 / (axes.figure.get_size_inches()[1] * 72 * 0.8)  # a line of text, of the height
    to_share = axes.transScale + axes.transLimits
    x = axes.get_xlim()[1]
    ordered = sorted(ends, key=lambda end: end[0])
    wanted = [float(to_share.transform((x, value))[1]) for value, _, _ in ordered]
    for place, (_, arm, look) in zip(apart(wanted, step), ordered, strict=True):
        axes.annotate(
            arm, (1.0, place), xycoords="axes fraction",
            xytext=(9, 0), textcoords="offset points", va="center", color=look.code,
            fontweight="bold" if look.is_ours else "normal", annotation_clip=False,
        )  # fmt: skip


def apart(wanted: Sequence[float], step: float) -> list[float]:
    """Ascending places at least a step apart and not above 1, as near as can be to what is wanted.

    Isotonic regression: what would overlap becomes a group around its own middle.
    """
    groups: list[list[float]] = []
    for i, place in enumerate(wanted):
        groups.append([place - i * step])
        while len(groups) > 1 and mean(groups[-2]) > mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    highest = 1.0 - (len(wanted) - 1) * step
    found = [min(mean(group), highest) for group in groups for _ in group]
    return [place + i * step for i, place in enumerate(found)]


def shares(panel: Any, ordered: Sequence[float], look: Look) -> None:
    """Share of the values that do not exceed each."""
    xs, ys = _curve(ordered)
    panel.step(
        xs, ys, color=look.code, linestyle=look.line, linewidth=look.width, where="post"
    )  # fmt: skip


def _curve(ordered: Sequence[float]) -> tuple[list[float], list[float]]:
    """Values and the share that does not exceed each, at most MOST_STEPS, the tail whole."""
    number = len(ordered)
    ranks = {round(number * i / MOST_STEPS) for i in range(1, MOST_STEPS + 1)}
    ranks |= {number - round(number ** (i / 40)) + 1 for i in range(41)}
    chosen = sorted(rank for rank in ranks if 1 <= rank <= number)
    return [max(ordered[rank - 1], 1e-3) for rank in chosen], [rank / number for rank in chosen]


def tier_bar(panel: Any, place: float, by_tier: Mapping[str, float]) -> None:
    """A bar of what each tier had, VRAM first and what was computed last."""
    left = 0.0
    for tier, code in TIERS.items():
        alpha = FADED if tier == "computed" else 1.0
        panel.barh(place, by_tier[tier], left=left, height=0.72, color=code, alpha=alpha,
                   edgecolor=PAPER, linewidth=0.8)  # fmt: skip
        left += by_tier[tier]


def arm_ticks(axes: Any, arms: Sequence[str], looks: Mapping[str, Look]) -> None:
    """The arms from top to bottom, each in its colour."""
    axes.set_yticks(range(len(arms)), list(reversed(arms)))
    for label, arm in zip(axes.get_yticklabels(), reversed(arms), strict=True):
        label.set_color(looks[arm].code)
        label.set_fontweight("bold" if looks[arm].is_ours else "normal")
