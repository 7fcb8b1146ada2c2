"""`continuum explain`: one program's life, turn by turn; or every decision, a line each."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

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
        print(json.dumps(as_list(life), indent=1))
        return
    console = terminal()
    console.print(head(life))
    console.print()
    console.print(timeline(life))
    if source.num_bad:
        console.print(f"{source.num_bad:,} lines of the trace are no records: skipped.")


def log(source: Source, as_json: bool) -> None:
    """Print every decision with its outcome, in the order of the decisions."""
    lines = Lines(room())
    since: float | None = None
    for decision, outcome in decisions(records(source)):
        if as_json:
            print(json.dumps({"decision": decision, "outcome": outcome}))
            continue
        if since is None:
            since = decision["now"]
            print(lines.head())
        print(lines.line(decision, outcome, since))
    if since is None and not as_json:
        raise CommandError("no turn has ended in this trace, so nothing was decided")
    if lines.dropped and not as_json:
        dropped = "; ".join(lines.dropped)
        print()
        terminal().print(
            f"Left out for want of room: {dropped}. A pipe, a file and --json have all."
        )


def find(source: Source, program: str) -> Life:
    """The life of the program that has this name or id, or else the only one whose name or id
    begins with it. CommandError lists programs if there is none, or several."""
    search = Search(program)
    search.read(records(source))
    life = search.life()
    if life is None and not search.found and len(begun := search.begun()) == 1:
        search = Search(begun[0])
        search.read(records(Source(source.path)))
        life = search.life()
    if life is None:
        raise CommandError(search.excuse())
    return life


def head(life: Life) -> Text:
    """One line that sums the life up."""
    turns = [each for each in life.records if each["event"] == "decision"]
    outcomes = Counter(text(e, "outcome") for e in life.records if e["event"] == "outcome")
    admitted = [each for each in life.records if each["event"] == "admit"]
    num = sum(count(each, "tokens") for each in admitted)
    found = [sum(each) for each in zip(*map(tiers, admitted), strict=True)] or [0, 0, 0]
    parts = [
        *named_by(life),
        f"{len(turns)} turns in {seconds(life.records[-1]['now'] - life.records[0]['now'])}",
    ]
    if num:
        on_disk = f", {found[2]:,} on disk" if found[2] else ""
        where = f"{found[0]:,} in VRAM, {found[1]:,} in DRAM{on_disk}"
        parts.append(f"of {num:,} prompt tokens {where}")
    parts += [f"{n} {outcome.replace('_', ' ')}" for outcome, n in outcomes.most_common()]
    return Text.assemble((life.key, "bold"), f"  {' · '.join(parts)}")


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
    turn_before: Any = None
    for line in lines(life):
        turn = _turn_of(line)
        is_new = turn is not None and turn != turn_before
        if is_new and turn_before is not None:
            table.add_row()
        turn_before = turn if turn is not None else turn_before
        is_detail = line.kind == "detail"
        at = "" if is_detail else f"{line.record['now'] - life.records[0]['now']:,.2f} s"
        said = Text(line.text, STYLES.get(line.kind, ""))
        table.add_row(at, Text(f"turn {turn}" if is_new else "", "bold"), said)
    return table


def lines(life: Life) -> list[Line]:
    """Every line of the life."""
    return [line for record in life.records for line in told(record)]


def as_list(life: Life) -> list[dict[str, Any]]:
    """The same for programs: each line with its seconds since the first arrival, and its record."""
    first = life.records[0]["now"]
    return [
        {"seconds": line.record["now"] - first, "text": line.text, "record": line.record}
        for line in lines(life)
    ]


def _turn_of(line: Line) -> int | None:
    """The turn that a line begins; None for an event of every program or of an older turn."""
    if line.record["event"] in (*EVERYBODY, "outcome"):
        return None
    return count(line.record, "turn") or None
