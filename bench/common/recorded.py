"""Recorded traces: JSON lines, .gz or not, and the requests of coding sessions in them."""

from __future__ import annotations

import gzip
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

Line = TypeVar("Line")
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
BROKEN = (OSError, EOFError, ValueError, RecursionError, zlib.error)  # what reading may raise
BLOCK = 64  # tokens of a `common_blocks`


def lines(path: Path, kind: type[Line]) -> Iterator[Line]:
    """Each line's record; raises one of BROKEN where there is none."""
    decode = msgspec.json.Decoder(kind).decode
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        for line in file:
            if not line.isspace():
                yield decode(line)


class Request(msgspec.Struct, frozen=True):
    """One request of a coding session, a lane of which is an agent. Tokens: `inp`, `out`;
    `common_blocks`: blocks that its prompt shares with the lane's one before; `itypes`: what was
    added, a tool's result or a person's words; `think`: seconds since that answer, `api`: until
    this one, `t`: of the lane's beginning; None was not recorded."""

    trace: str
    lane: str
    inp: Tokens
    out: Tokens
    turn: int = 0
    common_blocks: int = 0
    itypes: list[str] = []
    think: Seconds | None = None
    api: Seconds | None = None
    t: Seconds = 0.0
    model: str = ""
    stop: str | None = None


def lanes(requests: Iterable[Request]) -> dict[tuple[str, str], list[Request]]:
    """Requests by trace and lane, all in the order in which they are recorded."""
    found: dict[tuple[str, str], list[Request]] = defaultdict(list)
    for request in requests:
        found[request.trace, request.lane].append(request)
    return found
