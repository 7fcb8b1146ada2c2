"""Waiting: the turns that never ran, and what is asked of them whenever room is made in DRAM."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, UserDict

from continuum_connector.scheduler.turn import Turn


class Waiting(UserDict[str, Turn]):
    """By request id. Kept up to date turn by turn: thousands wait, and one ends in each step."""

    def __init__(self) -> None:
        super().__init__()
        self._num_by_program: Counter[str] = Counter()
        self._arrivals: list[float] = []  # of their programs, ascending, one per turn
        self._arrival_of: dict[str, float] = {}  # as it was when the turn came

    def __setitem__(self, request_id: str, turn: Turn) -> None:
        self.pop(request_id, None)
        super().__setitem__(request_id, turn)
        self._num_by_program[turn.program.key] += 1
        self._arrival_of[request_id] = turn.program.arrival
        insort(self._arrivals, turn.program.arrival)

    def __delitem__(self, request_id: str) -> None:
        key = self[request_id].program.key
        super().__delitem__(request_id)
        self._num_by_program[key] -= 1
        if not self._num_by_program[key]:
            del self._num_by_program[key]
        del self._arrivals[bisect_left(self._arrivals, self._arrival_of.pop(request_id))]

    def has_program(self, key: str) -> bool:
        """Whether a turn of the program waits."""
        return key in self._num_by_program

    def share_ahead(self, arrival: float) -> float:
        """The share of the turns whose program comes before one of that arrival."""
        return bisect_left(self._arrivals, arrival) / len(self._arrivals) if self._arrivals else 0.0
