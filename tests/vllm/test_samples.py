"""Samples of one prompt in vLLM's own loop: the prompt is stored once, and stays for the last."""

from __future__ import annotations

from typing import Any

import pytest

from continuum_connector.scheduler.tiers.transfers import Kind
from tests.vllm.harness import Engine
from tests.vllm.tiering import MODES, assert_drained, check, hold, in_flight, tiered, total

TOKENS = 400  # of the prompt: 25 blocks, of which the last is computed again
SIZE = 3


def engine_of(num_slots: int = 400, num_blocks: int = 80, **more: Any) -> Engine:
    """One turn at a time, in VRAM for one and a half; to compute is slow, to load is not."""
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 2048, "config": {"policy": "adaptive"}}
    options |= more
    engine = tiered(num_blocks, num_slots, **options)
    costs = {"prefill": [0.0, 1e-2, 0.0, 0.0, 0.0], "load": [0.0, 1e-6]}
    engine.connector.costs.restore(costs)
    return engine


def sample(engine: Engine, name: str, hints: dict[str, Any] | None = None) -> None:
    """A trajectory of one turn, as a trainer sends it."""
    said = {"program": name, "final": True, **(hints or {})}
    engine.add(name, TOKENS, 4, seed=7, kv_transfer_params={"continuum": said})
    engine.run_until_idle()


def others(engine: Engine, number: int, seed: int = 50) -> None:
    """Programs that go on, whose KV takes all of VRAM and a place in DRAM."""
    for n in range(seed, seed + number):
        engine.add(f"x{n}", 900, 2, seed=n, program=f"x{n}")
        engine.run_until_idle()


def group(size: int = SIZE) -> dict[str, Any]:
    return {"group": "task-1", "group_size": size}


def stored_slots(engine: Engine) -> int:
    return int(engine.connector.side.tier.index.num_ready)


def test_a_prompt_whose_samples_come_one_by_one_is_computed_and_stored_once() -> None:
    engine = engine_of()
    for n in range(SIZE):
        before = stored_slots(engine)
        sample(engine, f"a{n}", group())
        assert stored_slots(engine) - before == (0 if n else 25)
        others(engine, 2, seed=50 + 2 * n)
    assert [engine.cached[f"a{n}"] for n in range(SIZE)] == [(0, 0), (0, 384), (0, 384)]
    assert total(engine, "sample_prompt_tokens") == 2 * TOKENS
    assert total(engine, "sample_hit_tokens") == 2 * 384
    samples = engine.connector.side._samples
    assert samples.resident("group:task-1", 0.0, engine.clock()) is None


def test_a_prompt_stays_in_a_full_dram_until_the_last_sample_is_over() -> None:
    engine = engine_of(num_slots=90)
    sample(engine, "a0", group(size=2))
    others(engine, 5)
    sample(engine, "a1", group(size=2))
    assert engine.cached["a1"] == (0, 384)
    others(engine, 5, seed=70)
    sample(engine, "a2", {"group": "task-2", "group_size": 2})
    assert engine.cached["a2"] == (0, 0), "nobody was left who wanted it"


def test_who_says_nothing_of_a_group_is_of_one_while_another_with_that_prompt_is_there() -> None:
    engine = engine_of()
    for name in ("a0", "a1"):  # neither is over
        engine.add(name, TOKENS, 4, seed=7, program=name)
    engine.run_until_idle()
    samples = engine.connector.side._samples
    assert len(samples) == 1
    assert samples.of("job:a0") is samples.of("job:a1")
    assert samples.of("job:a0").is_stored


@MODES
def test_a_prompt_whose_store_failed_is_stored_again(async_scheduling: bool) -> None:
    engine = engine_of(async_scheduling=async_scheduling)
    hold(engine)
    said = {"program": "a0", "final": True, **group()}
    engine.add("a0", TOKENS, 4, seed=7, kv_transfer_params={"continuum": said})
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.STORE)))
    engine.step()
    engine.fail()
    hold(engine, False)
    engine.run_until_idle()
    assert stored_slots(engine) == 0
    for n in range(1, SIZE):
        others(engine, 2, seed=50 + 2 * n)
        sample(engine, f"a{n}", group())
    assert [engine.cached[f"a{n}"] for n in range(SIZE)] == [(0, 0), (0, 0), (0, 384)]
    check(engine)


@pytest.mark.parametrize("size", ["many", 0, -1, 2.5, 10**9, True])
def test_a_size_that_is_none_is_refused_and_the_group_stands(size: Any) -> None:
    engine = engine_of()
    sample(engine, "a0", {"group": "task-1", "group_size": size})
    receipts = engine.kv_transfer_params["a0"]["continuum"]["hints"]
    found = {each["hint"]: each["outcome"] for each in receipts}
    assert found == {"final": "accepted", "group": "accepted", "group_size": "refused"}


def test_a_weight_update_forgets_the_prompt() -> None:
    engine = engine_of()
    sample(engine, "a0", group())
    assert engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    sample(engine, "a1", group())
    assert engine.cached["a1"] == (0, 0)
    others(engine, 2)
    sample(engine, "a2", group())
    assert engine.cached["a2"] == (0, 384), "what the new weights computed is there"


# --- in VRAM ------------------------------------------------------------------------------
def vram_alone(num_blocks: int = 110, **more: Any) -> Engine:
    """No DRAM, and room for a prompt beside one other turn."""
    return engine_of(0, num_blocks, **more)


def passers(engine: Engine, number: int, seed: int = 50) -> None:
    """Questions that nobody follows up, whose KV takes all of VRAM that is free."""
    for n in range(seed, seed + number):
        engine.add(f"x{n}", 900, 2, seed=n, final=True, program=f"x{n}")
        engine.run_until_idle()


def pinned(engine: Engine, key: str = "group:task-1") -> int:
    """Blocks of the group's pin."""
    pin = engine.connector.side.pins.get(key)
    return 0 if pin is None else len(pin.blocks)


@MODES
def test_a_prompt_is_held_in_vram_until_its_last_sample_is_over(async_scheduling: bool) -> None:
    engine = vram_alone(async_scheduling=async_scheduling)
    for n in range(SIZE):
        sample(engine, f"a{n}", group())
        assert pinned(engine) == (25 if n < SIZE - 1 else 0)
        check(engine)
        passers(engine, 3, seed=50 + 3 * n)
    assert [engine.cached[f"a{n}"] for n in range(SIZE)] == [(0, 0), (384, 0), (384, 0)]
    assert total(engine, "pins_started") == total(engine, "pins_ended", "program_done") == 1
    assert_drained(engine)


def test_a_prompt_that_nobody_else_wants_is_held_by_nobody() -> None:
    engine = vram_alone()
    sample(engine, "a0", group(size=1))
    sample(engine, "b0")
    assert total(engine, "pins_started") == 0
    passers(engine, 3)
    sample(engine, "a1", group(size=1))
    assert engine.cached["a1"] == (0, 0)


def test_a_prompt_in_vram_gives_way_to_whoever_needs_the_room() -> None:
    engine = vram_alone()
    sample(engine, "a0", group())
    engine.add("big", 1600, 4, seed=9)
    engine.run_until_idle()
    assert engine.outputs["big"]
    assert total(engine, "pins_ended", "pressure") == 1
    assert_drained(engine)
    sample(engine, "a1", group())
    assert engine.cached["a1"][0] < 384
    assert pinned(engine) == 25, "who computed it again holds it again"


def test_a_prompt_that_no_sample_asks_for_is_let_go_of_in_time() -> None:
    engine = vram_alone(config={"policy": "adaptive", "max_ttl_s": 5.0})
    sample(engine, "a0", group())
    engine.idle(5.1)
    assert total(engine, "pins_ended", "expired") == 1
    assert_drained(engine)


def test_a_turn_that_ends_in_the_second_half_of_the_time_decides_anew() -> None:
    engine = vram_alone(config={"policy": "adaptive", "max_ttl_s": 5.0})
    pins = engine.connector.side.pins
    sample(engine, "a0", group(size=9))
    first = pins.get("group:task-1")
    sample(engine, "a1", group(size=9))
    assert pins.get("group:task-1") is first
    engine.idle((first.deadline - first.started) / 2)
    sample(engine, "a2", group(size=9))
    assert pins.get("group:task-1").deadline > first.deadline
    assert total(engine, "pins_ended", "superseded") == 1
    check(engine)


@pytest.mark.parametrize("way", ["reset", "switched_off", "shutdown"])
def test_whatever_ends_all_pins_ends_a_prompts(way: str) -> None:
    engine = vram_alone()
    sample(engine, "a0", group())
    assert pinned(engine) == 25
    if way == "reset":
        assert engine.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
    elif way == "switched_off":
        engine.connector.side.switch(False, engine.clock())
    else:
        engine.connector.shutdown()
    assert total(engine, "pins_ended", way) == total(engine, "pins_started") == 1
    assert engine.usage() == 0


def test_a_sample_that_waits_takes_others_pins_before_its_own_prompts() -> None:
    """Blocks that it has found gain it nothing; they would only be counted as free."""
    engine = vram_alone(config={"policy": "adaptive", "max_wait_s": 0.0})
    engine.add("y", 900, 2, seed=3, program="y")
    engine.run_until_idle()
    said = {"continuum": {"program": "a", **group()}}
    engine.add("a0", TOKENS, 4, seed=7, kv_transfer_params=said)
    engine.run_until_idle()
    pins = engine.connector.side.pins
    assert {pin.program for pin in pins} == {"job:y", "a", "group:task-1"}
    in_line = pins.cheapest_first()
    assert next(in_line).program == "group:task-1", "whatever else is pinned is worth more"
    in_line.close()
    engine.add("a1", engine.next_prompt("a0", 900), 4, kv_transfer_params=said)
    engine.run_until_idle()
    assert engine.cached["a1"][0] >= TOKENS
    assert total(engine, "pins_ended", "pressure") == 1
    assert pinned(engine) == 25
    check(engine)


def test_a_prompt_larger_than_pins_may_hold_is_not_held() -> None:
    engine = vram_alone(config={"policy": "adaptive", "max_pinned_fraction": 0.2})
    sample(engine, "a0", group())
    assert total(engine, "pins_started") == 0


@pytest.mark.parametrize("groups", ["hybrid", "state", "chunked"])
def test_where_a_prompts_end_alone_is_no_hit_no_prompt_is_held(groups: str) -> None:
    engine = vram_alone(200, groups=groups)
    sample(engine, "a0", group())
    assert total(engine, "pins_started") == 0


def test_while_others_wait_for_blocks_no_prompt_is_held() -> None:
    """Room has a price then, and what samples have beyond the prompt is worth more."""
    engine = vram_alone()
    engine.connector.side.decider.costs.seen.blocked(engine.clock())
    engine.clock.advance(1.0)
    assert engine.connector.side.snapshots.take(engine.clock()).price > 0.0
    sample(engine, "a0", group())
    assert total(engine, "pins_started") == 0
