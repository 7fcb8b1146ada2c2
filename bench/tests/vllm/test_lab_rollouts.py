"""Rollouts in the lab: with a batch the weights change, and every arm forgets all KV."""

from __future__ import annotations

import pytest

from bench.common.plans import Workload
from bench.sim.batches import RATE
from bench.sim.hardware import machine
from bench.sim.workloads.registry import build
from bench.tests.vllm.lab import play

ARMS = ("stock", "simple+order", "offloading+order", "adaptive")


def small(overlap: float = 0.0) -> Workload:
    """Two batches of eight, of which all begin with the same 512 tokens."""
    said = {"programs": 16, "batches": 2, "samples": 4, "turns": 3, "context": 3_000}
    return build("rollouts", {**said, "overlap": overlap, "longest_s": 2.0})


@pytest.mark.parametrize("arm", ARMS)
def test_nothing_that_other_weights_computed_is_read(arm: str) -> None:
    record = play(arm, small(), machine("H100", kv_tokens=20_000, dram_gb=8))
    last = max(t.finished for t in record.turns if t.program.startswith("batch0"))
    after = [turn for turn in record.turns if turn.program.startswith("batch1")]
    first = next(turn for turn in after if (turn.program, turn.index) == ("batch1.0.0", 0))
    assert first.arrived >= last
    assert (first.num_local, first.num_external) == (0, 0)
    assert any(turn.num_local + turn.num_external for turn in after)
    assert record.extra[RATE] == pytest.approx(16 / max(t.finished for t in record.turns))


@pytest.mark.parametrize("arm", ARMS)
def test_weights_change_under_what_runs_and_all_of_it_ends(arm: str) -> None:
    record = play(arm, small(overlap=0.5), machine("H100", kv_tokens=20_000, dram_gb=8))
    last = max(t.finished for t in record.turns if t.program.startswith("batch0"))
    arrived = min(t.arrived for t in record.turns if t.program.startswith("batch1"))
    assert arrived < last
    assert (len(record.jct_s) == 16 and record.num_preemptions == 0) or record.num_steps
