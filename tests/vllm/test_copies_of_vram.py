"""While a turn runs, DRAM's copy of what it goes on from is the first to leave: VRAM has it too,
and at its end the turn stores it anew."""

from __future__ import annotations

import math
from typing import Any

import pytest

from continuum_connector.policy.base import Choice, Offload, must_free
from continuum_connector.scheduler.tiers.eviction import IN_VRAM
from continuum_connector.scheduler.tiers.wanted import block_keys
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import (
    MODES,
    answers_as_without_a_tier,
    come_to_rest,
    on_disk,
    park,
    run_turn,
    tiered,
    wind_down,
)

TOKENS = 200  # of a prompt; with its answer they fill 13 blocks
BLOCKS = 13


def ranked(num_slots: int = 2 * BLOCKS, **kwargs: Any) -> Engine:
    """DRAM for two turns, which leave it by what they are worth. All that may be kept is stored,
    and nothing is pinned."""
    config = {"policy": "adaptive"} | kwargs.pop("config", {})
    engine = tiered(num_slots=num_slots, config=config, max_num_seqs=16, **kwargs)
    store_all(engine)
    return engine


def store_all(engine: Engine) -> None:
    policy = engine.connector.side.decider.policy
    policy.decide = lambda turn, _: must_free(turn) or Choice(Offload(), "as every turn here")


def two_in_dram(**kwargs: Any) -> Engine:
    """Of `a` and `b` DRAM has everything, and VRAM nothing; DRAM is full."""
    engine = ranked(**kwargs)
    for seed, name in enumerate("ab", 1):
        run_turn(engine, name, TOKENS, seed=seed, program=name)
    park(engine)
    assert [in_dram(engine, name) for name in "ab"] == [BLOCKS, BLOCKS]
    return engine


def begin(engine: Engine, name: str, **kwargs: Any) -> None:
    """The program's next turn runs, and goes on for long."""
    before = kwargs.pop("after", name[0])
    engine.add(name, engine.next_prompt(before, 8), 200, program=name[0], **kwargs)
    for _ in range(8):
        engine.step()
    assert engine.outputs[name], "it runs"


def in_dram(engine: Engine, request_id: str) -> int:
    """How many of the blocks of that request, from its first on, DRAM has."""
    tier = engine.connector.side.tier
    return len(getattr(tier, "dram", tier).index.find(keys(engine, request_id)))


def keys(engine: Engine, request_id: str) -> list[bytes]:
    return block_keys(engine.requests[request_id].block_hashes)


def worth(engine: Engine, program: str) -> float:
    return float(engine.connector.side._worth.rank_at(engine.clock())(f"job:{program}"))


@MODES
def test_what_a_turn_that_runs_goes_on_from_leaves_first_and_comes_back(
    async_scheduling: bool,
) -> None:
    engine = two_in_dram(async_scheduling=async_scheduling)
    begin(engine, "a2")
    run_turn(engine, "c", TOKENS, seed=3, program="c", idle=False)
    engine.run_until_idle(until=lambda: in_dram(engine, "c") == BLOCKS)
    assert [in_dram(engine, name) for name in ("a", "b", "c")] == [0, BLOCKS, BLOCKS]
    assert engine.connector.side.tier.residence_s(engine.clock()) == math.inf, "nothing is lost"
    engine.run_until_idle()
    assert in_dram(engine, "a") == BLOCKS, "stored anew"
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_without_the_rule_it_would_be_another_that_leaves() -> None:
    """The control: who began to run last was used last, so nothing else makes it leave."""
    engine = two_in_dram()
    begin(engine, "a2")
    engine.connector.side.turns._in_vram.clear()
    run_turn(engine, "c", TOKENS, seed=3, program="c", idle=False)
    engine.run_until_idle(until=lambda: in_dram(engine, "c") == BLOCKS)
    assert in_dram(engine, "a") == BLOCKS
    engine.run_until_idle()
    wind_down(engine)


def test_of_two_that_run_the_one_that_began_last_leaves_first() -> None:
    engine = two_in_dram()
    begin(engine, "a2")
    begin(engine, "b2")
    assert worth(engine, "b") < worth(engine, "a") <= IN_VRAM
    engine.run_until_idle()
    assert min(worth(engine, "a"), worth(engine, "b")) > IN_VRAM
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_one_name_for_unlike_turns_gives_up_nothing() -> None:
    engine = two_in_dram()
    run_turn(engine, "a2", engine.next_prompt("a", 8), program="a")
    engine.add("a3", TOKENS, 200, seed=7, program="a")  # another conversation
    for _ in range(8):
        engine.step()
    assert engine.outputs["a3"]
    assert worth(engine, "a") > IN_VRAM
    engine.run_until_idle()
    wind_down(engine)


@pytest.mark.parametrize("waits", [False, True])
def test_beside_another_turn_of_the_program_nothing_is_given_up(waits: bool) -> None:
    engine = two_in_dram()
    begin(engine, "a2")
    engine.add("a3", prompt(TOKENS, seed=1)[:100], 100, program="a")
    for _ in range(0 if waits else 8):
        engine.step()
    assert bool(engine.outputs["a3"]) is not waits
    assert worth(engine, "a") > IN_VRAM
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_a_turn_that_waits_gives_up_nothing() -> None:
    engine = two_in_dram()
    engine.add("a2", engine.next_prompt("a", 8), 100, program="a")
    assert worth(engine, "a") > IN_VRAM
    engine.run_until_idle()
    wind_down(engine)


def test_a_compaction_gives_up_nothing() -> None:
    engine = two_in_dram()
    begin(engine, "a2", kv_transfer_params={"continuum": {"compaction": True}})
    assert engine.connector.side.turns.get("a2").identity.hints.compaction
    assert worth(engine, "a") > IN_VRAM
    engine.run_until_idle()
    wind_down(engine)


def test_a_turn_that_was_preempted_has_nothing_in_vram_until_it_runs_again() -> None:
    engine = two_in_dram()
    begin(engine, "a2")
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.connector.side.note_preempted("a2", engine.clock())
    assert worth(engine, "a") > IN_VRAM
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@MODES
def test_what_left_for_a_turn_whose_client_went_away_is_put_back(async_scheduling: bool) -> None:
    engine = two_in_dram(async_scheduling=async_scheduling)
    begin(engine, "a2")
    run_turn(engine, "c", TOKENS, seed=3, program="c", idle=False)
    engine.run_until_idle(until=lambda: in_dram(engine, "c") == BLOCKS)
    assert not in_dram(engine, "a")
    assert engine.requests["a2"].num_computed_tokens > (BLOCKS + 1) * 16
    engine.abort("a2")
    engine.run_until_idle()
    assert in_dram(engine, "a2") == BLOCKS, "no more than there was"
    park(engine)
    run_turn(engine, "again", engine.next_prompt("a", 8), program="a")
    assert engine.cached["again"][1] == BLOCKS * 16
    assert answers_as_without_a_tier(engine, "again", "c")
    wind_down(engine)


def test_a_last_turn_whose_client_went_away_leaves_nothing() -> None:
    engine = two_in_dram()
    begin(engine, "a2", final=True)
    run_turn(engine, "c", TOKENS, seed=3, program="c", idle=False)
    engine.run_until_idle(until=lambda: in_dram(engine, "c") == BLOCKS)
    engine.abort("a2")
    engine.run_until_idle()
    assert not in_dram(engine, "a")
    wind_down(engine)


@pytest.mark.parametrize("groups", ["hybrid", "state"])
def test_windows_and_states_give_up_nothing(groups: str) -> None:
    """VRAM has the window or the state at the turn's own end, not those that DRAM has."""
    engine = ranked(num_slots=400, groups=groups)
    run_turn(engine, "a", TOKENS, seed=1, program="a")
    park(engine)
    begin(engine, "a2")
    assert worth(engine, "a") > IN_VRAM
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_a_disk_still_knows_how_many_turns_used_what_left_and_came_back() -> None:
    engine = on_disk(num_slots=2 * BLOCKS, config={"policy": "adaptive"})
    store_all(engine)
    marks = engine.connector.side.tier.dram.index.marks
    assert marks is not None
    marks.passes_on = lambda now: False  # so that nothing leaves but by its worth
    for seed, name in enumerate("ab", 1):
        run_turn(engine, name, TOKENS, seed=seed, program=name)
    park(engine)
    begin(engine, "a2")
    run_turn(engine, "c", TOKENS, seed=3, program="c", idle=False)
    engine.run_until_idle(until=lambda: in_dram(engine, "c") == BLOCKS)
    assert not in_dram(engine, "a")
    assert marks.num_unsaved == 0, "nothing is lost"
    engine.run_until_idle()
    slots = engine.connector.side.tier.dram.index.slots_of(keys(engine, "a2"))
    uses = marks.uses[slots[slots >= 0]].tolist()
    assert uses[:BLOCKS] == [2] * BLOCKS
    assert set(uses[BLOCKS:]) == {1}
    assert answers_as_without_a_tier(engine)
    come_to_rest(engine)
    wind_down(engine)
