"""Fixed TTL: every turn that is not the last is pinned for the same time.

This is what Continuum's released code does (2 s, whatever the tool); the paper's rule
(section 4) replaces the constant by an estimate.
"""

from __future__ import annotations

from continuum_connector.policy.base import (
    After,
    Choice,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Snapshot,
    Unpriced,
    let_go,
)


class FixedTtl(Unpriced):
    """Pin for `ttl_s`, or for what the client asked for, but never above `max_ttl_s`."""

    name = "fixed_ttl"
    orders = True
    reads = False

    def __init__(self, ttl_s: float, max_ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._max_ttl_s = max_ttl_s

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        if (over := let_go(turn)) is not None:
            return over
        asked = turn.hints.ttl_s
        ttl_s = min(self._ttl_s if asked is None else asked, self._max_ttl_s)
        if not ttl_s:
            return Choice(Offload() if snapshot.has_tier else Free(), "a TTL of 0 s")
        then = After.STORE if snapshot.has_tier else After.DROP
        why = "fixed TTL" if asked is None else f"client asked for {asked:g} s"
        return Choice(Pin(ttl_s, then), why)
