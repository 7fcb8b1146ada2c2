"""Panels: one question each, of whatever arms; a report says which it has, and where they stand.

Values are by arm; ours is drawn last, so that nothing lies on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter, NullLocator

from bench.page import marks
from bench.page.drawing import counts, log_seconds
from bench.page.palette import Look

Looks = Mapping[str, Look]
Values = Mapping[str, Sequence[float]]
Lines = Mapping[str, Sequence[tuple[float, float]]]  # x, y
Tiers = Mapping[str, Mapping[str, float]]  # by arm, then by tier


def done_by(panel: Any, values: Values, looks: Looks) -> None:
    """Share of the values that do not exceed each."""
    for arm in marks.ours_last(values, looks):
        if values[arm]:
            marks.shares(panel, sorted(values[arm]), looks[arm])
    panel.set(xscale="log", ylim=(0, 1.02))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    log_seconds(panel.xaxis)


def by_turn(panel: Any, values: Values, looks: Looks) -> None:
    """A value of a program's first, second, ... turn."""
    for arm in marks.ours_last(values, looks):
        marks.line(panel, range(1, len(values[arm]) + 1), values[arm], looks[arm])
    panel.set(xlabel="turn")
    panel.xaxis.get_major_locator().set_params(integer=True)


def along(panel: Any, lines: Lines, looks: Looks) -> marks.Ends:
    """A line per arm along what was varied; returns what `name_along` writes beside the ends."""
    ends: marks.Ends = []
    for arm in marks.ours_last(lines, looks):
        if told := lines[arm]:
            marks.line(panel, [x for x, _ in told], [y for _, y in told], looks[arm])
            ends.append((told[-1][1], arm, looks[arm]))
    panel.set_yscale("log")
    return ends


def name_along(panel: Any, xs: Sequence[float], ends: marks.Ends) -> None:
    """Ticks where something was measured, and the arms' names; last, for scales move them."""
    panel.set_xticks(xs, [f"{x:g}" for x in xs])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(axis="x", visible=False)
    marks.name_ends(panel, ends)


def where_found(panel: Any, arms: Sequence[str], tiers: Tiers) -> None:
    """A bar per arm, of what each tier had; `marks.arm_ticks` names them."""
    for place, arm in enumerate(reversed(arms)):
        marks.tier_bar(panel, place, tiers[arm])
    panel.set(xlabel="prompt tokens")
    counts(panel.xaxis)
    panel.grid(visible=False)
    panel.spines[["left", "bottom"]].set_visible(False)
