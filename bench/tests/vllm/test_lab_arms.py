"""Every arm of bench/sim answers every turn and leaves no block behind."""

from __future__ import annotations

import math

import pytest

from bench.sim.arms import ARMS
from bench.sim.lab import Lab
from bench.tests.vllm.lab import small_machine, small_workload

PATIENCE_S = 60.0  # of virtual time, for copies under way and pins that nobody comes back to


def settle(lab: Lab) -> None:
    """Step an engine without turns until nothing is under way: what EngineCore's loop would do."""
    until = lab.clock.now + PATIENCE_S
    while lab.clock.now < until:
        wake = min(lab.engine.worker.next_done(), lab.clock.now + 1.0)
        assert not list(lab.engine.step(lambda wake=wake: wake))


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_answers_every_turn_and_lets_go_of_every_block(name: str) -> None:
    workload = small_workload()
    lab = Lab(small_machine(), ARMS[name], workload)
    record = lab.play()
    assert len(record.turns) == 8 * len(workload.programs)
    assert all(turn.arrived < turn.first_token <= turn.finished for turn in record.turns)
    assert all(0 < seconds < math.inf for seconds in record.jct_s.values())
    assert record.num_local_tokens + record.num_external_tokens < record.num_prompt_tokens
    settle(lab)
    pool = lab.engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
