"""Residence: how long what is stored stays in DRAM before it leaves for room."""

from __future__ import annotations

import math
from collections import deque

NUM_PARTS = 32  # of the window; each is forgotten at once
# Turns end in bursts, so what left within less says little of the rate; a lull as long as that,
# and as long as a block stays, is the end of the pressure.
LEAST_S = 10.0


class Residence:
    """Slots / rate at which live blocks leave: the mean stay, by Little's law.

    The age of those that leave would not do: where what is needed last leaves first, they are
    the ones just stored, and all that stay are not seen. Only live chains count: what finished
    programs and superseded turns leave behind goes first and shortens nobody's stay. The window
    is one turnover: the time in which as many blocks left as there are slots.
    """

    def __init__(self) -> None:
        self._parts: deque[tuple[float, int]] = deque()  # since when, blocks that left from then
        self._num_left = 0
        self._last = -math.inf
        self._num_slots = 0

    def evicted(self, num_blocks: int, num_slots: int, now: float) -> None:
        """Live blocks left, of those in `num_slots`; once per store that needed their room."""
        if math.isinf(self.seconds(now)):
            self._parts = deque([(now - LEAST_S, 0)])
            self._num_left = 0
        since, number = self._parts[-1]
        if number * NUM_PARTS < num_slots:
            self._parts[-1] = since, number + num_blocks
        else:
            self._parts.append((now, num_blocks))
        self._num_left += num_blocks
        self._last, self._num_slots = now, num_slots
        while self._num_left - self._parts[0][1] >= num_slots:
            self._num_left -= self._parts.popleft()[1]

    def seconds(self, now: float) -> float:
        """Return the estimate; infinite while nothing had to leave, and again once nothing has
        left for as long as that."""
        if not self._num_left:
            return math.inf
        if now - self._last >= max(self._until(self._last), LEAST_S):
            return math.inf
        return self._until(now)

    def _until(self, now: float) -> float:
        span_s = max(now - self._parts[0][0], LEAST_S)
        return self._num_slots * span_s / self._num_left
