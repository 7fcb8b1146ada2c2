"""What waiting costs: Price of a held block, Level of a queue; the paper's T and eta, Queueing and
Memoryfulness."""

from __future__ import annotations

import math
from collections import deque

# Long enough to see several turns of the queue (each waits seconds for blocks), short enough
# to follow a load that swings within minutes.
TIME_CONSTANT_S = 30.0
QUIET = 0.01  # a smaller share is left from a wait long past: nobody waits now
_WARMUP = 100  # turns; until then the mean size is the arithmetic mean


class Level:
    """A level that goes up and down, and its mean over recent time."""

    def __init__(self, time_constant_s: float) -> None:
        self._time_constant_s = time_constant_s
        self._mean = self._level = 0.0
        self._last = -math.inf

    def set(self, level: float, now: float) -> None:
        """It is at `level` from `now` on. May be called repeatedly."""
        self._advance(now)
        self._level = level

    def mean(self, now: float) -> float:
        """The mean, in which what was a time constant ago weighs 1 / e of what is."""
        self._advance(now)
        return self._mean

    def _advance(self, now: float) -> None:
        if now <= self._last:
            return
        kept = math.exp((self._last - now) / self._time_constant_s)
        self._mean = self._mean * kept + (1.0 - kept) * self._level
        self._last = now


class Price:
    """Share of recent time in which a turn waited for blocks / mean blocks of a turn.

    While a turn waits, every second costs it a second, and about as many blocks as a mean turn has
    would end that. So each held block causes that share of it.
    """

    def __init__(self) -> None:
        self._blocked = Level(TIME_CONSTANT_S)  # 1 while a turn waits
        self.num_turns = 0
        self.mean_blocks = 1.0

    def blocked(self, now: float) -> None:
        """A waiting turn could not be admitted for lack of blocks. May be called repeatedly."""
        self._blocked.set(1.0, now)

    def unblocked(self, now: float) -> None:
        """No turn waits for blocks any more. May be called repeatedly."""
        self._blocked.set(0.0, now)

    def assume(self, num_blocks: int) -> None:
        """What the mean is until a turn was counted."""
        if not self.num_turns:
            self.mean_blocks = float(max(1, num_blocks))

    def footprint(self, num_blocks: int) -> None:
        """Count the blocks of a turn."""
        self.num_turns += 1
        weight = max(1.0 / self.num_turns, 1.0 / _WARMUP)
        self.mean_blocks += weight * (max(1, num_blocks) - self.mean_blocks)

    def share(self, now: float) -> float:
        """The share of recent time in which some turn waited for blocks."""
        share = self._blocked.mean(now)
        return share if share >= QUIET else 0.0

    def per_block_second(self, now: float) -> float:
        """Seconds of delay that one block held for one second costs the others."""
        return self.share(now) / self.mean_blocks


WINDOW = 100  # turns; the paper gives no size, so this is its K for tool durations
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
        """Mean wait of such a turn in seconds. Each wait is dropped once, so calls are cheap."""
        while self._waits and self._waits[0][0] < now - MAX_AGE_S:
            self._drop_oldest()
        return self._total / len(self._waits) if self._waits else 0.0

    def _drop_oldest(self) -> None:
        self._total -= self._waits.popleft()[1]
        if not self._waits:
            self._total = 0.0  # so that rounding errors do not add up


# A correlation over n programs is uncertain by about 1 / sqrt(n): 0.22 here. Below that the
# paper's cold start holds: every program takes the same number of turns, eta = 1.
MIN_PROGRAMS = 20
# Turns, some 500 programs; a server's agents change with deployments, not by the minute. By
# turns, so that a crowd of short programs does not drive out what a few long ones taught.
HALF_LIFE = 5000


class Memoryfulness:
    """eta = -Corr(k, N - k) over the turns k = 1..N of finished programs of N turns.

    1: all programs have the same length. 0: the number of turns left is the same at any age. Below
    0: the older a program, the more turns are left. The sums have a closed form, so a program costs
    O(1).
    """

    def __init__(self) -> None:
        self.num_programs = 0
        self._sums = [0.0] * 6  # of 1, k, left, k * k, left * left, k * left; left = N - k

    @property
    def is_known(self) -> bool:
        """Whether enough programs have finished."""
        return self.num_programs >= MIN_PROGRAMS

    def program_over(self, num_turns: int) -> None:
        """A program finished after `num_turns` turns. One without turns says nothing."""
        n = num_turns
        if n < 1:
            return
        self.num_programs += 1
        terms = (
            n,
            n * (n + 1) / 2,
            n * (n - 1) / 2,
            n * (n + 1) * (2 * n + 1) / 6,
            (n - 1) * n * (2 * n - 1) / 6,
            n * (n + 1) * (n - 1) / 6,
        )
        decay = 0.5 ** (n / HALF_LIFE)
        self._sums = [s * decay + t for s, t in zip(self._sums, terms, strict=True)]

    @property
    def eta(self) -> float:
        """Memoryfulness, -1 to 1; 1 until enough programs have finished."""
        if not self.is_known:
            return 1.0
        one, k, left, kk, ll, kl = self._sums
        var_k, var_left = kk / one - (k / one) ** 2, ll / one - (left / one) ** 2
        if min(var_k, var_left) < 1e-9:  # every program had one turn, so all have the same length
            return 1.0
        correlation = (kl / one - k * left / one**2) / math.sqrt(var_k * var_left)
        return min(1.0, max(-1.0, -correlation))
