"""When programs begin: a Poisson process, a closed loop, or turn by turn.

poisson:3        3 programs per second on average, for --duration seconds
closed:64        always 64 programs at work: one begins when one has ended
turns            one request at a time: every program's first turn, then every second turn
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

from bench.common.workloads import poisson
from continuum_connector.errors import ToldError

MOST, MOST_AT_ONCE = 10_000_000, 100_000  # programs


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
            raise ToldError(f"--arrivals {text}: at most {MOST_AT_ONCE:,} at once")
        return Arrivals(text, at_once=at_once)
    if kind != "poisson":
        raise ToldError(f"--arrivals {text}: write poisson:RATE, closed:PROGRAMS or turns")
    rate = _positive(text, value)
    if min(rate * duration_s, most or math.inf) > MOST:
        raise ToldError(f"--arrivals {text}: more than {MOST:,} programs; ask for fewer")
    chosen = tuple(islice(poisson(rate, duration_s, seed), most or None))
    if not chosen:
        raise ToldError(
            f"--arrivals {text}: nothing arrives within {duration_s:g} s; give a longer --duration"
        )
    return Arrivals(text, times_s=chosen)


def _positive(text: str, value: str, whole: bool = False) -> float:
    try:
        number = float(int(value) if whole else float(value))
    except (ValueError, OverflowError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise ToldError(f"--arrivals {text}: {value!r} is no {'count' if whole else 'rate'}")
    return number
