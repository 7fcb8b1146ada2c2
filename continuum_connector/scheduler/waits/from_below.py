"""FromBelow: turns wait in the queue, hidden, while their blocks come up to DRAM."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from continuum_connector.scheduler.holds import BlockPool
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.turns import Turn, Turns

CHECKED_PER_STEP = 256  # hidden turns that a step looks at
AGAIN_S = 0.01  # a turn admitted sooner than this is not looked up again: its blocks hardly moved


class FromBelow:
    """Has blocks brought up to DRAM for waiting turns, and hides from vLLM the turns that wait for
    them; in vLLM's own queues such a turn is asked in every step. Does nothing where none can come
    up."""

    def __init__(self, tier: Tier, pool: BlockPool, turns: Turns, token_size: int) -> None:
        """`token_size`: tokens per block hash."""
        self._below = tier.below
        self._pool = pool
        self._turns = turns
        self._size = token_size
        self._hidden: OrderedDict[str, Turn] = OrderedDict()
        self.is_on = self._below.brings_up

    def __len__(self) -> int:
        """How many turns are hidden."""
        return len(self._hidden)

    def bring_up(self, turn: Turn, request: Any, now: float) -> None:
        """The turn has arrived: the tiers may begin to bring up what it wants."""
        if not self.is_on or request.skip_reading_prefix_cache:
            return
        below = self._below.bring_up(
            turn.program.key,
            request,
            num_vram_tokens=self._num_in_vram(request),
            num_turns=len(self._turns),
            now=now,
            before=turn.below,
        )
        turn.set_below(below)

    def must_wait(self, turn: Turn, request: Any, now: float) -> bool:
        """vLLM would admit the turn now; return whether vLLM should pass it over, as more of its KV
        will be in DRAM soon.

        If the turn has waited in the queue, the tiers look once more: its blocks may have left VRAM
        or DRAM since it arrived. It has not been passed over yet, so its patience begins anew.
        """
        if not self.is_on:
            return False
        if not turn.was_tried:
            turn.note_tried()
            if now - turn.arrival > AGAIN_S:
                self.bring_up(turn, request, now)
        turn.set_awaits_below(self._below.awaits(turn.request_id, now))
        return turn.awaits_below

    def hides(self, request: Any) -> bool:
        """Whether to hide from vLLM a request that it puts back, because `must_wait` said so, until
        `let_in` yields it. In every step vLLM looks up the prompts of all requests that it sees."""
        turn = self._turns.get(request.request_id)
        if turn is None or not turn.awaits_below:
            return False
        self._hidden[turn.request_id] = turn
        return True

    def let_in(self, now: float, everybody: bool = False) -> Iterator[str]:
        """Yield the hidden requests that no longer wait for a tier; called before each step.

        Looks at a limited number of them, so that thousands of hidden requests make no step slower.
        `everybody`: yield all of them, so that none stays hidden.
        """
        num = len(self._hidden)
        for _ in range(num if everybody else min(num, CHECKED_PER_STEP)):
            request_id, turn = self._hidden.popitem(last=False)
            turn.set_awaits_below(not everybody and self._below.awaits(request_id, now))
            if turn.awaits_below:
                self._hidden[request_id] = turn
            else:
                yield request_id

    def is_due(self) -> bool:
        """Whether a turn is hidden."""
        return bool(self._hidden)

    def left(self, turn: Turn) -> None:
        """The turn is over."""
        self._hidden.pop(turn.request_id, None)

    def _num_in_vram(self, request: Any) -> int:
        """How many tokens of the prompt VRAM has, block by block as vLLM looks when it admits the
        turn: a chain's tail, held by its store, may outlast the head."""
        hashes, find = request.block_hashes, self._pool.get_cached_block
        missing = (number for number, each in enumerate(hashes) if find(each, [0]) is None)
        return next(missing, len(hashes)) * self._size
