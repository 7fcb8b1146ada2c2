"""DramWorth: what a program's blocks in DRAM are worth, as the policy sees it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from continuum_connector.policy.base import NO_FORECAST, Resident
from continuum_connector.programs.table import ProgramTable
from continuum_connector.scheduler.decider import Decider
from continuum_connector.scheduler.turn import Turn


class DramWorth:
    """Called for a few dozen programs whenever room is made in DRAM."""

    def __init__(self, programs: ProgramTable, decider: Decider) -> None:
        self._programs = programs
        self._decider = decider
        self._turns: Iterable[Turn] = ()
        self._arrivals: list[float] | None = None  # of waiting programs, until the next step

    def new_step(self, turns: Iterable[Turn]) -> None:
        """`turns`: those that are there, a view that stays true."""
        self._turns, self._arrivals = turns, None

    def rank(self, key: str, now: float) -> float:
        """Return the worth of the program's blocks: the lowest leave first."""
        program = self._programs.get(key)
        if program is None:
            return float("-inf")  # forgotten: nobody will recognise it when it returns
        arrivals = self._waiting()
        is_waiting = any(not t.is_admitted and t.program is program for t in self._turns)
        ahead = bisect_left(arrivals, program.arrival) / len(arrivals) if arrivals else 0.0
        resident = Resident(
            program=key,
            arrival=program.arrival,
            last_used=program.last_seen,
            finished=None if program.active else program.last_finish,
            gap=self._decider.gaps.forecast_of(key) or NO_FORECAST,
            is_waiting=is_waiting,
            # Program order serves the oldest first: whoever has nobody ahead does not queue.
            queueing_s=self._decider.costs.queueing_s(now) * ahead,
        )
        return self._decider.policy.dram_rank(resident, now)

    def _waiting(self) -> list[float]:
        if self._arrivals is None:
            waiting = (turn for turn in self._turns if not turn.is_admitted)
            self._arrivals = sorted(turn.program.arrival for turn in waiting)
        return self._arrivals
