"""Batches: of rollouts, when the next one begins and when the weights change.

A batch begins when all of the one before have ended but a share, its overlap: with none it is
synchronous, with some one step off. When the last of a batch ends, the weights change.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean

from bench.common.plans import ProgramPlan, Workload

LATE = 0.9  # stragglers are those that end after so many of their batch

# In a record's `extra`: programs per second, how long the longest batch took, and by how much the
# last of a batch was later than nine of ten, on average.
RATE, BATCH_MAX, LATE_BY = "programs_per_s", "batch_max_s", "late_s"


class Batches:
    """Those of one run; a workload without any is one batch, after which nothing changes."""

    def __init__(self, workload: Workload) -> None:
        self._overlap = workload.overlap
        self._plans: dict[int, list[ProgramPlan]] = defaultdict(list)
        for plan in workload.programs:
            self._plans[plan.batch].append(plan)
        self._batch_of = {plan.name: plan.batch for plan in workload.programs}
        self._ends: dict[int, list[float]] = defaultdict(list)
        self._began = dict.fromkeys(sorted(self._plans)[:1], 0.0)

    def first(self) -> list[ProgramPlan]:
        """Who begins with the run."""
        return self._plans[next(iter(self._began))]

    def ended(self, name: str, now: float) -> tuple[bool, list[ProgramPlan]]:
        """A program has ended: whether the weights change now, and who begins after that."""
        batch = self._batch_of[name]
        self._ends[batch].append(now)
        num_ended, num_all = len(self._ends[batch]), len(self._plans[batch])
        following = batch + 1
        is_last = following not in self._plans
        changes = num_ended == num_all and not is_last
        if is_last or following in self._began:
            return changes, []
        if num_ended < math.ceil(num_all * (1.0 - self._overlap)):
            return changes, []
        self._began[following] = now
        return changes, self._plans[following]

    def figures(self) -> Iterator[tuple[str, float]]:
        """What counts of rollouts; nothing where there is one batch."""
        if len(self._plans) < 2:
            return
        last = {batch: max(ends) for batch, ends in self._ends.items()}
        yield RATE, len(self._batch_of) / max(last.values())
        yield BATCH_MAX, max(last[batch] - began for batch, began in self._began.items())
        yield LATE_BY, fmean(last[batch] - _most(ends) for batch, ends in self._ends.items())


def _most(ends: list[float]) -> float:
    return sorted(ends)[math.ceil(LATE * len(ends)) - 1]
