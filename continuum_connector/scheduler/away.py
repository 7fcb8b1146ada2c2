"""Away: the programs whose last turn has ended, until their next one runs. The one record of them.

What is to be learned of an absence, how long it lasts, is its gap; what is to be told of it, how
good the decision was, its decision. Decider and Outcomes end these; no other table knows who is
away, and nobody else looks for those that are silent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from continuum_connector.forecast.forecast import Forecast
from continuum_connector.forecast.gaps import Gap, Gaps
from continuum_connector.programs.program import OVER_S, Program
from continuum_connector.scheduler.pins import PinEnd
from continuum_connector.scheduler.turns import Turn
from continuum_connector.toolcalls.asked import Asked

_NUM_LOOKS = 8  # per step: after a quiet night thousands may be over at once


@dataclass(eq=False)
class OpenDecision:
    """A decision whose outcome is not known. Of the finished turn, only what will be told: there
    are thousands of them, and a forecast has 6 KB. `p`: the probability that its program is
    back within `horizon_s`. `back`: turns that arrived since and wait, and whether each fits
    the pin; None if the pin was gone by then."""

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


@dataclass(eq=False)
class Absence:
    """Since the last turn ended, `num_turns` of the program. `gap`: until its next turn arrives,
    None as well while another is under way. `decision`: until its next turn is admitted."""

    program: Program
    since: float
    num_turns: int
    gap: Gap | None = None
    decision: OpenDecision | None = None


class Away:
    """By program, about `max_programs` of them; beyond, the one away longest is forgotten, neither
    seen to be over nor to come back. Microseconds per call."""

    def __init__(self, gaps: Gaps, max_programs: int) -> None:
        self._gaps = gaps
        self._max_programs = max_programs
        self._absences: OrderedDict[str, Absence] = OrderedDict()  # who is away longest is first

    def __len__(self) -> int:
        return len(self._absences)

    # --- gaps -------------------------------------------------------------------------
    def left(self, program: Program, asked: Asked, now: float) -> None:
        """The last of the program's turns that were under way has ended with `asked`."""
        absence = self._begin(program, now)
        if absence.gap is not None:
            self._gaps.drop(absence.gap)
        absence.gap = self._gaps.begin(asked, now)

    def arrived(self, program: str, now: float) -> float | None:
        """The program is back; return for how many seconds it was away, None if it was not."""
        return self._gaps.arrived(self._take_gap(program), now)

    def ended(self, program: str, now: float) -> None:
        """The program is over: its gap, if open, lasts longer than until now."""
        gap = self._take_gap(program)
        if gap is not None:
            self._gaps.ended(gap, now)

    def forecast_of(self, program: str) -> Forecast | None:
        """When the program will be back, counted from when it left; None if it is not away."""
        absence = self._absences.get(program)
        return self._gaps.forecast(absence.gap.asked) if absence and absence.gap else None

    def forget_gaps(self) -> None:
        """Nobody will see programs come back: their gaps are neither ended nor lasting."""
        for program in list(self._absences):
            gap = self._take_gap(program)
            if gap is not None:
                self._gaps.drop(gap)

    # --- decisions --------------------------------------------------------------------
    def decided(self, program: Program, decision: OpenDecision, now: float) -> OpenDecision | None:
        """Something was decided for a turn that has ended, in place of what was before. Returns
        the decision of whom is forgotten for it, if somebody is."""
        self._begin(program, now).decision = decision
        if len(self._absences) <= self._max_programs:
            return None
        _, oldest = self._absences.popitem(last=False)
        if oldest.gap is not None:
            self._gaps.ended(oldest.gap, now)
        return oldest.decision

    def decision_of(self, program: str) -> OpenDecision | None:
        """What was decided last for the program, if its outcome is not known."""
        absence = self._absences.get(program)
        return None if absence is None else absence.decision

    def decisions(self) -> list[OpenDecision]:
        """All whose outcome is not known."""
        return [each.decision for each in self._absences.values() if each.decision is not None]

    def close(self, program: str) -> None:
        """The outcome of the program's decision is known."""
        absence = self._absences.get(program)
        if absence is not None:
            absence.decision = None
            self._keep(absence)

    # --- every step -------------------------------------------------------------------
    def silent(self, now: float) -> Iterator[Absence]:
        """Those away for so long that they count as over, a few per call, the longest first.

        Whom nobody ends, as one whose pin lasts longer, comes up again after all others.
        """
        for _ in range(min(_NUM_LOOKS, len(self._absences))):
            program, absence = next(iter(self._absences.items()))
            if absence.since >= now - OVER_S:
                return
            self._absences.move_to_end(program)
            yield absence

    # --- parts ------------------------------------------------------------------------
    def _begin(self, program: Program, now: float) -> Absence:
        absence = self._absences.pop(program.key, None) or Absence(program, now, 0)
        absence.program, absence.since, absence.num_turns = program, now, program.num_turns
        self._absences[program.key] = absence
        return absence

    def _take_gap(self, program: str) -> Gap | None:
        absence = self._absences.get(program)
        if absence is None:
            return None
        gap, absence.gap = absence.gap, None
        self._keep(absence)
        return gap

    def _keep(self, absence: Absence) -> None:
        """Forget it once nothing of it is open."""
        if absence.gap is None and absence.decision is None:
            del self._absences[absence.program.key]
