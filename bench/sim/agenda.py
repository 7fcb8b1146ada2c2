"""Agenda: what happens when, in virtual seconds. Same calls, same order: runs repeat exactly.

A heap is all the lab needs of a discrete-event library: programs are plans, not processes, and
the engine is the only thing that takes time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable


class Clock:
    """Virtual monotonic seconds; moved by the lab alone."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Agenda:
    """Calls due at a time; of equal times, in the order in which they were put down."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    @property
    def next_time(self) -> float:
        """When the next call is due; infinite if none is."""
        return self._heap[0][0] if self._heap else math.inf

    def put(self, time: float, call: Callable[[], None]) -> None:
        """Have `call` made at `time`."""
        heapq.heappush(self._heap, (time, next(self._count), call))

    def run_due(self, now: float) -> None:
        """Make the calls due by `now`, those included that they put down meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()
