"""Writing: how much may be written to the disk, how much of it at once, and whether anything may.

A budget per day spares the drive. A disk that takes no writes is still read, and a write is tried
now and then. How much is under way follows the disk: a fast one must not run dry during a long
step, and a slow one must not be given what it cannot write in time.
"""

from __future__ import annotations

import math
from collections import deque

DAY_S = 24 * 3600.0
# Share of the budget. Above it everything is written; below it only what leaves DRAM next, and the
# less is left, the more often a block must have been used.
SPARE_FILL = 0.5
AHEAD_SHARE = 1 / 96  # of the budget, a quarter of an hour's: what is said to be spent before it is
FAILED_S = 3600.0  # failures longer ago do not count
MAX_FAILED = 3  # failed writes, after which none is begun
RETRY_S = 600.0  # except for one this long after the last failure
LEAST_DEPTH, MOST_DEPTH = 16, 256  # writes under way
FASTER = 64  # for each disk slot written in time, 1 / FASTER more may be under way


class Budget:
    """Bytes that may be written. They come evenly over the day, and at most a day's are kept, so
    that a burst may write what idle hours left.

    The less of the last half is left, the more often a block must have been used, so that what
    little may be written is what is read most.

    What is spent is kept over a restart, or a server that is killed again and again would begin
    each time with a day's. It is said ahead: whoever is killed has spent no more than was said.
    """

    def __init__(self, bytes_per_day: int, least_bytes: int) -> None:
        """`bytes_per_day`: 0 for no bound; `least_bytes`: this many can be kept in any case."""
        self._per_second = bytes_per_day / DAY_S
        self._capacity = float(max(bytes_per_day, least_bytes)) if bytes_per_day else 0.0
        self._level = self._capacity
        self._since = -math.inf
        self._said, self._said_at = -math.inf, 0.0  # to be spent, and when

    def fill(self, now: float) -> float:
        """The share that is left of what can be kept, 0 to 1."""
        if not self._capacity:
            return 1.0
        if now > self._since:
            passed = now - self._since if self._since > -math.inf else 0.0
            self._level = min(self._capacity, self._level + passed * self._per_second)
            self._since = now
        return max(0.0, self._level / self._capacity)

    def least_uses(self, now: float) -> float:
        """How many turns must have used a block to be written; infinite if nothing is left."""
        fill = self.fill(now)
        if fill <= 0.0:
            return math.inf
        return float(2 ** max(0, math.ceil((SPARE_FILL - fill) * 10 - 1e-9)))

    def take(self, num_bytes: int) -> None:
        """Count these bytes as written; a little may be owed after that. Negative: bytes that were
        taken were not written after all."""
        self._level -= num_bytes

    def restore(self, num_bytes: int, age_s: float) -> None:
        """An earlier server had spent so much `age_s` ago. Before anything is taken."""
        left = max(0.0, num_bytes - age_s * self._per_second)
        self._level = min(self._level, max(0.0, self._capacity - left))

    def to_keep(self, now: float) -> int | None:
        """What a restart is to find spent, in bytes, if what was said last is no longer enough."""
        if not self._capacity:
            return None
        spent = (1.0 - self.fill(now)) * self._capacity
        ahead = AHEAD_SHARE * self._capacity
        said = self._said - (now - self._said_at) * self._per_second
        if spent + ahead / 2 <= said:
            return None
        self._said, self._said_at = spent + ahead, now
        return int(self._said)


class Failures:
    """How many attempts failed within the last hour."""

    def __init__(self) -> None:
        self._failed: deque[float] = deque()
        self.known_at = -math.inf  # a failure of what began before tells nothing new

    def add(self, begun: float, now: float) -> int:
        """One begun at `begun` has failed; those under way at the same time fail as one. Returns
        how many have by now, 0 if it is no news."""
        if begun <= self.known_at:
            return 0
        self.known_at = now
        return self.note(now)

    def note(self, now: float) -> int:
        """One has failed, and counts whatever failed with it. Returns how many have by now."""
        self._failed.append(now)
        while now - self._failed[0] > FAILED_S:
            self._failed.popleft()
        return len(self._failed)

    def clear(self) -> None:
        """Forget the failures: their cause is mended."""
        self._failed.clear()


class Attempts:
    """Whether the disk is written to. After too many failures it is not, except for a try now and
    then; if one succeeds, writing begins again."""

    def __init__(self) -> None:
        self._failures = Failures()
        self._retry_at = math.inf  # if writing is over
        self.is_over = False

    def may_begin(self, now: float, num_under_way: int) -> bool:
        return not self.is_over or (now >= self._retry_at and not num_under_way)

    def fail(self, begun: float, now: float) -> bool:
        """A write begun at `begun` has failed. True: with this one, writing is over."""
        if not (num_failed := self._failures.add(begun, now)):
            return False
        was_over, self.is_over = self.is_over, self.is_over or num_failed >= MAX_FAILED
        self._retry_at = now + RETRY_S
        return self.is_over and not was_over

    def succeed(self, begun: float) -> bool:
        """A write begun at `begun` is done. True: with this one, writing begins again."""
        if not self.is_over or begun <= self._failures.known_at:
            return False
        self.is_over = False
        self._failures.clear()
        return True


class Depth:
    """How many writes are under way at once, and of how many disk slots.

    Enough that the disk does not run dry before the next step, however long that is, and no more,
    because each keeps slots of DRAM. With a slow disk, no more than it ends before they are late,
    or most of what it writes would be for nothing. Reads do not wait for writes: the threads of a
    disk take reads first.
    """

    def __init__(self, order_slots: int) -> None:
        """`order_slots`: disk slots of the largest order."""
        self._order_slots = order_slots
        self._most = LEAST_DEPTH
        self._num_begun = 0  # under way after the last step
        self._level = math.inf  # disk slots; bounded once a write was late
        self._slowed_at = -math.inf

    @property
    def num_slots(self) -> int:
        """How many disk slots the writes under way may have in all."""
        return int(min(self._level, MOST_DEPTH * self._order_slots))

    def most(self, num_left: int) -> int:
        """How many writes there may be in this step; `num_left` are still under way."""
        if not num_left and self._num_begun >= self._most:
            self._most = min(2 * self._most, MOST_DEPTH)
        elif 2 * num_left > self._most:
            self._most = max(self._most // 2, LEAST_DEPTH)
        return self._most

    def begun(self, num: int) -> None:
        """Note how many are under way now."""
        self._num_begun = num

    def ended(self, num_slots: int, begun: float, now: float, is_late: bool) -> None:
        """A write of `num_slots` disk slots, begun at `begun`, is done, or was late."""
        if not is_late:
            self._level += num_slots / FASTER
        elif begun > self._slowed_at:
            under_way = min(self._level, self._most * self._order_slots)
            self._level, self._slowed_at = max(1.0, under_way / 2), now
