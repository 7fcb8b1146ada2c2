"""Receipts over HTTP: what clients of other APIs wish for, and what the server says to it."""

from __future__ import annotations

from typing import Any

import pytest

from bench.serve.server import VllmServer
from tests.server.helpers import ask, eventually, reset, text_of, told

HOUR = {"type": "ephemeral", "ttl": "1h"}
SYSTEM = [{"type": "text", "text": "You help.", "cache_control": HOUR}]

# name: (API, fields of the body, seconds kept)
WISHES: dict[str, tuple[str, dict[str, Any], float]] = {
    "anthropic": ("messages", {"system": SYSTEM}, 3600.0),
    "openai-chat": ("chat", {"prompt_cache_retention": "24h"}, 86_400.0),
    "openai-responses": ("responses", {"prompt_cache_retention": "in_memory"}, 300.0),
}


def receipts(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {receipt["hint"]: receipt for receipt in told(answer).get("hints", [])}


def hints(server: VllmServer, outcome: str) -> float:
    return server.metric("continuum:hints_total", outcome=outcome)


@pytest.mark.parametrize("client", WISHES)
def test_a_wish_in_the_words_of_another_api_is_answered(agents: VllmServer, client: str) -> None:
    api, fields, keep_s = WISHES[client]
    reset(agents)
    known = hints(agents, "accepted")
    answer = ask(agents, api, [text_of(100, client)], job_id=client, **fields)
    kept = {"hint": "keep_s", "outcome": "accepted", "until_s": keep_s}
    assert receipts(answer) == {"keep_s": kept}
    eventually(lambda: hints(agents, "accepted") == known + 1)


def test_every_hint_has_its_receipt(agents: VllmServer) -> None:
    said = {
        "program": "told",
        "ttl_s": 9_000,
        "tools": ["pytest"],
        "parent": "above",
        "keep_s": "soon",
    }
    params = {"continuum": said}
    answer = ask(agents, "chat", [text_of(100, "told")], kv_transfer_params=params)
    assert receipts(answer) == {
        "tools": {"hint": "tools", "outcome": "accepted", "value": ["pytest"]},
        "parent": {"hint": "parent", "outcome": "accepted", "value": "above"},
        "ttl_s": {
            "hint": "ttl_s",
            "outcome": "clipped",
            "until_s": 60.0,
            "why": "no pin lives longer than max_ttl_s = 60",
        },
        "keep_s": {
            "hint": "keep_s",
            "outcome": "refused",
            "why": "not understood, so it has no effect",
        },
    }
