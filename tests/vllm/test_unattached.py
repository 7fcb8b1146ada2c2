"""Unattached: on a scheduler that is not ours, pins give way through the connector API."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.scheduler import Scheduler

from tests.vllm.agents import AgentEngine, live, pinned

WAITS_FOR_STORES = pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "has_pending_block_frees"),
    reason="this vLLM does not ask whether blocks are about to be freed",
)
UNATTACHED = {"scheduler": "0"}


class OwnScheduler(Scheduler):
    """What a user names with --scheduler-cls."""


UNATTACHED_ENGINES = pytest.mark.parametrize(
    "how",
    [{"extra_config": UNATTACHED}, {"scheduler_cls": OwnScheduler}],
    ids=["scheduler=0", "--scheduler-cls"],
)


@UNATTACHED_ENGINES
def test_unattached_a_waiting_turn_still_gets_room(how: dict[str, Any]) -> None:
    engine = pinned(101, 3, **how)
    engine.add("new", 51 * 16 - 8, program="new", seed=9, max_tokens=2)
    engine.step()
    assert engine.admissions[-1] == "new"
    assert live(engine) == ["p0"]


@WAITS_FOR_STORES
@UNATTACHED_ENGINES
def test_unattached_a_growing_turn_still_preempts_nobody(how: dict[str, Any]) -> None:
    engine = pinned(76, 2, **how)
    engine.add("r", 300, program="r", seed=5, max_tokens=250)
    engine.run_until_idle(until=lambda: "r" in engine.finish_reasons)
    assert engine.num_preemptions == 0
    assert engine.ends() == {"pressure": 1}


@UNATTACHED_ENGINES
def test_unattached_the_log_says_so_once(
    how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    pinned(101, 3, **how)
    said = [r.getMessage() for r in caplog.records if "not attached" in r.getMessage()]
    assert len(said) == 1
    assert ("scheduler = 0" in said[0]) == ("extra_config" in how)
    assert ("OwnScheduler" in said[0]) == ("scheduler_cls" in how)


def test_unattached_turns_that_wait_for_each_others_pins_are_not_stuck() -> None:
    """`b1` finds its own blocks free, so that by the estimate nothing is lacking; the pin of
    `b0`, which waits behind it, cannot expire."""
    engine = AgentEngine(101, max_num_batched_tokens=2048, extra_config=UNATTACHED)
    for i in range(2):
        engine.run_turn(f"a{i}", 624, program=f"p{i}", seed=i)
    engine.add("b1", engine.next_prompt("a1", 800), program="p1", max_tokens=2)
    engine.add("b0", engine.next_prompt("a0", 20), program="p0", max_tokens=2)
    engine.steps(3)
    assert "b1" in engine.admissions
    engine.run_until_idle(max_steps=50, until=lambda: len(engine.finish_reasons) == 4)
    assert set(engine.finish_reasons) == {"a0", "a1", "b0", "b1"}
