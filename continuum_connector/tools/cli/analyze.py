"""`continuum analyze`: traces in numbers, one column each."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from continuum_connector.tools.analysis.hindsight import NUM_BINS, Calibration
from continuum_connector.tools.analysis.report import DECISIONS, Row, as_dict, rows, seconds
from continuum_connector.tools.analysis.source import Source
from continuum_connector.tools.analysis.summary import Summary
from continuum_connector.tools.cli.terminal import Force, may_write, put, records, terminal
from continuum_connector.tools.cli.terminal import name as shown

REPORT_WIDTH = 80  # characters, and 20 for each trace
BAR_WIDTH = 50  # characters for 100 %


class Analyzed(NamedTuple):
    """A trace by a short name, in numbers and as rows of the table."""

    name: str
    summary: Summary
    rows: list[Row]


def analyze(
    traces: Annotated[
        list[Path], typer.Argument(help="Files that trace_path named, or scheduler_timestamps.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, for programs.")] = False,
    report: Annotated[Path | None, typer.Option(help="The same as one HTML file to share.")] = None,
    force: Force = False,
) -> None:
    """Put traces into numbers: JCT, hits, pins, copies, regret.

    Several traces are columns of one table, to compare policies. Regret is what a decision
    lost against the best alternative, now that we know when the program came back.
    Calibration is how many of those expected with 10 %, 20 %, ... came back in time.
    """
    sources = [Source(path) for path in traces]
    may_write(report, force, sources)
    found = []
    for name, source in zip(_names(traces), sources, strict=True):
        summary = summarize(source)
        found.append(Analyzed(name, summary, rows(summary, source.num_bad)))
    if as_json:
        print(json.dumps([as_object(each) for each in found], indent=1))
    else:
        show(terminal(), found)
    if report is not None:
        width = REPORT_WIDTH + 20 * len(found)
        console = terminal(record=True, file=io.StringIO(), width=width)
        show(console, found)
        put(report, console.export_html().encode())


def summarize(source: Source) -> Summary:
    """Read the whole trace."""
    summary = Summary()
    for record in records(source):
        summary.add(record)
    summary.finish()
    return summary


def _names(traces: list[Path]) -> list[str]:
    """A short name for each trace: the file's, with as many of its folders as tell them apart."""
    for num_parts in range(1, 4):
        names = ["/".join(path.parts[-num_parts:]) for path in traces]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in traces]


def as_object(one: Analyzed) -> dict[str, object]:
    """A trace for a program to read."""
    regrets, bins = one.summary.regrets, one.summary.calibration.bins
    return {
        "file": one.name,
        **as_dict(one.rows),
        "best in hindsight": {f"{c} {b}": n for (c, b), n in regrets.best.items()},
        "costliest": [each._asdict() for each in sorted(regrets.worst, reverse=True)],
        "calibration bins": [vars(each) for each in bins],
    }


def show(console: Console, found: list[Analyzed]) -> None:
    """The table of all traces, and for each: what would have been best, and the calibration."""
    console.print(table(found))
    for name, summary, _ in found:
        if summary.regrets.num:
            for each in (_confusion(name, summary), _worst(name, summary)):
                console.print()
                console.print(each)
        if summary.calibration.num:
            console.print(f"\n[bold]Returns in time, predicted and observed: {shown(name)}")
            console.print("\n".join(as_text(summary.calibration)), markup=False)


def _table(columns: Iterable[str], title: str | None = None) -> Table:
    """A table; a column whose name begins with > is of numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", show_edge=False)
    for name in columns:
        justify: Any = "right" if name.startswith(">") else "left"
        made.add_column(name.removeprefix(">"), justify=justify, overflow="fold")
    return made


def table(found: list[Analyzed]) -> Table:
    """One row per number, one column per trace; a cell is empty if its trace lacks the number."""
    made = _table(["", "", *(f">{shown(each.name)}" for each in found)])
    cells = [{(row.group, row.name): shown(row.cell) for row in each.rows} for each in found]
    groups: dict[str, dict[str, None]] = {}  # every row of any trace, groups together
    for group, name in (key for each in cells for key in each):
        groups.setdefault(group, {})[name] = None
    for group, names in groups.items():
        for place, name in enumerate(names):
            values = [each.get((group, name), "") for each in cells]
            made.add_row("" if place else f"[bold]{group}", name, *values)
        made.add_section()
    return made


def _confusion(name: str, summary: Summary) -> Table:
    """How often each decision was taken, and what would have been best."""
    columns = ("chosen", *(f">best: {kind}" for kind in DECISIONS), ">mean regret")
    made = _table(columns, f"Chosen, and best in hindsight: {shown(name)}")
    for chosen in DECISIONS:
        if (sample := summary.regrets.by_decision.get(chosen)) is not None:
            cells = [f"{summary.regrets.best[chosen, kind]:,}" for kind in DECISIONS]
            made.add_row(chosen, *cells, seconds(sample.mean or 0.0))
    return made


def _worst(name: str, summary: Summary) -> Table:
    """The decisions that lost most; `continuum explain` says what was known at the time."""
    columns = ("program", ">turn", "chosen", "best", ">regret")
    made = _table(columns, f"Costliest decisions: {shown(name)}")
    for one in sorted(summary.regrets.worst, reverse=True):
        if one.seconds > 0.0:
            cells = (str(one.turn), one.decision, one.best, seconds(one.seconds))
            made.add_row(shown(one.program), *cells)
    return made


def as_text(calibration: Calibration) -> Iterator[str]:
    """One bar per bin: `#` up to the observed share, `|` at the predicted one."""
    yield f"{'predicted':>10}  {'observed':>8}  {'turns':>7}"
    for index, one in enumerate(calibration.bins):
        low, high = (100 * each // NUM_BINS for each in (index, index + 1))
        observed, bar = "-", ""
        if one.num:
            observed = f"{100 * one.observed:.0f} %"
            marks = list(("#" * round(BAR_WIDTH * one.observed)).ljust(BAR_WIDTH + 1))
            marks[round(BAR_WIDTH * one.predicted)] = "|"
            bar = "".join(["  ", *marks]).rstrip()
        yield f"{low:>3}-{high:>3} %  {observed:>8}  {one.num:>7,}{bar}"
