"""What makes KV wrong or unwanted, empties both tiers: resets, sleep, pauses, other weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.serve.server import SERVED_NAME, VllmServer
from bench.serve.tiny_model import LLAMA, make_model
from tests.server.helpers import (
    dram_hits,
    eventually,
    in_flight,
    pins_live,
    reset,
    tokens_of,
    told,
    usage,
)

MAX_TOKENS = 16


def complete(server: VllmServer, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    answer = server.post("/v1/completions", {**body, "return_token_ids": True, **fields})
    assert isinstance(answer, dict)
    return answer


def ids(answer: dict[str, Any]) -> list[int]:
    found = answer["choices"][0]["token_ids"]
    assert len(found) == MAX_TOKENS
    return list(found)


def filled(server: VllmServer, name: str) -> list[int]:
    """A program whose finished turn is pinned in VRAM and stored in DRAM; its next prompt."""
    reset(server)
    prompt = tokens_of(400, name)
    answer = complete(server, prompt, vllm_xargs={"job_id": name})
    assert told(answer)["decision"] == "pin"
    eventually(lambda: in_flight(server) == 0 and stored(server) > 0)
    assert pins_live(server) == 1
    return prompt + ids(answer) + tokens_of(30, f"{name} tool")


def stored(server: VllmServer) -> float:
    return server.metric("continuum:dram_blocks", state="ready")


def next_turn(server: VllmServer, prompt: list[int], name: str) -> tuple[list[int], dict[str, int]]:
    """The answer, and what was cached of its prompt by tier; both compared with a cold cache."""
    answer = complete(server, prompt, vllm_xargs={"job_id": name})
    cold = complete(server, prompt, cache_salt=f"{name} cold")
    assert ids(answer) == ids(cold)
    return ids(answer), told(answer)["cached_tokens"]


EMPTYING: dict[str, tuple[str, ...]] = {
    "reset": ("/reset_prefix_cache",),
    "reset-external": ("/reset_prefix_cache?reset_external=true",),
    "reset-running": ("/reset_prefix_cache?reset_running_requests=true&reset_external=true",),
    "sleep-1": ("/sleep?level=1", "/wake_up"),
    "sleep-2": ("/sleep?level=2", "/wake_up"),
    "sleep-wait": ("/sleep?level=1&mode=wait", "/wake_up"),
    "pause": ("/pause", "/resume"),
    "pause-wait": ("/pause?mode=wait", "/resume"),
}


@pytest.mark.parametrize("name", EMPTYING)
def test_both_tiers_are_empty_afterwards(agents: VllmServer, name: str) -> None:
    prompt = filled(agents, name)
    ended = agents.metric("continuum:pins_ended_total", cause="reset")
    for path in EMPTYING[name]:
        answer = agents.post(path)
        assert not isinstance(answer, dict) or answer.get("success", True), answer
    eventually(lambda: stored(agents) == 0 and pins_live(agents) == 0)
    assert usage(agents) == 0
    assert agents.metric("continuum:pins_ended_total", cause="reset") == ended + 1
    _, cached = next_turn(agents, prompt, name)
    assert cached == {"vram": 0, "dram": 0}


KEEPING: dict[str, tuple[str, ...]] = {
    "sleep-0": ("/sleep?level=0", "/wake_up?tags=scheduling"),
    "pause-keeping": ("/pause?clear_cache=false", "/resume"),
}


@pytest.mark.parametrize("name", KEEPING)
def test_a_pause_that_keeps_caches_keeps_ours(agents: VllmServer, name: str) -> None:
    prompt = filled(agents, name)
    for path in KEEPING[name]:
        agents.post(path)
    assert pins_live(agents) == 1
    assert stored(agents) > 0
    _, cached = next_turn(agents, prompt, name)
    assert cached == {"vram": 415 // 32 * 32, "dram": 0}


def test_a_pin_whose_time_comes_while_the_server_is_paused_ends(agents: VllmServer) -> None:
    reset(agents)
    said = {"program": "short", "ttl_s": 1.0}
    params = {"kv_transfer_params": {"continuum": said}}
    complete(agents, tokens_of(200, "short"), **params)
    eventually(lambda: pins_live(agents) == 1)
    agents.post("/pause?clear_cache=false")
    try:
        eventually(lambda: pins_live(agents) == 0)
    finally:
        agents.post("/resume")


@pytest.fixture(scope="module")
def other_weights() -> Path:
    """The same shape with other numbers."""
    return make_model(replace(LLAMA, seed=LLAMA.seed + 1))


def load_weights(server: VllmServer, model: Path) -> None:
    kwargs = {"weights_path": str(model)}
    server.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})


def test_after_new_weights_nothing_of_the_old_is_read(
    agents: VllmServer, other_weights: Path, tiny_model: Path
) -> None:
    """As docs/switch-off.md says: pause, load, resume."""
    prompt = filled(agents, "weights")
    old = ids(complete(agents, prompt, cache_salt="old"))
    known = dram_hits(agents)
    try:
        agents.post("/pause")
        load_weights(agents, other_weights)
        agents.post("/resume")
        new, cached = next_turn(agents, prompt, "weights")
    finally:
        load_weights(agents, tiny_model)
        reset(agents)
    assert new != old
    assert cached == {"vram": 0, "dram": 0}
    assert dram_hits(agents) == known
    assert ids(complete(agents, prompt, cache_salt="old again")) == old


@pytest.mark.parametrize("empties", [EMPTYING["reset"], EMPTYING["sleep-wait"]])
def test_copies_under_way_do_no_harm(agents: VllmServer, empties: tuple[str, ...]) -> None:
    """Turn after turn is emptied away while its store may still be under way."""
    reset(agents)
    for number in range(6):
        prompt = tokens_of(600, f"under way {number}")
        answer = complete(agents, prompt, vllm_xargs={"job_id": f"way-{number}"})
        for path in empties:
            agents.post(path)
        further = prompt + ids(answer) + tokens_of(20, number)
        next_turn(agents, further, f"way-{number}")
    empty: Callable[[], bool] = lambda: in_flight(agents) == 0  # noqa: E731
    eventually(empty)
