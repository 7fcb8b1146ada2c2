"""Bus: PCIe as a fluid link, one queue per direction, both sharing what the link carries."""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass


class Way(enum.Enum):
    """Which way bytes go."""

    LOAD = "load"  # DRAM -> VRAM
    STORE = "store"  # VRAM -> DRAM


@dataclass
class Copy:
    """One transfer. `left`: bytes still to go, its latency's worth included; `done`: when the last
    one arrived, or infinite."""

    way: Way
    num_bytes: float
    not_before: float
    submitted: float
    left: float
    done: float = math.inf


class Bus:
    """First come, first served in each direction; `advance` moves the bytes of a span of time.

    `latency_s`: of each copy, on top of its bytes: submission, events, polling.
    """

    def __init__(self, one_way: float, both: float, latency_s: float = 50e-6) -> None:
        self._one_way, self._both, self._latency_s = one_way, both, latency_s
        self._queues: dict[Way, deque[Copy]] = {way: deque() for way in Way}
        self._now = 0.0
        self.num_bytes: dict[Way, float] = dict.fromkeys(Way, 0.0)

    def submit(self, way: Way, num_bytes: float, now: float, not_before: float = 0.0) -> Copy:
        """Queue a copy whose bytes may flow from `not_before` on."""
        self.advance(now)
        left = num_bytes + self._latency_s * self._one_way
        copy = Copy(way, num_bytes, max(now, not_before), now, left)
        self._queues[way].append(copy)
        self.num_bytes[way] += num_bytes
        return copy

    def advance(self, now: float) -> None:
        """Let time pass until `now`; copies that end by then have their `done`."""
        while self._now < now:
            heads = [q[0] for q in self._queues.values() if q]
            active = [copy for copy in heads if copy.not_before <= self._now]
            until = min((c.not_before for c in heads if c.not_before > self._now), default=now)
            until = min(until, now)
            if active:
                rate = min(self._one_way, self._both / len(active))
                first = min(active, key=lambda copy: copy.left)
                until = min(until, self._now + first.left / rate)
                self._flow(active, rate * (until - self._now), first, until)
            self._now = until

    def _flow(self, active: list[Copy], num_bytes: float, first: Copy, until: float) -> None:
        for copy in active:
            copy.left -= num_bytes
            if copy.left < 1.0 or (copy is first and until == self._now):  # a byte is rounding
                copy.left, copy.done = 0.0, until
                self._queues[copy.way].popleft()

    def next_done(self) -> float:
        """When the next copy would be done if nothing else is submitted; infinite if none."""
        heads = [q[0] for q in self._queues.values() if q]
        if not heads:
            return math.inf
        rate = min(self._one_way, self._both / len(heads))
        return min(max(self._now, copy.not_before) + copy.left / rate for copy in heads)
