"""Whose KV is whose: adapters and salts share no block in either tier; a reset empties both."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState

from tests.vllm.tiering import (
    GROUPS,
    MODES,
    answers_as_without_a_tier,
    hold,
    park,
    run_turn,
    tiered,
    total,
    wind_down,
)

# One name with another path is an adapter that took the other's place, and begins an epoch:
# tests/vllm/test_adapters.py.
ADAPTERS = {
    "base": {},
    "one": {"lora_request": LoRARequest("one", 1, "/adapters/one")},
    "other": {"lora_request": LoRARequest("other", 2, "/adapters/other")},
    "salted": {"cache_salt": "tenant"},
    "salted, one": {
        "cache_salt": "tenant",
        "lora_request": LoRARequest("one", 1, "/adapters/one"),
    },
}


@MODES
@GROUPS
@pytest.mark.parametrize("first", ADAPTERS)
def test_no_two_of_them_share_a_block(first: str, async_scheduling: bool, groups: str) -> None:
    """The same tokens and the same program for each, so that only the hashes tell them apart."""
    engine = tiered(async_scheduling=async_scheduling, groups=groups)
    run_turn(engine, "first", 300, program="p", **ADAPTERS[first])
    park(engine)
    prompt = engine.next_prompt("first", 20)
    for name, fields in ADAPTERS.items():
        if name != first:
            run_turn(engine, name, prompt, max_tokens=1, program="p", final=True, **fields)
            assert engine.cached.get(name, (0, 0)) == (0, 0), name
            park(engine)
    assert total(engine, "hit_tokens") == 0
    run_turn(engine, "again", prompt, max_tokens=1, program="p", **ADAPTERS[first])
    assert total(engine, "hit_tokens", "dram") >= 288
    wind_down(engine)


def in_the_middle(engine: Any) -> None:
    """A pin, a stored turn, a turn that runs, one that waits, and a store under way."""
    run_turn(engine, "stored", 200, program="stored")
    run_turn(engine, "pinned", 200, program="pinned", seed=1)
    hold(engine)
    run_turn(engine, "storing", 200, idle=False, program="storing", seed=2)
    engine.add("running", 200, 40, program="running", seed=3)
    engine.add("waiting", 200, 40, program="waiting", seed=4)
    for _ in range(4):
        engine.step()


def pause(engine: Any) -> None:
    """What /pause?mode=keep waits for: no step computes any more, copies under way have settled."""
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    hold(engine, False)
    engine.run_until_idle()


@MODES
def test_a_pause_that_keeps_turns_empties_both_tiers(async_scheduling: bool) -> None:
    """Sleep, a pause and a weight update all end in this (v1/engine/core.py, _finish_pause)."""
    engine = tiered(async_scheduling=async_scheduling, config={"ttl_s": 50})
    in_the_middle(engine)
    pause(engine)
    side = engine.connector.side
    assert len(side.pins) == 3
    assert side.tier.index.num_ready
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not engine.foreign_refs()
    assert not len(side.pins)
    assert not side.tier.index.num_ready
    assert engine.usage() == 0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run_until_idle(until=lambda: {"running", "waiting"} <= set(engine.finish_reasons))
    for name in ("stored", "pinned", "storing"):
        run_turn(engine, f"{name} 2", engine.next_prompt(name, 20), program=name)
        assert engine.cached.get(f"{name} 2", (0, 0)) == (0, 0)
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_a_reset_amid_copies_and_running_turns_empties_both_tiers() -> None:
    """/reset_prefix_cache?reset_running_requests=true. Under async scheduling vLLM itself
    refuses this while a step is in flight, with any connector that is kv_both."""
    engine = tiered(config={"ttl_s": 50})
    in_the_middle(engine)
    side = engine.connector.side
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not engine.foreign_refs()
    assert not len(side.pins)
    assert not side.tier.index.num_ready
    assert engine.usage() == 0
    hold(engine, False)
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)
    wind_down(engine)
