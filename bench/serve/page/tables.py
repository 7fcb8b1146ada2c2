"""Tables: every arm at a point in numbers, and one number of every arm at all points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from bench.page import document
from bench.serve.compare import COMPARED, TOLD, sameness
from bench.serve.page.points import Point
from bench.serve.page.words import interval
from bench.serve.summary import BY_KEY

FAILED = "failed_programs"  # shown where there are any
SHOWN = {
    "jct_mean_s": "JCT mean",
    "jct_p95_s": "JCT P95",
    "ttft_mean_s": "TTFT mean",
    "ttft_p95_s": "TTFT P95",
    "tpot_mean_s": "TPOT",
    "computed_tokens": "computed",
    "hit_vram_tokens": "hit in VRAM",
    "hit_dram_tokens": "hit in DRAM",
    "cached_pct": "cached",
    "theory_pct": "could be cached",
    "found_pct": "of that cached",
    "tokens_per_s": "tokens per second",
    FAILED: "failed",
}
RATIOS = {each.key for each in COMPARED}


def point_table(point: Point) -> str:
    """A row per arm; below a figure its ratio to the first arm's, with its interval."""
    has = {FAILED} if any(column.figure(FAILED) for column in point.arms.values()) else set()
    if any(column.is_told for column in point.arms.values()):
        has.update(TOLD)
    keys = [key for key in SHOWN if key not in (FAILED, *TOLD) or key in has]
    head = "".join(f"<th>{SHOWN[key]}</th>" for key in keys)
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
    shown = escape(BY_KEY[key].show(point.arms[arm].figure(key)))
    if arm == point.base or key not in RATIOS:
        return shown
    ratio = point.ratios[arm, key]
    if math.isnan(ratio.value):
        return shown
    return f'{shown}<small class="below">{interval(ratio)}</small>'


def overview(points: Sequence[Point], key: str) -> str:
    """One figure of every arm at all points."""
    rows = {
        point.title: {arm: column.figure(key) for arm, column in point.arms.items()}
        for point in points
    }
    return document.overview(rows, BY_KEY[key].show)
