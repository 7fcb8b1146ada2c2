"""Gaps: from the finish of a program's turn to the arrival of its next one."""

from __future__ import annotations

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


@dataclass
class _Open:
    """A gap that has not ended; `milestone` is the next one it will pass."""

    asked: Asked
    since: float
    milestone: int = 0

    @property
    def observed_s(self) -> float:
        """Up to which age it was observed."""
        return MILESTONES[self.milestone - 1] if self.milestone else 0.0


class Gaps:
    """Open gaps of at most `max_programs` programs, and what ended ones taught.

    For one thread; `now` is monotonic seconds and must not fall. Each call costs some
    microseconds, whatever the number of programs; `forecast` some tens (ToolTimes).
    """

    def __init__(self, max_programs: int) -> None:
        self._max_programs = max_programs
        self._open: dict[str, _Open] = {}
        # The same by next milestone, the oldest first: only the first of each can be due.
        self._waiting: tuple[OrderedDict[str, _Open], ...] = tuple(
            OrderedDict() for _ in MILESTONES
        )
        self._times = ToolTimes()
        self._recorded = RecordedGaps()

    def __len__(self) -> int:
        return len(self._open)

    def finished(self, program: str, asked: Asked, now: float) -> None:
        """A turn of `program` has ended with `asked`: its gap begins.

        A gap that it had open is dropped, as neither ended nor lasting: turns overlapped.
        """
        self._look(now)
        self._close(program)
        self._open[program] = self._waiting[0][program] = _Open(asked, now)
        if len(self._open) > self._max_programs:
            oldest = next(programs for programs in reversed(self._waiting) if programs)
            self.ended(next(iter(oldest)), now)

    def arrived(self, program: str, now: float) -> float | None:
        """The program is back: learn its gap and return it in seconds; None if none was open."""
        gap = self._close(program)
        if gap is None:
            self._look(now)
            return None
        seconds = max(0.0, now - gap.since)
        if gap.asked.ending is not Ending.ANSWER:  # the paper's programs have no people in them
            self._recorded.add(self._tool(gap.asked), seconds)
        self._times.observe(gap.asked, seconds, after_s=gap.observed_s)
        self._look(now)
        return seconds

    def ended(self, program: str, now: float) -> None:
        """The program is done or forgotten: its gap, if open, lasts longer than until now."""
        gap = self._close(program)
        if gap is not None:
            self._times.observe(gap.asked, now - gap.since, is_over=False, after_s=gap.observed_s)

    def forget_open(self) -> None:
        """Drop every open gap, as neither ended nor lasting: nobody watches programs any more."""
        self._open.clear()
        for programs in self._waiting:
            programs.clear()

    def forecast(self, asked: Asked) -> Forecast:
        """When a program will be back whose turn ends with `asked`."""
        return self._times.forecast(asked)

    def forecast_of(self, program: str) -> Forecast | None:
        """The same for the gap that `program` has open, counted from its begin; None without."""
        gap = self._open.get(program)
        return self._times.forecast(gap.asked) if gap else None

    def recorded(self, asked: Asked) -> tuple[Sequence[float], Sequence[float]]:
        """Recorded gaps in seconds, ascending: of this turn's tool, of all tools.

        The tool is a name without arguments, as in the paper; of several, the one expected
        to take longest. Valid until the next call that learns.
        """
        return self._recorded.of(self._tool(asked))

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

    def _tool(self, asked: Asked) -> str | None:
        call = self._times.longest(asked)
        return call.name if call else None

    def _close(self, program: str) -> _Open | None:
        gap = self._open.pop(program, None)
        if gap is not None:
            del self._waiting[gap.milestone][program]
        return gap

    def _look(self, now: float) -> None:
        """Observe gaps that have passed a milestone, a few per call."""
        num_looks = _NUM_LOOKS
        for milestone, age in enumerate(MILESTONES):
            programs = self._waiting[milestone]
            while programs and num_looks:
                program, gap = next(iter(programs.items()))
                if now - gap.since < age:
                    break
                num_looks -= 1
                self._pass(program, gap)

    def _pass(self, program: str, gap: _Open) -> None:
        age = MILESTONES[gap.milestone]
        self._times.observe(gap.asked, age, is_over=False, after_s=gap.observed_s)
        self._close(program)
        gap.milestone += 1
        if gap.milestone < len(MILESTONES):  # beyond the grid nothing is left to learn
            self._open[program] = self._waiting[gap.milestone][program] = gap
