"""Endings: whatever becomes of a turn, its pin ends once, for one reason."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

from continuum_connector.toolcalls import ToolReader
from tests.vllm.agents import AgentEngine, others_take_the_pool, whole
from tests.vllm.harness import prompt

MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
GROUPS = pytest.mark.parametrize("groups", ["full", "hybrid"])
TTL_S = 2.0  # the default of ttl_s


class FakeTokenizer:
    """Says of every tail the same text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def decode(self, token_ids: list[int]) -> str:
        assert len(token_ids) <= 64
        return self.text


@MODES
@pytest.mark.parametrize("waited_s", [0.5, 10.0], ids=["before", "after"])
def test_an_aborted_waiting_turn_gives_the_pin_back_to_its_deadline(
    async_scheduling: bool, waited_s: float
) -> None:
    engine = AgentEngine(async_scheduling=async_scheduling, max_num_seqs=1)
    ended = engine.run_turn("a", 200, program="p")
    deadline = engine.side.pins.of("job:p")[-1].deadline
    assert deadline <= ended + TTL_S
    engine.add("long", 50, max_tokens=2000, program="q")
    engine.steps(3)
    engine.add("b", engine.next_prompt("a", 20), program="p")
    engine.steps(2)
    engine.clock.advance(waited_s)
    engine.abort("b")
    assert engine.side.pins.of("job:p")[-1].deadline == deadline
    assert engine.connector.has_pending_push_work() == (waited_s > TTL_S)
    engine.step()
    assert engine.num_pins() == int(waited_s < TTL_S)
    engine.clock.now = deadline
    engine.steps(2)
    assert engine.ends() == {"expired": 1}


@MODES
def test_a_turn_whose_grammar_is_wrong_takes_nothing_of_its_program(async_scheduling: bool) -> None:
    """It never ran, so what the turn before left still says who goes on with the program."""
    engine = AgentEngine(async_scheduling=async_scheduling)
    engine.run_turn("a", 200, program="p")
    wrong = StructuredOutputsParams(json_object=True)
    failed = engine.add("b", engine.next_prompt("a", 20), program="p", structured_outputs=wrong)
    compiled: Future[Any] = Future()
    compiled.set_exception(ValueError("no such grammar"))
    failed.structured_output_request.grammar = compiled
    engine.steps(5)
    assert engine.finish_reasons["b"] == "error"
    assert engine.num_pins() == 1
    engine.add("stray", 50, seed=9, program="p", final=True)  # a guessed id
    engine.run_until_idle(until=lambda: "stray" in engine.finish_reasons)
    assert engine.num_pins() == 1
    engine.run_turn("c", engine.next_prompt("a", 20), program="p")
    assert engine.cached["c"][0] >= 200


def test_of_two_waiting_turns_one_aborted_leaves_the_pin_to_the_other() -> None:
    engine = AgentEngine(max_num_seqs=1)
    engine.run_turn("a", 200, program="p")
    engine.add("long", 50, max_tokens=100, program="q")
    engine.steps(3)
    engine.add("b0", engine.next_prompt("a", 20), program="p")
    engine.add("b1", engine.next_prompt("a", 25), program="p")
    engine.abort("b0")
    engine.clock.advance(10 * TTL_S)
    engine.run_until_idle()
    assert engine.cached["b1"] == (208, 0)
    assert engine.ends()["returned"] == 1


@MODES
@GROUPS
def test_resetting_the_prefix_cache_succeeds_with_live_pins_and_ends_them(
    async_scheduling: bool, groups: str
) -> None:
    engine = AgentEngine(300, async_scheduling=async_scheduling, groups=groups)
    for i in range(3):
        engine.run_turn(f"a{i}", 200, program=f"p{i}", seed=i)
    assert engine.num_pins() == 3
    assert engine.reset_prefix_cache()
    assert (engine.usage(), engine.ends()) == (0, {"reset": 3})
    engine.run_turn("b", engine.next_prompt("a0", 20), program="p0")
    assert engine.cached["b"] == (0, 0)


def test_resetting_while_turns_run_ends_pins_and_the_turns_go_on() -> None:
    engine = AgentEngine(200)
    engine.run_turn("a", 200, program="p")
    engine.add("running", 100, max_tokens=40, program="q")
    engine.add("back", engine.next_prompt("a", 20), program="p", max_tokens=60)
    engine.steps(4)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.check()
    engine.run_until_idle()
    assert set(engine.finish_reasons.values()) == {"length"}
    assert engine.num_pins() == 2


@MODES
@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_a_turn_whose_client_went_away_is_freed(async_scheduling: bool, when: str) -> None:
    engine = AgentEngine(async_scheduling=async_scheduling, max_num_batched_tokens=64)
    engine.add("a", 200, max_tokens=50, program="p")
    engine.steps({"waiting": 0, "prefill": 2, "decode": 20}[when])
    engine.abort("a")
    engine.run_until_idle()
    assert (engine.usage(), engine.num_pins(), engine.ends()) == (0, 0, {})
    assert engine.total("decisions", "free") == 1


@MODES
@GROUPS
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_turn_whose_client_went_away_gives_back_the_pin_that_it_took(
    async_scheduling: bool, groups: str, when: str
) -> None:
    """A client that waited for too long asks again, and others take what room there is meanwhile.
    If it does not, the pin lasts once more as long as it did."""
    engine = AgentEngine(
        150, async_scheduling=async_scheduling, groups=groups, max_num_batched_tokens=64
    )
    engine.run_turn("a", 200, program="p")
    tokens = engine.next_prompt("a", 100)
    for name in ("b", "c"):
        engine.add(name, tokens, max_tokens=50, program="p")
        engine.steps({"prefill": 2, "decode": 30}[when])
        engine.abort(name)
        others_take_the_pool(engine, num_tokens=600)
    assert engine.num_pins() == 1
    engine.run_turn("again", tokens, max_tokens=2, program="p")
    assert sum(engine.cached["again"]) >= (whole(engine, 300) if when == "decode" else 208)
    engine.add("d", engine.next_prompt("again", 20), max_tokens=50, program="p")
    engine.steps(3)
    engine.abort("d")
    engine.clock.advance(TTL_S)
    engine.run_until_idle()
    assert (engine.usage(), engine.ends()["expired"]) == (0, 1)


@MODES
@pytest.mark.parametrize(
    ("text", "is_pinned"),
    [("done Observation:", True), ("I was cut o", False), (None, True)],
    ids=["stop string", "disconnect", "no tokenizer yet"],
)
def test_a_stop_string_ends_a_turn_and_a_disconnect_frees_it(
    async_scheduling: bool, text: str | None, is_pinned: bool
) -> None:
    """Both finish as ABORTED: the API server matches stop strings and aborts the request."""
    engine = AgentEngine(async_scheduling=async_scheduling)
    reader = ToolReader(
        lambda: FakeTokenizer(text) if text is not None else None, lambda: 0.0, lambda _: None
    )
    engine.side._reader = reader
    engine.add("a", 200, max_tokens=500, program="p", stop=["Observation:", "END"])
    reader.join()
    engine.steps(70)
    engine.abort("a")
    engine.run_until_idle()
    assert engine.num_pins() == int(is_pinned)
    engine.clock.advance(TTL_S)
    engine.run_until_idle()
    assert engine.usage() == 0


def no_more_input(engine: AgentEngine, session: str) -> None:
    """Its client says so, as vLLM's front end does at the end of a stream of inputs."""
    said = Request(session, [], SamplingParams(max_tokens=1), None, resumable=False)
    engine.scheduler.add_request(said)


@MODES
@pytest.mark.parametrize("when", ["answered", "in its answer", "gone", "gone in its answer"])
def test_a_streaming_session_that_ends_in_order_has_ended_as_any_turn_does(
    async_scheduling: bool, when: str
) -> None:
    """vLLM ends it as ABORTED if all its inputs were answered: as one whose client went away."""
    engine = AgentEngine(async_scheduling=async_scheduling)
    engine.add("s", 200, max_tokens=8, program="p", resumable=True)
    engine.steps(3) if "in its answer" in when else engine.run_until_idle()
    if "gone" in when:
        engine.abort("s")
    else:
        no_more_input(engine, "s")
    engine.run_until_idle()
    assert engine.num_pins() == int("gone" not in when)
    assert "s" not in engine.scheduler.requests
    engine.run_turn("b", engine.next_prompt("s", 20), program=None)
    assert engine.side.programs.get("job:p").num_turns == 2, "known by its first answer"
    engine.clock.advance(TTL_S)
    engine.run_until_idle()
    assert engine.usage() == 0


def test_a_session_goes_on_with_its_next_input_whatever_ends_beside_it() -> None:
    engine = AgentEngine()
    for name in ("s", "t"):
        engine.add(name, 100, max_tokens=4, program=name, seed=ord(name), resumable=True)
    engine.run_until_idle()
    no_more_input(engine, "s")
    params = engine.requests["t"].sampling_params
    more = Request("t", prompt(20, seed=3), params, None, engine.clock(), resumable=True)
    engine.scheduler.add_request(more)
    engine.run_until_idle()
    assert len(engine.outputs["t"]) == 8
    assert list(engine.scheduler.requests) == ["t"]
    no_more_input(engine, "t")
    assert engine.num_pins() == 2


def test_a_turn_after_a_stop_string_hits_its_pin() -> None:
    engine = AgentEngine()
    engine.add("a", 200, max_tokens=500, program="p", stop=["x"])
    engine.steps(30)
    engine.abort("a")
    engine.run_turn("b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"][0] >= 208
    assert engine.ends() == {"returned": 1}


def test_a_job_id_may_be_used_again_after_the_last_step() -> None:
    engine = AgentEngine()
    engine.run_turn("a", 200, program="p", final=True)
    engine.run_turn("b", 200, program="p", seed=4)
    assert engine.num_pins() == 1
    engine.run_turn("c", engine.next_prompt("b", 20), program="p", final=True)
    assert (engine.usage(), engine.ends()) == (0, {"returned": 1})


def test_a_last_step_beside_the_pinned_turn_ends_the_pin_as_program_done() -> None:
    engine = AgentEngine()
    engine.add("a", 200, program="p")
    engine.add("b", 200, program="p", max_tokens=30, final=True)
    engine.run_until_idle()
    assert (engine.usage(), engine.ends()) == (0, {"program_done": 1})


def test_shutdown_ends_every_pin_once() -> None:
    engine = AgentEngine()
    engine.run_turn("a", 200, program="p")
    engine.run_turn("b", 200, program="q", seed=2)
    engine.scheduler.shutdown()
    engine.connector.shutdown()
    engine.check()
    assert (engine.usage(), engine.ends()) == (0, {"shutdown": 2})
