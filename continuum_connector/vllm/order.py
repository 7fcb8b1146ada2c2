"""Order: which turn is admitted and which is preempted first, in the places where vLLM looks.

Our queues replace vLLM's, which come back while we are switched off. vLLM chooses the victims
itself, from the end of `running`; we only change the order of `running`.
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
        self._waits, self._queues = ours.side.waits, ours.side.queues
        self._stock = {
            name: getattr(scheduler, name) for name in compat.queue_attributes(scheduler)
        }
        # The user's own priorities rank before our order, and alone decide the victims.
        self._has_priorities = compat.preempts_by_priority(scheduler)
        self.is_on = False
        self.switch(True)

    def switch(self, is_on: bool) -> None:
        """Make turns wait in program order, or in vLLM's. When it becomes vLLM's, turns that wait
        already keep their places under fcfs, and are ordered by priority otherwise. Call it
        between two admissions, not within one."""
        self.is_on = is_on
        if is_on:
            self._take_over()
        else:
            self._give_back()

    def open(self) -> None:
        """Before a step, let in the turns that may begin by now, and ask again those that are next
        in line for the bus."""
        if self.is_on and self._waits.are_due():
            self._ours.let_in(compat.num_idle_sessions(self._scheduler))

    def close(self) -> None:
        """After a step: turns at the gate, or without an adapter's place, wait because we hold
        them, so they are no backlog."""
        if self.is_on and (held := list(self._waits.held())):
            requests = map(self._scheduler.requests.get, held)
            compat.count_no_backlog(self._scheduler, filter(None, requests))

    def line_up(self, num_short: int) -> None:
        """Put the turns that vLLM shall preempt for `num_short` blocks at the end of `running`.

        Call it before a step that lacks so many. vLLM serves `running` from its front and takes
        victims from its end, so no victim was scheduled in the same step. (Its rule for priorities
        takes victims from anywhere and rolls them back; their blocks are then free and can be
        found, although they were not computed.) All other turns stay where they are: in another
        order, a long prompt might take the step's tokens from turns that decode, or wait behind
        later turns for ever.
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
        """Put queues of ours in the place of vLLM's, whose order is nobody's to choose."""
        ours = self._ours
        rank = functools.partial(ours.rank, by_priority=self._has_priorities)
        has_gate = not self._has_priorities
        queues: list[ProgramQueue] = []
        for name, stock in self._stock.items():
            for request in stock:  # they came while we were off
                ours.before_queued(request)
            # New turns join the first queue, or the other one (<= 0.30) if they wait for a grammar.
            queue = self._waits.make_queue(rank, _is_new, has_gate)
            _move(stock, queue)
            setattr(self._scheduler, name, queue)
            queues.append(queue)
        self._queues.use(queues)

    def _give_back(self) -> None:
        """Put vLLM's own queues back, with those that wait."""
        self._ours.let_all_in()
        self._queues.use(())
        for name, stock in self._stock.items():
            _move(getattr(self._scheduler, name), stock)
            setattr(self._scheduler, name, stock)


def _is_new(request: Any) -> bool:
    """Whether it has never run."""
    return not (compat.is_preempted(request) or compat.holds_kv(request))


def _move(source: Any, target: Any) -> None:
    while source:
        target.add_request(source.pop_request())


def end_lost_loads(
    scheduler: Any, requests: Iterable[Any], before_queued: Callable[[Any], None] | None
) -> None:
    """Before a step, make the turns that have lost what they loaded wait like turns without KV.

    Such a turn may need blocks of turns that wait with KV. vLLM lets it keep its place among them,
    where it could keep vLLM from looking at them for ever: a prompt takes more blocks of a window's
    group than its load did, and vLLM kept free only those of the load. `before_queued` names the
    program of a turn that came while we were switched off; it is None while we are.
    """
    for request in requests:
        compat.end_load(scheduler, request)
        if before_queued is not None:
            before_queued(request)
        compat.wait_without_kv(scheduler, request)


class KvFirst:
    """vLLM <= 0.30: finds the turns that wait with KV, which are to be admitted first.

    They are looked for once a step, although vLLM asks before each admission. A step puts the turns
    that it skips back only at its end, so none joins meanwhile, and a turn that it admits is taken
    off.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._holders: deque[Any] | None = None  # of this step; None until they are looked for

    def new_step(self) -> None:
        self._holders = None

    def front(self) -> Front | None:
        """Return a queue with these turns at its front; None if there are none."""
        if self._holders is None:
            self._holders = deque(compat.waiting_with_kv(self._scheduler))
        return Front(self._scheduler.skipped_waiting, self._holders) if self._holders else None
