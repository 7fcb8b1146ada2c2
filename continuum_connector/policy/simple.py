"""Policies of a few lines: stock, fixed_ttl, lru_offload, program_order.

Stock: keep nothing beyond what vLLM's own prefix cache keeps. The neutral baseline.

Fixed TTL: every turn that is not the last is pinned for the same time.

This is what Continuum's released code does (2 s, whatever the tool); the paper's rule
(section 4) replaces the constant by an estimate.

LRU offload: what LMCache does. Every turn goes to DRAM, nothing is pinned, no order.

LMCache knows no programs, so it stores whatever was computed, including a program's last turn and
the turn of a client that went away. The least recently used blocks leave DRAM first.

Program order: keep nothing, but serve waiting turns by the arrival of their programs.

The larger part of what Continuum gains (its section 4.3); what retention adds is measured
against this policy, not against stock vLLM.
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


class Stock(Unpriced):
    """Free every turn and leave vLLM's order: what a server without us does."""

    name = "stock"
    orders = False
    reads = False

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        return Choice(Free(), "policy is stock")


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


class ProgramOrder(Unpriced):
    """Free every turn; only the order of the waiting ones differs from stock vLLM."""

    name = "program_order"
    orders = True
    reads = False

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        return Choice(Free(), "policy is program_order")
