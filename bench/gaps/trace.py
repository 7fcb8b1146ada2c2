"""A trace of agent sessions as one server would see it: turns that finish, programs that arrive."""

from __future__ import annotations

import gzip
import random
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from continuum_connector.tools.cli.ending import ToldError

Request = dict[str, Any]


_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Line(msgspec.Struct):
    """What is read of a request. Times are in seconds; None was not recorded."""

    trace: str
    lane: str
    t: _Seconds
    inp: _Tokens
    out: _Tokens
    model: str = ""
    stop: str | None = None
    api: _Seconds | None = None
    think: _Seconds | None = None


_decode = msgspec.json.Decoder(_Line).decode


SPREAD_S = 48 * 3600.0  # over which sessions begin: some dozen are open at a time
_RESOLUTION_S = 1.0  # of the trace's times


@dataclass(frozen=True)
class Event:
    """A turn of `program` finishes (`request` is it), or the program arrives after `gap_s`."""

    now: float
    program: str
    request: Request | None = None
    gap_s: float = 0.0


def events(path: str, seed: int) -> list[Event]:
    """All finishes and arrivals, by time; sessions begin at random, lanes are programs."""
    rng = random.Random(seed)
    lanes: dict[tuple[str, str], list[Request]] = defaultdict(list)
    try:
        with gzip.open(path, "rt") as file:
            for line in file:
                request = msgspec.structs.asdict(_decode(line))
                lanes[request["trace"], request["lane"]].append(request)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise ToldError(f"{path} is no requests.jsonl.gz of a trace: {error}") from None
    if not lanes:
        raise ToldError(f"{path} holds no request")
    begins = {trace: rng.uniform(0.0, SPREAD_S) for trace, _ in lanes}
    found = [
        event
        for (trace, lane), turns in lanes.items()
        for event in _of_lane(f"{trace}/{lane}", turns, begins[trace], rng)
    ]
    return sorted(found, key=lambda event: event.now)


def _of_lane(
    program: str, turns: list[Request], begin: float, rng: random.Random
) -> Iterator[Event]:
    now = begin + turns[0]["t"]
    for i, turn in enumerate(turns):
        if turn["api"] is None:  # one in 14: when it finished was not recorded, nor the gap then
            continue
        now += turn["api"]
        yield Event(now, program, turn)
        if i + 1 < len(turns) and turns[i + 1]["think"] is not None:
            # within the second that the trace says: no gap is a whole number of seconds
            rounded = turns[i + 1]["think"] + rng.uniform(-0.5, 0.5) * _RESOLUTION_S
            gap_s = max(0.05, rounded)
            now += gap_s
            yield Event(now, program, gap_s=gap_s)
