"""Writing: how much may be written to the disk, how much of it at once, and whether anything may.

A budget per day spares the drive. A disk that takes no writes is read on, and tried now and then.
How much is under way follows the disk: a fast one must not run dry during a long step, and a slow
one must not be given what it cannot write in time.
"""

from __future__ import annotations

import math
from collections import deque

DAY_S = 24 * 3600.0
# Of what may be written: above it everything is, below it what leaves next, and of that only what
# was used the more often the less there is.
SPARE_FILL = 0.5
START_SHARE = 1 / 24  # what there is at least after a restart that found the disk full
FAILED_S = 3600.0  # what failed longer ago counts no more
MAX_FAILED = 3  # attempts to write: then none is made
RETRY_S = 600.0  # but one, so long after the last
LEAST_DEPTH, MOST_DEPTH = 16, 256  # writes under way
FASTER = 64  # of what was written in time so little more is written at once


class Budget:
    """Bytes that may be written: they come evenly over the day, and a day's at most are kept, so
    that a burst may write what idle hours left.

    A block must have been used the more often, the less of the second half is left: so what little
    may be written is what is read most.
    """

    def __init__(self, bytes_per_day: int, least_bytes: int) -> None:
        """`bytes_per_day`: 0 for no bound; `least_bytes`: so many are kept in any case."""
        self._per_second = bytes_per_day / DAY_S
        self._capacity = float(max(bytes_per_day, least_bytes)) if bytes_per_day else 0.0
        self._level = self._capacity
        self._since = -math.inf

    def fill(self, now: float) -> float:
        """How much is left of what can be kept, 0 to 1."""
        if not self._capacity:
            return 1.0
        if now > self._since:
            passed = now - self._since if self._since > -math.inf else 0.0
            self._level = min(self._capacity, self._level + passed * self._per_second)
            self._since = now
        return max(0.0, self._level / self._capacity)

    def least_uses(self, now: float) -> float:
        """By how many turns a block must have been used; by more than any, if nothing is left."""
        fill = self.fill(now)
        if fill <= 0.0:
            return math.inf
        return float(2 ** max(0, math.ceil((SPARE_FILL - fill) * 10 - 1e-9)))

    def take(self, num_bytes: int) -> None:
        """So much is written; a little may be owed then. Below 0: so much was not, after all."""
        self._level -= num_bytes

    def found(self, num_bytes: int) -> None:
        """So much an earlier life has written, of a budget that began as full as this one."""
        least = min(self._level, START_SHARE * self._capacity)
        self._level = max(least, self._level - num_bytes)


class Failures:
    """Attempts that failed within an hour; those under way at once fail as one."""

    def __init__(self) -> None:
        self._failed: deque[float] = deque()
        self.known_at = -math.inf  # what was begun until then, tells nothing new

    def add(self, begun: float, now: float) -> int:
        """One begun then has failed; how many have by now, 0 if that is nothing new."""
        if begun <= self.known_at:
            return 0
        self.known_at = now
        self._failed.append(now)
        while now - self._failed[0] > FAILED_S:
            self._failed.popleft()
        return len(self._failed)

    def clear(self) -> None:
        """What failed until now is mended."""
        self._failed.clear()


class Attempts:
    """Whether the disk is written to: not after so many failures, but for a try now and then, which
    begins it again."""

    def __init__(self) -> None:
        self._failures = Failures()
        self._retry_at = math.inf  # where writing is over
        self.is_over = False

    def may_begin(self, now: float, num_under_way: int) -> bool:
        return not self.is_over or (now >= self._retry_at and not num_under_way)

    def fail(self, begun: float, now: float) -> bool:
        """A write begun then has failed; True: with it writing is over."""
        if not (num_failed := self._failures.add(begun, now)):
            return False
        was_over, self.is_over = self.is_over, self.is_over or num_failed >= MAX_FAILED
        self._retry_at = now + RETRY_S
        return self.is_over and not was_over

    def succeed(self, begun: float) -> bool:
        """A write begun then is done; True: with it writing begins again."""
        if not self.is_over or begun <= self._failures.known_at:
            return False
        self.is_over = False
        self._failures.clear()
        return True


class Depth:
    """How many writes are under way at once, and of how many disk slots.

    So many that the disk does not run dry before the next step, however long that is, and no more,
    because each keeps slots of DRAM. Of a slow disk, no more than it ends before they are late, or
    most of what it writes would be for nothing. Reads do not wait for writes: the threads of a disk
    take reads first.
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
        """Of how many disk slots they may be."""
        return int(min(self._level, MOST_DEPTH * self._order_slots))

    def most(self, num_left: int) -> int:
        """How many there may be in this step; `num_left` are under way still."""
        if not num_left and self._num_begun >= self._most:
            self._most = min(2 * self._most, MOST_DEPTH)
        elif 2 * num_left > self._most:
            self._most = max(self._most // 2, LEAST_DEPTH)
        return self._most

    def begun(self, num: int) -> None:
        """So many are under way now."""
        self._num_begun = num

    def ended(self, num_slots: int, begun: float, now: float, is_late: bool) -> None:
        """A write of so many disk slots, begun then, is done, or late."""
        if not is_late:
            self._level += num_slots / FASTER
        elif begun > self._slowed_at:
            under_way = min(self._level, self._most * self._order_slots)
            self._level, self._slowed_at = max(1.0, under_way / 2), now
