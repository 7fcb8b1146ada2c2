"""The gate in vLLM's own queue: held turns are waiting turns, whatever happens to them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus

from bench.common.known_costs import know
from tests.vllm.agents import AgentEngine
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import MODES

WAIT_S = 30.0
LARGE = 60 * 16  # tokens; two such programs do not fit into 100 blocks


def gated(num_blocks: int = 100, **kwargs: Any) -> AgentEngine:
    """An engine with a gate that knows what a prefill costs; no DRAM."""
    extra = {"gate_wait_s": WAIT_S, "ttl_s": 5, **kwargs.pop("extra_config", {})}
    engine = AgentEngine(num_blocks, max_num_batched_tokens=1024, extra_config=extra, **kwargs)
    know(engine.connector.costs, {"prefill": [0.0, 1e-2, 0.0, 0.0, 0.0]})
    return engine


def crowded(**kwargs: Any) -> AgentEngine:
    """Program `a` runs, `b` and `c` stand at the gate; then a chat that fits."""
    engine = gated(**kwargs)
    engine.add("a", LARGE, max_tokens=600, program="a")
    engine.steps(3)
    for seed, name in enumerate("bc", 1):
        engine.add(name, LARGE, max_tokens=4, program=name, seed=seed)
    engine.steps(3)
    assert held(engine) == ["b", "c"]
    return engine


def held(engine: AgentEngine) -> list[str]:
    gate = engine.side.waits.gate
    return [request for request in engine.requests if request in list(gate)]


@MODES
def test_a_held_turn_waits_in_vllms_eyes_and_begins_when_there_is_room(
    async_scheduling: bool,
) -> None:
    engine = crowded(async_scheduling=async_scheduling)
    running, waiting = engine.scheduler.get_request_counts()
    assert (running, waiting) == (1, 2)
    assert engine.scheduler.get_num_unfinished_requests() == 3
    assert [each.request_id for each in engine.scheduler.waiting] == ["b", "c"]
    engine.run_until_idle()
    assert engine.admissions == ["a", "b", "c"]
    assert (held(engine), engine.total("gate_opened")) == ([], 2)
    assert engine.total("gate_opened") == 2


def test_nobody_is_held_for_longer_than_the_knob_says() -> None:
    engine = crowded()
    engine.step_s = 1.0
    engine.steps(int(WAIT_S) + 2)
    assert (held(engine), engine.total("gate_opened", "deadline")) == ([], 2)
    engine.run_until_idle()
    waits = [engine.kv_transfer_params[name]["continuum"].get("held_s") for name in "abc"]
    assert waits[0] is None
    assert all(WAIT_S <= each <= WAIT_S + 2 for each in waits[1:])


def test_nobody_is_held_where_everything_fits() -> None:
    engine = gated(num_blocks=1000)
    for seed in range(6):
        engine.add(f"r{seed}", LARGE, max_tokens=4, program=f"p{seed}", seed=seed)
    engine.steps(1)
    assert not held(engine)
    engine.run_until_idle()
    assert engine.total("gate_opened") == 0


@MODES
def test_prefills_are_throttled_while_turns_are_held(async_scheduling: bool) -> None:
    engine = crowded(async_scheduling=async_scheduling)
    engine.prefill_every = math.inf
    engine.add("a2", 16, max_tokens=4, program="a", seed=9)  # its program has begun
    engine.steps(3)
    assert engine.admissions == ["a"], "a step that may begin no prompt"
    stats = engine.stats[-1]
    assert stats.num_waiting_reqs + stats.num_skipped_waiting_reqs == 3, "vllm:num_requests_waiting"
    assert held(engine) == ["b", "c"]
    engine.prefill_every = 1
    engine.steps(3)
    assert engine.admissions == ["a", "a2"]


@pytest.mark.parametrize("with_grammar", [False, True])
def test_beside_held_turns_a_backlog_is_one(with_grammar: bool) -> None:
    engine = crowded(max_num_seqs=1)
    if with_grammar:
        json_only = StructuredOutputsParams(json_object=True)
        engine.add("d", LARGE, program="d", seed=3, structured_outputs=json_only)
    engine.steps(1)
    assert not engine.scheduler.prefill_capacity_bound
    engine.add("a2", 16, max_tokens=4, program="a", seed=9)  # its program has begun
    engine.steps(1)
    assert held(engine) == (["b", "c", "d"] if with_grammar else ["b", "c"])
    assert engine.scheduler.prefill_capacity_bound
    engine.abort("a")
    if with_grammar:
        engine.abort("d")
    engine.run_until_idle()
    assert not engine.scheduler.prefill_capacity_bound


def test_the_next_turns_of_who_has_begun_pass() -> None:
    engine = crowded()
    engine.abort("a")
    engine.steps(2)
    engine.run_until_idle()
    engine.add("b2", engine.next_prompt("b", 16), max_tokens=400, program="b")
    engine.add("d", LARGE, max_tokens=4, program="d", seed=9)
    engine.add("c2", engine.next_prompt("c", 16), max_tokens=4, program="c")
    assert held(engine) == ["d"]
    engine.run_until_idle()


@pytest.mark.parametrize("order", [("b", "c"), ("c", "b")])
def test_a_client_that_goes_away_leaves_nothing_behind(order: tuple[str, ...]) -> None:
    engine = crowded()
    for request in order:
        engine.abort(request)
    assert (held(engine), len(engine.scheduler.waiting)) == ([], 0)
    engine.run_until_idle()
    assert engine.admissions == ["a"]
    assert not engine.side.waits.gate._num_held


def test_the_whole_queue_can_be_ended() -> None:
    engine = crowded()
    engine.scheduler.finish_requests(list(engine.requests), RequestStatus.FINISHED_ABORTED)
    assert (held(engine), engine.scheduler.get_num_unfinished_requests()) == ([], 0)
    engine.run_until_idle()


def test_a_reset_leaves_them_where_they_are() -> None:
    engine = crowded()
    engine.abort("a")
    engine.reset_prefix_cache()
    engine.run_until_idle()
    assert engine.admissions == ["a", "b", "c"]


@MODES
def test_switched_off_they_wait_in_vllms_own_queue(tmp_path: Path, async_scheduling: bool) -> None:
    path = tmp_path / "switch"
    engine = crowded(extra_config={"switch_path": str(path)}, async_scheduling=async_scheduling)
    path.write_text("off\n")
    engine.connector.switch.look()
    engine.steps(3)
    assert held(engine) == []
    assert engine.total("gate_opened", "switched_off") == 2
    assert {each.request_id for each in engine.scheduler.waiting} <= {"b", "c"}
    path.write_text("on\n")
    engine.connector.switch.look()
    engine.run_until_idle()
    assert sorted(engine.admissions) == ["a", "b", "c"]


def test_an_engine_with_nobody_but_held_turns_does_not_step_without_end() -> None:
    engine = crowded(extra_config={"gate_wait_s": "inf"})
    engine.abort("a")
    assert engine.run_until_idle() < 100


def test_a_session_that_waits_for_its_client_is_no_work() -> None:
    engine = gated()
    engine.add("s", LARGE, max_tokens=4, program="s", resumable=True)
    engine.run_until_idle()
    assert engine.requests["s"].status is RequestStatus.WAITING_FOR_STREAMING_REQ
    engine.add("b", LARGE, max_tokens=4, program="b", seed=1)
    engine.steps(3)
    assert (held(engine), engine.total("gate_opened", "empty")) == ([], 1)
    engine.abort("s")  # it holds its KV
    engine.run_until_idle()
    assert engine.admissions == ["s", "b"]


def test_a_turn_that_waits_for_its_grammar_is_held_as_any_other() -> None:
    engine = crowded()
    json_only = StructuredOutputsParams(json_object=True)
    request = engine.add("d", LARGE, program="d", seed=3, structured_outputs=json_only)
    assert request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert held(engine) == ["b", "c", "d"]
    assert engine.scheduler.get_request_counts() == (1, 3)
    for name in "abc":
        engine.abort(name)
    engine.steps(3)
    assert (held(engine), engine.admissions) == ([], ["a"]), "let in; its grammar is not there"
    engine.abort("d")
    engine.run_until_idle()


def test_the_users_priorities_are_above_the_gate() -> None:
    engine = gated(policy="priority")
    engine.add("a", LARGE, max_tokens=100, program="a")
    engine.steps(3)
    engine.add("b", LARGE, program="b", seed=1)
    assert held(engine) == []
    engine.run_until_idle()


def test_preempted_turns_are_not_held() -> None:
    engine = gated(num_blocks=70)
    engine.add("a", 30 * 16, max_tokens=200, program="a")
    engine.add("b", 30 * 16, max_tokens=200, program="b", seed=1)
    engine.run_until_idle()
    assert engine.num_preemptions > 0
    assert engine.total("gate_opened") == 0


def test_the_trace_says_why_it_was_let_in(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = crowded(extra_config={"trace_path": str(path)})
    engine.run_until_idle()
    engine.connector.shutdown()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    told = [each for each in records if each["event"] == "let_in"]
    assert [each["program"] for each in told] == ["job:b", "job:c"]
    assert all(each["held_s"] > 0 and each["because"] in ("fits", "empty") for each in told)


def test_answers_are_those_of_an_engine_without_a_gate() -> None:
    engine, plain = crowded(), Engine(1000, connector=None)
    engine.run_until_idle()
    for seed, name in enumerate("abc"):
        plain.add(name, prompt(LARGE, seed), max_tokens=600 if name == "a" else 4)
        plain.run_until_idle()
        assert engine.outputs[name] == plain.outputs[name]
