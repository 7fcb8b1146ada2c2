"""Fixed TTL: every turn that is not the last is pinned for the same time.

This is what Continuum's released code does (2 s, whatever the tool); the paper's rule
(section 4) replaces the constant by an estimate.
"""

from __future__ import annotations

from continuum_connector.policy.base import (
    After,
    Decision,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Snapshot,
)


class FixedTtl:
    """Pin for `ttl_s`, or for what the client asked for, but never above `max_ttl_s`."""

    name = "fixed_ttl"

    def __init__(self, ttl_s: float, max_ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._max_ttl_s = max_ttl_s

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> tuple[Decision, str]:
        if turn.aborted:
            return Free(), "the client went away"
        if turn.hints.final:
            return Free(), "last turn of its program"
        if not turn.num_blocks:
            return Free(), "no full block to keep"
        asked = turn.hints.ttl_s
        ttl_s = min(self._ttl_s if asked is None else asked, self._max_ttl_s)
        if not ttl_s:
            return (Offload() if snapshot.has_tier else Free()), "a TTL of 0 s"
        then = After.STORE if snapshot.has_tier else After.DROP
        why = "fixed TTL" if asked is None else f"client asked for {asked:g} s"
        return Pin(ttl_s, then), why
