"""DramWorth: what a program's blocks in DRAM are worth, as the policy sees it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from continuum_connector.policy.base import NO_FORECAST, Resident
from continuum_connector.programs.table import ProgramTable
from continuum_connector.scheduler.decider import Decider
from continuum_connector.scheduler.turn import Turn


class DramWorth:
    """Called for a few dozen programs whenever room is made in DRAM."""

    def __init__(self, programs: ProgramTable, decider: Decider) -> None:
        self._programs = programs
        self._decider = decider
        self._turns: Iterable[Turn] = ()  # that wait
        self._waiting: _Waiting | None = None  # until the next step

    def new_step(self, turns: Iterable[Turn]) -> None:
        """`turns`: those that wait, a view that stays true."""
        self._turns, self._waiting = turns, None

    def rank(self, key: str, now: float) -> float:
        """Return the worth of the program's blocks: the lowest leave first."""
        program = self._programs.get(key)
        if program is None:
            return float("-inf")  # forgotten: nobody will recognise it when it returns
        waiting = self._waiting = self._waiting or _Waiting.of(self._turns)
        resident = Resident(
            program=key,
            arrival=program.arrival,
            last_used=program.last_seen,
            finished=None if program.active else program.last_finish,
            gap=self._decider.gaps.forecast_of(key) or NO_FORECAST,
            is_waiting=key in waiting.programs,
            # Program order serves the oldest first: whoever has nobody ahead does not queue.
            queueing_s=self._decider.costs.queueing_s(now) * waiting.share_ahead(program.arrival),
        )
        return self._decider.policy.dram_rank(resident, now)


@dataclass(frozen=True)
class _Waiting:
    """The programs whose turns wait at one moment: asked once for each of dozens of programs."""

    programs: frozenset[str]
    arrivals: list[float]  # one per turn, ascending

    @classmethod
    def of(cls, turns: Iterable[Turn]) -> _Waiting:
        waiting = [turn.program for turn in turns]
        return cls(frozenset(p.key for p in waiting), sorted(p.arrival for p in waiting))

    def share_ahead(self, arrival: float) -> float:
        """The share of them that comes before a program of that arrival."""
        return bisect_left(self.arrivals, arrival) / len(self.arrivals) if self.arrivals else 0.0
