"""Pins on a real server, seen from outside: VRAM usage, time and CPU."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from bench.serve.server import SERVED_NAME, VllmServer
from tests.server.helpers import (
    BLOCK,
    ask,
    eventually,
    pids_of,
    pins_live,
    read_trace,
    reset,
    text_of,
    usage,
)

# As in the execution note, section 4: words of each tool's result, tokens of each answer.
TOOL_WORDS = (0, 66, 230, 164, 156)
ANSWER_TOKENS = (14, 18, 24, 16, 14)
POLLS = 6


@dataclass
class Row:
    """What one turn left behind."""

    turn: int
    last: bool
    prompt: int
    output: int
    expected: int  # blocks: every full one whose KV was computed
    before: float
    after: float
    gap: list[float]


def show(rows: list[Row], num_blocks: int) -> None:
    """Print the trace; `pytest -s` shows it."""
    print(f"\n\nKV cache usage over five turns ({num_blocks} blocks of {BLOCK} tokens)")
    print("turn  last  prompt  output  blocks  usage before -> after      in the gap")
    for r in rows:
        gap = " ".join(f"{u:.6f}" for u in sorted(set(r.gap)))
        print(
            f"{r.turn:4}  {'yes' if r.last else 'no':4}  {r.prompt:6}  {r.output:6}  "
            f"{r.expected:6}  {r.before:.6f} -> {r.after:.6f}  {r.after - r.before:+.6f}  "
            f"{len(r.gap)} x {gap}"
        )


def test_usage_follows_the_pins_of_five_turns_and_ends_at_zero(agents: VllmServer) -> None:
    reset(agents)
    num_blocks = agents.options.num_blocks - 1  # one is vLLM's null block
    client = openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0)
    started = agents.metric("continuum:pins_started_total")
    returned = agents.metric("continuum:pins_ended_total", cause="returned")
    messages = [{"role": "system", "content": text_of(25, "system")}]
    messages.append({"role": "user", "content": text_of(40, "task")})
    rows: list[Row] = []
    for i, (num_words, max_tokens) in enumerate(zip(TOOL_WORDS, ANSWER_TOKENS, strict=True)):
        if num_words:
            messages.append({"role": "tool", "content": text_of(num_words, f"tool {i}")})
        last = i == len(TOOL_WORDS) - 1
        before = usage(agents)
        answer = client.chat.completions.create(
            model=SERVED_NAME,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"job_id": "pin-trace", "is_last_step": last},
        )
        assert answer.usage is not None
        prompt, output = answer.usage.prompt_tokens, answer.usage.completion_tokens
        # The last answered token has no KV yet; a block is kept when it is full.
        expected = 0 if last else (prompt + output - 1) // BLOCK
        share = pytest.approx(expected / num_blocks, abs=1e-9)
        eventually(lambda share=share: usage(agents) == share)
        gap = []
        for _ in range(POLLS):
            gap.append(usage(agents))
            time.sleep(0.05)
        rows.append(Row(i + 1, last, prompt, output, expected, before, usage(agents), gap))
        assert gap == [share] * POLLS
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    show(rows, num_blocks)
    kept = [row.expected for row in rows[:-1]]
    assert kept == sorted(set(kept)), "usage rises with every turn"
    assert agents.metric("continuum:pins_started_total") == started + 4
    assert agents.metric("continuum:pins_ended_total", cause="returned") == returned + 4


def test_the_next_turn_within_the_ttl_hits_all_that_was_pinned(agents: VllmServer) -> None:
    reset(agents)
    history = [text_of(300, "hit")]
    answer = ask(agents, "completions", history, 40, job_id="hit")
    history += [answer["choices"][0]["text"], text_of(20, "hit tool")]
    again = ask(agents, "completions", history, 8, job_id="hit", is_last_step=True)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (339 // BLOCK) * BLOCK
    assert again["kv_transfer_params"]["continuum"] == {
        "program": "job:hit",
        "turn": 2,
        "decision": "free",
        "ttl_s": 0.0,
        "cached_tokens": {"vram": (339 // BLOCK) * BLOCK, "dram": 0},
        "against_stock": {"only_ours": 0, "stock_too": (339 // BLOCK) * BLOCK, "only_stock": 0},
        "hints": [{"hint": "final", "outcome": "accepted", "value": True}],
    }


def test_a_pin_expires_by_itself_while_the_engine_is_idle(agents: VllmServer) -> None:
    """Promised to 50 ms, which a busy machine may miss. Asked of the trace, because the pin may be
    over before anybody else sees it."""
    reset(agents)
    ttl_s = 1.0
    asked = {"continuum": {"program": "expires", "ttl_s": ttl_s}}
    ask(agents, "completions", [text_of(100, "expire")], kv_transfer_params=asked)
    ends = eventually(lambda: pin_ends(agents, "expires"))  # no request meanwhile
    assert [(end["cause"], end["blocks"]) for end in ends] == [("expired", 103 // BLOCK)]
    held_s = ends[0]["held_s"]
    print(f"\npinned for {ttl_s:g} s, held for {held_s:.3f} s")
    assert ttl_s <= held_s
    eventually(lambda: pins_live(agents) == 0 and usage(agents) == 0)


def pin_ends(server: VllmServer, program: str) -> list[dict]:  # type: ignore[type-arg]
    assert server.options.connector is not None
    records = read_trace(Path(server.options.connector["trace_path"]))
    return [r for r in records if r["event"] == "pin_end" and r["program"] == program]


def test_a_pin_costs_no_cpu_while_the_engine_is_idle(agents: VllmServer) -> None:
    reset(agents)
    ask(agents, "completions", [text_of(100, "idle")], job_id="idle")
    eventually(lambda: pins_live(agents) == 1 and in_flight_is_over(agents))
    (engine,) = pids_of(agents, "EngineCore")
    began, used = time.monotonic(), cpu_seconds(engine)
    time.sleep(1.5)  # the span that is measured
    share = (cpu_seconds(engine) - used) / (time.monotonic() - began)
    print(f"\nEngineCore used {share:.1%} of a core with a live pin")
    assert pins_live(agents) == 1
    assert share < 0.05


def in_flight_is_over(server: VllmServer) -> bool:
    return server.metric("continuum:transfers_in_flight") == 0


def cpu_seconds(pid: int) -> float:
    """CPU time a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
