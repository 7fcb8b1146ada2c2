"""Policies: what becomes of a finished turn, and why."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from continuum_connector.policy.base import (
    After,
    Choice,
    Decision,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Snapshot,
    must_free,
)
from continuum_connector.policy.baselines import FixedTtl, Stock
from continuum_connector.programs.continuation import Divergence
from continuum_connector.programs.program import Hints


def finished(num_blocks: int = 10, aborted: bool = False, **hints: Any) -> FinishedTurn:
    return FinishedTurn("p", 3, 160, num_blocks, Hints(**hints), aborted)


def world(has_tier: bool = False) -> Snapshot:
    return Snapshot(100.0, 1000, 500, 100, 3, has_tier)


@pytest.mark.parametrize(
    ("turn", "ttl_s", "why"),
    [
        (finished(), 2.0, "fixed TTL"),
        (finished(final=False), 2.0, "fixed TTL"),
        (finished(ttl_s=5.0), 5.0, "client asked for 5 s"),
        (finished(ttl_s=0.25), 0.25, "client asked for 0.25 s"),
        (finished(ttl_s=1e6), 60.0, "client asked for 1e+06 s"),
    ],
)
def test_a_turn_is_pinned_for_the_ttl_or_what_the_client_asks_within_the_bound(
    turn: FinishedTurn, ttl_s: float, why: str
) -> None:
    assert FixedTtl(2.0, 60.0).decide(turn, world()) == Choice(Pin(ttl_s, After.DROP), why)


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        (finished(final=True), "last turn of its program"),
        (finished(aborted=True), "the client went away"),
        (finished(num_blocks=0), "no full block to keep"),
        (finished(final=True, ttl_s=9.0), "last turn of its program"),
    ],
)
def test_what_will_not_be_read_again_is_freed(turn: FinishedTurn, why: str) -> None:
    assert FixedTtl(2.0, 60.0).decide(turn, world()) == Choice(Free(), why)


def test_with_a_tier_a_pinned_turn_is_stored_meanwhile() -> None:
    choice = FixedTtl(2.0, 60.0).decide(finished(), world(has_tier=True))
    assert choice.decision == Pin(2.0, After.STORE)


@pytest.mark.parametrize(
    ("has_tier", "decision"), [(True, Offload()), (False, Free())], ids=["tier", "no_tier"]
)
def test_a_ttl_of_nothing_is_no_pin(has_tier: bool, decision: Decision) -> None:
    policy, asked = FixedTtl(0.0, 60.0), finished(ttl_s=0.0)
    assert policy.decide(finished(), world(has_tier)) == Choice(decision, "a TTL of 0 s")
    assert FixedTtl(2.0, 60.0).decide(asked, world(has_tier)).decision == decision


def test_stock_keeps_nothing() -> None:
    assert Stock().decide(finished(ttl_s=9.0), world(has_tier=True)) == Choice(
        Free(), "policy is stock"
    )


def test_what_never_continues_is_freed_and_the_reason_says_where() -> None:
    diverged = Divergence(2, 32, 48, 340, "system")
    choice = must_free(structs.replace(finished(num_blocks=0), diverged=diverged))
    assert choice is not None
    assert choice.reason.endswith("differs within tokens 32..48 of 340 (system)")
