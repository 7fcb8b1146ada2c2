"""Bus: turns that want a load wait for it in the queue, without a block, until the bus is free."""

from __future__ import annotations

from continuum_connector.costs.costs import Costs
from continuum_connector.costs.pressure import Level
from continuum_connector.scheduler.queue import Queues
from continuum_connector.scheduler.tiers.traffic import Traffic
from continuum_connector.scheduler.turns import Turn, Turns

# At most this many turns per step are told to wait; after them vLLM asks no further turn.
MAX_PASSED = 16
TIME_CONSTANT_S = 10.0  # many loads, of a second or less, with the wait before them


class Bus:
    """Makes turns that want a load wait while the bus is full.

    A load has its VRAM blocks from the moment it begins. While it waits behind other loads, pins
    give way to it. The programs of those pins return meanwhile and must load as well, and the bus
    is never free again. So a turn that wants a load waits in the queue, without a block, while the
    loads under way keep the bus busy for longer than the next step may take. vLLM does not ask it
    again until then, because vLLM looks up the whole prompt of each turn that it asks. The bus
    never idles because of this, and turns that need no load pass the waiting ones.

    `queues`: our queues, in which turns wait. Without them no turn waits for the bus: in vLLM's
    own queues no turn may pass another. A turn's own record says what it wants."""

    is_on = True

    def __init__(self, traffic: Traffic, costs: Costs, queues: Queues, turns: Turns) -> None:
        self._traffic = traffic
        self._costs = costs
        self._queues = queues
        self._turns = turns
        self._num_waiting = 0
        self._num_passed = 0  # in this step, or the last one
        self._level = Level(TIME_CONSTANT_S)  # of turns that load, or wait to

    def __contains__(self, request_id: str) -> bool:
        """Whether the turn waits."""
        turn = self._turns.get(request_id)
        return turn is not None and turn.num_wanted > 0

    def is_due(self) -> bool:
        """Whether a turn waits, or was passed over in the last step."""
        return bool(self._num_waiting or self._num_passed)

    def hold_back(self, turn: Turn, num_blocks: int, now: float) -> bool:
        """Make the turn, which asks to load `num_blocks`, wait if the loads under way will take
        longer than the next step; return whether it does."""
        if not self._queues or not self._is_full(0, now):
            return False
        self._num_waiting += not turn.num_wanted
        turn.set_num_wanted(num_blocks)
        self._num_passed += 1
        if self._num_passed >= MAX_PASSED:
            self._queues.set_open(False)
        return True

    def new_step(self, now: float) -> None:
        """Let vLLM ask the first turns in line again: as many as fill the bus. If no load is under
        way, a step's share of them (MAX_PASSED), since they may not need a load any more."""
        self._num_passed = 0
        self._queues.set_open(True)
        is_idle, num_recalled, num_blocks = not self._traffic.num_loads, 0, 0
        while self._num_waiting:
            is_enough = num_recalled == MAX_PASSED if is_idle else self._is_full(num_blocks, now)
            if is_enough:
                return
            num_blocks += self._recall()
            num_recalled += 1

    def count(self, now: float) -> None:
        """A step is planned: see how many turns load, or wait to."""
        self._level.set(self._traffic.num_loads + self._num_waiting, now)

    def num_turns(self, now: float) -> float:
        """The recent average of that: one more load delays each of them by its time on the bus."""
        return self._level.mean(now)

    def end(self) -> None:
        """Let vLLM ask all turns again; none waits for the bus any more."""
        self._num_passed = 0
        while self._num_waiting:
            self._recall()
        self._queues.set_open(True)

    def left(self, turn: Turn) -> None:
        """The turn waits no more, or is over."""
        if turn.num_wanted:
            self._num_waiting -= 1
            turn.set_num_wanted(0)

    # --- parts ------------------------------------------------------------------------
    def _recall(self) -> int:
        """Let vLLM ask the first turn in line again; returns how many blocks it wanted."""
        request_id = self._queues.release_first_aside()
        if request_id is None:  # the turns left stand where vLLM's own queue keeps those with KV
            for each in self._turns.all():
                self.left(each)
            return 0
        turn = self._turns.get(request_id)
        if turn is None:
            return 0
        num_wanted = turn.num_wanted
        self.left(turn)
        return num_wanted

    def _is_full(self, num_more: int, now: float) -> bool:
        """Whether the loads under way and `num_more` blocks keep the bus busy until after the next
        step."""
        if not self._traffic.num_loads:
            return False
        gone_s = now - self._traffic.loads_since
        left_s = self._costs.bus_s(self._traffic.num_load_blocks + num_more) - gone_s
        _, longest_s = self._costs.step_s
        return left_s > longest_s
