"""Hinted: what clients ask for, on top of a policy, and how they are answered."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from continuum_connector.policy.base import (
    After,
    FinishedTurn,
    Free,
    HintOutcome,
    Offload,
    Pin,
    Receipt,
    RetentionPolicy,
    Snapshot,
)
from continuum_connector.policy.baselines import FixedTtl, Stock
from continuum_connector.policy.hinted import Hinted, without_end, without_pin
from continuum_connector.programs.program import Hints

OK, LESS, NO = HintOutcome.ACCEPTED, HintOutcome.CLIPPED, HintOutcome.REFUSED
TTL_S, MAX_TTL_S = 2.0, 60.0
FIXED = FixedTtl(TTL_S, MAX_TTL_S)
NONE = FixedTtl(0.0, MAX_TTL_S)  # pins nothing of its own


def finished(num_blocks: int = 10, aborted: bool = False, **hints: Any) -> FinishedTurn:
    return FinishedTurn("p", 3, 160, num_blocks, Hints(**hints), aborted)


def world(has_tier: bool = False, **fields: Any) -> Snapshot:
    return Snapshot(100.0, 1000, 500, 100, 3, has_tier, **fields)


def answered(
    turn: FinishedTurn, policy: RetentionPolicy = FIXED, at: Snapshot | None = None
) -> tuple[Any, list[tuple[Any, ...]]]:
    """The decision, and of each receipt what is not a sentence."""
    choice = Hinted(policy, MAX_TTL_S, 0.1).decide(turn, at or world())
    receipts = [
        (r.hint, r.outcome, r.until_s if r.value is None else r.value) for r in choice.receipts
    ]
    return choice.decision, receipts


STORE, DROP = After.STORE, After.DROP
CASES: list[tuple[str, FinishedTurn, RetentionPolicy, Snapshot, Any, list[tuple[Any, ...]]]] = [
    ("nothing said", finished(), FIXED, world(), Pin(2.0), []),
    ("longer", finished(ttl_s=5.0), FIXED, world(), Pin(5.0, asked_from_s=2.0),
     [("ttl_s", OK, 5.0)]),
    ("shorter", finished(ttl_s=0.5), FIXED, world(), Pin(0.5), [("ttl_s", OK, 0.5)]),
    ("no pin", finished(ttl_s=0.0), FIXED, world(), Free(), [("ttl_s", OK, 0.0)]),
    ("above the bound", finished(ttl_s=86_400.0), FIXED, world(), Pin(60.0, asked_from_s=2.0),
     [("ttl_s", LESS, 60.0)]),
    ("where the policy pins nothing", finished(ttl_s=5.0), NONE, world(),
     Pin(5.0, DROP, asked_from_s=0.0), [("ttl_s", OK, 5.0)]),
    ("where it stores", finished(ttl_s=5.0), NONE, world(True),
     Pin(5.0, STORE, asked_from_s=0.0), [("ttl_s", OK, 5.0)]),
    ("budget just full", finished(40, ttl_s=5.0), FIXED, world(num_hinted_blocks=60),
     Pin(5.0, asked_from_s=2.0), [("ttl_s", OK, 5.0)]),
    ("budget exceeded", finished(41, ttl_s=5.0), FIXED, world(num_hinted_blocks=60),
     Pin(2.0), [("ttl_s", LESS, 2.0)]),
    ("budget exceeded, no pin", finished(41, ttl_s=5.0), NONE, world(num_hinted_blocks=60),
     Free(), [("ttl_s", NO, 0.0)]),
    ("shorter needs no budget", finished(900, ttl_s=1.0), FIXED, world(num_hinted_blocks=100),
     Pin(1.0), [("ttl_s", OK, 1.0)]),
    ("stock", finished(ttl_s=5.0), Stock(), world(True), Free(), [("ttl_s", NO, 0.0)]),
    ("last turn", finished(final=True, ttl_s=5.0), FIXED, world(True), Free(),
     [("final", OK, True), ("ttl_s", NO, 0.0)]),
    ("client gone", finished(aborted=True, ttl_s=5.0), FIXED, world(), Free(),
     [("ttl_s", NO, 0.0)]),
    ("facts", finished(final=False, tools=("a",), parent="q", compaction=True), FIXED, world(),
     Pin(2.0), [("final", OK, False), ("tools", OK, ["a"]), ("parent", OK, "q"),
                ("compaction", OK, True)]),
    ("unread", finished(unread=("ttl_s", "kv_priority")), FIXED, world(), Pin(2.0),
     [("ttl_s", NO, None), ("kv_priority", NO, None)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("turn", "policy", "at", "decision", "receipts"),
    [c[1:] for c in CASES],
    ids=[c[0] for c in CASES],
)
def test_hints_and_their_receipts(
    turn: FinishedTurn, policy: RetentionPolicy, at: Snapshot, decision: Any, receipts: Any
) -> None:
    assert answered(turn, policy, at) == (decision, receipts)


class Drops(FixedTtl):
    """Pins or frees, but stores nothing though there is a tier: loading is dear, say."""

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Any:
        return super().decide(turn, replace(snapshot, has_tier=False))


def test_what_happens_to_the_pin_afterwards_is_told() -> None:
    hinted = Hinted(FIXED, MAX_TTL_S, 0.1)
    for has_tier, decision in ((True, Offload()), (False, Free())):
        choice = without_pin(hinted.decide(finished(ttl_s=5.0), world(has_tier)), "too large")
        assert choice.decision == decision
        assert choice.receipts == (Receipt("ttl_s", NO, "too large"),)
    (final,) = without_end(hinted.decide(finished(final=True), world())).receipts
    assert final.outcome is NO


HINTS = st.builds(
    Hints,
    final=st.sampled_from([None, False, True]),
    ttl_s=st.none() | st.floats(0, 86_400),
    compaction=st.booleans(),
)
WORLDS = st.builds(
    lambda tier, residence, hinted: world(tier, residence_s=residence, num_hinted_blocks=hinted),
    st.booleans(), st.sampled_from([40.0, math.inf]), st.integers(0, 200),
)  # fmt: skip


@settings(max_examples=200)
@given(
    HINTS, WORLDS, st.sampled_from([FIXED, NONE, Drops(2.0, 60.0), Stock()]), st.integers(0, 300)
)
def test_a_hint_adds_only_what_gives_way_to_everybody(
    hints: Hints, at: Snapshot, policy: Any, num_blocks: int
) -> None:
    """Against the same turn without wishes: no pin that counts lasts longer or is worth more, no
    copy in DRAM that counts is added, and what is added fits its budget."""
    turn = FinishedTurn("p", 1, 160, num_blocks, hints)
    plain = replace(turn, hints=replace(hints, ttl_s=None))
    got = Hinted(policy, MAX_TTL_S, 0.1).decide(turn, at).decision
    own = policy.decide(plain, at).decision
    own_s = own.ttl_s if isinstance(own, Pin) else 0.0
    if isinstance(got, Pin):
        assert got.ttl_s <= MAX_TTL_S
        assert min(got.ttl_s, got.asked_from_s) <= own_s
        if got.ttl_s > own_s:
            assert at.num_hinted_blocks + num_blocks <= 100
        if isinstance(own, Pin):
            assert got.value <= own.value
    stores = isinstance(got, Offload) or (isinstance(got, Pin) and got.then is STORE)
    if stores:
        assert isinstance(own, Offload) or (isinstance(own, Pin) and own.then is STORE)
