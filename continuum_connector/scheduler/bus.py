"""Bus: makes turns wait for it, so that no load holds blocks before the bus can carry it.

A load has its VRAM blocks from the moment it begins. While it waits behind others on the bus, pins
give way to it whose programs come back meanwhile; then those load as well, and the bus is never
free again. So a turn that wants a load waits in the queue, without a block, while the loads under
way keep the bus busy for longer than the next step may take. Until then it is not asked again, for
vLLM looks up the whole prompt of each turn that it asks. The bus does not idle for it, and turns
that need no load pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from continuum_connector.costs.costs import Costs
from continuum_connector.scheduler.queue import ProgramQueue
from continuum_connector.scheduler.tiers.traffic import Traffic

# So many turns are told in a step that they wait; behind those it asks nobody.
MAX_PASSED = 16


class Bus:
    """`queues`: ours, in which turns wait. Without them no turn waits here: vLLM's own queues let
    nobody pass, and room has been made for the turn that asks (room.py, Unattached)."""

    def __init__(self, traffic: Traffic, costs: Costs, queues: Sequence[ProgramQueue]) -> None:
        self._traffic = traffic
        self._costs = costs
        self._queues = queues
        self._wanted: dict[str, int] = {}  # blocks of each turn that waits
        self._num_passed = 0  # in this step, or the last one

    def __contains__(self, request_id: str) -> bool:
        """Whether the turn waits."""
        return request_id in self._wanted

    @property
    def was_asked(self) -> bool:
        """Whether a turn waits, or did in the last step."""
        return bool(self._wanted or self._num_passed)

    def is_busy(self, request_id: str, num_blocks: int, now: float) -> bool:
        """Whether loads under way take longer than until the next step; then the turn that asks for
        so many blocks is passed over, and waits."""
        if not self._queues or not self._is_full(0, now):
            return False
        self._wanted[request_id] = num_blocks
        self._num_passed += 1
        if self._num_passed >= MAX_PASSED:
            for queue in self._queues:
                queue.is_open = False
        return True

    def new_step(self, now: float) -> None:
        """The first in line are asked again: as many as fill the bus, or a step's share of them
        where nothing is under way, for they may have no use for it by now."""
        self._num_passed = 0
        for queue in self._queues:
            queue.is_open = True
        is_idle, num_recalled, num_blocks = not self._traffic.num_loads, 0, 0
        while self._wanted:
            if num_recalled == MAX_PASSED if is_idle else self._is_full(num_blocks, now):
                return
            num_blocks += self._recall()
            num_recalled += 1

    def end(self) -> None:
        """Nobody waits any more."""
        self._num_passed = 0
        while self._wanted:
            self._recall()
        for queue in self._queues:
            queue.is_open = True

    def left(self, request_id: str) -> None:
        """The turn is over."""
        self._wanted.pop(request_id, None)

    # --- parts ------------------------------------------------------------------------
    def _recall(self) -> int:
        """Have the first in line asked again; returns how many blocks it wanted."""
        firsts = [(first, queue) for queue in self._queues if (first := queue.first_aside)]
        if not firsts:  # who is left stands where vLLM's own queue has those with KV
            self._wanted.clear()
            return 0
        (_, request_id), queue = min(firsts, key=lambda each: each[0])
        queue.release(request_id)
        return self._wanted.pop(request_id, 0)

    def _is_full(self, num_more: int, now: float) -> bool:
        """Whether the bus has enough until the next step, if it is to bring so many blocks more."""
        if not self._traffic.num_loads:
            return False
        gone_s = now - self._traffic.loads_since
        left_s = self._costs.bus_s(self._traffic.num_load_blocks + num_more) - gone_s
        _, longest_s = self._costs.step_s
        return left_s > longest_s
