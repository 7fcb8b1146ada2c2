"""Order: who is admitted first and who is preempted first, in the places where vLLM looks.

Our queues stand in the place of vLLM's, and vLLM's own back again while we are off. Victims
are vLLM's own choice, the last of `running`; it is `running` that we bring into order.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

from continuum_connector import compat
from continuum_connector.scheduler.queue import Front, ProgramQueue


class Order:
    """Program order, for as long as it is switched on."""

    def __init__(self, scheduler: Any, ours: Any) -> None:
        self._scheduler = scheduler
        self._ours = ours
        self._stock = {
            name: getattr(scheduler, name) for name in compat.queue_attributes(scheduler)
        }
        # The user's own priorities rank before ours, and choose the victims alone.
        self._has_priorities = compat.preempts_by_priority(scheduler)
        self._is_on = False
        self.switch(True)

    def switch(self, is_on: bool) -> None:
        """Turns wait in program order, or in vLLM's. When it becomes vLLM's, those that wait
        already keep their places under fcfs, and stand by their priority otherwise. For between
        two admissions, not within one."""
        self._is_on = is_on
        if is_on:
            self._take_over()
        else:
            self._give_back()

    def line_up(self) -> None:
        """Let vLLM preempt last turns last, and the turns of the latest program first.

        For before a step in which somebody may be preempted. vLLM serves `running` from its
        front and takes victims off its end, so a victim was never scheduled in the same step.
        (Its rule for priorities takes them from anywhere and rolls them back, whose blocks are
        then free, findable and not computed.) Prompts under way stay behind those that decode,
        or a long one would take the whole step's tokens from them, and are taken first.
        """
        if self._is_on and not self._has_priorities:
            self._scheduler.running.sort(key=self._ours.victim_rank)

    def _take_over(self) -> None:
        ours = self._ours
        rank = functools.partial(ours.rank, by_priority=self._has_priorities)
        queues = []
        for name, stock in self._stock.items():
            for request in stock:  # they came while we were off
                ours.before_queued(request)
            queues.append(ProgramQueue(rank))
            _move(stock, queues[-1])
            setattr(self._scheduler, name, queues[-1])
        ours.side.retention.queues = tuple(queues)

    def _give_back(self) -> None:
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
