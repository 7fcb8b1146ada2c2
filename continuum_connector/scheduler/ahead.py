"""Ahead: tells the tiers which turns have arrived, so that they bring blocks nearer meanwhile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from continuum_connector.scheduler.holds import BlockPool
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.turns import Turn, Turns

LOOKS_PER_STEP = 256  # hidden turns that one step looks at
AGAIN_S = 0.01  # within this time after a turn's arrival, its blocks have hardly moved


class Ahead:
    """Starts the reads of waiting turns, and says which turns wait for them. Does nothing where no
    tier is slow to read."""

    def __init__(self, tier: Tier, pool: BlockPool, turns: Turns, token_size: int) -> None:
        """`token_size`: tokens per block hash."""
        self._reading = tier.ahead
        if tier.ahead is not None:
            tier.ahead.has_waiting = turns.has_waiting
        self._pool = pool
        self._turns = turns
        self._size = token_size
        self._unseen: OrderedDict[str, None] = OrderedDict()
        self._now = 0.0  # of the last call of `awaits`

    def __len__(self) -> int:
        """How many turns are hidden."""
        return len(self._unseen)

    @property
    def is_needed(self) -> bool:
        return self._reading is not None

    def expect(self, turn: Turn, request: Any, now: float) -> None:
        """The turn has arrived: the tiers may begin to read for it."""
        if self._reading is None or request.skip_reading_prefix_cache:
            return
        program = turn.program
        is_alone = program.num_active <= 1 and not turn.is_stray
        known = self._num_in_vram(request), len(self._turns), is_alone
        told = self._reading.expect(program.key, request, *known, now)
        if told is not None:
            before = turn.on_disk  # what was read since is in DRAM by now
            told.num_tokens = max(told.num_tokens, before.num_tokens if before else 0)
            turn.on_disk = told

    def asked(self, turn: Turn, request: Any, now: float) -> bool:
        """vLLM would admit the turn now; return whether vLLM should pass it over.

        If the turn has waited in the queue, the tiers look once more: its blocks may have left VRAM
        or DRAM since it arrived. It has not been passed over yet, so its patience begins anew.
        """
        if not turn.was_asked:
            turn.was_asked = True
            if now - turn.arrival > AGAIN_S:
                self.expect(turn, request, now)
        return self.awaits(request.request_id, now)

    def awaits(self, request_id: str, now: float) -> bool:
        """Whether vLLM should pass the turn over in this step, as more of its KV will be in DRAM
        soon."""
        self._now = now
        return self._reading is not None and self._reading.awaits(request_id, now)

    def hides(self, request: Any) -> bool:
        """Whether to hide from vLLM a request that it has just passed over, until `seen` yields it.
        In every step vLLM looks up the prompts of all requests that it sees."""
        if not self.awaits(request.request_id, self._now):
            return False
        self._unseen[request.request_id] = None
        return True

    def seen(self, now: float, everybody: bool = False) -> Iterator[str]:
        """Yield the hidden requests that no longer wait for a tier; called before each step.

        Looks at a limited number of them, so that thousands of hidden requests make no step slower.
        `everybody`: yield all of them, so that none stays hidden.
        """
        num = len(self._unseen)
        for _ in range(num if everybody else min(num, LOOKS_PER_STEP)):
            request_id, _ = self._unseen.popitem(last=False)
            if not everybody and self.awaits(request_id, now):
                self._unseen[request_id] = None
            else:
                yield request_id

    def _num_in_vram(self, request: Any) -> int:
        """About how many tokens of the prompt VRAM has. A binary search does, because blocks leave
        VRAM tail first, and vLLM looks exactly when it admits the turn."""
        hashes = request.block_hashes
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if self._pool.get_cached_block(hashes[middle], [0]) is None:
                high = middle
            else:
                low = middle + 1
        return low * self._size
