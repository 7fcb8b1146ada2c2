"""Pins: what is kept after a turn, until when, and why each pin ended."""

from __future__ import annotations

from typing import Any

import pytest

from continuum_connector.scheduler import turns
from tests.vllm.agents import AgentEngine
from tests.vllm.harness import Engine

MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
GROUPS = pytest.mark.parametrize("groups", ["full", "hybrid"])
TTL_S = 2.0  # the default of ttl_s


@MODES
@GROUPS
def test_usage_is_constant_through_the_gap_and_zero_after_the_ttl(
    async_scheduling: bool, groups: str
) -> None:
    engine = AgentEngine(200, async_scheduling=async_scheduling, groups=groups)
    engine.run_turn("a", 200, program="p")
    usage = engine.usage()
    blocks = engine.pinned_blocks()
    assert usage == pytest.approx(blocks / 199)
    # 215 of 216 tokens have KV: 13 full blocks, and of a window of 64 the last four or five.
    assert blocks == 13 if groups == "full" else 13 + 8 <= blocks <= 13 + 10
    for _ in range(9):
        engine.clock.advance(0.2)
        assert not engine.step()
        assert engine.usage() == usage
    engine.clock.advance(0.2)
    engine.run_until_idle()
    assert engine.usage() == 0
    assert engine.ends() == {"expired": 1}


@MODES
@GROUPS
def test_usage_is_zero_after_the_last_step(async_scheduling: bool, groups: str) -> None:
    engine = AgentEngine(200, async_scheduling=async_scheduling, groups=groups)
    engine.run_turn("a", 200, program="p")
    assert engine.usage() > 0
    engine.run_turn("b", engine.next_prompt("a", 20), program="p", final=True)
    assert engine.usage() == 0
    assert engine.ends() == {"returned": 1}


def test_an_idle_engine_steps_only_when_a_pin_is_due_and_is_idle_again_after() -> None:
    engine = AgentEngine()
    engine.run_turn("a", 200, program="p")
    deadline = next(iter(engine.side.pins)).deadline
    for _ in range(100):
        assert not engine.connector.has_pending_push_work()
        assert not engine.scheduler.has_requests()
    engine.clock.now = deadline - 0.001
    assert not engine.step()
    engine.clock.now = deadline
    assert engine.connector.has_pending_push_work()
    assert engine.run_until_idle() <= 2
    assert not engine.scheduler.has_requests()
    assert (engine.usage(), engine.ends()) == (0, {"expired": 1})


@MODES
@GROUPS
def test_the_next_turn_within_the_ttl_hits_all_that_was_pinned(
    async_scheduling: bool, groups: str
) -> None:
    engine = AgentEngine(200, async_scheduling=async_scheduling, groups=groups)
    engine.run_turn("a", 200, program="p")
    engine.clock.advance(TTL_S * 0.9)
    engine.run_turn("b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"] == (208, 0)
    assert engine.ends() == {"returned": 1}
    assert engine.num_pins() == 1
    kept = {"only_ours": 0, "stock_too": 208, "only_stock": 0}  # nobody knows it of windows
    assert engine.kv_transfer_params["b"]["continuum"] == {
        "program": "job:p",
        "turn": 2,
        "decision": "pin",
        "ttl_s": TTL_S,
        "cached_tokens": {"vram": 208, "dram": 0},
        **({"against_stock": kept} if groups == "full" else {}),
    }


def test_a_pin_is_what_makes_the_next_turn_hit_after_others_took_the_pool() -> None:
    hits = {}
    for connector in ("ContinuumConnector", None):
        engine = Engine(100, connector=connector)
        engine.add("a", 400, program="p")
        engine.run_until_idle()
        for i in range(4):  # more than the pool between them, one after the other
            engine.add(f"x{i}", 600, program=f"x{i}", final=True, seed=10 + i)
            engine.run_until_idle()
        engine.add("b", engine.next_prompt("a", 20), program="p")
        engine.run_until_idle()
        hits[connector] = engine.cached["b"][0]
    assert hits == {"ContinuumConnector": 400, None: 0}


def test_a_program_has_a_pin_for_each_context_that_it_has_left() -> None:
    engine = AgentEngine()
    engine.run_turn("a", 200, program="p")
    engine.run_turn("b", 300, program="p", seed=9)  # the program starts another context
    assert engine.ends() == {}
    assert [len(pin.blocks) for pin in engine.side.pins.of("job:p")] == [13, 19]
    assert engine.pinned_blocks() == 13 + 19
    engine.run_turn("a2", engine.next_prompt("a", 20), program="p")
    assert engine.ends() == {"returned": 1}
    assert [len(pin.blocks) for pin in engine.side.pins.of("job:p")] == [19, 15]


def test_no_more_pins_of_a_program_are_looked_at_than_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others stay: nothing continued them, and the turn that will finds their blocks."""
    monkeypatch.setattr(turns, "MAX_LEFT", 3)
    engine = AgentEngine()
    for number in range(5):
        engine.run_turn(f"a{number}", 40, program="p", seed=number)
    assert engine.ends() == {}
    assert (engine.num_pins(), len(engine.side.pins.of("job:p"))) == (5, 3)
    engine.run_turn("b0", engine.next_prompt("a0", 20), program="p")
    assert engine.cached["b0"][0] == 48
    assert engine.side.end_program("job:p", engine.clock())
    assert (engine.num_pins(), engine.pinned_blocks()) == (0, 0)


@MODES
def test_the_pin_of_a_returning_turn_cannot_expire_while_it_waits(async_scheduling: bool) -> None:
    engine = AgentEngine(async_scheduling=async_scheduling, max_num_seqs=1)
    engine.run_turn("a", 200, program="p")
    engine.add("long", 50, max_tokens=400, program="q")
    engine.steps(3)
    engine.add("b", engine.next_prompt("a", 20), program="p")
    engine.clock.advance(10 * TTL_S)
    engine.steps(3)
    assert "b" not in engine.admissions
    assert engine.num_pins() == 1
    assert engine.ends() == {}
    engine.run_until_idle()
    assert engine.cached["b"] == (208, 0)
    assert engine.ends()["returned"] == 1


def test_a_turn_with_another_context_does_not_hold_the_programs_pin_up() -> None:
    engine = AgentEngine(max_num_seqs=1)
    engine.run_turn("a", 200, program="p")
    engine.add("long", 50, max_tokens=300, program="q")
    engine.steps(3)
    engine.add("b", 300, program="p", seed=5)
    engine.clock.advance(TTL_S)
    engine.steps(2)
    assert engine.ends() == {"expired": 1}


@MODES
def test_two_samples_of_one_turn_share_a_program_and_leave_one_pin(async_scheduling: bool) -> None:
    engine = AgentEngine(async_scheduling=async_scheduling)
    engine.add("0_x", 200, max_tokens=20, program="p")  # n=2: two requests of one job id
    engine.add("1_x", 200, max_tokens=40, program="p")
    engine.run_until_idle()
    assert (engine.num_pins(), engine.ends()) == (1, {"superseded": 1})
    engine.add("0_y", engine.next_prompt("1_x", 20), program="p")
    engine.add("1_y", engine.next_prompt("1_x", 20), program="p")
    engine.run_until_idle()
    assert engine.ends() == {"superseded": 2, "returned": 1}
    engine.add("0_z", engine.next_prompt("1_y", 20), program="p", final=True)
    engine.add("1_z", engine.next_prompt("1_y", 20), program="p", final=True)
    engine.run_until_idle()
    assert (engine.usage(), engine.num_pins()) == (0, 0)


def test_strangers_who_share_a_job_id_do_each_other_no_harm() -> None:
    engine = AgentEngine(400)
    for turn in range(3):
        for i in range(4):
            tokens: Any = 100 + 40 * i
            if turn:
                tokens = engine.next_prompt(f"{i}.{turn - 1}", 20)
            engine.add(f"{i}.{turn}", tokens, seed=i, program="agent", max_tokens=10 + i)
        engine.run_until_idle()
        assert engine.num_pins() == 4
    assert engine.ends() == {"returned": 8}
    assert set(engine.finish_reasons.values()) == {"length"}


@pytest.mark.parametrize(
    ("hint", "ttl_s"), [(5.0, 5.0), (0.5, 0.5), (500.0, 7.0)], ids=["longer", "shorter", "capped"]
)
def test_the_client_may_ask_for_a_ttl_up_to_max_ttl_s(hint: float, ttl_s: float) -> None:
    engine = AgentEngine(extra_config={"max_ttl_s": 7.0})
    asked = {"continuum": {"program": "p", "ttl_s": hint}}
    engine.run_turn("a", 200, kv_transfer_params=asked)
    pin = engine.side.pins.of("p")[-1]
    assert pin.deadline - pin.started == ttl_s
    assert engine.kv_transfer_params["a"]["continuum"]["ttl_s"] == ttl_s
    engine.clock.now = pin.deadline
    engine.run_until_idle()
    assert engine.ends() == {"expired": 1}


def test_pins_above_max_pinned_fraction_give_way_latest_program_first() -> None:
    engine = AgentEngine(101, extra_config={"max_pinned_fraction": 0.3})
    for i in range(3):
        engine.run_turn(f"a{i}", 200, program=f"p{i}", seed=i)
        assert engine.pinned_blocks() <= 30
    assert [pin.program for pin in engine.side.pins] == ["job:p0", "job:p1"]
    assert engine.ends() == {"pressure": 1}


def test_a_turn_larger_than_the_budget_costs_no_other_program_its_pin() -> None:
    engine = AgentEngine(101, extra_config={"max_pinned_fraction": 0.3})
    engine.run_turn("old", 40, program="old")
    engine.run_turn("a", 200, program="young", seed=1)
    engine.run_turn("b", engine.next_prompt("old", 500), program="old")
    assert [pin.program for pin in engine.side.pins] == ["job:young"]
    assert engine.pinned_blocks() <= 30


def test_nothing_is_pinned_of_a_turn_shorter_than_a_block() -> None:
    engine = AgentEngine()
    engine.run_turn("a", 5, max_tokens=3, program="p")
    assert (engine.usage(), engine.num_pins(), engine.total("pins_started")) == (0, 0, 0)
    assert engine.kv_transfer_params["a"]["continuum"]["decision"] == "free"


def test_a_program_without_a_name_is_pinned_and_recognised_by_its_prompt() -> None:
    engine = AgentEngine()
    engine.run_turn("a", 200)
    assert engine.num_pins() == 1
    engine.run_turn("b", engine.next_prompt("a", 20))
    assert engine.cached["b"] == (208, 0)
    assert engine.ends() == {"returned": 1}


def test_a_preempted_turn_that_came_back_for_a_pin_ended_it_only_once() -> None:
    engine = AgentEngine(40)
    engine.run_turn("a", 200, program="p")
    engine.add("b", engine.next_prompt("a", 20), program="p", max_tokens=200)
    engine.add("c", 150, program="q", max_tokens=250, seed=7)
    engine.run_until_idle()
    assert engine.num_preemptions > 0
    assert engine.ends()["returned"] == 1
