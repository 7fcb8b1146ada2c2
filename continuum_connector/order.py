"""Order: our queues in the place of vLLM's, and vLLM's own back again while we are off."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

from continuum_connector import compat
from continuum_connector.scheduler.queue import Front, ProgramQueue


class Order:
    """`ranks_victims`: whether vLLM preempts by what we write into the requests; not where the
    user's own priorities are in force, nor while we are off."""

    def __init__(self, scheduler: Any, ours: Any) -> None:
        self._scheduler = scheduler
        self._ours = ours
        self._stock = {
            name: getattr(scheduler, name) for name in compat.queue_attributes(scheduler)
        }
        self.ranks_victims = False
        self.switch(True)

    def switch(self, is_on: bool) -> None:
        """Turns wait in program order, or in vLLM's. When it becomes vLLM's, those that wait
        already keep their places under fcfs, and stand by their priority otherwise. For between
        two admissions, not within one."""
        if is_on:
            self._take_over()
        else:
            self._give_back()

    def _take_over(self) -> None:
        ours = self._ours
        self.ranks_victims = compat.rank_victims_by_request(self._scheduler)
        rank = functools.partial(ours.rank, by_priority=not self.ranks_victims)
        queues = []
        for name, stock in self._stock.items():
            for request in stock:  # they came while we were off
                ours.before_queued(request, self.ranks_victims)
            queues.append(ProgramQueue(rank, ours.side.program_of))
            _move(stock, queues[-1])
            setattr(self._scheduler, name, queues[-1])
        ours.side.retention.queues = tuple(queues)

    def _give_back(self) -> None:
        compat.rank_victims_as_configured(self._scheduler)
        self.ranks_victims = False
        self._ours.side.retention.queues = ()
        for name, stock in self._stock.items():
            _move(getattr(self._scheduler, name), stock)
            setattr(self._scheduler, name, stock)


def _move(source: Any, target: Any) -> None:
    while source:
        target.add_request(source.pop_request())


def kv_first(scheduler: Any, step: int) -> Front | None:
    """vLLM <= 0.30: a queue with those who wait with KV at its front, if there are any.

    Looked for once a step, though vLLM asks before each admission: whom a step skips it puts back
    at its end, so nobody joins them meanwhile, and whom it admits is taken off.
    """
    seen, holders = getattr(scheduler, "_continuum_kv_first", (None, deque[Any]()))
    if seen != step:
        holders = deque(compat.waiting_with_kv(scheduler))
        scheduler._continuum_kv_first = step, holders
    return Front(scheduler.skipped_waiting, holders) if holders else None
