"""Calibration: of the returns that were foretold with 70 %, did 70 % come?"""

from __future__ import annotations

from dataclasses import dataclass

from continuum_connector.analysis.source import Record, number, text
from continuum_connector.costs import forecast

NUM_BINS = 10


@dataclass
class Bin:
    """Predictions of similar probability: how many, their sum, and how many came true."""

    num: int = 0
    total: float = 0.0
    num_true: int = 0

    @property
    def predicted(self) -> float:
        return self.total / self.num if self.num else 0.0

    @property
    def observed(self) -> float:
        return self.num_true / self.num if self.num else 0.0


class Calibration:
    """Each outcome says with which probability `p` its program was expected back within
    `horizon_s` (a pin's TTL; how long a stored block stays, but no longer than what counts as
    silent), and after which gap it was. Those that nobody can judge are left out: `num_open`.
    """

    def __init__(self) -> None:
        self.bins = [Bin() for _ in range(NUM_BINS)]
        self.num_open = 0

    def add(self, outcome: Record) -> None:
        """Take in an `outcome` record."""
        p, horizon_s = number(outcome, "p"), number(outcome, "horizon_s")
        if text(outcome, "outcome") == "done" or p is None or horizon_s is None:
            return  # a program that is over is expected by nobody
        is_true = came_true(outcome, horizon_s)
        if is_true is None:
            self.num_open += 1
            return
        p = min(max(p, 0.0), 1.0)
        one = self.bins[min(int(p * NUM_BINS), NUM_BINS - 1)]
        one.num += 1
        one.total += p
        one.num_true += is_true

    @property
    def num(self) -> int:
        return sum(one.num for one in self.bins)

    @property
    def error(self) -> float | None:
        """The mean distance of predicted and observed, over all predictions."""
        if not self.num:
            return None
        return sum(abs(one.total - one.num_true) for one in self.bins) / self.num


def came_true(outcome: Record, horizon_s: float) -> bool | None:
    """Whether the program was back in time; None if it was not watched for so long."""
    is_watched = text(outcome, "outcome") != "superseded"
    watched_s = (number(outcome, "open_s") or 0.0) if is_watched else 0.0
    return forecast.came_true(number(outcome, "gap_s"), watched_s, horizon_s)
