"""Order: who is admitted next, and who is preempted, in vLLM's own loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.vllm.agents import AgentEngine
from tests.vllm.harness import Engine, prompt

MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def one_at_a_time(**kwargs: Any) -> AgentEngine:
    extra = {"ttl_s": 30, **kwargs.pop("extra_config", {})}
    return AgentEngine(200, max_num_seqs=1, extra_config=extra, **kwargs)


def turn(engine: Engine, name: str, program: str | None, **kwargs: Any) -> None:
    """Queue a turn a moment after the one before it."""
    engine.clock.advance(0.1)
    kwargs = {"max_tokens": 4, "seed": len(engine.requests), **kwargs}
    engine.add(name, kwargs.pop("tokens", 100), program=program, **kwargs)


def busy(engine: AgentEngine) -> None:
    """Occupy the only place, so that what comes now waits."""
    turn(engine, "busy", "busy", max_tokens=60, final=True)
    engine.steps(3)


def queued(engine: Engine) -> list[str]:
    return [request.request_id for request in engine.scheduler.waiting]


@MODES
def test_programs_with_a_live_pin_come_first_then_programs_by_arrival(
    async_scheduling: bool,
) -> None:
    engine = one_at_a_time(async_scheduling=async_scheduling)
    turn(engine, "old1", "old")
    engine.run_until_idle()
    turn(engine, "pinned1", "pinned")
    engine.run_until_idle()
    engine.reset_prefix_cache()  # both pins are gone; `pinned` gets a new one
    turn(engine, "pinned2", "pinned", tokens=engine.next_prompt("pinned1", 20))
    engine.run_until_idle()
    busy(engine)
    turn(engine, "new1", "new")
    turn(engine, "old2", "old", tokens=engine.next_prompt("old1", 20))
    turn(engine, "new2", "new2")
    turn(engine, "pinned3", "pinned", tokens=engine.next_prompt("pinned2", 20))
    engine.run_until_idle()
    assert engine.admissions[-4:] == ["pinned3", "old2", "new1", "new2"]
    assert engine.cached["pinned3"][0] > 0


@MODES
def test_turns_without_a_program_keep_their_own_arrival(async_scheduling: bool) -> None:
    engine = one_at_a_time(async_scheduling=async_scheduling)
    turn(engine, "a1", "a", final=None)
    engine.run_until_idle()
    engine.reset_prefix_cache()
    busy(engine)
    turn(engine, "nobody1", None)
    turn(engine, "b1", "b")
    turn(engine, "nobody2", None)
    turn(engine, "a2", "a")
    engine.run_until_idle()
    assert engine.admissions[-4:] == ["a2", "nobody1", "b1", "nobody2"]


@MODES
def test_a_preempted_turn_is_resumed_before_anybody_is_admitted(async_scheduling: bool) -> None:
    engine = AgentEngine(30, async_scheduling=async_scheduling, max_num_seqs=2)
    engine.run_turn("kept", 40, program="kept", max_tokens=2)
    turn(engine, "r0", "r0", tokens=150, max_tokens=150, final=True)
    turn(engine, "r1", "r1", tokens=150, max_tokens=150, final=True)
    engine.steps(4)
    turn(engine, "back", "kept", tokens=engine.next_prompt("kept", 5))
    turn(engine, "new", "new", tokens=30)
    engine.run_until_idle(until=lambda: engine.num_preemptions > 0)
    assert queued(engine) == ["r1", "back", "new"]
    engine.run_until_idle(until=lambda: "back" in engine.admissions)
    assert engine.requests["r1"].status.name == "RUNNING"
    assert "new" not in engine.admissions


def test_the_trace_says_when_a_preempted_turn_is_admitted_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = AgentEngine(24, max_num_seqs=2, extra_config={"trace_path": str(path)})
    for name in ("r0", "r1"):
        turn(engine, name, name, tokens=150, max_tokens=150, final=True)
    engine.run_until_idle()
    assert engine.num_preemptions == 1
    engine.connector.shutdown()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    life = [each["event"] for each in records if each.get("program", "").endswith("r1")]
    assert life == ["arrive", "admit", "preempt", "readmit", "decision", "outcome"]


@MODES
def test_a_program_whose_pin_its_turn_does_not_continue_waits_by_its_arrival(
    async_scheduling: bool,
) -> None:
    """`b2` comes with another context, so it does not keep the pin alive, nor gain by it."""
    engine = one_at_a_time(async_scheduling=async_scheduling)
    turn(engine, "a1", "a")
    engine.run_until_idle()
    engine.reset_prefix_cache()
    turn(engine, "b1", "b")
    engine.run_until_idle()
    busy(engine)
    turn(engine, "a2", "a", tokens=150)
    turn(engine, "b2", "b", tokens=150)
    engine.run_until_idle()
    assert engine.admissions[-2:] == ["a2", "b2"]


@MODES
@pytest.mark.parametrize("gone", ["pressure", "reset"])
def test_a_turn_whose_pin_goes_while_it_waits_is_ranked_anew(
    async_scheduling: bool, gone: str
) -> None:
    engine = one_at_a_time(async_scheduling=async_scheduling)
    turn(engine, "old1", "old")
    engine.run_until_idle()
    engine.reset_prefix_cache()
    turn(engine, "late1", "late")
    engine.run_until_idle()
    busy(engine)
    turn(engine, "old2", "old", tokens=engine.next_prompt("old1", 20))
    turn(engine, "late2", "late", tokens=engine.next_prompt("late1", 20))
    assert queued(engine) == ["late2", "old2"]
    if gone == "reset":
        engine.reset_prefix_cache()
    else:
        engine.side.retention.give_up_cheapest(engine.clock())
    assert queued(engine) == ["old2", "late2"]
    engine.run_until_idle()
    assert engine.admissions[-2:] == ["old2", "late2"]


@MODES
def test_with_the_priority_policy_the_users_priority_ranks_first(async_scheduling: bool) -> None:
    engine = one_at_a_time(async_scheduling=async_scheduling, policy="priority")
    turn(engine, "old1", "old", priority=5)
    engine.run_until_idle()
    busy(engine)
    turn(engine, "low", "new1", priority=9)
    turn(engine, "old2", "old", priority=5, tokens=engine.next_prompt("old1", 20))
    turn(engine, "same", "new2", priority=5)
    turn(engine, "high", "new3", priority=1)
    engine.run_until_idle()
    assert engine.admissions[-4:] == ["high", "old2", "same", "low"]
    assert [engine.requests[i].priority for i in ("low", "high")] == [9, 1]


@MODES
def test_without_order_the_queue_and_the_victims_are_vllms(async_scheduling: bool) -> None:
    engine = one_at_a_time(async_scheduling=async_scheduling, extra_config={"max_head_start_s": 0})
    turn(engine, "old1", "old")
    engine.run_until_idle()
    busy(engine)
    turn(engine, "new", "new")
    turn(engine, "old2", "old", tokens=engine.next_prompt("old1", 20))
    engine.run_until_idle()
    assert engine.admissions[-2:] == ["new", "old2"]
    assert type(engine.scheduler.waiting).__name__ == "FCFSRequestQueue"
    assert engine.scheduler.policy.value == "fcfs"
    assert {request.priority for request in engine.requests.values()} == {0}
    assert engine.ends()["returned"] == 1


def contended(async_scheduling: bool, *finals: bool) -> AgentEngine:
    """Turns r0, r1, ... of programs that came in that order outgrow the pool together."""
    engine = AgentEngine(40, async_scheduling=async_scheduling)
    for i, final in enumerate(finals):
        turn(engine, f"r{i}", f"p{i}", tokens=100, max_tokens=200, final=final)
    engine.run_until_idle(until=lambda: engine.num_preemptions > 0)
    return engine


def preempted(engine: Engine) -> list[str]:
    return [i for i, request in engine.requests.items() if request.num_preemptions]


@MODES
@pytest.mark.parametrize(
    ("finals", "victim"),
    [((False, False, False), "r2"), ((False, False, True), "r1"), ((True, True, True), "r2")],
    ids=["latest program", "not a last turn", "all last turns"],
)
def test_the_victim_is_not_a_last_turn_and_of_the_latest_program(
    async_scheduling: bool, finals: tuple[bool, ...], victim: str
) -> None:
    engine = contended(async_scheduling, *finals)
    assert preempted(engine) == [victim]
    engine.run_until_idle()
    assert set(engine.finish_reasons.values()) == {"length"}


@MODES
def test_the_latest_program_is_the_victim_though_its_turn_ran_first(async_scheduling: bool) -> None:
    """`r0` was admitted first, but its program came last. It moves behind the others before the
    step in which somebody may have to go, so it was never scheduled in that step."""
    engine = AgentEngine(40, async_scheduling=async_scheduling)
    engine.run_turn("seed", 16, program="old", max_tokens=1)
    turn(engine, "r0", "new", tokens=97, max_tokens=200)
    engine.step()
    turn(engine, "r1", "old", tokens=112, max_tokens=200)
    turn(engine, "r2", "old", tokens=112, max_tokens=200)
    assert engine.admissions[-1] == "r0"
    engine.run_until_idle(until=lambda: engine.num_preemptions > 0)
    assert preempted(engine) == ["r0"]
    engine.run_until_idle()
    assert set(engine.finish_reasons.values()) == {"length"}


@MODES
def test_a_prompt_of_an_older_program_takes_no_tokens_from_those_that_decode(
    async_scheduling: bool,
) -> None:
    engine = AgentEngine(64, async_scheduling=async_scheduling, max_num_batched_tokens=32)
    engine.run_turn("seed", 16, program="old", max_tokens=1)
    turn(engine, "new1", "new", tokens=16, max_tokens=60)
    engine.run_until_idle(until=lambda: bool(engine.outputs["new1"]))
    turn(engine, "old2", "old", tokens=600, max_tokens=4)
    engine.steps(2)
    before = len(engine.outputs["new1"])
    engine.steps(10)
    assert engine.requests["old2"].is_prefill_chunk
    assert [r.request_id for r in engine.scheduler.running] == ["new1", "old2"]
    assert len(engine.outputs["new1"]) == before + 10


@MODES
def test_while_nobody_can_be_refused_allocate_slots_is_vllms_own(async_scheduling: bool) -> None:
    """A Python call more for each running request in each step is what our hooks cost most."""
    engine = AgentEngine(200, async_scheduling=async_scheduling, max_num_batched_tokens=64)
    manager = engine.scheduler.kv_cache_manager
    own = type(manager).allocate_slots

    def is_own() -> bool:
        return getattr(manager.allocate_slots, "__func__", None) is own

    for i in range(3):
        turn(engine, f"r{i}", f"p{i}", tokens=16, max_tokens=40)
    engine.step()
    assert not is_own()  # they waited: whole prompts want room
    engine.steps(3)
    assert is_own()
    turn(engine, "large", "large", tokens=16 * 196, max_tokens=20)
    engine.run_until_idle(until=lambda: engine.free_blocks() < 4)
    engine.step()
    assert not is_own()  # it runs, and what it takes next may not be there
    engine.run_until_idle()
    assert set(engine.finish_reasons.values()) == {"length"}


@MODES
def test_a_streaming_update_keeps_its_programs_place_before_the_next_victim(
    async_scheduling: bool,
) -> None:
    """vLLM writes the update's arrival, seconds of another clock, into the request that goes on."""
    engine = AgentEngine(24, async_scheduling=async_scheduling)
    turn(engine, "old", "old", tokens=100, max_tokens=2, resumable=True)
    engine.run_until_idle(until=lambda: len(engine.outputs["old"]) == 2)
    engine.steps(2)
    turn(engine, "new", "new", tokens=100, max_tokens=150)
    engine.steps(2)
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    update = Request("old", prompt(20, seed=5), params, None, arrival_time=2e9, resumable=True)
    engine.scheduler.add_request(update)
    engine.run_until_idle(until=lambda: engine.num_preemptions > 0)
    assert engine.requests["old"].arrival_time == 2e9
    assert preempted(engine) == ["new"]
