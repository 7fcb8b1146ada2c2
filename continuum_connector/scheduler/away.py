"""Away: the programs whose last turn has ended, until their next one runs. The one record of them.

Each absence has a gap, from which we learn how long absences last, and a decision, of which we
report how good it was. Decider and Outcomes end these. No other table knows which programs are
away, and nothing else looks for programs that have fallen silent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from continuum_connector.forecast.forecast import Forecast
from continuum_connector.forecast.gaps import Gap, Gaps
from continuum_connector.programs.program import MAX_LEFT, OVER_S, Program
from continuum_connector.scheduler.pins import PinEnd
from continuum_connector.scheduler.turns import Turn
from continuum_connector.toolcalls.asked import Asked, Ending

_MAX_SILENT = 8  # per step, because after a quiet night thousands of programs may be over at once


@dataclass(eq=False)
class OpenDecision:
    """A decision whose outcome is not known yet.

    Of the finished turn it keeps only what will be reported: there are thousands of decisions, and
    a forecast takes 6 KB. `p`: the probability that the program is back within `horizon_s`. `back`:
    turns that arrived since and wait, and whether each fits the pin; None if the pin was gone.
    """

    program: str
    turn: int
    num_tokens: int
    prefill_s: float
    load_s: float
    p: float
    decision: str
    kept_tokens: int
    decided: float
    horizon_s: float
    pin_end: PinEnd | None = None
    gap_s: float | None = None
    back: dict[Turn, bool | None] = field(default_factory=dict)

    @property
    def has_pin(self) -> bool:
        return self.decision == "pin" and self.pin_end is None

    def came_back(self, turn: Turn, fits: bool, now: float) -> None:
        """A turn of its program has arrived; `fits`: it continues what the pin holds."""
        self.back[turn] = fits if self.has_pin else None
        if self.gap_s is None:
            self.gap_s = now - self.decided

    def pin_ended(self, cause: PinEnd) -> None:
        self.pin_end = cause


@dataclass(eq=False)
class Absence:
    """A program's absence `since` its last turn ended; `num_turns` had arrived by then. `gaps`: by
    when a turn ended, until one continues what it left. `decision` is set until the program's next
    turn is admitted."""

    program: Program
    since: float
    num_turns: int
    gaps: dict[float, Gap] = field(default_factory=dict)
    decision: OpenDecision | None = None


class Away:
    """Absences by program, at most about `max_programs`. Beyond that, the longest absence of an
    unnamed program of one turn is forgotten, or else the longest of all, and we see neither the end
    of that program nor its return. Microseconds per call."""

    def __init__(self, gaps: Gaps, max_programs: int) -> None:
        self._gaps = gaps
        self._max_programs = max_programs
        self._absences: OrderedDict[str, Absence] = OrderedDict()  # the longest absence is first
        self._once: OrderedDict[str, None] = OrderedDict()  # of unnamed programs of one turn

    def __len__(self) -> int:
        return len(self._absences)

    # --- gaps -------------------------------------------------------------------------
    def left(self, program: Program, asked: Asked, now: float) -> None:
        """A turn of the program ended with `asked`."""
        gaps = self._begin(program, now).gaps
        if now in gaps:
            self._gaps.drop(gaps.pop(now))
        elif len(gaps) >= MAX_LEFT:
            self._gaps.drop(gaps.pop(next(iter(gaps))))
        gaps[now] = self._gaps.begin(asked, now)

    def arrived(self, program: str, since: float | None, now: float) -> float | None:
        """The program is back, and continues what a turn left that ended at `since`, if any; return
        how many seconds ago that was, or None if nobody knows."""
        return self._gaps.arrived(self._take_gap(program, since), now)

    def ended(self, program: str, now: float) -> None:
        """The program is over: count its open gaps as longer than until now."""
        for since in self._since(program):
            if (gap := self._take_gap(program, since)) is not None:
                self._gaps.ended(gap, now)

    def forecast_of(self, program: str) -> Forecast | None:
        """Forecast when what the program left last is continued, counted from then; None if it is
        not away."""
        absence = self._absences.get(program)
        if absence is None or not absence.gaps:
            return None
        return self.forecast_since(program, next(reversed(absence.gaps)))

    def forecast_since(self, program: str, since: float) -> Forecast | None:
        """The same of what it left at `since`."""
        absence = self._absences.get(program)
        gap = None if absence is None else absence.gaps.get(since)
        return None if gap is None else self._gaps.forecast(gap.asked)

    def is_question(self, program: str, since: float) -> bool:
        """Whether all that is known of the program is one answer, given at `since`: it has no name,
        called no tool, and no turn followed. Nothing shows that whoever asked goes on."""
        if program not in self._once:
            return False
        gap = self._absences[program].gaps.get(since)
        return gap is not None and gap.asked.ending is not Ending.CALLS

    def forget_gaps(self) -> None:
        """Drop all gaps without learning from them, because we will not see the programs return."""
        for program in list(self._absences):
            for since in self._since(program):
                if (gap := self._take_gap(program, since)) is not None:
                    self._gaps.drop(gap)

    # --- decisions --------------------------------------------------------------------
    def decided(self, program: Program, decision: OpenDecision, now: float) -> OpenDecision | None:
        """Record the decision for a turn that has ended; it replaces the program's older one.

        If this makes the table forget another program, returns that program's decision.
        """
        self._begin(program, now).decision = decision
        if len(self._absences) <= self._max_programs:
            return None
        oldest = self._absences.pop(next(iter(self._once or self._absences)))
        self._once.pop(oldest.program.key, None)
        for gap in oldest.gaps.values():
            self._gaps.ended(gap, now)
        return oldest.decision

    def decision_of(self, program: str) -> OpenDecision | None:
        """The last decision for the program, if its outcome is not known yet."""
        absence = self._absences.get(program)
        return None if absence is None else absence.decision

    def absence_of(self, program: str) -> Absence | None:
        return self._absences.get(program)

    def decisions(self) -> list[OpenDecision]:
        """All decisions whose outcome is not known yet."""
        return [each.decision for each in self._absences.values() if each.decision is not None]

    def close(self, program: str) -> None:
        """The outcome of the program's decision is known."""
        absence = self._absences.get(program)
        if absence is not None:
            absence.decision = None
            self._keep(absence)

    # --- every step -------------------------------------------------------------------
    def silent(self, now: float) -> Iterator[Absence]:
        """Yield programs away for so long that they count as over: a few per call, longest first.

        If the caller does not end an absence, for example because a pin lasts longer, the absence
        comes up again after all others.
        """
        for absence in list(islice(self._absences.values(), _MAX_SILENT)):
            if absence.since >= now - OVER_S:
                return
            self._absences.move_to_end(absence.program.key)
            yield absence

    # --- parts ------------------------------------------------------------------------
    def _begin(self, program: Program, now: float) -> Absence:
        absence = self._absences.pop(program.key, None) or Absence(program, now, 0)
        absence.program, absence.since, absence.num_turns = program, now, program.num_turns
        self._absences[program.key] = absence
        self._once.pop(program.key, None)
        if program.num_turns == 1 and not program.is_named:
            self._once[program.key] = None
        return absence

    def _since(self, program: str) -> list[float]:
        absence = self._absences.get(program)
        return [] if absence is None else list(absence.gaps)

    def _take_gap(self, program: str, since: float | None) -> Gap | None:
        absence = self._absences.get(program)
        if absence is None or since is None:
            return None
        gap = absence.gaps.pop(since, None)
        self._keep(absence)
        return gap

    def _keep(self, absence: Absence) -> None:
        """Keep the absence only while a gap or its decision is open."""
        if not absence.gaps and absence.decision is None:
            del self._absences[absence.program.key]
            self._once.pop(absence.program.key, None)
