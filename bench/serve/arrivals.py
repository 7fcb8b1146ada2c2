"""When programs begin: a Poisson process, a recorded trace, a closed loop, or turn by turn.

poisson:3        3 programs per second on average, for --duration seconds
trace:FILE       the times in a file: a number of seconds per line, or JSON lines with a
                 `timestamp` in milliseconds (as in Mooncake's traces); .gz is read too
closed:64        always 64 programs at work: one begins when one has ended
turns            one request at a time: every program's first turn, then every second turn
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bench.cli import regular
from bench.common.workloads import poisson
from continuum_connector.errors import ToldError

MOST, MOST_AT_ONCE = 10_000_000, 100_000  # programs


class ArrivalError(ToldError):
    """A wish that cannot be read; the message says how to write it."""


@dataclass(frozen=True)
class Arrivals:
    """Open loop: `times_s`, ascending. Closed loop: `at_once` programs. Neither: turn by turn."""

    text: str
    times_s: tuple[float, ...] = ()
    at_once: int = 0

    @property
    def open_loop(self) -> bool:
        """Whether programs begin whatever the server does."""
        return bool(self.times_s)


def read_arrivals(text: str, seed: int, duration_s: float, most: int) -> Arrivals:
    """Read one of the forms above; at most `most` programs (0: no bound) in an open loop."""
    kind, _, value = text.partition(":")
    if text == "turns":
        return Arrivals(text)
    if kind == "closed":
        at_once = int(_positive(text, value, whole=True))
        if at_once > MOST_AT_ONCE:
            raise ArrivalError(f"--arrivals {text}: at most {MOST_AT_ONCE:,} at once")
        return Arrivals(text, at_once=at_once)
    if kind == "poisson":
        rate = _positive(text, value)
        if min(rate * duration_s, most or math.inf) > MOST:
            raise ArrivalError(f"--arrivals {text}: more than {MOST:,} programs; ask for fewer")
        times = poisson(rate, duration_s, seed)
    elif kind == "trace" and value:
        times = trace(Path(value), duration_s)
    else:
        raise ArrivalError(
            f"--arrivals {text}: write poisson:RATE, closed:PROGRAMS, trace:FILE or turns"
        )
    chosen = tuple(islice(times, most or None))
    if not chosen:
        raise ArrivalError(
            f"--arrivals {text}: nothing arrives within {duration_s:g} s; give a longer --duration"
        )
    return Arrivals(text, times_s=chosen)


def trace(path: Path, duration_s: float) -> Iterator[float]:
    """The recorded times below `duration_s`, the first one taken as 0."""
    opener = gzip.open if path.suffix == ".gz" else open
    regular(path, "--arrivals trace:", ArrivalError)
    try:
        with opener(path, "rt") as file:
            times = sorted(_time(line) for line in file if line.strip())
    except (OSError, EOFError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ArrivalError(f"--arrivals trace:{path}: {error or type(error).__name__}") from None
    return (t - times[0] for t in times if t - times[0] < duration_s)


def _time(line: str) -> float:
    if line.lstrip().startswith("{"):
        line = str(json.loads(line)["timestamp"] / 1e3)
    if not math.isfinite(time_s := float(line)):
        raise ValueError(f"{line.strip()} is no time")
    return time_s


def _positive(text: str, value: str, whole: bool = False) -> float:
    try:
        number = float(int(value) if whole else float(value))
    except (ValueError, OverflowError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise ArrivalError(f"--arrivals {text}: {value!r} is no {'count' if whole else 'rate'}")
    return number
