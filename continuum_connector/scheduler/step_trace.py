"""StepTrace: the engine's steps in the trace, summed up to one record per so many seconds of them.

A busy server takes a hundred steps a second and more, and few of them differ from the one before.
What matters is the worst of them: where blocks ran out, where turns queued, which step our hooks
held up. So a record has the extremes of its steps.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from continuum_connector.scheduler.decisions import Snapshots
from continuum_connector.scheduler.records import Records

# How a record takes in another step; of all else it has the most.
_TOGETHER: dict[str, Any] = {
    "steps": operator.add,
    "free_blocks": min,
    "hook_s": lambda one, other: round(one + other, 7),
}


class StepTrace:
    """One `steps` record per `every_s` seconds. A step that is longer, or the first after a pause,
    has a record of its own at once; the last of a busy time wait for the next step or the stop."""

    def __init__(self, every_s: float, snapshots: Snapshots, records: Records) -> None:
        self._every_s = every_s
        self._snapshots, self._records = snapshots, records
        self._hooks_s = 0.0  # in all, when the last step was put together
        self._begun = self._last = -math.inf  # the first and the last step that are in no record
        self._told = -math.inf  # the last that is in one
        self._open: dict[str, Any] = {}  # what those that are in no record have come to

    def add(self, num_running: int, now: float) -> None:
        """vLLM has put a step together, in which `num_running` turns compute. What our hooks took
        since the step before is this one's."""
        if now - self._begun >= self._every_s:  # there was a pause
            self.flush()
        hooks_s = self._records.account.sum_of("hook_seconds")
        took_s = max(0.0, round(hooks_s - self._hooks_s, 7))
        found: dict[str, float] = {"steps": 1, **self._snapshots.levels(), "running": num_running}
        found |= {"hook_s": took_s, "hook_max_s": took_s}
        if self._open:
            found = {n: _TOGETHER.get(n, max)(v, self._open[n]) for n, v in found.items()}
        else:
            self._begun = now
        self._open, self._last, self._hooks_s = found, now, hooks_s
        if now - self._told >= self._every_s:
            self.flush()

    def flush(self) -> None:
        """Record the steps that are in no record yet, if there are any."""
        found, self._open = self._open, {}
        if found:
            self._told = self._last
            self._records.happened("steps", self._last, **found)
