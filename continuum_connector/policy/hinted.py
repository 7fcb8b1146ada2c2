"""Hinted: what a client asks for, granted on top of a policy where it costs nobody else.

The policy first decides without the client's wishes, and the turn gets that in any case. What a
wish adds has other terms (docs/hints.md): a longer pin gives way before every other, moves
nobody's place in the queue, and counts against a budget. So a wish never harms another client.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from continuum_connector.policy.base import (
    After,
    Choice,
    Decision,
    FinishedTurn,
    Free,
    HintOutcome,
    Offload,
    Pin,
    Receipt,
    RetentionPolicy,
    Snapshot,
    stores,
)
from continuum_connector.programs.program import Hints

NOT_READ = "not understood, so it has no effect"
NOT_CONTINUED = "the prompt does not continue the program's last turn"
NO_HINTS = Hints()
MAX_FRACTION = 0.2


class Hinted:
    """A policy that answers hints. `max_fraction`: the share of VRAM blocks that wishes may
    take."""

    def __init__(
        self, policy: RetentionPolicy, max_ttl_s: float, max_fraction: float = MAX_FRACTION
    ) -> None:
        self.policy = policy
        self.orders = policy.orders
        self.reads = policy.reads
        self.ranks_dram = policy.ranks_dram
        self.heeds_stock = policy.heeds_stock
        self._max_ttl_s = max_ttl_s
        self._max_fraction = max_fraction
        # Of these a policy needs no hints.
        self.dram_rank, self.aged = policy.dram_rank, policy.aged

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        """Return the policy's choice, with wishes granted as far as possible, and the receipts.

        The policy is asked twice if the client gave a `ttl_s`, else once.
        """
        hints = turn.hints
        if hints == NO_HINTS:
            return self.policy.decide(turn, snapshot)
        own = replace(turn, hints=replace(hints, ttl_s=None))
        choice = self.policy.decide(own, snapshot)
        receipts = _facts(hints)
        if hints.ttl_s is not None:
            choice, receipt = self._pin(turn, hints.ttl_s, choice, snapshot)
            receipts.append(receipt)
        receipts += [Receipt(name, HintOutcome.REFUSED, NOT_READ) for name in hints.unread]
        return replace(choice, receipts=tuple(receipts))

    # --- ttl_s ------------------------------------------------------------------------
    def _pin(
        self, turn: FinishedTurn, wish_s: float, own: Choice, snapshot: Snapshot
    ) -> tuple[Choice, Receipt]:
        """Let the policy read the client's prediction. If that makes the pin longer, a budget
        limits it."""
        asked = self.policy.decide(turn, snapshot)
        own_s, why = _pinned_s(own.decision), asked.why
        if _pinned_s(asked.decision) <= own_s:
            chosen = asked
        elif why := self._over_budget(turn, snapshot):
            chosen = own
        else:
            chosen = replace(asked, decision=_longer(asked.decision, own.decision))
            why = asked.why
        got_s = _pinned_s(chosen.decision)
        if got_s >= min(wish_s, self._max_ttl_s):
            why = f"no pin lives longer than max_ttl_s = {self._max_ttl_s:g}"
        return chosen, _granted("ttl_s", wish_s, got_s, why)

    def _over_budget(self, turn: FinishedTurn, snapshot: Snapshot) -> str:
        """Say why the turn does not fit what is left for hinted pins, "" if it does."""
        budget = self._max_fraction * snapshot.num_blocks
        if snapshot.num_hinted_blocks + turn.num_blocks <= budget:
            return ""
        return (
            f"clients' hints hold {snapshot.num_hinted_blocks} of {math.floor(budget)} blocks "
            f"({self._max_fraction:.0%} of VRAM), {turn.num_blocks} more do not fit"
        )


def without_pin(choice: Choice, why: str) -> Choice:
    """Return the choice if its pin cannot be made: what the pin would have left at its end."""
    pin = choice.decision
    assert isinstance(pin, Pin)
    decision = Offload() if pin.then is After.STORE else Free()
    receipts = _refuse(choice.receipts, "ttl_s", why)
    return replace(choice, decision=decision, reason=why, receipts=receipts)


def without_end(choice: Choice) -> Choice:
    """Return the choice for a turn that claims to be the last of a program without continuing it.
    Nothing of it is kept, because that would supersede what the program has."""
    receipts = _refuse(choice.receipts, "final", NOT_CONTINUED)
    return replace(choice, decision=Free(), reason=NOT_CONTINUED, receipts=receipts)


def _facts(hints: Hints) -> list[Receipt]:
    """Answer the hints that state facts; they are taken as given."""
    said: dict[str, Any] = {
        "final": hints.final,
        "tools": list(hints.tools) or None,
        "parent": hints.parent,
        "compaction": hints.compaction or None,
    }
    return [
        Receipt(name, HintOutcome.ACCEPTED, value=value)
        for name, value in said.items()
        if value is not None
    ]


def _granted(hint: str, wish_s: float, got_s: float, why: str) -> Receipt:
    if got_s >= wish_s:
        return Receipt(hint, HintOutcome.ACCEPTED, until_s=wish_s)
    outcome = HintOutcome.CLIPPED if got_s else HintOutcome.REFUSED
    return Receipt(hint, outcome, why, until_s=got_s)


def _refuse(receipts: tuple[Receipt, ...], hint: str, why: str) -> tuple[Receipt, ...]:
    return tuple(
        Receipt(hint, HintOutcome.REFUSED, why) if each.hint == hint else each for each in receipts
    )


def _longer(asked: Decision, own: Decision) -> Pin:
    """The pin that the client asked for. Until the policy's own pin would end, it counts as
    that."""
    assert isinstance(asked, Pin)
    then = After.STORE if stores(own) else After.DROP
    value = own.value if isinstance(own, Pin) else 0.0
    return Pin(asked.ttl_s, then, value, asked_from_s=_pinned_s(own))


def _pinned_s(decision: Decision) -> float:
    return decision.ttl_s if isinstance(decision, Pin) else 0.0
