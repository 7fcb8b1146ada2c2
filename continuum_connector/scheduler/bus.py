"""Bus: makes turns wait for it, so that no load holds blocks before the bus can carry it.

A load has its VRAM blocks from the moment it begins. While it waits behind others on the bus, pins
give way to it whose programs come back meanwhile; then those load as well, and the bus is never
free again. So a turn that wants a load waits in the queue, without a block, while the loads under
way keep the bus busy for longer than the next step may take, and is asked again in that step. The
bus does not idle for it, and turns that need no load pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from continuum_connector.costs.costs import Costs
from continuum_connector.scheduler.queue import ProgramQueue
from continuum_connector.scheduler.tiers.traffic import Traffic

# vLLM looks each of them up in every step, which takes 0.1 ms; behind so many it asks nobody.
MAX_PASSED = 16


class Bus:
    """`queues`: ours, in which turns wait. Without them no turn waits here: vLLM's own queues let
    nobody pass, and room has been made for the turn that asks (room.py, Unattached)."""

    def __init__(self, traffic: Traffic, costs: Costs, queues: Sequence[ProgramQueue]) -> None:
        self._traffic = traffic
        self._costs = costs
        self._queues = queues
        self.num_waiting = 0  # in this step, or the last one

    def new_step(self) -> None:
        """Whoever waits is asked again."""
        self.num_waiting = 0
        for queue in self._queues:
            queue.is_open = True

    def is_busy(self, now: float) -> bool:
        """Whether loads under way take longer than until the next step; then the turn that asks
        is passed over in this one."""
        if not self._queues or not self._traffic.num_loads:
            return False
        gone_s = now - self._traffic.loads_since
        left_s = self._costs.bus_s(self._traffic.num_load_blocks) - gone_s
        _, longest_s = self._costs.step_s
        if left_s <= longest_s:
            return False
        self.num_waiting += 1
        if self.num_waiting >= MAX_PASSED:
            for queue in self._queues:
                queue.is_open = False
        return True
