"""Endings: programs that end without a turn, because an operator says so."""

from __future__ import annotations

from continuum_connector.programs.program import ProgramTable
from continuum_connector.scheduler.decider import Decider
from continuum_connector.scheduler.outcomes import Outcomes
from continuum_connector.scheduler.pins import PinEnd
from continuum_connector.scheduler.retention import Retention
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.turns import Turns


class Endings:
    """`end` is all that there is."""

    def __init__(
        self,
        programs: ProgramTable,
        turns: Turns,
        retention: Retention,
        tier: Tier,
        decider: Decider,
        outcomes: Outcomes,
    ) -> None:
        self._programs = programs
        self._turns = turns
        self._retention = retention
        self._tier = tier
        self._decider, self._away = decider, decider.away
        self._outcomes = outcomes

    def end(self, key: str, now: float) -> bool:
        """The program is over; False if it is not known. What its turns left goes before all that
        others have, and those under way are its last. A pin that a turn came back for is that
        turn's."""
        program = self._programs.get(key)
        if program is None:
            return False
        self._turns.make_last(program)
        self._retention.end_all(PinEnd.PROGRAM_DONE, now, key)
        self._tier.demote(key, None)
        program.end()
        if (absence := self._away.absence_of(key)) is not None:
            self._decider.silent(absence, now)
            self._outcomes.silent(absence, now)
        return True
