"""Whoever waits with KV goes first: a turn that needs its blocks could not go before it.

A load that has settled leaves its turn waiting for admission with all its blocks.
"""

from __future__ import annotations

from typing import Any

import pytest

from continuum_connector.scheduler.tiers.traffic import Kind
from tests.vllm import tiering
from tests.vllm.harness import Engine
from tests.vllm.tiering import MODES

POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority"])
ORDERS = pytest.mark.parametrize("config", [{}, {"max_head_start_s": 0}], ids=["ours", "vllms"])


def loading(**kwargs: Any) -> Engine:
    """`a1` holds 20 of 99 blocks and waits for what its load brings."""
    engine = tiering.tiered(100, **kwargs)
    tiering.run_turn(engine, "a0", 300, program="a", max_tokens=1)
    tiering.park(engine)
    tiering.hold(engine)
    engine.add("a1", engine.next_prompt("a0", 10), 2, program="a", priority=1)
    engine.run_until_idle(until=lambda: bool(tiering.in_flight(engine, Kind.LOAD)))
    return engine


@MODES
@POLICIES
@ORDERS
def test_a_turn_that_needs_the_whole_pool_waits_for_one_that_has_loaded(
    async_scheduling: bool, policy: str, config: dict[str, str]
) -> None:
    """Also where the user's priority says that it comes first."""
    engine = loading(async_scheduling=async_scheduling, policy=policy, config=config)
    engine.add("whole", 98 * tiering.BLOCK, 2, seed=9, priority=0, final=True)
    engine.step()
    engine.settle()
    tiering.hold(engine, False)
    engine.run_until_idle(max_steps=50)
    assert engine.admissions == ["a0", "a1", "whole"]
    assert engine.cached["a1"] == (0, 288)
    assert tiering.answers_as_without_a_tier(engine)
