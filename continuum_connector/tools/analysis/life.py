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
# What happens to every program.
EVERYBODY = ("start", "epoch", "tier_down", "disk_down", "switch", "stop")


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
            return f"{self._wanted!r} may be any of {', '.join(self.found)}; give the whole name"
        if len(begun := self.begun()) > 1:
            more = f" and {len(begun) - 5:,} more" if len(begun) > 5 else ""
            any_of = f"any of {', '.join(begun[:5])}{more}"
            return f"{self._wanted!r} may be {any_of}; give more of the name"
        said = f"no program {self._wanted!r} is in the trace"
        if not self.turns:
            return f"{said}, nor any other whose turn ended"
        close = ", ".join(self._close())
        most = ", ".join(key for key, _ in self.turns.most_common(5))
        meant = f"; did you mean {close}?" if close else ";"
        return f"{said}{meant} Those with most turns: {most}"

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


MAX_OPEN = 100_000  # decisions that wait for their outcome; beyond, the oldest counts as open

Pair = tuple[Record, Record | None]


def decisions(records: Iterable[Record]) -> Iterator[Pair]:
    """Each decision in order, with its outcome; None if the trace has none."""
    pending: OrderedDict[tuple[str, int], Pair] = OrderedDict()  # by program and turn
    for record in records:
        key = text(record, "program"), count(record, "turn")
        if record["event"] == "decision":
            if len(pending) >= MAX_OPEN:
                yield pending.popitem(last=False)[1]
            pending[key] = record, None
        elif record["event"] == "outcome" and key in pending and pending[key][1] is None:
            pending[key] = pending[key][0], record
        while pending and next(iter(pending.values()))[1] is not None:
            yield pending.popitem(last=False)[1]
    yield from pending.values()


def _decided(decision: Record) -> str:
    ttl_s = number(decision, "ttl_s")
    copy = ", copy" if text(decision, "then") == "store" else ""
    return text(decision, "decision") + (f" {seconds(ttl_s)}{copy}" if ttl_s is not None else "")


def _worth(decision: Record) -> str:
    """Worth of the best alternative and of the next best, in seconds to all programs."""
    values = part(decision, "values")
    worths = sorted((w for key in values if (w := number(values, key)) is not None), reverse=True)
    return ", ".join(seconds(each) for each in worths[:2]) if any(worths) else ""


def _found(outcome: Record) -> str:
    if "hit_tokens" not in outcome:
        return ""
    vram, dram, disk = tiers(outcome)
    below = f"{dram:,}" + (f"+{disk:,}" if disk else "")
    return f"{vram:,}, {below}, {count(outcome, 'recomputed_tokens'):,}"


def _seconds(record: Record, key: str) -> str:
    return "" if (value := number(record, key)) is None else seconds(value)


class Column(NamedTuple):
    """A column of the list. `wide`, `narrow`: how a cell is put in where all columns fit, and where
    they do not. `gap`: spaces before it where all fit, else 1."""

    name: str
    wide: str
    narrow: str
    gap: int
    cell: Callable[[Record, Record], str]  # of a decision and its outcome, which may be empty


COLUMNS = (
    Column("program", "<24", "<16", 2, lambda d, _: text(d, "program")),
    Column("turn", ">4", ">4", 1, lambda d, _: str(count(d, "turn"))),
    Column("tokens", ">8", ">8", 1, lambda d, _: f"{count(d, 'tokens'):,}"),
    Column("decided", "<20", "<17", 2, lambda d, _: _decided(d)),
    Column("worth, next best", "<19", "<19", 1, lambda d, _: _worth(d)),
    Column("outcome", "<12", "<12", 1, lambda _, o: text(o, "outcome").replace("_", " ")),
    Column("back after", ">10", ">10", 1, lambda _, o: _seconds(o, "gap_s")),
    Column("in VRAM, DRAM, lost", ">22", ">22", 2, lambda _, o: _found(o)),
    Column("saved", "<8", "<8", 2, lambda _, o: _seconds(o, "saved_s") if o.get("saved_s") else ""),
)
TIME = 9  # characters of the first column
# What a narrow terminal does without, first to last.
DROPPED = ("worth, next best", "in VRAM, DRAM, lost", "back after", "saved", "tokens", "outcome")
OPEN = {"outcome": "(open)"}  # what is told of a decision without an outcome


class Lines:
    """The list's lines, none longer than `room` characters. `dropped`: columns that did not fit."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._columns = [(each, " " * each.gap, each.wide) for each in COLUMNS]
        self.dropped: list[str] = []
        if self._num_characters() > room:
            self._columns = [(each, " ", each.narrow) for each in COLUMNS]
            for name in DROPPED:
                if self._num_characters() <= room:
                    break
                self._columns = [each for each in self._columns if each[0].name != name]
                self.dropped.append(name)

    def _num_characters(self) -> int:
        return TIME + sum(len(gap) + int(how[1:]) for _, gap, how in self._columns)

    def head(self) -> str:
        return self._line("time", [each.name for each, _, _ in self._columns])

    def line(self, decision: Record, outcome: Record | None, since: float) -> str:
        """Decision and outcome under `head`; the time is in seconds after `since`."""
        at = decision["now"] - since
        cells = [each.cell(decision, outcome or OPEN) for each, _, _ in self._columns]
        return self._line(f"{at:,.2f}s" if at < 10_000 else f"{at:.0f}s", cells)

    def _line(self, time: str, cells: list[str]) -> str:
        line = f"{time:>{TIME}}"
        for (_, gap, how), cell in zip(self._columns, cells, strict=True):
            line += f"{gap}{short(cell, int(how[1:])):{how}}"
        return line[: self._room].rstrip()


def short(name: str, room: int) -> str:
    """A name that is too long, with its namespace, which says where the id came from, and its end,
    because ids differ there. `continuum explain` understands it."""
    if len(name) <= room:
        return name
    namespace, colon, _ = name.partition(":")
    begin = f"{namespace}{colon}"[: room // 2] if colon else ""
    return f"{begin}…{name[1 + len(begin) - room :]}"
