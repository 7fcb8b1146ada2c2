"""Draft tokens: of what the model did not say nothing is pinned, stored or read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from continuum_connector.vllm import proven
from tests.vllm.agents import AgentEngine, play_under_pressure, whole
from tests.vllm.drafts import HAS_FLAGS
from tests.vllm.harness import prompt
from tests.vllm.tiering import SLOT_BYTES, answers_as_without_a_tier, park, skip_without_tier

NUM_DRAFTS = 3
pytestmark = pytest.mark.skipif(
    not HAS_FLAGS, reason="this vLLM does not say whose groups drafts read"
)


@pytest.fixture(autouse=True)
def a_tier_for_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is off because of vLLM's worker (proven.py); this is what holds it to the scheduler's."""
    monkeypatch.setattr(proven, "why_no_tier", lambda _server: "")


def drafted(groups: str, extra: Mapping[str, Any], **kwargs: Any) -> AgentEngine:
    config = {"ttl_s": 60, **extra}
    return AgentEngine(
        300,
        groups=groups,
        num_drafts=NUM_DRAFTS,
        max_num_batched_tokens=1024,
        extra_config=config,
        **kwargs,
    )


GROUPS = pytest.mark.parametrize("groups", ["full", "state", "hybrid", "mixed"])
MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


@MODES
@GROUPS
def test_the_next_turn_hits_what_was_accepted_and_nothing_else(
    groups: str, async_scheduling: bool
) -> None:
    engine = drafted(groups, {}, async_scheduling=async_scheduling)
    play_under_pressure(engine, 100, engine.side.groups.num_proof_tokens)
    assert answers_as_without_a_tier(engine)
    assert 0 < engine.worker.num_accepted < engine.worker.num_drafted


@MODES
@GROUPS
def test_what_is_stored_is_what_was_accepted(groups: str, async_scheduling: bool) -> None:
    skip_without_tier(groups)
    extra = {"dram_bytes": 400 * SLOT_BYTES}
    engine = drafted(groups, extra, async_scheduling=async_scheduling)
    engine.run_turn("a", 500, max_tokens=100, program="p")
    park(engine)
    engine.run_turn("b", engine.next_prompt("a", 20), max_tokens=50, program="p")
    assert engine.cached["b"] == (0, whole(engine, 600 - engine.side.groups.num_proof_tokens))
    assert answers_as_without_a_tier(engine)


@MODES
@pytest.mark.parametrize("dram", [0, 400 * SLOT_BYTES], ids=["pins", "DRAM"])
@pytest.mark.parametrize(
    ("groups", "read"), [("full", 0), ("hybrid", 0), ("hybrid", 1), ("state", 0), ("mixed", 0)]
)
def test_short_turns_and_long_ones_with_drafts_under_way(
    groups: str, read: int, dram: int, async_scheduling: bool
) -> None:
    if dram:
        skip_without_tier(groups)
    extra = {"dram_bytes": dram}
    engine = drafted(groups, extra, draft_group=read, async_scheduling=async_scheduling)
    play_under_pressure(engine, 100, engine.side.groups.num_proof_tokens)
    for n in (1, 15, 16, 17, 33):
        engine.run_turn(f"s{n}", prompt(n, seed=n), max_tokens=4, program="s")
        engine.run_turn(f"t{n}", engine.next_prompt(f"s{n}", 45), max_tokens=4, program="s")
    park(engine)
    engine.run_turn("last", engine.next_prompt("a2", 20), max_tokens=50, program="p")
    assert bool(engine.cached["last"][1]) is bool(dram)
    assert answers_as_without_a_tier(engine)
    assert 0 < engine.worker.num_accepted < engine.worker.num_drafted
