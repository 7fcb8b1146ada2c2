"""Pressure: a pin is a preference, never a lock."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from continuum_connector.scheduler.scheduler import MAX_STORE_WAIT_S
from tests.vllm.agents import AgentEngine, live, model_output, pinned
from tests.vllm.harness import prompt
from tests.vllm.tiering import tiered, total

MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
GROUPS = pytest.mark.parametrize("groups", ["full", "hybrid"])
WAITS_FOR_STORES = pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "has_pending_block_frees"),
    reason="this vLLM does not ask whether blocks are about to be freed",
)
TIER = {"dram_bytes": "4MiB"}


def pool_state(engine: AgentEngine) -> tuple[Any, ...]:
    free = [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]
    return free, [block.ref_cnt for block in engine.pool.blocks], live(engine)


# --- a waiting turn -----------------------------------------------------------------------
@MODES
@pytest.mark.parametrize(
    ("num_needed", "left"),
    [(25, ["p0", "p1", "p2"]), (26, ["p0", "p1"]), (51, ["p0"]), (100, [])],
)
def test_a_waiting_turn_is_admitted_at_once_latest_programs_give_way_and_no_more(
    async_scheduling: bool, num_needed: int, left: list[str]
) -> None:
    engine = pinned(101, 3, async_scheduling=async_scheduling)
    engine.add("new", num_needed * 16 - 8, program="new", seed=9, max_tokens=2, final=True)
    engine.step()
    assert engine.admissions[-1] == "new"
    assert live(engine) == left
    engine.run_until_idle(until=lambda: "new" in engine.finish_reasons)
    assert engine.ends().get("pressure", 0) == 3 - len(left)


@MODES
def test_hybrid_groups_make_room_too(async_scheduling: bool) -> None:
    engine = pinned(121, 2, groups="hybrid", async_scheduling=async_scheduling)
    assert engine.free_blocks() < 3 * 20 < engine.free_blocks() + engine.pinned_blocks() // 2
    engine.add("new", 20 * 16 - 8, program="new", seed=9, max_tokens=2)
    engine.step()
    assert engine.admissions[-1] == "new"
    assert live(engine) == ["p0"]


@MODES
def test_the_own_pin_goes_last(async_scheduling: bool) -> None:
    """Also where it is the cheapest: what it shares with its turn would gain nothing."""
    engine = pinned(101, 3, async_scheduling=async_scheduling)
    engine.add("b", engine.next_prompt("a2", 800), program="p2", max_tokens=2)
    engine.run_until_idle(until=lambda: "b" in engine.finish_reasons)
    assert engine.cached["b"] == (400, 0)
    assert engine.ends() == {"pressure": 2, "returned": 1}


@MODES
def test_a_turn_that_needs_the_whole_pool_gets_its_own_pins_blocks_too(
    async_scheduling: bool,
) -> None:
    engine = pinned(101, 2, async_scheduling=async_scheduling)
    # It shares 18 blocks with its pin and needs the 7 others that the pin keeps.
    tokens = prompt(400, 1)[:300] + prompt(1280, 77)
    engine.add("b", tokens, program="p1", max_tokens=2)
    engine.step()
    assert engine.admissions[-1] == "b"
    assert engine.ends() == {"pressure": 2}
    engine.run_until_idle(until=lambda: "b" in engine.finish_reasons)
    assert engine.cached["b"] == (288, 0)
    assert engine.outputs["b"] == model_output(tokens, 2)


@MODES
def test_where_pins_cannot_help_the_answer_is_stocks_and_every_pin_is_kept(
    async_scheduling: bool,
) -> None:
    """`new` hits the pinned blocks, so that letting go of them frees nothing for it."""
    engine = pinned(101, 1, async_scheduling=async_scheduling)
    engine.add("running", 700, program="r", seed=8, max_tokens=40)
    engine.steps(3)
    engine.add("new", engine.next_prompt("a0", 50 * 16), program="new", max_tokens=2)
    before = pool_state(engine)
    assert len(before[0]) < 50 <= len(before[0]) + 25, "the estimate alone must not decide"
    for _ in range(10):
        engine.step()
        assert live(engine) == ["p0"]
    free, refs, _ = pool_state(engine)
    assert free == [block for block in before[0] if block in free], "the free queue was reordered"
    assert sum(refs) == sum(before[1]) + len(before[0]) - len(free)
    engine.run_until_idle(until=lambda: "new" in engine.finish_reasons)
    assert engine.cached["new"] == (400, 0)
    assert engine.admissions == ["a0", "running", "new"]


def test_a_failed_trial_leaves_the_pool_exactly_as_it_was() -> None:
    engine = pinned(101, 3)
    engine.add("x", 10, seed=5)
    before = pool_state(engine)
    answer = engine.side.make_room(engine.requests["x"], lambda: None, 30, False, engine.clock())
    assert answer is None
    assert pool_state(engine) == before
    engine.check()


# --- a running turn -----------------------------------------------------------------------
@MODES
@GROUPS
def test_a_growing_turn_takes_a_pin_before_anybody_is_preempted(
    async_scheduling: bool, groups: str
) -> None:
    num_blocks = 90 if groups == "full" else 128
    engine = pinned(num_blocks, 2, async_scheduling=async_scheduling, groups=groups)
    for i in range(2):
        engine.add(f"r{i}", 150, program=f"r{i}", seed=5 + i, max_tokens=250 + 10 * i)
    engine.run_until_idle(until=lambda: len(engine.finish_reasons) == 4)
    assert engine.num_preemptions == 0
    assert engine.ends() == {"pressure": 1}
    assert "p0" in live(engine)


@MODES
def test_no_turn_is_preempted_before_the_last_pin_is_gone(async_scheduling: bool) -> None:
    engine = pinned(90, 3, async_scheduling=async_scheduling)
    preempted_with: list[int] = []
    preempt = engine.scheduler._preempt_request

    def watched(*args: Any, **kwargs: Any) -> Any:
        preempted_with.append(engine.pinned_blocks())
        return preempt(*args, **kwargs)

    engine.scheduler._preempt_request = watched
    for i in range(4):
        engine.add(f"r{i}", 100, program=f"r{i}", seed=5 + i, max_tokens=400, final=True)
    engine.run_until_idle()
    assert preempted_with
    assert not any(preempted_with)
    assert engine.ends() == {"pressure": 3}


@MODES
def test_a_pin_of_blocks_that_others_use_is_not_sacrificed(async_scheduling: bool) -> None:
    """A running turn of another program hit every block of the pin."""
    engine = pinned(61, 1, async_scheduling=async_scheduling)
    engine.add("r", engine.next_prompt("a0", 10), program="r", max_tokens=60)
    engine.add("s", 250, program="s", seed=4, max_tokens=300, final=True)
    engine.steps(3)
    engine.run_until_idle(until=lambda: engine.num_preemptions > 0 or "r" in engine.finish_reasons)
    assert "p0" in live(engine)
    engine.run_until_idle()
    assert set(engine.finish_reasons.values()) == {"length"}


# --- stores in flight ---------------------------------------------------------------------
def growing_beside_a_store(**kwargs: Any) -> AgentEngine:
    """`a0` is pinned and its store hangs; `r` grows until only the blocks of both are left."""
    engine = pinned(50, 1, extra_config=TIER, hold_transfers=True, step_s=0.001, **kwargs)
    engine.steps(2)
    assert engine.worker.pending
    engine.add("r", 300, program="r", seed=5, max_tokens=150, final=True)
    engine.run_until_idle(until=lambda: engine.free_blocks() == 0)
    return engine


@WAITS_FOR_STORES
@MODES
def test_a_store_in_flight_is_waited_for_rather_than_preempting(async_scheduling: bool) -> None:
    engine = growing_beside_a_store(async_scheduling=async_scheduling)
    engine.steps(20)
    assert engine.num_preemptions == 0
    engine.settle()
    engine.run_until_idle(until=lambda: "r" in engine.finish_reasons)
    assert engine.num_preemptions == 0


@WAITS_FOR_STORES
@MODES
def test_a_store_that_hangs_is_not_waited_for_longer_than_the_bound(async_scheduling: bool) -> None:
    engine = growing_beside_a_store(async_scheduling=async_scheduling)
    began = min(transfer.admitted for transfer in engine.side.traffic.ledger)
    engine.run_until_idle(until=lambda: engine.num_preemptions > 0)
    assert 0 <= engine.clock() - began - MAX_STORE_WAIT_S < 5 * engine.step_s
    engine.settle()
    engine.run_until_idle(until=lambda: "r" in engine.finish_reasons)
    assert engine.outputs["r"] == model_output(prompt(300, 5), 150)


@MODES
def test_running_turns_go_on_while_others_end_and_are_stored_in_every_step(
    async_scheduling: bool,
) -> None:
    """A long prompt lacks the few blocks that stores hold. While it waits for them, vLLM leaves out
    all who run behind it, and turns of one token took what came free, for as long as they came."""
    engine = tiered(
        440,
        8000,
        async_scheduling=async_scheduling,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        long_prefill_token_threshold=512,
        config={"policy": "adaptive"},
    )
    engine.add("long", 6400, seed=1, max_tokens=8)
    engine.step()
    for number in range(4):
        engine.add(f"chat{number}", 160, seed=2 + number, max_tokens=200)
    for number in range(160):
        engine.add(f"short{number}", 200, seed=10 + number, max_tokens=1)
        if number % 4 == 3:
            engine.step()
    assert total(engine, "stores") > 40
    assert "long" in engine.finish_reasons
    assert len(engine.outputs["chat0"]) > 30
