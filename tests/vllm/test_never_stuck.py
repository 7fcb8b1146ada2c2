"""Law 1 after a load that failed: whatever an estimate says, the engine goes on.

The first blocks of a turn's context are in VRAM, the others are loading, and the load fails. The
turn keeps all its blocks (vLLM asks for so many as hold what it has computed, which are fewer), so
what it still needs is less than its numbers say; the pool is full of another program's pin.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from continuum_connector.scheduler.tiers.traffic import Kind
from continuum_connector.vllm import hooks
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import (
    MODES,
    answers_as_without_a_tier,
    hold,
    in_flight,
    outlast_pins,
    park,
    run_turn,
    tiered,
    wind_down,
)

IDLE = {RequestStatus.WAITING_FOR_STREAMING_REQ}
SOON = 40  # steps; a pin lasts 500 of them
# Blocks for two loads of 112 tokens, and not for one prompt beside such a load.
TIGHT = [("hybrid", 36), ("chunked", 31)]


def load_fails_behind_a_hit(
    async_scheduling: bool, num_hit: int, by_block: bool, num_pinned: int = 20
) -> Engine:
    """Turn a2 has `num_hit` blocks in VRAM, and the load of the other 30 has failed; what there is
    besides its 33 is pinned for program b. `by_block`: vLLM hears of the failure by block only, and
    keeps what was hit, as before 0.30; else it may begin anew."""
    config = {"policy": "fixed_ttl", "ttl_s": 5.0, "max_ttl_s": 60.0}
    engine = tiered(1 + num_hit + 52, 400, async_scheduling=async_scheduling, config=config)
    tokens = prompt(16 * (num_hit + 30), seed=1)
    run_turn(engine, "a1", tokens, max_tokens=1, program="a")
    side = engine.connector.side
    side.tier.store("job:a", side.pins.of("job:a")[-1].blocks, engine.clock())
    engine.run_until_idle()
    park(engine)
    if num_hit:
        run_turn(engine, "s1", tokens[: 16 * num_hit], max_tokens=1, program="s")
        outlast_pins(engine)
    hold(engine)
    engine.add("a2", tokens + prompt(16 * 3 - 1, seed=7), 1, program="a")
    engine.run_until_idle(until=lambda: bool(engine.worker.pending))
    engine.add("b1", 16 * num_pinned, 4, seed=3, program="b")
    engine.run_until_idle(until=lambda: "b1" in engine.finish_reasons)
    hold(engine, False)
    engine.fail()
    if by_block:
        for worker in engine.workers:
            worker._failed_loads.clear()
    return engine


def finishes_soon(engine: Engine, request_id: str) -> bool:
    before = engine.num_steps
    engine.run_until_idle(
        until=lambda: request_id in engine.finish_reasons or engine.num_steps > before + SOON
    )
    return request_id in engine.finish_reasons


def assert_all_ends(engine: Engine) -> None:
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@MODES
@pytest.mark.parametrize("by_block", [True, False], ids=["by block", "by request"])
@pytest.mark.parametrize("is_awaited", [False, True], ids=["pin expires", "pin is awaited"])
def test_a_turn_whose_load_failed_behind_a_hit_takes_the_pin_that_is_in_its_way(
    async_scheduling: bool, by_block: bool, is_awaited: bool
) -> None:
    """A pin that its program's next turn waits for does not even expire: that one would wait for
    ever behind this one."""
    engine = load_fails_behind_a_hit(async_scheduling, 10, by_block)
    engine.step()
    if is_awaited:
        engine.add("b2", engine.next_prompt("b1", 20), 4, program="b")
    assert finishes_soon(engine, "a2")
    assert_all_ends(engine)


@MODES
@pytest.mark.parametrize("num_hit", [0, 1, 29])
def test_a_turn_whose_load_failed_runs_soon_however_much_of_it_was_hit(
    async_scheduling: bool, num_hit: int
) -> None:
    engine = load_fails_behind_a_hit(async_scheduling, num_hit, by_block=True)
    assert finishes_soon(engine, "a2")
    assert_all_ends(engine)


@MODES
def test_while_nothing_runs_no_estimate_keeps_a_pin(
    async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However wrong it is; while others run it may spare us futile trials."""
    config = {"policy": "fixed_ttl", "ttl_s": 50.0, "max_pinned_fraction": 0.9}
    engine = Engine(60, async_scheduling=async_scheduling, extra_config=config)
    engine.add("a1", 16 * 45, 1, seed=1, program="a")
    engine.run_until_idle()
    assert len(engine.connector.side.pins) == 1
    monkeypatch.setattr(hooks, "blocks_needed", lambda *_: 10**9)
    engine.add("b1", 16 * 30, 1, seed=2, program="b")
    assert finishes_soon(engine, "b1")


@MODES
@pytest.mark.parametrize("both", [True, False], ids=["both fail", "one fails"])
@pytest.mark.parametrize("head_start", [300, 0], ids=["our order", "vLLM's order"])
@pytest.mark.parametrize(("groups", "num_blocks"), TIGHT)
def test_a_turn_whose_load_failed_does_not_wait_before_one_that_has_the_blocks_it_needs(
    async_scheduling: bool, both: bool, head_start: int, groups: str, num_blocks: int
) -> None:
    """To compute a prompt takes more blocks of a window's group than to load it, so both loads fit
    and both prompts do not. vLLM (>= 0.31) serves turns with KV first, in their order; the first
    has none any more, finds no blocks, and nobody behind it is looked at."""
    modes: dict[str, Any] = {"groups": groups, "async_scheduling": async_scheduling}
    engine = tiered(num_blocks, config={"max_head_start_s": head_start}, **modes)
    for seed, name in enumerate("bc"):
        run_turn(engine, f"{name}1", 112, seed=seed, max_tokens=1, program=name)
        park(engine)
    hold(engine)
    for seed, name in enumerate("bc"):
        tokens = prompt(112, seed) + prompt(15, seed=2)
        engine.add(name, tokens, max_tokens=1, program=name)
    engine.run_until_idle(until=lambda: len(in_flight(engine, Kind.LOAD)) == 2)
    first, second = in_flight(engine, Kind.LOAD)
    engine.fail(first.id)
    (engine.fail if both else engine.settle)(second.id)
    hold(engine, False)
    assert finishes_soon(engine, "b")
    assert finishes_soon(engine, "c")
    assert_all_ends(engine)


@MODES
@pytest.mark.parametrize("head_start", [300, 0], ids=["our order", "vLLM's order"])
def test_what_a_failed_load_had_reserved_for_its_prompt_keeps_nobody_from_loading(
    async_scheduling: bool, head_start: int
) -> None:
    """Who comes later and ranks before it would wait for those blocks, and it for that one."""
    modes: dict[str, Any] = {"policy": "priority", "async_scheduling": async_scheduling}
    engine = tiered(30, config={"max_head_start_s": head_start}, **modes)
    engine.connector.side.room._max_wait_s = 0.0
    run_turn(engine, "a", 100, max_tokens=1, program="a", seed=3)
    park(engine)
    run_turn(engine, "b", 300, max_tokens=1, program="b", seed=1)
    park(engine)
    hold(engine)
    engine.add("c", engine.next_prompt("b", 100), max_tokens=1, program="b", priority=1)
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.LOAD)))
    engine.fail()
    hold(engine, False)
    engine.add("d", engine.next_prompt("a", 100), max_tokens=1, program="a")
    assert finishes_soon(engine, "d")
    assert engine.cached["d"][1]
    assert finishes_soon(engine, "c")
    assert_all_ends(engine)


def lose_a_load(engine: Engine, **turn: Any) -> None:
    """Turn b loads and is to find that it got nothing; nobody has noticed yet."""
    run_turn(engine, "a", 200, max_tokens=1, program="p")
    park(engine)
    hold(engine)
    engine.add("b", engine.next_prompt("a", 20), max_tokens=2, program="p", **turn)
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.LOAD)))


def switch(engine: Engine, is_on: bool) -> None:
    engine.connector.switch = SimpleNamespace(is_on=is_on, close=lambda: None)
    engine.step()


@MODES
def test_a_turn_that_loads_while_we_are_switched_off_and_on_and_gets_nothing_keeps_a_place(
    async_scheduling: bool,
) -> None:
    """Nobody had named its program since; in the queue it ranked behind all that came."""
    modes: dict[str, Any] = {"async_scheduling": async_scheduling, "max_num_seqs": 2}
    engine = tiered(60, 400, config={"max_head_start_s": 1.0}, **modes)
    engine.connector.side.room._max_wait_s = 0.05
    lose_a_load(engine)
    switch(engine, False)
    switch(engine, True)
    engine.fail()
    hold(engine, False)
    for number in range(SOON):
        engine.add(f"c{number}", 60, 12, seed=100 + number, program=f"c{number}")
        engine.step()
    assert "b" in engine.finish_reasons
    assert_all_ends(engine)


@MODES
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_turn_whose_load_failed_is_passed_by_nobody_behind_it(
    async_scheduling: bool, policy: str
) -> None:
    modes: dict[str, Any] = {"async_scheduling": async_scheduling, "max_num_seqs": 1}
    engine = tiered(100, 400, policy=policy, **modes)
    lose_a_load(engine, priority=0)
    engine.fail()
    hold(engine, False)
    engine.run_until_idle(until=lambda: "b" in engine.scheduler.failed_recving_kv_req_ids)
    engine.add("c", 100, 500, seed=9, program="q", priority=5)
    assert finishes_soon(engine, "b")
    assert_all_ends(engine)


@pytest.mark.parametrize("resets", [True, False])
def test_who_loses_what_was_loaded_to_a_reset_does_not_stand_before_those_who_have_kv(
    resets: bool,
) -> None:
    """A session that waits for its client has blocks that the turn would need to be computed. In
    its old place, with nothing, it kept vLLM (>= 0.31) from looking at the session's next turn."""
    engine = tiered(48, groups="hybrid", timeout_s=80000.0)
    tokens = prompt(208, seed=1)
    run_turn(engine, "a", tokens, max_tokens=1, program="a")
    park(engine)
    hold(engine)
    session = engine.add("s", prompt(60, seed=9), 4, program="s", resumable=True)
    engine.add("r", 16, 124, seed=8, program="r")
    engine.step()
    turn = engine.add("b", tokens + prompt(15, seed=2), max_tokens=1, program="b")
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.LOAD)))
    engine.run_until_idle(until=lambda: session.status in IDLE and engine.free_blocks() < 3)
    engine.settle(in_flight(engine, Kind.LOAD)[0].id)
    for _ in range(3):
        engine.step()
    assert turn.status is RequestStatus.WAITING
    assert turn.num_computed_tokens
    if resets:
        engine.reset_prefix_cache()
    hold(engine, False)
    num_before = len(engine.outputs["s"])
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    more = Request("s", prompt(5, seed=7), params, None, arrival_time=1e9, resumable=True)
    engine.scheduler.add_request(more)
    engine.run_until_idle(until=lambda: len(engine.outputs["s"]) > num_before)
    assert len(engine.outputs["s"]) > num_before
