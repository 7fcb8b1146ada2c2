"""Whoever waits for the bus waits without a block, passes nobody's turn on, and is asked again."""

from __future__ import annotations

import math
from typing import Any

import pytest

from continuum_connector.costs import Work
from continuum_connector.scheduler.tiers.traffic import Kind
from continuum_connector.scheduler.waits import MAX_PASSED, TIME_CONSTANT_S
from tests.vllm import tiering
from tests.vllm.harness import Engine
from tests.vllm.tiering import MODES

NUM_BLOCKS = 18  # of each load
STEP_S = 0.01


def waiting(
    num_programs: int, slow_s: float = 10.0, num_blocks: int = 800, **options: Any
) -> Engine:
    """Turns of so many programs that all want a load, and one of `new`, that wants none. A load
    takes the bus `slow_s` seconds, and stays under way until a test says so."""
    engine = tiering.tiered(num_blocks, **options)
    names = [f"p{number}" for number in range(num_programs)]
    for seed, name in enumerate(names):
        tiering.run_turn(engine, f"{name}/0", 300, seed=seed, program=name, max_tokens=1)
    tiering.park(engine)
    tiering.hold(engine)
    costs = engine.connector.costs
    costs.step(Work(num_new=100), STEP_S)
    for _ in range(4):
        costs.loaded(NUM_BLOCKS, slow_s, slow_s)
    for name in names:
        engine.add(f"{name}/1", engine.next_prompt(f"{name}/0", 10), 2, program=name)
    engine.add("new", 100, 2, seed=99, program="new")
    return engine


def loading(engine: Engine) -> list[str]:
    return [each.request_id for each in tiering.in_flight(engine, Kind.LOAD)]


def finish(engine: Engine) -> None:
    tiering.hold(engine, False)
    engine.settle()
    engine.run_until_idle(max_steps=400)
    assert tiering.answers_as_without_a_tier(engine)
    tiering.check(engine)


@MODES
def test_a_load_that_the_bus_could_not_begin_holds_no_block(async_scheduling: bool) -> None:
    engine = waiting(3, async_scheduling=async_scheduling)
    for _ in range(5):
        engine.step()
    assert loading(engine) == ["p0/1"]
    assert "new" in engine.admissions  # it needs no load, and passes
    used = sum(map(len, engine.scheduler.kv_cache_manager.get_block_ids("p1/1")))
    assert not used
    engine.settle()
    for _ in range(3):
        engine.step()
    assert loading(engine) == ["p1/1"]  # in program order
    finish(engine)
    assert [each for each in engine.admissions if each != "new"][3:] == ["p0/1", "p1/1", "p2/1"]


def test_a_step_may_be_as_long_as_the_longest_of_late() -> None:
    """By the mean the bus would stand still in it, and new programs pass those who wait."""
    engine = waiting(3, slow_s=0.3)
    engine.connector.costs.step(Work(num_new=1000), 0.5)
    engine.step()
    assert loading(engine) == ["p0/1", "p1/1", "p2/1"]
    finish(engine)


@MODES
def test_what_the_bus_carries_within_a_step_begins_at_once(async_scheduling: bool) -> None:
    engine = waiting(3, slow_s=1e-4, async_scheduling=async_scheduling)
    engine.step()
    assert loading(engine) == ["p0/1", "p1/1", "p2/1"]
    finish(engine)


@MODES
def test_a_load_begins_as_soon_as_the_one_before_is_about_to_end(async_scheduling: bool) -> None:
    engine = waiting(3, async_scheduling=async_scheduling)
    engine.step()
    assert loading(engine) == ["p0/1"]
    engine.clock.advance(10.0)  # its time is over, though nobody has told yet
    engine.step()
    assert loading(engine)[:2] == ["p0/1", "p1/1"]
    finish(engine)


def asked_of(engine: Engine) -> list[str]:
    """Who is asked from now on, what it may load."""
    asked: list[str] = []
    find = engine.connector.side.tier.find

    def noted(request: Any, num_vram_tokens: int) -> int:
        asked.append(request.request_id)
        return int(find(request, num_vram_tokens))

    engine.connector.side.tier.find = noted
    return asked


@MODES
def test_a_step_asks_a_few_of_those_who_wait_and_then_nobody(async_scheduling: bool) -> None:
    engine = waiting(MAX_PASSED + 9, async_scheduling=async_scheduling)
    asked = asked_of(engine)
    engine.step()
    assert len(asked) == 1 + MAX_PASSED
    assert engine.scheduler.has_requests()
    assert all(each not in engine.admissions for each in ("new",))  # it stands behind them
    finish(engine)
    assert "new" in engine.admissions


@MODES
def test_who_waits_for_the_bus_is_not_looked_up_until_it_is_its_turn(
    async_scheduling: bool,
) -> None:
    """With a long hit in VRAM a lookup takes milliseconds, and sixteen waited in every step."""
    engine = waiting(8, async_scheduling=async_scheduling)
    engine.step()
    asked = asked_of(engine)
    for _ in range(20):
        engine.step()
    assert loading(engine) == ["p0/1"]
    assert [each for each in asked if each != "new"] == []
    engine.clock.advance(10.0)  # the bus is about to be free
    engine.step()
    assert loading(engine)[:2] == ["p0/1", "p1/1"]
    assert asked == ["p1/1"]
    finish(engine)


@MODES
def test_a_bus_that_idles_asks_a_steps_share_of_those_who_wait(async_scheduling: bool) -> None:
    """What they wanted may be gone by now."""
    wide = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
    engine = waiting(MAX_PASSED + 9, async_scheduling=async_scheduling, **wide)
    for _ in range(3):
        engine.step()
    engine.connector.side.tier.reset()
    tiering.hold(engine, False)
    engine.settle()
    engine.run_until_idle(until=lambda: not loading(engine))
    asked = asked_of(engine)
    engine.step()
    assert asked == [f"p{number}/1" for number in range(1, MAX_PASSED + 1)]
    finish(engine)


@MODES
def test_who_comes_later_and_stands_earlier_has_the_bus_first(async_scheduling: bool) -> None:
    engine = waiting(4, async_scheduling=async_scheduling)
    engine.abort("p1/1")
    engine.step()
    engine.step()
    engine.add("p1/2", engine.next_prompt("p1/0", 10), 2, program="p1")
    engine.step()
    assert loading(engine) == ["p0/1"]
    engine.clock.advance(10.0)
    engine.step()
    assert loading(engine)[:2] == ["p0/1", "p1/2"]
    tiering.hold(engine, False)
    engine.settle()
    engine.run_until_idle(max_steps=400)
    assert tiering.answers_as_without_a_tier(engine, "p0/1", "p1/2", "p2/1", "p3/1", "new")


@MODES
def test_who_loads_or_waits_to_is_counted_and_averaged(async_scheduling: bool) -> None:
    engine = waiting(6, async_scheduling=async_scheduling)
    bus, now = engine.connector.side.waits.bus, engine.clock
    engine.step()
    assert bus.num_turns(now()) < 0.1  # for one step
    engine.clock.advance(TIME_CONSTANT_S / 2)
    mean = 6 * (1 - math.exp(-0.5))
    assert bus.num_turns(now()) == pytest.approx(mean, rel=0.01)
    assert engine.connector.side.snapshots.take(now()).num_at_bus == bus.num_turns(now())
    finish(engine)
    engine.clock.advance(100.0)
    assert bus.num_turns(now()) < 0.01


@MODES
def test_switched_off_nobody_waits_for_the_bus(async_scheduling: bool) -> None:
    engine = waiting(6, async_scheduling=async_scheduling)
    engine.step()
    engine.connector.switch.is_on = False
    others = {f"p{number}/1" for number in range(1, 6)}
    engine.run_until_idle(max_steps=60, until=lambda: others <= set(engine.finish_reasons))
    assert loading(engine) == ["p0/1"]
    finish(engine)


def test_in_vllms_own_queue_nobody_waits_for_the_bus() -> None:
    """There nobody may pass another."""
    engine = waiting(3, config={"max_head_start_s": 0})
    engine.step()
    assert loading(engine) == ["p0/1", "p1/1", "p2/1"]
    finish(engine)


@MODES
def test_who_waits_for_the_bus_can_go_away(async_scheduling: bool) -> None:
    engine = waiting(3, async_scheduling=async_scheduling)
    engine.step()
    engine.step()
    engine.abort("p1/1")
    engine.settle()
    for _ in range(3):
        engine.step()
    assert loading(engine) == ["p2/1"]
    tiering.hold(engine, False)
    engine.settle()
    engine.run_until_idle(max_steps=400)
    assert tiering.answers_as_without_a_tier(engine, "p0/1", "p2/1", "new")


@MODES
def test_one_loads_ahead_of_two_places(async_scheduling: bool) -> None:
    """vLLM admits who has loaded before an urgent turn, which waited for all of them."""
    engine = waiting(9, 1e-4, async_scheduling=async_scheduling, max_num_seqs=2)
    engine.abort("new")
    blocks_of, most = engine.scheduler.kv_cache_manager.get_block_ids, 0
    while engine.step():
        with_kv = [name for name in engine.scheduler.requests if any(blocks_of(name))]
        most = max(most, len(with_kv))
        engine.settle()
    assert most == 2 + 1
    tiering.hold(engine, False)
    assert tiering.answers_as_without_a_tier(engine, *(f"p{number}/1" for number in range(9)))
    tiering.check(engine)
