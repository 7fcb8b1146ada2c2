"""Sweeps: the plots along something that was varied, the load or how full DRAM is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.ticker import NullLocator

from bench.common.arms import looks
from bench.page import marks
from bench.page.drawing import STYLE, counts, log_seconds, panels, svg
from bench.page.palette import Look
from bench.serve.page.points import Point, Reported
from bench.serve.summary import BY_KEY

JCT = {"jct_mean_s": "Mean JCT", "jct_p95_s": "JCT, P95"}
PRESSED = {"computed_tokens": "Prompt tokens computed", "jct_mean_s": "Mean JCT"}


def levels(reported: Reported) -> list[list[Point]]:
    """Points that differ in load alone, by how full DRAM is; those with two loads or more."""
    by_load = [points for points in reported.loads.values() if points[0].load is not None]
    most = max(map(len, by_load), default=0)
    found = [[points[i] for points in by_load if i < len(points)] for i in range(most)]
    return [points for points in found if len(points) > 1]


def level_title(points: Sequence[Point]) -> str:
    """What the points have in common."""
    pressures = {f"{point.pressure:.3g}" for point in points}
    if pressures == {"0"}:
        return ""
    return f"live KV / DRAM = {pressures.pop()}" if len(pressures) == 1 else "the same DRAM"


def against_load(points: Sequence[Point]) -> str:
    """JCT of each arm against load."""
    with matplotlib.rc_context(STYLE):
        figure, axes = panels(len(JCT), 4.0)
        xs = [point.load or 0.0 for point in points]
        what = points[0].arrivals.partition(":")[0]
        for panel, (key, title) in zip(axes, JCT.items(), strict=True):
            _draw(panel, points, xs, key, title)
            unit = "programs that arrive per second" if what == "poisson" else "programs at a time"
            panel.set(xlabel=unit)
        return svg(figure)


def against_pressure(points: Sequence[Point]) -> str:
    """Tokens computed and JCT of each arm against live KV / DRAM."""
    with matplotlib.rc_context(STYLE):
        figure, axes = panels(len(PRESSED), 4.0)
        for panel, (key, title) in zip(axes, PRESSED.items(), strict=True):
            panel.set_xscale("log", base=2)
            _draw(panel, points, [point.pressure for point in points], key, title)
            panel.set(xlabel="live KV / DRAM")
        return svg(figure)


def _draw(panel: Any, points: Sequence[Point], xs: Sequence[float], key: str, title: str) -> None:
    arms = list(dict.fromkeys(arm for point in points for arm in point.arms))
    all_looks, ends = looks(arms), []
    for arm in marks.ours_last(arms, all_looks):
        told = [
            (x, p.arms[arm].figure(key)) for x, p in zip(xs, points, strict=True) if arm in p.arms
        ]
        told = [(x, y) for x, y in told if y > 0]
        if told:
            marks.line(panel, [x for x, _ in told], [y for _, y in told], all_looks[arm])
            ends.append((told[-1][1], arm, all_looks[arm]))
            if arm == arms[0] or all_looks[arm].is_ours:  # of ten arms they would hide the lines
                _spans(panel, points, xs, key, arm, all_looks[arm])
    panel.set_yscale("log")
    (log_seconds if BY_KEY[key].unit == "s" else counts)(panel.yaxis)
    panel.set_title(title, loc="left")
    panel.set_xticks(xs, [f"{x:g}" for x in xs])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(axis="x", visible=False)
    marks.name_ends(panel, ends)


def _spans(
    panel: Any, points: Sequence[Point], xs: Sequence[float], key: str, arm: str, look: Look
) -> None:
    for x, point in zip(xs, points, strict=True):
        if arm in point.arms:
            values = [BY_KEY[key].value(run) for run in point.arms[arm].runs.values()]
            marks.span(panel, x, values, look)
