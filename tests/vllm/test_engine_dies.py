"""A copy engine that fails while the server serves: no tier from there on, and everybody's answer.

Real are the scheduler, both our halves and the copy engine; the driver is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from continuum_connector.scheduler.tiers.traffic import HANGS_AFTER_S, LOOK_S, Kind
from continuum_connector.worker.abi import Direction
from tests.native import sim
from tests.vllm.harness import Engine
from tests.vllm.native_worker import native_engines
from tests.vllm.tiering import (
    GROUPS,
    MODES,
    RANKS,
    answers_as_without_a_tier,
    assert_drained,
    check,
    in_flight,
    outlast_pins,
    park,
    run_turn,
    total,
    wind_down,
)

NUM_SLOTS = 400
DEAD_CONTEXT = 700


@pytest.fixture
def served() -> Iterator[Any]:
    """Builds engines with real workers, and closes them."""
    with native_engines(NUM_SLOTS) as build:
        yield build


def stored(engine: Engine) -> None:
    """One turn of program p is in DRAM and nowhere else."""
    run_turn(engine, "a", 200, program="p")
    park(engine)
    assert engine.connector.side.tier.index.num_ready == 13


def assert_all_answered(engine: Engine) -> None:
    """As without a tier, and nothing is left of it."""
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def assert_no_tier(engine: Engine, why: str) -> None:
    """It is down for all ranks, nothing is promised, and everybody gets an answer."""
    tier = engine.connector.side.tier
    assert not tier.is_up
    assert why in tier.down_reason
    assert total(engine, "tier_up") == 0
    admitted = total(engine, "transfers_admitted")
    park(engine)
    run_turn(engine, "y", engine.next_prompt("a", 20), program="p")
    park(engine)
    run_turn(engine, "z", engine.next_prompt("y", 20), program="p")
    assert engine.cached["y"] == engine.cached["z"] == (0, 0)
    assert total(engine, "transfers_admitted") == admitted
    assert set(engine.finish_reasons.values()) == {"length"}
    assert_all_answered(engine)


@MODES
@GROUPS
@RANKS
def test_what_is_stored_comes_back_through_the_real_worker(
    served: Any, async_scheduling: bool, groups: str, world_size: int
) -> None:
    engine = served(async_scheduling=async_scheduling, groups=groups, world_size=world_size)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"][1] > 0
    assert_all_answered(engine)


@MODES
@RANKS
def test_a_dead_context_takes_the_tier_down_and_its_load_is_recomputed(
    served: Any, async_scheduling: bool, world_size: int
) -> None:
    engine = served(async_scheduling=async_scheduling, world_size=world_size)
    stored(engine)
    sim.fail_after(engine.workers[-1].engine, 0, code=DEAD_CONTEXT)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"] == (0, 0)
    assert total(engine, "loads", "failed") == 1
    assert total(engine, "transfer_failures", "driver") == 1
    assert_no_tier(engine, "the copy engine failed: CUDA error 700")


@MODES
def test_a_dead_context_takes_the_tier_down_by_a_store(served: Any, async_scheduling: bool) -> None:
    engine = served(async_scheduling=async_scheduling)
    sim.fail_after(engine.worker.engine, 0, code=DEAD_CONTEXT)
    run_turn(engine, "a", 200, program="p")
    assert total(engine, "transfer_failures", "driver") == 1
    assert_no_tier(engine, "the copy engine failed: CUDA error 700")


@MODES
@RANKS
def test_loads_that_wait_when_the_context_dies_are_all_recomputed(
    served: Any, async_scheduling: bool, world_size: int
) -> None:
    """One is with the driver, others are queued, and none of them may be told of twice."""
    engine = served(async_scheduling=async_scheduling, world_size=world_size)
    for i in range(3):
        run_turn(engine, f"a{i}", 200, seed=i + 5, program=f"p{i}")
    run_turn(engine, "a", 100, program="p")
    park(engine)
    for worker in engine.workers:
        worker.hold_copies()
    for i in range(3):
        engine.add(f"b{i}", engine.next_prompt(f"a{i}", 20), program=f"p{i}")
    engine.run_until_idle(until=lambda: len(in_flight(engine, Kind.LOAD)) == 3)
    engine.step()
    sim.fail_after(engine.workers[-1].engine, 0, count=1, code=DEAD_CONTEXT)
    for worker in engine.workers:
        worker.end_copies()
    engine.run_until_idle(until=lambda: not in_flight(engine, Kind.LOAD))
    check(engine)
    engine.run_until_idle()
    assert total(engine, "loads", "failed") == 3
    assert_no_tier(engine, "the copy engine failed: CUDA error 700")


def test_an_error_that_the_context_survives_costs_one_load_and_no_tier(served: Any) -> None:
    engine = served()
    stored(engine)
    sim.fail_after(engine.worker.engine, 0, code=2)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert total(engine, "loads", "failed") == 1
    assert total(engine, "tier_up") == 1
    assert_all_answered(engine)


def hung(engine: Engine) -> None:
    """Request b waits for a load that the driver has and does not end; 200 tokens are in VRAM."""
    stored(engine)
    worker = engine.worker
    worker.hold_copies()
    before = worker.num_calls(Direction.LOAD)
    engine.add("b", engine.next_prompt("a", 20), program="p")
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.LOAD)))
    engine.step()
    worker.wait_until_issued(Direction.LOAD, before)


def end_copies(engine: Engine) -> None:
    """What hung ends, and an idle engine sees it when it looks again."""
    engine.worker.end_copies()
    for _ in range(2):
        engine.clock.advance(LOOK_S)
        engine.run_until_idle()


@MODES
def test_a_load_that_hangs_keeps_its_request_and_its_blocks_and_costs_the_tier(
    served: Any, async_scheduling: bool
) -> None:
    engine = served(async_scheduling=async_scheduling, timeout_s=5.0)
    hung(engine)
    held = engine.usage()
    assert held > 0
    engine.clock.advance(5.0)
    for _ in range(20):
        engine.step()
    assert total(engine, "tier_up") == 1  # cancelled, and may yet end
    engine.clock.advance(HANGS_AFTER_S)
    engine.step()
    assert total(engine, "tier_up") == 0
    assert "hangs: begun 6" in engine.connector.side.tier.down_reason
    run_turn(engine, "c", 300, seed=9, idle=False)  # others go on, in other blocks
    engine.clock.advance(3600.0)
    for _ in range(50):
        engine.step()
    assert engine.requests["b"].status.name == "WAITING_FOR_REMOTE_KVS"
    assert total(engine, "transfers_admitted", "load") == len(in_flight(engine, Kind.LOAD)) == 1
    assert engine.usage() == held  # no block of the copy is anybody else's
    end_copies(engine)
    assert_no_tier(engine, "hangs")


def test_a_store_that_hangs_keeps_its_blocks_and_nobody_waits_for_it(served: Any) -> None:
    engine = served(timeout_s=5.0)
    engine.worker.hold_copies()
    run_turn(engine, "a", 200, program="p", idle=False)
    engine.worker.wait_until_issued(Direction.STORE, 0)
    for _ in range(3):
        engine.clock.advance(HANGS_AFTER_S)
        for _ in range(20):
            engine.step()
    assert "store 1 hangs" in engine.connector.side.tier.down_reason
    (store,) = in_flight(engine, Kind.STORE)
    assert store.hold is not None
    assert engine.connector.side.traffic.holds.num_blocks == 13
    run_turn(engine, "b", 2000, seed=9, idle=False)
    assert engine.finish_reasons["b"] == "length"
    check(engine)
    outlast_pins(engine)
    times: dict[str, float] = {}
    engine.connector.side.steps._waker = SimpleNamespace(
        set=lambda at, whose="pins": times.update({whose: at}), close=lambda: None
    )
    before = engine.num_steps
    engine.idle(60.0)
    assert engine.num_steps - before <= 61  # looks, at 100 steps a second
    assert times["tier"] == engine.connector.side.tier.next_look
    end_copies(engine)
    assert_no_tier(engine, "hangs")


def test_a_request_that_gives_up_on_a_load_that_hangs_leaves_its_blocks_to_it(served: Any) -> None:
    engine = served(timeout_s=5.0)
    hung(engine)
    held = engine.usage()
    engine.abort("b")
    engine.clock.advance(3600.0)
    for _ in range(50):
        engine.step()
        check(engine)
    assert engine.usage() == held
    assert total(engine, "transfers_in_flight", "load") == 1
    end_copies(engine)
    assert_drained(engine)


def test_a_server_that_did_not_step_finds_no_copy_hung(served: Any) -> None:
    engine = served(timeout_s=5.0)
    hung(engine)
    engine.clock.advance(6.0)
    engine.step()  # cancelled
    engine.clock.advance(2 * HANGS_AFTER_S)  # the process was stopped
    engine.step()
    assert total(engine, "tier_up") == 1
    engine.worker.end_copies()
    engine.run_until_idle()
    assert total(engine, "transfer_failures", "timeout") <= 1
    assert total(engine, "tier_up") == 1
    assert_all_answered(engine)
