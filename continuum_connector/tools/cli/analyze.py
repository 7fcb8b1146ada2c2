"""`continuum analyze`: traces in numbers, one column each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from continuum_connector.tools.analysis.source import Source
from continuum_connector.tools.analysis.summary import Row, Summary, rows
from continuum_connector.tools.analysis.words import seconds
from continuum_connector.tools.cli.terminal import name as shown
from continuum_connector.tools.cli.terminal import terminal


def analyze(
    traces: Annotated[list[Path], typer.Argument(help="Files that trace_path named.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, for programs.")] = False,
) -> None:
    """Put traces into numbers: JCT, hits, pins, copies, regret.

    Several traces are columns of one table, to compare policies. Regret is what a decision
    lost against the best alternative, now that we know when the program came back.
    """
    summaries = [summarize(source) for source in map(Source, traces)]
    columns, names = [*map(rows, summaries)], _names(traces)
    if as_json:
        told: list[dict[str, Any]] = []
        for name, summary, found in zip(names, summaries, columns, strict=True):
            told.append({"file": name})
            for group, of_group in found.items():  # in seconds, shares, bytes, counts
                told[-1][group] = {each: row.value for each, row in of_group.items()}
            told[-1]["costliest"] = [each._asdict() for each in summary.worst]
        print(json.dumps(told, indent=1))
        return
    console = terminal()
    console.print(_table(names, columns))
    for name, summary in zip(names, summaries, strict=True):
        if summary.worst:
            console.print("", _worst(name, summary), sep="\n")


def summarize(source: Source) -> Summary:
    """Read the whole trace."""
    summary = Summary()
    for record in source.records():
        summary.add(record)
    summary.finish()
    summary.num["trace"]["lines skipped"] = source.num_bad
    return summary


def _names(traces: list[Path]) -> list[str]:
    """A short name for each trace: the file's, with as many of its folders as tell them apart."""
    for num_parts in range(1, 4):
        names = ["/".join(path.parts[-num_parts:]) for path in traces]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in traces]


def _grid(title: str | None, *columns: str, **how: Any) -> Table:
    """A table; a column whose name begins with > is of numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", show_edge=False, **how)
    for name in columns:
        justify: Any = "right" if name.startswith(">") else "left"
        made.add_column(name.removeprefix(">"), justify=justify, overflow="fold")
    return made


def _table(names: list[str], columns: list[dict[str, dict[str, Row]]]) -> Table:
    """One row per number, one column per trace; a cell is empty if its trace lacks the number."""
    made = _grid(None, "", "", *(f">{shown(name)}" for name in names))
    for group in dict.fromkeys(group for found in columns for group in found):
        parts = [found.get(group, {}) for found in columns]
        for place, name in enumerate(dict.fromkeys(name for part in parts for name in part)):
            values = (shown(part[name].cell) if name in part else "" for part in parts)
            made.add_row("" if place else f"[bold]{group}", name, *values)
        made.add_section()
    return made


def _worst(name: str, summary: Summary) -> Table:
    """The decisions that lost most; `continuum explain` says what was known at the time."""
    columns = ("program", ">turn", "chosen", "best", ">regret")
    made = _grid(f"Costliest decisions: {shown(name)}", *columns)
    for one in summary.worst:
        if one.seconds > 0.0:
            cells = (str(one.turn), one.decision, one.best, seconds(one.seconds))
            made.add_row(shown(one.program), *cells)
    return made
