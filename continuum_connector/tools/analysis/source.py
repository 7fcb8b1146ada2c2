"""Source: a trace's records, one after another, whatever else is in the file."""

from __future__ import annotations

import contextlib
import itertools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from continuum_connector import files
from continuum_connector.errors import ToldError, shown
from continuum_connector.observe.trace import older_files, older_names

Record = dict[str, Any]

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
        starts: list[bytes] = []
        for each in self.paths:
            if kind := files.no_file(str(each)):
                raise ToldError(f"{each} is {kind}; give the file that trace_path names")
            with reading(each), each.open("rb") as file:
                starts += file.read(_LOOK).split(b"\n")
        if not any(map(bytes.strip, starts)):
            raise ToldError(f"{path} is empty; is trace_path set to it, and has a turn ended?")
        if not any(map(_record, starts)):
            raise UnknownError(
                f"{path} is no trace of ContinuumConnector; give the file that trace_path names"
            )

    def records(self) -> Iterator[Record]:
        """Every record, in the order of the files."""
        self.num_bad = 0
        with reading(self.paths[0]), contextlib.ExitStack() as stack:
            for line in itertools.chain.from_iterable(reversed(self._opened(stack))):
                if record := _record(line):
                    yield record
                elif line.strip():
                    self.num_bad += 1

    def _opened(self, stack: contextlib.ExitStack) -> list[BinaryIO]:
        """Open all files, the newest first. If a server moves them meanwhile, one may be met again
        under its next name, but none is missed."""
        opened: dict[int, BinaryIO] = {}
        names = itertools.chain(self.paths[:1], older_names(self.paths[0]))
        for each in itertools.takewhile(Path.is_file, names):
            with reading(each):  # without it all older records would be missing, too
                file = stack.enter_context(each.open("rb"))
            opened.setdefault(os.fstat(file.fileno()).st_ino, file)
        return list(opened.values())


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """ToldError if the file cannot be read meanwhile."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:  # the last two of a packed file
        why = error.strerror if isinstance(error, OSError) else None
        raise ToldError(f"{path} cannot be read ({why or error})") from None


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


def tiers(record: Record) -> dict[str, int]:
    """Tokens found, by where they were; 0 for each tier that the record does not name."""
    return {tier: count(part(record, "hit_tokens"), tier) for tier in ("vram", "dram", "disk")}


def against_stock(record: Record) -> dict[str, int]:
    """Tokens by who kept them: only we, stock vLLM as well, or only stock would have. Empty if the
    record does not say, as where nobody knows."""
    told = part(record, "against_stock")
    return {of: count(told, of) for of in ("only_ours", "stock_too", "only_stock") if told}
