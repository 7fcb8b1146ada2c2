"""DramWorth: what a program's blocks in DRAM are worth, as the policy sees it."""

from __future__ import annotations

from continuum_connector.policy.base import NO_FORECAST, Resident
from continuum_connector.programs.table import ProgramTable
from continuum_connector.scheduler.decider import Decider
from continuum_connector.scheduler.waiting import Waiting


class DramWorth:
    """Called for a few dozen programs whenever room is made in DRAM."""

    def __init__(self, programs: ProgramTable, decider: Decider, waiting: Waiting) -> None:
        self._programs = programs
        self._decider = decider
        self._waiting = waiting

    def rank(self, key: str, now: float) -> float:
        """Return the worth of the program's blocks: the lowest leave first."""
        program = self._programs.get(key)
        if program is None:
            return float("-inf")  # forgotten: nobody will recognise it when it returns
        share_ahead = self._waiting.share_ahead(program.arrival)
        resident = Resident(
            program=key,
            arrival=program.arrival,
            last_used=program.last_seen,
            finished=None if program.active else program.last_finish,
            gap=self._decider.gaps.forecast_of(key) or NO_FORECAST,
            is_waiting=self._waiting.has_program(key),
            # Program order serves the oldest first: whoever has nobody ahead does not queue.
            queueing_s=self._decider.costs.queueing_s(now) * share_ahead,
        )
        return self._decider.policy.dram_rank(resident, now)
