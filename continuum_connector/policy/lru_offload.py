"""LRU offload: what LMCache does. Every turn goes to DRAM, nothing is pinned, no order.

LMCache stores whatever was computed, the last turn of a program and the turn of a client
that went away included, for it knows no programs; DRAM is left by the least recently used.
"""

from __future__ import annotations

from continuum_connector.policy.base import (
    Choice,
    FinishedTurn,
    Free,
    Offload,
    Snapshot,
    Unpriced,
)


class LruOffload(Unpriced):
    """Store every turn that has a full block; without a tier, free it."""

    name = "lru_offload"
    orders = False
    reads = False

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        if not turn.num_blocks:
            return Choice(Free(), "no full block to keep")
        if not snapshot.has_tier:
            return Choice(Free(), "there is no DRAM tier")
        return Choice(Offload(), "policy is lru_offload")
