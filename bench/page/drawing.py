"""Drawing: what all plots have in common, from the figure's style to an element of the page."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bench.page.palette import GRID, INK, SOFT, themed

matplotlib.use("svg")
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "continuum",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": "none",
    "lines.solid_capstyle": "round",
}
WIDTH = 10.4  # inches; the page scales


def svg(figure: Figure) -> str:
    """The figure as an element of the page."""
    with matplotlib.rc_context(STYLE), io.StringIO() as text:
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        drawn = text.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    drawn = drawn.replace("font-family: 'DejaVu Sans', sans-serif", "font-family: inherit")
    return themed(drawn.replace("'DejaVu Sans', ", ""))


def panels(number: int, height: float, **options: Any) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, wspace=0.03)  # type: ignore[union-attr]
    grid = figure.subplots(1, number, squeeze=False, **options)
    return figure, list(grid[0])


def grid(number: int, per_row: int, height: float) -> tuple[Figure, list[Any]]:
    """So many panels with equal axes, in rows of `height` inches; places left over stay empty."""
    rows = -(-number // per_row)
    columns = min(number, per_row)
    figure = Figure(figsize=(WIDTH, rows * height), layout="constrained")
    made = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    axes = list(made.flat)
    for spare in axes[number:]:
        spare.remove()
    for lowest in axes[max(0, number - columns) : number]:
        lowest.tick_params(labelbottom=True)
    return figure, axes[:number]


def _seconds(value: float, _: object = None) -> str:
    if value <= 0:
        return "0"
    return f"{value:g} s" if value < 1000 else f"{value:,.0f} s"


def log_seconds(axis: Any) -> None:
    """Ticks at 1, 2, 5 of each decade; of many decades, at each."""
    _log_ticks(axis)
    axis.set_major_formatter(FuncFormatter(_seconds))


def counts(axis: Any) -> None:
    """Numbers of tokens: 500, 12 k, 3.5 M; of a log axis as above."""
    if axis.get_scale() == "log":
        _log_ticks(axis)
    axis.set_major_formatter(FuncFormatter(_count))


def _log_ticks(axis: Any) -> None:
    low, high = axis.get_view_interval()
    digits = (1.0,) if high > 300 * low else (1.0, 2.0, 5.0) if high > 5 * low else range(1, 10)
    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_minor_locator(NullLocator())


def _count(value: float, _: object = None) -> str:
    for size, unit in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
