"""Hints of any JSON type and size, in every field we read, through vLLM's own Scheduler: each is
understood or ignored, and costs a turn no more than a bound. tests/server/test_bad_hints.py is
the same over HTTP."""

from __future__ import annotations

import json
import math
import pickle
import sys
from functools import cache
from inspect import signature
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import Request

from continuum_connector.programs.identify import MAX_ID_CHARS, MAX_TOOLS
from continuum_connector.programs.program import MAX_KEY_CHARS
from tests.vllm.agents import AgentEngine

IN_CONTINUUM = ["program", "parent", "source", "final", "ttl_s", "keep_s", "tools", "compaction"]
IN_AGENT_HINT = [
    *("trajectory_id", "session_id", "parent_trajectory_id", "parent_session_id", "final"),
    *("expected_resume", "ttl_s", "tools", "lease_until", "kv_priority"),
]
IN_XARGS = ["job_id", "program_id", "session_id", "is_last_step", "this_func_call"]

BIG: list[Any] = [
    *("x" * 100_000, "x" * MAX_ID_CHARS, "\n" * MAX_ID_CHARS, "\U0001f600" * 60_000, "\x00\x1b[2J"),
    *("\ud800", "a\udfffb", "\u202e" * 300, 1e308, -0.0, math.nan, math.inf, 2**64 - 1, -(2**63)),
    *(["t" * 1_000] * 1_000, list(range(1_000)), [[]] * 1_000, [None] * 100_000, [{}] * 1_000),
    *({f"k{i}": i for i in range(1_000)}, {"continuum": {"program": "p"}}, "anonymous:1", "vendor"),
]
INTEGERS = st.integers(-(2**63), 2**64 - 1)  # vLLM itself refuses those of more than 64 bits
JUNK = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text() | st.sampled_from(BIG),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def fields(names: list[str]) -> Any:
    return st.dictionaries(st.sampled_from(names), JUNK, max_size=5)


PARAMS = JUNK | st.fixed_dictionaries(
    {},
    optional={
        "continuum": fields(IN_CONTINUUM) | JUNK,
        "agent_hint": fields(IN_AGENT_HINT) | JUNK,
    },
)
XARGS = fields(IN_XARGS)
SALTS = st.none() | st.sampled_from(["s", "s" * 100_000, "\n", "\U0001f600"])


REQUEST = signature(Request).parameters  # no session_id before vLLM 0.28


@cache
def shared() -> AgentEngine:
    """One engine for all examples, since each leaves it idle."""
    return AgentEngine(200, extra_config={"max_programs": 50})


def may_pass(params: Any) -> bool:
    """Whether vLLM's own scheduler bears it: HTTP lets nothing through that is no object."""
    return isinstance(params, dict)


def one_turn(
    engine: AgentEngine,
    params: Any,
    xargs: Any = None,
    session: Any = None,
    salt: str | None = None,
) -> None:
    """Run a turn that says this; what stays of it, and what its client is told, is bounded."""
    name = f"{len(engine.requests)}"
    said = {"session_id": session, "cache_salt": salt}
    known = {field: value for field, value in said.items() if field in REQUEST}
    engine.add(name, 40, 2, extra_args=xargs, kv_transfer_params=params, **known)
    turn = engine.side.turns.get(name)
    assert 0 < len(turn.program.key) <= MAX_KEY_CHARS
    assert turn.program.key.isprintable()
    assert len(turn.identity.hints.parent or "") <= MAX_KEY_CHARS
    assert len(turn.identity.hints.tools) <= MAX_TOOLS
    assert len(pickle.dumps((turn.program, turn.identity))) < 16_384
    engine.run_until_idle()
    assert name in engine.finish_reasons
    answer = json.dumps(engine.kv_transfer_params[name], allow_nan=False)
    assert len(answer) < 16_384
    answer.encode()
    assert not engine.side.turns


@settings(max_examples=25)
@given(PARAMS.filter(may_pass), XARGS, JUNK, SALTS)
def test_no_json_in_any_field_stops_a_turn_or_outgrows_its_bounds(
    params: Any, xargs: Any, session: Any, salt: str | None
) -> None:
    one_turn(shared(), params, xargs, session, salt)


FIELDS: list[tuple[str, str]] = [
    *(("continuum", name) for name in IN_CONTINUUM),
    *(("agent_hint", name) for name in IN_AGENT_HINT),
    *(("xargs", name) for name in IN_XARGS),
]


@pytest.mark.parametrize("junk", BIG, ids=range(len(BIG)))
def test_each_field_bears_the_worst_there_is(junk: Any) -> None:
    for place, name in FIELDS:
        said = {name: junk}
        one_turn(shared(), None if place == "xargs" else {place: said}, said, junk)
    one_turn(shared(), {"continuum": junk, "agent_hint": junk}, None, junk)


def arrival_calls(engine: AgentEngine, *said: Any) -> int:
    """How many functions, Python's own among them, the scheduler calls as a turn arrives."""
    num = 0
    plain = engine.scheduler.add_request

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    def counted(request: Request) -> None:
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            plain(request)
        finally:
            sys.setprofile(before)

    engine.scheduler.add_request = counted
    try:
        one_turn(engine, *said)
    finally:
        engine.scheduler.add_request = plain
    return num


def test_the_longest_hints_cost_an_arrival_a_bounded_number_of_calls() -> None:
    engine = AgentEngine(200)
    one_turn(engine, None)  # whatever is done but once
    plain = arrival_calls(engine, None)
    tools = ["t" * 1_000] * 100_000
    for junk in ("x" * MAX_ID_CHARS, tools, [None] * 100_000, {"a": tools}):
        continuum, hint = dict.fromkeys(IN_CONTINUUM, junk), dict.fromkeys(IN_AGENT_HINT, junk)
        params = {"continuum": continuum, "agent_hint": hint}
        said = params, dict.fromkeys(IN_XARGS, junk), junk
        assert arrival_calls(engine, *said) < plain + 2_000
