"""Switched off by an operator: vLLM's own order, nothing kept; what was under way ends well.

The switch's file is read by the test, `look`, instead of once a second by its thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.sim import versions
from continuum_connector.connector import Mode
from continuum_connector.scheduler.queue import ProgramQueue
from continuum_connector.scheduler.tiers.traffic import Kind
from continuum_connector.scheduler.turns import State
from tests.vllm import tiering
from tests.vllm.harness import Engine
from tests.vllm.test_load_order import loading
from tests.vllm.tiering import (
    GROUPS,
    MODES,
    answers_as_without_a_tier,
    assert_drained,
    hold,
    in_flight,
    park,
    run_turn,
    tiered,
    total,
    wind_down,
)

OFF_STEPS = 3  # a step to do as the switch says, one or two in flight before it


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "switch"


def switched(path: Path, **kwargs: Any) -> Engine:
    config = {"switch_path": str(path), "ttl_s": 50, **kwargs.pop("config", {})}
    return tiered(config=config, **kwargs)


def turn_switch(engine: Engine, path: Path, text: str) -> None:
    """What an operator does, and what the switch's thread makes of it."""
    path.write_text(f"{text}\n")
    engine.connector.switch.look()


def is_off(engine: Engine) -> bool:
    return engine.connector.mode is Mode.OFF


def states(engine: Engine) -> list[State]:
    return [turn.state for turn in engine.connector.side.turns.all()]


def neutral(engine: Engine) -> bool:
    """Whether nothing is held, known or waited for by us."""
    side = engine.connector.side
    return (
        is_off(engine)
        and not engine.foreign_refs()
        and not len(side.pins)
        and not side.turns
        and not side.tier.index.num_ready
        and not len(side.decider.away.decisions())
        and not isinstance(engine.scheduler.waiting, ProgramQueue)
    )


@MODES
def test_an_idle_engine_lets_go_of_everything_and_says_so(
    path: Path, async_scheduling: bool
) -> None:
    trace = path.with_name("trace.jsonl")
    engine = switched(
        path,
        async_scheduling=async_scheduling,
        policy="fcfs",
        config={"trace_path": str(trace), "policy": "fixed_ttl"},
    )
    run_turn(engine, "a", 200, program="a")
    assert len(engine.connector.side.pins) == 1
    assert engine.connector.side.tier.index.num_ready
    assert not engine.scheduler.has_requests()
    turn_switch(engine, path, "off")
    assert engine.scheduler.has_requests(), "an idle engine must step to be switched off"
    engine.run_until_idle()
    assert neutral(engine)
    assert_drained(engine)
    assert total(engine, "pins_ended", "switched_off") == 1
    assert total(engine, "outcomes", "pin_switched_off") == 1
    assert total(engine, "switched_on") == 0
    assert total(engine, "pins_live") == total(engine, "held_blocks") == 0
    assert total(engine, "dram_blocks") == 0
    engine.connector.shutdown()
    events = [line.split('"event":"')[1].split('"')[0] for line in trace.read_text().splitlines()]
    assert events.count("switch") == 1


@MODES
def test_while_off_nothing_is_kept_and_the_client_is_told_nothing(
    path: Path, async_scheduling: bool
) -> None:
    path.write_text("off")  # from the start
    engine = switched(path, async_scheduling=async_scheduling)
    run_turn(engine, "first", 100)  # the step in which it notices
    decided = total(engine, "decisions")
    for number in range(3):
        run_turn(engine, f"t{number}", 200, program="a", final=False)
        assert neutral(engine)
        assert f"t{number}" not in engine.kv_transfer_params
    assert total(engine, "decisions") == decided
    assert total(engine, "transfers_admitted") <= decided
    assert_drained(engine)
    assert answers_as_without_a_tier(engine)


@MODES
@GROUPS
def test_loads_that_requests_wait_for_finish_and_stores_let_go(
    path: Path, async_scheduling: bool, groups: str
) -> None:
    engine = switched(path, async_scheduling=async_scheduling, groups=groups)
    run_turn(engine, "a", 300, program="a")
    park(engine)
    hold(engine)
    engine.add("b", engine.next_prompt("a", 20), program="a")
    run_turn(engine, "c", 250, idle=False, program="c", seed=3)
    loads, stores = in_flight(engine, Kind.LOAD), in_flight(engine, Kind.STORE)
    assert loads
    assert stores
    turn_switch(engine, path, "off")
    for _ in range(OFF_STEPS):
        engine.step()
    assert neutral(engine)
    assert total(engine, "stores", "abandoned") + len(in_flight(engine, Kind.STORE)) >= len(stores)
    tiering.check(engine)
    hold(engine, False)
    engine.run_until_idle()
    assert_drained(engine)
    assert total(engine, "loads", "done") == 1
    assert total(engine, "transfers_in_flight") == 0
    assert answers_as_without_a_tier(engine)


@MODES
def test_a_load_that_fails_while_off_is_recomputed(path: Path, async_scheduling: bool) -> None:
    engine = switched(path, async_scheduling=async_scheduling)
    run_turn(engine, "a", 300, program="a")
    park(engine)
    hold(engine)
    engine.add("b", engine.next_prompt("a", 20), program="a")
    engine.step()
    engine.step()
    assert in_flight(engine, Kind.LOAD)
    turn_switch(engine, path, "off")
    for _ in range(OFF_STEPS):
        engine.step()
    engine.fail()
    hold(engine, False)
    engine.run_until_idle()
    assert_drained(engine)
    assert answers_as_without_a_tier(engine)


def admitted(path: Path | None, policy: str, async_scheduling: bool, off: bool) -> list[str]:
    """Who is admitted in which order where one fits at a time: a second turn of the first program
    comes last, which program order would put before the others."""
    engine = (
        switched(path, max_num_seqs=1, policy=policy, async_scheduling=async_scheduling)
        if path is not None
        else Engine(
            200,
            connector=None,
            max_num_seqs=1,
            policy=policy,
            async_scheduling=async_scheduling,
        )
    )
    engine.add("warm", 100, program="p")
    engine.run_until_idle(until=lambda: "warm" in engine.finish_reasons)
    if off:
        assert path is not None
        turn_switch(engine, path, "off")
        engine.run_until_idle()
    engine.add("long", 200, program="long", seed=9)
    engine.step()
    for number, priority in enumerate((5, 1, 3)):
        engine.add(f"new{number}", 100, program=f"n{number}", seed=20 + number, priority=priority)
        engine.clock.advance(0.001)
    engine.add("back", engine.next_prompt("warm", 10), program="p", priority=4)
    engine.run_until_idle()
    return engine.admissions


@MODES
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_turns_queued_while_off_wait_in_vllms_own_order(
    path: Path, policy: str, async_scheduling: bool
) -> None:
    stock = admitted(None, policy, async_scheduling, off=False)
    assert admitted(path, policy, async_scheduling, off=True) == stock
    if policy == "fcfs":
        path.unlink()
        assert admitted(path, policy, async_scheduling, off=False) != stock


def victims(path: Path | None, async_scheduling: bool) -> list[str]:
    """Who is put back when two turns outgrow VRAM: `first`, whose program came second, or `back`,
    a turn of the program that came first, which was admitted last."""
    sizes: dict[str, Any] = {"num_blocks": 24, "async_scheduling": async_scheduling}
    if path is None:
        engine = Engine(connector=None, **sizes)
    else:
        engine = switched(path, num_slots=0, **sizes)
    run_turn(engine, "warm", 20, max_tokens=2, program="p")
    if path is not None and path.exists():
        engine.connector.switch.look()
        engine.run_until_idle()
    engine.add("first", 100, 150, program="q", seed=5, priority=5)  # which fcfs does not look at
    engine.step()
    engine.add("back", 100, 150, program="p", seed=6)
    engine.run_until_idle()
    return [i for i, request in engine.requests.items() if request.num_preemptions]


@MODES
def test_while_off_vllm_chooses_whom_to_put_back(path: Path, async_scheduling: bool) -> None:
    assert victims(path, async_scheduling) == ["first"]  # the program that came later
    path.write_text("off")
    assert victims(path, async_scheduling) == victims(None, async_scheduling) == ["back"]


@MODES
def test_the_last_copy_that_settles_while_off_is_seen_in_the_metrics(
    path: Path, async_scheduling: bool
) -> None:
    engine = switched(path, async_scheduling=async_scheduling)
    hold(engine)
    run_turn(engine, "a", 200, idle=False, program="a")
    assert in_flight(engine, Kind.STORE)
    turn_switch(engine, path, "off")  # which cancels it
    engine.run_until_idle()
    assert total(engine, "transfers_in_flight") == 0
    assert total(engine, "dram_blocks") == total(engine, "dram_used_bytes") == 0
    assert_drained(engine)


@MODES
def test_those_that_wait_already_keep_their_places_and_new_ones_queue_behind(
    path: Path, async_scheduling: bool
) -> None:
    engine = switched(path, max_num_seqs=1, async_scheduling=async_scheduling)
    engine.add("warm", 100, program="p")
    engine.run_until_idle(until=lambda: "warm" in engine.finish_reasons)
    engine.add("long", 200, program="long", seed=9)
    engine.step()
    engine.add("new", 100, program="n", seed=20)
    engine.add("back", engine.next_prompt("warm", 10), program="p")
    turn_switch(engine, path, "off")
    for _ in range(OFF_STEPS):
        engine.step()
    engine.add("late", engine.next_prompt("warm", 12), program="p")
    engine.run_until_idle()
    assert engine.admissions == ["warm", "long", "back", "new", "late"]
    assert_drained(engine)


@MODES
def test_switched_on_again_it_pins_and_orders_those_that_came_meanwhile(
    path: Path, async_scheduling: bool
) -> None:
    engine = switched(path, max_num_seqs=1, async_scheduling=async_scheduling)
    run_turn(engine, "old", 100, program="old")
    turn_switch(engine, path, "off")
    engine.run_until_idle()
    engine.add("long", 300, program="long", seed=9)
    engine.step()
    engine.add("new", 100, program="n", seed=20)
    engine.add("again", engine.next_prompt("old", 10), program="old")
    turn_switch(engine, path, "on")
    engine.run_until_idle()
    assert engine.admissions == ["old", "long", "again", "new"]  # its program came first
    assert total(engine, "switched_on") == 1
    pins = {pin.program for pin in engine.connector.side.pins}
    assert pins == {"job:old", "job:n"}  # `long` ran when nobody knew of it
    wind_down(engine)
    assert answers_as_without_a_tier(engine)


@MODES
def test_pauses_that_nobody_watched_teach_nothing(path: Path, async_scheduling: bool) -> None:
    engine = switched(path, async_scheduling=async_scheduling)
    run_turn(engine, "a", 100, program="a")
    gaps = engine.connector.side.decider.gaps
    assert len(gaps) == 1
    turn_switch(engine, path, "off")
    engine.run_until_idle()
    assert len(gaps) == 0


@pytest.mark.skipif(not versions.CAN_FAIL_REQUESTS, reason="vLLM < 0.30 tells no request to wait")
def test_a_load_promised_before_a_reset_is_refused_and_recomputed() -> None:
    """vLLM >= 0.33 may start a load a step after it was promised; a reset may come between."""
    engine = tiered()
    run_turn(engine, "a", 300, program="a")
    park(engine)
    side = engine.connector.side
    request = engine.add("b", engine.next_prompt("a", 20), program="a")
    num_tokens = side.tier.find(request, 0)
    assert num_tokens
    engine.connector.reset_cache()
    side.tier.load("a", request, [list(range(1, 40))], num_tokens, engine.clock())
    (transfer,) = in_flight(engine, Kind.LOAD)
    assert set(transfer.slots.tolist()) == {-1}  # which every rank refuses


@MODES
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_turn_that_has_loaded_is_not_starved_while_off(
    path: Path, async_scheduling: bool, policy: str
) -> None:
    """vLLM <= 0.30 has no loads of its own, and would ask the better priority first for ever."""
    engine = loading(
        async_scheduling=async_scheduling, policy=policy, config={"switch_path": str(path)}
    )
    turn_switch(engine, path, "off")
    engine.step()
    engine.add("whole", 98 * tiering.BLOCK, 2, seed=9, priority=0, final=True)
    engine.step()
    engine.settle()
    hold(engine, False)
    engine.run_until_idle(max_steps=60)
    assert is_off(engine)
    assert answers_as_without_a_tier(engine)


@MODES
def test_who_ran_already_when_it_is_switched_on_comes_first_if_put_back(
    path: Path, async_scheduling: bool
) -> None:
    path.write_text("off")
    engine = switched(
        path,
        num_slots=0,
        num_blocks=24,
        async_scheduling=async_scheduling,
        config={"policy": "program_order"},
    )
    run_turn(engine, "warm", 20, program="p")
    for number in range(2):
        engine.add(f"old{number}", 100, 150, program=f"old{number}", seed=5 + number)
        engine.step()
    turn_switch(engine, path, "on")
    engine.step()
    engine.step()
    for number in range(12):
        engine.add(f"new{number}", 60, 20, program=f"new{number}", seed=30 + number)
    engine.run_until_idle()
    assert not is_off(engine)
    assert engine.requests["old1"].num_preemptions
    ended = list(engine.finish_reasons)
    assert ended.index("old1") < ended.index("new11")


def test_who_is_put_back_in_the_step_that_switches_it_on_is_counted_once(path: Path) -> None:
    engine = switched(
        path,
        groups="state",
        num_slots=0,
        num_blocks=30,
        max_num_batched_tokens=128,
        long_prefill_token_threshold=16,
    )
    turn_switch(engine, path, "off")
    for number in range(5):
        engine.add(f"old{number}", 100, 1, seed=number)
    engine.step()
    turn_switch(engine, path, "on")
    engine.run_until_idle(until=lambda: State.PREEMPTED in states(engine))
    assert not is_off(engine)
    engine.run_until_idle()
    tiering.check(engine)


@MODES
@pytest.mark.parametrize("num_steps", range(12, 18))
def test_who_has_loaded_and_goes_away_while_off_is_admitted_by_nobody(
    path: Path, async_scheduling: bool, num_steps: int
) -> None:
    """vLLM <= 0.30 asks us who goes first, in steps for which nothing else is planned."""
    engine = switched(path, num_blocks=100, async_scheduling=async_scheduling)
    run_turn(engine, "a0", 300, program="a", max_tokens=1)
    park(engine)
    hold(engine)
    engine.add("a1", engine.next_prompt("a0", 700), 4, program="a")
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.LOAD)))
    engine.add("b", 60 * 16, 200, seed=9, program="b")
    for _ in range(4):
        engine.step()
    turn_switch(engine, path, "off")
    for _ in range(3):
        engine.step()
    engine.settle()
    hold(engine, False)
    for _ in range(num_steps):
        engine.step()
    engine.add("c", 40, 4, seed=77, program="c")
    engine.abort("a1")
    engine.abort("b")
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine, "c")


def test_a_promise_to_a_turn_of_before_is_forgotten_with_it(path: Path) -> None:
    """Switched off and on again we know no turn that waited, but DRAM had been asked for it."""
    engine = switched(path, num_blocks=100)
    run_turn(engine, "a", 160, program="a")
    park(engine)
    request = engine.add("b", engine.next_prompt("a", 20), 4, program="a")
    assert engine.connector.side.match(request, 0, engine.clock())[0]
    for text in ("off", "on"):
        turn_switch(engine, path, text)
        engine.connector._follow_switch(engine.clock())
    engine.abort("b")
    assert not list(engine.connector.side.tier._found)


def test_switched_on_again_it_is_what_it_was(path: Path) -> None:
    engine = switched(path)
    modes = [engine.connector.mode]
    for said in ("off", "on"):
        turn_switch(engine, path, said)
        engine.run_until_idle()
        modes.append(engine.connector.mode)
    assert modes == [Mode.ATTACHED, Mode.OFF, Mode.ATTACHED]
    run_turn(engine, "a", 200, program="a")
    assert len(engine.connector.side.pins) == 1
