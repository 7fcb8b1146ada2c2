"""Links that copies travel: PCIe and a disk, each one queue per direction, as a fluid."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class Way(enum.Enum):
    """Which way bytes go."""

    LOAD = "load"  # DRAM -> VRAM
    STORE = "store"  # VRAM -> DRAM
    READ = "read"  # disk -> DRAM
    WRITE = "write"  # DRAM -> disk


@dataclass(eq=False)  # of two that look alike one may be taken back
class Copy:
    """One transfer. `left`: bytes still to go, its latency's worth included; `began`: when they
    began to flow; `done`: when the last one arrived. Both are infinite until then."""

    way: Way
    num_bytes: float
    not_before: float
    left: float
    began: float = math.inf
    done: float = math.inf


class Link:
    """First come, first served in each direction; `advance` moves the bytes of a span of time.

    `alone`: bytes per second of a direction that has the link to itself; `latency_s`: of each
    copy, on top of its bytes: submission, events, polling.
    """

    def __init__(self, alone: Mapping[Way, float], latency_s: float) -> None:
        self._alone, self._latency_s = alone, latency_s
        self._queues: dict[Way, deque[Copy]] = {way: deque() for way in alone}
        self._now = 0.0
        self.num_bytes: dict[Way, float] = dict.fromkeys(alone, 0.0)

    def _rates(self, ways: Sequence[Way]) -> Mapping[Way, float]:
        """Bytes per second of each direction when these have bytes to move."""
        raise NotImplementedError

    def submit(self, way: Way, num_bytes: float, now: float, not_before: float = 0.0) -> Copy:
        """Queue a copy whose bytes may flow from `not_before` on."""
        self.advance(now)
        left = num_bytes + self._latency_s * self._alone[way]
        copy = Copy(way, num_bytes, max(now, not_before), left)
        self._queues[way].append(copy)
        self.num_bytes[way] += num_bytes
        return copy

    def cancel(self, copy: Copy) -> bool:
        """Take back a copy of which no byte has moved; False if it is too late."""
        queue = self._queues[copy.way]
        if (
            copy not in queue
            or copy.left < copy.num_bytes + self._latency_s * self._alone[copy.way]
        ):
            return False
        queue.remove(copy)
        self.num_bytes[copy.way] -= copy.num_bytes
        return True

    def advance(self, now: float) -> None:
        """Let time pass until `now`; copies that end by then have their `done`."""
        while self._now < now:
            heads = [q[0] for q in self._queues.values() if q]
            active = [copy for copy in heads if copy.not_before <= self._now]
            until = min((c.not_before for c in heads if c.not_before > self._now), default=now)
            until = min(until, now)
            if active:
                rates = self._rates([copy.way for copy in active])
                active = [copy for copy in active if rates[copy.way]]
                first = min(active, key=lambda copy: copy.left / rates[copy.way])
                until = min(until, self._now + first.left / rates[first.way])
                self._flow(active, rates, first, until)
            self._now = until

    def _flow(
        self, active: list[Copy], rates: Mapping[Way, float], first: Copy, until: float
    ) -> None:
        for copy in active:
            copy.began = min(copy.began, self._now)
            copy.left -= rates[copy.way] * (until - self._now)
            if copy.left < 1.0 or (copy is first and until == self._now):  # a byte is rounding
                copy.left, copy.done = 0.0, until
                self._queues[copy.way].popleft()

    def next_done(self) -> float:
        """When the next copy would be done if nothing else is submitted; infinite if none."""
        heads = [q[0] for q in self._queues.values() if q]
        if not heads:
            return math.inf
        rates = self._rates([copy.way for copy in heads])
        return min(
            max(self._now, copy.not_before) + copy.left / rates[copy.way]
            for copy in heads
            if rates[copy.way]
        )


class Bus(Link):
    """PCIe: both directions share what one of them has alone."""

    def __init__(self, rate: float, latency_s: float = 50e-6) -> None:
        super().__init__(dict.fromkeys((Way.LOAD, Way.STORE), rate), latency_s)

    def _rates(self, ways: Sequence[Way]) -> Mapping[Way, float]:
        return {way: self._alone[way] / len(ways) for way in ways}


class Disk(Link):
    """A drive. With both to do it reads half of the time and writes the other half, or, where
    `reads_first`, reads until nothing is to be read."""

    def __init__(self, reads: float, writes: float, latency_s: float = 100e-6) -> None:
        super().__init__({Way.READ: reads, Way.WRITE: writes}, latency_s)
        self.reads_first = False

    def _rates(self, ways: Sequence[Way]) -> Mapping[Way, float]:
        if len(ways) == 1:
            return self._alone
        if self.reads_first:
            return {Way.READ: self._alone[Way.READ], Way.WRITE: 0.0}
        return {way: self._alone[way] / len(ways) for way in ways}
