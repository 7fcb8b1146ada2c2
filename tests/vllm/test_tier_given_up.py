"""A pool that ends short while copies are under way, where the operator wants all of it or none.

Real are the scheduler, both our halves and the copy engine; the driver is simulated, and holds the
copies: a worker that waited for them in a step would never come back with them unsettled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from continuum_connector.errors import TransferError
from continuum_connector.scheduler.tiers.traffic import Kind
from continuum_connector.worker.abi import Direction, PoolState
from continuum_connector.worker.native import NativeEngine
from tests.unit.test_giving_up import closers, join_closers
from tests.vllm.harness import Engine
from tests.vllm.native_worker import NativeWorker, native_engines
from tests.vllm.tiering import (
    MODES,
    RANKS,
    answers_as_without_a_tier,
    check,
    in_flight,
    park,
    run_turn,
    total,
    wind_down,
)

NUM_SLOTS = 400


class GrowingEngine(NativeEngine):
    """Of its pool a half is ready, and the other is to come until it `fails`."""

    fails = False

    def pool_state(self) -> PoolState:
        if self.fails:
            raise TransferError("the pool cannot be asked any more")
        state = super().pool_state()
        return dataclasses.replace(state, ready_bytes=state.ready_bytes // 2, is_growing=True)


class GrowingWorker(NativeWorker):
    engine_type = GrowingEngine


@pytest.fixture
def served() -> Iterator[Any]:
    """Builds engines whose pools grow, and closes them."""
    with native_engines(NUM_SLOTS, GrowingWorker) as build:
        yield build
    assert closers() == []


def give_up(engine: Engine) -> NativeWorker:
    """The last rank's pool fails; the scheduler hears of it."""
    worker = engine.workers[-1]
    worker.engine.fails = True
    engine.run_until_idle(until=lambda: not engine.connector.side.tier.is_up)
    assert "cannot be asked any more" in engine.connector.side.tier.down_reason
    return worker


def given_up_amid_a_store(served: Any, async_scheduling: bool) -> tuple[Engine, NativeWorker]:
    """One rank, whose driver holds the copies of request a's store."""
    engine = served(async_scheduling=async_scheduling)
    engine.worker.hold_copies()
    run_turn(engine, "a", 200, program="p", idle=False)
    engine.worker.wait_until_issued(Direction.STORE, 0)
    return engine, give_up(engine)


def assert_given_back(engine: Engine, worker: NativeWorker) -> None:
    """The pool is no more, nothing is left in the books, and everybody has the right answer."""
    join_closers()
    assert worker.engine.pool.base == 0
    assert not worker.engine.is_left_behind
    run_turn(engine, "z", engine.next_prompt("a", 20), program="p")
    assert engine.cached["z"][1] == 0
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@MODES
@RANKS
def test_a_load_in_flight_serves_its_request_before_the_pool_goes(
    served: Any, async_scheduling: bool, world_size: int
) -> None:
    engine = served(async_scheduling=async_scheduling, world_size=world_size)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    worker = engine.workers[-1]
    before = worker.num_calls(Direction.LOAD)
    for each in engine.workers:
        each.hold_copies()
    engine.add("b", engine.next_prompt("a", 20), program="p")
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.LOAD)))
    engine.step()
    worker.wait_until_issued(Direction.LOAD, before)
    held = engine.usage()
    give_up(engine)
    run_turn(engine, "c", 300, seed=9, idle=False)  # others go on, in other blocks
    for _ in range(20):
        engine.step()
        check(engine)
    assert engine.requests["b"].status.name == "WAITING_FOR_REMOTE_KVS"
    assert len(in_flight(engine, Kind.LOAD)) == 1
    assert engine.usage() >= held
    assert closers() == []
    for each in engine.workers:
        each.end_copies()
    engine.run_until_idle()
    assert engine.cached["b"][1] > 0
    assert total(engine, "transfer_failures") == 0
    assert_given_back(engine, worker)


@MODES
def test_a_store_in_flight_reads_its_blocks_before_the_pool_goes(
    served: Any, async_scheduling: bool
) -> None:
    engine, worker = given_up_amid_a_store(served, async_scheduling)
    for _ in range(20):
        engine.step()
        check(engine)
    (store,) = in_flight(engine, Kind.STORE)
    assert store.hold is not None
    assert closers() == []
    engine.worker.end_copies()
    engine.run_until_idle()
    assert total(engine, "stores", "done") == 1
    assert_given_back(engine, worker)


@MODES
def test_a_stop_with_a_store_in_flight_ends_it_and_gives_the_pool_back(
    served: Any, async_scheduling: bool
) -> None:
    engine, worker = given_up_amid_a_store(served, async_scheduling)
    worker.stop()
    worker.worker.shutdown()
    assert worker.engine.pool.base == 0
    engine.run_until_idle()
    assert in_flight(engine, Kind.STORE) == []
