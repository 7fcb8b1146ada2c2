"""Whatever goes wrong with a copy is a miss: counted, recomputed, and nothing is left held."""

from __future__ import annotations

from typing import Any

import pytest

from continuum_connector.scheduler.tiers.slots import numbers_of
from continuum_connector.scheduler.tiers.traffic import Kind, TransferState
from tests.proofs import num_orphans_read
from tests.vllm.harness import Engine
from tests.vllm.tiering import (
    GROUPS,
    MODES,
    RANKS,
    answers_as_without_a_tier,
    assert_drained,
    check,
    hold,
    in_flight,
    loading,
    outlast_pins,
    park,
    run_turn,
    tiered,
    total,
    wind_down,
)


def assert_recovered(engine: Engine) -> None:
    """Assert that everybody got an answer, as if there were no tier, and nothing is left."""
    hold(engine, False)
    engine.run_until_idle()
    assert set(engine.finish_reasons.values()) == {"length"}
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@GROUPS
def test_blocks_whose_hash_vllm_forgot_while_a_pin_held_them_are_not_stored(groups: str) -> None:
    engine = tiered(groups=groups)
    run_turn(engine, "a", 200, program="p")
    engine.connector.side.tier.index.clear()
    pinned = [block for block in engine.pool.blocks if block.block_hash]
    engine.pool.evict_blocks({block.block_id for block in pinned[5:]})
    outlast_pins(engine)
    check(engine)
    assert engine.connector.side.tier.index.num_ready == (5 if groups == "full" else 0)


@MODES
def test_a_failed_store_leaves_no_slots_and_is_not_found(async_scheduling: bool) -> None:
    engine = tiered(async_scheduling=async_scheduling, hold_transfers=True)
    run_turn(engine, "a", 200, program="p", idle=False)
    engine.fail()
    engine.run_until_idle(until=lambda: not in_flight(engine, Kind.STORE))
    index = engine.connector.side.tier.index
    assert (index.num_free, index.num_ready, index.num_writing) == (400, 0, 0)
    assert (total(engine, "stores", "failed"), total(engine, "stores", "done")) == (1, 0)
    assert total(engine, "transfer_failures", "driver") == 1
    assert engine.connector.side.traffic.holds.num_holds == 0
    engine.scheduler.reset_prefix_cache()
    engine.add("b", engine.next_prompt("a", 20), program="p")
    assert_recovered(engine)
    assert engine.cached["b"] == (0, 0)


def test_what_a_failed_store_left_out_is_stored_when_the_pin_expires() -> None:
    engine = tiered(hold_transfers=True)
    run_turn(engine, "a", 200, program="p", idle=False)
    engine.fail()
    hold(engine, False)
    engine.step()
    outlast_pins(engine)
    assert engine.connector.side.tier.index.num_ready == 13
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert_recovered(engine)


@MODES
@GROUPS
@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_a_failed_load_is_recomputed_and_its_slots_are_forgotten(
    async_scheduling: bool, groups: str, on_failure: str
) -> None:
    engine = loading(
        async_scheduling=async_scheduling, groups=groups, load_failure_policy=on_failure
    )
    (load,) = in_flight(engine, Kind.LOAD)
    engine.fail(reason="corrupt")
    engine.run_until_idle(until=lambda: not in_flight(engine, Kind.LOAD))
    index = engine.connector.side.tier.index
    assert index.keys_of(load.slots) == []
    assert total(engine, "loads", "failed") == 1
    assert total(engine, "transfer_failures", "corrupt") == 1
    assert_recovered(engine)
    assert total(engine, "loaded_blocks") == 0


@MODES
@GROUPS
def test_one_rank_that_fails_is_enough(async_scheduling: bool, groups: str) -> None:
    engine = loading(async_scheduling=async_scheduling, groups=groups, world_size=2)
    engine.workers[1].fail()
    for _ in range(4):
        engine.step()
        check(engine)
    assert engine.requests["b"].status.name == "WAITING_FOR_REMOTE_KVS"
    engine.workers[0].settle()
    assert_recovered(engine)
    assert total(engine, "loads", "failed") == 1


@MODES
@GROUPS
def test_a_late_load_is_cancelled_and_recomputed(async_scheduling: bool, groups: str) -> None:
    engine = loading(async_scheduling=async_scheduling, groups=groups, timeout_s=5.0)
    engine.clock.advance(4.0)
    for _ in range(5):
        engine.step()
    assert in_flight(engine, Kind.LOAD)
    engine.clock.advance(1.0)
    engine.run_until_idle(until=lambda: "b" in engine.finish_reasons)
    assert total(engine, "loads", "cancelled") == 1
    assert total(engine, "transfer_failures", "timeout") == 1
    assert total(engine, "transfer_failures", "cancelled") == 0
    assert_recovered(engine)


@MODES
@GROUPS
@pytest.mark.parametrize("ends", ["settle", "fail"])
def test_a_request_aborted_while_it_loads_keeps_its_blocks_until_the_load_ends(
    async_scheduling: bool, groups: str, ends: str
) -> None:
    engine = loading(async_scheduling=async_scheduling, groups=groups)
    slots = numbers_of(in_flight(engine, Kind.LOAD)[0].slots).tolist()
    engine.abort("b")
    for _ in range(5):
        assert engine.step()
        check(engine)
    assert engine.usage() > 0
    engine.reset_prefix_cache()  # refused by vLLM, but the tier has forgotten everything
    index = engine.connector.side.tier.index
    assert num_orphans_read(index) == len(slots)
    getattr(engine, ends)()
    engine.run_until_idle()
    assert index.num_free == index.num_slots
    assert_drained(engine)


@MODES
def test_a_store_in_flight_survives_the_preemption_of_everybody(async_scheduling: bool) -> None:
    engine = tiered(40, async_scheduling=async_scheduling, hold_transfers=True)
    run_turn(engine, "a", 200, program="p", final=False, idle=False)
    outlast = engine.clock.now + 1
    for i in range(3):
        engine.add(f"long{i}", 60, max_tokens=150, seed=i + 1, final=True)
    while engine.num_preemptions == 0 or engine.clock.now < outlast:
        assert engine.step()
        check(engine)
    assert in_flight(engine, Kind.STORE)  # its blocks were never given away: the oracle looks
    engine.settle()
    assert_recovered(engine)
    assert total(engine, "stores", "done") == 1


@MODES
def test_a_reset_abandons_the_stores_in_flight(async_scheduling: bool) -> None:
    engine = tiered(async_scheduling=async_scheduling, hold_transfers=True)
    run_turn(engine, "a", 200, program="p", idle=False)
    for _ in range(3):
        engine.step()
    index = engine.connector.side.tier.index
    assert index.num_writing == 13
    assert engine.reset_prefix_cache()
    assert (engine.usage(), index.num_free, index.num_ready) == (0, 400 - 13, 0)
    run_turn(engine, "b", 3000, seed=4, idle=False)  # VRAM is somebody else's at once
    hold(engine, False)
    engine.run_until_idle()
    assert (total(engine, "stores", "abandoned"), index.num_writing) == (1, 0)
    run_turn(engine, "c", engine.next_prompt("a", 20), program="p")
    assert engine.cached["c"] == (0, 0)
    assert_recovered(engine)


@MODES
def test_a_reset_ends_a_store_that_has_not_left_at_once(async_scheduling: bool) -> None:
    engine = tiered(async_scheduling=async_scheduling, hold_transfers=True)
    engine.add("a", 200, program="p")
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.STORE)))
    (store,) = in_flight(engine, Kind.STORE)
    assert store.state is TransferState.QUEUED
    engine.reset_prefix_cache()
    index = engine.connector.side.tier.index
    assert store.state is TransferState.ABANDONED
    assert (index.num_free, len(engine.connector.side.traffic.ledger)) == (400, 0)
    engine.run_until_idle()
    assert not engine.worker.pending
    assert engine.worker.num_blocks_stored == 0
    assert total(engine, "stores", "abandoned") == 1
    assert_recovered(engine)


@MODES
def test_the_slots_that_a_load_reads_outlive_a_reset(async_scheduling: bool) -> None:
    engine = loading(async_scheduling=async_scheduling)
    for worker in engine.workers:
        worker.cancels_late = True
    assert engine.reset_prefix_cache()
    assert num_orphans_read(engine.connector.side.tier.index) == 13
    engine.settle()
    assert_recovered(engine)


@MODES
@RANKS
def test_a_rank_without_memory_turns_the_tier_off_for_good(
    async_scheduling: bool, world_size: int
) -> None:
    engine = tiered(async_scheduling=async_scheduling, world_size=world_size)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    engine.workers[-1].report_tier_down("cannot page-lock 64 GiB")
    run_turn(engine, "b", 100, seed=3, program="q")
    tier = engine.connector.side.tier
    assert (tier.is_up, tier.down_reason) == (False, "cannot page-lock 64 GiB")
    assert total(engine, "tier_up") == 0
    num_stores = total(engine, "transfers_admitted", "store")
    run_turn(engine, "c", engine.next_prompt("a", 20), program="p")
    park(engine)
    run_turn(engine, "d", engine.next_prompt("c", 20), program="p")
    assert engine.cached["c"] == engine.cached["d"] == (0, 0)
    assert total(engine, "transfers_admitted", "store") == num_stores
    assert tier.index.num_free == tier.index.num_slots
    assert_recovered(engine)


def test_a_slot_gone_between_the_promise_and_the_allocation_is_a_failed_load() -> None:
    engine = tiered()
    run_turn(engine, "a", 200, program="p")
    park(engine)
    tier, match = engine.connector.side.tier, engine.connector.get_num_new_matched_tokens

    def forgetful(*args: Any) -> Any:
        engine.connector.get_num_new_matched_tokens = match
        promised = match(*args)
        tier.index.clear()
        return promised

    engine.connector.get_num_new_matched_tokens = forgetful
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert total(engine, "loads", "failed") == 1
    assert_recovered(engine)
