"""Ahead: tells the tiers who has arrived, so that what lies farther away comes nearer meanwhile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from continuum_connector.scheduler.holds import BlockPool
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.turns import Turn, Turns

LOOKS_PER_STEP = 256  # at those that wait unseen
AGAIN_S = 0.01  # whoever is asked for so soon is where it was when it arrived


class Ahead:
    """Asks and answers for turns that wait. Does nothing where no tier is slow to read."""

    def __init__(self, tier: Tier, pool: BlockPool, turns: Turns, token_size: int) -> None:
        """`token_size`: tokens of a block hash."""
        self._reading = tier.ahead
        if tier.ahead is not None:
            tier.ahead.has_waiting = turns.has_waiting
        self._pool = pool
        self._turns = turns
        self._size = token_size
        self._unseen: OrderedDict[str, None] = OrderedDict()
        self._now = 0.0  # of the last look

    def __len__(self) -> int:
        """How many are hidden."""
        return len(self._unseen)

    @property
    def is_needed(self) -> bool:
        return self._reading is not None

    def expect(self, turn: Turn, request: Any, now: float) -> None:
        """The turn has arrived."""
        if self._reading is None or request.skip_reading_prefix_cache:
            return
        program = turn.program
        is_alone = program.num_active <= 1 and not turn.is_stray
        known = self._num_in_vram(request), len(self._turns), is_alone
        self._reading.expect(program.key, request, *known, now)

    def asked(self, turn: Turn, request: Any, now: float) -> bool:
        """vLLM would admit it now; returns whether it is to be passed over. Where it has waited in
        the queue, the tiers look once more: what VRAM or DRAM had when it arrived may have left
        since, and who has not been passed over yet has its whole patience left."""
        if not turn.was_asked:
            turn.was_asked = True
            if now - turn.arrival > AGAIN_S:
                self.expect(turn, request, now)
        return self.awaits(request.request_id, now)

    def awaits(self, request_id: str, now: float) -> bool:
        """Whether vLLM is to pass it over in this step, as more of it will be there soon."""
        self._now = now
        return self._reading is not None and self._reading.awaits(request_id, now)

    def hides(self, request: Any) -> bool:
        """Whether a request that vLLM has just passed over is to wait unseen by whoever admits,
        until `seen` tells of it: vLLM looks up the prompts of all that it sees in every step."""
        if not self.awaits(request.request_id, self._now):
            return False
        self._unseen[request.request_id] = None
        return True

    def seen(self, now: float, everybody: bool = False) -> Iterator[str]:
        """Who was hidden and waits for no tier any more; asked before each step. Looks at a few, so
        that thousands that wait cost a step no more. `everybody`: nobody is hidden any more."""
        num = len(self._unseen)
        for _ in range(num if everybody else min(num, LOOKS_PER_STEP)):
            request_id, _ = self._unseen.popitem(last=False)
            if not everybody and self.awaits(request_id, now):
                self._unseen[request_id] = None
            else:
                yield request_id

    def _num_in_vram(self, request: Any) -> int:
        """About how much of the prompt VRAM has: blocks leave it tail first, and vLLM looks
        exactly when the turn is admitted."""
        hashes = request.block_hashes
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if self._pool.get_cached_block(hashes[middle], [0]) is None:
                high = middle
            else:
                low = middle + 1
        return low * self._size
