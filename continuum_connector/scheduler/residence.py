"""Residence: how long what is stored stays in DRAM before it leaves for room."""

from __future__ import annotations

import math
import statistics
from collections import deque

NUM_AGES = 33  # the median of so many moves with the load and not with one odd chain
MIN_QUIET_S = 10.0  # turns end in bursts: a pause shorter than this says little
MAX_DOUBLINGS = 7  # 128 times the last estimate: the pressure it came from is over


class Residence:
    """The median time from last use to eviction of the chains that left last.

    Only live chains count: what finished programs and superseded turns leave behind goes
    first and makes room without shortening anybody's stay.
    """

    def __init__(self) -> None:
        self._ages: deque[float] = deque(maxlen=NUM_AGES)
        self._typical = math.inf  # their median
        self._last = -math.inf

    def evicted(self, age_s: float, now: float) -> None:
        """A chain last used `age_s` seconds ago left, or a part of it."""
        if math.isinf(self.seconds(now)):
            self._ages.clear()
        self._ages.append(age_s)
        self._typical = statistics.median(self._ages)
        self._last = now

    def seconds(self, now: float) -> float:
        """Return the estimate; infinite while nothing had to leave.

        For as long as nothing leaves it doubles with every such time that passes, for a store
        made at its start would still be there, and after a while it is infinite again.
        """
        if not self._ages:
            return math.inf
        doublings = (now - self._last) / max(self._typical, MIN_QUIET_S)
        return self._typical * 2.0**doublings if doublings < MAX_DOUBLINGS else math.inf
