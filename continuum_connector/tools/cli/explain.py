"""`continuum explain`: one program's life, turn by turn; or every decision, a line each."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from continuum_connector.tools.analysis.life import (
    EVERYBODY,
    Life,
    Lines,
    Search,
    decisions,
)
from continuum_connector.tools.analysis.report import seconds
from continuum_connector.tools.analysis.source import Source, count, text, tiers
from continuum_connector.tools.analysis.words import Line, told
from continuum_connector.tools.cli.server import CommandError
from continuum_connector.tools.cli.terminal import records, room, terminal

STYLES = {"good": "green", "bad": "yellow", "detail": "dim"}


def explain(
    trace: Annotated[Path, typer.Option(help="The file that trace_path names.")],
    program: Annotated[
        str,
        typer.Argument(help="Its name in the trace or the id you sent, or how that begins."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for programs.")] = False,
) -> None:
    """Tell a program's life: what was found, decided, and why.

    Times are seconds since its first arrival. Below each decision is what every alternative
    was worth and what was known; below the next turn's admission, what came of the decision.
    Without a program: every decision of all programs on one line, with its outcome; a terminal gets
    the columns that it has room for.
    """
    source = Source(trace)
    if not program:
        log(source, as_json)
        return
    life = find(source, program)
    if as_json:
        began = life.records[0]["now"]
        rows = [(each.record["now"] - began, each.text, each.record) for each in lines(life)]
        keys = ("seconds", "text", "record")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=1))
        return
    console = terminal()
    console.print(head(life))
    console.print()
    console.print(timeline(life))
    if source.num_bad:
        console.print(f"{source.num_bad:,} lines of the trace are no records: skipped.")


def log(source: Source, as_json: bool) -> None:
    """Print every decision with its outcome, in the order of the decisions."""
    told = decisions(records(source))
    if as_json:
        for decision, outcome in told:
            print(json.dumps({"decision": decision, "outcome": outcome}))
        return
    lines, since = Lines(room()), None
    for decision, outcome in told:
        if since is None:
            since = decision["now"]
            print(lines.head())
        print(lines.line(decision, outcome, since))
    if since is None:
        raise CommandError("no turn has ended in this trace, so nothing was decided")
    if lines.dropped:
        dropped = "; ".join(lines.dropped)
        said = f"Left out for want of room: {dropped}. A pipe, a file and --json have all."
        terminal().print(f"\n{said}")


def find(source: Source, program: str) -> Life:
    """The life of the program that has this name or id, or else the only one whose name or id
    begins with it. CommandError lists programs if there is none, or several."""
    search = Search(program)
    search.read(records(source))
    if (life := search.life()) is not None:
        return life
    if not search.found and len(begun := search.begun()) == 1:
        return find(Source(source.path), begun[0])
    raise CommandError(search.excuse())


def head(life: Life) -> Text:
    """One line that sums the life up."""
    of = {event: [each for each in life.records if each["event"] == event] for event in _SUMMED}
    outcomes = Counter(text(each, "outcome") for each in of["outcome"])
    num = sum(count(each, "tokens") for each in of["admit"])
    lived_s = life.records[-1]["now"] - life.records[0]["now"]
    parts = [*named_by(life), f"{len(of['decision'])} turns in {seconds(lived_s)}"]
    if num:
        vram, dram, disk = map(sum, zip(*map(tiers, of["admit"]), strict=True))
        on_disk = f", {disk:,} on disk" if disk else ""
        parts.append(f"of {num:,} prompt tokens {vram:,} in VRAM, {dram:,} in DRAM{on_disk}")
    parts += [f"{n} {outcome.replace('_', ' ')}" for outcome, n in outcomes.most_common()]
    return Text.assemble((life.key, "bold"), f"  {' · '.join(parts)}")


_SUMMED = ("decision", "outcome", "admit")
NAMED_BY = {
    "kv_transfer_params": "named in kv_transfer_params",
    "job_id": "named by job_id or program_id",
    "session_id": "named by session_id or X-Session-ID",
    "vendor": "named by a header or field of its agent or gateway",
    "lineage": "no id: known by lineage",
}


def named_by(life: Life) -> list[str]:
    """Where its turns' id came from (docs/identity.md); nothing if the trace does not say."""
    found = dict.fromkeys(text(e, "source") for e in life.records if "source" in e)
    if list(found) == ["none"]:
        return ["no id, and nothing went on from it"]
    return [NAMED_BY[source] for source in found if source in NAMED_BY]


def timeline(life: Life) -> Table:
    """A table of time, turn and what happened."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    turn_before = 0
    for line in lines(life):
        # No turn begins with an event of every program, or one of an older turn.
        is_own = line.record["event"] not in (*EVERYBODY, "outcome")
        turn = count(line.record, "turn") * is_own or turn_before
        if turn != turn_before and turn_before:
            table.add_row()
        at = f"{line.record['now'] - life.records[0]['now']:,.2f} s"
        table.add_row(
            "" if line.kind == "detail" else at,
            Text(f"turn {turn}" if turn != turn_before else "", "bold"),
            Text(line.text, STYLES.get(line.kind, "")),
        )
        turn_before = turn
    return table


def lines(life: Life) -> list[Line]:
    """Every line of the life."""
    return [line for record in life.records for line in told(record)]
