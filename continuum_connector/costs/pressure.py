"""What waiting costs: the price of a held block, and the wait of turns that lost their blocks."""

from __future__ import annotations

import math
from collections import deque

# Long enough to see several turns of the queue (each waits seconds for blocks), short enough
# to follow a load that swings within minutes.
TIME_CONSTANT_S = 30.0
QUIET = 0.01  # a share below it is a wait long past: nobody waits, nothing is lost by keeping
_WARMUP = 100  # turns; until then the mean size is the plain mean


class Price:
    """Share of recent time in which a turn waited for blocks / mean blocks of a turn.

    While somebody waits, every second costs a waiting turn a second, and it takes about as
    many blocks as a mean turn to end that: each held block has that part of it.
    """

    def __init__(self) -> None:
        self._share = 0.0
        self._is_blocked = False
        self._last = -math.inf
        self.num_turns = 0
        self.mean_blocks = 1.0

    def blocked(self, now: float) -> None:
        """A waiting turn could not be admitted for lack of blocks; repeat as you like."""
        self._advance(now)
        self._is_blocked = True

    def unblocked(self, now: float) -> None:
        """No turn waits for blocks any more; repeat as you like."""
        self._advance(now)
        self._is_blocked = False

    def footprint(self, num_blocks: int) -> None:
        """The blocks of a turn that runs or waits."""
        self.num_turns += 1
        weight = max(1.0 / self.num_turns, 1.0 / _WARMUP)
        self.mean_blocks += weight * (max(1, num_blocks) - self.mean_blocks)

    def share(self, now: float) -> float:
        """The share of recent time in which some turn waited for blocks."""
        self._advance(now)
        return self._share if self._share >= QUIET else 0.0

    def per_block_second(self, now: float) -> float:
        """Seconds of delay that one block held for one second costs the others."""
        return self.share(now) / self.mean_blocks

    def _advance(self, now: float) -> None:
        if now <= self._last:
            return
        kept = math.exp((self._last - now) / TIME_CONSTANT_S)
        self._share = self._share * kept + (1.0 - kept) * self._is_blocked
        self._last = now


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
