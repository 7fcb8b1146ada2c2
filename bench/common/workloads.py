"""What the lab and real servers play alike: the published sweep's program, recorded sessions.

The sweep: eight turns, tools of half a second. Its prompts as measured there (table 1): 92, 1840,
3449, 6025, 7454, 10299, 12333, 13193 tokens, 80 of the first one in common; 20 tokens per answer.
`poisson` for 45 s gives 54, 133, 255, 433, 665 programs at 1, 3, 6, 10, 15 per second with seed 42,
as there.
"""

from __future__ import annotations

import gzip
import random
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from bench.common.plans import Added
from continuum_connector.errors import ToldError
from continuum_connector.tools.analysis import foreign

SHARED, ANSWER, WINDOW_S, TOOL_S = 80, 20, 45.0, 0.5
TOOL_TOKENS = (1728, 1589, 2556, 1409, 2825, 2014, 840)  # what each tool call returned
TURNS = (Added(92, ANSWER), *(Added(tokens, ANSWER, TOOL_S) for tokens in TOOL_TOKENS))


def poisson(rate: float, duration_s: float, seed: int) -> Iterator[float]:
    """When programs arrive, until `duration_s`."""
    rng = random.Random(seed)
    now = rng.expovariate(rate)
    while now < duration_s:
        yield now
        now += rng.expovariate(rate)


# --- recorded traces: JSON lines, .gz or not ------------------------------------------------
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


def read_requests(path: Path) -> tuple[list[Request], str]:
    """The requests of a trace of any known format, and what was made up for them. ValueError says
    what is wrong with it."""
    try:
        told = foreign.read(path)
        found = msgspec.convert(told.requests, list[Request])
    except ToldError as error:
        raise ValueError(str(error)) from None
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} has a request that is none ({error})") from None
    return found, f"{told.format}: {told.note} made up" if told.note else ""


def lanes(requests: Iterable[Request]) -> dict[tuple[str, str], list[Request]]:
    """Requests by trace and lane, all in the order in which they are recorded."""
    found: dict[tuple[str, str], list[Request]] = defaultdict(list)
    for request in requests:
        found[request.trace, request.lane].append(request)
    return found
