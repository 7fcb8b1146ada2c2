"""Order: who is admitted first and who is preempted first, in the places where vLLM looks.

Our queues stand in the place of vLLM's, and vLLM's own back again while we are off. Victims
are vLLM's own choice, the last of `running`; it is `running` that we bring into order.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from continuum_connector.scheduler.queue import Front, ProgramQueue
from continuum_connector.vllm import compat


class Order:
    """Program order, for as long as it is switched on."""

    def __init__(self, scheduler: Any, ours: Any) -> None:
        self._scheduler = scheduler
        self._ours = ours
        self._side = ours.side
        self.queues = ours.side.queues
        self._gate, self._ahead, self._bus = ours.side.gate, ours.side.ahead, ours.side.bus
        self._stock = {
            name: getattr(scheduler, name) for name in compat.queue_attributes(scheduler)
        }
        # The user's own priorities rank before ours, and choose the victims alone.
        self._has_priorities = compat.preempts_by_priority(scheduler)
        self.is_on = False
        self.switch(True)

    def switch(self, is_on: bool) -> None:
        """Turns wait in program order, or in vLLM's. When it becomes vLLM's, those that wait
        already keep their places under fcfs, and stand by their priority otherwise. For between
        two admissions, not within one."""
        self.is_on = is_on
        if is_on:
            self._take_over()
        else:
            self._give_back()

    def open(self) -> None:
        """Let in who may begin by now, before a step; the first who wait for the bus are asked."""
        if self.is_on and (len(self._gate) or len(self._ahead) or self._bus.was_asked):
            num_idle = compat.num_idle_sessions(self._scheduler)
            self._release(self._ours.let_in(num_idle=num_idle))

    def line_up(self, num_short: int) -> None:
        """Put those whom vLLM shall preempt at the end of `running`, for `num_short` blocks.

        For before a step that lacks so many. vLLM serves `running` from its front and takes
        victims off its end, so a victim was never scheduled in the same step. (Its rule for
        priorities takes them from anywhere and rolls them back, whose blocks are then free,
        findable and not computed.) All others stay where they are: in another order a long prompt
        might take the step's tokens from those that decode, or wait behind later ones for ever.
        """
        if not self.is_on or self._has_priorities:
            return
        side, running = self._side, self._scheduler.running
        ranked = sorted(running, key=side.victim_rank)
        victims: list[Any] = []
        while num_short > 0 and len(ranked) > 1:
            victims.append(ranked.pop())
            num_short -= side.groups.least_blocks(victims[-1].num_computed_tokens)
        gone = {request.request_id for request in victims}
        running[:] = [each for each in running if each.request_id not in gone] + victims[::-1]

    def _take_over(self) -> None:
        ours = self._ours
        rank = functools.partial(ours.rank, by_priority=self._has_priorities)
        queues: list[ProgramQueue] = []
        for name, stock in self._stock.items():
            for request in stock:  # they came while we were off
                ours.before_queued(request)
            # New turns come into the first, and into the other one (<= 0.30) if they wait for a
            # grammar.
            holds = ours.holds_back if self._gate.is_on and not self._has_priorities else None
            hides = self._ahead.hides if self._ahead.is_needed else None
            queues.append(ProgramQueue(rank, holds, hides, self._bus.__contains__))
            _move(stock, queues[-1])
            setattr(self._scheduler, name, queues[-1])
        self.queues[:] = queues

    def _give_back(self) -> None:
        self._release(self._ours.let_in(everybody=True))
        self.queues.clear()
        for name, stock in self._stock.items():
            _move(getattr(self._scheduler, name), stock)
            setattr(self._scheduler, name, stock)

    def _release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for queue in self.queues:
                queue.release(request_id)


def _move(source: Any, target: Any) -> None:
    while source:
        target.add_request(source.pop_request())


def end_lost_loads(scheduler: Any, before_queued: Callable[[Any], None] | None) -> None:
    """Before a step: who has lost what it loaded waits as those do who have no KV.

    It may need blocks of those who wait with some. vLLM lets it keep its place among them, where
    it would keep them from being looked at, for ever: a prompt takes more blocks of a window's
    group than its load did, for which vLLM kept them free. `before_queued` names its program, if
    it came while we were switched off; None while we are.
    """
    for request in compat.lost_loads(scheduler):
        compat.end_load(scheduler, request)
        if before_queued is not None:
            before_queued(request)
        compat.wait_without_kv(scheduler, request)


def kv_first(scheduler: Any) -> Front | None:
    """vLLM <= 0.30: a queue with those who wait with KV at its front, if there are any.

    Looked for once a step (schedule() in attach.py forgets them), though vLLM asks before each
    admission: whom a step skips it puts back at its end, so nobody joins them meanwhile, and whom
    it admits is taken off.
    """
    if scheduler.kv_holders is None:
        scheduler.kv_holders = deque(compat.waiting_with_kv(scheduler))
    holders = scheduler.kv_holders
    return Front(scheduler.skipped_waiting, holders) if holders else None
