"""`continuum analyze`: traces in numbers, one column each.

The calibration is also a picture: always as text, and as a file if matplotlib is installed.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from continuum_connector import errors, files
from continuum_connector.tools.analysis.hindsight import NUM_BINS, Calibration
from continuum_connector.tools.analysis.report import Row, as_dict, rows, seconds
from continuum_connector.tools.analysis.source import Source
from continuum_connector.tools.analysis.summary import Summary
from continuum_connector.tools.cli.server import CommandError
from continuum_connector.tools.cli.terminal import (
    Force,
    may_write,
    records,
    terminal,
)
from continuum_connector.tools.cli.terminal import name as shown

REPORT_WIDTH = 80  # characters, and 20 for each trace


def analyze(
    traces: Annotated[
        list[Path], typer.Argument(help="Files that trace_path named, or scheduler_timestamps.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, for programs.")] = False,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help="The calibration as .png, .svg or .pdf.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="The same as one HTML file to share.")] = None,
    force: Force = False,
) -> None:
    """Put traces into numbers: JCT, hits, pins, copies, regret.

    Several traces are columns of one table, to compare policies. Regret is what a decision
    lost against the best alternative, now that we know when the program came back.
    Calibration is how many of those expected with 10 %, 20 %, ... came back in time.
    """
    check_plot(plot_to)
    sources = [Source(path) for path in traces]
    for path in (report, plot_to):
        may_write(path, force, sources)
    summaries = [summarize(source) for source in sources]
    found = [rows(*each) for each in zip(summaries, (s.num_bad for s in sources), strict=True)]
    names = _names(traces)
    if as_json:
        print(json.dumps(_as_json(names, summaries, found), indent=1))
    else:
        _print(terminal(), names, summaries, found)
    if report is not None:
        _save(report, names, summaries, found)
    if plot_to is not None:
        save_plot(plot_to, {n: s.calibration for n, s in zip(names, summaries, strict=True)})


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


def _save(path: Path, names: list[str], summaries: list[Summary], found: list[list[Row]]) -> None:
    """Write what a wide terminal would show, as one HTML file that needs no other."""
    width = REPORT_WIDTH + 20 * len(names)
    console = terminal(record=True, file=io.StringIO(), width=width)
    _print(console, names, summaries, found)
    try:
        files.put(path, console.export_html().encode())
    except OSError as error:
        raise CommandError(f"{path} cannot be written ({error.strerror})") from None


def _print(
    console: Console, names: list[str], summaries: list[Summary], found: list[list[Row]]
) -> None:
    console.print(table(names, found))
    for name, summary in zip(names, summaries, strict=True):
        if summary.regrets.num:
            console.print()
            console.print(_confusion(name, summary))
            console.print()
            console.print(_worst(name, summary))
        if summary.calibration.num:
            console.print(f"\n[bold]Returns in time, predicted and observed: {shown(name)}")
            console.print("\n".join(as_text(summary.calibration)), markup=False)


def table(names: list[str], found: list[list[Row]]) -> Table:
    """One row per number, one column per trace; a cell is empty if its trace lacks the number."""
    result = Table(show_edge=False)
    result.add_column("", overflow="fold")
    result.add_column("", overflow="fold")
    for name in names:
        result.add_column(shown(name), justify="right", overflow="fold")
    group_before = ""
    for group, name in _all_keys(found):
        cells = [_cell(each, group, name) for each in found]
        if group != group_before and group_before:
            result.add_section()
        result.add_row(f"[bold]{group}" if group != group_before else "", name, *cells)
        group_before = group
    return result


def _all_keys(found: list[list[Row]]) -> list[tuple[str, str]]:
    """Group and name of every row of any trace, groups together, in the order of the report."""
    groups: dict[str, dict[str, None]] = {}
    for each in found:
        for row in each:
            groups.setdefault(row.group, {})[row.name] = None
    return [(group, name) for group, names in groups.items() for name in names]


def _cell(found: list[Row], group: str, name: str) -> str:
    row = next((r for r in found if (r.group, r.name) == (group, name)), None)
    return shown(row.cell) if row is not None else ""


def _confusion(name: str, summary: Summary) -> Table:
    """How often each decision was taken, and what would have been best."""
    kinds = ("pin", "offload", "free")
    title = f"Chosen, and best in hindsight: {shown(name)}"
    result = Table(title=title, title_justify="left", title_style="bold", show_edge=False)
    for column in ("chosen", *(f"best: {kind}" for kind in kinds), "mean regret"):
        result.add_column(
            column, justify="left" if column == "chosen" else "right", overflow="fold"
        )
    for chosen in kinds:
        if (sample := summary.regrets.by_decision.get(chosen)) is not None:
            cells = [f"{summary.regrets.best[chosen, best]:,}" for best in kinds]
            result.add_row(chosen, *cells, seconds(sample.mean or 0.0))
    return result


def _worst(name: str, summary: Summary) -> Table:
    """The decisions that lost most; `continuum explain` says what was known at the time."""
    title = f"Costliest decisions: {shown(name)}"
    result = Table(title=title, title_justify="left", title_style="bold", show_edge=False)
    for column in ("program", "turn", "chosen", "best", "regret"):
        justify: Any = "right" if column in ("turn", "regret") else "left"
        result.add_column(column, justify=justify, overflow="fold")
    for one in sorted(summary.regrets.worst, reverse=True):
        if one.seconds > 0.0:
            cells = (str(one.turn), one.decision, one.best, seconds(one.seconds))
            result.add_row(shown(one.program), *cells)
    return result


def _as_json(names: list[str], summaries: list[Summary], found: list[list[Row]]) -> list[Any]:
    return [
        {
            "file": name,
            **as_dict(each),
            "best in hindsight": {f"{c} {b}": n for (c, b), n in summary.regrets.best.items()},
            "costliest": [each._asdict() for each in sorted(summary.regrets.worst, reverse=True)],
            "calibration bins": [vars(one) for one in summary.calibration.bins],
        }
        for name, summary, each in zip(names, summaries, found, strict=True)
    ]


BAR_WIDTH = 50  # characters for 100 %
PLOT_KINDS = (".png", ".svg", ".pdf")


def as_text(calibration: Calibration) -> Iterator[str]:
    """One bar per bin: `#` up to the observed share, `|` at the predicted one."""
    yield f"{'predicted':>10}  {'observed':>8}  {'turns':>7}"
    for index, one in enumerate(calibration.bins):
        low, high = (100 * each // NUM_BINS for each in (index, index + 1))
        if not one.num:
            yield f"{low:>3}-{high:>3} %  {'-':>8}  {0:>7,}"
            continue
        bar = list(("#" * round(BAR_WIDTH * one.observed)).ljust(BAR_WIDTH + 1))
        bar[round(BAR_WIDTH * one.predicted)] = "|"
        observed = f"{100 * one.observed:.0f} %"
        yield f"{low:>3}-{high:>3} %  {observed:>8}  {one.num:>7,}  {''.join(bar).rstrip()}"


def check_plot(path: Path | None) -> None:
    """Raise CommandError, before a long read, if the picture cannot be made."""
    if path is None:
        return
    if path.suffix not in PLOT_KINDS:
        raise CommandError(f"--plot {path} should end in one of {', '.join(PLOT_KINDS)}")
    if not path.parent.is_dir():
        raise CommandError(f"there is no folder {path.parent}; make it, or give another --plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError(
            "--plot needs matplotlib; install it with: pip install '.[plot]' in a clone, "
            "or leave --plot out: the same is in the text"
        )


def save_plot(path: Path, calibrations: dict[str, Calibration]) -> None:
    """Draw observed over predicted, one line per trace; the more turns, the larger the point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 6.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1, linestyle="--", label="perfect")
    for name, calibration in calibrations.items():
        bins = [one for one in calibration.bins if one.num]
        most = max((one.num for one in bins), default=1)
        xs, ys = [one.predicted for one in bins], [one.observed for one in bins]
        # `$` would begin a formula, and matplotlib hides a label that begins with _.
        label = f"{calibration.num:,} turns: {errors.shown(name)}".replace("$", r"\$")
        (line,) = axes.plot(xs, ys, label=label)
        sizes = [20 + 180 * one.num / most for one in bins]
        axes.scatter(xs, ys, sizes, color=line.get_color())
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    axes.set(xlabel="predicted P(back in time)", ylabel="share that was back in time")
    axes.legend(loc="lower right")
    try:
        figure.savefig(path)
    except OSError as error:
        raise CommandError(f"{path} cannot be written ({error.strerror})") from None
