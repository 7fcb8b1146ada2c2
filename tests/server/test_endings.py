"""How turns end on a real server: stop strings, disconnects, n > 1, limits, resets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai

from bench.serve.server import SERVED_NAME, VllmServer
from tests.server.helpers import (
    ask,
    eventually,
    last,
    pins_live,
    read_trace,
    reset,
    text_of,
    told,
    usage,
)


def decisions(server: VllmServer, program: str) -> list[dict[str, Any]]:
    """The program's decisions so far, from the trace."""
    assert server.options.connector is not None
    records = read_trace(Path(server.options.connector["trace_path"]))
    return [r for r in records if r["event"] == "decision" and r.get("program") == program]


def go_away(server: VllmServer, program: str, more: str = "", **fields: Any) -> dict[str, Any]:
    """Stream a long answer, leave after its first words; what was decided of the turn. `more`: what
    its prompt has behind that of the program's first turn."""
    known = len(decisions(server, f"job:{program}"))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with client.completions.create(
        model=SERVED_NAME,
        prompt=text_of(120, program) + more,
        max_tokens=2000,
        temperature=0,
        stream=True,
        extra_body={"job_id": program},
        **fields,
    ) as stream:
        next(iter(stream))
    return eventually(lambda: decisions(server, f"job:{program}")[known:])[0]


def aborted(decision: dict[str, Any]) -> dict[str, Any] | None:
    return decision if decision["aborted"] else None


def test_a_client_that_goes_away_in_mid_stream_leaves_no_pin(agents: VllmServer) -> None:
    reset(agents)
    # On a busy machine the answer may be over before the server notices that its client is gone.
    decision = eventually(lambda: aborted(go_away(agents, "goes-away")))
    assert decision["decision"] == "free"
    eventually(lambda: pins_live(agents) == 0 and usage(agents) == 0)


def test_a_client_that_goes_on_after_an_interrupted_answer_has_the_next_one_pinned(
    agents: VllmServer,
) -> None:
    reset(agents)
    eventually(lambda: aborted(go_away(agents, "interrupts")))
    decision = go_away(agents, "interrupts", " " + text_of(40, "and then"))
    assert (decision["decision"], decision["aborted"]) == ("pin", False)
    eventually(lambda: pins_live(agents) == 1)


def test_a_stop_string_ends_a_turn_and_pins_it(agents: VllmServer) -> None:
    reset(agents)
    prompt = text_of(120, "stop")
    whole = ask(agents, "completions", [prompt], 40, **last())["choices"][0]["text"]
    stop = " " + whole.split()[20]
    answer = ask(agents, "completions", [prompt], 40, job_id="stops", stop=[stop])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == whole[: whole.index(stop)]
    (decision,) = eventually(lambda: decisions(agents, "job:stops"))
    assert (decision["decision"], decision["aborted"]) == ("pin", False)
    eventually(lambda: pins_live(agents) == 1)


def test_a_stop_string_is_told_from_a_disconnect_once_the_tokenizer_is_loaded(
    agents: VllmServer,
) -> None:
    reset(agents)
    # Loaded in the background since the first request with stop strings: until then such a
    # turn counts as ended.
    eventually(lambda: aborted(go_away(agents, "unsaid", stop=["never said"])))
    reset(agents)
    prompt = text_of(120, "stop again")
    whole = ask(agents, "completions", [prompt], 40, **last())["choices"][0]["text"]
    stop = " " + whole.split()[30]
    ask(agents, "completions", [prompt], 40, job_id="stops-again", stop=[stop])
    (decision,) = eventually(lambda: decisions(agents, "job:stops-again"))
    assert (decision["decision"], decision["aborted"]) == ("pin", False)
    eventually(lambda: pins_live(agents) == 1)


def test_two_answers_to_one_prompt_leave_a_pin_each(agents: VllmServer) -> None:
    """Nobody knows from which of them the client goes on; the prompt's blocks are held once."""
    reset(agents)
    superseded = agents.metric("continuum:pins_ended_total", cause="superseded")
    prompt = text_of(120, "n")
    body = {"n": 2, "temperature": 1.0, "seed": 5, "job_id": "twice"}
    answer = ask(agents, "completions", [prompt], 40, **body)
    assert len(answer["choices"]) == 2
    eventually(lambda: len(decisions(agents, "job:twice")) == 2 and pins_live(agents) == 2)
    assert {d["decision"] for d in decisions(agents, "job:twice")} == {"pin"}
    assert agents.metric("continuum:pins_ended_total", cause="superseded") == superseded


def test_an_answer_cut_off_by_max_tokens_is_pinned(agents: VllmServer) -> None:
    reset(agents)
    answer = ask(agents, "completions", [text_of(120, "cut")], 5, job_id="cut")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert told(answer)["decision"] == "pin"
    eventually(lambda: pins_live(agents) == 1)


def test_resetting_the_prefix_cache_succeeds_and_ends_live_pins(agents: VllmServer) -> None:
    reset(agents)
    ended = agents.metric("continuum:pins_ended_total", cause="reset")
    for i in range(3):
        ask(agents, "completions", [text_of(120, f"reset {i}")], job_id=f"reset-{i}")
    eventually(lambda: pins_live(agents) == 3)
    assert agents.post("/reset_prefix_cache") == {"success": True}
    eventually(lambda: pins_live(agents) == 0 and usage(agents) == 0)
    assert agents.metric("continuum:pins_ended_total", cause="reset") == ended + 3
    # What was reset is gone from both tiers.
    again = ask(agents, "completions", [text_of(120, "reset 0")], job_id="reset-0")
    assert told(again)["cached_tokens"] == {"vram": 0, "dram": 0}
