"""Source: a trace's records, one after another, whatever else is in the file.

It also reads and writes the original recorder's `scheduler_timestamps`. That is one JSON object:
job -> list of entries in the order of time, each with one of the keys of RECORDER_KEYS and the
wall clock in seconds; `waiting_to_running` and `evicted_to_running` also have `prompt_length` and
`hit_length` (Continuum's estimate_with_func.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from continuum_connector.errors import shown
from continuum_connector.observe.trace import RECORDER_KEYS, older_files, older_names

Record = dict[str, Any]

MAX_LINE = 1 << 20  # bytes; a record takes a few hundred
MAX_COUNT = 1 << 53
MAX_PARTS = 200  # brackets; a record of ours has a dozen
_LOOK = 1 << 16  # leading bytes, within which a trace has its first record
_decode = msgspec.json.Decoder(Record).decode


class SourceError(Exception):
    """The file is not a trace; the message is a sentence for the user."""


class Source:
    """Reads our trace, or `scheduler_timestamps` of the original recorder as if it were one.

    A trace is read from its oldest file on (TraceFile). `num_bad` counts lines that are not
    records, for instance because a crash cut them short; they are skipped. Our format is streamed.
    The original is one JSON value and is read whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_records = 0
        self.num_bad = 0
        self.paths = [path, *older_files(path)]
        starts = [_start(each) for each in self.paths]
        if not any(start.strip() for start in starts):
            raise SourceError(f"{path} is empty; is trace_path set to it, and has a turn ended?")
        self._is_object = starts[0].lstrip().startswith(b"{")
        self.is_original = not any(_has_record(start) for start in starts)
        self.num_bytes = sum(each.stat().st_size for each in self.paths)

    @property
    def is_known(self) -> bool:
        """Whether it is a trace of ours or of the original recorder."""
        return not self.is_original or is_original(self._jobs())

    def records(self, on_bytes: Callable[[int], object] = lambda _: None) -> Iterator[Record]:
        """Every record, in the order of the files; `on_bytes` is called with the bytes read."""
        if self.is_original:
            yield from self._of_original(on_bytes)
            return
        with contextlib.ExitStack() as stack:
            for file in reversed(self._opened(stack)):
                yield from self._of_file(file, on_bytes)

    def _opened(self, stack: contextlib.ExitStack) -> list[BinaryIO]:
        """Open all files, the newest first. If a server moves them meanwhile, one may be met again
        under its next name, but none is missed."""
        opened: dict[tuple[int, int], BinaryIO] = {}
        for each in itertools.chain([self.path], older_names(self.path)):
            try:
                file = stack.enter_context(each.open("rb"))
            except FileNotFoundError:
                break
            except OSError as error:  # this file's records and all older ones would be missing
                raise SourceError(f"{each} cannot be read ({error.strerror})") from None
            status = os.fstat(file.fileno())
            opened.setdefault((status.st_dev, status.st_ino), file)
        return list(opened.values())

    def _of_file(self, file: BinaryIO, on_bytes: Callable[[int], object]) -> Iterator[Record]:
        try:
            while line := _line(file):
                on_bytes(len(line))
                record = _record(line)
                if record is not None:
                    self.num_records += 1
                    yield record
                elif line.strip():
                    self.num_bad += 1
        except OSError as error:
            raise SourceError(f"{self.path} cannot be read ({error.strerror})") from None

    def _of_original(self, on_bytes: Callable[[int], object]) -> Iterator[Record]:
        jobs = self._jobs()
        if not is_original(jobs):
            raise SourceError(
                f"{self.path} is neither a trace of ContinuumConnector nor the original "
                "recorder's scheduler_timestamps; give the file that trace_path names"
            )
        on_bytes(self.num_bytes)
        for record in read_original(jobs):
            if record is None:
                self.num_bad += 1
            else:
                self.num_records += 1
                yield record

    def _jobs(self) -> Any:
        """The file's one JSON object; None if it is none."""
        try:  # what begins otherwise may be anything, of any size
            return msgspec.json.decode(self.path.read_bytes()) if self._is_object else None
        except (OSError, ValueError, RecursionError):
            return None


def number(record: Record, key: str) -> float | None:
    """The field as a number (is_number), else None."""
    value = record.get(key)
    return float(value) if is_number(value) else None  # type: ignore[arg-type]


def count(record: Record, key: str) -> int:
    """The field as a count; 0 if it is not one."""
    value = number(record, key)
    return int(value) if value is not None and 0 <= value < MAX_COUNT else 0


def text(record: Record, key: str) -> str:
    """The field as printable text, "" if it is not text."""
    value = record.get(key)
    return shown(value) if isinstance(value, str) else ""


def texts(record: Record, key: str) -> list[str]:
    """The field's parts as printable texts, [] if it is not a list."""
    value = record.get(key)
    return [shown(str(each)) for each in value] if isinstance(value, list) else []


def part(record: Record, key: str) -> Record:
    """The field as a mapping, empty if it is not one."""
    value = record.get(key)
    return value if isinstance(value, dict) else {}


class Hits(NamedTuple):
    """Tokens found, by where they were."""

    vram: int
    dram: int
    disk: int


def tiers(record: Record) -> Hits:
    """The hits in a record; 0 for each tier that it does not name."""
    hits = part(record, "hit_tokens")
    return Hits(*(count(hits, name) for name in Hits._fields))


class Kept(NamedTuple):
    """Tokens by who kept them (`against_stock` of a record): only we, stock vLLM as well, or only
    stock would have."""

    only_ours: int
    stock_too: int
    only_stock: int


def against_stock(record: Record) -> Kept | None:
    """What the record says of stock vLLM; None if it does not, as where nobody knows."""
    told = part(record, "against_stock")
    return Kept(*(count(told, name) for name in Kept._fields)) if told else None


def _start(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise SourceError(f"{path} is {_kind(mode)}; give the file that trace_path names")
        with path.open("rb") as file:
            return file.read(_LOOK)
    except OSError as error:
        raise SourceError(f"{path} cannot be read ({error.strerror})") from None


def _has_record(start: bytes) -> bool:
    return any(_record(line) for line in start.split(b"\n"))


def _line(file: BinaryIO) -> bytes:
    """The next line. Of one that is too long only the beginning, which is not a record."""
    line = file.readline(MAX_LINE)
    rest = line
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(MAX_LINE)
    return line


def _record(line: bytes) -> Record | None:
    if line.count(b"[") + line.count(b"{") > MAX_PARTS:
        return None
    try:
        record = _decode(line)
    except (ValueError, RecursionError):
        return None
    is_one = text(record, "event") and number(record, "now") is not None
    return record if is_one else None


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe, which cannot be read twice"}
    return kinds.get(stat.S_IFMT(mode), "a device")


Entry = dict[str, Any]
MAX_NUMBER = 1e15  # seconds, tokens, bytes; larger numbers are not real, and their sums overflow
_ARRIVAL, _ADMIT, _READMIT, _PREEMPT, _DEPARTURE, _PINNED, _UNPINNED = RECORDER_KEYS
_KEYS = {event: key for key, events in RECORDER_KEYS.items() for event in events}
_KEYS["decision"] = _DEPARTURE  # `pinned_time` is a second entry


def read_original(jobs: Mapping[str, Any]) -> Iterator[Record | None]:
    """The records that our trace would have, job after job; None for each entry that is invalid."""
    for job, entries in jobs.items():
        yield from _of_job(job, entries) if isinstance(entries, list) else [None]


def is_original(jobs: Any) -> bool:
    """Whether this is the original recorder's: some job has an entry that is known."""
    if not isinstance(jobs, dict):
        return False
    lists = {job: entries for job, entries in jobs.items() if isinstance(entries, list)}
    return any(record is not None for record in read_original(lists))


def _of_job(job: str, entries: list[Any]) -> Iterator[Record | None]:
    """One job's entries as records. A departure followed by a pin was the decision to pin."""
    turn, arrived, pinned = 0, 0.0, 0.0
    for entry, after in zip(entries, [*entries[1:], None], strict=False):
        key = next((key for key in RECORDER_KEYS if _time(entry, key) is not None), None)
        if key is None:
            yield None
            continue
        now, more = entry[key], {}
        if key == _PINNED:
            pinned = now
            continue
        if key == _ARRIVAL:
            turn, arrived = turn + 1, now
        elif key in (_ADMIT, _READMIT):
            hits = {"vram": entry.get("hit_length", 0), "dram": 0}
            more = {"tokens": entry.get("prompt_length"), "hit_tokens": hits}
            more["waited_s"] = now - arrived
        elif key == _DEPARTURE:
            more = {"decision": "free" if _time(after, _PINNED) is None else "pin"}
        elif key == _UNPINNED:
            more = {"held_s": now - pinned}
        event = RECORDER_KEYS[key][0]
        yield {"t": now, "now": now, "event": event, "program": job, "turn": turn, **more}


def write_original(records: Iterable[Record]) -> dict[str, list[Entry]]:
    """Every job's entries. What the original does not know, such as loads, is left out."""
    jobs: dict[str, list[Entry]] = {}
    for record in records:
        key, program, t = _KEYS.get(record["event"]), record.get("program"), record.get("t")
        if key is None or not isinstance(program, str) or t is None:
            continue
        entry: Entry = {key: t}
        tokens, hits = record.get("tokens"), record.get("hit_tokens")
        if key in (_ADMIT, _READMIT) and tokens is not None and isinstance(hits, Mapping):
            entry |= {"prompt_length": tokens, "hit_length": sum(filter(is_number, hits.values()))}
        entries = jobs.setdefault(program, [])
        place = len(entries)
        is_late = key == _UNPINNED and record.get("cause") == "superseded"
        if is_late and entries and _PINNED in entries[-1]:
            place -= 2  # the pin was handled before its successor's departure and pin
        entries.insert(place, entry)
        if record.get("decision") == "pin":
            entries.append({_PINNED: t})
    return jobs


def _time(entry: Any, key: str) -> float | None:
    value = entry.get(key) if isinstance(entry, dict) else None
    return value if is_number(value) else None


def is_number(value: object) -> bool:
    """Whether the value is a finite number of believable size."""
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_one and -MAX_NUMBER < value < MAX_NUMBER  # type: ignore[operator]
