"""Queueing: how long turns wait that come back to find their blocks gone (the paper's T)."""

from __future__ import annotations

from collections import deque

WINDOW = 100  # turns; the paper names no size, this is its K for tool durations
# Load changes within minutes: a rush hour's waits are no reason to pin in the quiet after it.
MAX_AGE_S = 600.0


class Queueing:
    """Mean wait in seconds over the last turns that had been evicted; 0 at first (section 4.2)."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, float]] = deque()
        self._total = 0.0

    def waited(self, seconds: float, now: float) -> None:
        """A turn whose program had lost blocks was admitted after `seconds` in the queue."""
        self._waits.append((now, max(0.0, seconds)))
        self._total += max(0.0, seconds)
        if len(self._waits) > WINDOW:
            self._drop_oldest()

    def mean(self, now: float) -> float:
        """Seconds that such a turn waits; each wait is dropped once, so calls are cheap."""
        while self._waits and self._waits[0][0] < now - MAX_AGE_S:
            self._drop_oldest()
        return self._total / len(self._waits) if self._waits else 0.0

    def _drop_oldest(self) -> None:
        self._total -= self._waits.popleft()[1]
        if not self._waits:
            self._total = 0.0  # rounding does not pile up
