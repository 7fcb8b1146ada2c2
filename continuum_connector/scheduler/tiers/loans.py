"""Loans: what DRAM holds of a running turn's prompt, lent to that turn.

VRAM has those blocks while the turn runs, and at its end the turn stores all of them anew. So until
then they leave DRAM before all that is live (eviction.py), and their slots hold what is nowhere
else. A turn that ends without a store puts back what left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from continuum_connector.scheduler.kv_groups import KvGroups, block_key
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Chain

MOST_CHANGED = 8  # of a chain, an eighth may be other than the prompt that goes on from it


class Loans:
    """Lends programs' chains to their turns. Microseconds per call; `program` is its key."""

    def __init__(self, index: HostIndex, groups: KvGroups) -> None:
        self._index = index
        self._groups = groups
        self._lends = groups.are_simple  # windows and states: VRAM has others than DRAM

    def lend(self, program: str, request: Any, num_tokens: int) -> None:
        """The program's only turn under way runs, and has the first `num_tokens` of its prompt in
        VRAM, or is about to load them. Lend it the newest of the program's chains that are about
        that."""
        if not self._lends:
            return
        for chain in reversed(self._index.chains_of(program)):
            if self._is_of(chain, request.block_hashes, num_tokens):
                self._index.order.lend(chain, request.request_id)
                return

    def _is_of(self, chain: Chain, hashes: Sequence[bytes], num_tokens: int) -> bool:
        """Whether the first `num_tokens` of that prompt are nearly all of the chain. Not to its
        end, because the prompt may repeat the answer without the thinking in it."""
        length = len(chain.tickets)
        num = max(1, length - max(1, length // MOST_CHANGED))
        has_it = num * self._groups.hash_size <= num_tokens and num <= len(hashes)
        if not has_it:
            return False
        return self._index.is_at(int(chain.tickets[num - 1]), block_key(hashes[num - 1], 0))

    def take_back(self, program: str) -> None:
        """The turn does not run any more, or is not alone: nothing more leaves for it."""
        self._index.order.take_back(program)

    def end(self, program: str, request_id: str) -> int:
        """That turn has ended. Return how many of its first blocks were lent to it, if some of them
        left, so that a turn that is not stored can put them back; else 0."""
        return self._index.order.end_loan(program, request_id)
