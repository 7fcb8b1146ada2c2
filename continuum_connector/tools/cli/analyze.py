"""`continuum analyze`: traces in numbers, one column each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from continuum_connector.tools.analysis.source import Source
from continuum_connector.tools.analysis.summary import LEVELS, Row, Summary, rows
from continuum_connector.tools.analysis.words import seconds
from continuum_connector.tools.cli.terminal import name as shown
from continuum_connector.tools.cli.terminal import terminal


def analyze(
    traces: Annotated[list[Path], typer.Argument(help="Files that trace_path named.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, for programs.")] = False,
) -> None:
    """Put traces into numbers: JCT, hits, pins, copies, steps.

    Several traces are columns of one table, to compare policies. Where trace_steps_s was set,
    the engine's steps are plotted over time.
    """
    summaries = [summarize(source) for source in map(Source, traces)]
    columns, names = [*map(rows, summaries)], _names(traces)
    if as_json:
        told: list[dict[str, Any]] = [{"file": name} for name in names]
        for one, found in zip(told, columns, strict=True):  # in seconds, shares, bytes, counts
            for group, of_group in found.items():
                one[group] = {each: row.value for each, row in of_group.items()}
        print(json.dumps(told, indent=1))
        return
    console = terminal()
    console.print(_table(names, columns))
    for name, summary in zip(names, summaries, strict=True):
        if summary.steps["now"]:
            console.print("", _plot(name, summary), sep="\n")


def summarize(source: Source) -> Summary:
    """Read the whole trace."""
    summary = Summary()
    for record in source.records():
        summary.add(record)
    summary.finish()
    summary.num["trace"]["lines skipped"] = source.num_bad
    return summary


def _names(traces: list[Path]) -> list[str]:
    """Each trace's name, from the folder on that all have in common."""
    paths = [path.absolute() for path in traces]
    return [str(path.relative_to(os.path.commonpath([p.parent for p in paths]))) for path in paths]


def _table(names: list[str], columns: list[dict[str, dict[str, Row]]]) -> Table:
    """One row per number, one column per trace; a cell is empty if its trace lacks the number."""
    numbers = [Column(shown(name), justify="right", overflow="fold") for name in names]
    made = Table("", Column(overflow="fold"), *numbers, show_edge=False)
    for group in dict.fromkeys(group for found in columns for group in found):
        parts = [found.get(group, {}) for found in columns]
        for place, name in enumerate(dict.fromkeys(name for part in parts for name in part)):
            values = (shown(part[name].cell) if name in part else "" for part in parts)
            made.add_row("" if place else f"[bold]{group}", name, *values)
        made.add_section()
    return made


# --- the engine's steps ---------------------------------------------------------------------
WIDTH, HEIGHT = 48, 2  # of a plot, in characters: with names and numbers it fits 80 columns
BARS = " ▁▂▃▄▅▆▇█"


def moments(summary: Summary, level: str) -> list[float | None]:
    """The time of the steps in WIDTH equal parts, each with the worst of its steps: of free blocks
    the fewest, of all else the most; None without a step."""
    times, worse = summary.steps["now"], min if level == "free_blocks" else max
    first, each_s = min(times), (max(times) - min(times)) / WIDTH or 1.0
    steps: list[list[float]] = [[] for _ in range(WIDTH)]
    for now, value in zip(times, summary.steps[level], strict=True):
        steps[min(WIDTH - 1, int((now - first) / each_s))].append(value)
    return [worse(values, default=None) for values in steps]


def _plot(name: str, summary: Summary) -> Table:
    """Each level over time, from 0 to its most, if it was ever above 0."""
    span_s = max(summary.steps["now"]) - min(summary.steps["now"])
    each = f"the worst step of each {seconds(span_s / WIDTH)}"
    title = f"Steps: {shown(name)}, {seconds(span_s)}, {each}"
    made = Table.grid(
        Column(), Column(justify="right"), Column(overflow="fold"), padding=(0, 2, 0, 0)
    )
    made.title, made.title_style, made.title_justify = title, "bold", "left"
    for level, label in LEVELS.items():
        if top := max(summary.steps[level]):
            scale = seconds(top) if level == "hook_max_s" else f"{top:,.0f}"
            made.add_row(label, f"{scale}\n0", _drawn(moments(summary, level), top))
    return made


def _drawn(values: list[float | None], top: float) -> str:
    """Bars of an eighth of a line and more; none where there was no step."""
    heights = [0 if v is None else 1 + round(v / top * (8 * HEIGHT - 1)) for v in values]
    lines = ((BARS[min(8, max(0, h - 8 * n))] for h in heights) for n in reversed(range(HEIGHT)))
    return "\n".join(map("".join, lines))
