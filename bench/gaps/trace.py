"""A trace of agent sessions as one server would see it: turns that finish, programs that arrive."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.common.workloads import BROKEN, Request, lanes, lines
from continuum_connector.tools.cli.ending import ToldError

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
    try:
        found = lanes(lines(Path(path), Request))
    except BROKEN as error:
        raise ToldError(f"{path} is no requests.jsonl.gz of a trace: {error}") from None
    if not found:
        raise ToldError(f"{path} holds no request")
    begins = {trace: rng.uniform(0.0, SPREAD_S) for trace, _ in found}
    seen = [
        event
        for (trace, lane), turns in found.items()
        for event in _of_lane(f"{trace}/{lane}", turns, begins[trace], rng)
    ]
    return sorted(seen, key=lambda event: event.now)


def _of_lane(
    program: str, turns: list[Request], begin: float, rng: random.Random
) -> Iterator[Event]:
    now = begin + turns[0].t
    for i, turn in enumerate(turns):
        if turn.api is None:  # one in 14: when it finished was not recorded, nor the gap then
            continue
        now += turn.api
        yield Event(now, program, turn)
        if i + 1 < len(turns) and (think_s := turns[i + 1].think) is not None:
            # within the second that the trace says: no gap is a whole number of seconds
            rounded = think_s + rng.uniform(-0.5, 0.5) * _RESOLUTION_S
            gap_s = max(0.05, rounded)
            now += gap_s
            yield Event(now, program, gap_s=gap_s)
