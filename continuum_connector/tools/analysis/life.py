"""Life: everything that a trace says about one program. Also, every decision on one line, with its
outcome.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from continuum_connector.errors import shown
from continuum_connector.tools.analysis.report import seconds
from continuum_connector.tools.analysis.source import Record, count, number, part, text, tiers

MAX_NAMES = 200_000  # programs whose turns we count, to name some if the wanted one is missing
_LONG = 100  # leading characters of an id that identify a program for certain
_SHORTENED = re.compile(r"(.+)~[0-9a-f]{32}").fullmatch  # a long id's key (programs/program.py)
EVERYBODY = (
    "start",
    "epoch",
    "tier_down",
    "disk_down",
    "switch",
    "stop",
)  # what happens to every program


@dataclass
class Life:
    """`key`: the program's name in the trace. `records`: its own, and what happened to every
    program between its first and its last."""

    key: str
    records: list[Record] = field(default_factory=list)


class Search:
    """One pass over a trace for a program, by its key or the client's own id.

    The connector puts a namespace before the ids that clients send (`job:x`), and another before
    that if they send a salt (`salted:1f..:job:x`). The id may be given with or without them.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = shown(wanted)  # as the names of a trace are
        self.turns: Counter[str] = Counter()
        self.found: dict[str, Life] = {}
        self._everybody: deque[Record] = deque(maxlen=1000)  # until now, as far as it may matter

    def read(self, records: Iterable[Record]) -> None:
        for record in records:
            event, key = record["event"], text(record, "program")
            if event in EVERYBODY:
                self._everybody.append(record)
            elif key:
                if event == "decision" and (key in self.turns or len(self.turns) < MAX_NAMES):
                    self.turns[key] += 1
                if _names(self._wanted, key):
                    self._note(key, record)

    def life(self) -> Life | None:
        """The life of the wanted program; None if there is no such program, or several."""
        if self._wanted in self.found:
            return self.found[self._wanted]
        return next(iter(self.found.values())) if len(self.found) == 1 else None

    def begun(self) -> list[str]:
        """Programs with an ended turn whose names, or ids, begin with what is wanted; those with
        most turns first. "codex:…7f3e", as `short` writes names, stands for beginning and end."""
        begin, _, end = self._wanted.partition("…")
        return [
            key
            for key, _ in self.turns.most_common()
            if key.endswith(end) and any(each.startswith(begin) for each in _ids(key))
        ]

    def excuse(self) -> str:
        """Why there is no life to show, and which programs there are."""
        if len(self.found) > 1:
            return f"{self._wanted!r} may be any of {_list(self.found)}; give the whole name"
        if len(begun := self.begun()) > 1:
            more = f" and {len(begun) - 5:,} more" if len(begun) > 5 else ""
            any_of = f"any of {_list(begun[:5])}{more}"
            return f"{self._wanted!r} may be {any_of}; give more of the name"
        said = f"no program {self._wanted!r} is in the trace"
        if not self.turns:
            return f"{said}, nor any other whose turn ended"
        close = self._close()
        most = _list(key for key, _ in self.turns.most_common(5))
        meant = f"; did you mean {_list(close)}?" if close else ""
        return f"{said}{meant}{'' if meant else ';'} Those with most turns: {most}"

    def _note(self, key: str, record: Record) -> None:
        life = self.found.setdefault(key, Life(key))
        if life.records:
            since = life.records[-1]["now"]
            life.records += [each for each in self._everybody if each["now"] >= since]
        life.records.append(record)
        if len(self.found) == 1:
            self._everybody.clear()

    def _close(self) -> list[str]:
        wanted = self._wanted.lower()
        close = [key for key in self.turns if wanted in key.lower()][:5]
        by_id = {key.rsplit(":", 1)[-1]: key for key in self.turns}
        similar = difflib.get_close_matches(self._wanted, [*by_id], 5) if len(by_id) < 5000 else []
        return list(dict.fromkeys([*close, *(by_id[each] for each in similar)]))[:5]


def _names(wanted: str, key: str) -> bool:
    """Whether this key was made from the id, given with or without its namespaces."""
    if key == wanted or key.endswith(f":{wanted}"):
        return True
    if len(wanted) < _LONG or not (shortened := _SHORTENED(key)):
        return False
    parts = shortened[1].split(":", 3)
    begins = (":".join(parts[i:]) for i in range(len(parts)))
    return any(len(begin) >= _LONG and wanted.startswith(begin) for begin in begins)


def _ids(key: str) -> Iterator[str]:
    """The key, and what is left of it without each of its namespaces."""
    parts = key.split(":", 4)
    return (":".join(parts[i:]) for i in range(len(parts)))


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


MAX_OPEN = 100_000  # decisions that wait for their outcome; beyond, the oldest counts as open

Pair = tuple[Record, Record | None]
Pending = OrderedDict[tuple[str, int], list[Record]]  # by program and turn: decision, outcome


def decisions(records: Iterable[Record]) -> Iterator[Pair]:
    """Each decision in order, with its outcome; None if the trace has none."""
    pending: Pending = OrderedDict()
    for record in records:
        key = text(record, "program"), count(record, "turn")
        if record["event"] == "decision":
            yield from _told(pending, even_open=len(pending) >= MAX_OPEN)
            pending[key] = [record]
        elif record["event"] == "outcome" and len(pending.get(key, ())) == 1:
            pending[key].append(record)
            yield from _told(pending)
    while pending:
        yield from _told(pending, even_open=True)


def _told(pending: Pending, even_open: bool = False) -> Iterator[Pair]:
    """Yield the oldest decisions whose outcomes are known; if `even_open`, the first in any
    case."""
    while pending:
        key, (decision, *outcome) = next(iter(pending.items()))
        if not outcome and not even_open:
            return
        even_open = False
        del pending[key]
        yield decision, outcome[0] if outcome else None


def _time(since_s: float) -> str:
    return f"{since_s:,.2f}s" if since_s < 10_000 else f"{since_s:.0f}s"


def _gap(outcome: Record | None) -> str:
    gap_s = None if outcome is None else number(outcome, "gap_s")
    return "" if gap_s is None else seconds(gap_s)


def _decided(decision: Record) -> str:
    ttl_s = number(decision, "ttl_s")
    copy = ", copy" if text(decision, "then") == "store" else ""
    return text(decision, "decision") + (f" {seconds(ttl_s)}{copy}" if ttl_s is not None else "")


def _worth(decision: Record) -> str:
    """Worth of the best alternative and of the next best, in seconds to all programs."""
    worths = sorted((w for w in part(decision, "values").values() if _is_number(w)), reverse=True)
    return ", ".join(seconds(each) for each in worths[:2]) if any(worths) else ""


def _is_number(value: object) -> bool:
    return number({"value": value}, "value") is not None


def _outcome(outcome: Record | None) -> str:
    return "(open)" if outcome is None else text(outcome, "outcome").replace("_", " ")


def _found(outcome: Record | None) -> str:
    if outcome is None or "hit_tokens" not in outcome:
        return ""
    vram, dram, disk = tiers(outcome)
    below = f"{dram:,}" + (f"+{disk:,}" if disk else "")
    return f"{vram:,}, {below}, {count(outcome, 'recomputed_tokens'):,}"


def _saved(outcome: Record | None) -> str:
    saved_s = None if outcome is None else number(outcome, "saved_s")
    return seconds(saved_s) if saved_s else ""


class Column(NamedTuple):
    """A column of the list. `width`, `narrow`: its characters where all columns fit, and where they
    do not. `gap`: spaces before it where all fit, else 1. `is_text`: it begins at the left."""

    name: str
    width: int
    narrow: int
    gap: int
    is_text: bool
    cell: Callable[[Record, Record | None], str]


COLUMNS = (
    Column("program", 24, 16, 2, True, lambda d, _: text(d, "program")),
    Column("turn", 4, 4, 1, False, lambda d, _: str(count(d, "turn"))),
    Column("tokens", 8, 8, 1, False, lambda d, _: f"{count(d, 'tokens'):,}"),
    Column("decided", 20, 17, 2, True, lambda d, _: _decided(d)),
    Column("worth, next best", 19, 19, 1, True, lambda d, _: _worth(d)),
    Column("outcome", 12, 12, 1, True, lambda _, o: _outcome(o)),
    Column("back after", 10, 10, 1, False, lambda _, o: _gap(o)),
    Column("in VRAM, DRAM, lost", 22, 22, 2, False, lambda _, o: _found(o)),
    Column("saved", 8, 8, 2, True, lambda _, o: _saved(o)),
)
TIME = 9  # characters of the first column
# What a narrow terminal does without, first to last.
DROPPED = ("worth, next best", "in VRAM, DRAM, lost", "back after", "saved", "tokens", "outcome")


class Lines:
    """The list's lines, none longer than `room` characters. `dropped`: columns that did not fit."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._is_wide = TIME + sum(each.width + each.gap for each in COLUMNS) <= room
        self._columns = list(COLUMNS)
        self.dropped: list[str] = []
        for name in () if self._is_wide else DROPPED:
            if TIME + sum(each.narrow + 1 for each in self._columns) <= room:
                break
            self._columns = [each for each in self._columns if each.name != name]
            self.dropped.append(name)

    def head(self) -> str:
        return self._line("time", [each.name for each in self._columns])

    def line(self, decision: Record, outcome: Record | None, since: float) -> str:
        """Decision and outcome under `head`; the time is in seconds after `since`."""
        cells = [each.cell(decision, outcome) for each in self._columns]
        return self._line(_time(decision["now"] - since), cells)

    def _line(self, time: str, cells: list[str]) -> str:
        line = f"{time:>{TIME}}"
        for column, cell in zip(self._columns, cells, strict=True):
            width = column.width if self._is_wide else column.narrow
            gap = column.gap if self._is_wide else 1
            said = short(cell, width)
            line += " " * gap + (f"{said:{width}}" if column.is_text else f"{said:>{width}}")
        return line[: self._room].rstrip()


def short(name: str, room: int) -> str:
    """A name that is too long, with its namespace, which says where the id came from, and its end,
    because ids differ there. `continuum explain` understands it."""
    if len(name) <= room:
        return name
    namespace, colon, _ = name.partition(":")
    begin = f"{namespace}{colon}"[: room // 2] if colon else ""
    return f"{begin}…{name[1 + len(begin) - room :]}"
