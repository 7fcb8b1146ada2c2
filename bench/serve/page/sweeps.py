"""Sweeps: the plots along something that was varied, the load or how full DRAM is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib

from bench.common.arms import looks
from bench.page import marks
from bench.page.drawing import STYLE, counts, log_seconds, panels, svg
from bench.page.panels import along, name_along
from bench.serve.page.points import Point, Reported
from bench.serve.summary import BY_KEY

JCT = {"jct_mean_s": "Mean JCT", "jct_p95_s": "JCT, P95"}
PRESSED = {"computed_tokens": "Prompt tokens computed", "jct_mean_s": "Mean JCT"}


def levels(reported: Reported) -> list[list[Point]]:
    """Points that differ in load alone, by how full DRAM is; those with two loads or more."""
    found: dict[tuple[str, int], list[Point]] = {}
    for (scene, _), points in reported.loads.items():
        for place, point in enumerate(points):
            if point.load is not None:
                found.setdefault((scene, place), []).append(point)
    return [points for points in found.values() if len(points) > 1]


def level_title(points: Sequence[Point]) -> str:
    """What the points have in common."""
    pressures = {f"{point.pressure:.3g}" for point in points}
    if pressures == {"0"}:
        return points[0].scene
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
    all_looks, value = looks(arms), BY_KEY[key].value
    here = list(zip(xs, points, strict=True))
    lines = {arm: [(x, p.arms[arm].figure(key)) for x, p in here if arm in p.arms] for arm in arms}
    ends = along(
        panel, {a: [at for at in line if at[1] > 0] for a, line in lines.items()}, all_looks
    )
    for arm in arms:
        if arm == arms[0] or all_looks[arm].is_ours:  # of ten arms they would hide the lines
            for x, point in here:
                runs = point.arms[arm].runs.values() if arm in point.arms else ()
                marks.span(panel, x, [value(run) for run in runs], all_looks[arm])
    (log_seconds if BY_KEY[key].unit == "s" else counts)(panel.yaxis)
    panel.set_title(title, loc="left")
    name_along(panel, xs, ends)
