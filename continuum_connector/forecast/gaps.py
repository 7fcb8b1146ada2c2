"""Gaps: the time from the end of a program's turn to the arrival of its next one."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from continuum_connector.costs.state_file import Bites
from continuum_connector.forecast.forecast import EDGES, Forecast
from continuum_connector.forecast.recorded import RecordedGaps
from continuum_connector.forecast.tool_times import ToolTimes
from continuum_connector.toolcalls.asked import Asked, Ending

# Seconds, on edges of the grid: 82 s, 5 and 22 minutes, 1.5, 6 and 23 hours, then the grid's end.
# A gap of this age is observed as still open. Without it, programs that never return would be
# learned of only when they are forgotten, hours later, and every forecast would be too hopeful.
MILESTONES: tuple[float, ...] = (*EDGES[48::8], EDGES[-1])

_NUM_LOOKS = 4  # gaps that may pass a milestone per call: more than a call can open


@dataclass(eq=False)
class Gap:
    """One that has not ended; `milestone` is the next one it will pass."""

    asked: Asked
    since: float
    milestone: int = 0

    @property
    def observed_s(self) -> float:
        """Up to which age it was observed."""
        return MILESTONES[self.milestone - 1] if self.milestone else 0.0


class Gaps:
    """What gaps teach, those that are open and those that ended. Whose they are, others know.

    For one thread; `now` is monotonic seconds and must not fall. Each call costs some
    microseconds, whatever the number of gaps; `forecast` some tens (ToolTimes).
    """

    def __init__(self) -> None:
        # Open ones by next milestone, the oldest first: only the first of each can be due.
        self._open: tuple[OrderedDict[Gap, None], ...] = tuple(OrderedDict() for _ in MILESTONES)
        self._due = math.inf  # no gap passes a milestone before
        self._times = ToolTimes()
        self._recorded = RecordedGaps()

    def __len__(self) -> int:
        return sum(map(len, self._open))

    def begin(self, asked: Asked, now: float) -> Gap:
        """A program's turn has ended with `asked`. One of the next three calls ends the gap."""
        self._look(now)
        gap = Gap(asked, now)
        self._open[0][gap] = None
        self._due = min(self._due, now + MILESTONES[0])
        return gap

    def arrived(self, gap: Gap | None, now: float) -> float | None:
        """A turn arrived: learn the gap before it, if there was one, and return its seconds."""
        seconds = None
        if gap is not None and self.drop(gap):
            seconds = max(0.0, now - gap.since)
            if gap.asked.ending is not Ending.ANSWER:  # the paper's programs have no people in them
                self._recorded.add(self._times.longest(gap.asked), seconds)
            self._times.observe(gap.asked, seconds, after_s=gap.observed_s)
        self._look(now)
        return seconds

    def ended(self, gap: Gap, now: float) -> None:
        """Its program is done or forgotten: the gap lasts longer than until now."""
        if self.drop(gap):
            self._times.observe(gap.asked, now - gap.since, is_over=False, after_s=gap.observed_s)

    def drop(self, gap: Gap) -> bool:
        """It neither ended nor lasted, as far as anybody saw. False: it was not open."""
        if gap.milestone == len(MILESTONES) or gap not in self._open[gap.milestone]:
            return False
        del self._open[gap.milestone][gap]
        return True

    def forecast(self, asked: Asked) -> Forecast:
        """When a program will be back whose turn ends with `asked`."""
        return self._times.forecast(asked)

    def recorded(self, asked: Asked) -> tuple[Sequence[float], Sequence[float]]:
        """Recorded gaps in seconds, ascending: of this turn's tool, of all tools.

        Of several tools it is the one that is expected to take longest. Valid until the next
        call that learns.
        """
        return self._recorded.of(self._times.longest(asked))

    def to_state(self) -> Bites[dict[str, Any]]:
        """What was learned; open gaps end with the process. Between two bites more may be."""
        times = yield from self._times.to_state()
        recorded = yield from self._recorded.to_state()
        return {"times": times, "recorded": recorded}

    def load_state(self, state: object) -> int:
        """Take over what to_state gave; returns how many parts did not fit and were dropped."""
        if not isinstance(state, Mapping):
            return 1
        dropped = self._times.load_state(state.get("times"))
        return dropped + self._recorded.load_state(state.get("recorded"))

    def _look(self, now: float) -> None:
        """Observe gaps that have passed a milestone, a few per call."""
        if now < self._due:
            return
        num_looks = _NUM_LOOKS
        self._due = math.inf
        for milestone, age in enumerate(MILESTONES):
            gaps = self._open[milestone]
            while gaps:
                gap = next(iter(gaps))
                if now - gap.since < age or not num_looks:
                    self._due = min(self._due, gap.since + age)
                    break
                num_looks -= 1
                self._pass(gap)

    def _pass(self, gap: Gap) -> None:
        age = MILESTONES[gap.milestone]
        self._times.observe(gap.asked, age, is_over=False, after_s=gap.observed_s)
        self.drop(gap)
        gap.milestone += 1
        if gap.milestone < len(MILESTONES):  # beyond the grid nothing is left to learn
            self._open[gap.milestone][gap] = None
