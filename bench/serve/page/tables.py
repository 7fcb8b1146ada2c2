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
    """One figure of every arm at all points."""
    rows = {
        point.title: {arm: column.figure(key) for arm, column in point.arms.items()}
        for point in points
    }
    oracles = {arm for point in points for arm, look in point.looks.items() if look.is_oracle}
    return document.overview(rows, BY_KEY[key].show, lambda arm: arm not in oracles)
