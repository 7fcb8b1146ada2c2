"""Who is preempted: nobody reads what was never computed, and the batch goes on meanwhile.

Both faults come of one thing: a victim that was scheduled earlier in the same step. vLLM hashes
blocks when they are scheduled, so its blocks can be found as if they had been computed; and while
they come back late (async scheduling) those behind it in `running` wait, step after step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import SchedulerConfig

from tests.vllm.harness import Engine, OracleError
from tests.vllm.tiering import MODES, answers_as_without_a_tier

HAS_SHARES = "long_prefill_token_threshold_adaptive" in {
    field.name for field in dataclasses.fields(SchedulerConfig)
}
PROGRAM_ORDER = {"policy": "program_order"}


def preempts_in_a_prefill(
    num_tokens: int, make: Callable[..., Engine] = Engine, **kwargs: Any
) -> Engine:
    """Program `new` is in the middle of a prefill, chunk by chunk, when `old`, which came before
    it but runs behind it, needs one block more and `new` has to yield it. With `num_tokens` in its
    prompt `old` needs that block in the step in which `new` was given its last chunk."""
    engine = make(24, max_num_batched_tokens=128, long_prefill_token_threshold=64, **kwargs)
    engine.add("old1", 16, 1, seed=1, program="old", priority=0)
    engine.run_until_idle()
    engine.pool.reset_prefix_cache()
    engine.add("new1", 320, 4, seed=2, program="new", priority=1)
    engine.step()
    engine.add("old2", num_tokens, 40, seed=3, program="old", priority=0)
    engine.run_until_idle()
    return engine


@MODES
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_tokens", [46, 47])  # vLLM <= 0.29, vLLM >= 0.30
def test_what_was_scheduled_and_never_computed_is_not_found(
    async_scheduling: bool, policy: str, num_tokens: int
) -> None:
    engine = preempts_in_a_prefill(
        num_tokens, policy=policy, async_scheduling=async_scheduling, extra_config=PROGRAM_ORDER
    )
    assert engine.num_preemptions > 0
    assert answers_as_without_a_tier(engine)


def test_stock_vllm_finds_it_under_its_priority_policy() -> None:
    """What the test above would see of us if we did nothing about it."""

    def of_either_version() -> None:
        for num_tokens in (46, 47):
            preempts_in_a_prefill(num_tokens, policy="priority", connector=None)

    with pytest.raises(OracleError, match="new1 reads wrong KV"):
        of_either_version()


def half_steps(async_scheduling: bool, **kwargs: Any) -> tuple[int, int]:
    """Eight programs come back behind a newer one and outgrow the pool together; return (steps in
    which at most half of three or more that run were scheduled, how many of these in a row)."""
    engine = Engine(1 + 8 + 9 * 2, async_scheduling=async_scheduling, max_num_seqs=16, **kwargs)
    for i in range(8):
        engine.add(f"o{i}a", 16, 1, seed=i, program=f"o{i}")
    engine.run_until_idle()
    engine.pool.reset_prefix_cache()
    engine.add("new", 17, 60, seed=99, program="new")
    engine.step()
    engine.step()
    for i in range(8):
        engine.add(f"o{i}b", 24, 40, seed=50 + i, program=f"o{i}")
    num_half = num_in_a_row = longest = 0
    schedule = engine.scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_half, num_in_a_row, longest
        step = schedule(*args, **kwargs)
        num_running = len(engine.scheduler.running)
        is_half = num_running >= 3 and 2 * len(step.num_scheduled_tokens) <= num_running
        num_half += is_half
        num_in_a_row = num_in_a_row + 1 if is_half else 0
        longest = max(longest, num_in_a_row)
        return step

    engine.scheduler.schedule = counted
    engine.run_until_idle()
    assert engine.num_preemptions > 0
    assert answers_as_without_a_tier(engine)
    return num_half, longest


@MODES
@pytest.mark.parametrize("head_start", [300, 0], ids=["program order", "vLLM's order"])
def test_a_preemption_stalls_the_batch_no_longer_than_stock(
    async_scheduling: bool, head_start: int
) -> None:
    num_half, longest = half_steps(async_scheduling, connector=None)
    ours = half_steps(
        async_scheduling, extra_config=PROGRAM_ORDER | {"max_head_start_s": head_start}
    )
    assert ours[0] <= num_half
    assert ours[1] <= longest


@MODES
def test_an_old_programs_long_prompt_is_no_victim_of_younger_turns(async_scheduling: bool) -> None:
    """They come without end beside its prefill, which leaves them tokens, and outgrow the pool."""
    engine = Engine(
        100,
        async_scheduling=async_scheduling,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=32,
        extra_config={"policy": "program_order"},
    )
    engine.add("old1", 16, 1, seed=1, program="old")
    engine.run_until_idle()
    engine.pool.reset_prefix_cache()
    for number in range(4):
        engine.add(f"y{number}", 32, 100, seed=100 + number, program=f"y{number}")
    for _ in range(3):
        engine.step()
    engine.add("old2", 900, 4, seed=2, program="old")
    for number in range(4, 200):
        if engine.outputs["old2"]:
            break
        engine.add(f"y{number}", 32, 100, seed=100 + number, program=f"y{number}")
        engine.step()
    assert engine.outputs["old2"]
    assert not engine.requests["old2"].num_preemptions


@MODES
@pytest.mark.skipif(not HAS_SHARES, reason="vLLM >= 0.32: a chunk may be a request's share")
def test_a_prompt_whose_chunks_are_its_share_of_a_step_yields_to_older_programs(
    async_scheduling: bool,
) -> None:
    """Counted by the threshold, 16 tokens, its chunk of 64 found room, and those who decode lost
    theirs, one after the other."""
    chunks = {"long_prefill_token_threshold": 16, "long_prefill_token_threshold_adaptive": True}
    options = chunks | {"max_num_batched_tokens": 256, "async_scheduling": async_scheduling}
    engine = Engine(79, extra_config=PROGRAM_ORDER, **options)
    for i in range(3):
        engine.add(f"o{i}a", 16, 1, seed=i, program=f"o{i}")
    engine.run_until_idle()
    engine.pool.reset_prefix_cache()
    engine.add("new", 1200, 4, seed=99, program="new")
    engine.step()
    for i in range(3):
        engine.add(f"o{i}b", 46, 120, seed=50 + i, program=f"o{i}")
    engine.run_until_idle()
    assert {i for i, each in engine.requests.items() if each.num_preemptions} == {"new"}
    assert answers_as_without_a_tier(engine)
