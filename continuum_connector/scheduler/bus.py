"""Bus: makes turns wait for the bus, so that no load holds blocks before the bus can carry it.

A load has its VRAM blocks from the moment it begins. While it waits behind other loads, pins give
way to it. The programs of those pins return meanwhile and must load as well, and the bus is never
free again. So a turn that wants a load waits in the queue, without a block, while the loads under
way keep the bus busy for longer than the next step may take. vLLM does not ask it again until then,
because vLLM looks up the whole prompt of each turn that it asks. The bus never idles because of
this, and turns that need no load pass the waiting ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from continuum_connector.costs.costs import Costs
from continuum_connector.scheduler.queue import ProgramQueue
from continuum_connector.scheduler.tiers.traffic import Traffic

# At most this many turns per step are told to wait; after them vLLM asks no further turn.
MAX_PASSED = 16


class Bus:
    """`queues`: our queues, in which turns wait. Without them no turn waits for the bus: in vLLM's
    own queues no turn may pass another, and room has already been made for the turn that asks
    (room.py, Unattached)."""

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
        """Whether a turn waits, or was passed over in the last step."""
        return bool(self._wanted or self._num_passed)

    def is_busy(self, request_id: str, num_blocks: int, now: float) -> bool:
        """Whether the loads under way will take longer than the next step. If so, the turn, which
        asks to load `num_blocks`, is passed over and waits."""
        if not self._queues or not self._is_full(0, now):
            return False
        self._wanted[request_id] = num_blocks
        self._num_passed += 1
        if self._num_passed >= MAX_PASSED:
            for queue in self._queues:
                queue.is_open = False
        return True

    def new_step(self, now: float) -> None:
        """Let vLLM ask the first turns in line again: as many as fill the bus. If no load is under
        way, a step's share of them (MAX_PASSED), since they may not need a load any more."""
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
        """Let vLLM ask all turns again; none waits for the bus any more."""
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
        """Let vLLM ask the first turn in line again; returns how many blocks it wanted."""
        firsts = [(first, queue) for queue in self._queues if (first := queue.first_aside)]
        if not firsts:  # the turns left stand where vLLM's own queue keeps those with KV
            self._wanted.clear()
            return 0
        (_, request_id), queue = min(firsts, key=lambda each: each[0])
        queue.release(request_id)
        return self._wanted.pop(request_id, 0)

    def _is_full(self, num_more: int, now: float) -> bool:
        """Whether the loads under way and `num_more` blocks keep the bus busy until after the next
        step."""
        if not self._traffic.num_loads:
            return False
        gone_s = now - self._traffic.loads_since
        left_s = self._costs.bus_s(self._traffic.num_load_blocks + num_more) - gone_s
        _, longest_s = self._costs.step_s
        return left_s > longest_s
