"""Tables: every arm at a point in numbers, and one number of every arm at all points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from bench.page import document
from bench.serve.compare import COMPARED_BY_KEY, sameness, shown
from bench.serve.page.points import Point
from bench.serve.page.words import interval
from bench.serve.summary import BY_KEY

CLOSE = 1.02  # times the best: as good as the best


def point_table(point: Point) -> str:
    """A row per arm; below a figure its ratio to the first arm's, with its interval."""
    keys = shown(list(point.arms.values()))
    head = "".join(f"<th>{BY_KEY[key].name}</th>" for key in keys)
    rows = [f"<tr><th>arm</th>{head}<th>same answers</th></tr>"]
    for arm, column in point.arms.items():
        cells = "".join(f"<td>{_cell(point, arm, key)}</td>" for key in keys)
        same = "-" if arm == point.base else escape(str(sameness(point.arms[point.base], column)))
        kind = ' class="ours"' if point.looks[arm].is_ours else ""
        runs = f"{len(column.runs)} run{'s' if len(column.runs) > 1 else ''}"
        name = f'{escape(arm)}<small class="below">{runs}</small>'
        rows.append(f"<tr{kind}><td>{name}</td>{cells}<td>{same}</td></tr>")
    return document.table(rows, "dense")


def _cell(point: Point, arm: str, key: str) -> str:
    text = escape(BY_KEY[key].show(point.arms[arm].figure(key)))
    if arm == point.base or key not in COMPARED_BY_KEY:
        return text
    ratio = point.ratios[arm, key]
    if math.isnan(ratio.value):
        return text
    return f'{text}<small class="below">{interval(ratio)}</small>'


def overview(points: Sequence[Point], key: str) -> str:
    """One figure of every arm at all points; what comes within 2 % of the best that a server could
    run has a dot."""
    looks = {arm: look for point in points for arm, look in point.looks.items()}
    lines = [f"<tr><th></th>{''.join(f'<th>{escape(arm)}</th>' for arm in looks)}</tr>"]
    for point in points:
        values = {arm: column.figure(key) for arm, column in point.arms.items()}
        fair = {arm: v for arm, v in values.items() if not (math.isnan(v) or looks[arm].is_oracle)}
        best = min(fair.values(), default=math.nan)
        cells = ""
        for arm in looks:
            kind = "best" if fair.get(arm, math.nan) <= CLOSE * best else "other"
            shown = BY_KEY[key].show(values.get(arm, math.nan))
            cells += f'<td class="{kind}">{escape(shown)}</td>'
        lines.append(f"<tr><td>{escape(point.title)}</td>{cells}</tr>")
    return document.table(lines)
