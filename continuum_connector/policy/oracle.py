"""Oracle: adaptive with the forecast of one who knows. For the lab, not for servers.

What adaptive loses against it is what better forecasts could still gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from continuum_connector.costs.forecast import Forecast
from continuum_connector.policy.adaptive import Adaptive
from continuum_connector.policy.base import Choice, FinishedTurn, Resident, Snapshot

# Program, now -> seconds until its next turn arrives, None if there is none. Asked when a turn
# has ended or lies in the pause after it. Raises LookupError if nobody knows.
Away = Callable[[str, float], float | None]


class Oracle(Adaptive):
    """Values everything as adaptive does, with the true gap in place of its forecast.

    Where nobody knows the true gap, as of a program that does not name itself, it is adaptive.
    """

    name = "oracle"

    def __init__(self, away: Away, max_ttl_s: float) -> None:
        super().__init__(max_ttl_s)
        self._away = away

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        try:
            gap_s = self._away(turn.program, snapshot.now)
        except LookupError:
            return super().decide(turn, snapshot)
        gap = Forecast.never() if gap_s is None else Forecast.known(gap_s)
        return super().decide(replace(turn, gap=gap), snapshot)

    def dram_rank(self, resident: Resident, now: float) -> float:
        """As adaptive's; the blocks of a program that is not coming back are worth nothing."""
        if resident.is_waiting:
            return super().dram_rank(resident, now)
        try:
            away_s = self._away(resident.program, now)
        except LookupError:
            return super().dram_rank(resident, now)
        return float("-inf") if away_s is None else -away_s - resident.queueing_s
