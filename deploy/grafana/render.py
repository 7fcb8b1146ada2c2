"""Draw the dashboard with matplotlib, from a Prometheus. **This is not Grafana**: it runs the same
queries and puts each panel where Grafana would, for a picture where no Grafana is to be had.

    python -m deploy.grafana.render http://127.0.0.1:9090 dashboard.png --minutes 10
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from deploy.grafana.dashboard import Query, load, panels, queries

COLUMNS = 24  # of Grafana's grid
INCH_PER_COLUMN, INCH_PER_ROW = 0.66, 0.34
COLORS = {"red": "#c4162a", "orange": "#e0752d", "green": "#37872d", "blue": "#1f60c4"}
SUFFIX = {"Bps": " B/s", "bytes": " B", "ops": "/s"}
NOTE = "drawn by deploy/grafana/render.py, not by Grafana"
STEPS = 240  # points per line

Ask = Callable[[Query], list[tuple[str, list[float], list[float]]]]  # name, times, values


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("url", help="address of a Prometheus that scrapes a server of ours")
    parser.add_argument("png", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0, help="how far to look back")
    parser.add_argument("--rate", default="1m", help="window of rates, at least four scrapes")
    options = parser.parse_args(argv)
    end = time.time()
    draw(options.url, options.png, end - 60.0 * options.minutes, end, options.rate)


def draw(url: str, png: Path, start: float, end: float, rate: str) -> None:
    """Draw what the Prometheus at `url` has from `start` to `end` (unix times) into `png`."""
    mpl.rcParams.update({"font.size": 7.5, "axes.titlesize": 8.5, "axes.titleweight": "bold"})
    dashboard = load()
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in dashboard["panels"])
    figure = Figure(figsize=(COLUMNS * INCH_PER_COLUMN, height * INCH_PER_ROW), facecolor="white")

    def ask(query: Query) -> list[tuple[str, list[float], list[float]]]:
        step = (end - start) / STEPS
        form = {"query": query.expr, "start": start, "end": end, "step": step}
        address = f"{url}/api/v1/query_range?{urllib.parse.urlencode(form)}"
        with urllib.request.urlopen(address, timeout=60.0) as answer:
            found = json.load(answer)["data"]["result"]
        return [_line(query, series, start) for series in found]

    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            _heading(figure, panel, height)
    for panel in panels(dashboard):
        axes = figure.add_axes(_place(panel["gridPos"], height))
        axes.set_title(_wrapped(panel["title"], panel["gridPos"]["w"]), loc="left")
        asked = queries(panel, rate, f"{max(end - start, 1.0):.0f}s")
        PAINTERS[panel["type"]](axes, panel, asked, ask)
    figure.text(0.99, 0.994, NOTE, ha="right", va="top", color="#888888")
    figure.savefig(drawn := io.BytesIO(), dpi=80)
    # few colors, so that the picture can live in a repository
    Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(png, optimize=True)


# --- panels ---------------------------------------------------------------------------------
def _lines(axes: Axes, panel: dict[str, Any], asked: list[Query], ask: Ask) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    found = [line for query in asked for line in ask(query)]
    if defaults["custom"]["stacking"]["mode"] == "normal":
        times = sorted({t for _, own, _ in found for t in own})
        tops = [
            [dict(zip(own, ys, strict=True)).get(t, 0.0) for t in times] for _, own, ys in found
        ]
        axes.stackplot(times, tops, labels=[name for name, *_ in found], alpha=0.75)
    else:
        for name, times, values in found:
            axes.plot(times, values, label=name, linewidth=1.1)
    if "min" in defaults:
        axes.set_ylim(bottom=defaults["min"])
    axes.set_ylim(top=defaults.get("max"))
    unit = defaults["unit"]
    axes.yaxis.set_major_formatter(lambda value, _: text_of(value, unit))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes, [name for name, _, values in found if any(values)])


def _legend(axes: Axes, names: Sequence[str]) -> None:
    """Below the axes, where Grafana has it; lines that are 0 throughout are not named."""
    handles, labels = axes.get_legend_handles_labels()
    shown = [(h, label) for h, label in zip(handles, labels, strict=True) if label in names]
    if shown:
        small = len(shown) > 6
        axes.legend(
            *zip(*shown, strict=True),
            loc="upper center",
            bbox_to_anchor=(0.5, -0.1),
            fontsize=5 if small else 6.5,
            ncols=4 if small else 3,
            frameon=False,
        )


def _stat(axes: Axes, panel: dict[str, Any], asked: list[Query], ask: Ask) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    axes.axis("off")
    known = [v for _, _, values in ask(asked[0]) for v in values if not math.isnan(v)]
    if not known:
        axes.text(0.5, 0.4, "no data", ha="center", va="center")
        return
    steps = defaults["thresholds"]["steps"]
    color = [s["color"] for s in steps if s["value"] is None or known[-1] >= s["value"]][-1]
    text = text_of(known[-1], defaults["unit"])
    for mapping in defaults["mappings"]:
        text = mapping["options"].get(f"{known[-1]:.0f}", {"text": text})["text"]
    axes.text(0.5, 0.4, text, ha="center", va="center", fontsize=20, color=COLORS[color])


def _bars(axes: Axes, panel: dict[str, Any], asked: list[Query], ask: Ask) -> None:
    found = [(name, values[-1]) for query in asked for name, _, values in ask(query)]
    names = [name for name, _ in found]
    heights = [0.0 if math.isnan(value) else value for _, value in found]
    axes.bar(names, heights, color=COLORS["blue"])
    unit = panel["fieldConfig"]["defaults"]["unit"]
    for index, (_, value) in enumerate(found):
        label = "-" if math.isnan(value) else text_of(value, unit)
        axes.text(index, heights[index], label, ha="center", va="bottom")
    axes.set_ylim(0.0, panel["fieldConfig"]["defaults"]["max"] * 1.1)
    axes.tick_params(axis="x", labelsize=5.5)
    axes.yaxis.set_major_formatter(lambda value, _: text_of(value, unit))
    axes.spines[["top", "right"]].set_visible(False)


PAINTERS = {"timeseries": _lines, "stat": _stat, "bargauge": _bars}


# --- parts ----------------------------------------------------------------------------------
def _line(
    query: Query, series: dict[str, Any], start: float
) -> tuple[str, list[float], list[float]]:
    times = [float(t) - start for t, _ in series["values"]]
    return query.name(series["metric"]), times, [float(value) for _, value in series["values"]]


def _place(grid: dict[str, int], height: int) -> tuple[float, float, float, float]:
    """Where a panel's axes go: its cell, less room for the title and the labels around them."""
    left, right, top, bottom = (1.1, 0.3, 1.0, 1.9)
    small = grid["h"] < 6
    bottom = 0.7 if small else bottom
    x, w = grid["x"] + (0.2 if small else left), grid["w"] - (0.4 if small else left + right)
    y = height - grid["y"] - grid["h"] + bottom
    return x / COLUMNS, y / height, w / COLUMNS, (grid["h"] - top - bottom) / height


def _heading(figure: Figure, panel: dict[str, Any], height: int) -> None:
    y = 1.0 - (panel["gridPos"]["y"] + 0.75) / height
    figure.text(0.006, y, panel["title"], fontsize=11, weight="bold", color="#444444")


def _wrapped(title: str, columns: int) -> str:
    """The title in as many lines as its panel is narrow."""
    lines, room = [""], columns * 9
    for word in title.split():
        if len(lines[-1]) + len(word) >= room:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def text_of(value: float, unit: str) -> str:
    """A number as Grafana writes it in this unit, nearly."""
    if unit == "percentunit":
        return f"{100.0 * value:.3g} %"
    if unit == "s":
        size, name = next(
            (x for x in ((1.0, "s"), (1e-3, "ms")) if abs(value) >= x[0]), (1e-6, "us")
        )
        return f"{value / size:.3g} {name}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}{SUFFIX.get(unit, '').strip()}"
    return f"{value:.3g}{SUFFIX.get(unit, '')}"


if __name__ == "__main__":
    main()
