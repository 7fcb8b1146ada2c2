"""Source: a trace's records, one after another, whatever else is in the file."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from continuum_connector import files
from continuum_connector.errors import ToldError, shown
from continuum_connector.observe.trace import older_files, older_names

Record = dict[str, Any]

MAX_LINE = 1 << 20  # bytes; a record takes a few hundred
MAX_NUMBER = 1e15  # seconds, tokens, bytes; larger numbers are not real, and their sums overflow
_LOOK = 1 << 16  # leading bytes, within which a trace has its first record
_decode = msgspec.json.Decoder(Record).decode


class UnknownError(ToldError):
    """It is no trace of ours."""


class Source:
    """Streams our trace, from its oldest file on (TraceFile). `num_bad` counts what is no record,
    for instance because a crash cut a line short."""

    def __init__(self, path: Path) -> None:
        self.num_bad = 0
        self.paths = [path, *older_files(path)]
        starts = [_start(each) for each in self.paths]
        if not any(map(bytes.strip, starts)):
            raise ToldError(f"{path} is empty; is trace_path set to it, and has a turn ended?")
        if not any(_record(line) for start in starts for line in start.split(b"\n")):
            raise UnknownError(
                f"{path} is no trace of ContinuumConnector; give the file that trace_path names"
            )

    def records(self) -> Iterator[Record]:
        """Every record, in the order of the files."""
        self.num_bad = 0
        for record in self._read():
            if record is not None:
                yield record
            else:
                self.num_bad += 1

    def _read(self) -> Iterator[Record | None]:
        with contextlib.ExitStack() as stack:
            files = self._opened(stack)
            try:
                for file in reversed(files):
                    while line := _line(file):
                        if line.strip():
                            yield _record(line)
            except OSError as error:
                raise _unread(self.paths[0], error) from None

    def _opened(self, stack: contextlib.ExitStack) -> list[BinaryIO]:
        """Open all files, the newest first. If a server moves them meanwhile, one may be met again
        under its next name, but none is missed."""
        opened: dict[tuple[int, int], BinaryIO] = {}
        for each in itertools.chain(self.paths[:1], older_names(self.paths[0])):
            try:
                file = stack.enter_context(each.open("rb"))
            except FileNotFoundError:
                break
            except OSError as error:  # this file's records and all older ones would be missing
                raise _unread(each, error) from None
            status = os.fstat(file.fileno())
            opened.setdefault((status.st_dev, status.st_ino), file)
        return list(opened.values())


def _unread(path: Path, error: OSError) -> ToldError:
    return ToldError(f"{path} cannot be read ({error.strerror})")


def _start(path: Path) -> bytes:
    try:
        if kind := files.no_file(str(path)):
            raise ToldError(f"{path} is {kind}; give the file that trace_path names")
        with path.open("rb") as file:
            return file.read(_LOOK)
    except OSError as error:
        raise _unread(path, error) from None


def _line(file: BinaryIO) -> bytes:
    """The next line. Of one that is too long only the beginning, which is not a record."""
    line = file.readline(MAX_LINE)
    rest = line
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(MAX_LINE)
    return line


def _record(line: bytes) -> Record | None:
    try:
        record = _decode(line)
    except (ValueError, RecursionError):
        return None
    is_one = text(record, "event") and number(record, "now") is not None
    return record if is_one else None


# --- a record's fields, whatever is in them -------------------------------------------------
def is_number(value: object) -> bool:
    """Whether the value is a finite number of believable size."""
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_one and -MAX_NUMBER < value < MAX_NUMBER  # type: ignore[operator]


def number(record: Record, key: str) -> float | None:
    """The field as a number (is_number), else None."""
    value = record.get(key)
    return float(value) if is_number(value) else None  # type: ignore[arg-type]


def count(record: Record, key: str) -> int:
    """The field as a count; 0 if it is not one."""
    value = number(record, key)
    return int(value) if value is not None and value > 0 else 0


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
