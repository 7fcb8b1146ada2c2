"""Pipeline parallelism: each stage has the same blocks of other layers, and a slot for each.

vLLM's executors for one node or several (`mp`) bring every rank's report to the scheduler, those
of the first stages too (v1/executor/multiproc_executor.py, collective_rpc).
"""

from __future__ import annotations

from typing import Any

import pytest

from bench.sim import versions
from continuum_connector.scheduler.tiers.traffic import Kind
from tests.vllm.tiering import (
    NO_HYBRID_TIER,
    answers_as_without_a_tier,
    assert_drained,
    hold,
    in_flight,
    outlast_pins,
    park,
    run_turn,
    tiered,
    total,
    wind_down,
)

GROUPS = pytest.mark.parametrize(
    "groups",
    [
        "full",
        pytest.param(
            "hybrid",
            marks=pytest.mark.skipif(not versions.CAN_FAIL_REQUESTS, reason=NO_HYBRID_TIER),
        ),
    ],
)
STAGES = pytest.mark.parametrize(("num_stages", "world_size"), [(2, 2), (2, 4)])


def staged(**kwargs: Any) -> Any:
    engine = tiered(**kwargs)
    assert engine.vllm_config.max_concurrent_batches >= 2  # more than one step is under way
    return engine


@GROUPS
@STAGES
def test_a_turn_comes_back_on_every_rank_of_every_stage(
    groups: str, num_stages: int, world_size: int
) -> None:
    engine = staged(groups=groups, num_stages=num_stages, world_size=world_size)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"] == (0, 208)
    assert [worker.num_blocks_loaded > 0 for worker in engine.workers] == [True] * world_size
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@STAGES
def test_a_load_that_fails_on_the_first_stage_alone_is_a_miss(
    num_stages: int, world_size: int
) -> None:
    engine = staged(num_stages=num_stages, world_size=world_size)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    hold(engine)
    engine.add("b", engine.next_prompt("a", 20), program="p")
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.LOAD)))
    hold(engine, False)
    engine.workers[0].fail()
    engine.run_until_idle()
    assert total(engine, "loads", "failed") == 1
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@STAGES
def test_turns_of_many_programs_at_once_with_several_steps_under_way(
    num_stages: int, world_size: int
) -> None:
    engine = staged(num_blocks=36, num_stages=num_stages, world_size=world_size)
    for turn in range(3):
        for program in "pqr":
            before = f"{program}{turn - 1}"
            tokens = engine.next_prompt(before, 30) if turn else 180
            engine.add(f"{program}{turn}", tokens, program=program, seed=ord(program))
        engine.run_until_idle()
        outlast_pins(engine)
    assert sum(worker.num_blocks_loaded for worker in engine.workers)
    assert answers_as_without_a_tier(engine)
    assert_drained(engine)
