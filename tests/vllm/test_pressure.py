"""Pressure: a pin is a preference, never a lock."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.scheduler import Scheduler

from continuum_connector.scheduler.scheduler import MAX_STORE_WAIT_S
from tests.vllm.agents import AgentEngine
from tests.vllm.fake_worker import extend_chain, next_token
from tests.vllm.harness import Engine, prompt

MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
GROUPS = pytest.mark.parametrize("groups", ["full", "hybrid"])
WAITS_FOR_STORES = pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "has_pending_block_frees"),
    reason="this vLLM does not ask whether blocks are about to be freed",
)
TIER = {"dram_bytes": "4MiB"}
UNATTACHED = {"scheduler": "0"}


class OwnScheduler(Scheduler):
    """What a user names with --scheduler-cls."""


def pinned(num_blocks: int, num_pins: int, **kwargs: Any) -> AgentEngine:
    """An engine in which programs p0, p1, ... have pinned 25 blocks each."""
    extra = {"ttl_s": 60, **kwargs.pop("extra_config", {})}
    engine = AgentEngine(num_blocks, max_num_batched_tokens=2048, extra_config=extra, **kwargs)
    for i in range(num_pins):
        engine.add(f"a{i}", 400, program=f"p{i}", seed=i)
        engine.run_until_idle(until=lambda i=i: f"a{i}" in engine.finish_reasons)
    assert engine.num_pins() == num_pins
    return engine


def live(engine: AgentEngine) -> list[str]:
    return sorted(pin.program.removeprefix("job:") for pin in engine.side.pins)


def pool_state(engine: AgentEngine) -> tuple[Any, ...]:
    free = [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]
    return free, [block.ref_cnt for block in engine.pool.blocks], live(engine)


def model_output(tokens: list[int], num_outputs: int) -> list[int]:
    chain: list[int] = []
    extend_chain(chain, tokens)
    outputs: list[int] = []
    for _ in range(num_outputs):
        outputs.append(next_token(chain, len(chain)))
        extend_chain(chain, outputs[-1:])
    return outputs


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
    answer = engine.side.make_room(engine.requests["x"], lambda: None, 30, engine.clock())
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
    began = min(transfer.admitted for transfer in engine.side.tier.ledger)
    engine.run_until_idle(until=lambda: engine.num_preemptions > 0)
    assert 0 <= engine.clock() - began - MAX_STORE_WAIT_S < 5 * engine.step_s
    engine.settle()
    engine.run_until_idle(until=lambda: "r" in engine.finish_reasons)
    assert engine.outputs["r"] == model_output(prompt(300, 5), 150)


# --- everything at once -------------------------------------------------------------------
class Agents:
    """Programs with random turns: extended, forked and aborted, at random times."""

    def __init__(self, engine: AgentEngine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.last: dict[int, str] = {}
        self.num_turns = 0

    def run(self, num_programs: int = 6, num_turns: int = 24) -> None:
        draw = self.random
        while self.num_turns < num_turns:
            program = draw.randrange(num_programs)
            if self.last.get(program) in self.engine.scheduler.requests and draw.random() < 0.9:
                self.engine.steps(draw.randrange(1, 20))
            else:
                self._turn(program)
            if draw.random() < 0.1:
                self.engine.abort(draw.choice(list(self.engine.requests)))
            if draw.random() < 0.3:
                self.engine.clock.advance(draw.random() * 2)
        self.engine.run_until_idle(max_steps=6000)

    def _turn(self, program: int) -> None:
        draw, engine = self.random, self.engine
        tokens = prompt(draw.randrange(10, 250), seed=program % 3)
        before = self.last.get(program)
        if before is not None:
            tokens = list(engine.requests[before].all_token_ids)
            tokens = tokens[: draw.choice([len(tokens), len(tokens), len(tokens) // 2])]
            tokens += prompt(draw.randrange(1, 120), seed=self.num_turns)
        if len(tokens) > 600:
            tokens = prompt(50, seed=100 + self.num_turns)
        self.num_turns += 1
        name = f"{program}.{self.num_turns}"
        self.last[program] = name
        stop = ["x"] if draw.random() < 0.2 else None
        outputs = draw.randrange(1, 100)
        final = draw.random() < 0.1
        engine.add(name, tokens, program=f"p{program}", max_tokens=outputs, stop=stop, final=final)


@MODES
@pytest.mark.parametrize("extra", [{}, TIER, UNATTACHED, UNATTACHED | TIER], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_everything_finishes_with_the_models_own_output(
    async_scheduling: bool, extra: dict[str, str], seed: int
) -> None:
    groups = "hybrid" if seed % 2 else "full"
    engine = AgentEngine(
        {"full": 52, "hybrid": 150}[groups],
        groups=groups,
        async_scheduling=async_scheduling,
        extra_config=dict(extra),
        max_num_seqs=4,
    )
    Agents(engine, seed).run()
    assert set(engine.finish_reasons) | _aborted(engine) == set(engine.requests)
    for request_id, outputs in engine.outputs.items():
        tokens = engine.requests[request_id].prompt_token_ids
        assert outputs == model_output(tokens, len(outputs)), request_id
    engine.clock.advance(60)
    engine.run_until_idle()
    assert (engine.usage(), engine.num_pins()) == (0, 0)
    assert engine.ends().get("pressure")


def _aborted(engine: Engine) -> set[str]:
    return {i for i, r in engine.requests.items() if r.status.name == "FINISHED_ABORTED"}


# --- without our scheduler ----------------------------------------------------------------
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
