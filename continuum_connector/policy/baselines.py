"""Baselines: the rules to compare with, of this code's forerunners and of others.

Stock keeps nothing beyond what vLLM's own prefix cache keeps.

FixedTtl pins every turn that is not the last for the same time, whatever it calls.

Released: Continuum's released code, which is simpler than its paper (section 4): a turn without a
tool call is freed, and so is one whose tool took more than 2 s on average so far; every other is
pinned for 2 s, a tool's first call among them. It averages all calls of a tool since it began, we
the last 1,000; it reads calls from ```bash blocks alone, where we take any call that is known.
Where there is a tier, a turn without a pin is offloaded, as with the paper's rule (continuum.py).

LruOffload is what LMCache does: every turn goes to DRAM, nothing is pinned, no order. LMCache knows
no programs, so it stores whatever was computed, including a program's last turn and the turn of a
client that went away. The least recently used blocks leave DRAM first.

ProgramOrder keeps nothing, but serves waiting turns by the arrival of their programs. That is the
larger part of what Continuum gains (its section 4.3), so what retention adds is measured against
this policy, not against stock vLLM.
"""

from __future__ import annotations

from statistics import fmean

from continuum_connector.policy.base import (
    After,
    Choice,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Snapshot,
    Unpriced,
    must_free,
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
        if (freed := must_free(turn)) is not None:
            return freed
        asked = turn.hints.ttl_s
        ttl_s = min(self._ttl_s if asked is None else asked, self._max_ttl_s)
        if not ttl_s:
            return Choice(Offload() if snapshot.has_tier else Free(), "a TTL of 0 s")
        then = After.STORE if snapshot.has_tier else After.DROP
        why = "fixed TTL" if asked is None else f"client asked for {asked:g} s"
        return Choice(Pin(ttl_s, then), why)


RELEASED_S = 2.0  # both the slowest mean that is pinned and the pin's TTL


class Released(Unpriced):
    """Pin for 2 s, never above `max_ttl_s`, after calls of a tool that takes no longer on average.

    The released code knows no hints but the last step, so a client's `ttl_s` has no effect here.
    """

    name = "released"
    orders = True
    reads = True

    def __init__(self, max_ttl_s: float) -> None:
        self._ttl_s = min(RELEASED_S, max_ttl_s)

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        if (freed := must_free(turn)) is not None:
            return freed
        ttl_s, why = self._ttl(turn)
        if not ttl_s:
            return Choice(Offload() if snapshot.has_tier else Free(), why)
        return Choice(Pin(ttl_s, After.STORE if snapshot.has_tier else After.DROP), why)

    def _ttl(self, turn: FinishedTurn) -> tuple[float, str]:
        if not turn.asked.tools:
            return 0.0, "no tool call"
        if not turn.tool_gaps:
            return self._ttl_s, "this tool's first call"
        mean_s = fmean(turn.tool_gaps)
        why = f"this tool takes {mean_s:.3g} s on average"
        return (self._ttl_s if mean_s <= RELEASED_S else 0.0), why


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
