"""Turns that wait in the queue for a copy, without a block: for the bus, or from below DRAM.

Bus makes turns wait for the bus, so that no load holds blocks before the bus can carry it.
FromBelow tells the tiers which turns have arrived, so that they bring blocks nearer meanwhile, and
hides those that wait for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from continuum_connector.costs.costs import Costs
from continuum_connector.costs.pressure import Level
from continuum_connector.scheduler.holds import BlockPool
from continuum_connector.scheduler.queue import ProgramQueue
from continuum_connector.scheduler.tiers.base import Tier
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

    def __init__(
        self, traffic: Traffic, costs: Costs, queues: Sequence[ProgramQueue], turns: Turns
    ) -> None:
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

    @property
    def has_turns(self) -> bool:
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
            for queue in self._queues:
                queue.admit(False)
        return True

    def new_step(self, now: float) -> None:
        """Let vLLM ask the first turns in line again: as many as fill the bus. If no load is under
        way, a step's share of them (MAX_PASSED), since they may not need a load any more."""
        self._num_passed = 0
        for queue in self._queues:
            queue.admit(True)
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
        for queue in self._queues:
            queue.admit(True)

    def left(self, turn: Turn) -> int:
        """The turn waits no more, or is over. Returns how many blocks it wanted."""
        num_wanted = turn.num_wanted
        self._num_waiting -= num_wanted > 0
        turn.set_num_wanted(0)
        return num_wanted

    # --- parts ------------------------------------------------------------------------
    def _recall(self) -> int:
        """Let vLLM ask the first turn in line again; returns how many blocks it wanted."""
        firsts = [(first, queue) for queue in self._queues if (first := queue.first_aside)]
        if not firsts:  # the turns left stand where vLLM's own queue keeps those with KV
            for each in self._turns.all():
                self.left(each)
            return 0
        (_, request_id), queue = min(firsts, key=lambda each: each[0])
        queue.release(request_id)
        turn = self._turns.get(request_id)
        return self.left(turn) if turn is not None else 0

    def _is_full(self, num_more: int, now: float) -> bool:
        """Whether the loads under way and `num_more` blocks keep the bus busy until after the next
        step."""
        if not self._traffic.num_loads:
            return False
        gone_s = now - self._traffic.loads_since
        left_s = self._costs.bus_s(self._traffic.num_load_blocks + num_more) - gone_s
        _, longest_s = self._costs.step_s
        return left_s > longest_s


CHECKED_PER_STEP = 256  # hidden turns that a step looks at
AGAIN_S = 0.01  # a turn admitted sooner than this is not looked up again: its blocks hardly moved


class FromBelow:
    """Has blocks brought up to DRAM for waiting turns, and hides from vLLM the turns that wait for
    them. Does nothing where none can come up."""

    def __init__(self, tier: Tier, pool: BlockPool, turns: Turns, token_size: int) -> None:
        """`token_size`: tokens per block hash."""
        self._below = tier.below
        self._pool = pool
        self._turns = turns
        self._size = token_size
        self._hidden: OrderedDict[str, None] = OrderedDict()
        self._now = 0.0  # of the last call of `awaits`

    def __len__(self) -> int:
        """How many turns are hidden."""
        return len(self._hidden)

    @property
    def is_needed(self) -> bool:
        return self._below.brings_up

    def expect(self, turn: Turn, request: Any, now: float) -> None:
        """The turn has arrived: the tiers may begin to bring up what it wants."""
        if not self._below.brings_up or request.skip_reading_prefix_cache:
            return
        below = self._below.expect(
            turn.program.key,
            request,
            num_vram_tokens=self._num_in_vram(request),
            num_turns=len(self._turns),
            now=now,
            before=turn.below,
        )
        turn.set_below(below)

    def must_wait(self, turn: Turn, request: Any, now: float) -> bool:
        """vLLM would admit the turn now; return whether vLLM should pass it over.

        If the turn has waited in the queue, the tiers look once more: its blocks may have left VRAM
        or DRAM since it arrived. It has not been passed over yet, so its patience begins anew.
        """
        if not turn.was_tried:
            turn.note_tried()
            if now - turn.arrival > AGAIN_S:
                self.expect(turn, request, now)
        return self.awaits(request.request_id, now)

    def awaits(self, request_id: str, now: float) -> bool:
        """Whether vLLM should pass the turn over in this step, as more of its KV will be in DRAM
        soon."""
        self._now = now
        return self._below.awaits(request_id, now)

    def hides(self, request: Any) -> bool:
        """Whether to hide from vLLM a request that it has just passed over, until `let_in` yields
        it. In every step vLLM looks up the prompts of all requests that it sees."""
        if not self.awaits(request.request_id, self._now):
            return False
        self._hidden[request.request_id] = None
        return True

    def let_in(self, now: float, everybody: bool = False) -> Iterator[str]:
        """Yield the hidden requests that no longer wait for a tier; called before each step.

        Looks at a limited number of them, so that thousands of hidden requests make no step slower.
        `everybody`: yield all of them, so that none stays hidden.
        """
        num = len(self._hidden)
        for _ in range(num if everybody else min(num, CHECKED_PER_STEP)):
            request_id, _ = self._hidden.popitem(last=False)
            if not everybody and self.awaits(request_id, now):
                self._hidden[request_id] = None
            else:
                yield request_id

    def _num_in_vram(self, request: Any) -> int:
        """How many tokens of the prompt VRAM has, block by block as vLLM looks when it admits the
        turn: a chain's tail, held by its store, may outlast the head."""
        hashes, find = request.block_hashes, self._pool.get_cached_block
        missing = (number for number, each in enumerate(hashes) if find(each, [0]) is None)
        return next(missing, len(hashes)) * self._size
