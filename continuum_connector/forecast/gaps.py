"""Gaps: the time from the end of a program's turn to the arrival of its next one.

RecordedGaps keeps the gaps themselves, for the one rule that needs samples: Continuum, Equation 2.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from continuum_connector.forecast.forecast import EDGES
from continuum_connector.forecast.tool_times import ToolTimes, touch_and_evict
from continuum_connector.toolcalls.asked import Asked, Ending

MAX_RECORDS = 1000  # the most recent of a tool: ten times what the paper needs (its K = 100)
MAX_TOOLS = 256


class _Window:
    """The most recent gaps, both by arrival and by length."""

    __slots__ = ("recent", "sorted")

    def __init__(self) -> None:
        self.recent: deque[float] = deque()
        self.sorted: list[float] = []

    def add(self, gap_s: float) -> None:
        self.recent.append(gap_s)
        insort(self.sorted, gap_s)
        if len(self.recent) > MAX_RECORDS:
            del self.sorted[bisect_left(self.sorted, self.recent.popleft())]


class RecordedGaps:
    """Continuum's S[f] and S: gaps in seconds, by tool and over all tools. Both are bounded.

    A gap longer than EDGES[-1] counts as that long.
    """

    def __init__(self) -> None:
        self._all = _Window()
        self._tools: OrderedDict[str, _Window] = OrderedDict()  # least recently seen first

    def add(self, tool: str | None, gap_s: float) -> None:
        """Record a gap after a call of `tool`; None if the tool is unknown."""
        gap_s = min(gap_s, EDGES[-1])
        self._all.add(gap_s)
        if tool is None:
            return
        self._tools.setdefault(tool, _Window()).add(gap_s)
        touch_and_evict(self._tools, tool, MAX_TOOLS, lambda window: len(window.recent))

    def of(self, tool: str | None) -> tuple[Sequence[float], Sequence[float]]:
        """Gaps of `tool` and of all tools, ascending. The next `add` changes these views."""
        window = self._tools.get(tool) if tool is not None else None
        return (window.sorted if window else (), self._all.sorted)


# Seconds, on edges of the grid: 82 s, 5 and 22 minutes, 1.5, 6 and 23 hours, then the grid's end.
# A gap of this age counts as observed and still open. Otherwise we would learn of programs that
# never return only when they are forgotten, hours later, and forecasts would be too optimistic.
MILESTONES: tuple[float, ...] = (*EDGES[48::8], EDGES[-1])

_MAX_OBSERVED = 4  # gaps that may pass a milestone per call, which is more than a call can open


@dataclass(eq=False)
class Gap:
    """A gap that has not ended. `milestone`: the next one that it will pass."""

    asked: Asked
    since: float
    milestone: int = 0

    @property
    def observed_s(self) -> float:
        """The age up to which it has been observed."""
        return MILESTONES[self.milestone - 1] if self.milestone else 0.0


class Gaps:
    """Learns from gaps, both open and ended. Who is in which gap, others know (Away).

    For one thread; `now` is monotonic seconds and must not fall. Each call costs some
    microseconds, whatever the number of gaps; `forecast` some tens (ToolTimes).
    """

    def __init__(self) -> None:
        # Open gaps by their next milestone, oldest first, so only the first of each can be due.
        self._open: tuple[OrderedDict[Gap, None], ...] = tuple(OrderedDict() for _ in MILESTONES)
        self._due = math.inf  # no gap passes a milestone before
        self._times = ToolTimes()
        self._recorded = RecordedGaps()
        self.forecast = self._times.forecast  # when a program is back that ended with such a turn

    def __len__(self) -> int:
        return sum(map(len, self._open))

    def begin(self, asked: Asked, now: float) -> Gap:
        """A program's turn has ended with `asked`. `arrived`, `ended` or `drop` ends the gap."""
        self._observe_open(now)
        gap = Gap(asked, now)
        self._open[0][gap] = None
        self._due = min(self._due, now + MILESTONES[0])
        return gap

    def arrived(self, gap: Gap | None, now: float) -> float | None:
        """A turn arrived: learn the gap before it, if there was one, and return its seconds."""
        seconds = None
        if gap is not None and self.drop(gap):
            seconds = max(0.0, now - gap.since)
            if gap.asked.ending is not Ending.ANSWER:  # the paper's programs wait for no people
                self._recorded.add(self._times.longest(gap.asked), seconds)
            self._times.observe(gap.asked, seconds, after_s=gap.observed_s)
        self._observe_open(now)
        return seconds

    def ended(self, gap: Gap, now: float) -> None:
        """The gap's program is done or forgotten, so the gap is longer than it has lasted so
        far."""
        if self.drop(gap):
            self._times.observe(gap.asked, now - gap.since, is_over=False, after_s=gap.observed_s)

    def drop(self, gap: Gap) -> bool:
        """Forget the gap without learning from it. False: it was not open."""
        if gap.milestone == len(MILESTONES) or gap not in self._open[gap.milestone]:
            return False
        del self._open[gap.milestone][gap]
        return True

    def recorded(self, asked: Asked) -> tuple[Sequence[float], Sequence[float]]:
        """Recorded gaps in seconds, ascending, of this turn's tool and of all tools.

        If the turn called several tools, this takes the one that is expected to take longest. Valid
        until the next call that learns.
        """
        return self._recorded.of(self._times.longest(asked))

    def _observe_open(self, now: float) -> None:
        """Observe gaps that have passed a milestone, a few per call."""
        if now < self._due:
            return
        num_left = _MAX_OBSERVED
        self._due = math.inf
        for milestone, age in enumerate(MILESTONES):
            gaps = self._open[milestone]
            while gaps:
                gap = next(iter(gaps))
                if now - gap.since < age or not num_left:
                    self._due = min(self._due, gap.since + age)
                    break
                num_left -= 1
                self._pass(gap)

    def _pass(self, gap: Gap) -> None:
        age = MILESTONES[gap.milestone]
        self._times.observe(gap.asked, age, is_over=False, after_s=gap.observed_s)
        self.drop(gap)
        gap.milestone += 1
        if gap.milestone < len(MILESTONES):  # past the grid there is nothing left to learn
            self._open[gap.milestone][gap] = None
