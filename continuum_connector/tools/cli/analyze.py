"""`continuum analyze`: traces in numbers, one column each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from continuum_connector.tools.analysis.source import Source
from continuum_connector.tools.analysis.summary import Row, Summary, rows
from continuum_connector.tools.cli.terminal import name as shown
from continuum_connector.tools.cli.terminal import terminal


def analyze(
    traces: Annotated[list[Path], typer.Argument(help="Files that trace_path named.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, for programs.")] = False,
) -> None:
    """Put traces into numbers: JCT, hits, pins, copies.

    Several traces are columns of one table, to compare policies.
    """
    columns, names = [rows(summarize(Source(path))) for path in traces], _names(traces)
    if as_json:
        told: list[dict[str, Any]] = [{"file": name} for name in names]
        for one, found in zip(told, columns, strict=True):  # in seconds, shares, bytes, counts
            for group, of_group in found.items():
                one[group] = {each: row.value for each, row in of_group.items()}
        print(json.dumps(told, indent=1))
        return
    terminal().print(_table(names, columns))


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
