"""`continuum explain`: one program's life, turn by turn; or every decision, a line each."""

from __future__ import annotations

import shutil
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from continuum_connector.errors import ToldError, shown
from continuum_connector.tools.analysis.source import Record, Source, count, number, text, tiers
from continuum_connector.tools.analysis.words import seconds, told, where
from continuum_connector.tools.cli.terminal import terminal

STYLES = {"good": "green", "bad": "yellow", "detail": "dim"}
# What happens to every program.
EVERYBODY = ("start", "epoch", "tier_down", "disk_down", "switch", "stop")


def explain(
    trace: Annotated[Path, typer.Option(help="The file that trace_path names.")],
    program: Annotated[
        str,
        typer.Argument(help="Its name in the trace or the id you sent, or how that begins."),
    ] = "",
) -> None:
    """Tell a program's life: what was found, decided, and why.

    Times are seconds since its first arrival. Below each decision is what every alternative
    was worth and what was known; below the next turn's admission, what came of the decision.
    Without a program: every decision of all programs on one line, with its outcome.
    """
    source = Source(trace)
    if not program:
        _list(source)
        return
    life = find(source, program)
    console = terminal()
    console.print(_head(life), Text(), _timeline(life), sep="\n")
    if source.num_bad:
        console.print(f"{source.num_bad:,} lines of the trace are no records: skipped.")


# --- which program --------------------------------------------------------------------------
_LONG = 100  # leading characters of an id, which its key has whatever its length (program_key)


def find(source: Source, wanted: str) -> list[Record]:
    """The records of the wanted program, and of what happened to every program meanwhile."""
    turns: Counter[str] = Counter()
    for record in source.records():
        if key := text(record, "program"):
            turns[key] += record["event"] == "decision"
    key, life = choose(shown(wanted), turns), list[Record]()
    since: list[Record] = []  # the program's last record, what happened to everybody
    for record in source.records():
        if text(record, "program") == key:
            life += [*since, record]
            since = []
        elif life and record["event"] in EVERYBODY:
            since.append(record)
    return life


def choose(wanted: str, turns: Counter[str]) -> str:
    """The program that has this name or id, or else the only one whose name or id begins with it.
    ToldError lists programs if there is none, or several.

    The connector puts a namespace before the ids that clients send (`job:x`), and another before
    that if they send a salt (`salted:1f..:job:x`): an id is understood with and without them. So is
    "codex:01…7f3e", as `short` writes names.
    """
    begin, _, end = wanted.partition("…")
    begin = begin[:_LONG]
    most = [key for key, _ in turns.most_common()]
    found = [wanted] if wanted in turns else [key for key in most if wanted in _ids(key)]
    ending = [key for key in most if key.endswith(end)]
    found = found or [key for key in ending if any(i.startswith(begin) for i in _ids(key))]
    if len(found) == 1:
        return found[0]
    if found:
        more = f" and {len(found) - 5:,} more" if len(found) > 5 else ""
        any_of = f"any of {', '.join(found[:5])}{more}"
        raise ToldError(f"{wanted!r} may be {any_of}; give more of the name")
    busiest = ", ".join(most[:5]) or "none"
    raise ToldError(f"no program {wanted!r} is in the trace; those with most turns: {busiest}")


def _ids(key: str) -> list[str]:
    """The key, and what is left of it without each of its namespaces."""
    parts = key.split(":", 4)
    return [":".join(parts[i:]) for i in range(len(parts))]


# --- its life -------------------------------------------------------------------------------
def _head(life: list[Record]) -> Text:
    """One line that sums the life up."""
    outcomes = Counter(text(each, "outcome") for each in life if each["event"] == "outcome")
    admitted = [each for each in life if each["event"] == "admit"]
    num_turns = sum(each["event"] == "decision" for each in life)
    lived_s = life[-1]["now"] - life[0]["now"]
    # Where its turns' id came from (docs/identity.md); nothing if the trace does not say.
    sources = dict.fromkeys(text(each, "source") for each in life if "source" in each)
    parts = [f"named by {', '.join(sources)}"] if sources else []
    parts.append(f"{num_turns} turns in {seconds(lived_s)}")
    if num := sum(count(each, "tokens") for each in admitted):
        found: Counter[str] = Counter()
        for each in admitted:
            found.update(tiers(each))
        parts.append(f"of {num:,} prompt tokens {', '.join(where(found)) or 'none was found'}")
    parts += [f"{n} {outcome.replace('_', ' ')}" for outcome, n in outcomes.most_common()]
    return Text.assemble((text(life[0], "program"), "bold"), f"  {' · '.join(parts)}")


def _timeline(life: list[Record]) -> Table:
    """A table of time, turn and what happened."""
    times = Column(justify="right", no_wrap=True)
    table = Table.grid(times, Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    turn_before = 0
    for line in told(life):
        # No turn begins with an event of every program, or one of an older turn.
        is_own = line.record["event"] not in (*EVERYBODY, "outcome")
        turn = count(line.record, "turn") * is_own or turn_before
        if turn != turn_before and turn_before:
            table.add_row()
        at = "" if line.kind == "detail" else f"{line.record['now'] - life[0]['now']:,.2f} s"
        which = Text(f"turn {turn}" if turn != turn_before else "", "bold")
        table.add_row(at, which, Text(line.text, STYLES.get(line.kind, "")))
        turn_before = turn
    return table


# --- every decision -------------------------------------------------------------------------
LIST = "{:>9} {:<{room}} {:>4} {:>8} {:<17} {:<12} {}"  # 80 columns, with a name of 16 characters
WIDEST = 48  # characters of a name, where there is room

Pair = tuple[Record, Record | None]


def _list(source: Source) -> None:
    """Print every decision with its outcome, in the order of the decisions."""
    # A pipe has room for more than there is.
    columns, since = shutil.get_terminal_size(fallback=(10_000, 24)).columns, None
    of_name = min(max(16, columns - 64), WIDEST)
    for decision, outcome in decisions(source.records()):
        if since is None:
            since = decision["now"]
            names = ("time", "program", "turn", "tokens", "decided", "outcome", "saved")
            print(LIST.format(*names, room=of_name)[:columns])
        at, came = decision["now"] - since, outcome or {"outcome": "(open)"}
        ttl_s = number(decision, "ttl_s")
        copy = ", copy" if text(decision, "then") == "store" else ""
        until = "" if ttl_s is None else f" {seconds(ttl_s)}{copy}"
        line = LIST.format(
            f"{at:,.2f}s" if at < 10_000 else f"{at:.0f}s",
            short(text(decision, "program"), of_name),
            count(decision, "turn"),
            f"{count(decision, 'tokens'):,}",
            text(decision, "decision") + until,
            text(came, "outcome").replace("_", " "),
            seconds(number(came, "saved_s") or 0.0) if came.get("saved_s") else "",
            room=of_name,
        )
        print(line[:columns].rstrip())
    if since is None:
        raise ToldError("no turn has ended in this trace, so nothing was decided")


def decisions(records: Iterable[Record]) -> Iterator[Pair]:
    """Each decision in order, with its outcome; None if the trace has none."""
    # By program and turn. A dict would be slow to take its first from, again and again.
    pending: OrderedDict[tuple[str, int], Pair] = OrderedDict()
    for record in records:
        key = text(record, "program"), count(record, "turn")
        if record["event"] == "start":  # a new server, which knows no earlier decision
            yield from pending.values()
            pending.clear()
        elif record["event"] == "decision":
            pending[key] = record, None
        elif record["event"] == "outcome" and key in pending:
            pending[key] = pending[key][0], record
        while pending and next(iter(pending.values()))[1] is not None:
            yield pending.popitem(last=False)[1]
    yield from pending.values()


def short(name: str, room: int) -> str:
    """A name that is too long, without its middle: it begins with where the id came from, and ids
    differ at their end."""
    begin = room // 2
    return name if len(name) <= room else f"{name[:begin]}…{name[1 + begin - room :]}"
