"""The DRAM tier: turns are stored once, come back block for block, and answer as without it."""

from __future__ import annotations

import pytest

from bench.sim import versions
from continuum_connector.errors import ConfigError
from continuum_connector.scheduler.tiers.traffic import Kind
from tests.vllm.harness import Engine, OracleError, prompt
from tests.vllm.tiering import (
    GROUPS,
    MODES,
    RANKS,
    SLOT_BYTES,
    answers_as_without_a_tier,
    assert_drained,
    check,
    hold,
    in_flight,
    outlast_pins,
    park,
    run_turn,
    tiered,
    total,
    wind_down,
)


@MODES
def test_a_block_is_stored_once_however_many_turns_share_it(async_scheduling: bool) -> None:
    engine = tiered(async_scheduling=async_scheduling)
    run_turn(engine, "a", 200, program="p")
    assert engine.worker.num_blocks_stored == 13  # KV of 215 tokens: the last is never computed
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert engine.worker.num_blocks_stored == 15  # of 251
    run_turn(engine, "fork", engine.next_prompt("a", 40, seed=7), program="q")
    assert engine.worker.num_blocks_stored == 15 + 16 - 13  # of 271
    assert total(engine, "stored_blocks") == engine.connector.side.tier.index.num_ready
    outlast_pins(engine)
    assert engine.worker.num_blocks_stored == 18  # nothing left to store when pins expire
    assert_drained(engine)


@MODES
@GROUPS
@RANKS
def test_a_turn_comes_back_block_for_block(
    async_scheduling: bool, groups: str, world_size: int
) -> None:
    engine = tiered(async_scheduling=async_scheduling, groups=groups, world_size=world_size)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    hold(engine)
    engine.add("b", engine.next_prompt("a", 20), program="p")
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.LOAD)))
    assert engine.requests["b"].status.name == "WAITING_FOR_REMOTE_KVS"
    hold(engine, False)
    engine.run_until_idle()
    assert engine.cached["b"] == (0, 208)
    # Of two sliding groups only the window of 64 tokens, 4 blocks or one more, is needed, and of
    # groups of states one block.
    num_blocks = {worker.num_blocks_loaded for worker in engine.workers}
    expected = {"full": {13}, "hybrid": set(range(13 + 8, 13 + 11)), "state": {13 + 2}}
    assert num_blocks <= expected[groups]
    assert len(num_blocks) == 1
    assert total(engine, "hit_tokens", "dram") == 208
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@MODES
def test_only_what_vram_lost_is_loaded(async_scheduling: bool) -> None:
    engine = tiered(async_scheduling=async_scheduling)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    run_turn(engine, "c", 100, program="q")  # brings six blocks of p back
    assert engine.cached["c"] == (0, 96)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"] == (96, 112)
    assert engine.worker.num_blocks_loaded == 13
    assert answers_as_without_a_tier(engine)


@MODES
def test_one_token_is_left_to_compute(async_scheduling: bool) -> None:
    engine = tiered(async_scheduling=async_scheduling)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    run_turn(engine, "b", engine.next_prompt("a", 0)[:208], program="p")  # all of it is in DRAM
    assert engine.cached["b"] == (0, 192)
    assert answers_as_without_a_tier(engine)


@MODES
@GROUPS
def test_a_program_under_pressure_answers_as_without_a_tier(
    async_scheduling: bool, groups: str
) -> None:
    num_blocks = {"full": 60, "hybrid": 150, "state": 70}[groups]
    engine = tiered(num_blocks, async_scheduling=async_scheduling, groups=groups)
    for turn in range(3):
        for i in range(6):
            tokens = prompt(90 + 30 * i, seed=i % 3)
            if turn:
                tokens = engine.next_prompt(f"{i}.{turn - 1}", 20, seed=turn)
            engine.add(f"{i}.{turn}", tokens, 20 + 7 * i, program=f"p{i}")
        engine.run_until_idle()
        check(engine)
    assert engine.worker.num_blocks_loaded > 0
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@GROUPS
def test_a_poisoned_slot_fails_the_oracle(groups: str) -> None:
    """The negative control: equal outputs mean something."""
    engine = tiered(groups=groups)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    for slot in engine.worker.dram:
        engine.worker.poison(slot)
    engine.add("b", engine.next_prompt("a", 20), program="p")
    with pytest.raises(OracleError, match="b reads wrong KV"):
        engine.run_until_idle()


@pytest.mark.parametrize("num_cut", [1, 17, 40, 70, 150])
@MODES
def test_a_hybrid_turn_that_diverges_before_the_end_is_answered_right(
    async_scheduling: bool, num_cut: int
) -> None:
    engine = tiered(async_scheduling=async_scheduling, groups="hybrid")
    run_turn(engine, "a", 100, program="p")
    run_turn(engine, "b", engine.next_prompt("a", 100), program="p")
    park(engine)
    tokens = engine.next_prompt("b", 0)[:-num_cut] + prompt(50, seed=9)
    run_turn(engine, "c", tokens, program="p")
    # vLLM frees what slides out of a window, so a hit ends where a turn ended: b, or else a.
    assert engine.cached["c"] == (0, 224 if num_cut == 1 else 112 if num_cut < 120 else 0)
    assert answers_as_without_a_tier(engine)


def test_a_load_never_reads_a_slot_whose_store_has_not_settled() -> None:
    engine = tiered()
    run_turn(engine, "z", 17, seed=9, program="z")
    hold(engine)
    run_turn(engine, "a", 200, program="p", idle=False)
    engine.pool.evict_blocks({block.block_id for block in engine.pool.blocks if block.block_hash})
    run_turn(engine, "b", engine.next_prompt("a", 20), program="q", idle=False)
    assert engine.cached["b"] == (0, 0)
    assert not in_flight(engine, Kind.LOAD)
    engine.settle()
    engine.step()
    assert (
        engine.connector.side.tier.index.num_ready == 2 + 13 + 2
    )  # of b only what a had not claimed
    hold(engine, False)
    engine.run_until_idle()
    park(engine)
    run_turn(engine, "c", engine.next_prompt("b", 20), program="q")
    assert engine.cached["c"] == (0, 240)
    assert answers_as_without_a_tier(engine)


def test_a_slot_that_is_read_is_given_to_nobody() -> None:
    engine = tiered(num_slots=15)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    hold(engine)
    engine.add("b", engine.next_prompt("a", 20), program="p")
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.LOAD)))
    run_turn(engine, "c", 200, seed=2, program="q", idle=False)
    for transfer in in_flight(engine, Kind.STORE):
        engine.settle(transfer.id)
    engine.settle()  # the oracle looks whether what b reads was overwritten
    hold(engine, False)
    engine.run_until_idle()
    check(engine)
    assert engine.cached["b"] == (0, 208)
    assert answers_as_without_a_tier(engine)


def test_the_second_rank_decides_when_a_store_has_settled() -> None:
    engine = tiered(world_size=2, hold_transfers=True)
    run_turn(engine, "a", 200, program="p", idle=False)
    index = engine.connector.side.tier.index
    engine.workers[0].settle()
    for _ in range(3):
        engine.step()
    assert (index.num_writing, index.num_ready) == (13, 0)
    assert in_flight(engine, Kind.STORE)[0].hold is not None
    engine.workers[1].settle()
    engine.step()
    assert (index.num_writing, index.num_ready) == (0, 13)
    assert engine.connector.side.traffic.holds.num_holds == 0
    assert total(engine, "stores", "done") == 1


@MODES
def test_an_idle_engine_steps_until_its_stores_have_settled_and_then_stops(
    async_scheduling: bool,
) -> None:
    engine = tiered(async_scheduling=async_scheduling, hold_transfers=True)
    run_turn(engine, "a", 200, program="p", final=False, idle=False)
    for _ in range(20):
        assert engine.step()
    engine.settle()
    assert engine.run_until_idle() <= 3
    assert not engine.step()


def test_a_small_tier_keeps_the_head_of_a_chain() -> None:
    engine = tiered(num_slots=5)
    run_turn(engine, "a", 200, program="p")
    assert engine.worker.num_blocks_stored == 5
    park(engine)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"] == (0, 80)
    assert answers_as_without_a_tier(engine)


def test_the_least_recently_used_program_leaves_the_tier_first() -> None:
    engine = tiered(num_slots=20)
    for name, seed in (("p", 1), ("q", 2)):
        run_turn(engine, f"{name}1", 134, seed=seed, program=name)  # nine blocks
    park(engine)
    run_turn(engine, "p2", engine.next_prompt("p1", 1), program="p")  # ten: q is the oldest now
    park(engine)
    run_turn(engine, "r1", 100, seed=3, program="r")  # seven: takes six of q's, last ones first
    park(engine)
    run_turn(engine, "p3", engine.next_prompt("p2", 1), final=True)
    run_turn(engine, "q2", engine.next_prompt("q1", 1), final=True)
    assert engine.cached["p3"] == (0, 160)
    assert engine.cached["q2"] == (0, 48)
    assert answers_as_without_a_tier(engine)


def test_a_finished_programs_blocks_leave_the_tier_first() -> None:
    engine = tiered(num_slots=20)
    for name, seed in (("p", 1), ("q", 2)):
        run_turn(engine, f"{name}1", 134, seed=seed, program=name)
        outlast_pins(engine)
    run_turn(engine, "q2", engine.next_prompt("q1", 1), program="q", final=True)
    park(engine)
    run_turn(engine, "r1", 134, seed=3, program="r")
    park(engine)
    run_turn(engine, "p2", engine.next_prompt("p1", 1), final=True)
    run_turn(engine, "q3", engine.next_prompt("q1", 1), final=True)
    assert (engine.cached["p2"], engine.cached["q3"]) == ((0, 144), (0, 32))


@MODES
def test_nothing_is_loaded_for_who_may_read_no_cache(async_scheduling: bool) -> None:
    """Prompt log probabilities need every token of the prompt computed."""
    engine = tiered(async_scheduling=async_scheduling)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p", prompt_logprobs=1)
    assert engine.cached["b"] == (0, 0)
    assert engine.worker.num_blocks_loaded == 0
    park(engine)
    run_turn(engine, "c", engine.next_prompt("b", 20), program="p")
    assert engine.cached["c"][1] > 0
    assert answers_as_without_a_tier(engine)


@RANKS
def test_a_tier_without_room_for_one_block_is_refused_in_one_sentence(world_size: int) -> None:
    least = SLOT_BYTES * world_size
    sentence = f"dram_bytes = {least - 1} over {world_size} ranks holds no block .* set {least} or"
    with pytest.raises(ConfigError, match=sentence):
        Engine(100, world_size=world_size, extra_config={"dram_bytes": least - 1})
    engine = Engine(100, world_size=world_size, extra_config={"dram_bytes": least})
    assert engine.connector.side.tier.num_wanted_slots == 1


@pytest.mark.skipif(versions.CAN_FAIL_REQUESTS, reason="this vLLM recomputes by request")
def test_hybrid_groups_have_no_tier_where_a_failed_load_could_not_be_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(groups="hybrid", extra_config={"dram_bytes": "4MiB"})
    run_turn(engine, "a", 200, program="p")
    assert not engine.connector.side.tier.is_up
    assert "no DRAM tier for hybrid KV groups on this vLLM" in caplog.text
