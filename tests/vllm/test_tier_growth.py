"""Host memory that comes while the server serves: hits and stores before, meanwhile and after."""

from __future__ import annotations

from typing import Any

import pytest

from continuum_connector.vllm import proven
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import (
    GROUPS,
    MODES,
    answers_as_without_a_tier,
    check,
    hold,
    outlast_pins,
    park,
    run_turn,
    tiered,
    total,
    wind_down,
)


def index(engine: Engine) -> Any:
    return engine.connector.side.tier.index


def capacity(engine: Engine) -> tuple[float, float]:
    """What the gauges say: blocks usable by now, and wanted."""
    engine.connector.side.tier.update_gauges()
    return total(engine, "dram_capacity_blocks"), total(engine, "dram_wanted_blocks")


def test_what_is_asked_for_is_told_where_there_can_be_no_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proven, "why_no_tier", lambda server: "no DRAM tier with such a model")
    engine = tiered(num_slots=40)
    assert capacity(engine) == (0, 40)
    assert total(engine, "tier_up") == 0, "ContinuumTierDown fires"
    off = tiered(num_slots=0)
    assert capacity(off) == (0, 0)


def grow(engine: Engine, *num_slots: int) -> None:
    """Each rank's pool comes to so many slots; the next step reports it."""
    for worker, number in zip(engine.workers, num_slots, strict=True):
        worker.report_ready(number)


@MODES
def test_turns_are_stored_and_found_before_while_and_after_the_pool_grows(
    async_scheduling: bool,
) -> None:
    engine = tiered(num_slots=40, ready_slots=5, async_scheduling=async_scheduling)
    run_turn(engine, "a", 200, program="p")  # 13 blocks, of which the head fits
    check(engine)
    assert capacity(engine) == (5, 40)
    park(engine)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"] == (0, 5 * 16)
    grow(engine, 10)
    run_turn(engine, "c", engine.next_prompt("b", 20), program="p")
    check(engine)
    assert capacity(engine) == (10, 40)
    park(engine)
    run_turn(engine, "d", engine.next_prompt("c", 20), program="p")
    assert engine.cached["d"] == (0, 10 * 16)
    grow(engine, 40)
    run_turn(engine, "e", engine.next_prompt("d", 20), program="p")
    park(engine)
    run_turn(engine, "f", engine.next_prompt("e", 20), program="p")
    assert engine.cached["f"][1] > 20 * 16
    assert capacity(engine) == (40, 40)
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@GROUPS
@MODES
def test_a_pool_that_grows_at_every_step_changes_no_answer(
    async_scheduling: bool, groups: str
) -> None:
    engine = tiered(num_slots=400, ready_slots=1, async_scheduling=async_scheduling, groups=groups)
    for turn in range(3):
        for i in range(5):
            tokens = engine.next_prompt(f"{i}.{turn - 1}", 20) if turn else prompt(90, seed=i)
            engine.add(f"{i}.{turn}", tokens, 20, program=f"p{i}")
        while engine.step():
            check(engine)
            grow(engine, min(400, engine.worker.num_ready_slots + 3))
        park(engine)
    assert engine.worker.num_blocks_loaded > 0
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_the_slowest_rank_sets_the_pace() -> None:
    engine = tiered(num_slots=40, ready_slots=0, world_size=2)
    engine.workers[0].report_ready(20)
    run_turn(engine, "a", 200, program="p")
    assert capacity(engine) == (0, 40)
    assert engine.worker.num_blocks_stored == 0
    grow(engine, 20, 7)
    run_turn(engine, "b", 40, seed=2, program="q")
    assert capacity(engine) == (7, 40)
    grow(engine, 40, 7)
    run_turn(engine, "c", 40, seed=3, program="r")
    assert capacity(engine) == (7, 40)
    grow(engine, 40, 40)
    run_turn(engine, "d", 40, seed=4, program="s")
    assert capacity(engine) == (40, 40)
    check(engine)
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_one_rank_that_has_not_reported_keeps_the_tier_empty() -> None:
    engine = tiered(num_slots=40, world_size=2)
    engine.workers[1]._report.ready_slots.clear()
    run_turn(engine, "a", 200, program="p")
    assert (index(engine).num_slots, engine.worker.num_blocks_stored) == (0, 0)
    wind_down(engine)


def test_a_turn_that_ended_before_there_was_memory_is_stored_when_its_pin_ends() -> None:
    engine = tiered(num_slots=40, ready_slots=0)
    run_turn(engine, "a", 200, program="p")
    assert engine.worker.num_blocks_stored == 0
    grow(engine, 40)
    run_turn(engine, "b", 17, seed=2, program="q")
    park(engine)
    run_turn(engine, "c", engine.next_prompt("a", 20), program="p")
    assert engine.cached["c"] == (0, 208)
    assert answers_as_without_a_tier(engine)


def test_more_than_was_wanted_is_not_used() -> None:
    engine = tiered(num_slots=4)
    grow(engine, 9)
    run_turn(engine, "a", 200, program="p")
    assert capacity(engine) == (4, 4)


def test_a_tier_that_goes_down_while_it_grows_has_no_capacity() -> None:
    engine = tiered(num_slots=40, ready_slots=20)
    run_turn(engine, "a", 200, program="p")
    grow(engine, 30)
    engine.worker.report_tier_down("only 30 of 40 blocks")
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert capacity(engine) == (0, 40)
    assert total(engine, "tier_up") == 0
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@GROUPS
@MODES
def test_of_a_pool_that_was_given_back_what_is_there_again_is_used(
    async_scheduling: bool, groups: str
) -> None:
    """And nothing else: slots that a rank refuses would be taken first, again and again."""
    engine = tiered(num_slots=200, async_scheduling=async_scheduling, groups=groups)
    for i in range(8):
        run_turn(engine, f"{i}.0", 200, seed=i, program=f"p{i}")
    park(engine)
    engine.worker.give_back()
    engine.reset_prefix_cache()
    grow(engine, 100)
    run_turn(engine, "other", 17, seed=9, program="q")
    assert capacity(engine) == (100, 200)
    for i in range(4):
        run_turn(engine, f"{i}.1", 200, seed=i, program=f"p{i}")
        check(engine)
    park(engine)
    for i in range(4):
        run_turn(engine, f"{i}.2", engine.next_prompt(f"{i}.1", 20), program=f"p{i}")
    assert total(engine, "transfer_failures", "asleep") == 0
    assert engine.cached["3.2"][1] >= 12 * 16
    grow(engine, 200)
    run_turn(engine, "more", 17, seed=10, program="q")
    assert capacity(engine) == (200, 200)
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_only_blocks_that_left_for_room_count_as_evicted() -> None:
    engine = tiered(num_slots=15, hold_transfers=True)
    run_turn(engine, "a", 200, program="p", idle=False)
    engine.fail()
    engine.run_until_idle()
    hold(engine, False)
    outlast_pins(engine)  # stored after all
    engine.reset_prefix_cache()
    assert total(engine, "dram_evicted_blocks") == 0
    run_turn(engine, "b", 200, seed=2, program="q")
    assert total(engine, "dram_evicted_blocks") == 0
    run_turn(engine, "c", 100, seed=3, program="r")  # seven blocks, two free
    assert total(engine, "dram_evicted_blocks") == 5
    wind_down(engine)
